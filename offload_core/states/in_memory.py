"""Optimizer states of a process's shards, in host memory."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

from ..config.options import OffloadConfig
from ..config.state_formats import StateFormat
from ..layout.partition import Bucket, Key
from ..memory.host_memory import HostMemory
from ..memory.plan import HOST, PARAMETER_SHARDS
from .arrays import StateArray, StateRun
from .store import Extent, StateBlock, Store


class StatesInMemory(Store):
    """Keeps states in host memory. Updates change them in place.

    For each state, the shards of all buckets with the same key (``Bucket.key``: group, element type and more) are
    concatenated in bucket order in one array. So a process's slice of a parameter is contiguous even if the parameter
    straddles buckets. The upper half of a split master weight (``SPLIT``) is the parameter.
    """

    place = HOST

    def __init__(self, config: OffloadConfig, memory: HostMemory, n_ranks: int) -> None:
        super().__init__(config, memory, n_ranks)
        self._arena: dict[int, dict[str, StateArray]] = {}
        self._offset: dict[int, int] = {}
        self._blocks: dict[int, StateBlock] = {}

    @classmethod
    def holds(cls, format: StateFormat) -> bool:
        return True

    @classmethod
    def kept_on_host(cls, budget: int, blocks: Sequence[tuple[int, int]]) -> list[int]:
        return [n for _, n in blocks]

    @classmethod
    def working_bytes(cls, blocks: Collection[tuple[int, int]]) -> int:
        return 0

    @classmethod
    def free_bytes(cls, config: OffloadConfig) -> int | None:
        return None

    def allocate(
        self, buckets: Sequence[Bucket], formats: Callable[[Bucket], Mapping[str, StateFormat]], budget: int
    ) -> None:
        by_key: dict[Key, list[Bucket]] = {}
        for bucket in buckets:
            by_key.setdefault(bucket.key, []).append(bucket)
        for alike in by_key.values():
            numel = self.n_ranks * sum(bucket.shard_numel for bucket in alike)
            shards = partial(self.memory.allocate, PARAMETER_SHARDS, pinned=True)
            arena = {
                name: StateArray.allocate(format, numel, partial(self.memory.allocate, name), shards, self.threads)
                for name, format in formats(alike[0]).items()
            }
            start = 0
            for bucket in alike:
                end = start + self.n_ranks * bucket.shard_numel
                self._arena[bucket.index] = arena
                self._offset[bucket.index] = start
                block = {name: array[start:end] for name, array in arena.items()}
                self._blocks[bucket.index] = StateBlock(bucket.index, block)
                start = end

    def expect(self, buckets: Iterable[int]) -> None:
        pass

    def read(self, bucket: int) -> StateBlock:
        return self._blocks[bucket]

    def _load(self, bucket: int) -> StateBlock:
        return self._blocks[bucket]

    def commit(self, block: StateBlock) -> None:
        assert self._blocks[block.bucket] is block

    def run(self, extents: Sequence[Extent]) -> dict[str, StateRun]:
        if not extents:
            return {}
        arena = self._arena[extents[0].bucket]
        end = start = self._offset[extents[0].bucket] + extents[0].offset
        for bucket, offset, numel in extents:
            assert self._arena[bucket] is arena
            assert self._offset[bucket] + offset == end
            end += numel
        return {name: array[start:end] for name, array in arena.items()}

    def held(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        self._arena, self._offset, self._blocks = {}, {}, {}
