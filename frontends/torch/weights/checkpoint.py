"""The model's part of a checkpoint: frozen parameters, buffers, modules' states and random generators."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as EXTRA_STATE
from torch.optim.lr_scheduler import LRScheduler

from offload_core.engine import (
    ArrayType,
    Contents,
    DeferredLoad,
    Loaded,
    Names,
    Opened,
    RandomState,
    Source,
    Target,
    TrainingRun,
    Want,
    consistent,
    load_values,
    run_deferred,
    translation,
)
from offload_core.errors import CheckpointError, CheckpointWarning
from offload_core.layout.partition import Bucket
from offload_core.support.checks import shown
from offload_core.support.user_line import UserLine

from ..internals.compiled import uncompiled
from ..internals.private import grad_mode_kept, no_read
from ..optim.optimizer import OffloadedOptimizer
from ..params.dtensor import count_once, is_dtensor, local_of
from ..params.tensors import NUMPY_DTYPES, flat, memory, usable_accelerator
from ..params.values import is_quantised
from ..stage3.parameters import PartitionedParameter
from ..stage3.sharding import NoSharding, Sharding
from ..training.groups import checked_values, differing, groups_of_params, number, paired
from .reading import HeldRun, Weights, elements_in, is_dense, placed_as


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    if not _is_plain(tensor):
        raise CheckpointError(
            f"a {_kind_of(tensor)}; expected a dense one of {', '.join(map(str, NUMPY_DTYPES))}: save what it is made "
            "of"
        )
    host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return memory(host.view(-1)).reshape(tuple(host.shape))


def _from_numpy(array: np.ndarray) -> torch.Tensor:
    tensor = torch.empty(array.shape, dtype=getattr(torch, array.dtype.name), device="cpu")
    memory(tensor.view(-1))[:] = array.reshape(-1)
    return tensor


TENSORS = ArrayType("torch", lambda value: isinstance(value, torch.Tensor), _to_numpy, _from_numpy)


class ModelCheckpoints:
    """The checkpoints of a model and its optimizer."""

    def __init__(self, model: nn.Module, optimizer: OffloadedOptimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._state_lock = optimizer.state_lock

    @consistent("save_checkpoint()")
    def save(
        self,
        folder: Any,
        *,
        stateful: Mapping[str, Any] | None,
        extras: Any,
        keep: int | None,
        wait: bool,
        frozen: bool = True,
        tag: str | None = None,
        latest: bool = True,
    ) -> Path:
        optimizer = self._optimizer
        with optimizer.checkpoints.together("save"):
            self._check_closed("save_checkpoint()")
            tensors = self._state_lock.change("save_checkpoint()", optimizer.components.registration.current_tensors)
            contents = self._contents(TrainingRun(stateful, extras, RANDOM), frozen)
        return optimizer.checkpoints.save(
            folder, contents, tensors, step=optimizer.updates, keep=keep, wait=wait, tag=tag, latest=latest
        )

    def _contents(self, run: TrainingRun, frozen: bool) -> Contents:
        optimizer = self._optimizer
        sources, shapes, left_out, group_of = [], {}, {}, groups_of_params(optimizer.param_groups)
        alone, weights = optimizer.core.rank == 0, Weights(optimizer)
        untrained = [*self._untrained()]
        counted = self._counted([(name, tensor) for name, tensor, _ in untrained])
        kept = set() if frozen else {param for param in self._model.parameters() if not param.requires_grad}
        for name, tensor, record in untrained:
            if tensor in kept or is_quantised(tensor):
                left_out[name] = tuple(tensor.shape)
                continue
            shapes[name] = (tuple(tensor.shape), _numpy_dtype(name, tensor))
            if record is not None or counted.get(tensor, alone):
                sources += _sources(weights, name, tensor)
        first = {param: uncompiled(name) for name, param in self._model.named_parameters()}
        every = self._model.named_parameters(remove_duplicate=False)
        names = [(uncompiled(name), first[param]) for name, param in every]
        groups = [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in optimizer.param_groups]
        state = {
            "groups": groups,
            "lr": number("lr", optimizer.defaults["lr"]),  # with which groups begin that have no other
            "modules": {name: module.get_extra_state() for name, module in _stateful_modules(self._model)},
        }
        return Contents(
            self.names(),
            sources,
            shapes,
            run,
            state,
            types=[TENSORS],
            gradients_wait=optimizer.components.grad_hooks.has_deferred,
            front_end="torch",
            left_out=left_out,
            tied={name: other for name, other in names if name != other},
            buffers=[name for each, _ in self._model.named_buffers() if (name := uncompiled(each)) in shapes],
            groups=[group_of.get(slot.param, 0) for slot in optimizer.slots],
        )

    def _counted(self, named: Sequence[tuple[str, torch.Tensor]]) -> dict[torch.Tensor, bool]:
        """True for each DTensor of which this process saves its part. Another process may hold the same part."""
        placed = [(name, tensor) for name, tensor in named if is_dtensor(tensor)]
        if not placed:
            return {}
        collectives = self._optimizer.core.collectives
        held = [(name, tensor, placed_as(name, tensor)) for name, tensor in placed]
        counted = self._state_lock.change("save_checkpoint()", count_once, collectives, held)
        return {tensor: counts for (_, tensor), counts in zip(placed, counted, strict=True)}

    @consistent("load_checkpoint()")
    def has_none(self, path: Any) -> bool:
        self._check_closed("load_checkpoint()")
        return self._optimizer.checkpoints.has_none(path)

    def load(
        self,
        path: Opened,
        *,
        stateful: Mapping[str, Any] | None,
        names: Names,
        random_state: bool,
        accept_extras: Callable[[Any], None] = lambda extras: None,
        states: bool = True,
        strict: bool = True,
        warns: bool = True,
    ) -> Any:
        optimizer, translated = self._optimizer, translation(names)
        modules = {translated(name): module for name, module in _stateful_modules(self._model)}
        with optimizer.checkpoints.together("load"):
            self._check_closed("load_checkpoint()")
            parameters = optimizer.core.parameters
            parameters.check_present()
            optimizer.components.register_unfrozen(optimizer.param_groups)
            tensors = self._state_lock.change("load_checkpoint()", optimizer.components.registration.current_tensors)

        alone = warns and optimizer.core.rank == 0
        run = TrainingRun(stateful, random=RANDOM if random_state else None)

        def accept(loaded: Loaded) -> list[DeferredLoad]:
            state = loaded.state
            if not isinstance(state.get("modules", {}), dict):
                raise CheckpointError(f"{loaded.checkpoint.path}: the states of modules are not by name")
            missing = [name for name in modules if name not in loaded.state.get("modules", modules)]
            if missing and strict:
                raise CheckpointError(
                    f"{loaded.checkpoint.path}: has no {missing[0]!r}, which this model's get_extra_state() gives; is "
                    "it the checkpoint of another model?"
                )
            accept_extras(state["extras"])
            values = self._group_values(loaded, translated) if states else []
            last = (
                [
                    DeferredLoad(
                        "the parameter groups",
                        partial(optimizer.steps.set_groups, optimizer.param_groups, values),
                        ours=True,
                    )
                ]
                if states
                else []
            )
            last += _module_parts(modules, state.get("modules", {}))  # the other front end knows no modules
            _check_schedulers(stateful, state["stateful"], loaded.checkpoint.path)
            if alone and values:
                _warn_of_other_values(optimizer, values, loaded)
            return last

        def publish() -> None:
            optimizer.sharding.before_change()
            optimizer.awaited.end()
            optimizer.components.registration.follow_replaced(tensors)
            optimizer.components.grad_hooks.forget()

        targets = [
            target
            for name, tensor, record in self._untrained()
            for target in _targets(translated(name), tensor, record)
        ]
        loaded = optimizer.checkpoints.load(
            path,
            [translated(name) for name in self.names()],
            targets,
            tensors,
            publish,
            [TENSORS],
            run=run,
            accept=accept,
            states=states,
            strict=strict,
            warns=warns,
        )
        return loaded.state["extras"]

    def _group_values(self, loaded: Loaded, translated: Callable[[str], str]) -> list[dict[str, Any]]:
        """The values of the checkpoint's groups for each of this optimizer's, in its order.

        Raises:
            CheckpointError: they are not of the same parameters, or a value is out of range.
        """
        optimizer, path = self._optimizer, loaded.checkpoint.path
        own, groups = optimizer.param_groups, loaded.state.get("groups")
        if groups is None:  # the other front end has none
            return []
        if not isinstance(groups, list):
            raise CheckpointError(f"{path}: the parameter groups in it are {shown(groups)}, expected a list")
        if len(groups) != len(own):
            raise CheckpointError(
                f"{path}: {len(groups)} parameter groups in it, expected {len(own)}, as this optimizer has"
            )
        named = {translated(name): param for name, param in self._named_params()}
        group_of = groups_of_params(optimizer.param_groups)
        mine = {name: group_of[param] for name, param in named.items() if param in group_of}
        theirs = {name: entry["group"] for name, entry in loaded.parameters.items()}
        try:
            values = [groups[g] for g in paired(theirs, mine, len(own))]
            return [
                checked_values(g, group, saved, optimizer.rule_name)
                for g, (group, saved) in enumerate(zip(own, values, strict=True))
            ]
        except Exception as error:
            raise CheckpointError(f"{path}: its parameter groups are not those of this optimizer: {error}") from error

    # --- the model's tensors -------------------------------------------------------------------------

    def _check_closed(self, what: str) -> None:
        self._optimizer.sharding.check_closed(what)

    def names(self) -> list[str]:
        """The model's names of the trained parameters."""
        of_model = {param: name for name, param in self._named_params()}
        return [of_model.get(slot.param, slot.name) for slot in self._optimizer.slots]

    def _named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's parameters, and those that the optimizer alone has, each with its name in a checkpoint."""
        of_model = set[torch.Tensor]()
        for name, param in self._model.named_parameters():
            of_model.add(param)
            yield uncompiled(name), param
        for slot in self._optimizer.slots:
            if slot.param not in of_model:
                yield slot.name, slot.param

    def untrained(self) -> list[str]:
        """The names of frozen parameters and buffers in a checkpoint."""
        return [name for name, _, _ in self._untrained()]

    def _untrained(self) -> Iterator[tuple[str, torch.Tensor, PartitionedParameter | None]]:
        """Frozen parameters and buffers."""
        trained = {slot.param for slot in self._optimizer.slots}
        return _tensors_of(self._model, self._optimizer.sharding, but=trained)


