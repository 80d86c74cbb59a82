"""Writes through ``p.data``, which torch does not count as changes of the parameter.

``p.data`` is another tensor in the parameter's memory, with a version counter of its own; a tensor that is assigned to
``p.data`` becomes one, too. So the use of ``p.data`` is what is noted. After it the parameter may have been written to,
until its values were compared, and for as long as another tensor has its memory.
"""

import functools
import weakref
from typing import Any

import torch
from torch import nn

_DATA: Any = torch.Tensor.data
_WATCHED: "weakref.WeakValueDictionary[int, DataWrites]" = weakref.WeakValueDictionary()
"""By the ``id`` of their parameter."""


class DataWrites:
    """Whether a parameter may have been written to in ways that torch does not count.

    Of a tensor whose class is not ``nn.Parameter`` this is not known: it always may.
    """

    def __init__(self, param: torch.Tensor) -> None:
        _watch_parameters()
        self._param = param  # alive as long as the entry, so that no id is reused
        self._unknown = not issubclass(type(param), nn.Parameter)
        self.possible = self._unknown
        """True if there may have been a write since :meth:`compared`."""
        _WATCHED[id(param)] = self

    @property
    def may_go_on(self) -> bool:
        """True if another tensor has the parameter's memory now, so that it can be written to without a word."""
        return self._unknown or _owners(self._param) > _owners(torch.empty(1))

    def compared(self, *, may_go_on: bool) -> None:
        """The parameter's values are known. ``may_go_on``: whether there may be more writes, as before."""
        self.possible = may_go_on


def uncounted(param: torch.Tensor) -> torch.Tensor:
    """``param.data``, for writes of values that agree with the master weights."""
    return _DATA.__get__(param)


def _owners(tensor: torch.Tensor) -> int:
    """The number of tensors that have the memory, and a constant."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@functools.cache
def _watch_parameters() -> None:
    """Have parameters note the use of their ``data``; once there is one to watch."""
    nn.Parameter.data = property(_read, _assign)  # type: ignore[assignment, method-assign]


def _read(param: torch.Tensor) -> torch.Tensor:
    _note(param)
    return _DATA.__get__(param)


def _assign(param: torch.Tensor, values: torch.Tensor) -> None:
    _note(param)
    _DATA.__set__(param, values)


def _note(param: torch.Tensor) -> None:
    writes = _WATCHED.get(id(param))
    if writes is not None:
        writes.possible = True
