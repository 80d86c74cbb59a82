"""``deepspeed.ops``: optimizers."""

from . import adagrad, adam, lion  # noqa: F401
