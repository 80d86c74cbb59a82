"""A store of states that is late, for tests.

Two threads load and store blocks, late and out of step. Each load gives other memory, which is spoiled once its block
is stored. So an update that does not commit, or that uses a block after that, gives wrong bits here already.
"""

import random
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TypeVar, cast

import numpy as np

from ..config.options import OffloadConfig
from ..config.state_formats import StateFormat
from ..layout.partition import Bucket
from ..memory.host_memory import HostMemory
from ..states.arrays import StateArray, StateRun
from ..states.store import Extent, StateBlock, Store
from ..support.threads import Task, TaskThread

T = TypeVar("T")
AHEAD = 2
"""Buckets that are loaded before they are asked for."""


class LateStore(Store):
    """States of which only copies are ever in an update's memory.

    A commit that fails is tried again by the next call that needs the bucket, and that call raises the error: no values
    are lost.
    """

    place = "late store"
    free: int | None = None
    """The free bytes of its place."""
    max_delay = 0.0
    """The longest delay of a load or a commit, in seconds."""

    def __init__(self, config: OffloadConfig, memory: HostMemory, n_ranks: int) -> None:
        super().__init__(config, memory, n_ranks)
        self.fail_at: frozenset[int] = frozenset()
        """The numbers of the loads and commits that fail, counted from 0, both together in the order of asking."""
        self.asked = 0
        """Loads and commits so far."""
        self.unforeseen = 0
        """Loads by updates that had not begun before they were asked for."""
        self._random = random.Random(0)
        self._loads, self._commits = TaskThread("loads of states"), TaskThread("commits of states")
        self._kept: dict[int, dict[str, StateArray]] = {}
        self._versions: dict[int, int] = {}
        """By bucket, the number of its changes: a load that began before the last one is not used."""
        self._expected: deque[int] = deque()
        self._begun: dict[int, Task[tuple[int, StateBlock]]] = {}
        self._committed: dict[int, tuple[StateBlock, Task[None]]] = {}
        """By bucket, the last block that was committed, and the end of its way."""

    @classmethod
    def holds(cls, format: StateFormat) -> bool:
        return format.upper is None  # its memory does not stay, and a parameter's must

    @classmethod
    def working_bytes(cls, blocks: Collection[tuple[int, int]]) -> int:
        """All may be on their way back, while one is updated and others are loaded."""
        return sum(n * n_bytes for n_bytes, n in blocks) + (AHEAD + 1) * max(
            (n_bytes for n_bytes, _ in blocks), default=0
        )

    @classmethod
    def free_bytes(cls, config: OffloadConfig) -> int | None:
        return cls.free

    def allocate(
        self, buckets: Sequence[Bucket], formats: Callable[[Bucket], Mapping[str, StateFormat]], budget: int
    ) -> None:
        for bucket in buckets:
            numel = self.n_ranks * bucket.shard_numel
            self._kept[bucket.index] = {name: self._zeros(format, numel) for name, format in formats(bucket).items()}
            self._versions[bucket.index] = 0

    def _zeros(self, format: StateFormat, numel: int) -> StateArray:
        return StateArray.allocate(format, numel, np.zeros, np.zeros, self.threads)

    def expect(self, buckets: Iterable[int]) -> None:
        new = [*buckets]
        self._expected = deque([bucket for bucket in self._expected if bucket not in new] + new)
        self._begin()

    def _begin(self) -> None:
        for bucket in islice(tuple(self._expected), AHEAD):
            if bucket not in self._begun:
                self._begun[bucket] = self._late(self._loads, partial(self._fetch, bucket))

    def _load(self, bucket: int) -> StateBlock:
        begun = self._begun.pop(bucket, None)
        self.unforeseen += begun is None
        while bucket in self._expected and self._expected.popleft() != bucket:
            pass
        self._begin()
        return self._fetched(bucket, begun)

    def read(self, bucket: int) -> StateBlock:
        return self._fetched(bucket, None)

    def _fetched(self, bucket: int, task: Task[tuple[int, StateBlock]] | None) -> StateBlock:
        while True:
            task = task or self._late(self._loads, partial(self._fetch, bucket))
            version, block = task.result()
            if version == self._versions[bucket]:
                return block
            task = None

    def _fetch(self, bucket: int) -> tuple[int, StateBlock]:
        version = self._versions[bucket]
        self._settle(bucket)
        arrays: dict[str, StateArray] = {}
        for name, kept in self._kept[bucket].items():
            arrays[name] = self._zeros(kept.format, kept.size)
            for to, source in zip(arrays[name].stored, kept.stored, strict=True):
                np.copyto(to, source)
        return version, StateBlock(bucket, arrays)

    def commit(self, block: StateBlock) -> None:
        self._committed[block.bucket] = block, self._late(self._commits, partial(self._put, block))
        self._versions[block.bucket] += 1  # last: a load of this version waits for the commit

    def _put(self, block: StateBlock) -> None:
        arrays = cast("dict[str, StateArray]", block.arrays)
        for name, array in arrays.items():
            for to, source in zip(self._kept[block.bucket][name].stored, array.stored, strict=True):
                np.copyto(to, source)
                source.view(np.uint8).fill(0xFF)
        arrays.clear()

    def _settle(self, bucket: int) -> None:
        """Wait until the bucket's last commit has ended."""
        if bucket in self._committed:
            block, task = self._committed[bucket]
            if (error := task.exception()) is not None:
                self._committed[bucket] = block, self._late(self._commits, partial(self._put, block))
                raise error

    def _late(self, thread: TaskThread, act: Callable[[], T]) -> Task[T]:
        number, self.asked = self.asked, self.asked + 1
        delay = self._random.uniform(0, self.max_delay)

        def run() -> T:
            time.sleep(delay)
            if number in self.fail_at:
                raise OSError(f"late store: number {number} failed as asked")
            return act()

        return thread.submit(run)

    def run(self, extents: Sequence[Extent]) -> dict[str, StateRun]:
        kept = self._kept[extents[0].bucket] if extents else {}
        return {name: LateRun(self, name, array.format, extents) for name, array in kept.items()}

    def part(self, name: str, extent: Extent) -> StateArray:
        """Return where a state of an extent is kept, when all commits have ended."""
        self._settle(extent.bucket)
        return self._kept[extent.bucket][name][extent.offset : extent.offset + extent.numel]

    def put(self, name: str, extent: Extent, values: np.ndarray) -> None:
        """Give a state of an extent these values."""
        self.part(name, extent).write(values)
        self._versions[extent.bucket] += 1
        self._begun.pop(extent.bucket, None)

    def held(self) -> dict[str, int]:
        held: dict[str, int] = {}
        for arrays in self._kept.values():
            for name, array in arrays.items():
                held[name] = held.get(name, 0) + array.format.n_bytes(array.size)
        return held

    def close(self) -> None:
        self._loads.close()
        self._commits.close()


