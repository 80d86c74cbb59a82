"""Schedules of ``offload_core.lr_schedules`` as schedulers of a torch optimizer."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from offload_core.config.options import OffloadConfig
from offload_core.deepspeed import schedules
from offload_core.deepspeed.schedules import SectionSchedule
from offload_core.support import checks


class Scheduler:
    """Writes the rates of an optimizer's groups, when it is made and at each :meth:`step`.

    Args:
        optimizer: any torch optimizer.
        schedule: a schedule without a highest rate of its own scales each group's rate.
        betas: a function of the number of steps that gives the betas; others stay as they are.
        last_batch_iteration: the number of steps so far, less one.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        schedule: SectionSchedule,
        betas: Callable[[Any], tuple[float, float]] | Any = None,
        last_batch_iteration: int = -1,
    ) -> None:
        self.optimizer = optimizer
        self._schedule, self._betas = schedule, betas
        self._own = [float(group["lr"]) for group in optimizer.param_groups]
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

    def get_mom(self) -> list[Any]:
        """Return each group's betas (a cycle's, even where the first update has others), or its momentum, or None."""
        cycle, given = self._schedule.schedule, None
        if isinstance(cycle, schedules.OneCycle) and callable(self._betas):
            given = cycle.betas_in_cycle(self.last_batch_iteration + 1)
        return [given or group.get("betas", group.get("momentum")) for group in self.optimizer.param_groups]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go on by one update, or to a given one."""
        given = last_batch_iteration
        self.last_batch_iteration = self.last_batch_iteration + 1 if given is None else given
        self._write()

    def _write(self) -> None:
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)  # what holds it, as a captured graph does, reads the new rate
            else:
                group["lr"] = lr
            if callable(self._betas) and "betas" in group:
                group["betas"] = self._betas(self.last_batch_iteration + 1)

    def state_dict(self) -> dict[str, int]:
        """Return the number of steps so far, less one."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there. The rates themselves are loaded with the optimizer."""
        self.last_batch_iteration = state["last_batch_iteration"]


class _OfSection(Scheduler):
    """The schedule of a ``scheduler`` section whose type is the class's name; ``arguments`` are its ``params``, and
    attributes."""

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int = -1, **arguments: Any) -> None:
        checks.integer("warmup_num_steps", arguments.get("warmup_num_steps", 0), least=0)
        rate = {"type": "Adam", "params": {"lr": float(optimizer.param_groups[0]["lr"])}}
        section = {"type": type(self).__name__, "params": arguments}
        resolved = OffloadConfig.resolve({"optimizer": rate, "scheduler": section})
        assert isinstance(resolved.lr, SectionSchedule)
        super().__init__(optimizer, resolved.lr, resolved.betas, last_batch_iteration)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._schedule.schedule, name)


class WarmupLR(_OfSection):
    """See ``offload_core.lr_schedules.WarmupLR``."""


class WarmupDecayLR(_OfSection):
    """See ``offload_core.lr_schedules.WarmupDecayLR``."""


class WarmupCosineLR(_OfSection):
    """See ``offload_core.lr_schedules.WarmupCosineLR``."""

    def get_lr_ratio(self) -> float:
        """Return the rate for the next update, as a part of the highest one."""
        return float(replace(self._schedule.schedule, lr=1.0)(self.last_batch_iteration + 1))


class LRRangeTest(_OfSection):
    """See ``offload_core.lr_schedules.LRRangeTest``."""


class OneCycle(_OfSection):
    """See ``offload_core.lr_schedules.OneCycle``."""


SCHEDULERS = {each.__name__: each for each in (WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle)}
"""Schedulers by the ``type`` of a ``scheduler`` section."""