def load_weights(model: nn.Module, path: Any) -> None:
    """Load a checkpoint's weights into a model without an engine: parameters (rounded master weights), persistent
    buffers and the states for ``set_extra_state``. Each process that calls this loads all of them.

    Raises:
        CheckpointError: the checkpoint is damaged, or belongs to another model.
    """
    targets = [_target(name, tensor, tensor) for name, tensor, _ in _tensors_of(model, NoSharding())]
    loaded = load_values(path, targets, [TENSORS])
    modules = loaded.state.get("modules", {})
    run_deferred(loaded.checkpoint.path, _module_parts(dict(_stateful_modules(model)), modules))


def _warn_of_other_values(optimizer: OffloadedOptimizer, values: Sequence[Mapping[str, Any]], loaded: Loaded) -> None:
    """Warn of hyperparameters of a checkpoint that replace others here, but for rates that were set during a run."""
    firsts = [number("lr", optimizer.defaults["lr"]), loaded.state.get("lr")]
    differences = []
    for g, (own, saved) in enumerate(zip(optimizer.param_groups, values, strict=True)):
        found = differing(own, saved, optimizer.config, firsts)
        differences += [f"{name}={theirs!r} in place of {mine!r} (group {g})" for name, theirs, mine in found]
    if differences:
        UserLine.now("torch").warn(
            CheckpointWarning(
                f"{loaded.checkpoint.path}: the run goes on with its hyperparameters, {', '.join(differences[:3])}"
                f"{', …' * (len(differences) > 3)}; expected the same in wrap(), or "
                "other values in optimizer.param_groups after the load"
            )
        )


