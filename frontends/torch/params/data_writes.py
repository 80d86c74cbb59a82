"""Detects in-place writes through ``p.data``, which torch does not count as changes of the parameter.

Each read of ``p.data`` returns a new tensor over the parameter's memory. This tensor has a separate version counter,
which counts the writes through the tensor and through its views. A tensor that is assigned to ``p.data`` shares its
memory with the parameter in the same way. ``DataWrites`` keeps these tensors until it next compares their versions. It
goes on to watch the tensors that other code still holds.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .dtensor import dtensor_class, is_dtensor
from .managed import manage, managed

_DATA: Any = torch.Tensor.data
_MANY = 16
"""The number of watched tensors at which :meth:`DataWrites.add` first releases the tensors that no other code holds."""


class DataWrites:
    """Detects writes through ``param.data``, from now on. Its owner must keep ``param`` alive.

    Args:
        used: a set to which each use of ``param.data`` adds this object. :meth:`seen` removes this object if it has
            seen no write and no other code holds a tensor from ``data``.
        replaced: called when the parameter gets other memory.
    """

    def __init__(
        self,
        param: torch.Tensor,
        used: "set[DataWrites] | None" = None,
        replaced: Callable[[], None] = lambda: None,
    ) -> None:
        _watch(dtensor_class() if is_dtensor(param) else nn.Parameter)
        self._used = used
        self.replaced = replaced
        self._tensors: list[tuple[torch.Tensor, int]] = []
        """Each tensor that was read from ``data`` or assigned to it, with its version at the last comparison."""
        self._many = _MANY
        self._written = False
        self._managed = manage(param)
        self._managed.data_writes = self

    def add(self, tensor: torch.Tensor) -> None:
        """Watch a tensor that was read from the parameter's ``data`` or assigned to it."""
        if tensor.is_inference():
            return  # the tensor has no version counter
        if len(self._tensors) >= self._many:
            self._look()
            self._many = _MANY + 2 * len(self._tensors)
        self._tensors.append((tensor, tensor._version))
        if self._used is not None:
            self._used.add(self)

    def seen(self) -> bool:
        """True if a watched tensor was written to, until :meth:`forget`."""
        self.end()  # first: another thread may use the parameter while this one looks
        if self._tensors:
            self._look()
        if self._used is not None and (self._tensors or self._written):
            self._used.add(self)
        return self._written

    def end(self) -> None:
        """Remove this object from the set of used ones."""
        if self._used is not None:
            self._used.discard(self)

    @property
    def possible(self) -> bool:
        """True if other code holds a tensor that was read from ``data`` or assigned to it, and can write to the
        parameter through this tensor at any time."""
        if self._tensors:
            self._look()
        return bool(self._tensors)

    def forget(self) -> None:
        """Treat the writes that :meth:`seen` has reported as handled."""
        self._written = False

    def _look(self) -> None:
        looked_at, self._tensors = self._tensors, []
        self._written |= any(tensor._version != version for tensor, version in looked_at)
        held = [weakref.ref(tensor) for tensor, _ in looked_at]
        looked_at.clear()
        for ref in held:
            tensor = ref()
            if tensor is not None:
                tensor._fix_weakref()  # type: ignore[attr-defined]  # C++ code may hold it
                self._tensors.append((tensor, tensor._version))


def data_of(param: torch.Tensor) -> torch.Tensor:
    """Return ``param.data`` without watching it: :class:`DataWrites` does not see writes through it."""
    return _DATA.__get__(param)


def set_data(param: torch.Tensor, values: torch.Tensor) -> None:
    """Set ``param.data = values`` without reporting it to :class:`DataWrites`."""
    _DATA.__set__(param, values)


@functools.cache
def _watch(kind: Any) -> None:
    """Replace the attribute ``data`` of a class (``nn.Parameter``, DTensor) by a property that reports each use to
    :class:`DataWrites`. The first watched parameter of each class causes this."""
    kind.data = property(_read, _assign)


def _read(param: torch.Tensor) -> torch.Tensor:
    tensor = _DATA.__get__(param)
    watched: DataWrites | None = managed(param).data_writes
    if watched is not None:
        watched.add(tensor)
    return tensor


def _assign(param: torch.Tensor, values: torch.Tensor) -> None:
    _DATA.__set__(param, values)
    watched: DataWrites | None = managed(param).data_writes
    if watched is not None:
        watched.replaced()
        watched.add(values)
