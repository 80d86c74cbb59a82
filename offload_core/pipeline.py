"""The public place of ``StepReport``; ``offload_core.step`` defines it, and the pipeline."""

from .step.pipeline import StepReport

__all__ = ["StepReport"]
