"""``deepspeed.runtime``: learning-rate schedules, and parameters of stage 3."""

from . import lr_schedules, zero  # noqa: F401
