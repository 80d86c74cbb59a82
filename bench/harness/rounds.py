"""Contenders take turns, so that the machine's drift is the same for all."""

import random
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TypeVar

import numpy as np

T = TypeVar("T")


def interleave(
    contenders: Mapping[str, Callable[[], T]], rounds: int, *, warm_up: int = 1, pause: float = 0.05, seed: int = 0
) -> dict[str, list[T]]:
    """The results of each contender, one a round, after ``warm_up`` rounds that are not counted."""
    results: dict[str, list[T]] = {name: [] for name in contenders}
    for of_round in turns(contenders, rounds, warm_up=warm_up, pause=pause, seed=seed):
        for name, result in of_round.items():
            results[name].append(result)
    return results


def turns(
    contenders: Mapping[str, Callable[[], T]], rounds: int, *, warm_up: int = 0, pause: float = 0.05, seed: int = 0
) -> Iterator[dict[str, T]]:
    """The contenders' results, as soon as a round has ended.

    The caches are filled with other data before each call, so that no contender profits from the one before it. A pause
    and another order each round, drawn from the ``seed``, spread the load that a contender leaves behind over all.
    """
    order = random.Random(seed)
    elsewhere = np.zeros(1 << 24, np.float64)
    for i in range(warm_up + rounds):
        results: dict[str, T] = {}
        for name, run in order.sample(list(contenders.items()), len(contenders)):
            elsewhere += 1
            time.sleep(pause)
            results[name] = run()
        if i >= warm_up:
            yield results


def seconds(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Call ``run`` and return its seconds by ``clock``."""
    start = clock()
    run()
    return clock() - start


def timed(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> Callable[[], float]:
    """Return a function that calls ``run`` and returns its :func:`seconds` by ``clock``."""
    return partial(seconds, run, clock)
