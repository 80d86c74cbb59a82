"""Writes to all of the host's memory once and gives it back; prints as JSON how many GB there were, before and after.

A virtual machine may get its memory only when it is used: it would seem too small for a model that fits, and the first
contender would pay for the pages of all.
"""

import json
import mmap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil

from offload_core.support.processors import available_cpus

CHUNK = 1 << 30
PATIENCE = 2.0
"""Seconds that a machine has to grow."""


def room() -> int:
    """Return the bytes that may still be taken; a part stays free."""
    memory = psutil.virtual_memory()
    return memory.available - max(memory.total // 20, 1 << 29)


def touch(left: Callable[[], int] = room, chunk: int = CHUNK, patience: float = PATIENCE) -> int:
    """Write to memory until there is no room for more, and return the bytes written."""
    taken: list[mmap.mmap] = []
    threads = available_cpus()

    def write(_: int) -> mmap.mmap:
        memory = mmap.mmap(-1, chunk)
        np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 1  # without the interpreter's lock
        return memory

    with ThreadPoolExecutor(threads) as pool:
        while True:
            deadline = time.monotonic() + patience
            while (chunks := min(left() // chunk, threads)) <= 0 and time.monotonic() < deadline:
                time.sleep(patience / 20)
            if chunks <= 0:
                return chunk * len(taken)
            taken += pool.map(write, range(chunks))


def main() -> None:
    before = psutil.virtual_memory().total
    written, after = touch(), psutil.virtual_memory().total
    print(json.dumps({"before": before / 1e9, "written": written / 1e9, "after": after / 1e9}))


if __name__ == "__main__":
    main()
