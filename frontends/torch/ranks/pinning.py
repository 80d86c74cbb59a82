"""Drivers of torch's devices, and the pinning of host memory for them. Only this module names vendors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from offload_core.errors import ConfigError, HostMemoryError
from offload_core.memory.pinning import Cuda, Driver, Hip, Pinning, Registered

from .queue import Launcher

REGISTERED: dict[str, Registered] = {}
"""The registration of host memory for types of devices whose driver offers it; tests add theirs."""


LAUNCHERS: dict[str, Callable[[torch.device, torch.Stream], Launcher]] = {}
"""The launchers of kernels for types of devices, by torch's names; tests add theirs."""


@dataclass(frozen=True)
class TorchPinned:
    """Memory of torch's own pinned allocator, which may round sizes up."""

    def allocate(self, n_bytes: int, threads: int) -> np.ndarray:
        try:
            return torch.zeros(n_bytes, dtype=torch.uint8, device="cpu", pin_memory=True).numpy()
        except RuntimeError as error:
            raise HostMemoryError(str(error)) from None


def pinning_for(device: torch.device) -> Pinning:
    """Register our mappings of exact size with the driver where that is known to work."""
    for driver in drivers_of(device):
        return Registered(driver.register)
    return REGISTERED.get(device.type) or TorchPinned()


def drivers_of(device: torch.device) -> Sequence[Driver]:
    """The driver of a type of devices, if it is one that is known."""
    if device.type != "cuda":
        return ()
    return _drivers(torch.accelerator.current_device_index() if device.index is None else device.index)


def launcher_for(device: torch.device, stream: torch.Stream) -> Launcher:
    """Return the launcher of the kernels in a stream of a device.

    Raises:
        ConfigError: there is none for devices of this type.
    """
    if device.type not in LAUNCHERS:
        raise ConfigError(
            f"states cannot be kept on {device}: the kernels of updates are compiled for CUDA and ROCm devices; "
            "expected offload_optimizer='cpu' or 'nvme', and no device_states_bytes"
        )
    return LAUNCHERS[device.type](device, stream)


@cache
def _drivers(number: int) -> Sequence[Driver]:
    """One object for each device: engines see by it that their memory is pinned in one way."""
    return (Hip() if torch.version.hip else Cuda(number),)
