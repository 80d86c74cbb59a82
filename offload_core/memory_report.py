"""``MemoryReport`` and its rows, where users know them; they are made in ``offload_core.memory``."""

from .memory.report import MemoryReport, MemoryRow

__all__ = ["MemoryReport", "MemoryRow"]