def _check_schedulers(stateful: Mapping[str, Any] | None, saved: Mapping[str, Any], path: Path) -> None:
    """Raise :class:`CheckpointError` if a scheduler of torch would take the state of another kind: it takes any."""
    for name, item in (stateful or {}).items():
        state = saved.get(name)
        if isinstance(item, LRScheduler) and isinstance(state, dict) and not state.keys() & item.state_dict().keys():
            theirs, mine = ", ".join(map(repr, [*state][:3])) or "no state", type(item).__name__
            raise CheckpointError(
                f"{path}: stateful[{name!r}] was saved of a scheduler with {theirs}, which no {mine} has; "
                "expected the same scheduler here, or a load without its state"
            )


def _stateful_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules that define ``get_extra_state``, by the names of these states in ``state_dict()``."""
    return [
        (uncompiled(f"{prefix}.{EXTRA_STATE}" if prefix else EXTRA_STATE), module)
        for prefix, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    ]


def _module_parts(modules: Mapping[str, nn.Module], saved: Mapping[str, Any]) -> list[DeferredLoad]:
    """The parts that give these modules the states that were saved for them."""
    return [
        DeferredLoad(f"set_extra_state() of {name!r}", partial(module.set_extra_state, saved[name]))
        for name, module in modules.items()
        if name in saved
    ]


def _tensors_of(
    model: nn.Module, sharding: Sharding, *, but: Collection[torch.Tensor] = ()
) -> Iterator[tuple[str, torch.Tensor, PartitionedParameter | None]]:
    """The model's parameters except ``but``, with the records of partitioned ones, and its buffers."""
    for name, param in model.named_parameters():
        if param not in but:
            yield uncompiled(name), param, sharding.record_of(param)
    seen = set[torch.Tensor]()
    for prefix, module in model.named_modules():
        for own, buffer in module._buffers.items():
            if buffer is None or own in module._non_persistent_buffers_set or buffer in seen:
                continue
            seen.add(buffer)
            yield uncompiled(f"{prefix}.{own}" if prefix else own), buffer, None


