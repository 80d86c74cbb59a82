"""Drivers of torch's devices, and the pinning of host memory for them. Only this module names vendors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial

import numpy as np
import torch

from offload_core.device.no_queue import NoQueue
from offload_core.errors import HostMemoryError, KernelError
from offload_core.memory.pinning import ALLOCATE, Cuda, Driver, Hip, Pinning, Registered
from offload_core.native.device_code import DeviceCode

from .queue import Launcher

REGISTERED: dict[str, Registered] = {}
"""The registration of host memory for types of devices whose driver offers it; tests add theirs."""


@dataclass(frozen=True)
class TorchPinned(Pinning):
    """Memory of torch's own pinned allocator, for devices whose driver is not known here. The allocator rounds sizes up
    to powers of two, and keeps memory that is free again for its next arrays."""

    name = ALLOCATE
    done = "allocated by torch"
    cost = (
        "Copies are as fast, but torch rounds sizes up to powers of two and keeps memory that is free again "
        "(PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:1 rounds no size above 1 MB)"
    )

    def taken(self, n_bytes: int) -> int:
        """As :meth:`Pinning.taken`."""
        return 1 << (n_bytes - 1).bit_length()

    def allocate(self, n_bytes: int, threads: int) -> np.ndarray:
        try:
            return torch.zeros(n_bytes, dtype=torch.uint8, device="cpu", pin_memory=True).numpy()
        except RuntimeError as error:
            raise HostMemoryError(str(error)) from None


def pinning_for(device: torch.device) -> Sequence[Pinning]:
    """Return the ways to pin host memory for a device, best first."""
    for driver in drivers_of(device):
        return driver.ways
    return (*([REGISTERED[device.type]] if device.type in REGISTERED else ()), TorchPinned())


def drivers_of(device: torch.device) -> Sequence[Driver]:
    """The driver of a type of devices, if it is one that is known."""
    if device.type != "cuda":
        return ()
    return _drivers(torch.accelerator.current_device_index() if device.index is None else device.index)


def launcher_for(device: torch.device, stream: torch.Stream) -> Launcher:
    """Return the launcher of the kernels in a stream of a device.

    Raises:
        ConfigError: there is none for devices of this type, or no compiler for its kernels.
    """
    if device.type not in LAUNCHERS:
        raise NoQueue(f"the kernels of updates are compiled for CUDA and ROCm devices, and this is {device}").refusal
    try:
        return LAUNCHERS[device.type](device, stream)
    except KernelError as error:
        raise NoQueue(f"its kernels cannot be compiled ({error})").refusal from None


@dataclass(frozen=True)
class _DriverLauncher:
    """The kernels that a vendor's compiler makes, in one stream. Its attributes are :class:`Launcher`'s methods."""

    update: Callable[..., None]
    sum_squares: Callable[..., None]
    accumulate: Callable[..., None]
    cast: Callable[..., None]
    reduce: Callable[..., None]


def _driver_launcher(device: torch.device, stream: torch.Stream) -> Launcher:
    code = _code_of(drivers_of(device)[0])
    handle = (
        torch.get_device_module(device)
        .Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)
        .cuda_stream
    )
    names = (field.name for field in fields(_DriverLauncher))
    return _DriverLauncher(*(partial(getattr(code, name), stream=handle) for name in names))


@cache
def _code_of(driver: Driver) -> DeviceCode:
    """One object for each device: kernels are compiled once."""
    return DeviceCode(driver)


LAUNCHERS: dict[str, Callable[[torch.device, torch.Stream], Launcher]] = {"cuda": _driver_launcher}
"""The launchers of kernels for types of devices, by torch's names; tests add theirs."""


@cache
def _drivers(number: int) -> Sequence[Driver]:
    """One object for each device: engines see by it that their memory is pinned in one way."""
    return (Hip(device=number) if torch.version.hip else Cuda(number),)
