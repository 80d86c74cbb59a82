"""The public place of ``MemoryReport``, its rows and ``DeviceUse``; ``offload_core.memory`` defines them."""

from .memory.report import DeviceUse, MemoryReport, MemoryRow

__all__ = ["DeviceUse", "MemoryReport", "MemoryRow"]
