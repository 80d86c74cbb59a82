"""``deepspeed.runtime.zero.partition_parameters``: attributes that scripts and PEFT ask parameters of stage 3 for."""

import weakref
from collections.abc import Iterable
from enum import Enum
from typing import Any

import torch

from ....pending import is_in_shards
from ....stage3.partitioned import PartitionedModel

ZeroParamStatus = Enum("ZeroParamStatus", ["AVAILABLE", "NOT_AVAILABLE", "INFLIGHT"])


class _Status:
    """The status of a parameter at the moment at which it is compared."""

    def __init__(self, param: torch.Tensor) -> None:
        self._param = weakref.ref(param)

    def __reduce__(self) -> tuple[Any, ...]:
        in_shards = (param := self._param()) is not None and is_in_shards(param)
        return ZeroParamStatus, ((ZeroParamStatus.NOT_AVAILABLE if in_shards else ZeroParamStatus.AVAILABLE).value,)

    def __eq__(self, other: object) -> bool:
        kind, value = self.__reduce__()
        return other is kind(*value)


def mark(params: Iterable[torch.Tensor], cut: PartitionedModel) -> None:
    """Give parameters of stage 3, of which some are cut, ``ds_id``, ``ds_numel``, ``ds_shape`` and so on."""
    for number, param in enumerate(params):
        known = {"ds_id": number, "ds_numel": param.numel(), "ds_shape": param.shape, "ds_status": _Status(param)}
        known["ds_persist"] = param not in cut
        for name, value in known.items():
            setattr(param, name, value)
