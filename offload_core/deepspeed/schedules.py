"""DeepSpeed's schedules; their public place, ``offload_core.lr_schedules``, says more of them."""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ..support import checks


@dataclass(frozen=True)
class WarmupLR:
    """From ``warmup_min_lr`` to ``warmup_max_lr`` in ``warmup_num_steps`` updates, along a line or a logarithm; then
    constant. Raises :class:`ConfigError` if a value is out of range."""

    warmup_max_lr: float
    warmup_min_lr: float = 0.0
    warmup_num_steps: int = 1000
    warmup_type: str = "log"

    def __post_init__(self) -> None:
        checks.number("warmup_min_lr", self.warmup_min_lr, least=0.0)
        checks.number("warmup_max_lr", self.warmup_max_lr, least=0.0)
        _check_warmup(self.warmup_num_steps, self.warmup_type)

    def __call__(self, updates: Any) -> float:
        step = operator.index(updates) - 1
        if step < 0:
            return self.warmup_min_lr
        return self.warmup_min_lr + (self.warmup_max_lr - self.warmup_min_lr) * self._height(step)

    def _height(self, step: int) -> float:
        return _warmed(step, self.warmup_num_steps, self.warmup_type)


@dataclass(frozen=True)
class WarmupDecayLR(WarmupLR):
    """As :class:`WarmupLR`, then along a line back to ``warmup_min_lr`` at update ``total_num_steps``. With a total
    below the warm-up the rate is ``warmup_min_lr`` right after the warm-up."""

    warmup_max_lr: float = 0.001
    total_num_steps: int = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer("total_num_steps", self.total_num_steps)

    def _height(self, step: int) -> float:
        if step < _length(self.warmup_num_steps):
            return super()._height(step)
        left = self.total_num_steps - step
        return max(0.0, left / max(1, self.total_num_steps - _length(self.warmup_num_steps)))


@dataclass(frozen=True)
class WarmupCosineLR:
    """From ``warmup_min_ratio`` of ``lr`` to all of it, then along a cosine to ``cos_min_ratio`` of it at update
    ``total_num_steps``. With a total below the warm-up the rate falls at once. The first update's rate is zero."""

    lr: float
    total_num_steps: int
    warmup_min_ratio: float = 0.0
    warmup_num_steps: int = 1000
    cos_min_ratio: float = 0.0001
    warmup_type: str = "log"

    def __post_init__(self) -> None:
        for name in ("lr", "warmup_min_ratio", "cos_min_ratio"):
            checks.number(name, getattr(self, name), least=0.0)
        _check_warmup(self.warmup_num_steps, self.warmup_type)
        checks.integer("total_num_steps", self.total_num_steps)

    def __call__(self, updates: Any) -> float:
        step = operator.index(updates) - 1
        return 0.0 if step < 0 else self.lr * self._ratio(step)

    def _ratio(self, step: int) -> float:
        length = _length(self.warmup_num_steps)
        if step < length:
            return _between(self.warmup_min_ratio, 1.0, _warmed(step, length, self.warmup_type))
        done = min(1.0, (step - length + 1) / max(1, self.total_num_steps - length))
        return _between(self.cos_min_ratio, 1.0, (1 + math.cos(math.pi * done)) / 2)


@dataclass(frozen=True)
class LRRangeTest:
    """Grows without bound from ``lr_range_test_min_lr``: by ``lr_range_test_step_rate`` of it each
    ``lr_range_test_step_size`` updates, evenly or at once (``staircase``). Smith, arXiv:1803.09820."""

    lr_range_test_min_lr: float = 0.001
    lr_range_test_step_size: int = 2000
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: bool = False

    def __post_init__(self) -> None:
        for name in ("lr_range_test_min_lr", "lr_range_test_step_rate"):
            checks.number(name, getattr(self, name), least=0.0)
        checks.integer("lr_range_test_step_size", self.lr_range_test_step_size)
        checks.boolean("lr_range_test_staircase", self.lr_range_test_staircase)

    def __call__(self, updates: Any) -> float:
        n, size = operator.index(updates), self.lr_range_test_step_size
        steps = n // size if self.lr_range_test_staircase else n / size
        return self.lr_range_test_min_lr * (1 + self.lr_range_test_step_rate * steps)


