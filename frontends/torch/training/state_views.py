"""A parameter's optimizer states as torch tensors over host memory: the entry ``optimizer.state[p]``."""

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import cache, partial
from typing import Any

import torch

from offload_core.engine import Engine, StateAccess, StateRun
from offload_core.errors import StateError
from offload_core.rules import MASTER, Rule

from ..internals.private import DISPATCH_ALONE, around, grad_mode_kept, no_read, parse_to
from ..params.dtensor import UNDIVIDED, Placement, dtensor_class, is_dtensor, local_of
from ..params.tensors import TORCH_DTYPES, flat_like, memory, shaped_like
from ..ranks.device import as_torch
from .dcp_tensors import Held, PartOfWhole, pickled
from .rule_words import WORDS

STEP = "step"
"""The name of the entry with a parameter's number of updates."""


class ProtectedDict(dict):
    """A dict in which some entries cannot be removed: every write goes through ``__setitem__`` and ``__delitem__``."""

    popitem: Any = None  # an entry that stays would be popped forever
    update = MutableMapping.update

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]  # dict's own | makes another dict
        self.update(other)
        return self

    def clear(self) -> None:
        for key in [*self]:
            del self[key]

    def pop(self, key: Any, *default: Any) -> Any:
        if key not in self:
            return super().pop(key, *default)
        value = copy.deepcopy(self[key])
        del self[key]
        return value


class HostState(torch.Tensor):
    """A state that stays on the host although Accelerate and Lightning call ``to(device)`` on every state.

    Copies, files and the results of functions are plain tensors.
    """

    __torch_function__ = DISPATCH_ALONE  # type: ignore[assignment]

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As ``Tensor.to``, but return this tensor if only a device is given."""
        dtype = parse_to(*args, **{k: v for k, v in kwargs.items() if k != "copy"})[1]
        if kwargs.get("copy") or dtype is not None:  # torch's own optimizers load states so
            return self.as_subclass(torch.Tensor).to(*args, **kwargs)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        memo[id(self)] = copied = copy.deepcopy(self.as_subclass(torch.Tensor), memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


class StatePart(HostState):
    """A rank's elements of a state, one-dimensional. Copies are plain tensors."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise :class:`StateError`: other libraries pickle only rank 0's states, and no rank could continue from
        them."""
        raise pickled()

    def __create_write_items__(self, name: str, value: object) -> list[Any]:
        """Raise :class:`StateError`: DCP would save this part as a whole tensor, because the part does not say which
        elements it has."""
        raise StateError(
            f"torch.distributed.checkpoint of {name!r}, of which this rank holds a part, in the order of its memory; "
            "expected get_optimizer_state_dict(model, optimizer) or optimizer.state_dict(), whose tensors say which "
            "part of which tensor they are"
        )


_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_IN_PLACE = {"__setitem__", *(f"__i{name}__" for name in _OPERATORS)}


def _flat(values: Any) -> Iterator[Any]:
    """Yield the values. In place of a list or tuple, yield the values in it, also in nested ones."""
    for value in values:
        if isinstance(value, tuple | list):
            yield from _flat(value)
        else:
            yield value


class _ReadOnly:
    """A copy of a state. Writing to it or to a view of it is an error, because the write would be lost."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__") and name != "requires_grad_")
        written = [kwargs.get("out"), *([*args, *kwargs.values()][:1] if in_place else [])]
        if any(isinstance(each, _ReadOnly) for each in _flat(written)):
            raise StateError(
                f"{name}: this state is kept on disk, or in a format that torch has no tensors of, and what was read "
                'is a copy; expected an assignment of new values: state[p]["exp_avg"] = values'
            )
        with no_read():
            result = func(*args, **kwargs)
            if name == "as_subclass":
                return result
            own = {_address(each) for each in _flat([*args, *kwargs.values()]) if isinstance(each, _ReadOnly)}

            def like_its_base(value: Any) -> Any:
                if isinstance(value, tuple | list) and type(value) in (tuple, list):
                    return type(value)(map(like_its_base, value))
                if type(value) not in (torch.Tensor, dtensor_class()) or _address(value) not in own:
                    return value
                if not is_dtensor(value):
                    return value.as_subclass(cls)
                value.__class__ = cls
                return value

            return like_its_base(result)


def _address(tensor: Any) -> int:
    return local_of(tensor).untyped_storage().data_ptr()


class _Decoded(_ReadOnly, HostState):  # type: ignore[misc]
    """A copy of a state, as a tensor."""


class DecodedState(_Decoded):
    """A copy of a parameter's whole state."""


class DecodedPart(_Decoded, StatePart):  # type: ignore[misc]
    """A copy of a rank's part of a state."""


@cache
def _decoded_placed() -> Any:
    """Return the class for a copy of a DTensor's state. The local tensor of the copy is a :class:`DecodedState`, but a
    DTensor's own functions write to the local tensor without calling its ``__torch_function__``."""

    class DecodedPlaced(_ReadOnly, dtensor_class()):  # type: ignore[misc]
        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            return copy.deepcopy(around(local_of(self), self), memo)

        def __reduce_ex__(self, protocol: Any) -> Any:
            return around(local_of(self), self).__reduce_ex__(protocol)

    return DecodedPlaced


