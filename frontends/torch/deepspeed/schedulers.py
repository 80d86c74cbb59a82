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
    """The schedule of a ``scheduler`` section whose type is the class's name.

    The arguments are the section's ``params``, by name or in the class's order, and ``last_batch_iteration``. They can
    be read as attributes.
    """

    order: tuple[str, ...] = ()
    """The names of the arguments that come by position."""
    lowest = highest = ""
    """The arguments that ``min_lrs`` and ``max_lrs`` list for each group."""

    def __init__(self, optimizer: torch.optim.Optimizer, *values: Any, **arguments: Any) -> None:
        kind, names = type(self).__name__, (*self.order, "last_batch_iteration")
        twice = [name for name in names[: len(values)] if name in arguments]
        if len(values) > len(names) or twice:
            got = f"{twice[0]} twice" if twice else f"{len(values)} arguments by position"
            raise TypeError(f"{kind}: got {got}, expected {', '.join(names)}")
        arguments |= dict(zip(names, values, strict=False))
        last = arguments.pop("last_batch_iteration", -1)
        checks.integer("last_batch_iteration", last, least=-1)
        checks.integer("warmup_num_steps", arguments.get("warmup_num_steps", 1), least=1)
        rate = {"type": "Adam", "params": {"lr": float(optimizer.param_groups[0]["lr"])}}
        resolved = OffloadConfig.resolve({"optimizer": rate, "scheduler": {"type": kind, "params": arguments}})
        assert isinstance(resolved.lr, SectionSchedule)
        super().__init__(optimizer, resolved.lr, resolved.betas, last)

    @property
    def min_lrs(self) -> list[float]:
        """Each group's lowest rate."""
        return [getattr(self, self.lowest) for _ in self._own]

    @property
    def max_lrs(self) -> list[float]:
        """Each group's highest rate."""
        return [getattr(self._schedule.of_group(lr), self.highest) for lr in self._own]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._schedule.schedule, name)


class WarmupLR(_OfSection):
    """See ``offload_core.lr_schedules.WarmupLR``."""

    order = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type")
    lowest, highest = "warmup_min_lr", "warmup_max_lr"


class WarmupDecayLR(_OfSection):
    """See ``offload_core.lr_schedules.WarmupDecayLR``."""

    order = ("total_num_steps", *WarmupLR.order)
    lowest, highest = WarmupLR.lowest, WarmupLR.highest


class WarmupCosineLR(_OfSection):
    """See ``offload_core.lr_schedules.WarmupCosineLR``."""

    order = ("total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type")

    def get_lr_ratio(self) -> float:
        """Return the rate for the next update, as a part of the highest one."""
        return float(replace(self._schedule.schedule, lr=1.0)(self.last_batch_iteration + 1))


class LRRangeTest(_OfSection):
    """See ``offload_core.lr_schedules.LRRangeTest``."""

    order = (
        "lr_range_test_min_lr",
        "lr_range_test_step_size",
        "lr_range_test_step_rate",
        "lr_range_test_staircase",
    )


class OneCycle(_OfSection):
    """See ``offload_core.lr_schedules.OneCycle``."""

    order = tuple(schedules.OneCycle.__dataclass_fields__)
    lowest, highest = "cycle_min_lr", "cycle_max_lr"

    @property
    def step_ratio(self) -> float:
        """The part of the cycle in which rates rise."""
        return float(self.cycle_first_step_size / self.cycle_length)


SCHEDULERS = {each.__name__: each for each in (WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle)}
"""Schedulers by the ``type`` of a ``scheduler`` section."""
