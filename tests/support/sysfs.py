"""Trees of files as Linux's sysfs shows machines in them, and a driver that gives devices PCI addresses."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from offload_core.memory.pinning import Cuda, Driver
from offload_core.support.topology import ranges


@dataclass(frozen=True)
class Gpu:
    address: str
    node: int
    speed: str = "16.0 GT/s PCIe"
    width: str = "16"


def write(root: Path, files: Mapping[str, object]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")


def sysfs(
    root: Path,
    nodes: Mapping[int, Iterable[int]],
    cores: Iterable[Sequence[int]],
    gpus: Iterable[Gpu] = (),
    *,
    siblings: str = "core_cpus_list",
) -> Path:
    """A machine of these nodes (their processors) and physical cores (their processors); returns ``root``."""
    write(root, {f"devices/system/node/node{n}/cpulist": ranges(cpus) for n, cpus in nodes.items()})
    for core in cores:
        write(root, {f"devices/system/cpu/cpu{cpu}/topology/{siblings}": ranges(core) for cpu in core})
    write(root, {"devices/system/cpu/cpufreq/boost": 1})
    for gpu in gpus:
        said = {
            "class": "0x030200", "vendor": "0x10de", "device": "0x20b0", "numa_node": gpu.node,
            "current_link_speed": gpu.speed, "current_link_width": gpu.width,
        }  # fmt: skip
        write(root / "bus/pci/devices" / gpu.address, said)
    return root


def one_node(root: Path) -> Path:
    """Two processors, no SMT: a small virtual machine."""
    return sysfs(root, {0: [0, 1]}, [[0], [1]])


TWO_NODES = [Gpu("0000:3b:00.0", 0), Gpu("0000:5e:00.0", 0), Gpu("0000:af:00.0", 1), Gpu("0000:d8:00.0", 1)]


def two_nodes(root: Path, gpus: Iterable[Gpu] = TWO_NODES) -> Path:
    """Two sockets of eight cores with SMT: node 0 has the processors 0-7 and 16-23."""
    nodes = {node: [*range(8 * node, 8 * node + 8), *range(8 * node + 16, 8 * node + 24)] for node in (0, 1)}
    return sysfs(root, nodes, [[cpu, cpu + 16] for cpu in range(16)], gpus)


DGX = [
    Gpu(f"0000:{bus}:00.0", node)
    for bus, node in zip(("07", "0f", "47", "4e", "87", "90", "b7", "bd"), (3, 3, 1, 1, 7, 7, 5, 5), strict=True)
]


def eight_nodes(root: Path) -> Path:
    """As a DGX A100: two sockets of 64 cores with SMT in four nodes each; each second node has two devices."""
    nodes = {node: [*range(16 * node, 16 * node + 16), *range(16 * node + 128, 16 * node + 144)] for node in range(8)}
    return sysfs(root, nodes, [[cpu, cpu + 128] for cpu in range(128)], DGX)


_DRIVER = r"""
#include <stdlib.h>
#include <string.h>

static int started;

int cuInit(unsigned flags) {
    started = 1;
    return flags != 0;
}

int cuDeviceGet(int *device, int ordinal) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (!started || ordinal < 0)
        return 3;
    for (; ordinal && visible; ordinal--)
        visible = (visible = strchr(visible, ',')) ? visible + 1 : NULL;
    if (!visible)
        return 101;
    *device = atoi(visible);
    return 0;
}

int cuDeviceGetPCIBusId(char *text, int length, int device) {
    const char *addresses[] = {ADDRESSES};
    if (device >= (int)(sizeof addresses / sizeof *addresses) || (int)strlen(addresses[device]) >= length)
        return 101;
    strcpy(text, addresses[device]);
    return 0;
}
"""


def driver(folder: Path, gpus: Iterable[Gpu]) -> Driver:
    """A library with the calls of CUDA's driver that tell a device's address; ``CUDA_VISIBLE_DEVICES`` must be set."""
    from tests.support.c_build import run  # skips tests where there is no compiler

    addresses = ",".join(f'"{gpu.address.upper()}"' for gpu in gpus)
    source, library = folder / "driver.c", folder / "libdriver.so"
    source.write_text(_DRIVER.replace("ADDRESSES", addresses))
    run("gcc", "-shared", "-fPIC", source, "-o", library)
    return Cuda(0, os.fspath(library))
