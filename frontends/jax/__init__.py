"""Offloaded AdamW for JAX: ``wrap(params)``, ``offloaded.value_and_grad(loss_fn)``, ``offloaded.update(grads)``."""

from offload_core.config.options import OffloadConfig
from offload_core.engine import StepReport

from .construction import init
from .devices.launch import initialize
from .devices.mesh.gather import gather_params, gathered
from .offloaded import OffloadedParams, wrap
from .training.gradients import RankGradients, ScaledGradients

__all__ = [
    "OffloadConfig",
    "OffloadedParams",
    "RankGradients",
    "ScaledGradients",
    "StepReport",
    "gather_params",
    "gathered",
    "init",
    "initialize",
    "wrap",
]
