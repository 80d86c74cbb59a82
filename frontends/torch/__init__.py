"""Offloaded optimizers for PyTorch: ``wrap(model)``, or ``OffloadedAdamW`` and other optimizers alone."""

from offload_core.config.options import OffloadConfig
from offload_core.engine import StepReport

from .engine import Engine, wrap
from .integrations.zero_files.export import export_deepspeed
from .integrations.zero_files.loading import ZeroCheckpoint, load_deepspeed, zero_checkpoint
from .optim.optimizer import (
    OffloadedAdagrad,
    OffloadedAdamW,
    OffloadedLion,
    OffloadedMuon,
    OffloadedOptimizer,
    OffloadedSGD,
)
from .ranks.launch import init_process_group
from .stage3.construction import init
from .stage3.gathering import gathered_parameters, register_external_parameter

__all__ = [
    "Engine",
    "OffloadConfig",
    "OffloadedAdagrad",
    "OffloadedAdamW",
    "OffloadedLion",
    "OffloadedMuon",
    "OffloadedOptimizer",
    "OffloadedSGD",
    "StepReport",
    "ZeroCheckpoint",
    "export_deepspeed",
    "gathered_parameters",
    "init",
    "init_process_group",
    "load_deepspeed",
    "register_external_parameter",
    "wrap",
    "zero_checkpoint",
]
