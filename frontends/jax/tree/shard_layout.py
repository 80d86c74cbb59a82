"""The slice of a parameter that each rank has, and its elements' places in the core's order, in integers and NumPy."""

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from offload_core.layout.partition import ALIGNMENT, round_up
from offload_core.layout.regions import Region


@dataclass(frozen=True)
class ShardLayout:
    """A parameter cut along a dimension, and the places of its elements in the core's order.

    To the core a partitioned parameter is a run of buckets, each with one shard for each rank. A rank's slice,
    flattened and padded to whole ``unit``s, consists of its shards of these buckets, end to end.
    """

    shape: tuple[int, ...]
    dim: int
    """The dimension that is cut, counted from the first."""
    world_size: int
    bucket_numel: int
    """Elements of one rank's shard of a full bucket."""
    unit: int = ALIGNMENT
    """Shards are whole multiples of so many elements."""
    starts: tuple[int, ...] = ()
    """Where buckets that cut no matrix begin in a rank's padded slice; empty: each ``bucket_numel`` elements."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of a rank's slice."""
        return tuple(n // self.world_size if i == self.dim else n for i, n in enumerate(self.shape))

    @property
    def local_numel(self) -> int:
        """Elements of a rank's slice."""
        return math.prod(self.local_shape)

    @property
    def padded_numel(self) -> int:
        """Elements of a rank's slice, padded."""
        return round_up(self.local_numel, self.unit)

    @property
    def numel(self) -> int:
        """Elements that the core counts: all ranks' slices, padded."""
        return self.world_size * self.padded_numel

    def _buckets(self) -> list[tuple[int, int]]:
        """Return the begin and end of each bucket's shard in a rank's padded slice."""
        starts = self.starts or range(0, self.padded_numel, self.bucket_numel)
        return list(itertools.pairwise((*starts, self.padded_numel)))

    def from_core(self, flat: np.ndarray) -> np.ndarray:
        """Return the parameter, given its elements in the core's order."""
        slices = self.slices([(0, flat)])
        return np.concatenate([slices[rank] for rank in range(self.world_size)], axis=self.dim)

    def to_core(self, whole: np.ndarray) -> np.ndarray:
        """Return the elements of a parameter in the core's order."""
        return self.of_slices(dict(enumerate(np.split(whole.reshape(self.shape), self.world_size, axis=self.dim))))

    def slices(self, runs: Iterable[tuple[int, np.ndarray]]) -> dict[int, np.ndarray]:
        """Return the slices, by rank, that have these elements: ``(start, elements)`` in the core's order."""
        found: dict[int, np.ndarray] = {}
        for start, run in runs:
            at = 0
            for rank, low, high in self.locate(start, run.size, self.world_size):
                into = found.setdefault(rank, np.empty(self.padded_numel, run.dtype))
                into[low:high] = run[at : at + high - low]
                at += high - low
        return {rank: padded[: self.local_numel].reshape(self.local_shape) for rank, padded in found.items()}

    def of_slices(self, slices: Mapping[int, np.ndarray]) -> np.ndarray:
        """Return the elements in the core's order, with only these ranks' elements set."""
        first = next(iter(slices.values()))
        flat = np.empty(self.numel, first.dtype)  # the system gives memory only where it is written
        for start, stop in self._buckets():
            for rank, part in slices.items():
                run = flat[self.world_size * start + rank * (stop - start) :][: stop - start]
                valid = min(stop, self.local_numel) - start
                run[:valid] = part.reshape(-1)[start : start + valid]
                run[valid:] = 0
        return flat

    def locate(self, start: int, numel: int, n_ranks: int) -> list[tuple[int, int, int]]:
        """Find a run of elements among those that a process holds of the parameter (``Bucket.in_tensor``).

        Args:
            n_ranks: the number of ranks of the process.

        Returns:
            ``(rank, start, stop)`` for each part of the run, in order: elements ``[start, stop)`` of that rank's padded
            slice. Ranks are counted within the process.
        """
        found = []
        for first, last in self._buckets():
            for rank in range(n_ranks):
                begin = n_ranks * first + rank * (last - first)
                low, high = max(start, begin), min(start + numel, begin + last - first)
                if low < high:
                    found.append((rank, first + low - begin, first + high - begin))
        return found

    def regions(self, start: int, numel: int) -> list[tuple[int, Region]]:
        """As ``Elements.regions``."""
        found, at = [], 0
        for rank, low, high in self.locate(start, numel, self.world_size):
            if low < self.local_numel:
                cut = (rank * self.local_shape[self.dim], (rank + 1) * self.local_shape[self.dim])
                box = tuple(cut if i == self.dim else (0, n) for i, n in enumerate(self.shape))
                found.append((at, Region(self.shape, low, min(high, self.local_numel) - low, None, box)))
            at += high - low
        return found

    def __str__(self) -> str:
        return f"{list(self.shape)} cut along dimension {self.dim}"
