"""What a wrap will need, in bytes, before anything is allocated."""

from collections.abc import Sequence
from dataclasses import dataclass

from .errors import HostMemoryError
from .host_memory import format_bytes


@dataclass(frozen=True)
class PlanRow:
    """One consumer: what it is, where it lives (``"host"`` or ``"device"``), its bytes, and what shrinks it."""

    what: str
    where: str
    n_bytes: int
    remedy: str


@dataclass(frozen=True)
class MemoryPlan:
    """The consumers of one rank."""

    rows: tuple[PlanRow, ...]
    numel: int
    """Parameters, in elements."""

    @property
    def host_bytes(self) -> int:
        """Bytes that wrap will allocate on the host."""
        return sum(row.n_bytes for row in self.rows if row.where == "host")

    @property
    def device_bytes(self) -> int:
        """Bytes that parameters and gradients take on the device."""
        return sum(row.n_bytes for row in self.rows if row.where == "device")

    def table(self) -> str:
        """The plan as text, largest consumer first."""
        return format_table(
            [
                (row.where, row.what, format_bytes(row.n_bytes), f"{row.n_bytes / max(self.numel, 1):.2f}", row.remedy)
                for row in sorted(self.rows, key=lambda row: (row.where, -row.n_bytes))
                if row.n_bytes
            ],
            ("where", "what", "bytes", "per parameter", "made smaller by"),
        )

    def check(self, available: int) -> None:
        """Raise :class:`HostMemoryError`, with the table, if the host part exceeds ``available`` bytes."""
        if self.host_bytes > available:
            raise HostMemoryError(
                f"the optimizer needs {format_bytes(self.host_bytes)} of host memory for {self.numel:,} parameters, "
                f"and {format_bytes(available)} is available; nothing was allocated. Free memory, use more ranks, "
                f"or change what the last column names:\n{self.table()}"
            )


@dataclass(frozen=True)
class MemoryReport:
    """What is held now, beside what was planned."""

    numel: int
    """Parameters, in elements."""
    device_bytes: int
    """Bytes of the device parameters."""
    planned_host_bytes: int
    host: dict[str, int]
    """Bytes held on the host, by what they hold."""

    @property
    def host_bytes(self) -> int:
        """Bytes held on the host."""
        return sum(self.host.values())

    def __str__(self) -> str:
        rows = [("device", "parameters", self.device_bytes)]
        rows += [("host", what, n_bytes) for what, n_bytes in self.host.items()]
        rows += [("host", "in all", self.host_bytes), ("host", "planned", self.planned_host_bytes)]
        return format_table(
            [(where, what, format_bytes(b), f"{b / max(self.numel, 1):.2f}") for where, what, b in rows],
            ("where", "what", "bytes", "per parameter"),
        )


def format_table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    """Plain text columns."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)
