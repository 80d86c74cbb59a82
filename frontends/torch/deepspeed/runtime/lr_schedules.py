"""``deepspeed.runtime.lr_schedules``: schedulers of an optimizer, which an engine steps after each update."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from offload_core.config.options import OffloadConfig
from offload_core.deepspeed.schedules import SCHEDULES, SectionSchedule


class Scheduler:
    """A schedule of ``offload_core.lr_schedules`` for an optimizer's groups. It writes their rates, and the betas of
    ``OneCycle``, when it is made and at each :meth:`step`.

    Args:
        optimizer: any torch optimizer; a schedule without a highest rate of its own scales each group's rate.
        last_batch_iteration: the number of steps so far, less one.
        arguments: those of the schedule, as in a ``scheduler`` section.
    """

    kind: ClassVar[str]
    """The name of the schedule."""

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int = -1, **arguments: Any) -> None:
        self.optimizer = optimizer
        self._own = [float(group["lr"]) for group in optimizer.param_groups]
        section = {"type": self.kind, "params": arguments}
        resolved = OffloadConfig.resolve(
            {"optimizer": {"type": "Adam", "params": {"lr": self._own[0]}}, "scheduler": section}
        )
        assert isinstance(resolved.lr, SectionSchedule)
        self._schedule, self._betas = resolved.lr, resolved.betas
        self.last_batch_iteration = last_batch_iteration
        if last_batch_iteration == -1:
            self._write()

    def get_lr(self) -> list[float]:
        """Return each group's rate for the next update."""
        updates = self.last_batch_iteration + 1
        return [self._schedule.of_group(lr)(updates) for lr in self._own]

    def get_last_lr(self) -> list[float]:
        """Return the rates that were written last."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go on by one update, or to a given one."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._write()

    def _write(self) -> None:
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = lr
            if callable(self._betas) and "betas" in group:
                group["betas"] = self._betas(self.last_batch_iteration + 1)

    def state_dict(self) -> dict[str, int]:
        """Return the number of steps so far, less one."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: Mapping[str, int]) -> None:
        """Go on from there. The rates themselves are loaded with the optimizer."""
        self.last_batch_iteration = sd["last_batch_iteration"]


class WarmupLR(Scheduler):
    """See ``offload_core.lr_schedules.WarmupLR``."""

    kind = "WarmupLR"


class WarmupDecayLR(Scheduler):
    """See ``offload_core.lr_schedules.WarmupDecayLR``."""

    kind = "WarmupDecayLR"


class WarmupCosineLR(Scheduler):
    """See ``offload_core.lr_schedules.WarmupCosineLR``."""

    kind = "WarmupCosineLR"


class LRRangeTest(Scheduler):
    """See ``offload_core.lr_schedules.LRRangeTest``."""

    kind = "LRRangeTest"


class OneCycle(Scheduler):
    """See ``offload_core.lr_schedules.OneCycle``."""

    kind = "OneCycle"


SCHEDULERS = {each.kind: each for each in (WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle)}
assert SCHEDULERS.keys() == SCHEDULES.keys()
