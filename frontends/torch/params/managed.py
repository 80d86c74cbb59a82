"""The tensors that engines manage: one object for each, and the one table in which it is found.

Whoever first records something of a tensor makes its object: an optimizer that trains it, an engine that has it in
shards or releases its memory, ``init()``. The object stays until the tensor is deleted. It keeps alive neither the
tensor nor an engine, which may all be garbage together.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .residency import Residency

Wait = Callable[[torch.Tensor], None]
"""To be called before a read, with the tensor that is read."""


class _Weak:
    """An attribute whose value is not kept alive by it: None once it is gone."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, managed: Any, owner: type) -> Any:
        found = getattr(managed, self._name)
        return None if found is None else found()

    def __set__(self, managed: Any, value: Any) -> None:
        setattr(managed, self._name, None if value is None else weakref.ref(value))


class ManagedTensor:
    """What the engines of this process know of one tensor: a parameter, trained or frozen, a buffer, or a tensor inside
    a quantised parameter.

    Attributes:
        residency: whether it may be read now (``residency.py``). Only ``pending.py`` sets it and ``wait``.
        wait: to be called before a read; None: it may be read.
        shards: its ``Shards`` from ``init()``, until an engine has them; else None.
    """

    __slots__ = ("__weakref__", "_data_writes", "_gathering", "_of", "_record", "_slot", "residency", "shards", "wait")

    slot = _Weak()
    """Its ``Slot``, if an open optimizer has states of it; else None."""
    data_writes = _Weak()
    """The ``DataWrites`` that watch its ``data``; else None."""
    record = _Weak()
    """Its ``PartitionedParameter``, if an engine has it, or what it is inside, in shards; else None."""
    gathering = _Weak()
    """The ``Gathering`` of the engine of stage 3 whose model it belongs to; else None."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._of = weakref.ref(tensor, partial(_forget, id(tensor)))
        self.residency = Residency.RESIDENT
        self.wait: Wait | None = None
        self.shards: Any = None
        self.slot = self.data_writes = self.record = self.gathering = None

    @property
    def tensor(self) -> torch.Tensor | None:
        """The tensor; None once it is gone."""
        tensor = self._of()
        if tensor is not None:
            tensor._fix_weakref()  # type: ignore[attr-defined]  # C++ code alone may hold it
        return tensor


_MANAGED: dict[int, ManagedTensor] = {}
"""By the tensor's ``id``. An entry goes with its tensor, before another one can have this ``id``."""
AWAITED: set[ManagedTensor] = set()
"""Tensors that an update writes, or that are released. Modules that have one wait before their forward."""


def manage(tensor: torch.Tensor) -> ManagedTensor:
    """Return the tensor's object, to record something in it."""
    found = _MANAGED.get(id(tensor))
    return _MANAGED.setdefault(id(tensor), ManagedTensor(tensor)) if found is None else found


def managed(tensor: torch.Tensor) -> ManagedTensor:
    """Return the tensor's object, to ask it; one that knows nothing if nothing was ever recorded."""
    return _MANAGED.get(id(tensor), _UNKNOWN)


def _forget(number: int, _: object) -> None:
    if (gone := _MANAGED.pop(number, None)) is not None:
        AWAITED.discard(gone)


_NOTHING = torch.empty(0, device="cpu")
_UNKNOWN = ManagedTensor(_NOTHING)
