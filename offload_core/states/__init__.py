"""Stores, which keep a process's optimizer states in the device's memory, in host memory or on disk. Seam: store."""

from ..config.options import OffloadConfig
from ..device.protocols import Device
from ..memory.host_memory import HostMemory
from .in_memory import StatesInMemory
from .on_device import StatesOnDevice
from .on_disk import StatesOnDisk
from .store import Store
from .tiered import TieredStore

__all__ = ["STORES", "Store", "tiers"]

STORES: dict[str, type[Store]] = {"cpu": StatesInMemory, "nvme": StatesOnDisk}
"""The class of store for each value of ``OffloadConfig.offload_optimizer`` beside the device's memory."""


def tiers(kind: type[Store], config: OffloadConfig, memory: HostMemory, device: Device, *, on_device: bool) -> Store:
    """Return the store of one process's states.

    Args:
        kind: the class of store for states that are not on the device.
        on_device: True if some states may be in the device's memory.

    Raises:
        ConfigError: the device cannot update states in its memory.
    """
    rest = kind(config, memory, len(device.ranks))
    if not on_device:
        return rest
    return TieredStore(StatesOnDevice(config, memory, len(device.ranks), device.queue()), rest)
