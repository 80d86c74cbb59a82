"""Faults of the disk at the system calls of scratch files, in processes that have loaded ``disk_faults.c`` first."""

import ctypes
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from tests.support import c_build
from tests.support.processes import TORCH, ForkServer, on_ranks

READ, WRITTEN = range(2)
WAYS = {"read": READ, "written": WRITTEN}
FAILS, HALF, ODD, END, FULL = range(5)
KINDS = {"fails": FAILS, "half": HALF, "odd": ODD, "end": END, "full": FULL}
"""An error after it has done harm; half of the bytes; a number of bytes that is no multiple of a page; none at all; a
disk without room."""
FOREVER = 10**9

_TWO = ctypes.c_long * 2


class Faults(ctypes.Structure):
    """This process's faults. Calls count by way: reads, writes."""

    _fields_ = (
        ("seen", _TWO),
        ("first", _TWO),
        ("end", _TWO),
        ("kind", _TWO),
        ("closed", _TWO),
        ("waiting", _TWO),
        ("no_direct", ctypes.c_long),
        ("no_unnamed", ctypes.c_long),
        ("no_room", ctypes.c_long),
    )

    @classmethod
    def here(cls) -> "Faults":
        """Return those of this process, which :func:`with_faults` has started."""
        return cls.in_dll(ctypes.CDLL(None), "offload_faults")

    def come(self, way: int, kind: int, number: int = 0, times: int = 1) -> None:
        """Have so many calls not go well, from the one with this number on, counted from now."""
        self.end[way] = 0
        self.kind[way] = kind
        self.first[way] = self.seen[way] + number
        self.end[way] = self.first[way] + times

    def mend(self) -> None:
        """Have all go well from now on."""
        self.end[READ] = self.end[WRITTEN] = 0

    @contextmanager
    def holding(self, way: int) -> Iterator[None]:
        """Hold calls back meanwhile."""
        self.closed[way] = 1
        try:
            yield
        finally:
            self.closed[way] = 0


def scratch_files() -> list[int]:
    """Return this process's descriptors of files without a name, on any file system but those of the kernel's own."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # that of the listing
        if target.startswith("/") and target.endswith(" (deleted)") and not target.startswith(("/memfd:", "/dev/")):
            found.append(int(name))
    return found


@cache
def _built() -> Path:
    folder = tempfile.TemporaryDirectory()
    _KEPT.append(folder)
    source, library = Path(__file__).with_suffix(".c"), Path(folder.name) / "disk_faults.so"
    c_build.run("gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o", library, source, "-ldl")
    return library


_KEPT: list[Any] = []
_server: ForkServer | None = None


def server() -> ForkServer:
    """Forks of a process that has imported torch and its front end, with one thread each, and loaded the faults."""
    global _server
    if _server is None or _server.closed:
        environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "LD_PRELOAD": str(_built())}
        _server = ForkServer(*TORCH, environment=environment)
    return _server


def with_faults(world_size: int = 1, **options: Any) -> Callable[[Callable[[int], Any]], list[Any]]:
    """As :func:`on_ranks`, in processes in which :class:`Faults` may come; one rank has no process group."""
    return on_ranks(world_size, server=server, **{"group": world_size > 1, **options})
