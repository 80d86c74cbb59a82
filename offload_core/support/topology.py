"""Processors, memory nodes and devices of this machine, as Linux shows them in sysfs. Elsewhere nothing is known."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

SYSFS = Path("/sys")
"""The ``root`` of this machine, and the default of the functions here."""

_GENERATIONS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
"""PCI Express generations, by gigatransfers a second of a lane."""
_ACCELERATORS = ("0x03", "0x12")
"""PCI classes of display controllers and of processing accelerators."""


@dataclass(frozen=True)
class Topology:
    """The processors of a machine. A processor in no entry counts as a core by itself, on no known node."""

    nodes: Mapping[int, frozenset[int]]
    """The processors of each memory node, in the order of nodes. A node may have memory alone."""
    siblings: Mapping[int, frozenset[int]]
    """The processors of each one's physical core, itself included (SMT)."""

    @cached_property
    def _nodes_by_cpu(self) -> dict[int, int]:
        return {cpu: node for node, cpus in self.nodes.items() for cpu in cpus}

    @classmethod
    def read(cls, root: Path | None = None) -> "Topology":
        """Read sysfs; a part that it lacks is empty."""
        return _read(root or SYSFS)

    def node_of(self, cpu: int) -> int | None:
        """The node of a processor; None: unknown."""
        return self._nodes_by_cpu.get(cpu)

    def cores(self, cpus: Iterable[int]) -> list[int]:
        """The first of these processors on each of their physical cores, in the order of nodes."""
        first: dict[int, int] = {}
        for cpu in sorted(cpus):
            first.setdefault(min(self.siblings.get(cpu, {cpu})), cpu)
        unknown = -1
        return sorted(first.values(), key=lambda cpu: (self._nodes_by_cpu.get(cpu, unknown), cpu))


@dataclass(frozen=True)
class PciDevice:
    """An accelerator or a display controller."""

    address: str
    """The PCI address, such as ``0000:c1:00.0``."""
    kind: str
    """The numbers of vendor and model, such as ``10de:2335``."""
    node: int | None
    """The memory node that it is nearest to; None: unknown."""
    link: str | None
    """Its present connection, such as ``PCIe 4 x16`` (idle links slow down); None: unknown."""


def pci_devices(root: Path | None = None) -> list[PciDevice]:
    """The accelerators and display controllers of this machine, by address."""
    found = []
    root = root or SYSFS
    for folder in sorted(root.glob("bus/pci/devices/*")):
        if _text(folder / "class").startswith(_ACCELERATORS):
            kind = ":".join(_text(folder / name).removeprefix("0x") for name in ("vendor", "device"))
            found.append(PciDevice(folder.name, kind, node_of_device(folder.name, root), _link(folder)))
    return found


def node_of_device(address: str, root: Path | None = None) -> int | None:
    """The memory node of the PCI device at ``address``; None: unknown, or the machine has no such node."""
    try:
        node = int(_text((root or SYSFS) / "bus/pci/devices" / address / "numa_node"))
    except ValueError:
        return None
    return node if node in Topology.read(root).nodes else None


def cache_bytes(root: Path | None = None) -> int:
    """The bytes that this machine's caches of the last level hold together; 0: unknown."""
    caches: dict[int, dict[str, int]] = {}
    for folder in (root or SYSFS).glob("devices/system/cpu/cpu[0-9]*/cache/index[0-9]*"):
        level, size = _text(folder / "level"), _text(folder / "size")
        if level.isdecimal() and size.removesuffix("K").isdecimal():
            kibibytes = int(size.removesuffix("K"))
            caches.setdefault(int(level), {})[_text(folder / "shared_cpu_list")] = kibibytes * 1024
    return sum(caches[max(caches)].values()) if caches else 0


def numbers(text: str) -> frozenset[int]:
    """Return the numbers in a list such as ``0-3,8``; none if the text is no such list."""
    found: set[int] = set()
    try:
        for part in filter(None, text.strip().split(",")):
            first, *last = map(int, part.split("-"))
            found.update(range(first, (last[0] if last else first) + 1))
    except ValueError:
        return frozenset()
    return frozenset(found)


def ranges(cpus: Iterable[int]) -> str:
    """Return numbers as text that :func:`numbers` reads."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


@cache
def _read(root: Path) -> Topology:
    nodes, siblings = {}, {}
    for folder in root.glob("devices/system/node/node[0-9]*"):
        nodes[int(folder.name.removeprefix("node"))] = numbers(_text(folder / "cpulist"))
    for folder in root.glob("devices/system/cpu/cpu[0-9]*"):
        cpu = int(folder.name.removeprefix("cpu"))
        core = _text(folder / "topology/core_cpus_list") or _text(folder / "topology/thread_siblings_list")
        if cpu in numbers(core):
            siblings[cpu] = numbers(core)
    return Topology(dict(sorted(nodes.items())), siblings)


def _link(folder: Path) -> str | None:
    speed, width = _text(folder / "current_link_speed").partition(" ")[0], _text(folder / "current_link_width")
    if speed not in _GENERATIONS or not width.isdecimal() or width == "0":
        return None
    return f"PCIe {_GENERATIONS[speed]} x{width}"


def _text(path: Path) -> str:
    """The contents of a file; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
