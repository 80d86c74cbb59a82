"""``OffloadedAdamW`` and ``OffloadedSGD``: ``torch.optim.Optimizer`` with states in host memory."""

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, replace
from functools import partial
from typing import Any, Self, SupportsFloat, Unpack

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from offload_core.checkpoint.checkpoints import Checkpoints
from offload_core.config.deepspeed import GroupSchedule
from offload_core.config.options import FIELDS, ConfigLike, OffloadConfig
from offload_core.errors import ConfigError, ParameterError, StateError
from offload_core.memory.report import MemoryReport
from offload_core.rules import Hyper, Rule
from offload_core.step.decision import StepArguments
from offload_core.step.loss_scale import LossScaler
from offload_core.step.pipeline import Pipeline, StepReport
from offload_core.step.state_lock import changes, whole

from .casting import Casts
from .compiled import untraced
from .groups import (
    OptimizerSettings,
    defaults_of,
    hyper_of,
    loaded,
    names_in,
    number,
    numbers,
    with_own_defaults,
    without_torchs_options,
)
from .intake import Intake
from .internals import NO_BACKWARD, backward_number
from .parts import Foundation, Parts, trained
from .registration import NamedParam, Registration, Slot, named_params
from .state_io import (
    IN_SHARDS,
    Hidden,
    check_counts,
    check_partition,
    hide_state,
    partition,
    torch_state_dict,
)
from .state_views import plain_entries


@dataclass(frozen=True)
class _Boundary:
    """An engine's micro-step, which the next update ends first."""

    may_be_empty: bool


class OffloadedOptimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` with master weights and states in host memory, updated by a C kernel: the base of
    :class:`OffloadedAdamW` and :class:`OffloadedSGD`, which say what it does."""

    rule_name = "adamw"
    """The value of ``OffloadConfig.optimizer``: the rule of groups that name none."""

    # Not class attributes: Lightning's wrapper is a subclass, and only asks the optimizer for what it lacks itself.
    report: StepReport | None
    """The report of the last ``step``."""
    _parts: Parts | None
    """None until the optimizer is built, and after it is closed."""
    _model: "weakref.ref[nn.Module] | None"
    """An engine's model, which names the parameters of groups that are added; None: there is none."""
    _ranks: frozenset[int]
    """The ranks that partition the states; empty: this process alone."""
    _gave_way: bool
    """True if a later optimizer took over."""
    _awaiting: RemovableHandle | None
    """Refuses steps while a loaded file only says where the states are; None: no states are awaited."""
    _states: Any
    """``state`` while there are no parts."""
    _updates: int
    """``updates`` while there are no parts."""
    _boundary: _Boundary | None
    """The engine's micro-step that the next update ends; None: there is none."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: SupportsFloat | Callable[[Any], Any] | None = None,
        *,
        config: ConfigLike = None,
        early_copy: bool = False,
        process_group: Any = None,
        **overrides: Unpack[OptimizerSettings],
    ) -> None:
        self._begin(params, lr, config, process_group, overrides, early_copy=early_copy)

    @classmethod
    def of_engine(
        cls,
        model: nn.Module,
        params: Iterable[Any],
        config: ConfigLike,
        process_group: Any,
        overrides: Mapping[str, Any],
    ) -> Self:
        """The optimizer of an engine, which counts micro-steps, scales losses and partitions the model's parameters.

        The arguments are those of the constructor, with ``lr`` among ``overrides``.
        """
        optimizer = cls.__new__(cls)
        settings = {name: value for name, value in overrides.items() if name != "lr"}
        optimizer._begin(params, overrides.get("lr"), config, process_group, settings, early_copy=True, model=model)
        return optimizer

    def _begin(
        self,
        params: Iterable[Any],
        lr: SupportsFloat | Callable[[Any], Any] | None,
        config: ConfigLike,
        process_group: Any,
        overrides: Mapping[str, Any],
        *,
        early_copy: bool,
        model: nn.Module | None = None,
    ) -> None:
        self._parts = None
        self._model = None if model is None else weakref.ref(model)
        settings = without_torchs_options(overrides)
        if lr is not None:
            settings["lr"] = number("lr", lr)
        betas = settings.get("betas")
        if betas is not None:
            settings["betas"] = numbers("betas", betas)
        world_size = 1 if process_group is None else dist.get_world_size(process_group)
        if named_in(config, settings) is MISSING:
            settings["optimizer"] = self.rule_name
        self.config = OffloadConfig.resolve(config, world_size=world_size, **settings)
        if self.config.optimizer != self.rule_name:
            raise ConfigError(
                f"optimizer={self.config.optimizer!r} in {type(self).__name__}; expected "
                f"{CLASSES[self.config.optimizer].__name__}, or {{'params': ..., 'optimizer': "
                f"{self.config.optimizer!r}}} for some parameters"
            )
        if model is None:
            _refuse_engine_fields(self.config)
        self.early_copy = early_copy
        self.reads_wait = False
        """True if an update may still be running when ``step`` returns; readers of a parameter then wait for it."""
        self.report = None
        if isinstance(params, torch.Tensor):
            raise ParameterError("params: got a tensor, expected an iterable of tensors: write [tensor]")
        params = list(params)
        if not params:
            raise ParameterError("params: got none, expected at least one parameter; was the iterator used up already?")
        self._updates = 0
        own: dict[str, Any] = {"lr": lr} if isinstance(lr, torch.Tensor) else {}
        own |= {"betas": tuple(betas)} if isinstance(betas, tuple | list) else {}
        super().__init__(params, {**defaults_of(self.config), **own})
        self._build(process_group, model)

    def _build(
        self,
        process_group: Any,
        model: nn.Module | None = None,
        scaler: LossScaler | None = None,
        casts: Casts | None = None,
    ) -> None:
        """Make the pipeline and the other parts, and take on the trainable parameters of all groups.

        Args:
            scaler: the loss scaler of a copied or unpickled optimizer; an Engine's follows from the configuration.
            casts: likewise, the element types that its parameters got.
        """
        self._hypers()
        self._gave_way, self._awaiting = False, None
        self._ranks = frozenset(() if process_group is None else dist.get_process_group_ranks(process_group))
        config = replace(self.config, op_order=self.config.op_order or "torch")
        self._foundation = made = Foundation.of(
            self,
            named := self._named(),
            config,
            process_group,
            model,
            early_copy=self.early_copy,
            scaler=scaler,
            casts=casts,
        )
        self.casts = made.casts
        """The element types of the model's tensors."""
        self.partitioned = made.partitioned
        """The model's partitioned parameters (stage 3); None: none are."""
        self._open(trained(named), model)

    def _open(self, named: Sequence[NamedParam], model: nn.Module | None) -> None:
        """Make the parts that hold parameters and states, and take on these parameters."""
        parts = self._foundation.parts(self, named, self._rules(self.param_groups), model)
        parts.pipeline.counts.updates = self._updates
        self._parts, self._boundary = parts, None
        self._state_lock = parts.pipeline.state_lock
        """Held while states are read or changed; see ``offload_core/step/state_lock.py``."""
        self.checkpoints = Checkpoints(parts.pipeline)

    def _named(self) -> list[NamedParam]:
        return [entry for g, group in enumerate(self.param_groups) for entry in named_params(g, group)]

    @property
    def updates(self) -> int:
        """Updates made so far."""
        return self._updates if self._parts is None else self._parts.pipeline.counts.updates

    @updates.setter
    def updates(self, count: int) -> None:
        self._updates = count
        if self._parts is not None:
            self._parts.pipeline.counts.updates = count

    @property
    def parts(self) -> Parts:
        """The optimizer's parts; :class:`StateError` once it is closed."""
        if self._parts is None and self._gave_way:
            raise StateError(
                "this optimizer was closed, because a later one was made of its parameters; expected that one to be "
                "used (was the model wrapped twice?), or the model to be wrapped anew"
            )
        if self._parts is None:
            raise StateError("this optimizer was closed; expected an open one: wrap the model anew")
        return self._parts

    @property
    def pipeline(self) -> Pipeline:
        """The core that holds the states."""
        return self.parts.pipeline

    @property
    def intake(self) -> Intake:
        """The part that takes the gradients."""
        return self.parts.intake

    @property
    def registration(self) -> Registration:
        """The part that holds the parameters that have states."""
        return self.parts.registration

    @whole("flush()")
    def flush(self) -> None:
        """Wait until parameters and states hold the result of the last ``step``, also under ``schedule="delayed"``.

        That schedule holds back the last step's parameters; after a flush the next forward sees them a step early.
        """
        self.follow_sizes()
        self.parts.registration.flush()

    @property
    def slots(self) -> list[Slot]:
        """One for each parameter that has states, in the pipeline's order."""
        return [] if self._parts is None else [*self._parts.registration.slots.values()]

    def has_states(self, param: torch.Tensor) -> bool:
        """True if the optimizer has states of the parameter; a frozen one that was trained before has them, too."""
        return self._parts is not None and param in self._parts.registration.slots

    def replaced(self, tensors: Sequence[torch.Tensor]) -> None:
        """After master weights were replaced: write them to the parameters, and discard earlier gradients."""
        parts = self.parts
        self._await_states(None)
        parts.registration.follow_replaced(tensors)
        parts.intake.forget()

    @property
    def sent_bytes(self) -> int:
        """Bytes of gradients and parameters that this rank has sent to other ranks."""
        pipeline = self.pipeline
        pipeline.last_step.finish()
        return pipeline.device.sent_bytes + (self.partitioned.sent_bytes if self.partitioned is not None else 0)

    def memory_report(self, model: nn.Module | None = None) -> MemoryReport:
        """Planned and measured bytes.

        Args:
            model: the trained model; its tensors that the optimizer does not have (frozen parameters, buffers) are
                counted, too.
        """
        return self.registration.memory_report(self.group_of(), model)

    # --- parameters and groups -----------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As ``torch.optim.Optimizer.add_param_group``; on an error nothing has changed."""
        if not isinstance(param_group, dict):
            super().add_param_group(param_group)  # raises torch's own error
        if isinstance(self.config.lr, GroupSchedule):
            scheduled = self._scheduled()
            own = {name: value for name, value in param_group.items() if name not in scheduled}
            param_group = own | ({"initial_lr": number("lr", param_group["lr"])} if "lr" in param_group else {})
        for name in ("lr", "betas"):
            if name in param_group and callable(getattr(self.config, name)):
                raise ConfigError(
                    f"{name}={param_group[name]!r} of a parameter group, and {name} is a function, which sets that of "
                    "all groups; expected one of them (torch.optim.lr_scheduler knows groups)"
                )
        where = f"parameter group {len(self.param_groups)}"
        param_group = with_own_defaults(where, param_group, self.rule_name)
        params = param_group["params"]
        if self.param_groups and "param_names" in self.param_groups[0] and not isinstance(params, torch.Tensor | set):
            params = list(params)  # torch requires names for all groups or for none
            if params and isinstance(params[0], torch.Tensor):
                g = len(self.param_groups)
                model = None if self._model is None else self._model()
                names = {} if model is None else names_in(model)
                params = [(names.get(id(p), f"group {g}, parameter {i}"), p) for i, p in enumerate(params)]
            param_group = {**param_group, "params": params}
        super().add_param_group(param_group)
        if self._parts is None:  # called by Optimizer.__init__: _build takes on all groups at once
            return
        try:
            self._hypers()
            named = named_params(len(self.param_groups) - 1, self.param_groups[-1])
            self.registration.check_new(named)
            self._take_on([entry for entry in named if entry[1].requires_grad])
        except Exception:
            self.param_groups.pop()
            raise

    def take_on_unfrozen(self, *, with_gradient: bool = False) -> None:
        """Make states for parameters that were frozen and can have a gradient now (``with_gradient``: have one)."""
        parts = self.parts
        new = parts.registration.unfrozen(self.param_groups, with_gradient=with_gradient)
        if new:
            parts.registration.check_new(new)
            self._take_on(new)

    def follow_sizes(self) -> None:
        """Before the first update, make states anew if parameters have grown (a vocabulary, embeddings), in stages 1
        and 2. Their elements that were there, at the same indices, keep their master weights. With several ranks it is
        collective then.

        Raises:
            ParameterError, HostMemoryError: there can be no such states; the optimizer is closed.
        """
        parts = self._parts
        first = parts is not None and not (self.updates or self.partitioned or parts.pipeline.arrivals.holds_gradients)
        if parts is not None and first and parts.registration.grown():
            self.checkpoints.wait()
            self._start_over(parts)

    @changes("a resize of parameters")
    def _start_over(self, parts: Parts) -> None:
        slots, masters = parts.registration.slots, parts.states.masters()
        named = [entry for entry in self._named() if entry[1] in slots]
        parts.release()
        try:
            parts.pipeline.start_over()
            self._open(named, None if self._model is None else self._model())
            self.parts.states.keep_masters(masters)
        except BaseException:
            self._parts = None
            self.state = defaultdict(dict)
            parts.pipeline.device.close()
            raise

    def group_of(self) -> dict[torch.Tensor, int]:
        """The number of each parameter's group, as ``param_groups`` has them now."""
        return {param: g for g, group in enumerate(self.param_groups) for param in group["params"]}

    def _hypers(self) -> list[Hyper]:
        hypers = []
        scheduled, by_group = self._scheduled(), isinstance(self.config.lr, GroupSchedule)
        for g, group in enumerate(self.param_groups):
            group.update(scheduled)
            if by_group and "initial_lr" in group:
                group["lr"], _ = self.config.hyperparameters(self.updates, group["initial_lr"])
            hypers.append(hyper_of(g, group, self.rule_name))
        return hypers

    def _scheduled(self) -> dict[str, Any]:
        """The values for the next update of those hyperparameters that are functions of the number of updates."""
        names = [name for name in ("lr", "betas") if callable(getattr(self.config, name))]
        if not names:
            return {}
        lr, betas = self.config.hyperparameters(self.updates)
        return {name: {"lr": lr, "betas": betas}[name] for name in names}

    @whole("close()")
    def close(self) -> None:
        """Remove the hooks from the parameters, discard gradients on the host, and free the states."""
        if self._parts is not None:
            self.checkpoints.wait()
            if self._parts.pipeline.health.usable:  # else it must end, too
                self._parts.registration.flush()
        if self.partitioned is not None:
            self.partitioned.close()
        if self._parts is not None:
            self._parts.close()
        self.partitioned = self._parts = None
        self.state = defaultdict(dict)

    # --- an optimizer that takes over ------------------------------------------------------------------

    def keeps_from(self, other: "OffloadedOptimizer") -> str | None:
        """As :meth:`Owner.keeps_from`."""
        members, parts = other.group_of(), self.parts
        left = [slot.name for slot in self.slots if slot.param not in members]
        if other.param_groups is self.param_groups:
            return "of which this one is a shallow copy (copy.deepcopy() makes a twin)"
        if left:
            return f"which also has {', '.join(map(repr, left[:2]))}{', …' * (len(left) > 2)}, and this one does not"
        if self.partitioned is not None:
            return "which has it in shards (stage 3), and not all may fit whole"
        if not self._ranks <= other._ranks:
            return f"which partitions its states over the ranks {sorted(self._ranks)}, and this one does not"
        running = backward_number() != NO_BACKWARD or parts.intake.in_backward or self._state_lock.is_changing()
        if running or parts.intake.fresh or parts.intake.has_deferred or parts.pipeline.arrivals.holds_gradients:
            return f"which is {'running' if running else 'not idle: gradients wait for its update'}"
        return None

    def give_way(self) -> None:
        """As :meth:`Owner.give_way`."""
        self.close()
        self._gave_way = True

    # --- step --------------------------------------------------------------------------------------

    @untraced
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``torch.optim.Optimizer.zero_grad``; gradients on the host are discarded too."""
        self.intake.discard()
        super().zero_grad(set_to_none)

    @untraced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, and describe the update in ``report``.

        Raises:
            ParameterError, GradientError, ConfigError: something does not fit; no parameter and no state changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.follow_sizes()
        with torch.no_grad():
            self.report = self._update()
        return loss

    def end_micro_step(self, *, boundary: bool, may_be_empty: bool, reads_wait: bool) -> StepReport:
        """End an Engine's micro-step: take its gradients and, at a boundary, update by calling ``step``.

        Args:
            may_be_empty: True if gradients of earlier micro-steps are enough.
            reads_wait: see the attribute.

        Raises as ``step`` and ``Engine.step`` do; nothing has changed then.
        """
        if not boundary:
            return self._accumulate(may_be_empty)
        self.reads_wait, self._boundary = reads_wait, _Boundary(may_be_empty)
        try:
            self.step()  # hooks and learning-rate schedulers watch this method
        finally:
            self._boundary = None
        assert self.report is not None
        return self.report

    @changes("step()")
    def _accumulate(self, may_be_empty: bool) -> StepReport:
        parts = self.parts
        self._prepare(parts, boundary=False)
        parts.intake.end_micro_step(boundary=False, may_be_empty=may_be_empty)
        scale, step = parts.pipeline.loss_scale, parts.pipeline.counts.updates + 1
        return StepReport(updated=False, skipped="accumulating", loss_scale=scale, step=step)

    @whole("step()")
    @changes("step()")
    def _update(self) -> StepReport:
        boundary, self._boundary = self._boundary, None
        parts = self.parts
        pipeline, intake, registration = parts.pipeline, parts.intake, parts.registration
        hypers, groups = self._prepare(parts, boundary=True)
        arguments = StepArguments(hypers, registration.current_tensors(), self._divisor(intake.averages), groups)
        number = pipeline.counts.updates + 1
        if boundary is not None:
            pipeline.early.confirm_step(arguments)
            intake.end_micro_step(boundary=True, may_be_empty=boundary.may_be_empty)
        gathered = 0 if self.partitioned is None else self.partitioned.before_change()
        try:
            report = pipeline.step(arguments, gathered=gathered)
            if not self.reads_wait:
                pipeline.last_step.finish()
            intake.forget()
            registration.follow_update()
        except BaseException:
            self._end_broken_step()
            raise
        return replace(report, step=number)

    def _end_broken_step(self) -> None:
        """After an error or an interrupt in a step: its gradients are gone, and no reader waits for parameters."""
        parts = self.parts
        parts.registration.follow_update(broken=True)  # first: further interrupts may end the waits below
        with suppress(Exception):  # the one that is being raised
            parts.pipeline.last_step.finish()
        with suppress(StateError):  # states that were updated in backward keep the gradients that they used
            parts.pipeline.drop_gradients()
        if self.partitioned is not None:
            self.partitioned.live.forget_order()
        parts.intake.forget()
        parts.registration.follow_update(broken=True)

    def _prepare(self, parts: Parts, *, boundary: bool) -> tuple[list[Hyper], list[int]]:
        """Check everything that an update needs, take the gradients that are in ``p.grad``, and return the
        hyperparameters of each group and the group of each parameter.

        Deferred ones are taken at the boundary only.

        Raises as ``step`` does; nothing has changed then.
        """
        hypers, registration = self._hypers(), parts.registration
        if boundary:
            if self.partitioned is not None:
                self.partitioned.gathering.check_closed()
            if self.config.update_in_backward:  # else no gradient has been used yet
                groups = registration.grouping(self.param_groups).groups
                arguments = StepArguments(hypers, (), self._divisor(parts.intake.averages), groups)
                parts.pipeline.early.check_expected(arguments)
        for g, rule in registration.grouping(self.param_groups).rules:
            try:
                rule.check(hypers[g])
            except ConfigError as error:
                raise ConfigError(f"parameter group {g}: {error}") from None
        # Among ranks a gradient may be on one of them only; there ``requires_grad`` decides.
        self.take_on_unfrozen(with_gradient=parts.pipeline.device.world_size == 1)
        registration.check_unchanged()
        grouping = registration.grouping(self.param_groups)
        parts.intake.take_present(grouping.left_out, boundary=boundary)
        return hypers, grouping.groups

    def expect_step(self, *, average: bool = True) -> None:
        """Announce that ``step`` follows the backward that now begins, so that parameters may be written during it.

        Autograd then raises if it would read a parameter that was written; other readers wait.
        """
        pipeline, registration = self.parts.pipeline, self.parts.registration
        if registration.readers_can_wait:
            tensors, groups = registration.current_tensors(), registration.grouping(self.param_groups).groups
            arguments = StepArguments(self._hypers(), tensors, self._divisor(average), groups)
            pipeline.early.expect_step(arguments, registration.before_send)

    def _divisor(self, averages: bool) -> float:
        """The divisor of summed gradients."""
        return float(self.config.gradient_accumulation_steps) if averages else 1.0

    # --- state -------------------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """States by parameter, as in ``torch.optim.Optimizer``: views of host memory.

        Values assigned to ``state``, ``state[p]`` or ``state[p]["exp_avg"]`` are copied into that memory. A parameter
        whose entry is deleted or left out starts again, with moments and a step count of 0.
        """
        return self._states if self._parts is None else self._parts.states.views

    @state.setter
    def state(self, states: Mapping[Any, Any]) -> None:
        if self._parts is None:
            self._states = states
        else:
            self._parts.states.assign(states)

    @whole("state_dict()")
    def state_dict(self) -> dict[str, Any]:
        """As ``torch.optim.Optimizer.state_dict``; the tensors are the live states in host memory.

        It does not hold gradients that wait for the next update. Under loss scaling it also has ``"loss_scale"``; if
        ``lr`` or ``betas`` is a function, the number of ``"updates"``. Each rank may call this on its own.
        """
        scaler, device = self.pipeline.scaler, self.pipeline.device
        if device.world_size == 1:
            self.flush()  # among ranks that would be collective under schedule="delayed"
        state = super().state_dict()
        if "state" in state:  # a hook may have replaced the whole dict
            state["state"] = plain_entries(state["state"])
        if device.world_size > 1:
            state["partition"] = partition(device)
        if self._scheduled():
            state["updates"] = self.updates
        return state if scaler is None else state | {"loss_scale": scaler.state_dict()}

    @whole("load_state_dict()")
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states of this class or of ``torch.optim.AdamW``; they stay on the host, each
        rounded to nearest if it is kept in a narrower format.

        Each rank loads its own part, or takes it from whole states. Schedules continue from the saved number of
        updates, or else from the step counts in the states.

        The model's parameters are not changed, and may be loaded before or after this. The next step uses a master
        weight if it rounds to the parameter; otherwise, and for torch's own states, which have none, the parameter.

        A dict that only says that the states are in shards (:func:`stub`) has the next step refused, unless the shards
        are loaded before it.

        Raises:
            StateError, ConfigError: the states are of another model or rank, of float64 or of no floating-point type,
                or a count or a hyperparameter is out of range; nothing has changed.
        """
        if IN_SHARDS in state_dict:
            self._await_states(state_dict[IN_SHARDS])
            return
        self.flush()
        final: dict[str, Any] = {}

        def check_and_hide(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            check_partition(self.pipeline.device, self.param_groups, state_dict)
            check_counts(state_dict, self.pipeline.scaler)
            final.update(state_dict)
            return hide_state(state_dict, take_counts)

        def take_counts() -> None:
            self.updates = int(final.get("updates", max(float(step) for step in self.pipeline.counts.steps)))
            if self.pipeline.scaler is not None and "loss_scale" in final:
                self.pipeline.scaler.load_state_dict(final["loss_scale"])

        hook = self.register_load_state_dict_pre_hook(check_and_hide)  # after those of others, which may fail
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        self._await_states(None)

    @property
    def awaits_states(self) -> bool:
        """True if a loaded file only said that the states are in shards, and these have not been loaded."""
        return self._awaiting is not None

    def _await_states(self, folder: str | None) -> None:
        """Refuse steps until states are loaded, which are in this folder; None: they are loaded."""

        def refuse(*_: Any) -> None:
            raise StateError(
                f"load_state_dict: the states are not in the file but in shards, in {folder}/ beside it, and have not "
                "been loaded; expected what saved them: Trainer(callbacks=[OffloadCallback()]), or save_in_shards() "
                "before Accelerate's load_state()"
            )

        if self._awaiting is not None:
            self._awaiting.remove()
        self._awaiting = None if folder is None else self.register_step_pre_hook(refuse)

    @whole("torch_state_dict()")
    def torch_state_dict(self, *, rank0_only: bool = True) -> dict[str, Any] | None:
        """A ``state_dict`` for ``torch.optim.AdamW`` (``Adam`` with ``adam_mode="adam"``), whole in any stage.

        On fp32 parameters of a multiple of 16 elements torch continues from it with the bits that this optimizer would
        give (``fused=True`` is set in its groups). The states are fp32 copies on the host, shaped as the parameters.
        Torch has no master weights; ``engine.export_safetensors(folder, dtype="float32")`` writes them. All ranks must
        call this. It begins with :meth:`flush`.

        Args:
            rank0_only: True returns None on the other ranks, False a copy on each rank.
        """
        return torch_state_dict(self, rank0_only=rank0_only)

    @whole("whole_states()")
    def whole_states(self, param: torch.Tensor, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
        """A copy of a parameter's states (``"master"``, ``"exp_avg"``, ``"exp_avg_sq"`` of AdamW), gathered from all
        ranks.

        In fp32 on the host, shaped and laid out in memory as the parameter. All ranks must call this.

        Args:
            names: the states to return; None: all.
        """
        self.follow_sizes()
        return self.parts.states.whole(param, names)

    @whole("load_master()")
    @changes("load_master()")
    def load_master(self, param: torch.Tensor, values: torch.Tensor) -> None:
        """Set a parameter's master weights to these values, and the parameter to the rounded values.

        All ranks must call this with the same values, of the parameter's shape.
        """
        self.parts.states.load_master(param, values)

    def __getstate__(self) -> dict[str, Any]:
        if self.pipeline.device.world_size > 1 or self.partitioned is not None:
            raise StateError(
                "copying or pickling an optimizer of several ranks or of partitioned parameters; expected its "
                "state_dict() to be copied"
            )
        own = {name: getattr(self, name) for name in ("config", "early_copy", "reads_wait", "updates", "casts")}
        state = {"state": defaultdict(dict, plain_entries(self.state))}
        return {**super().__getstate__(), **state, **own, "scaler": self.pipeline.scaler}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a state: ``load_state_dict`` calls this with hidden entries, copy and pickle on an empty object."""
        vars(self).setdefault("_parts", None)
        vars(self).setdefault("_model", None)
        after = state["state"].pop(Hidden, lambda: None)
        saved = {key: e.value if isinstance(e, Hidden) else e for key, e in state["state"].items()}
        entries = {p: entry for p, entry in saved.items() if isinstance(p, torch.Tensor) and entry}
        others = {key: entry for key, entry in saved.items() if not isinstance(key, torch.Tensor)}
        rest = {name: value for name, value in state.items() if name != "state"}
        if self._parts is None:
            scaler, casts = rest.pop("scaler"), rest.pop("casts")
            self._updates = rest.pop("updates")
            super().__setstate__(rest)
            self.report = None
            self._build(None, scaler=scaler, casts=casts)
            self.take_on_all(entries, self.param_groups)
            self.parts.states.load(entries)
        else:
            for g, group in enumerate(state["param_groups"]):
                hyper_of(g, group, self.rule_name)
            groups = [loaded(group, self.defaults) for group in state["param_groups"]]
            self._check_same_rules(groups)
            rules = {p: rule for rule, group in zip(self._rules(groups), groups, strict=True) for p in group["params"]}
            entries = self._parts.states.checked(entries, rules)
            self.take_on_all(entries, groups)  # needs memory, and changes no states that are there
            before = partial(super().__setstate__, {**rest, "param_groups": groups})
            self.parts.states.load(entries, before, after)
        self.state.update(others)

    def _check_same_rules(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise :class:`ConfigError` if parameters would be in a group of another rule than that of their states."""
        for g, (rule, group) in enumerate(zip(self._rules(groups), groups, strict=True)):
            for slot in self.slots:
                mine = self.pipeline.params[slot.index].rule
                if mine != rule and any(slot.param is param for param in group["params"]):
                    raise ConfigError(
                        f"load_state_dict: parameter group {g} is of {rule}, and the states of {slot.name!r} are of "
                        f"{mine}; expected the state dict of an optimizer with the same 'optimizer' in each group, and "
                        "a momentum of 0 in both or in none"
                    )

    def take_on_all(self, params: Iterable[torch.Tensor], groups: Sequence[Mapping[str, Any]]) -> None:
        """Make states for those of these parameters that have none."""
        new = {param for param in params if not self.has_states(param)}
        if new:
            named = [entry for g, group in enumerate(groups) for entry in named_params(g, group)]
            self._take_on([entry for entry in named if entry[1] in new], groups)

    def _rules(self, groups: Sequence[Mapping[str, Any]]) -> list[Rule]:
        config = replace(self.config, op_order=self.config.op_order or "torch")
        return [config.rule(group) for group in groups]

    def _take_on(self, named: Sequence[NamedParam], groups: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Make states for these parameters, and take their gradients from now on."""
        self.parts.take_on(named, self._rules(self.param_groups if groups is None else groups))


class OffloadedAdamW(OffloadedOptimizer):
    """AdamW with master weights and moments in host memory, updated by a C kernel.

    On fp32 parameters of a multiple of 16 elements the bits are those of ``torch.optim.AdamW(fused=True)``; other
    sizes follow the same arithmetic. The class keeps torch's optimizer protocol: ``param_groups`` hold the parameters
    themselves and are read at every step; parameters without a gradient are left alone; frozen parameters get
    states when they first have a gradient. Changes from outside are followed: ``p.copy_(...)`` and the like under
    ``no_grad``, ``load_state_dict``, ``p.data = ...`` and in-place writes through ``p.data``.

    A new optimizer that has all parameters of an earlier idle one takes over: the earlier one is flushed and closed,
    and the new one starts with new states. An earlier one is not idle while gradients wait for its update.

    ``state[p]`` holds ``step``, ``exp_avg``, ``exp_avg_sq`` and ``master`` on the host, in fp32 unless ``state_format``
    says otherwise: shaped as ``p``, or with several ranks this rank's part, one-dimensional. An fp32 parameter on the
    CPU is its own master weight, and with ``master_dtype="bfloat16"`` a bfloat16 one, too.

    Args:
        params: as any torch optimizer takes them: tensors, ``(name, tensor)`` pairs, or parameter groups.
        lr: learning rate: a number, a one-element tensor, or a function of the number of updates made so far. The
            value of a function (``betas`` may be one, too) is written to all ``param_groups`` before each update.
        config: an ``OffloadConfig``, a dict of its fields, or a DeepSpeed configuration: a dict, or a file's path.
        process_group: the ranks that partition the states and average the gradients; None: this process alone.
        early_copy: True takes each gradient during backward, as it appears, and frees it on the device. ``p.grad``
            then holds a stand-in that raises when used. False reads ``p.grad`` at ``step()``, so that clipping and
            unscaling from outside work as with torch's own optimizers.
        overrides: fields of ``OffloadConfig`` (``betas``, ``eps``, ``weight_decay``, ``gradient_clipping``, …).

    Raises:
        ConfigError, ParameterError, StateError, HostMemoryError: before anything is changed. Memory is looked for when
            an earlier optimizer has given way.
    """


class OffloadedSGD(OffloadedOptimizer):
    """SGD with master weights and momentum in host memory, as :class:`OffloadedAdamW` in everything else.

    On fp32 parameters of a multiple of 16 elements the bits are those of ``torch.optim.SGD(fused=True)``. ``state[p]``
    holds ``step``, ``momentum_buffer`` if the momentum is not 0, and ``master``. A momentum may change, but not from or
    to 0.
    """

    rule_name = "sgd"


CLASSES: dict[str, type[OffloadedOptimizer]] = {each.rule_name: each for each in (OffloadedAdamW, OffloadedSGD)}
"""By the value of ``OffloadConfig.optimizer``."""


def class_for(config: ConfigLike, overrides: Mapping[str, Any]) -> type[OffloadedOptimizer]:
    """The class of the optimizer that a configuration asks for."""
    name = named_in(config, overrides)
    return CLASSES[name] if isinstance(name, str) and name in CLASSES else OffloadedAdamW  # it refuses other names


def named_in(config: ConfigLike, overrides: Mapping[str, Any]) -> Any:
    """The value that is given for ``OffloadConfig.optimizer``; ``MISSING``: there is none."""
    if "optimizer" in overrides:
        return overrides["optimizer"]
    if isinstance(config, OffloadConfig):
        return config.optimizer
    given = config.get("optimizer", MISSING) if isinstance(config, Mapping) else MISSING
    return MISSING if isinstance(given, Mapping) else given  # DeepSpeed has a section of this name


def _refuse_engine_fields(config: OffloadConfig) -> None:
    """Raise :class:`ConfigError` for fields that only an Engine follows."""
    default = OffloadConfig()
    engines = [name for name in FIELDS if "loss_scale" in name]
    engines += ["gradient_accumulation_steps", "offload_param", "buffer_dtype", "cast_inputs", "leaf_modules"]
    engines += ["stage"] if config.stage == 3 else []
    for name in engines:
        if getattr(config, name) != getattr(default, name):
            raise ConfigError(
                f"{name}={getattr(config, name)!r} is what an Engine does; expected it in wrap(model, ...): the "
                "optimizer alone takes gradients as they are"
            )
