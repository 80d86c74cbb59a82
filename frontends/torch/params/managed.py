"""The tensors that engines manage: one object for each, and the one table in which it is found.

An object lives as long as somebody has something recorded in it. Who trains a tensor, watches its ``data`` or has it in
shards holds the object, and the tensor. A tensor that waits, or has shards from ``init()``, may be held by nobody: its
object is kept here until the tensor is deleted, which takes a weak reference to the tensor. At other times there is
none, because torch swaps no tensor that has one, as ``Module.to()`` of a DTensor does.
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
        shards: its ``InitShards`` from ``init()``, until an engine has them; else None.
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

    def __init__(self) -> None:
        self._of: weakref.ref[torch.Tensor] | None = None
        self.residency = Residency.RESIDENT
        self.wait: Wait | None = None
        self.shards: Any = None
        self.slot = self.data_writes = self.record = self.gathering = None

    def keep(self, tensor: torch.Tensor) -> None:
        """Stay until :meth:`end_keeping`, or until the tensor is deleted: it waits, or has shards."""
        if self not in _KEPT:
            self._of = weakref.ref(tensor, partial(_forget, id(tensor)))
            _KEPT.add(self)

    def end_keeping(self) -> None:
        """Stay only as long as others hold this object, once nothing is recorded that belongs to none of them."""
        if self.wait is None and self.shards is None:
            _KEPT.discard(self)
            self._of = None

    @property
    def tensor(self) -> torch.Tensor | None:
        """The tensor of an object that is kept; None once it is gone."""
        tensor = None if self._of is None else self._of()
        if tensor is not None:
            tensor._fix_weakref()  # type: ignore[attr-defined]  # C++ code alone may hold it
        return tensor


_MANAGED: "weakref.WeakValueDictionary[int, ManagedTensor]" = weakref.WeakValueDictionary()
"""By the tensor's ``id``. Who keeps an entry keeps its tensor, or removes the entry before another has this ``id``."""
_KEPT: set[ManagedTensor] = set()
AWAITED: set[ManagedTensor] = set()
"""Those of tensors that an update writes, or that are released. Modules that have one wait before their forward."""
WHEN_DELETED: list[Callable[[], None]] = []
"""To be called when a tensor of :data:`AWAITED` was deleted."""
_UNKNOWN = ManagedTensor()


def manage(tensor: torch.Tensor) -> ManagedTensor:
    """Return the tensor's object, for somebody who records something in it, and holds it."""
    found = _MANAGED.get(id(tensor))
    return _MANAGED.setdefault(id(tensor), ManagedTensor()) if found is None else found


def managed(tensor: torch.Tensor) -> ManagedTensor:
    """Return the tensor's object, to ask it; one that knows nothing if nothing is recorded."""
    return _MANAGED.get(id(tensor), _UNKNOWN)


def _forget(
    number: int,
    _: object,
    known: "weakref.WeakValueDictionary[int, ManagedTensor]" = _MANAGED,
    kept: set[ManagedTensor] = _KEPT,
    awaited: set[ManagedTensor] = AWAITED,
    then: list[Callable[[], None]] = WHEN_DELETED,
) -> None:
    """A tensor is deleted; at the end of the interpreter the names of this module may be gone before it."""
    gone = known.pop(number, None)
    if gone is None:
        return
    kept.discard(gone)
    if gone in awaited:
        awaited.discard(gone)
        for act in then:
            act()
