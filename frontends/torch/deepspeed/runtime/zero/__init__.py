"""``deepspeed.runtime.zero``: what scripts ask of a parameter of stage 3."""

from . import partition_parameters  # noqa: F401
