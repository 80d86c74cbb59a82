"""A disk's own speed: fio reads and writes a file from end to end, past the page cache (O_DIRECT)."""

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness.processes import ContenderError

PIECE = 8 * 2**20
"""Bytes of one request. Decision 31 has the measurements of this size and of the depth."""
DEPTH = 4
"""Requests on their way at a time, each way."""
HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""Has glibc (2.35 and later) ask for huge pages in fio's buffers. A request to a disk has a limited number of pieces of
memory, 254 on a virtio disk: in pages of 4 KiB it is cut into parts of 1 MiB, and the disk is half as fast."""
UNIT = PIECE * DEPTH
"""A file has a whole multiple of so many bytes, so that each thread has the same part."""


@dataclass(frozen=True)
class Way:
    """A way to read and to write a file once."""

    engine: str
    """Of fio: ``io_uring``, or ``pvsync`` with a thread for each request."""
    at_once: bool
    """True to write while it reads, False to write after that."""

    @property
    def name(self) -> str:
        order = "both at once" if self.at_once else "one after the other"
        return f"fio, {'io_uring' if self.engine == 'io_uring' else 'threads'}, {order}"

    def jobs(self, path: Path, n_bytes: int) -> list[str]:
        """Return fio's arguments for its two jobs."""
        words = []
        for name in ("read", "write"):
            words += [f"--name={name}", f"--rw={name}", *_common(path), f"--ioengine={self.engine}"]
            if self.engine == "io_uring":
                words += [f"--iodepth={DEPTH}", f"--size={n_bytes}"]
            else:
                part = n_bytes // DEPTH
                words += [f"--numjobs={DEPTH}", f"--size={part}", f"--offset_increment={part}"]
            if name == "write" and not self.at_once:
                words.append("--stonewall")
        return words

    def seconds(self, results: Sequence[dict[str, Any]]) -> float:
        """Return the time of both jobs, from the results that fio gives for each thread."""
        times = {
            name: max(result[name]["runtime"] for result in results if result["jobname"] == name)
            for name in ("read", "write")
        }
        return (max if self.at_once else sum)(times.values()) / 1e3


WAYS = tuple(Way(engine, at_once) for engine in ("io_uring", "pvsync") for at_once in (True, False))


class DiskFile:
    """A file that fio reads and writes. Its space is free again after :meth:`close`.

    Args:
        n_bytes: the bytes that count. The file has a few less or more, and times are in proportion.

    Raises:
        ContenderError: fio is not installed, or the folder's file system has no O_DIRECT, or no room.
    """

    def __init__(self, folder: Path, n_bytes: int) -> None:
        self._path = folder / "fio"
        self._counted = n_bytes
        self._n_bytes = max(round(n_bytes / UNIT), 1) * UNIT
        if shutil.which("fio") is None:
            raise ContenderError("fio is not installed; expected it (Debian: fio), to know the disk's own speed")
        fill = ["--name=fill", "--rw=write", f"--size={self._n_bytes}", "--ioengine=pvsync", *_common(self._path)]
        _fio(fill)  # space that was never written would be read without the disk

    def steps(self, way: Way, n: int) -> list[dict[str, float]]:
        """Return the ms in which as many bytes as count are read and written, n times, as the totals of so many steps.

        One more comes first and does not count, as with steps of training: a disk, or the machine around a virtual one,
        may have in memory what was read and written last.
        """
        jobs = way.jobs(self._path, self._n_bytes)
        seconds = [way.seconds(_fio(jobs)) for _ in range(n + 1)][1:]
        return [{"total": 1e3 * each * self._counted / self._n_bytes} for each in seconds]

    def close(self) -> None:
        self._path.unlink(missing_ok=True)


def _common(path: Path) -> list[str]:
    return [
        f"--filename={path}",
        f"--bs={PIECE}",
        "--direct=1",
        "--thread",
        "--fallocate=none",
        "--allow_file_create=1",
    ]


def _fio(arguments: Sequence[str]) -> list[dict[str, Any]]:
    environment = {**os.environ, "GLIBC_TUNABLES": HUGE_PAGES}
    done = subprocess.run(["fio", "--output-format=json", *arguments], capture_output=True, text=True, env=environment)
    if done.returncode:
        lines = (done.stderr + done.stdout).strip().splitlines()
        raise ContenderError("\n".join(line for line in lines if "{" not in line) or f"fio: status {done.returncode}")
    results: list[dict[str, Any]] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    return results
