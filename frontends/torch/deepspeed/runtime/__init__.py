"""``deepspeed.runtime``: learning-rate schedules."""

from . import lr_schedules  # noqa: F401
