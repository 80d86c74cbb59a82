"""Optimizer states of a process's shards on disk. States that fit are kept in host memory instead."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np

from ..config.options import OffloadConfig
from ..config.state_formats import StateFormat
from ..disk.folders import check_folders, free_bytes
from ..disk.scratch import ScratchFiles, Transfer
from ..layout.partition import Bucket, kinds_of
from ..memory.host_memory import HostMemory
from ..memory.plan import DISK
from .arrays import StateRun
from .block_layout import BlockLayout, padded_bytes
from .chain import Chain
from .in_memory import StatesInMemory
from .ring import Ring
from .slots import SLOTS
from .store import Extent, StateBlock, Store


class StatesOnDisk(Store):
    """Keeps the states of some buckets in host memory, and the states of all other buckets on disk. An update of a
    bucket on disk reads the states to a slot of a ring (``ring.py``), changes them there, and writes them back.

    A bucket's states are contiguous on disk, so that an update is one sequential read and one sequential write. Buckets
    in host memory and buckets on disk alternate evenly, so that the disk works while a bucket in memory is updated.
    """

    place = DISK
    keeps_blocks = True

    def __init__(self, config: OffloadConfig, memory: HostMemory, n_ranks: int) -> None:
        super().__init__(config, memory, n_ranks)
        assert config.nvme_path is not None
        check_folders(config.nvme_path)
        self._files = ScratchFiles(config.nvme_path)
        self._kept = StatesInMemory(config, memory, n_ranks)
        self._layouts: dict[int, BlockLayout] = {}
        """The layout of each bucket whose states are on disk, by the bucket's index."""
        self._ring: Ring | None = None

    @classmethod
    def holds(cls, format: StateFormat) -> bool:
        return format.upper is None

    @classmethod
    def n_bytes(cls, format: StateFormat, numel: int) -> int:
        return padded_bytes(format, numel)

    @classmethod
    def host_budget(cls, config: OffloadConfig) -> int | None:
        return config.nvme_host_bytes

    @classmethod
    def kept_on_host(cls, budget: int, blocks: Sequence[tuple[int, int]]) -> list[int]:
        """Return, for each kind, the number of buckets to keep in host memory: all buckets if they fit into ``budget``,
        otherwise the same fraction of each kind, rounded to whole buckets."""
        total = sum(size * n for size, n in blocks)
        if total <= budget:
            return [n for _, n in blocks]
        counts, passed, used = [], 0, 0
        for size, n in blocks:
            passed += size * n
            counts.append(min((budget * passed // total - used) // size, n) if size else n)
            used += size * counts[-1]
        return counts

    @classmethod
    def working_bytes(cls, blocks: Collection[tuple[int, int]]) -> int:
        sizes = [(size, n) for size, n in blocks if n]
        return min(SLOTS, sum(n for _, n in sizes)) * max((size for size, _ in sizes), default=0)

    @classmethod
    def free_bytes(cls, config: OffloadConfig) -> int | None:
        assert config.nvme_path is not None
        return free_bytes(config.nvme_path)

    def allocate(
        self, buckets: Sequence[Bucket], formats: Callable[[Bucket], Mapping[str, StateFormat]], budget: int
    ) -> None:
        layouts = {bucket.index: BlockLayout(formats(bucket), self.n_ranks * bucket.shard_numel) for bucket in buckets}
        kinds = kinds_of(buckets)
        counts = self.kept_on_host(budget, [(layouts[bucket.index].n_bytes, n) for bucket, n in kinds])
        kept = set()
        for (one, n), count in zip(kinds, counts, strict=True):
            alike = [bucket for bucket in buckets if bucket.key == one.key and bucket.shard_numel == one.shard_numel]
            kept |= {bucket.index for i, bucket in enumerate(alike) if (i + 1) * count // n > i * count // n}
        self._kept.allocate([bucket for bucket in buckets if bucket.index in kept], formats, budget)
        on_disk = {index: layout for index, layout in layouts.items() if index not in kept and layout.n_bytes}
        if on_disk:
            self._ring = self._ring or Ring(self._files, self.memory, self.threads)
            self._ring.add(on_disk)
            self._layouts |= on_disk

    def expect(self, buckets: Iterable[int]) -> None:
        if self._ring is not None:
            self._ring.expect(bucket for bucket in buckets if bucket in self._layouts)

    def read(self, bucket: int) -> StateBlock:
        if self._ring is None or bucket not in self._layouts:
            return self._kept.read(bucket)
        return StateBlock(bucket, self._ring.copy(bucket))

    def _load(self, bucket: int) -> StateBlock:
        if self._ring is None or bucket not in self._layouts:
            return self._kept._load(bucket)
        return StateBlock(bucket, self._ring.lend(bucket))

    def commit(self, block: StateBlock) -> None:
        if self._ring is None or block.bucket not in self._layouts:
            self._kept.commit(block)
        else:
            self._ring.give_back(block.bucket)

    def run(self, extents: Sequence[Extent]) -> dict[str, StateRun]:
        if self._ring is None or all(extent.bucket not in self._layouts for extent in extents):
            return self._kept.run(extents)
        if len(extents) == 1:
            return self._of(self._ring, extents[0])
        parts: dict[str, list[StateRun]] = {}
        for extent in extents:
            for name, run in self._of(self._ring, extent).items():
                parts.setdefault(name, []).append(run)
        return {name: Chain(runs) for name, runs in parts.items()}

    def _of(self, ring: Ring, extent: Extent) -> dict[str, StateRun]:
        layout = self._layouts.get(extent.bucket)
        if layout is None:
            return self._kept.run([extent])
        return {
            name: RunOnDisk(ring, extent.bucket, name, state.format, extent.offset, extent.numel)
            for name, state in layout.states.items()
        }

    def held(self) -> dict[str, int]:
        held: dict[str, int] = {}
        for layout in self._layouts.values():
            for name, state in layout.states.items():
                held[name] = held.get(name, 0) + padded_bytes(state.format, state.numel)
        return held

    def close(self) -> None:
        self._kept.close()
        if self._ring is not None:
            self._ring.close()


class RunOnDisk(StateRun):
    """A run of a state's elements in one bucket's block on disk. Each read makes a copy."""

    def __init__(self, ring: Ring, bucket: int, name: str, format: StateFormat, first: int, size: int) -> None:
        self._ring = ring
        self._bucket = bucket
        self._name = name
        self._first = first
        self.format = format
        self.size = size

    def __getitem__(self, run: slice) -> "RunOnDisk":
        start, stop, _ = run.indices(self.size)
        size = max(stop - start, 0)
        return RunOnDisk(self._ring, self._bucket, self._name, self.format, self._first + start, size)

    def read(self, at: int, out: np.ndarray) -> None:
        self._ring.read(self._bucket, self._name, self._first + at, out)

    @property
    def version(self) -> int | None:
        return self._ring.version(self._bucket)

    def begin_parameter(self, memory: np.ndarray) -> Transfer | None:
        assert self._first == 0
        return self._ring.begin_parameter(self._bucket, self._name, memory)

    def read_parameter(self, at: int, out: np.ndarray) -> None:
        self._ring.read_parameter(self._bucket, self._name, self._first + at, out)

    def write(self, values: np.ndarray) -> None:
        assert values.size == self.size
        self._ring.write(self._bucket, self._name, self._first, values)
