"""Reads, assigns and loads an optimizer's states as torch tensors over host memory."""

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from offload_core.engine import Engine
from offload_core.errors import StateError
from offload_core.layout.regions import InMemory
from offload_core.ranks.collectives import merged
from offload_core.rules import MASTER, STATE_NAMES, Rule
from offload_core.support.checks import checked_count, shown
from offload_core.support.threads import uninterrupted

from ..internals.private import grad_mode_kept
from ..params.slots import Slot
from ..params.tensors import ELEMENT_TYPES, flat, flat_like, memory, shaped, shaped_like
from ..ranks.device import as_torch
from ..stage3.gathering import gathered_parameters
from .dcp_tensors import Held, PartOfWhole
from .registration import Registration
from .rule_words import counted
from .state_views import ProtectedDict, Views, plain_entries, state_views


class States(ProtectedDict, defaultdict):
    """``optimizer.state``, which maps a parameter to its states. Reading an entry waits for the last update to end.

    Args:
        finish: a method that waits for the last update.
        replace: a method that gives a parameter new states, by name. Without names it resets the parameter's states.
    """

    def __init__(self, finish: Callable[[], None], replace: Callable[[torch.Tensor, Mapping[str, Any]], None]) -> None:
        super().__init__(dict)
        self._finish = weakref.WeakMethod(finish)
        self._replace = weakref.WeakMethod(replace)

    def hold(self, param: torch.Tensor, views: Views) -> None:
        """Add a parameter's entry. Later assignments and deletions change the entry's values, and do not remove it."""
        super().__setitem__(param, views)

    def held(self, param: torch.Tensor) -> Views:
        """Return a parameter's entry without waiting for an update, for code that changes states."""
        return cast(Views, super().__getitem__(param))

    def _wait(self) -> None:  # waits
        finish = self._finish()
        if finish is not None:
            finish()

    def _replaces(self, param: Any, entry: Mapping[str, Any]) -> bool:
        """Replace the values of the parameter's entry by the values of ``entry``, and return True. Return False if the
        parameter has no :class:`Views`, which :meth:`hold` adds."""
        replace = self._replace()
        if replace is None or not isinstance(super().get(param), Views):
            return False
        replace(param, entry)
        return True

    def __getitem__(self, param: Any) -> Any:
        self._wait()
        return super().__getitem__(param)

    def get(self, param: Any, default: Any = None) -> Any:
        self._wait()
        return super().get(param, default)

    def items(self) -> Any:
        self._wait()
        return super().items()

    def values(self) -> Any:
        self._wait()
        return super().values()

    def __setitem__(self, param: Any, entry: Any) -> None:
        if not self._replaces(param, entry):
            super().__setitem__(param, entry)

    def __delitem__(self, param: Any) -> None:
        if not self._replaces(param, {}):
            super().__delitem__(param)

    def __copy__(self) -> Any:
        return defaultdict(dict, self.items())

    copy = __copy__

    def __reduce_ex__(self, protocol: Any) -> Any:
        return defaultdict, (dict, plain_entries(self))


