"""``StepReport``, where users know it; the pipeline itself is in ``offload_core.step``."""

from .step.pipeline import StepReport

__all__ = ["StepReport"]
