"""``OffloadedAdamW``: a ``torch.optim.Optimizer`` whose states live in host memory."""

import gc
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import increment_version

from offload_core.bucket_terms import GATHERED, GRADIENTS, PARAMETERS
from offload_core.checkpoint import Checkpoints
from offload_core.config import FIELDS, ConfigLike, OffloadConfig
from offload_core.cpu_adam import STATE_NAMES, AdamHyper
from offload_core.errors import ConfigError, GradientError, ParameterError, StateError
from offload_core.host_memory import available_bytes
from offload_core.launch import local_processes
from offload_core.memory_plan import MemoryPlan
from offload_core.memory_report import MemoryReport
from offload_core.partition import ParamSpec
from offload_core.pipeline import Pipeline, StepReport

from .construction import check_finished, check_takes_none, shards_of
from .device_ranks import device_for
from .export import torch_state_dict
from .groups import hyper_of, loaded, number, numbers, torchs_options, without_torchs_options
from .partitioned import PartitionedModel, gathered_parameters
from .pending import can_wait, make_pending
from .slots import OWNED, Slot, let_go
from .states import (
    Hidden,
    States,
    check_entry,
    check_partition,
    hide_state,
    own_part,
    partition,
    plain_entries,
    state_views,
)
from .tensors import (
    TORCH_DTYPES,
    TakenGradient,
    bytes_as,
    cast_param,
    check_gradient,
    check_param,
    flat,
    flat_like,
    memory_of_all,
    memory_order,
    shaped_like,
    spec_of,
)


@dataclass
class Arrivals:
    """What has come of this micro-step's gradients."""

    fresh: bool = False
    """Whether one has arrived."""
    reduces: bool = False
    """Whether one has left for its owners."""

    def begin(self) -> None:
        """What comes from now on is the next micro-step's."""
        self.fresh = self.reduces = False


