"""In-place writes through ``p.data``, which torch does not count as changes of the parameter.

``p.data`` gives another tensor in the parameter's memory. This tensor has a separate version counter, which counts the
writes through it and through its views. A tensor that is assigned to ``p.data`` becomes such a tensor, too. A watched
parameter keeps these tensors until it is asked for writes, and longer if other code holds them.
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
"""At this number of tensors of one parameter, the tensors that no other code holds are released."""


class DataWrites:
    """Detects writes through ``param.data``, from now on. It keeps the parameter alive.

    Args:
        used: this object is added to the set when ``param.data`` is used. :meth:`seen` removes it when no tensor is
            left through which other code could write.
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
        """The tensors that ``data`` gave or got, each with its version when it was last looked at."""
        self._many = _MANY
        self._written = False
        self._managed = manage(param)
        self._managed.data_writes = self

    def add(self, tensor: torch.Tensor) -> None:
        """Watch a tensor that the parameter's ``data`` gave or got."""
        if tensor.is_inference():
            return  # the tensor has no version counter
        if len(self._tensors) >= self._many:
            self._look()
            self._many = _MANY + 2 * len(self._tensors)
        self._tensors.append((tensor, tensor._version))
        if self._used is not None:
            self._used.add(self)

    def seen(self) -> bool:
        """True if there was a write since :meth:`forget`."""
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
        """True if other code holds a tensor that ``data`` gave or got, and so can write to it at any time."""
        if self._tensors:
            self._look()
        return bool(self._tensors)

    def forget(self) -> None:
        """Treat the writes until now as handled."""
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
    """Return ``param.data``, for writes that do not count as changes from outside."""
    return _DATA.__get__(param)


def set_data(param: torch.Tensor, values: torch.Tensor) -> None:
    """Set ``param.data = values``, without counting it as a change from outside."""
    _DATA.__set__(param, values)


@functools.cache
def _watch(kind: Any) -> None:
    """Replace ``data`` of a class of parameters (``nn.Parameter``, DTensor) by a property that reports its use. This is
    done at the first parameter to watch."""
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
