"""Several runs of one state, some in host memory and some on disk, as one run."""

from collections.abc import Iterator, Sequence

import numpy as np

from .arrays import StateRun


class Chain(StateRun):
    """The concatenation of runs of one state.

    Args:
        runs: one run or more, all of one format. Each begins where a block of the format begins.
    """

    def __init__(self, runs: Sequence[StateRun]) -> None:
        self._runs = runs
        self.format = runs[0].format
        self.size = sum(run.size for run in runs)

    def __getitem__(self, run: slice) -> "Chain":
        start, stop, _ = run.indices(self.size)
        return Chain([part for part, _ in self._parts(start, stop)] or [self._runs[0][:0]])

    def _parts(self, start: int, stop: int) -> Iterator[tuple[StateRun, slice]]:
        """Yield the slices of the runs that together are elements ``[start, stop)`` of the chain, each with the range
        of its elements, counted from ``start``."""
        begin = 0
        for run in self._runs:
            low, high = max(start, begin), min(stop, begin + run.size)
            if low < high:
                yield run[low - begin : high - begin], slice(low - start, high - start)
            begin += run.size

    def read(self, at: int, out: np.ndarray) -> None:
        for run, part in self._parts(at, at + out.size):
            run.read(0, out[part])

    def read_parameter(self, at: int, out: np.ndarray) -> None:
        for run, part in self._parts(at, at + out.size):
            run.read_parameter(0, out[part])

    def write(self, values: np.ndarray) -> None:
        assert values.size == self.size
        for run, part in self._parts(0, self.size):
            run.write(values[part])
