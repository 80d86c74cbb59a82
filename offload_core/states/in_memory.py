"""Optimizer states of a process's shards in fp32, in host memory."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ..layout.partition import Bucket
from ..memory.host_memory import HostMemory


class StateBlock(NamedTuple):
    """The states of a process's shards of one bucket."""

    bucket: int
    arrays: dict[str, np.ndarray]
    """By name, fp32, one-dimensional, the shards end to end."""


class StatesInMemory:
    """Master weights and moments, fp32, of the shards of ``n_ranks`` ranks.

    The shards of one (group, element type) lie end to end in one array a state, in bucket order, so that a
    process's part of a parameter is contiguous even if the parameter straddles buckets.

    An update loads a bucket's block, writes to it, and commits it.
    """

    def __init__(self, memory: HostMemory, n_ranks: int, names: Collection[str]) -> None:
        self._memory = memory
        self._n_ranks = n_ranks
        self._names = names
        self._arena: dict[int, dict[str, np.ndarray]] = {}
        self._offset: dict[int, int] = {}
        self._blocks: dict[int, StateBlock] = {}
        self._before_change: Callable[[Iterable[int]], None] | None = None

    def allocate(self, buckets: Sequence[Bucket], *, without_master: Callable[[Bucket], bool]) -> None:
        """Make the states of new buckets, zeroed; no master weights for those of which ``without_master`` is true."""
        by_key: dict[tuple[int, str, bool, int], list[Bucket]] = {}
        for bucket in buckets:
            by_key.setdefault(bucket.key, []).append(bucket)
        for alike in by_key.values():
            numel = self._n_ranks * sum(bucket.shard_numel for bucket in alike)
            names = [name for name in self._names if not (name == "master" and without_master(alike[0]))]
            arena = {name: self._memory.allocate(name, numel, np.dtype(np.float32)) for name in names}
            start = 0
            for bucket in alike:
                end = start + self._n_ranks * bucket.shard_numel
                self._arena[bucket.index] = arena
                self._offset[bucket.index] = start
                block = {name: array[start:end] for name, array in arena.items()}
                self._blocks[bucket.index] = StateBlock(bucket.index, block)
                start = end

    def locate(self, bucket: int, offset: int) -> tuple[dict[str, np.ndarray], int]:
        """The arrays that hold the bucket's shards, by state name, and the index in them of its element ``offset``."""
        return self._arena[bucket], self._offset[bucket] + offset

    def read(self, bucket: int) -> StateBlock:
        """The states of a bucket, to be read only."""
        return self._blocks[bucket]

    def load(self, bucket: int, params: Iterable[int]) -> StateBlock:
        """The states of a bucket, to be changed for these parameters and then committed."""
        self.will_change(params)
        return self._blocks[bucket]

    def commit(self, block: StateBlock) -> None:
        """The block has its new values. They were written in place, so nothing is left to do."""
        assert self._blocks[block.bucket] is block

    def will_change(self, params: Iterable[int]) -> None:
        """Announce that the states of these parameters are about to change."""
        if self._before_change is not None:
            self._before_change(params)

    def watch(self, before_change: Callable[[Iterable[int]], None] | None) -> None:
        """Call ``before_change(params)`` before states of parameters change, in the thread that changes them; None: no
        call."""
        self._before_change = before_change