class TorchStates:
    """Reads, assigns and loads the states of an optimizer's parameters, as torch does.

    This object lives as long as the core, which holds the states themselves.
    """

    def __init__(self, core: Engine, registration: Registration) -> None:
        self._core = core
        self._state_lock = core.state_lock
        self._states, self._parameters = core.states, core.parameters
        self._registration = registration
        self.views = States(self.finish, self.replace)
        """``optimizer.state``."""

    def finish(self) -> None:  # waits
        """Wait until the last update has ended."""
        lock, what = self._state_lock, "a read of optimizer.state"
        lock.consistent(what, lock.change, what, self._core.finish)

    def hold(self, slot: Slot) -> None:
        """Add the parameter's states."""
        self.views.hold(slot.param, state_views(self._core, slot.index, slot.values, slot.placed))

    def count_written(self) -> None:
        """Before the first update, set ``step`` to 1 for each parameter whose momentum other code has written in
        place."""
        for slot in self._registration.slots.values():
            self.views.held(slot.param).count_written()

    def assign(self, states: Mapping[Any, Any]) -> None:
        """Set ``optimizer.state = states``: replace the states of the parameters in ``states``, and reset all
        others."""
        if states is not self.views:
            for key in self.views.keys() - states.keys():
                del self.views[key]
            self.views.update(states)

    def replace(self, param: torch.Tensor, entry: Mapping[str, Any]) -> None:
        """Give a parameter the states in ``entry``, which may lack the master weight. If ``entry`` is empty, reset all
        other states."""
        slot, held = self._registration.slots[param], self.views[param]
        rule = self._states.rule(slot.index)
        if entry := counted(entry, rule):
            entry = own_part(self._core, slot, held.of_whole, entry)
            check_entry(slot.name, held.shape, entry, rule.state_names)
        self._state_lock.change("an assignment to optimizer.state", self._registration.flush)
        entry = {name: held[name] for name in ("master",) if name in held} | dict(entry)
        self._replace("an assignment to optimizer.state", partial(self._load, slot, entry))

    def checked(
        self, entries: Mapping[torch.Tensor, Mapping[str, Any]], rules: Mapping[torch.Tensor, Rule]
    ) -> dict[torch.Tensor, Mapping[str, Any]]:
        """Check the given states, and return this rank's elements of them, by parameter.

        Args:
            rules: the update rule of each parameter.

        Raises:
            StateError: states do not fit their parameter.
        """
        own = {}
        for param, given in entries.items():
            entry = counted(given, rules[param])
            slot = self._registration.slots.get(param)
            if not entry:
                continue
            if slot is None:
                check_entry("?", param.shape, entry, rules[param].state_names)
            else:
                held = self.views[param]
                entry = own_part(self._core, slot, held.of_whole, entry)
                check_entry(slot.name, held.shape, entry, self._states.rule(slot.index).state_names)
            own[param] = entry
        return own

    def load(
        self,
        entries: Mapping[torch.Tensor, Mapping[str, Any]],
        before: Callable[[], object] = lambda: None,
        after: Callable[[], object] = lambda: None,
    ) -> None:
        """Replace all states by these entries. A parameter without an entry starts anew.

        Args:
            before, after: called before and after the replacement. An interrupt cannot come between the three.
        """

        def load() -> None:
            before()
            for slot in self._registration.slots.values():
                self._load(slot, entries.get(slot.param, {}))
            after()

        self._replace("load_state_dict()", load)

    def _replace(self, what: str, act: Callable[[], None]) -> None:
        """Replace states completely, even if a signal comes."""

        @torch.no_grad()  # in the section's own thread
        def section() -> None:
            act()

        self._parameters.check_present()
        self._state_lock.change(what, uninterrupted, section)

    def _load(self, slot: Slot, entry: Mapping[str, Any]) -> None:
        views = self.views.held(slot.param)  # where no thread can be started, a read is refused in the section
        values = slot.local.copy()
        self._states.will_change([slot.index])
        views.take(entry, lambda: self._states.reload_master(slot.index, slot.local.memory()))
        if values is not None:
            self._states.adopt(slot.index, values)
        self._registration.doubt(slot)  # the model's weights may be loaded after this

    def whole(
        self, param: torch.Tensor, names: Collection[str] | None = None, dtype: torch.dtype = torch.float32
    ) -> dict[str, torch.Tensor]:
        """Return a copy of a parameter's whole states, by name, gathered from all ranks. All ranks must call this.

        Args:
            names: the states to return; None: all.
            dtype: the element type to which the copies are rounded.

        Returns:
            Host tensors in the shape and memory order of the parameter (of a cut DTensor, in the whole shape).
        """
        slot = self._registration.slots[param]
        [tensor] = self._registration.current_tensors([slot])
        found = self._states.whole_states(slot.index, names, tensor=tensor, dtype=ELEMENT_TYPES[dtype])
        states = {name: shaped_like(as_torch(state), slot.values) for name, state in found.items()}
        if not slot.placed.is_cut:
            return states
        return {name: self.joined(slot, name, state) for name, state in states.items()}

    def joined(self, slot: Slot, name: str, state: torch.Tensor) -> torch.Tensor:
        """Return a whole state, or gradient, of a DTensor, merged from all processes' elements.

        Args:
            name: what is merged, for errors.
            state: this process's elements, in the shape of the local tensor.
        """
        part = slot.placed.part
        assert part is not None  # the parameter is cut
        own = memory(state.contiguous().view(-1)).reshape(tuple(state.shape))
        parts = [(part.index, own)] if self._core.params[slot.index].counted else []
        what = f"parameter {slot.name!r}: {name} of all processes"
        whole = merged(self._core.collectives, part.shape, own.dtype, parts, what)
        return as_torch(whole.reshape(-1)).view(part.shape)

    def own(self, param: torch.Tensor, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
        """Return a copy of this rank's elements of a parameter's states, by name: one-dimensional, fp32, on the host.

        Args:
            names: the states to return; None: all.
        """
        slot = self._registration.slots[param]
        [tensor] = self._registration.current_tensors([slot])
        runs = self._states.runs(slot.index, tensor)
        wanted = self._states.rule(slot.index).state_names if names is None else names
        found = {name: np.empty(sum(run.numel for run in runs), np.float32) for name in wanted}
        for name, own in found.items():
            at = 0
            for run in runs:
                run.arrays[name].read(0, own[at : at + run.numel])
                at += run.numel
        return {name: as_torch(own) for name, own in found.items()}

    def spread(self, slot: Slot, values: torch.Tensor) -> np.ndarray:
        """Return an fp32 array of all the parameter's elements, in the core's order. This rank's elements have these
        values, and all others are zero.

        Raises:
            StateError: there are more or fewer values than this rank has elements of the parameter.
        """
        extents = self._states.extents(slot.index)
        own = values.detach().to("cpu", torch.float32).reshape(-1).numpy()
        expected = sum(numel for _, numel in extents)
        if own.size != expected:
            raise StateError(
                f"parameter {slot.name!r}: got {own.size} elements for this rank's part, expected {expected}"
            )
        whole, at = np.zeros(self._core.params[slot.index].numel, np.float32), 0
        for start, numel in extents:
            whole[start : start + numel] = own[at : at + numel]
            at += numel
        return whole

    def load_state(self, param: torch.Tensor, name: str, values: torch.Tensor, *, own: bool) -> None:
        """Overwrite one state of a parameter, rounded to nearest if the state is kept in a narrower format. All ranks
        must call this. ``"master"`` also changes the parameter, as :meth:`load_master` does.

        Args:
            values: the whole state, in the parameter's shape and equal on all ranks; or this rank's elements, as
                :meth:`own` returns them.
            own: True: ``values`` are this rank's elements.

        Raises:
            StateError: there is no such state, or the values do not fit it; nothing has changed.
        """
        slot = self._registration.slots[param]
        names = self._states.rule(slot.index).state_names
        if name not in names:
            raise StateError(
                f"load_state: parameter {slot.name!r} has no state {name!r}; expected one of {', '.join(names)}"
            )
        if not own and values.shape != param.shape:
            raise StateError(
                f"load_state: parameter {slot.name!r}: got {name} of shape {tuple(values.shape)}, expected "
                f"{tuple(param.shape)}; this rank's part is loaded with own=True"
            )
        if own:
            run = self.spread(slot, values)
            values = shaped_like(as_torch(self._merged(slot, name, run) if name == MASTER else run), slot.values)
        if name == MASTER:
            self.load_master(param, values)
            return
        views = self.views.held(param)
        views[name] = own_part(self._core, slot, views.of_whole, {name: values})[name]

    def _merged(self, slot: Slot, name: str, run: np.ndarray) -> np.ndarray:
        """Return an array merged from all ranks' elements.

        Args:
            run: this rank's elements at their places in the whole array, and zeros elsewhere.
        """
        device, n = self._core.device, run.size
        if device.world_size == 1:
            return run
        parts = [((slice(at, at + numel),), run[at : at + numel]) for at, numel in self._states.extents(slot.index)]
        what = f"parameter {slot.name!r}: {name} of all ranks"
        return merged(self._core.collectives, (n,), run.dtype, parts, what)

    def masters(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return a copy of all master weights that do not share memory with their parameters. The copies are in fp32,
        in the shapes that the parameters had when their states were made."""
        found = {}
        for param, slot in self._registration.slots.items():
            if param.dtype is not torch.float32 and not self._states.own_masters(slot.index, flat(slot.values)):
                run = self._states.whole_states(slot.index, ("master",))["master"]
                found[param] = shaped(torch.from_numpy(run), cast(InMemory, self._states.elements(slot.index)))
        return found

    def keep_masters(self, masters: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Give back to parameters, which may have grown, the master weights of their former elements, except for
        elements whose value in the parameter has changed since."""
        for param, before in masters.items():
            values = param.detach().to("cpu", torch.float32, copy=True)
            part = values[tuple(slice(0, n) for n in before.shape)]
            part.copy_(torch.where(before.to(param.dtype).float() == part, before, part))
            self.load_master(param, values)

    def load_master(self, param: torch.Tensor, values: torch.Tensor) -> None:
        """Set a parameter's master weights to ``values``, and the parameter to the rounded values. All ranks must call
        this.

        Args:
            values: in the parameter's shape, and equal on all ranks.
        """
        self._parameters.check_present()
        slot = self._registration.slots[param]
        own = slot.placed.own(values)
        master = flat_like(own.to("cpu", torch.float32), slot.values).numpy()
        self._states.set_states(slot.index, {"master": master})
        with gathered_parameters(param, modifier_rank=0), grad_mode_kept(), torch.no_grad():
            slot.values.copy_(own)
        self._registration.mark_known(slot)


def own_part(core: Engine, slot: Slot, held: Held | None, entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return this rank's elements of the states in ``entry``. Values that are not whole are returned unchanged.

    Args:
        held: which elements this rank's states have; None: all, or the local elements of a DTensor.

    Raises:
        StateError: a value is a :class:`PartOfWhole` with other elements.
    """
    index, param = slot.index, slot.param
    entry = {name: _elements(slot.name, held, value) for name, value in entry.items()}
    if core.world_size == 1:
        return {name: slot.placed.own(value) for name, value in entry.items()}

    def part(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.shape != param.shape or value.dim() == 0:
            return value
        whole = flat_like(value, param)
        states = core.states
        runs = states.extents(index)
        return torch.cat([whole[start : start + numel] for start, numel in runs] or [whole[:0]])

    return {name: part(value) for name, value in entry.items()}


def _elements(name: str, held: Held | None, value: Any) -> Any:
    """Return the elements of a :class:`PartOfWhole`. Raise :class:`StateError` unless they are the elements ``held``.
    Return any other value unchanged."""
    if not isinstance(value, PartOfWhole):
        return value
    if held is None or value.held != held:
        has = "all of it" if held is None else str(held)
        raise StateError(
            f"load_state_dict: parameter {name!r}: states of {value.held}, on a rank that has {has} (or others of "
            "them); expected the state_dict() of this rank, of as many ranks, in the same stage and bucket size. "
            "torch.distributed.checkpoint and save_checkpoint() bring states to others"
        )
    return value.local


def check_entry(name: str, expected: torch.Size, entry: Mapping[str, Any], states: Sequence[str]) -> None:
    """Raise :class:`StateError` unless an entry has all states and a step count. The master weight may be missing.

    Args:
        expected: the shape that each state must have.
        states: the names of the states, the master weight first.
    """
    others = [key for key in STATE_NAMES if key not in states and isinstance(entry.get(key), torch.Tensor)]
    if others:
        raise StateError(
            f"load_state_dict: parameter {name!r}: there is {others[0]!r}, expected {', '.join(states)} alone; is this "
            "the state of another optimizer?"
        )
    for key in states if MASTER in entry else states[1:]:
        value = entry.get(key)
        if not isinstance(value, torch.Tensor) or value.shape != expected:
            got = tuple(value.shape) if isinstance(value, torch.Tensor) else value
            raise StateError(
                f"load_state_dict: parameter {name!r}: {key} is {got}, expected a tensor of shape "
                f"{tuple(expected)}; is this the state of another model, or of another optimizer?"
            )
        if value.dtype not in ELEMENT_TYPES:
            raise StateError(
                f"load_state_dict: parameter {name!r}: {key} is of {value.dtype}, and would be rounded; expected "
                "torch.float32: convert it, if that is what you want"
            )
    if "step" not in entry:
        raise StateError(f"load_state_dict: parameter {name!r}: no 'step', expected the number of updates made")
    try:
        checked_count(entry["step"])
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise StateError(
            f"load_state_dict: parameter {name!r}: step is {shown(entry['step'])}, expected the number of updates made"
        ) from None
