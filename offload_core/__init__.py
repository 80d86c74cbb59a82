"""ZeRO-Offload's core: who owns which slice, how it moves, and its Adam update on the host. No framework."""

from ._kernels import KernelInfo, kernel_info, set_instruction_set
from .config import OffloadConfig
from .errors import (
    CheckpointError,
    CollectiveError,
    ConfigError,
    ConfigWarning,
    DeviceMemoryError,
    GradientError,
    HostMemoryError,
    KernelError,
    OffloadError,
    ParameterError,
    StateError,
)

__all__ = [
    "CheckpointError",
    "CollectiveError",
    "ConfigError",
    "ConfigWarning",
    "DeviceMemoryError",
    "GradientError",
    "HostMemoryError",
    "KernelError",
    "KernelInfo",
    "OffloadConfig",
    "OffloadError",
    "ParameterError",
    "StateError",
    "kernel_info",
    "set_instruction_set",
]
