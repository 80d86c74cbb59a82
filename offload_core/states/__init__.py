"""Stores, which keep a process's optimizer states in host memory or on disk. Seam: store."""

from .in_memory import StatesInMemory
from .on_disk import StatesOnDisk
from .store import Store

__all__ = ["STORES", "Store"]

STORES: dict[str, type[Store]] = {"cpu": StatesInMemory, "nvme": StatesOnDisk}
"""The class of store for each value of ``OffloadConfig.offload_optimizer``."""
