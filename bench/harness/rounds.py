"""Contenders take turns, so that the machine's drift hits all alike."""

import random
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np

T = TypeVar("T")


def interleave(
    contenders: Mapping[str, Callable[[], T]], rounds: int, *, warm_up: int = 1, pause: float = 0.05, seed: int = 0
) -> dict[str, list[T]]:
    """The results of each contender, one a round, after ``warm_up`` rounds that are not counted.

    The caches are filled with other data before each call, so that no contender profits from the one before it. A pause
    and another order each round, drawn from the ``seed``, spread the load that a contender leaves behind over all.
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


def timed(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> Callable[[], float]:
    """Runs it and returns its seconds by that clock."""

    def seconds() -> float:
        start = clock()
        run()
        return clock() - start

    return seconds
