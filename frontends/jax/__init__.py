"""Offloaded AdamW for JAX: ``wrap(params)``, ``offloaded.value_and_grad(loss_fn)``, ``offloaded.update(grads)``."""

from offload_core.config.options import OffloadConfig
from offload_core.step.pipeline import StepReport

from .gradients import RankGradients, ScaledGradients
from .launch import initialize
from .mesh.gather import gather_params, gathered
from .offloaded import OffloadedParams, wrap

__all__ = [
    "OffloadConfig",
    "OffloadedParams",
    "RankGradients",
    "ScaledGradients",
    "StepReport",
    "gather_params",
    "gathered",
    "initialize",
    "wrap",
]