class OffloadedAdamW(torch.optim.Optimizer):
    """AdamW with master weights and moments in host memory, updated by a C kernel.

    The bits are those of ``torch.optim.AdamW(fused=True)`` on fp32 parameters of a multiple of 16 elements, and
    the same for any other size. The whole optimizer protocol holds: ``param_groups`` are the parameters
    themselves and are read at every step; parameters without gradient are left alone; frozen parameters get
    states when they first have a gradient. A parameter changed from outside is followed where torch notices the
    change: ``p.copy_(...)`` and the like under ``no_grad``, ``load_state_dict``, ``p.data = ...``; an in-place write
    through ``p.data`` (``p.data.mul_(...)``) is not seen and is overwritten by the next update, unless the parameter
    is its own master weight.

    ``state[p]`` holds ``step``, ``exp_avg``, ``exp_avg_sq`` and ``master`` (fp32, on the host, shaped as ``p``; among
    several ranks the rank's part of them, one-dimensional); an fp32 parameter on the CPU is its own master weight.

    Args:
        params: as any torch optimizer takes them: tensors, ``(name, tensor)`` pairs, or parameter groups.
        lr: learning rate; a one-element tensor too, or a function of the number of updates made so far. What it
            returns (and what ``betas`` does, if that is a function) is written to all ``param_groups`` before each
            update.
        config: an ``OffloadConfig``, a dict of its fields, or a DeepSpeed configuration: a dict, or a file's path.
        process_group: the ranks over which states are partitioned and gradients averaged; None: this process alone.
        model: an Engine's, which counts micro-steps, scales losses and partitions the model's parameters.
        early_copy: take each gradient during backward, as it appears, and free it on the device. ``p.grad`` then
            holds a stand-in that raises when used. Without it ``p.grad`` is read at ``step()``, so clipping and
            unscaling from outside mean what they mean to torch's own optimizers.
        overrides: fields of ``OffloadConfig`` (``betas``, ``eps``, ``weight_decay``, ``gradient_clipping``, …).

    Raises:
        ConfigError, ParameterError, StateError, HostMemoryError: before anything is changed.
    """

    # No attributes of the class: Lightning's wrapper is of this class, too, and asks the optimizer for what it lacks.
    _pipeline: Pipeline | None
    _states: Any

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor | Callable[[int], float] | None = None,
        *,
        config: ConfigLike = None,
        early_copy: bool = False,
        model: nn.Module | None = None,
        process_group: Any = None,
        **overrides: Any,
    ) -> None:
        self._pipeline = None
        overrides = without_torchs_options(overrides)
        if lr is not None:
            overrides["lr"] = number("lr", lr)
        betas = overrides.get("betas")
        if betas is not None:
            overrides["betas"] = numbers("betas", betas)
        world_size = 1 if process_group is None else dist.get_world_size(process_group)
        self.config = OffloadConfig.resolve(config, world_size=world_size, **overrides)
        if model is None:
            _refuse_engine_fields(self.config)
        self.early_copy = early_copy
        self.reads_wait = False
        """Whether an update may still be running when ``step`` returns: whoever reads a parameter then waits."""
        self.report: StepReport | None = None
        """What the last ``step`` did."""
        if isinstance(params, torch.Tensor):
            raise ParameterError("params: got a tensor, expected an iterable of tensors: write [tensor]")
        params = list(params)
        if not params:
            raise ParameterError("params: got none, expected at least one parameter; was the iterator used up already?")
        self.updates = 0
        """Updates made so far."""
        first_lr, first_betas = self.config.hyperparameters(0)
        defaults = {
            "lr": lr if isinstance(lr, torch.Tensor) else first_lr,
            "betas": tuple(betas if isinstance(betas, tuple | list) else first_betas),
            "eps": self.config.eps,
            "weight_decay": self.config.weight_decay,
            **torchs_options(self.config.adam_mode),
        }
        super().__init__(params, defaults)
        self._build(process_group, model)

    def _build(self, process_group: Any, model: nn.Module | None = None) -> None:
        """Make the pipeline and take on the trainable parameters of all groups."""
        slots: dict[torch.Tensor, Slot] = {}
        self._slots = slots
        self._states = States(self._finish, self._replace_state)
        self._hook_handles: list[Any] = []
        self._lock = threading.RLock()
        self._scaling = self._averaging = False
        self.arrivals = Arrivals()
        self.deferring = False
        """Whether gradients stay in ``p.grad`` for the time being."""
        self._forget_arrivals()
        weakref.finalize(self, let_go, self._hook_handles, slots).atexit = False
        groups = range(len(self.param_groups))
        named = [entry for g in groups for entry in self._named(g)]
        if not any(param.requires_grad for _, param, _ in named):
            raise ParameterError(
                "no parameter requires a gradient; expected at least one: unfreeze what is to be trained"
            )
        self._hypers()
        first = next(param for _, param, _ in named if param.requires_grad)
        check_finished()
        self._check_new(named, first.device)
        self._device = first.device
        op_order = self.config.op_order or "torch"
        config = replace(self.config, op_order=op_order)
        pipeline = Pipeline(config, device_for(first.device, process_group, config), None)
        self.partitioned: PartitionedModel | None = None
        """Parameters that are there in shards only."""
        if model is not None and config.takes_apart(pipeline.device.world_size):
            self.partitioned = PartitionedModel(model, first.device, process_group, pipeline)
        else:
            check_takes_none(
                [*(entry[:2] for entry in named), *(model.named_parameters() if model is not None else ())], config
            )
        trained = [entry for entry in named if entry[1].requires_grad]
        params = [param for _, param, _ in trained]
        self._take_on(pipeline, trained, model)
        if self.partitioned is not None:
            self.partitioned.keep_frozen(params)
        self._pipeline = pipeline
        self.checkpoints = Checkpoints(pipeline)

    def _finish(self) -> None:
        if self._pipeline is not None:
            self._pipeline.finish()

    def flush(self) -> None:
        """Wait until parameters and states are those of the last ``step``, also under ``schedule="delayed"``.

        That holds back the parameters of the last step; afterwards the next forward sees them a step early.
        """
        if self.partitioned is not None and self.config.schedule == "delayed":
            self.partitioned.before_change()
        self.pipeline.flush(self._tensors())

    def _tensors(self) -> list[torch.Tensor]:
        """What the pipeline reads and writes."""
        return [self._tensor(slot) for slot in self._slots.values()]

    def _tensor(self, slot: Slot) -> torch.Tensor:
        shard = self.partitioned.shard_of(slot.param) if self.partitioned is not None else None
        # Of .data: the pipeline's writes are counted once, and not when they happen.
        return flat(slot.param.data) if shard is None else shard

    @property
    def slots(self) -> list[Slot]:
        """What is known of each parameter, in the pipeline's order."""
        return list(self._slots.values())

    def replaced(self, tensors: Sequence[torch.Tensor]) -> None:
        """Master weights have been replaced: bring them to the parameters, and discard the gradients of before."""
        self.pipeline.flush(tensors)
        for slot in self._slots.values():
            slot.release()
            increment_version(slot.param)
            slot.note()
        self._forget_arrivals()

    # --- parameters --------------------------------------------------------------------------------

    @property
    def pipeline(self) -> Pipeline:
        """The core that holds the states."""
        if self._pipeline is None:
            raise StateError("this optimizer was closed; expected an open one: wrap the model anew")
        return self._pipeline

    @property
    def sent_bytes(self) -> int:
        """Bytes of gradients and parameters that this rank has sent to other ranks."""
        self._finish()
        return self.pipeline.device.sent_bytes + (self.partitioned.sent_bytes if self.partitioned is not None else 0)

    def memory_report(self, model: nn.Module | None = None) -> MemoryReport:
        """Planned and measured bytes.

        Args:
            model: the one that is trained: what the optimizer was not given of it is counted, too (frozen parameters,
                buffers).
        """
        pipeline, parted = self.pipeline, self.partitioned
        trained = [(pipeline.params[slot.index], slot.param) for slot in self._slots.values()]
        frozen = [] if parted is None else parted.frozen([param for _, param in trained])
        given = [param for group in self.param_groups for param in group["params"]]
        others = self._others(trained, frozen, [*given, *_tensors_of(model)])
        plan = self._plan(pipeline, trained, frozen, others)
        whole = [
            param for param in (*(param for _, param in trained), *others) if parted is None or param not in parted
        ]
        gradients = [slot.param.grad for slot in self._slots.values() if slot.param.grad is not slot.taken]
        held = {
            PARAMETERS: memory_of_all(whole),
            GRADIENTS: memory_of_all(gradient for gradient in gradients if gradient is not None),
        }
        if parted is not None:
            held[PARAMETERS] += parted.shard_bytes
            held[GATHERED] = parted.live.n_bytes
        rows = [row for row in plan.rows if row.where == "device"]
        return pipeline.memory_report(rows, {("device", what): n_bytes for what, n_bytes in held.items()})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As ``torch.optim.Optimizer.add_param_group``; on an error nothing has changed."""
        if not isinstance(param_group, dict):
            super().add_param_group(param_group)  # which says so
        for name in ("lr", "betas"):
            if name in param_group and callable(getattr(self.config, name)):
                raise ConfigError(
                    f"{name}={param_group[name]!r} of a parameter group, and {name} is a function, which sets that of "
                    "all groups; expected one of them (torch.optim.lr_scheduler knows groups)"
                )
        params = param_group["params"]
        if self.param_groups and "param_names" in self.param_groups[0] and not isinstance(params, torch.Tensor | set):
            params = list(params)  # torch wants names for all or for none
            if params and isinstance(params[0], torch.Tensor):
                g = len(self.param_groups)
                params = [(f"group {g}, parameter {i}", param) for i, param in enumerate(params)]
            param_group = {**param_group, "params": params}
        super().add_param_group(param_group)
        if self._pipeline is None:  # called by Optimizer.__init__: _build takes all groups on at once
            return
        try:
            self._hypers()
            named = self._named(len(self.param_groups) - 1)
            self._check_new(named, self._device)
            self._take_on(self._pipeline, [entry for entry in named if entry[1].requires_grad])
        except Exception:
            self.param_groups.pop()
            raise

    def _named(self, g: int) -> list[tuple[str, torch.Tensor, int]]:
        group = self.param_groups[g]
        names = group.get("param_names") or [f"group {g}, parameter {i}" for i in range(len(group["params"]))]
        entries: dict[torch.Tensor, tuple[str, torch.Tensor, int]] = {}
        for name, param in zip(names, group["params"], strict=True):
            entries.setdefault(param, (name, param, g))  # one that is there twice, of which torch warns, is one
        return [*entries.values()]

    def _check_new(self, named: Sequence[tuple[str, torch.Tensor, int]], device: torch.device) -> None:
        for name, param, _ in named:
            if not param.requires_grad:
                if not (param.is_floating_point() or param.is_complex()):
                    raise ParameterError(
                        f"parameter {name!r} has dtype {param.dtype} and cannot train; expected a float32, bfloat16 or "
                        "float16 one: leave it out"
                    )
                continue  # checked when it is unfrozen
            check_param(name, param)
            if param.device != device:
                raise ParameterError(
                    f"parameter {name!r} is on {param.device}, others are on {device}; expected one device a process"
                )
            if id(param) in OWNED and param not in self._slots:
                gc.collect()  # a trainer that is gone may have kept the optimizer in a cycle
            if id(param) in OWNED and param not in self._slots:
                raise StateError(
                    f"parameter {name!r} already belongs to another OffloadedAdamW (was the model wrapped twice?); "
                    "expected one owner: use the first one, or end it with .close()"
                )

    def _take_on(
        self, pipeline: Pipeline, named: Sequence[tuple[str, torch.Tensor, int]], model: nn.Module | None = None
    ) -> None:
        """Allocate states for these parameters; cast them to ``param_dtype``.

        Args:
            model: what else of it takes memory is part of the plan.
        """
        for name, param, _ in named:
            check_param(name, param)
        target = self.config.target_dtype
        parted = self.partitioned
        specs = [spec_of(name, p, g, target, parted is not None and parted.takes(p)) for name, p, g in named]
        frozen = parted.frozen([p for _, p, _ in named]) if parted is not None and model is not None else []
        trained = [(spec, p) for spec, (_, p, _) in zip(specs, named, strict=True)]
        plan = self._plan(pipeline, trained, frozen, self._others(trained, frozen, _tensors_of(model)))
        device = pipeline.device
        processes = min(local_processes(), device.world_size)
        plan.check(available_bytes(), device.free_bytes(), processes=processes)
        first = len(pipeline.params)
        cut = parted.cut(trained) if parted else {}
        tensors = [cut[p].shard if p in cut else flat(p) for _, p, _ in named]
        pipeline.add_parameters(specs, tensors, frozen=[spec for spec, _ in frozen])
        if parted is not None:
            parted.keep_shards(cut.values())
        for i, (name, param, _) in enumerate(named):
            if specs[i].partitioned:
                assert parted is not None
                parted.train(param, first + i)
            elif target is not None:
                cast_param(param, TORCH_DTYPES[target])
            slot = Slot(
                name,
                param,
                first + i,
                TakenGradient(param, name),
                memory_order(param),
                partitioned=specs[i].partitioned,
            )
            slot.note()
            self._slots[param] = slot
            OWNED[id(param)] = slot
            self.state.hold(param, state_views(pipeline, slot.index, slot.param))
            if self.early_copy:
                self._hook(slot)

    def _others(
        self,
        trained: Sequence[tuple[ParamSpec, torch.Tensor]],
        frozen: Sequence[tuple[ParamSpec, torch.Tensor]],
        tensors: Iterable[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Those of ``tensors`` on the device that are neither trained nor partitioned, each once."""
        known = {id(param) for _, param in (*trained, *frozen)}
        return list({id(t): t for t in tensors if id(t) not in known and t.device == self._device}.values())

    def _plan(
        self,
        pipeline: Pipeline,
        trained: Sequence[tuple[ParamSpec, torch.Tensor]],
        frozen: Sequence[tuple[ParamSpec, torch.Tensor]],
        others: Sequence[torch.Tensor],
    ) -> MemoryPlan:
        params = [param for _, param in trained]
        plan = pipeline.terms.plan(
            [spec for spec, _ in trained],
            frozen=[spec for spec, _ in frozen],
            besides=sum(bytes_as(tensor, self.config.target_dtype) for tensor in others),
            gradients_stay=not self.early_copy,
        )
        rows = [] if self.partitioned is None else [self.partitioned.plan_cut(trained)]
        whole = [*params, *(param for _, param in frozen), *others]
        shards = [built.values for built in map(shards_of, whole) if built is not None]
        held = memory_of_all(tensor for tensor in (*whole, *shards) if tensor.device == self._device)
        return replace(plan, rows=(*plan.rows, *rows), held=held)

    def close(self) -> None:
        """Let the parameters go: remove the hooks, discard gradients on the host, free the states."""
        if self._pipeline is not None:
            self.checkpoints.wait()
            self.flush()
        if self.partitioned is not None:
            self.partitioned.close()
        let_go(self._hook_handles, self._slots)
        self.partitioned = None
        self._forget_arrivals()
        self._pipeline = None
        self.state = defaultdict(dict)

    # --- gradients ---------------------------------------------------------------------------------

    def _hook(self, slot: Slot) -> None:
        """Take the parameter's gradient as soon as it is complete in each backward.

        The first one is in ``p.grad`` then and makes way for the stand-in; autograd adds the next ones to the stand-in,
        which passes them on.
        """
        this, param = weakref.ref(self), slot.param

        def accumulated(param: torch.Tensor) -> None:
            optimizer = this()
            if optimizer is not None and param.grad is not slot.taken:
                optimizer._arrived(slot, param.grad, first=True)
            elif slot.taken.requires_grad:  # create_graph=True has hung its graph on the stand-in: take another
                slot.taken.when_added(None)
                slot.taken = TakenGradient(param, slot.name)
                slot.taken.when_added(added)
                param.grad = slot.taken

        def added(gradient: torch.Tensor) -> None:
            optimizer = this()
            if optimizer is not None and optimizer.deferring:
                slot.deferred = param.grad = gradient.clone()
            elif optimizer is not None:
                optimizer._arrived(slot, gradient, first=False)

        slot.taken.when_added(added)
        frozen = not slot.param.requires_grad
        if frozen:  # torch hangs hooks on what requires a gradient only; they stay
            slot.param.requires_grad_(True)
        self._hook_handles.append(slot.param.register_post_accumulate_grad_hook(accumulated))
        if frozen:
            slot.param.requires_grad_(False)

    @torch._disable_dynamo
    def _arrived(self, slot: Slot, gradient: torch.Tensor | None, *, first: bool) -> None:
        assert gradient is not None
        check_gradient(slot.name, slot.param, gradient)
        if (slot.param.dtype, slot.param.device) != (slot.taken.dtype, slot.taken.device):
            self._check_unchanged()
        with self._lock:
            if self.pipeline.scaler is not None and not self._scaling:
                raise GradientError(
                    f"parameter {slot.name!r}: gradient of a plain loss.backward() under loss scaling, which would be "
                    "unscaled without having been scaled; expected engine.backward(loss)"
                )
            if first and not slot.continues(gradient):  # what came before was discarded or replaced by hand
                self._drop([slot])
            if self.deferring:
                slot.deferred, self.arrivals.fresh = gradient, True
            else:
                self._take(slot, gradient)
            slot.arrived += 1
            slot.averaged += self._averaging

    def _drop(self, slots: Sequence[Slot]) -> None:
        self.pipeline.drop_gradients([slot.index for slot in slots])
        for slot in slots:
            slot.forget()

    def _take(self, slot: Slot, gradient: torch.Tensor) -> None:
        self.pipeline.add_gradient(slot.index, flat_like(gradient, slot.param))
        slot.param.grad = slot.taken
        slot.deferred = None
        self.arrivals.fresh = self.arrivals.reduces = True

    def _forget_arrivals(self) -> None:
        self.arrivals.begin()
        for slot in self._slots.values():
            slot.forget()

    @property
    def averaged(self) -> bool:
        """Whether gradients of ``scaled_backward`` wait for the update."""
        return any(slot.averaged for slot in self._slots.values())

    @property
    def mixed(self) -> bool:
        """Whether others wait, too."""
        return self.averaged and any(slot.averaged != slot.arrived for slot in self._slots.values())

    @contextmanager
    def scaled_backward(self, *, average: bool = True) -> Iterator[float | None]:
        """Accept gradients of a loss multiplied by the yielded loss scale (None: no loss scaling).

        Args:
            average: whether they are to be averaged over the accumulation steps, or summed.
        """
        self._scaling, self._averaging = True, average
        try:
            yield None if self.pipeline.scaler is None else self.pipeline.scaler.scale
        finally:
            self._scaling = self._averaging = False

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``torch.optim.Optimizer.zero_grad``; gradients on the host are discarded too."""
        self.pipeline.drop_gradients()
        self.pipeline.withdraw()
        for slot in self._slots.values():
            slot.release()
        self._forget_arrivals()
        super().zero_grad(set_to_none)

    # --- step --------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; ``report`` then says what was done.

        Raises:
            ParameterError, GradientError, ConfigError: something does not fit; no parameter and no state changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self.report = self._update()
        return loss

    def prepare(self, *, boundary: bool = True) -> list[AdamHyper]:
        """Check everything that ``step`` needs, and take the gradients that are in ``p.grad``.

        Deferred ones are taken at the boundary only.

        Raises as ``step`` does; nothing has changed then.
        """
        pipeline, hypers = self.pipeline, self._hypers()
        if boundary:
            if self.partitioned is not None:
                self.partitioned.check_closed()
            pipeline.check_expected(hypers, divisor=self._divisor, groups=self._groups())
        self.take_on_unfrozen(with_gradient=self.pipeline.device.world_size == 1)  # among ranks, one may have it
        self._check_unchanged()
        trained = {param for group in self.param_groups for param in group["params"]}
        present = [
            (slot, slot.param.grad if slot.param in trained else None)
            for slot in self._slots.values()
            if (slot.param.grad is not slot.taken or slot.param not in trained)
            and (boundary or not slot.continues(slot.param.grad))
        ]
        for slot, gradient in present:
            if gradient is not None:
                check_gradient(slot.name, slot.param, gradient)
        # p.grad says what counts: none, or another
        self._drop([slot for slot, gradient in present if not slot.continues(gradient)])
        for slot, gradient in present:
            if gradient is not None:
                if self.early_copy:
                    self._take(slot, gradient)
                else:
                    pipeline.add_gradient(slot.index, flat_like(gradient, slot.param))
        return hypers

    @property
    def _divisor(self) -> float:
        """What the gradients that wait are divided by."""
        return float(self.config.gradient_accumulation_steps) if self.averaged else 1.0

    def expect_step(self, *, average: bool = True) -> None:
        """Announce that ``step`` follows the backward that now begins: it may write to parameters.

        Autograd then raises where it would read one that was written, and whoever else reads it waits.
        """
        slots, pipeline, lock = list(self._slots.values()), self.pipeline, self._lock
        if not all(can_wait(slot.param) for slot in slots):
            return

        def emitted(params: Iterable[int]) -> None:
            for slot in (slots[param] for param in params):
                increment_version(slot.param)
                slot.note()
                make_pending(slot.param, partial(_await, lock, pipeline, slot.index))

        tensors = self.current_tensors()
        divisor = float(self.config.gradient_accumulation_steps) if average else 1.0
        pipeline.expect_step(self._hypers(), tensors, divisor=divisor, groups=self._groups(), emitted=emitted)

    def current_tensors(self) -> list[torch.Tensor]:
        """All parameters' memory, as the pipeline takes it; what was changed there from outside is in the masters, too.

        It is that of ``.data``: the pipeline's writes are counted once, and not when they happen.
        """
        with torch._C.DisableTorchFunctionSubclass():  # no read: nobody has to wait
            tensors = self._tensors()
        for slot in self._slots.values():
            if slot.changed_outside:
                self.pipeline.adopt(slot.index, tensors[slot.index])
                slot.note()
        return tensors

    @torch._disable_dynamo
    def _update(self) -> StepReport:
        pipeline, hypers = self.pipeline, self.prepare()
        gathered = 0 if self.partitioned is None else self.partitioned.before_change()
        tensors = self.current_tensors()
        try:
            report = pipeline.step(hypers, tensors, divisor=self._divisor, groups=self._groups(), gathered=gathered)
            report = replace(report, step=self.updates + 1)
            if not self.reads_wait:
                pipeline.finish()
        except BaseException:
            pipeline.drop_gradients()
            if self.partitioned is not None:
                self.partitioned.live.forget_order()
            raise
        finally:
            for slot in self._slots.values():
                slot.release()
            self._forget_arrivals()
        self.updates += report.updated
        written = [slot for slot in self._slots.values() if slot.index in pipeline.published]
        for slot in written:
            increment_version(slot.param)  # autograd must know, as after any in-place update
        for slot in self._slots.values():
            slot.note()
        if not pipeline.finished:
            for slot in written:
                if not slot.partitioned:
                    make_pending(slot.param, partial(_await, self._lock, pipeline, slot.index))
        return report

    def _groups(self) -> list[int]:
        """The parameter group of each slot, as ``param_groups`` has it now."""
        group_of = {param: g for g, group in enumerate(self.param_groups) for param in group["params"]}
        return [group_of.get(slot.param, 0) for slot in self._slots.values()]

    def _hypers(self) -> list[AdamHyper]:
        hypers = []
        scheduled = self._scheduled()
        for g, group in enumerate(self.param_groups):
            group.update(scheduled)
            hypers.append(hyper_of(g, group))
        return hypers

    def _scheduled(self) -> dict[str, Any]:
        """The next update's values of what is a function of their number."""
        lr, betas = self.config.hyperparameters(self.updates)
        scheduled: dict[str, Any] = {"lr": lr} if callable(self.config.lr) else {}
        return scheduled | {"betas": betas} if callable(self.config.betas) else scheduled

    def take_on_unfrozen(self, *, with_gradient: bool = False) -> None:
        """Make states for parameters that were frozen and can have a gradient now, or have one."""
        unknown = [
            entry
            for g in range(len(self.param_groups))
            for entry in self._named(g)
            if entry[1] not in self._slots and (entry[1].grad is not None if with_gradient else entry[1].requires_grad)
        ]
        if unknown:
            self._check_new(unknown, self._device)
            self._take_on(self.pipeline, unknown)

    def _check_unchanged(self) -> None:
        for slot in self._slots.values():
            spec, param = self.pipeline.params[slot.index], slot.param
            got = (param.numel(), param.dtype, param.device)
            expected = (spec.numel, TORCH_DTYPES[spec.dtype], self._device)
            if got != expected or param.shape != slot.taken.shape or memory_order(param) != slot.order:
                raise ParameterError(
                    f"parameter {slot.name!r} is {tuple(param.shape)} {param.dtype} on {param.device}, strides "
                    f"{param.stride()}, and was {tuple(slot.taken.shape)} {expected[1]} on {expected[2]}, strides "
                    f"{slot.taken.stride()}, when its states were made; expected no change: resize, cast, move or "
                    "reorder the model before wrap(), or wrap it anew"
                )

    # --- state -------------------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """States by parameter, as ``torch.optim.Optimizer`` has them: views of the host's memory.

        What is assigned to it, to ``state[p]`` or to ``state[p]["exp_avg"]`` is copied there; a parameter whose entry
        is deleted, or left out, begins anew, with moments and a step count of 0.
        """
        return self._states

    @state.setter
    def state(self, states: Mapping[Any, Any]) -> None:
        if self._pipeline is None:
            self._states = states
        elif states is not self._states:
            for key in self._states.keys() - states.keys():
                del self._states[key]
            self._states.update(states)

    def _replace_state(self, param: torch.Tensor, entry: Mapping[str, Any]) -> None:
        """Give a parameter these states, or, of none, moments and a step count of 0; it keeps its master weights."""
        slot, held = self._slots[param], self.state[param]
        if entry:
            entry = own_part(self.pipeline, slot.index, param, entry)
            check_entry(slot.name, held["exp_avg"], entry)
        self.flush()
        with torch.no_grad():
            self._load(slot, {name: held[name] for name in ("master",) if name in held} | dict(entry))

    def state_dict(self) -> dict[str, Any]:
        """As ``torch.optim.Optimizer.state_dict``; the tensors are the live states in host memory.

        Gradients that wait for the next update are not part of it. Under loss scaling it has a ``"loss_scale"``, and
        where ``lr`` or ``betas`` is a function the number of ``"updates"``. Any rank may call this, also alone.
        """
        scaler, device = self.pipeline.scaler, self.pipeline.device
        if device.world_size == 1:
            self.flush()  # among ranks that would be collective under schedule="delayed"
        state = super().state_dict()
        if "state" in state:  # a hook may have made another of it
            state["state"] = plain_entries(state["state"])
        if device.world_size > 1:
            state["partition"] = partition(device)
        if self._scheduled():
            state["updates"] = self.updates
        return state if scaler is None else state | {"loss_scale": scaler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states of this class or of ``torch.optim.AdamW``, in fp32 and on the host, whatever the parameters are.

        Among ranks each loads its own part, or takes it from whole states. Schedules go on after the number of updates
        that is saved, or after the steps of the states.

        The model's parameters are left alone, and may be loaded before or after this. At the next step a master weight
        counts where the parameter is what it rounds to, and else (torch's own states have none) the parameter.
        """
        self.flush()
        final: dict[str, Any] = {}

        def check_and_hide(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            check_partition(self.pipeline.device, self.param_groups, state_dict)
            final.update(state_dict)
            return hide_state(state_dict)

        hide = self.register_load_state_dict_pre_hook(check_and_hide)  # the last of the hooks to run
        try:
            super().load_state_dict(state_dict)
        finally:
            hide.remove()
        self.updates = int(final.get("updates", max(float(step) for step in self.pipeline.steps)))
        if self.pipeline.scaler is not None and "loss_scale" in final:
            self.pipeline.scaler.load_state_dict(final["loss_scale"])

    def torch_state_dict(self, *, rank0_only: bool = True) -> dict[str, Any] | None:
        """A ``state_dict`` for ``torch.optim.AdamW`` (``Adam`` with ``adam_mode="adam"``), whole in any stage.

        On fp32 parameters torch goes on from it with the bits that this optimizer would give (of a multiple of 16
        elements; ``fused=True`` is set in its groups). The states are copies in fp32 on the host, shaped as the
        parameters; torch has no master weights: ``engine.export_safetensors(folder, dtype="float32")`` writes them. All
        ranks must call this. It begins with :meth:`flush`.

        Args:
            rank0_only: the others get None; False: a copy on each.
        """
        return torch_state_dict(self, rank0_only=rank0_only)

    def has_states(self, param: torch.Tensor) -> bool:
        """Whether the optimizer has states of a parameter, which a frozen one has when it was trained once."""
        return param in self._slots

    def whole_states(self, param: torch.Tensor, names: Collection[str] = STATE_NAMES) -> dict[str, torch.Tensor]:
        """A copy of a parameter's states (``"master"``, ``"exp_avg"``, ``"exp_avg_sq"``), all ranks' parts of them.

        In fp32 on the host, shaped and laid out in memory as the parameter. All ranks must call this.
        """
        slot = self._slots[param]
        with torch._C.DisableTorchFunctionSubclass():  # what it was updated to is in its states
            tensor = self._tensor(slot)
        if slot.changed_outside:
            self.pipeline.adopt(slot.index, tensor)
            slot.note()
        whole = self.pipeline.whole_states(slot.index, names, tensor=tensor)
        return {name: shaped_like(torch.from_numpy(state), param) for name, state in whole.items()}

    def load_master(self, param: torch.Tensor, values: torch.Tensor) -> None:
        """Give a parameter's master weights these values, exactly, and the parameter these rounded; all ranks must
        call this, with the same values, of the parameter's shape."""
        slot = self._slots[param]
        self.pipeline.set_states(slot.index, {"master": flat_like(values.to("cpu", torch.float32), param).numpy()})
        with gathered_parameters(param, modifier_rank=0), torch.no_grad():
            param.copy_(values)
        slot.note()

    def __getstate__(self) -> dict[str, Any]:
        if self.pipeline.device.world_size > 1 or self.partitioned is not None:
            raise StateError(
                "copying or pickling an optimizer of several ranks or of partitioned parameters; expected its "
                "state_dict() to be copied"
            )
        own = {name: getattr(self, name) for name in ("config", "early_copy", "reads_wait", "updates")}
        state = {"state": defaultdict(dict, plain_entries(self.state))}
        return {**super().__getstate__(), **state, **own, "scaler": self.pipeline.scaler}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called by ``load_state_dict`` with hidden entries, and by copy and pickle on an empty object."""
        vars(self).setdefault("_pipeline", None)
        saved = {key: e.value if isinstance(e, Hidden) else e for key, e in state["state"].items()}
        entries = {p: entry for p, entry in saved.items() if isinstance(p, torch.Tensor) and entry}
        others = {key: entry for key, entry in saved.items() if not isinstance(key, torch.Tensor)}
        rest = {name: value for name, value in state.items() if name != "state"}
        if self._pipeline is None:
            super().__setstate__(rest)
            self.report = None
            self._build(None)
            self.pipeline.scaler = self.__dict__.pop("scaler")
        else:
            groups = [loaded(group, self.defaults) for group in state["param_groups"]]
            for g, group in enumerate(groups):
                hyper_of(g, group)
            for param, entry in entries.items():
                slot = self._slots.get(param)
                if slot:
                    entries[param] = entry = own_part(self.pipeline, slot.index, param, entry)
                check_entry(slot.name if slot else "?", self.state[param]["exp_avg"] if slot else param, entry)
            super().__setstate__({**rest, "param_groups": groups})
        self.state.update(others)
        for param in entries:
            if param not in self._slots:
                named = [e for g in range(len(self.param_groups)) for e in self._named(g) if e[1] is param]
                self._take_on(self.pipeline, named)
        with torch.no_grad():
            for slot in self._slots.values():
                self._load(slot, entries.get(slot.param, {}))

    def _load(self, slot: Slot, entry: Mapping[str, Any]) -> None:
        views = self.state[slot.param]
        self.pipeline.will_change([slot.index])
        for name in views.held:
            view = views[name]
            if name in entry:
                view.copy_(torch.as_tensor(entry[name]))
            elif name == "master":
                self.pipeline.reload_master(slot.index, self._tensor(slot))
            else:
                view.zero_()
        if slot.partitioned:
            self.pipeline.adopt(slot.index, self._tensor(slot))
        slot.doubt()  # the model may be loaded after this


def _tensors_of(model: nn.Module | None) -> list[torch.Tensor]:
    return [] if model is None else [*model.parameters(), *model.buffers()]


def _refuse_engine_fields(config: OffloadConfig) -> None:
    """What only an Engine does must not be asked of the optimizer alone and silently not be done."""
    default = OffloadConfig()
    engines = [name for name in FIELDS if "loss_scale" in name]
    engines += ["gradient_accumulation_steps", "offload_param", *(["stage"] if config.stage == 3 else [])]
    for name in engines:
        if getattr(config, name) != getattr(default, name):
            raise ConfigError(
                f"{name}={getattr(config, name)!r} is what an Engine does; expected it in wrap(model, ...): the "
                "optimizer alone takes gradients as they are"
            )


def _await(lock: threading.RLock, pipeline: Pipeline, param: int) -> None:
    with lock:  # gradients may be arriving in another thread
        pipeline.await_param(param)
