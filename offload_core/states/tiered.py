"""A store of which a part is in the device's memory."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby

import numpy as np

from ..config.options import OffloadConfig
from ..config.state_formats import StateFormat
from ..layout.partition import Bucket
from .arrays import StateRun
from .chain import Chain
from .on_device import StatesOnDevice
from .store import Extent, StateBlock, Store


class TieredStore(Store):
    """Keeps the states of some buckets in the device's memory, and the states of all other buckets in another store.

    Args:
        on_device: the store in the device's memory.
        rest: the store of all other buckets.
    """

    def __init__(self, on_device: StatesOnDevice, rest: Store) -> None:
        super().__init__(rest.config, rest.memory, rest.n_ranks)
        self.place = rest.place  # type: ignore[misc]  # of the part that plans call the store's own memory
        self._device, self._rest = on_device, rest
        self._there: set[int] = set()
        """The indices of the buckets whose states are in the device's memory."""

    def _of(self, bucket: int) -> Store:
        return self._device if bucket in self._there else self._rest

    @classmethod
    def holds(cls, format: StateFormat) -> bool:
        raise AssertionError("plans ask the two stores")

    @classmethod
    def working_bytes(cls, blocks: Collection[tuple[int, int]]) -> int:
        raise AssertionError("plans ask the two stores")

    @classmethod
    def free_bytes(cls, config: OffloadConfig) -> int | None:
        raise AssertionError("plans ask the two stores")

    def keep_on_device(self, buckets: Collection[int]) -> None:
        self._there.update(buckets)

    def allocate(
        self, buckets: Sequence[Bucket], formats: Callable[[Bucket], Mapping[str, StateFormat]], budget: int
    ) -> None:
        self._device.allocate([bucket for bucket in buckets if bucket.index in self._there], formats, 0)
        self._rest.allocate([bucket for bucket in buckets if bucket.index not in self._there], formats, budget)

    def expect(self, buckets: Iterable[int]) -> None:
        self._rest.expect([bucket for bucket in buckets if bucket not in self._there])

    def read(self, bucket: int) -> StateBlock:
        return self._of(bucket).read(bucket)

    def _load(self, bucket: int) -> StateBlock:
        return self._of(bucket)._load(bucket)

    def commit(self, block: StateBlock) -> None:
        self._of(block.bucket).commit(block)

    def run(self, extents: Sequence[Extent]) -> dict[str, StateRun]:
        parts: dict[str, list[StateRun]] = {}
        for store, alike in groupby(extents, lambda extent: self._of(extent.bucket)):
            for name, run in store.run([*alike]).items():
                parts.setdefault(name, []).append(run)
        return {name: runs[0] if len(runs) == 1 else Chain(runs) for name, runs in parts.items()}

    def held(self) -> dict[str, int]:
        return self._rest.held()

    def held_in(self) -> dict[tuple[str, str], int]:
        return self._device.held_in() | self._rest.held_in()

    def copies(self) -> dict[int, np.ndarray]:
        return self._device.copies()

    def release(self, copies: Mapping[int, np.ndarray]) -> None:
        self._device.release(copies)

    def restore(self) -> None:
        self._device.restore()

    def close(self) -> None:
        self._device.close()
        self._rest.close()
