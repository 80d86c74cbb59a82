"""One ``ManagedTensor`` for each tensor that engines manage, and the table that finds it.

Code that trains a tensor, watches its ``data`` or has it in shards keeps both the tensor and its ``ManagedTensor``
alive. A pending tensor, or a tensor with shards from ``init()``, may have no such code. This module then keeps the
``ManagedTensor``, with a weak reference to the tensor, until the tensor is deleted. At other times there is no weak
reference to the tensor, because torch cannot swap a tensor that has one (``Module.to()`` of a DTensor swaps).
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .residency import Residency

Wait = Callable[[torch.Tensor], None]
"""A function that is called before a read, with the tensor that is read."""


class _Weak:
    """An attribute with a weak reference to its value; None once the value was deleted."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, managed: Any, owner: type) -> Any:
        found = getattr(managed, self._name)
        return None if found is None else found()

    def __set__(self, managed: Any, value: Any) -> None:
        setattr(managed, self._name, None if value is None else weakref.ref(value))


class ManagedTensor:
    """The state of one tensor that engines of this process manage: a trained or frozen parameter, a buffer, or a tensor
    inside a quantised parameter.

    Attributes:
        residency: whether the tensor may be read now (``residency.py``). Only ``pending.py`` sets ``residency`` and
            ``wait``.
        wait: called before a read; None: the tensor may be read.
        shards: the ``InitShards`` from ``init()``, until an engine takes them; else None.
    """

    __slots__ = ("__weakref__", "_data_writes", "_gathering", "_of", "_record", "_slot", "residency", "shards", "wait")

    slot = _Weak()
    """The parameter's ``Slot`` in the open optimizer that has its states; None: no open optimizer has them."""
    data_writes = _Weak()
    """The ``DataWrites`` that watches the tensor's ``data``; None: nothing watches it."""
    record = _Weak()
    """The ``PartitionedParameter`` of this tensor, or of the quantised parameter around it; None: no engine has the
    tensor in shards."""
    gathering = _Weak()
    """The ``Gathering`` of the stage 3 engine whose model has the tensor; None: there is no such engine."""

    def __init__(self) -> None:
        self._of: weakref.ref[torch.Tensor] | None = None
        self.residency = Residency.RESIDENT
        self.wait: Wait | None = None
        self.shards: Any = None
        self.slot = self.data_writes = self.record = self.gathering = None

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep this object until :meth:`end_keeping`, or until the tensor is deleted."""
        if self not in _KEPT:
            self._of = weakref.ref(tensor, partial(_forget, id(tensor)))
            _KEPT.add(self)

    def end_keeping(self) -> None:
        """End :meth:`keep`, unless the tensor is pending or has shards from ``init()``. Then only other code keeps this
        object alive."""
        if self.wait is None and self.shards is None:
            _KEPT.discard(self)
            self._of = None

    @property
    def tensor(self) -> torch.Tensor | None:
        """The tensor; None: this object is not kept (:meth:`keep`), or the tensor was deleted."""
        tensor = None if self._of is None else self._of()
        if tensor is not None:
            tensor._fix_weakref()  # type: ignore[attr-defined]  # C++ code alone may hold it
        return tensor


_MANAGED: "weakref.WeakValueDictionary[int, ManagedTensor]" = weakref.WeakValueDictionary()
"""Maps a tensor's ``id`` to its ``ManagedTensor``. Code that holds a ``ManagedTensor`` also holds the tensor, or
removes the entry before Python reuses the ``id``."""
_KEPT: set[ManagedTensor] = set()
AWAITED: set[ManagedTensor] = set()
"""The objects of tensors that an update writes, or that are released. A module with such a tensor waits before its
forward."""
WHEN_DELETED: list[Callable[[], None]] = []
"""Functions that are called when a tensor of :data:`AWAITED` was deleted."""
_UNKNOWN = ManagedTensor()


def manage(tensor: torch.Tensor) -> ManagedTensor:
    """Return the tensor's ``ManagedTensor``; make one if there is none. The caller must hold the object, or call its
    :meth:`~ManagedTensor.keep`."""
    found = _MANAGED.get(id(tensor))
    return _MANAGED.setdefault(id(tensor), ManagedTensor()) if found is None else found


def managed(tensor: torch.Tensor) -> ManagedTensor:
    """Return the tensor's ``ManagedTensor`` for reading. If there is none, return an empty one."""
    return _MANAGED.get(id(tensor), _UNKNOWN)


def _forget(
    number: int,
    _: object,
    known: "weakref.WeakValueDictionary[int, ManagedTensor]" = _MANAGED,
    kept: set[ManagedTensor] = _KEPT,
    awaited: set[ManagedTensor] = AWAITED,
    then: list[Callable[[], None]] = WHEN_DELETED,
) -> None:
    """Remove the ``ManagedTensor`` of a deleted tensor from all tables. The tables are default arguments, because
    Python may clear this module's names at exit before it calls this."""
    gone = known.pop(number, None)
    if gone is None:
        return
    kept.discard(gone)
    if gone in awaited:
        awaited.discard(gone)
        for act in then:
            act()