@dataclass(frozen=True)
class OneCycle:
    """From ``cycle_min_lr`` to ``cycle_max_lr`` in ``cycle_first_step_size`` updates and back in
    ``cycle_second_step_size`` (None: as many); then ``cycle_min_lr`` / (1 + ``decay_lr_rate`` · updates since /
    ``decay_step_size``). A stair count cuts a half of the cycle into as many equal stairs. Smith, arXiv:1803.09820.

    ``betas`` is the schedule of Adam's betas, if ``cycle_momentum``: the first one moves against the learning rate
    between ``cycle_max_mom`` and ``cycle_min_mom`` (at which it starts), and after the cycle is ``cycle_max_mom`` ·
    (1 + ``decay_mom_rate`` · …); the second is 0.99.
    """

    cycle_min_lr: float
    cycle_max_lr: float
    decay_lr_rate: float = 0.0
    cycle_first_step_size: int = 2000
    cycle_second_step_size: int | None = None
    cycle_first_stair_count: int = 0
    cycle_second_stair_count: int | None = None
    decay_step_size: int = 0
    cycle_momentum: bool = True
    cycle_min_mom: float = 0.8
    cycle_max_mom: float = 0.9
    decay_mom_rate: float = 0.0

    def __post_init__(self) -> None:
        for name in ("cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "decay_mom_rate"):
            checks.number(name, getattr(self, name), least=0.0)
        for name in ("cycle_min_mom", "cycle_max_mom"):
            checks.number(name, getattr(self, name), least=0.0, below=1.0)
        checks.integer("cycle_first_step_size", self.cycle_first_step_size)
        for name in ("cycle_second_step_size", "cycle_second_stair_count"):
            if getattr(self, name) is not None:
                checks.integer(name, getattr(self, name), least=0)
        for name in ("cycle_first_stair_count", "decay_step_size"):
            checks.integer(name, getattr(self, name), least=0)
        checks.boolean("cycle_momentum", self.cycle_momentum)

    def __call__(self, updates: Any) -> float:
        n = operator.index(updates)
        if n <= self.cycle_length:
            return _between(self.cycle_min_lr, self.cycle_max_lr, self._height(n))
        return self.cycle_min_lr / (1 + self._decay(self.decay_lr_rate, n))

    @property
    def betas(self) -> Callable[[Any], tuple[float, float]] | None:
        return self._betas if self.cycle_momentum else None

    def _betas(self, updates: Any) -> tuple[float, float]:
        n = operator.index(updates)
        return (self.cycle_min_mom, 0.99) if n == 0 else self.betas_in_cycle(n)

    def betas_in_cycle(self, n: int) -> tuple[float, float]:
        """Return the betas after ``n`` updates, as if the first update's were in the cycle, too."""
        if n <= self.cycle_length:
            return _between(self.cycle_max_mom, self.cycle_min_mom, self._height(n)), 0.99
        return self.cycle_max_mom * (1 + self._decay(self.decay_mom_rate, n)), 0.99

    @property
    def _second(self) -> int:
        return self.cycle_first_step_size if self.cycle_second_step_size is None else self.cycle_second_step_size

    @property
    def cycle_length(self) -> int:
        """The updates of a cycle."""
        return self.cycle_first_step_size + self._second

    def _height(self, n: int) -> float:
        """The height in the cycle, from 0 to 1."""
        n %= self.cycle_length
        if n <= self.cycle_first_step_size:
            done, size, stairs = n, self.cycle_first_step_size, self.cycle_first_stair_count
        else:
            done, size, second = self.cycle_length - n, self._second, self.cycle_second_stair_count
            stairs = self.cycle_first_stair_count if second is None else second
        return done * stairs // size / stairs if stairs else done / size

    def _decay(self, rate: float, n: int) -> float:
        return rate * (n - self.cycle_length) / self.decay_step_size if self.decay_step_size else 0.0


@dataclass(frozen=True)
class SectionSchedule:
    """The learning rate of a ``scheduler`` section, also for parameter groups with rates of their own."""

    schedule: Any
    highest: str | None
    """The argument of the schedule that is a group's own rate; None: all groups have the same rate."""

    def __call__(self, updates: Any) -> float:
        return self.schedule(updates)

    def of_group(self, lr: float) -> Callable[[Any], float]:
        """The schedule of a group whose own rate is ``lr``."""
        return self.schedule if self.highest is None else replace(self.schedule, **{self.highest: lr})


SCHEDULES = {cls.__name__: cls for cls in (WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle)}


def _length(warmup_num_steps: int) -> int:
    return max(2, warmup_num_steps)  # log(1) is 0, and cannot divide


def _warmed(step: int, warmup_num_steps: int, warmup_type: str) -> float:
    length = _length(warmup_num_steps)
    if step >= length:
        return 1.0
    return math.log(step + 1) / math.log(length) if warmup_type == "log" else step / length


def _between(start: float, end: float, share: float) -> float:
    return start + (end - start) * share


def _check_warmup(warmup_num_steps: object, warmup_type: object) -> None:
    checks.integer("warmup_num_steps", warmup_num_steps)
    checks.choice("warmup_type", warmup_type, ("log", "linear"))
