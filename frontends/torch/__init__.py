"""Offloaded AdamW for PyTorch: ``wrap(model)``, or ``OffloadedAdamW`` as an optimizer of its own."""

from offload_core.config import OffloadConfig
from offload_core.pipeline import StepReport

from .construction import init
from .deepspeed_weights import load_deepspeed
from .engine import Engine, wrap
from .launch import init_process_group
from .optimizer import OffloadedAdamW
from .partitioned import gathered_parameters, register_external_parameter

__all__ = [
    "Engine",
    "OffloadConfig",
    "OffloadedAdamW",
    "StepReport",
    "gathered_parameters",
    "init",
    "init_process_group",
    "load_deepspeed",
    "register_external_parameter",
    "wrap",
]
