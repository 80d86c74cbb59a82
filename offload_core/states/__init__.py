"""Stores of a shard's states: their memory and their format. Seam: store."""

from .in_memory import StatesInMemory
from .on_disk import StatesOnDisk
from .store import Store

__all__ = ["STORES", "Store"]

STORES: dict[str, type[Store]] = {"cpu": StatesInMemory, "nvme": StatesOnDisk}
"""The stores by the values of ``OffloadConfig.offload_optimizer`` that ask for them."""
