"""Memory, threads and files that a process holds, and their growth over steps."""

import gc
import os
import threading
from contextlib import contextmanager, suppress

import psutil

from offload_core.memory.plan import MemoryPlan

WARM_UP, STEPS = 400, 2000


def held():
    """Bytes of memory, Python's threads, the process's, and file descriptors."""
    gc.collect()
    process = psutil.Process()
    return process.memory_info().rss, threading.active_count(), process.num_threads(), len(os.listdir("/proc/self/fd"))


def on_disk():
    """The descriptors of files without a name (their space is free when these are closed), and the threads that work
    on disks."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the folder's own
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    threads = [thread.name for thread in threading.enumerate() if "disk" in thread.name or "scratch" in thread.name]
    return sum(link.endswith("(deleted)") for link in links), sorted(threads)


def growth_of(step, steps=STEPS):
    """Return the growth of each value of ``held()`` over these many calls, after a warm-up."""
    for _ in range(WARM_UP):
        step()
    before = held()
    for _ in range(steps):
        step()
    return [after - b for after, b in zip(held(), before, strict=True)]


@contextmanager
def plans():
    """The plans that wrap checks."""
    seen, check = [], MemoryPlan.check
    MemoryPlan.check = lambda plan, *args, **kw: seen.append(plan) or check(plan, *args, **kw)
    try:
        yield seen
    finally:
        MemoryPlan.check = check