def _targets(name: str, tensor: torch.Tensor, record: PartitionedParameter | None) -> list[Target]:
    """The targets of a tensor: of a partitioned one on disk each bucket, so that host memory holds a few at a time."""
    if record is None:
        return [_target(name, tensor, tensor)]
    if isinstance(record.shard.values, torch.Tensor):
        return [_target(name, tensor, record.shard.values, record.runs)]
    return [_target_on_disk(name, tensor, record, bucket) for bucket in record.buckets]


def _target(
    name: str, tensor: torch.Tensor, where: torch.Tensor, runs: Sequence[tuple[int, int, int]] | None = None
) -> Target:
    """Return the target that fills the tensor itself, or memory with these runs of its elements.

    Args:
        where: the memory.
        runs: ``(start in the tensor, start in the memory, elements)``; None: all elements, in order.
    """
    staged: list[Callable[[], object]] = []
    """Calls that move what was loaded to its place."""
    where = local_of(where)

    def begin() -> torch.Tensor:
        run = flat(where.data) if is_dense(where) else where.detach()
        if where.device.type == "cpu" and is_dense(where):
            return run
        host = torch.empty(where.numel(), dtype=where.dtype, device="cpu")
        staged.append(partial(_put, run, host.view(run.shape)))
        return host

    return _target_of(name, tensor, [(0, 0, where.numel())] if runs is None else runs, begin, staged)


def _target_on_disk(name: str, tensor: torch.Tensor, record: PartitionedParameter, bucket: Bucket) -> Target:
    start = bucket.shard_start
    staged: list[Callable[[], object]] = []

    def begin() -> torch.Tensor:
        host = torch.zeros(bucket.shard_numel, dtype=record.whole.dtype, device="cpu")  # padding, too
        staged.append(partial(record.shard.write, host, start))
        return host

    runs = [(first, at - start, numel) for first, at, numel in record.runs_of(bucket)]
    return _target_of(name, tensor, runs, begin, staged)


