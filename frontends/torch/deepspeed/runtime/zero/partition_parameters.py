"""``deepspeed.runtime.zero.partition_parameters``: attributes that scripts and PEFT ask parameters of stage 3 for."""

import weakref
from enum import Enum
from itertools import count
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ....params.pending import is_in_shards

_NUMBERS = count()
ZeroParamStatus = Enum("ZeroParamStatus", ["AVAILABLE", "NOT_AVAILABLE", "INFLIGHT"])
torch.serialization.add_safe_globals([ZeroParamStatus])  # parameters are pickled with it


class _Status:
    """The status, as it is now, of a parameter that is cut."""

    def __init__(self, param: torch.Tensor) -> None:
        self._param = weakref.ref(param)

    def _now(self) -> Any:
        param = self._param()
        away = param is not None and is_in_shards(param)
        return ZeroParamStatus.NOT_AVAILABLE if away else ZeroParamStatus.AVAILABLE

    def __reduce__(self) -> tuple[Any, ...]:
        return ZeroParamStatus, (self._now().value,)

    def __eq__(self, other: object) -> bool:
        return self._now() is (other._now() if isinstance(other, _Status) else other)

    def __hash__(self) -> int:
        return hash(self._now())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._now(), name)


def mark(param: torch.Tensor, cut: bool) -> None:
    """Give a parameter of stage 3, cut or whole, ``ds_id``, ``ds_numel``, ``ds_shape`` and so on."""
    if is_lazy(param) or param.is_meta:  # it has no shape, or is swapped for another
        return
    number = next(_NUMBERS) if (known := getattr(param, "ds_id", None)) is None else known
    param.ds_id, param.ds_numel, param.ds_shape = number, param.numel(), param.shape  # type: ignore[attr-defined]
    param.ds_persist, param.ds_status = not cut, _Status(param) if cut else ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]
