"""Memory in use beside the plan, as a table and as a picture."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..support.optional import library
from .host_memory import format_bytes
from .plan import DEVICE, HOST, PlanRow, format_table

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
_STAYS, _BRIEF, _HELD = "#9db4cc", "#dde5ee", "#1f4e79"


class DeviceUse(NamedTuple):
    """Memory in use on the devices of one process, as their allocator counts it: activations are included."""

    name: str
    """The name that the framework gives the device, such as ``"NVIDIA H200"``; empty: unknown."""
    used: int
    """Bytes in use now, of all devices of the process together."""
    peak: int
    """The most bytes that were in use since the process began."""
    n_devices: int = 1


@dataclass(frozen=True)
class MemoryRow:
    """Bytes of one kind, planned and held now."""

    where: str
    """``"host"``, ``"device"``, or the place of a store of states."""
    what: str
    """The kind: ``"parameters"``, ``"master"``, …"""
    planned: int
    """Planned bytes."""
    held: int
    """Bytes in use now."""
    brief: bool = False
    """True if it comes and goes in each step; ``planned`` is then the most that it takes."""


@dataclass(frozen=True)
class MemoryReport:
    """Memory in use now beside the plan: as text (``str``), and as a picture (:meth:`plot`).

    The device's rows count parameters, the rest of the model, gathered parameters, and gradients that wait there; they
    do not count temporary buffers and activations. On the CPU that "device" is host memory, too.
    """

    numel: int
    """Trained parameters, in elements."""
    rows: tuple[MemoryRow, ...]
    """One for each kind of memory that is in use or planned."""
    shared: int = field(default=0, compare=False)
    """Bytes of staging and gradients on the host that engines of this process use in turn, so that reports of others
    count them, too: they stay if this engine is closed."""

    pinned: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Bytes on the host that the device copies from and to, by how they are pinned: ``"registered with the device's
    driver"``, ``"allocated by the device's driver"``, ``"allocated by torch"``, or ``"pageable"`` if pinning was
    refused. Empty without such a device, and with ``pin_memory=False``."""

    @classmethod
    def of(
        cls,
        numel: int,
        planned: Iterable[PlanRow],
        held: Mapping[tuple[str, str], int],
        *,
        shared: int = 0,
        pinned: Mapping[str, int] | None = None,
    ) -> "MemoryReport":
        """Planned memory (of any number of plans) beside ``held``, the bytes in use by ``(where, what)``."""
        lasting = [row for row in planned if not row.passing]
        brief = {(row.where, row.what) for row in lasting if row.brief}
        plans = Counter[tuple[str, str]]()
        for row in lasting:
            plans[row.where, row.what] += row.n_bytes
        kinds = sorted(dict.fromkeys([*plans, *held]), key=lambda kind: (kind[0], kind in brief))
        rows = [MemoryRow(*kind, plans[kind], held.get(kind, 0), kind in brief) for kind in kinds]
        return cls(numel, tuple(row for row in rows if row.planned or row.held), shared, pinned or {})

    @property
    def host(self) -> dict[str, int]:
        """Bytes held on the host, by kind."""
        return {row.what: row.held for row in self.rows if row.where == HOST and row.held}

    @property
    def host_bytes(self) -> int:
        """Bytes held on the host."""
        return self._sum(HOST).held

    @property
    def device_bytes(self) -> int:
        """Bytes held on the device."""
        return self._sum(DEVICE).held

    @property
    def planned_host_bytes(self) -> int:
        """Planned bytes that stay allocated on the host."""
        return self._sum(HOST).planned

    @property
    def planned_device_bytes(self) -> int:
        """Planned bytes that stay on the device from step to step."""
        return self._sum(DEVICE).planned

    @property
    def _places(self) -> list[str]:
        return [*dict.fromkeys([DEVICE, HOST, *(row.where for row in self.rows)])]

    def _sum(self, where: str) -> MemoryRow:
        rows = [row for row in self.rows if row.where == where]
        planned = sum(row.planned for row in rows if not row.brief)
        return MemoryRow(where, "in all", planned, sum(row.held for row in rows))

    def __str__(self) -> str:
        rows = []
        for where in self._places:
            rows += [row for row in self.rows if row.where == where]
            rows.append(self._sum(where))
        if self.shared:
            rows.append(MemoryRow(HOST, "used in turn with other engines", self.shared, self.shared))
        lines = [
            (
                row.where + " (in a step)" * row.brief,
                row.what,
                format_bytes(row.planned),
                format_bytes(row.held),
                f"{row.held / self.numel:.2f}" if self.numel else "",
            )
            for row in rows
        ]
        for how, n_bytes in self.pinned.items():
            per_parameter = f"{n_bytes / self.numel:.2f}" if self.numel else ""
            lines.append((HOST, f"of that, {how}", "", format_bytes(n_bytes), per_parameter))
        return format_table(lines, ("where", "what", "planned", "held", "per parameter"))

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw planned and held bytes to a file. Its suffix gives the format (``.svg``, ``.png``, ``.pdf``).

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
            OSError: the file cannot be written.
        """
        _draw(self, path)


def _draw(report: MemoryReport, path: str | os.PathLike[str]) -> None:
    """Draw a panel for each place of memory, in one scale. Each kind has a wide bar of planned bytes, and in it one of
    held bytes that is narrow."""
    figures = library("matplotlib.figure", "plot", "memory_report().plot()")  # pyplot's state is the user's
    panels = [(where, [row for row in report.rows if row.where == where]) for where in report._places]
    panels = [(where, rows) for where, rows in panels if rows]
    largest = max((max(row.planned, row.held) for row in report.rows), default=1)
    power = min((max(largest, 1).bit_length() - 1) // 10, len(_UNITS) - 1)
    unit = 1024**power
    sizes = [len(rows) for _, rows in panels]
    figure = figures.Figure(figsize=(7, 1 + 0.35 * sum(sizes) + 0.7 * len(sizes)), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=sizes)[:, 0]
    for axis, (where, rows) in zip(axes, panels, strict=True):
        names = [row.what + " (in a step)" * row.brief for row in rows]
        axis.barh(names, [row.planned / unit for row in rows], color=[_BRIEF if row.brief else _STAYS for row in rows])
        axis.barh(names, [row.held / unit for row in rows], height=0.35, color=_HELD)
        in_all = report._sum(where)
        words = f"{where}: {in_all.held / unit:.1f} of {in_all.planned / unit:.1f} {_UNITS[power]}"
        axis.set_title(words, loc="left", fontsize=10)
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel(_UNITS[power])
    patches = library("matplotlib.patches", "plot", "memory_report().plot()")
    legend = [(_STAYS, "planned"), (_BRIEF, "planned, in a step"), (_HELD, "held")]
    handles = [patches.Patch(color=color, label=label) for color, label in legend]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(path)
