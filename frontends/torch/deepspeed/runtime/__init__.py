"""``deepspeed.runtime``: learning-rate schedules."""

from . import lr_schedules

__all__ = ["lr_schedules"]
