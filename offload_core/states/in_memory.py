"""Optimizer states of a process's shards, in host memory."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from ..config.state_formats import StateFormat
from ..layout.partition import Bucket, Key
from ..memory.host_memory import HostMemory
from ..memory.plan import PARAMETER_SHARDS
from .arrays import StateArray


class StateBlock(NamedTuple):
    """The states of a process's shards of one bucket."""

    bucket: int
    arrays: dict[str, StateArray]
    """By name, the shards end to end."""


class StatesInMemory:
    """Master weights and moments of the shards of ``n_ranks`` ranks.

    The shards of one (group, element type) lie end to end in one array a state, in bucket order, so that a
    process's part of a parameter is contiguous even if the parameter straddles buckets. Master weights that are kept
    split hold their parameters, too.

    An update loads a bucket's block, writes to it, and commits it.
    """

    def __init__(self, memory: HostMemory, n_ranks: int, threads: int) -> None:
        self._memory = memory
        self._n_ranks = n_ranks
        self._threads = threads
        self._arena: dict[int, dict[str, StateArray]] = {}
        self._offset: dict[int, int] = {}
        self._blocks: dict[int, StateBlock] = {}
        self._before_change: Callable[[Iterable[int]], None] | None = None
        self._replaced: dict[int, dict[tuple[int, int], dict[int, np.ndarray]]] = {}
        """By parameter: what :meth:`follow` has replaced since its states last changed, by bucket and offset."""

    def allocate(self, buckets: Sequence[Bucket], formats: Callable[[Bucket], Mapping[str, StateFormat]]) -> None:
        """Make the states of new buckets, zeroed: those that ``formats`` names, the same for all buckets of a key."""
        by_key: dict[Key, list[Bucket]] = {}
        for bucket in buckets:
            by_key.setdefault(bucket.key, []).append(bucket)
        for alike in by_key.values():
            numel = self._n_ranks * sum(bucket.shard_numel for bucket in alike)
            shards = partial(self._memory.allocate, PARAMETER_SHARDS, pinned=True)
            arena = {
                name: StateArray.allocate(format, numel, partial(self._memory.allocate, name), shards, self._threads)
                for name, format in formats(alike[0]).items()
            }
            start = 0
            for bucket in alike:
                end = start + self._n_ranks * bucket.shard_numel
                self._arena[bucket.index] = arena
                self._offset[bucket.index] = start
                block = {name: array[start:end] for name, array in arena.items()}
                self._blocks[bucket.index] = StateBlock(bucket.index, block)
                start = end

    def locate(self, bucket: int, offset: int) -> tuple[dict[str, StateArray], int]:
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
        """Announce that the states of these parameters are about to change for good."""
        for param in params if self._replaced else ():
            self._replaced.pop(param, None)
        self._announce(params)

    def follow(self, bucket: int, offset: int, param: int, values: np.ndarray) -> None:
        """Have the master weights of a piece of a parameter follow values that were written from outside.

        Until its states change for good, the parameter may get earlier values back, and then has the master weights
        that belong to them. This takes 4 bytes an element of host memory meanwhile, where anything differs.
        """
        self._announce([param])
        arena, at = self.locate(bucket, offset)
        replaced = self._replaced.setdefault(param, {}).setdefault((bucket, offset), {})
        arena["master"][at : at + values.size].follow(values, replaced)
        if not replaced:
            del self._replaced[param][bucket, offset]
        if not self._replaced[param]:
            del self._replaced[param]

    def forget_replaced(self) -> None:
        """Forget what :meth:`follow` has replaced: all states get other values, and earlier ones count no longer."""
        self._replaced.clear()

    def _announce(self, params: Iterable[int]) -> None:
        if self._before_change is not None:
            self._before_change(params)

    def watch(self, before_change: Callable[[Iterable[int]], None] | None) -> None:
        """Call ``before_change(params)`` before states of parameters change, in the thread that changes them; None: no
        call."""
        self._before_change = before_change
