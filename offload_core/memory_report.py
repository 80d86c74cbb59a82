"""The public place of ``MemoryReport`` and its rows; ``offload_core.memory`` defines them."""

from .memory.report import MemoryReport, MemoryRow

__all__ = ["MemoryReport", "MemoryRow"]
