"""``OffloadedAdamW`` and those of other rules: ``torch.optim.Optimizer`` with states in host memory."""

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, replace
from typing import Any, Self, SupportsFloat, Unpack

import torch
import torch.distributed as dist
from torch import nn

from offload_core.config.options import FIELDS, ConfigLike, OffloadConfig
from offload_core.deepspeed import translation
from offload_core.engine import Checkpoints, Engine, LossScaler, StateLock, StepReport, changes, consistent
from offload_core.errors import CollectiveError, ConfigError, ParameterError, StateError
from offload_core.memory.report import DeviceUse, MemoryReport
from offload_core.support.checks import integer
from offload_core.support.last_words import say_error_last
from offload_core.support.threads import uninterrupted
from offload_core.support.where import answer_signals

from ..internals.compiled import untraced
from ..internals.private import NO_BACKWARD, backward_number, grad_mode_kept, no_torch_function
from ..params import pending
from ..params.casting import Casts
from ..params.dtensor import ranks_of, shards_to_come
from ..params.slots import Slot, owner_of
from ..ranks.collectives import checked_group
from ..ranks.device import device_use
from ..stage3.leaf_modules import mark_leaf
from ..stage3.sharding import NoSharding, Sharding
from ..training.components import Components, Foundation, trained
from ..training.device_memory import ReleaseReport
from ..training.groups import (
    OptimizerSettings,
    defaults_of,
    groups_of_params,
    hypers_of,
    names_in,
    number,
    numbers,
    under_schedules,
    with_own_defaults,
    without_names,
    without_torchs_options,
)
from ..training.registration import NamedParam, named_in, named_params
from ..training.shared_tensors import note_optimizer
from ..training.state_views import plain_entries
from ..training.steps import Steps
from .lives import Closed, GaveWay, Life, Open, OpenAlone, WaitingForShards
from .matrix_groups import groups_for
from .state_dicts import IN_SHARDS, AwaitedStates, LoadedState, checked_and_hidden, completed, torch_state_dict


class OffloadedOptimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` with master weights and states in host memory, updated by a C kernel: the base of
    :class:`OffloadedAdamW`, which says what it does, and of the classes of other rules."""

    rule_name = "adamw"
    """The value of ``OffloadConfig.optimizer``: the rule of groups that name none."""

    # Not class attributes: Lightning's wrapper is a subclass, and only asks the optimizer for what it lacks itself.
    report: StepReport | None
    """The report of the last ``step``."""
    _life: Life
    """Whether it waits for shards, is open or is closed."""
    _model: "weakref.ref[nn.Module] | None"
    """An engine's model, which names the parameters of groups that are added; None: there is none."""
    sharding: Sharding
    """The model's parameters in shards (stage 3)."""
    _ranks: frozenset[int]
    """The ranks that partition the states; empty: this process alone."""
    names: dict[torch.Tensor, str]
    """The model's names of an engine's parameters whose groups have none."""
    takes_names: bool
    """True if groups have the names that come with parameters, as in torch; False: ``names`` has them."""

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
        say_error_last()
        self._begin(params, lr, config, process_group, overrides, early_copy=early_copy)

    @classmethod
    def of_engine(
        cls,
        model: nn.Module,
        params: Iterable[Any],
        config: ConfigLike,
        process_group: Any,
        overrides: Mapping[str, Any],
        *,
        all_of_it: bool,
        named: bool,
    ) -> Self:
        """The optimizer of an engine, which counts micro-steps, scales losses and partitions the model's parameters.

        The other arguments are those of the constructor, with ``lr`` among ``overrides``.

        Args:
            all_of_it: True if ``params`` are those of the whole model, which may need several rules.
            named: True if the caller gave names. Otherwise the model's are in ``names``, and not in groups and state
                dicts, so that those of unnamed parameters fit.
        """
        optimizer = cls.__new__(cls)
        settings = {name: value for name, value in overrides.items() if name != "lr"}
        lr = overrides.get("lr")
        optimizer._begin(
            params,
            lr,
            config,
            process_group,
            settings,
            early_copy=True,
            model=model,
            all_of_it=all_of_it,
            named=named,
        )
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
        all_of_it: bool = False,
        named: bool = True,
    ) -> None:
        self._life = Life()
        answer_signals(self)
        self.names = {}
        self.takes_names = named
        self._model = None if model is None else weakref.ref(model)
        settings = without_torchs_options(overrides)
        if lr is not None:
            settings["lr"] = number("lr", lr)
        betas = settings.get("betas")
        if betas is not None:
            settings["betas"] = numbers("betas", betas)
        asked, process_group = process_group, checked_group(process_group)
        world_size = 1 if process_group is None else dist.get_world_size(process_group)
        if _asked_for(config, settings) is MISSING:
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
        if not all_of_it and (self.config.muon_params is not None or self.config.adamw is not None):
            raise ConfigError(
                f"muon_params={self.config.muon_params!r} and adamw={self.config.adamw!r} choose among the parameters "
                "of a whole model, and here they are given; expected groups: {'params': ..., 'optimizer': 'adamw', "
                "'lr': ...} for those that Muon leaves to AdamW"
            )
        self.early_copy = early_copy
        self.report = None
        if isinstance(params, torch.Tensor):
            raise ParameterError("params: got a tensor, expected an iterable of tensors: write [tensor]")
        params = list(params)
        if model is not None and all_of_it:
            is_first = process_group is None or dist.get_rank(process_group) == 0
            params = groups_for(model, params, self.config, tell=is_first)
        if not params:
            raise ParameterError("params: got none, expected at least one parameter; was the iterator used up already?")
        if not named:
            params, self.names = without_names(params)
        own: dict[str, Any] = {"lr": lr} if isinstance(lr, torch.Tensor) else {}
        own |= {"betas": tuple(betas)} if isinstance(betas, tuple | list) else {}
        super().__init__(params, {**defaults_of(self.config), **own})
        if model is None and asked is None and shards_to_come():
            hypers_of(self.param_groups, self.config, self.updates)  # checks them
            self._life = WaitingForShards(self.param_groups[0]["params"][0])
            self._state_lock, self.awaited, self.sharding = StateLock(), AwaitedStates(), NoSharding()
        else:
            self._build(process_group, model)

    def _build(
        self,
        process_group: Any,
        model: nn.Module | None = None,
        scaler: LossScaler | None = None,
        casts: Casts | None = None,
    ) -> None:
        """Make the core and the other components, and register the trainable parameters of all groups.

        Args:
            scaler: the loss scaler of a copied or unpickled optimizer; an Engine's follows from the configuration.
            casts: likewise, the element types that its parameters got.
        """
        hypers_of(self.param_groups, self.config, self.updates)  # checks them
        self.awaited = AwaitedStates()
        """The states that a loaded file named and did not hold."""
        named = named_in(self.param_groups, self.names)
        members = () if process_group is None else dist.get_process_group_ranks(process_group)
        self._ranks = frozenset(members or ranks_of(param for _, param, _ in trained(named)) or ())
        config = replace(self.config, op_order=self.config.op_order or "torch")
        self._foundation = made = Foundation.of(
            self,
            named,
            self.param_groups,
            config,
            process_group,
            model,
            early_copy=self.early_copy,
            scaler=scaler,
            casts=casts,
        )
        self.sharding = made.sharding
        self._open(trained(named), model)
        note_optimizer(self)

    def _make_components(self) -> None:
        """Make the components that hold parameters and states, of the parameters that are in the groups."""
        self._build(None)

    def _open(self, named: Sequence[NamedParam], model: nn.Module | None) -> None:
        """Make the components that hold parameters and states, and register these parameters."""
        components = self._foundation.components(self, named, self.param_groups, model)
        components.core.update_count = self._life.updates
        steps = Steps(components)
        self._life = OpenAlone(steps) if self._model is None else Open(steps)
        steps.hypers(self.param_groups)  # from here on nothing else may set what functions give
        self._state_lock = components.core.state_lock
        """Held while states are read or changed; see ``offload_core/step/state_lock.py``."""
        self._checkpoints = components.core.checkpoints

    @property
    def updates(self) -> int:
        """Updates made so far."""
        return self._life.updates

    @updates.setter
    def updates(self, count: int) -> None:
        self._life.updates = count

    @property
    def steps(self) -> Steps:
        """The part that makes steps of the others; :class:`StateError` once the optimizer is closed."""
        return self._life.steps_of(self)

    @property
    def components(self) -> Components:
        """The optimizer's components that hold parameters and states; :class:`StateError` once it is closed."""
        return self._life.steps_of(self).components

    @property
    def core(self) -> Engine:
        """The core that holds the states."""
        return self._life.steps_of(self).components.core

    @consistent("flush()")
    def flush(self) -> None:  # waits
        """Wait until parameters and states hold the result of the last ``step``, also under ``schedule="delayed"``.

        That schedule holds back the last step's parameters; after a flush the next forward sees them a step early.
        """
        self.follow_sizes()
        self._state_lock.change("flush()", self.components.registration.flush)
        self.components.device_memory.finish_restore()

    @property
    def casts(self) -> Casts:
        """The element types of the model's tensors."""
        self._life.begin(self)
        return self._foundation.casts

    @property
    def state_lock(self) -> StateLock:
        """Held while states are read or changed."""
        self._life.begin(self)
        return self._state_lock

    @property
    def checkpoints(self) -> Checkpoints:
        """Saves and loads the states."""
        self._life.begin(self)
        return self._checkpoints

    @property
    def slots(self) -> list[Slot]:
        """One for each parameter that has states, in the core's order."""
        return [*self._life.slots.values()]

    def has_states(self, param: torch.Tensor) -> bool:
        """True if the optimizer has states of the parameter; a frozen one that was trained before has them, too."""
        return param in self._life.slots

    def check_unchanged(self) -> None:
        """Raise :class:`ParameterError` if a parameter has another size, type, device or order than its states."""
        if self._life.is_open and not self.sharding.is_open:  # the end of a block checks, too
            self.components.registration.check_unchanged()

    @property
    def is_open(self) -> bool:
        """True until the optimizer is closed."""
        return self._life.is_open

    def held_tensors(self) -> list[torch.Tensor]:
        """The tensors that the optimizer and its engine use: all of the model's, and those that have states."""
        model = None if self._model is None else self._model()
        of_model = [] if model is None else [*model.parameters(), *model.buffers()]
        return [*of_model, *(slot.param for slot in self.slots)]

    @untraced
    def where(self) -> str:
        """Return where this process is, as lines to print while a step does not return: what may be done, counts,
        exchanges between ranks, tensors and threads. The page on troubleshooting says how to read them.

        Waits for no lock and raises nothing, so that signal handlers and other threads may call it at any time.
        """
        return self._life.where(self._tensors_where)

    def _tensors_where(self) -> str:
        with no_torch_function():
            return pending.where(self.held_tensors())

    @property
    def loss_scale(self) -> float:
        """The factor on the loss in the next backward; 1.0 without loss scaling."""
        return self.core.loss_scale

    cur_scale = loss_scale

    @property
    def overflow(self) -> bool:
        """True if the last step was skipped, because a gradient had an inf or a NaN."""
        return self.report is not None and self.report.skipped in ("overflow", "non-finite")

    @property
    def sent_bytes(self) -> int:
        """Bytes of gradients and parameters that this rank has sent to other ranks."""
        core = self.core
        self._state_lock.change("sent_bytes", core.finish)
        device = core.device
        return device.sent_bytes + self.sharding.sent_bytes

    def memory_report(self, model: nn.Module | None = None) -> MemoryReport:
        """Planned and measured bytes.

        Args:
            model: the trained model; its tensors that the optimizer does not have (frozen parameters, buffers) are
                counted, too.
        """
        return self.components.registration.memory_report(groups_of_params(self.param_groups), model)

    def device_use(self) -> DeviceUse | None:
        """Return the memory in use on the device, now and at its peak, as torch's allocator counts it.

        None: the parameters are in host memory, or the device's allocator keeps no statistics.
        """
        return device_use(self.components.registration.device)

    # --- parameters and groups -----------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As ``torch.optim.Optimizer.add_param_group``; on an error nothing has changed."""
        if not isinstance(param_group, dict):
            super().add_param_group(param_group)  # raises torch's own error
        where = f"parameter group {len(self.param_groups)}"
        param_group = with_own_defaults(where, under_schedules(self.config, param_group), self.rule_name)
        params = param_group["params"]
        if self.param_groups and not self.takes_names and not isinstance(params, set):
            param_group = self._unnamed(param_group)
        elif self.param_groups and "param_names" in self.param_groups[0] and not isinstance(params, torch.Tensor | set):
            params = list(params)  # torch requires names for all groups or for none
            if params and isinstance(params[0], torch.Tensor):
                g = len(self.param_groups)
                model = None if self._model is None else self._model()
                names = {} if model is None else names_in(model)
                params = [(names.get(p, f"group {g}, parameter {i}"), p) for i, p in enumerate(params)]
            param_group = {**param_group, "params": params}
        super().add_param_group(param_group)
        if not self._life.is_open:  # called by Optimizer.__init__: _build registers all groups at once
            return
        try:
            self.steps.hypers(self.param_groups)
            named = named_params(len(self.param_groups) - 1, self.param_groups[-1], self.names)
            self.components.registration.check_new(named)
            self.components.register(trained(named), self.param_groups)
        except Exception:
            self.param_groups.pop()
            raise

    def _unnamed(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The group without names, which go to ``names``."""
        params = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        model = None if self._model is None else self._model()
        known = {} if model is None else names_in(model)
        for i, entry in enumerate(params):
            name, params[i] = entry if isinstance(entry, tuple) else (known.get(entry), entry)
            if name is not None:
                self.names[params[i]] = name
        return {**{key: value for key, value in group.items() if key != "param_names"}, "params": params}

    @consistent("mark_leaf_modules()")
    def mark_leaf_modules(self, modules: Iterable[nn.Module], *, leaf: bool = True) -> None:
        """Have modules of an engine's model be leaf modules from now on (``OffloadConfig.leaf_modules``), or no longer.

        All ranks must call this, between two updates. In stages 1 and 2 it changes nothing.

        Raises:
            StateError: gradients wait for an update.
        """
        self._state_lock.change("mark_leaf_modules()", self.components.mark_leaves, [*modules], leaf)

    def follow_sizes(self) -> None:
        """Before the first update, make states anew in stages 1 and 2 if parameters have grown (a vocabulary,
        embeddings), or if SGD has got a momentum, as OneCycleLR gives it. Elements that were there, at the same
        indices, keep their master weights. With several ranks it is collective then.

        Raises:
            ParameterError, HostMemoryError: there can be no such states; the optimizer is closed.
        """
        self._life.follow_shards(self)
        self._life.begin(self)
        if not self._life.is_open or self.updates or self.sharding.is_fixed:
            return
        components = self.components
        changed = components.registration.grown() or components.registration.have_other_states(self.param_groups)
        gradients = self.core.gradients
        if changed and not gradients.are_waiting:
            self.checkpoints.wait()
            self._start_over(components)

    @changes("a resize of parameters")
    def _start_over(self, components: Components) -> None:
        slots, masters = components.registration.slots, components.states.masters()
        named = [entry for entry in named_in(self.param_groups, self.names) if entry[1] in slots]
        components.unregister()
        try:
            components.core.start_over()
            self._open(named, None if self._model is None else self._model())
            self.components.states.keep_masters(masters)
        except BaseException:
            self._life = Closed()
            components.core.close()
            raise

    @consistent("close()")
    def close(self) -> None:
        """Remove the hooks from the parameters, discard gradients on the host, and free the states."""
        if self._life.is_open:
            self.checkpoints.wait()
            components = self.components
            with suppress(CollectiveError):  # it must end without a rank that was lost, too
                self.restore()
                components.device_memory.finish_restore()
                components.core.conclude(components.registration.flush)
        self.sharding.make_whole()
        uninterrupted(self._end)  # a second close() after half of it could not make the parameters whole again

    def _end(self) -> None:
        self.sharding.close()
        if self._life.is_open:
            self.components.close()
        self._life = self._life.closed()
        self.sharding = NoSharding()

    # --- phases ----------------------------------------------------------------------------------------

    @property
    def is_released(self) -> bool:
        """True between :meth:`release` and :meth:`restore`."""
        return self._life.released

    def release(self) -> ReleaseReport:
        """Give back the device memory of the parameters that have states, until :meth:`restore`: their master weights
        are on the host.

        ``engine.release()`` gives back that of a whole model. Gradients in ``p.grad`` stay. As there, all ranks must
        call this.
        """
        return self.release_tensors((slot.name, slot.param) for slot in self.slots)

    @consistent("release()")
    def release_tensors(self, named: Iterable[tuple[str, torch.Tensor]], keep: Collection[str] = ()) -> ReleaseReport:
        """As ``Engine.release``, for these tensors."""
        self.follow_sizes()
        self.checkpoints.wait()
        return self._state_lock.change("release()", self.components.device_memory.release, named, keep)

    @consistent("restore()")
    def restore(self) -> None:
        """Take the device memory again that was given back, and fill it, in the background: a reader waits for the
        parameter that it reads. Does nothing if nothing is released. All ranks must call this.

        Raises:
            DeviceMemoryError: on all ranks, if one has no room. All is still released.
        """
        if self.is_released:
            self._state_lock.change("restore()", self.components.device_memory.restore)

    # --- an optimizer that takes over ------------------------------------------------------------------

    def keeps_from(self, other: "OffloadedOptimizer") -> str | None:
        """As :meth:`Owner.keeps_from`."""
        members = groups_of_params(other.param_groups)
        left = [slot.name for slot in self.slots if slot.param not in members]
        if other.param_groups is self.param_groups:
            return "of which this one is a shallow copy (copy.deepcopy() makes a twin)"
        if left:
            return f"which also has {', '.join(map(repr, left[:2]))}{', …' * (len(left) > 2)}, and this one does not"
        if self.sharding.is_fixed:
            return "which has it in shards (stage 3), and not all may fit whole"
        if not self._ranks <= other._ranks:
            return f"which partitions its states over the ranks {sorted(self._ranks)}, and this one does not"
        return self.occupied()

    def occupied(self) -> str | None:
        """Return the reason why it cannot end now; None: it is idle."""
        components = self.components
        gradients = self.core.gradients
        running = (
            backward_number() != NO_BACKWARD or components.grad_hooks.in_backward or self._state_lock.is_changing()
        )
        if running or components.grad_hooks.fresh or components.grad_hooks.has_deferred or gradients.are_waiting:
            return f"which is {'running' if running else 'not idle: gradients wait for its update'}"
        return None

    def give_way(self) -> None:
        """As :meth:`Owner.give_way`."""
        self.close()
        self._life = GaveWay(self.updates)

    # --- step --------------------------------------------------------------------------------------

    def accumulate_over(self, micro_steps: int) -> None:
        """As ``Engine.set_gradient_accumulation_steps``."""
        core = self.core
        integer("gradient_accumulation_steps", micro_steps, least=1)
        what, waiting = "set_gradient_accumulation_steps()", self.components.grad_hooks.has_deferred
        self._state_lock.change(what, core.accumulate_over, micro_steps, waiting=waiting)
        self.config = replace(self.config, gradient_accumulation_steps=micro_steps)

    @untraced
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``torch.optim.Optimizer.zero_grad``; gradients on the host are discarded too."""
        if self._life.follow_shards(self):
            super().zero_grad(set_to_none)
            return
        try:
            self._state_lock.change("zero_grad()", self.components.grad_hooks.discard)
        except Exception:
            if not self.components.core.usable:  # those of a backward that broke off must not wait for a load
                super().zero_grad(set_to_none)
            raise
        super().zero_grad(set_to_none)

    @untraced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, and describe the update in ``report``.

        Raises:
            ParameterError, GradientError, ConfigError: something does not fit; no parameter and no state changed.
        """
        loss = None
        if closure is not None:
            with grad_mode_kept(), torch.enable_grad():
                loss = closure()
        self.follow_sizes()
        with grad_mode_kept(), torch.no_grad():
            self.report = self.steps.update(self.param_groups)
        return loss

    # --- state -------------------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """States by parameter, as in ``torch.optim.Optimizer``: views of host memory.

        Values assigned to ``state``, ``state[p]`` or ``state[p]["exp_avg"]`` are copied into that memory. A parameter
        whose entry is deleted or left out starts again, with moments and a step count of 0.
        """
        self._life.follow_shards(self)
        return self._life.states

    @state.setter
    def state(self, states: Mapping[Any, Any]) -> None:
        self._life.states = states

    @consistent("state_dict()")
    def state_dict(self) -> dict[str, Any]:
        """As ``torch.optim.Optimizer.state_dict``; the tensors are the live states in host memory. If some are in a
        format of which torch has no tensors (8 bits, split masters), or on disk, all are copies of this moment.

        It does not hold gradients that wait for the next update. Under loss scaling it also has ``"loss_scale"``; if
        ``lr`` or ``betas`` is a function, the number of ``"updates"``; under a rule whose updates torch does not count,
        ``"steps"`` by the parameters' numbers. Each rank may call this on its own.
        """
        if self._life.follow_shards(self):
            return super().state_dict()
        if self.core.world_size == 1:
            self.flush()  # among ranks that would be collective under schedule="delayed"
        return completed(super().state_dict(), self.core)

    @consistent("load_state_dict()")
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
        if self._life.follow_shards(self):
            if not state_dict["state"] and IN_SHARDS not in state_dict:  # Accelerate loads what it has just asked for
                super().load_state_dict(state_dict)
                return
            self._life.begin(self)
        if IN_SHARDS in state_dict:
            self.awaited.begin(self, state_dict[IN_SHARDS])
            return
        self.flush()
        hook = self.register_load_state_dict_pre_hook(checked_and_hidden)  # after those of others, which may fail
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        self.awaited.end()

    @consistent("torch_state_dict()")
    def torch_state_dict(self, *, rank0_only: bool = True) -> dict[str, Any] | None:
        """A ``state_dict`` for ``torch.optim.AdamW`` (``Adam`` with ``adam_mode="adam"``), whole in any stage.

        On fp32 parameters of a multiple of 8 elements torch continues from it with the bits that this optimizer would
        give (``fused=True`` is set in its groups). The states are fp32 copies on the host, shaped as the parameters.
        Torch has no master weights; ``engine.export_safetensors(folder, dtype="float32")`` writes them. All ranks must
        call this. It begins with :meth:`flush`.

        Args:
            rank0_only: True returns None on the other ranks, False a copy on each rank.
        """
        return torch_state_dict(self, rank0_only=rank0_only)

    @consistent("whole_states()")
    def whole_states(self, param: torch.Tensor, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
        """A copy of a parameter's states (``"master"``, ``"exp_avg"``, ``"exp_avg_sq"`` of AdamW), gathered from all
        ranks.

        In fp32 on the host, shaped and laid out in memory as the parameter. All ranks must call this.

        Args:
            names: the states to return; None: all.
        """
        self.follow_sizes()
        return self._state_lock.change("whole_states()", self.components.states.whole, param, names)

    @consistent("load_master()")
    def load_master(self, param: torch.Tensor, values: torch.Tensor) -> None:
        """Set a parameter's master weights to these values, and the parameter to the rounded values.

        All ranks must call this with the same values, of the parameter's shape.
        """
        components = self.components
        self._state_lock.change("load_master()", components.states.load_master, param, values)

    @consistent("own_states()")
    def own_states(self, param: torch.Tensor, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
        """A copy of this rank's part of a parameter's states, by name: one-dimensional, in fp32 on the host.

        On one rank it is all of them, in the parameter's order in memory; a DTensor's part is that of its local tensor.

        Args:
            names: the states to return; None: all.
        """
        self.follow_sizes()
        return self._state_lock.change("own_states()", self.components.states.own, param, names)

    @consistent("load_state()")
    def load_state(self, param: torch.Tensor, name: str, values: torch.Tensor, *, own: bool = False) -> None:
        """Overwrite a state of a parameter (``"exp_avg"``), rounded to nearest where it is kept in a narrower format.

        All ranks must call this. ``"master"`` also changes the parameter, as :meth:`load_master` does.

        Args:
            values: of the parameter's shape and the same on all ranks.
            own: True takes this rank's part instead, as :meth:`own_states` returns it.

        Raises:
            StateError: there is no such state, or the values do not fit it; nothing has changed.
        """
        self.follow_sizes()
        self._state_lock.change("load_state()", self.components.states.load_state, param, name, values, own=own)

    # --- gradients -----------------------------------------------------------------------------------

    @consistent("whole_gradient()")
    def whole_gradient(self, param: torch.Tensor) -> torch.Tensor | None:
        """A copy of the gradient that the next update would use, with ``early_copy=True`` and in an engine.

        It is the sum of the gradients that came since the last update, averaged as the update averages them (over
        ranks and accumulation steps), without the loss scale and before clipping. In fp32 on the host, shaped and laid
        out in memory as the parameter. All ranks must call this between ``backward`` and ``step``; further backwards
        may follow.

        Returns:
            None if the parameter has had no gradient since the last update, on any rank, or has no states.

        Raises:
            StateError: ``update_in_backward`` has used the gradient; it is still in ``p.grad``; a backward is running.
        """
        return self._state_lock.change("whole_gradient()", self.components.gradients.whole, param)

    @consistent("own_gradient()")
    def own_gradient(self, param: torch.Tensor) -> torch.Tensor | None:
        """As :meth:`whole_gradient`, but only this rank's part, one-dimensional: the elements of :meth:`own_states`."""
        return self._state_lock.change("own_gradient()", self.components.gradients.own, param)

    @consistent("load_gradient()")
    def load_gradient(self, param: torch.Tensor, values: torch.Tensor, *, own: bool = False) -> None:
        """Overwrite the gradient that the next update uses. The norm, clipping and the search for an inf or a NaN
        follow the new values; a gradient of a further backward is added to them. All ranks must call this. Where
        gradients are copied to the host in 16 bits, those of the parameter's bucket take fp32 from then on.

        Args:
            values: as :meth:`whole_gradient` returns them, the same on all ranks.
            own: True takes this rank's part instead, as :meth:`own_gradient` returns it.

        Raises:
            StateError: as :meth:`whole_gradient`; or no rank has had a gradient of the parameter since the last update.
            GradientError, ParameterError: the values do not fit the parameter, or it has no states.
        """
        self._state_lock.change("load_gradient()", self.components.gradients.load, param, values, own=own)

    def __getstate__(self) -> dict[str, Any]:
        if self.core.world_size > 1 or self.sharding.is_fixed:
            raise StateError(
                "copying or pickling an optimizer of several ranks or of partitioned parameters; expected its "
                "state_dict() to be copied"
            )
        own = {
            name: getattr(self, name) for name in ("config", "early_copy", "updates", "casts", "names", "takes_names")
        }
        state = {"state": defaultdict(dict, plain_entries(self.state))}
        return {**super().__getstate__(), **state, **own, "scaler": self.core.scaler}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a state: ``load_state_dict`` calls this with hidden entries, copy and pickle on an empty object."""
        for name, value in (("_life", Life()), ("_model", None), ("names", {}), ("takes_names", True)):
            vars(self).setdefault(name, value)
        if self._life.follow_shards(self):
            super().__setstate__({"param_groups": state["param_groups"]})
            return
        given = LoadedState.of(state)
        if not self._life.is_open:
            rest = given.rest
            scaler, casts = rest.pop("scaler"), rest.pop("casts")
            self.updates = rest.pop("updates")
            super().__setstate__(rest)
            self.report = None
            self._build(None, scaler=scaler, casts=casts)
            self.components.register_all(given.entries, self.param_groups)
            self.components.states.load(given.entries)
        else:
            given.load(self.components, self.defaults, super().__setstate__)
        self.state.update(given.others)


class OffloadedAdamW(OffloadedOptimizer):
    """AdamW with master weights and moments in host memory, updated by a C kernel.

    On fp32 parameters of a multiple of 8 elements the bits are those of ``torch.optim.AdamW(fused=True)``; other
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
        process_group: the ranks that partition the states and average the gradients; None: this process alone, in a
            program whose processes have joined each other; ``"alone"``: this process alone, wherever it runs.
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

    On fp32 parameters of a multiple of 8 elements the bits are those of ``torch.optim.SGD(fused=True)``. ``state[p]``
    holds ``momentum_buffer`` if the momentum is not 0, and ``master``. ``state[p]["step"]`` counts its updates; no list
    of states has it, as torch's SGD has no count. A momentum may change, but not from or to 0.
    """

    rule_name = "sgd"


class OffloadedLion(OffloadedOptimizer):
    """Lion (Chen et al., arXiv:2302.06675) with master weights and momentum in host memory, as :class:`OffloadedAdamW`
    in everything else. Torch has no Lion: docs/numerics.md defines the bits.

    ``state[p]`` holds ``exp_avg`` and ``master``; ``state[p]["step"]`` counts its updates, as in SGD.
    """

    rule_name = "lion"


class OffloadedAdagrad(OffloadedOptimizer):
    """Adagrad with master weights and sums of squares in host memory, as :class:`OffloadedAdamW` in everything else.

    On fp32 parameters of a multiple of 8 elements the bits are those of ``torch.optim.Adagrad(fused=True)``.
    ``state[p]`` holds ``step``, ``sum`` and ``master``. Sums begin with ``initial_accumulator_value``.
    """

    rule_name = "adagrad"


class OffloadedMuon(OffloadedOptimizer):
    """Muon with master weights and momentum in host memory, as :class:`OffloadedAdamW` in everything else.

    It updates matrices, and stacks of matrices one by one. Others need a group of another optimizer,
    ``{"params": ..., "optimizer": "adamw"}``; ``wrap(model, optimizer="muon")`` makes the groups itself. The device
    orthogonalizes the directions of the steps. On the CPU the bits are those of ``torch.optim.Muon``, over fp32 master
    weights if the parameters are narrower. ``state[p]`` holds ``momentum_buffer`` in fp32, and ``master``;
    ``state[p]["step"]`` counts its updates, as in SGD.
    """

    rule_name = "muon"


CLASSES: dict[str, type[OffloadedOptimizer]] = {
    each.rule_name: each for each in (OffloadedAdamW, OffloadedSGD, OffloadedLion, OffloadedAdagrad, OffloadedMuon)
}
"""By the value of ``OffloadConfig.optimizer``."""


def optimizer_of(param: torch.Tensor) -> OffloadedOptimizer | None:
    """The open optimizer that has states of a parameter; None: there is none."""
    owner = owner_of(param)
    return owner if isinstance(owner, OffloadedOptimizer) else None


def mark_leaves(model: nn.Module, modules: list[nn.Module], *, leaf: bool) -> list[nn.Module]:
    """Have modules of a model be leaf modules, or no longer, of engines that it has and of later ones; return them."""
    for module in modules:
        mark_leaf(module, leaf)
    for optimizer in dict.fromkeys(map(optimizer_of, model.parameters())):
        if optimizer is not None:
            optimizer.mark_leaf_modules(modules, leaf=leaf)
    return modules


def class_for(config: ConfigLike, overrides: Mapping[str, Any]) -> type[OffloadedOptimizer]:
    """The class of the optimizer that a configuration asks for."""
    name = _asked_for(config, overrides)
    return CLASSES[name] if isinstance(name, str) and name in CLASSES else OffloadedAdamW  # it refuses other names


def _asked_for(config: ConfigLike, overrides: Mapping[str, Any]) -> Any:
    """The value that is given for ``OffloadConfig.optimizer``; ``MISSING``: there is none."""
    if "optimizer" in overrides:
        return overrides["optimizer"]
    if isinstance(config, OffloadConfig):
        return config.optimizer
    return translation.optimizer_in(config)


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
