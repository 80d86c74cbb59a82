"""A description of this machine, and measurements of its memory."""

import platform
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from ..disk.folders import free_bytes
from ..disk.scratch import ScratchFiles, Transfer
from ..dtypes import FLOAT32
from ..errors import DiskSpaceError
from ..memory.host_memory import (
    HostMemory,
    available_bytes,
    control_group_limit,
    format_bytes,
    limits_of_pinned_memory,
    system_memory,
)
from ..memory.numa import node_near
from ..memory.pinning import DRIVERS, in_wsl2
from ..native import kernels
from ..rules.adam import Adam, AdamHyper
from ..support.bfloat16 import why_bfloat16_is_slow
from ..support.launchers import place_on_machine
from ..support.processors import Share, available_cpus, nodes_of_ranks, share_near
from ..support.topology import Topology, cache_bytes, pci_devices

_MEASURED = 256 * 2**20
"""The least bytes that are streamed."""
_BEYOND_CACHES = 6
"""So many times the bytes that caches hold are streamed: arrays in a cache seem faster than memory is."""
_RUNS = 5
_ON_DISK = 2**30
"""The most bytes that are written to a disk, and then read."""
_AT_A_TIME = 32 * 2**20
"""The bytes of a bucket's block, about: the unit in which a disk is measured."""
_IN_FLIGHT = 3
_SECONDS_EACH_WAY = 1.2
_PACKAGES = ("offload-core", "numpy", "torch", "jax")


@dataclass(frozen=True)
class Bandwidths:
    """Bandwidths of the host's memory: bytes a second, read and written together; the best of several runs."""

    dram: float
    """The bandwidth of an update: the Adam kernel reads four fp32 arrays and writes three."""
    copy: float
    """The bandwidth of a copy of one array to another."""


def measure_bandwidths(threads: int) -> Bandwidths:
    """Measure the bandwidths, which takes about a second, and 270 MB or six times the processors' cache."""
    memory, n_bytes = HostMemory(threads), max(_MEASURED, min(_BEYOND_CACHES * cache_bytes(), available_bytes() // 4))
    numel = n_bytes // (4 * FLOAT32.itemsize)
    arrays = [memory.allocate("measurement", numel, FLOAT32.numpy) for _ in range(4)]
    grad, master, *moments = map(kernels.address, arrays)
    segments = kernels.segments_of([{"grad": grad, "master": master, "moments": moments, "numel": numel}])
    scalars = np.array([Adam("torch").scalars(AdamHyper(1e-3), 1, None, grad_scale=1.0)], kernels.SCALARS)

    def update() -> None:
        kernels.update(segments, scalars, rule="adam_torch", grad_dtype=FLOAT32, param_dtype=None, threads=threads)

    def copy() -> None:
        kernels.cast_array(arrays[0], FLOAT32, arrays[1], FLOAT32, threads)

    n_bytes = arrays[0].nbytes
    return Bandwidths(7 * n_bytes / _least_seconds(update), 2 * n_bytes / _least_seconds(copy))


@dataclass(frozen=True)
class DiskSpeeds:
    """Bandwidths of disks: bytes a second."""

    read: float
    write: float

    @property
    def both(self) -> float:
        """The bandwidth where as many bytes are read as written, one after the other."""
        return 2 / (1 / self.read + 1 / self.write)


def measure_disk(folders: Sequence[str]) -> DiskSpeeds:
    """Measure the disks of these folders together, as states on disk use them.

    It takes about 3 seconds, and 1 GiB of their space, or a tenth of it if that is less. Nothing stays there.

    Raises:
        DiskError: a file cannot be made, written or read there.
        DiskSpaceError: they have less than 320 MiB of free space.
    """
    room = min(_ON_DISK, (free := free_bytes(folders)) // 10) // _AT_A_TIME * _AT_A_TIME
    if not room:
        least = format_bytes(10 * _AT_A_TIME)
        raise DiskSpaceError(
            f"nvme_path: {', '.join(folders)} has {format_bytes(free)} of free space; expected at least {least}"
        )
    memory = HostMemory(1)
    buffers = [memory.allocate("measurement", _AT_A_TIME, np.dtype(np.uint8)) for _ in range(_IN_FLIGHT)]
    for buffer in buffers:  # a disk may store zeros at once
        buffer.view(np.uint64)[:] = np.random.default_rng(0).integers(2**63, size=_AT_A_TIME // 8, dtype=np.uint64)
    files = ScratchFiles(folders)
    try:
        files.grow(room)
        written, write = _stream(files.write, buffers, room)
        return DiskSpeeds(_stream(files.read, buffers, written)[1], write)
    finally:
        files.close()


def _stream(
    move: Callable[[int, np.ndarray], Transfer], buffers: Sequence[np.ndarray], n_bytes: int
) -> tuple[int, float]:
    """Move bytes from 0 on, for so long or so many; their number, and how many it were a second."""
    in_flight: deque[Transfer] = deque()
    start, done = time.perf_counter(), 0
    while done < n_bytes and (not done or time.perf_counter() - start < _SECONDS_EACH_WAY):
        if len(in_flight) == len(buffers):
            _await(in_flight.popleft())
        in_flight.append(move(done, buffers[done // _AT_A_TIME % len(buffers)]))
        done += _AT_A_TIME
    for transfer in in_flight:
        _await(transfer)
    return done, done / (time.perf_counter() - start)


def _await(transfer: Transfer) -> None:
    if (error := transfer.error()) is not None:
        raise error


def _least_seconds(act: Callable[[], None]) -> float:
    seconds = []
    for _ in range(_RUNS):
        start = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def share_with_devices() -> Share:
    """Return the share that a process with this environment would have. It is that of a local rank that trains on the
    device of its number, or on the first one if it sees fewer."""
    rank, ranks = place_on_machine()
    started = [driver for driver in DRIVERS if driver.start()]
    for ordinal in (rank or 0, 0):
        if near := nodes_of_ranks([ordinal], partial(node_near, started), rank, ranks):
            return share_near(near)
    return share_near([])


def describe() -> dict[str, Any]:
    """The machine, this process's share of it, kernels and versions; sizes in bytes."""
    chosen, topology, share = kernels.kernel_info(), Topology.read(), share_with_devices()
    return {
        "cpu": _cpu_name(),
        "system": platform.platform(),
        "cores": available_cpus(),
        "cores of the machine": psutil.cpu_count() or 1,
        "memory": system_memory().total,
        "available memory": available_bytes(),
        "control group limit": control_group_limit(),
        "pinned memory": {"registered": not in_wsl2(), "limits": limits_of_pinned_memory()},
        "instruction set": chosen.instruction_set,
        "instruction sets": list(chosen.supported),
        "why bf16 is slow": why_bfloat16_is_slow(),
        "nodes": [
            {"node": node, "processors": sorted(cpus), "physical cores": len(topology.cores(cpus))}
            for node, cpus in topology.nodes.items()
        ],
        "devices": [asdict(device) for device in pci_devices()],
        "threads": share.threads,
        "chosen": {"processors": list(share.cpus), "nodes": list(share.nodes), "why": share.why},
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):  # macOS has no such file, and AArch64 Linux no such line
        return _sysctl("machdep.cpu.brand_string") or platform.processor() or platform.machine()


def _sysctl(name: str) -> str | None:
    """A property of the machine from macOS's ``sysctl``; None: not macOS, or no such property."""
    if platform.system() != "Darwin":
        return None
    try:
        command = ["sysctl", "-n", name]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