class LateRun(StateRun):
    """A run of which each read is a copy."""

    def __init__(self, store: LateStore, name: str, format: StateFormat, extents: Sequence[Extent]) -> None:
        self._store = store
        self._name = name
        self._extents = extents
        self.format = format
        self.size = sum(extent.numel for extent in extents)

    def __getitem__(self, run: slice) -> "LateRun":
        start, stop, _ = run.indices(self.size)
        cut = [extent for extent, _ in self._parts(start, stop)] or [self._extents[0]._replace(numel=0)]
        return LateRun(self._store, self._name, self.format, cut)

    def _parts(self, start: int, stop: int) -> Iterator[tuple[Extent, slice]]:
        """The extents of these elements, and the place of each among them."""
        begin = 0
        for bucket, offset, numel in self._extents:
            low, high = max(start, begin), min(stop, begin + numel)
            if low < high:
                yield Extent(bucket, offset + low - begin, high - low), slice(low - start, high - start)
            begin += numel

    def read(self, at: int, out: np.ndarray) -> None:
        for extent, part in self._parts(at, at + out.size):
            self._store.part(self._name, extent).read(0, out[part])

    def write(self, values: np.ndarray) -> None:
        assert values.size == self.size
        for extent, part in self._parts(0, self.size):
            self._store.put(self._name, extent, values[part])