class Encoded:
    """A state whose values are on disk, or in a format that torch has no tensors of. :meth:`read` copies the values,
    and :meth:`write` replaces them.

    Args:
        own: this process's elements of the state.
        param: the tensor that gives the state its shape: the parameter, or a DTensor's local tensor. None: the state is
            a part, one-dimensional.
        placed: the parameter's placement.
    """

    def __init__(self, own: StateRun, param: torch.Tensor | None, placed: Placement) -> None:
        self._own = own
        self._param = param
        self._placed = placed
        self.shape = torch.Size([own.size]) if param is None else param.shape

    def read(self) -> torch.Tensor:
        """Return a copy of the values, without rounding, in the narrowest type that holds them."""
        run = torch.empty(self._own.size, dtype=TORCH_DTYPES[self._own.format.values])
        self._own.read(0, memory(run))
        if self._param is None:
            return run.as_subclass(DecodedPart)
        values = shaped_like(run, self._param).as_subclass(DecodedState)
        return self._placed.around(values, _decoded_placed)

    def write(self, value: torch.Tensor) -> None:
        """Replace the values of the state, each rounded to nearest."""
        run = value.detach().to("cpu", torch.float32)
        self._own.write((run.contiguous() if self._param is None else flat_like(run, self._param)).numpy())


