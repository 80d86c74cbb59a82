"""``deepspeed.runtime.zero.partition_parameters``: attributes that scripts and PEFT ask parameters of stage 3 for."""

import weakref
from collections.abc import Callable, Iterable
from enum import Enum
from itertools import count
from typing import Any

import torch

from ....pending import is_in_shards, is_pending
from ....stage3.construction import in_shards

_NUMBERS = count()
ZeroParamStatus = Enum("ZeroParamStatus", ["AVAILABLE", "NOT_AVAILABLE", "INFLIGHT"])


class _Status:
    """The status of a parameter at the moment at which it is compared."""

    def __init__(self, param: torch.Tensor) -> None:
        self._param = weakref.ref(param)

    def __reduce__(self) -> tuple[Any, ...]:
        param = self._param()
        away = param is not None and (is_in_shards(param) or (in_shards(param) and is_pending(param)))
        return ZeroParamStatus, ((ZeroParamStatus.NOT_AVAILABLE if away else ZeroParamStatus.AVAILABLE).value,)

    def __eq__(self, other: object) -> bool:
        kind, value = self.__reduce__()
        return other is kind(*value)


def mark(params: Iterable[torch.Tensor], persists: Callable[[torch.Tensor], bool]) -> None:
    """Give parameters of stage 3 ``ds_id``, ``ds_numel``, ``ds_shape`` and so on. Some stay whole: they persist."""
    for param in params:
        number = next(_NUMBERS) if (known := getattr(param, "ds_id", None)) is None else known
        known = {"ds_id": number, "ds_numel": param.numel(), "ds_shape": param.shape, "ds_status": _Status(param)}
        known["ds_persist"] = persists(param)
        for name, value in known.items():
            setattr(param, name, value)