def _target_of(
    name: str,
    tensor: torch.Tensor,
    runs: Iterable[tuple[int, int, int]],
    begin: Callable[[], torch.Tensor],
    staged: list[Callable[[], object]],
) -> Target:
    """Return a target.

    Args:
        begin: returns the memory to read to, and adds to ``staged`` the calls that move it to its place.
    """
    elements = elements_in(name, tensor)

    def wants(kind: str) -> Iterable[Want]:
        with no_read(), grad_mode_kept(), torch.no_grad():
            host = begin()
        for start, at, numel in runs:
            for offset, region in elements.regions(start, numel):
                part = host[at + offset : at + offset + region.numel]
                yield Want(name, kind, region, memory(part))

    def loaded() -> None:
        with grad_mode_kept(), torch.no_grad():
            for put in staged:
                put()
            staged.clear()
            if not tensor.is_inference():
                increment_version({tensor, local_of(tensor)})

    return Target(name, tuple(tensor.shape), wants, loaded, _numpy_dtype(name, tensor))


def _put(run: torch.Tensor, host: torch.Tensor) -> None:
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in run.stride())  # expanded
    run[once].copy_(host[once])


def _sources(weights: Weights, name: str, tensor: torch.Tensor) -> list[Source]:
    """This process's part of a tensor that is not trained."""
    elements, dtype = elements_in(name, tensor), _numpy_dtype(name, tensor)
    return [
        Source(name, "param", region, dtype, partial(_read_from, run, at))
        for run in weights.held(tensor)
        for at, region in elements.regions(run.start, run.numel)
    ]


def _read_from(run: HeldRun, at: int, start: int, out: np.ndarray) -> None:
    run.read(at + start, out)


def _numpy_dtype(name: str, tensor: torch.Tensor) -> np.dtype:
    if not _is_plain(tensor):
        raise CheckpointError(
            f"{name!r} is a {_kind_of(tensor)}; expected a dense one of {', '.join(map(str, NUMPY_DTYPES))}: a "
            "checkpoint cannot hold it"
        )
    return NUMPY_DTYPES[tensor.dtype]


def _is_plain(tensor: torch.Tensor) -> bool:
    """True if it has dense values of a type that files can hold."""
    with no_read():
        odd = tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta
        return not odd and tensor.dtype in NUMPY_DTYPES


def _kind_of(tensor: torch.Tensor) -> str:
    """Layout, place and element type, for errors."""
    with no_read():
        special = "nested " * tensor.is_nested + "meta " * tensor.is_meta
        return f"{special}{tensor.layout} tensor of {tensor.dtype}"


class TorchRandomState(RandomState):
    """The global random generators of Python, NumPy and torch, on the CPU and on the current accelerator."""

    def get(self) -> dict[str, Any]:
        """As :meth:`RandomState.get`."""
        state = super().get() | {"torch": torch.get_rng_state()}
        accelerator = usable_accelerator()
        if accelerator is not None:
            module = torch.get_device_module(accelerator)
            if getattr(module, "is_initialized", lambda: True)():
                state[accelerator.type] = module.get_rng_state()
        return state

    def check(self, state: Mapping[str, Any]) -> None:
        """As :meth:`RandomState.check`."""
        super().check(state)
        if "torch" in state:
            torch.Generator().set_state(state["torch"])
        accelerator = usable_accelerator()
        if accelerator is not None and accelerator.type in state:
            torch.Generator(accelerator).set_state(state[accelerator.type])

    def set(self, state: Mapping[str, Any]) -> None:
        """As :meth:`RandomState.set`."""
        super().set(state)
        if "torch" in state:
            torch.set_rng_state(state["torch"])
        accelerator = usable_accelerator()
        if accelerator is not None and accelerator.type in state:
            torch.get_device_module(accelerator).set_rng_state(state[accelerator.type])


RANDOM = TorchRandomState()
