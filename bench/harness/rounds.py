"""Contenders take turns, so that the machine's drift hits all alike."""

import random
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np

T = TypeVar("T")

KEEP_MEMORY = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**62)}
"""Has glibc keep what a process frees. By default large blocks go back to the kernel, which gives cleared ones again, a
page fault for each page; on a virtual machine that hands free memory to its host a fault takes several times as long in
one hour as in another, and what is compared would be how much the contenders free. One arena: a thread's own is mapped
and unmapped whatever the rest says (XLA's threads had 70,000 faults a step)."""


def take_turns(
    contenders: Mapping[str, Callable[[], T]], rounds: int, *, warm_up: int = 1, pause: float = 0.05, seed: int = 0
) -> dict[str, list[T]]:
    """What each returned in each round, after ``warm_up`` rounds that are not counted.

    The caches are filled with something else before each turn: what the turn before left there is no merit. A pause and
    another order each round, which is the ``seed``'s, keep whoever ran before from weighing on one contender only.
    """
    order = random.Random(seed)
    elsewhere = np.zeros(1 << 24, np.float64)
    results: dict[str, list[T]] = {name: [] for name in contenders}
    for i in range(warm_up + rounds):
        for name, run in order.sample(list(contenders.items()), len(contenders)):
            elsewhere += 1
            time.sleep(pause)
            result = run()
            if i >= warm_up:
                results[name].append(result)
    return results


def timed(run: Callable[[], object]) -> Callable[[], float]:
    """Runs it and returns its seconds."""

    def seconds() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return seconds
