"""Memory, threads and files that a process holds, and their growth over steps."""

import gc
import os
import threading
import time
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
    """The open files without a name, whose space is free when they are closed, and the threads that work on disks."""
    found = {thread for thread in threading.enumerate() if "disk" in thread.name or "scratch" in thread.name}
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the folder's own
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return {each for each in found if not isinstance(each, str) or each.endswith("(deleted)")}


def await_end_on_disk(before):
    """Wait until nothing is open but what was ``before``: another thread may close what garbage has had."""
    deadline = time.monotonic() + 60
    while on_disk() - before and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert not on_disk() - before


def growth_of(step, steps=STEPS, warm_up=WARM_UP):
    """Return the growth of each value of ``held()`` over these many calls, after a warm-up."""
    for _ in range(warm_up):
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
