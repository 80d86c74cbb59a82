"""ZeRO-Offload's core: partitioning, transfers between device and host, and the Adam update. It needs no framework."""

from .config.options import OffloadConfig
from .config.settings import OffloadSettings
from .errors import (
    CheckpointError,
    CollectiveError,
    ConfigError,
    ConfigWarning,
    DeviceMemoryError,
    DiskError,
    DiskSpaceError,
    GradientError,
    HostMemoryError,
    HostMemoryWarning,
    KernelError,
    OffloadError,
    ParameterError,
    StateError,
)
from .native.kernels import KernelInfo, kernel_info, set_instruction_set

__all__ = [
    "CheckpointError",
    "CollectiveError",
    "ConfigError",
    "ConfigWarning",
    "DeviceMemoryError",
    "DiskError",
    "DiskSpaceError",
    "GradientError",
    "HostMemoryError",
    "HostMemoryWarning",
    "KernelError",
    "KernelInfo",
    "OffloadConfig",
    "OffloadError",
    "OffloadSettings",
    "ParameterError",
    "StateError",
    "kernel_info",
    "set_instruction_set",
]
