"""Schedules: hyperparameters that are functions of the number of updates made so far."""

from typing import Any, Protocol, runtime_checkable


class Schedule(Protocol):
    """A function of the number of updates made so far."""

    def __call__(self, updates: Any, /) -> Any: ...


@runtime_checkable
class GroupSchedule(Schedule, Protocol):
    """A schedule of the learning rate that also sets the rates of parameter groups that have one of their own."""

    def of_group(self, lr: float) -> Schedule:
        """Return the schedule of a group whose own rate is ``lr``."""
