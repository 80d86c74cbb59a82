"""Offloaded AdamW for PyTorch: ``wrap(model)``, or ``OffloadedAdamW`` as an optimizer of its own."""

from offload_core.config import OffloadConfig
from offload_core.pipeline import StepReport

from .engine import Engine, wrap
from .optimizer import OffloadedAdamW

__all__ = ["Engine", "OffloadConfig", "OffloadedAdamW", "StepReport", "wrap"]
