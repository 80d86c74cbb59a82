"""``deepspeed.runtime.lr_schedules``: schedulers of an optimizer, which an engine steps after each update."""

from typing import Any

import torch

from offload_core.config.options import OffloadConfig
from offload_core.deepspeed.schedules import SectionSchedule

from ...schedulers import Scheduler


class _OfSection(Scheduler):
    """The schedule of a ``scheduler`` section whose type is the class's name; ``arguments`` are its ``params``."""

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int = -1, **arguments: Any) -> None:
        rate = {"type": "Adam", "params": {"lr": float(optimizer.param_groups[0]["lr"])}}
        section = {"type": type(self).__name__, "params": arguments}
        resolved = OffloadConfig.resolve({"optimizer": rate, "scheduler": section})
        assert isinstance(resolved.lr, SectionSchedule)
        super().__init__(optimizer, resolved.lr, resolved.betas, last_batch_iteration)


class WarmupLR(_OfSection):
    """See ``offload_core.lr_schedules.WarmupLR``."""


class WarmupDecayLR(_OfSection):
    """See ``offload_core.lr_schedules.WarmupDecayLR``."""


class WarmupCosineLR(_OfSection):
    """See ``offload_core.lr_schedules.WarmupCosineLR``."""


class LRRangeTest(_OfSection):
    """See ``offload_core.lr_schedules.LRRangeTest``."""


class OneCycle(_OfSection):
    """See ``offload_core.lr_schedules.OneCycle``."""


SCHEDULERS = {each.__name__: each for each in (WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle)}