class Views(ProtectedDict):
    """A parameter's states by name, in host memory. Assigning to a name copies the value to this memory. Deleting a
    name sets the state to its first value, but leaves a master weight unchanged.

    The number of updates is listed only if torch's optimizer counts them. ``["step"]`` reads and sets it in any case.

    Args:
        shape: the shape of each state.
        step: the number of updates.
        encoded: states that have no view. Each read makes a copy.
        changing: called before states change.
        rule: the parameter's update rule.
        placed: the parameter's placement; a DTensor's states are DTensors, too.
        held: which elements of the parameter this rank's states have; None: all, or the local elements of a DTensor.
    """

    def __init__(
        self,
        shape: torch.Size,
        step: torch.Tensor,
        views: Mapping[str, torch.Tensor],
        encoded: Mapping[str, Encoded],
        changing: Callable[[], None],
        rule: Rule,
        placed: Placement,
        held: Held | None = None,
    ) -> None:
        self._counted_by = WORDS[rule.name].counted_by
        self.unlisted = {} if self._counted_by is None else {STEP: step}
        """Has ``step`` if torch's optimizer keeps no ``step``; else empty."""
        super().__init__({**({STEP: step} if self._counted_by is None else {}), **views, **encoded})
        self._placed = placed
        self.of_whole = held
        """Which elements of the parameter this rank's states have; None: all, or the local elements of a DTensor."""
        self.shape = shape
        self.held = frozenset((*self, STEP))
        """The names of the optimizer's states; other entries are the user's."""
        self._changing = changing
        self._first = {state.name: state.first for state in rule.states}

    def begin(self, name: str) -> None:
        """Give a state, or the number of updates, its first value."""
        self.put(name, self._first.get(name, 0.0))
        if name == self._counted_by:
            self.put(STEP, 0.0)

    def put(self, name: str, value: Any) -> None:
        """Give a state these values; a number becomes the value of every element."""
        target, value = super().__getitem__(name), self._own(value)
        with grad_mode_kept(), torch.no_grad():
            if isinstance(target, Encoded):
                target.write(value.expand(target.shape))
            else:
                local_of(target).copy_(value)

    def _own(self, value: Any) -> torch.Tensor:
        return torch.as_tensor(self._placed.own(value))

    def __delitem__(self, name: str) -> None:
        if name not in self.held:
            super().__delitem__(name)
        elif name != MASTER:
            self._changing()
            self.begin(name)

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self.held:
            super().__setitem__(name, value)
            return
        value, target = self._own(value), super().__getitem__(name)
        expected = target.shape if isinstance(target, Encoded) else local_of(target).shape
        if value.shape != expected:
            raise StateError(f"state[p][{name!r}] = a tensor of shape {tuple(value.shape)}, expected {tuple(expected)}")
        self._changing()
        self.put(name, value)
        if name == self._counted_by:
            self._count()

    def _count(self) -> None:
        """Set ``step`` to 1 if it is 0, because an update at 0 would take the gradient in place of the momentum."""
        if not super().__getitem__(STEP):
            self.put(STEP, 1.0)

    def count_written(self) -> None:
        """Set ``step`` to 1 if it is 0 and the momentum was written in place, as ``dcp.load`` writes it."""
        momentum = super().get(self._counted_by)
        if isinstance(momentum, torch.Tensor) and not super().__getitem__(STEP) and bool(local_of(momentum).any()):
            self.put(STEP, 1.0)

    def take(self, entry: Mapping[str, Any], master: Callable[[], object]) -> None:
        """Set the states to the values in ``entry``. States that ``entry`` lacks get their first values.

        Args:
            master: called if ``entry`` has no master weight.
        """
        for name in (*(self.held - {STEP}), STEP):  # the count last: a momentum that begins anew sets it to 0
            if name in entry:
                self.put(name, entry[name])
            elif name == MASTER:
                master()
            else:
                self.begin(name)
        momentum = entry.get(self._counted_by) if self._counted_by is not None else None
        if isinstance(momentum, torch.Tensor) and bool(local_of(momentum).any()):
            self._count()

    def clear(self) -> None:
        for key in {*self, STEP}:
            del self[key]

    def __missing__(self, name: str) -> Any:
        return self.unlisted[name]

    # dict's own methods would give the placeholder of an encoded state.

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        return value.read() if isinstance(value, Encoded) else value

    def __iter__(self) -> Iterator[str]:  # also tells dict(self) to call __getitem__
        return super().__iter__()

    get = MutableMapping.get  # type: ignore[assignment]
    items = MutableMapping.items  # type: ignore[assignment]
    setdefault = MutableMapping.setdefault  # dict's own would list a number of updates that is not listed
    values = MutableMapping.values  # type: ignore[assignment]

    @property
    def are_live(self) -> bool:
        """True if all states are the memory that updates write; False if a read of one of them makes a copy."""
        return not any(isinstance(value, Encoded) for value in super().values())

    def for_state_dict(self, *, live: bool) -> dict[str, Any]:
        """Return the states as ``state_dict()`` lists them.

        Args:
            live: True lists the memory that updates write. False lists copies, which may be written to: a load in place
                fills the copies, and ``load_state_dict`` assigns them.
        """
        return {
            name: self._listed(name, value, live=live) if name in self.held else value for name, value in self.items()
        }

    def _listed(self, name: str, value: torch.Tensor, *, live: bool) -> torch.Tensor:
        local = local_of(value)
        plain = local.as_subclass(torch.Tensor)
        if not live and not isinstance(local, _Decoded):
            plain = plain.clone()
        if name == STEP:
            return plain.as_subclass(HostState)
        if self.of_whole is not None:
            return PartOfWhole(plain, self.of_whole)
        if live:
            return value
        return self._placed.around(plain)

    def __repr__(self) -> str:
        return repr(dict(self))

    def copy(self) -> dict[str, Any]:
        return dict(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, ({**self.unlisted, **self},)


def state_views(core: Engine, index: int, param: torch.Tensor, placed: Placement = UNDIVIDED) -> Views:
    """Return the states of a parameter, and the number of its updates.

    Args:
        param: the tensor that holds the parameter's values on this process.
        placed: the parameter's placement.
    """
    views = dict[str, torch.Tensor]()
    encoded: dict[str, Encoded] = {}
    access, state_lock = core.states, core.state_lock
    step, rule = torch.from_numpy(access.step_count(index)), access.rule(index)
    alone = core.world_size == 1
    for name, own in access.local_runs(index).items():
        if own.view is None:
            encoded[name] = Encoded(own, param if alone else None, placed)
        else:
            run = as_torch(own.view)
            views[name] = shaped_like(run, param) if alone else run
    shape = param.shape if alone else torch.Size([sum(numel for _, numel in access.extents(index))])
    if 0 in shape:  # a parameter of no elements, or none of them this rank's
        views |= {name: torch.empty(shape, device="cpu") for name in rule.state_names if name != MASTER}
    kind = HostState if alone else StatePart
    shared: dict[str, torch.Tensor] = {name: view.as_subclass(kind) for name, view in views.items()}
    shared = {name: placed.around(view) for name, view in shared.items()}
    changing = partial(state_lock.change, "an assignment to optimizer.state", access.will_change, [index])
    held = None if alone else _held(core, access, index)
    return Views(shape, step.as_subclass(kind), shared, encoded, changing, rule, placed, held)


def _held(core: Engine, access: StateAccess, index: int) -> Held:
    """Return which elements of a parameter this rank's states have."""

    known = weakref.ref(core)  # a state dict keeps only its own memory

    def check() -> None:
        held_by = known()
        if held_by is None:
            return
        parameters = held_by.parameters
        if index in parameters.stale:
            raise StateError(
                f"a save of states while the last step's values of parameter {held_by.params[index].name!r} are held "
                f"back (schedule={held_by.config.schedule!r}): parameters and states would be of two steps; expected "
                "engine.flush(), or optimizer.flush(), on all ranks before get_state_dict()"
            )

    at, runs = 0, []
    for start, numel in access.extents(index):
        runs.append((start, at, numel))
        at += numel
    return Held.of(access.elements(index), runs, check)


def plain_entries(states: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return ``states`` with plain dicts as entries, for files. The entry of each parameter has its number of
    updates."""
    return {key: {**entry.unlisted, **entry} if isinstance(entry, Views) else entry for key, entry in states.items()}
