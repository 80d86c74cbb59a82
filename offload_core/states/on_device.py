"""Optimizer states of a process's shards in the device's memory."""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..config.options import OffloadConfig
from ..config.state_formats import StateFormat
from ..device.protocols import DeviceQueue
from ..layout.partition import Bucket
from ..memory.host_memory import HostMemory
from ..memory.plan import DEVICE, READ_STATES, RELEASED_STATES
from .arrays import StateAddresses, StateArray, StateRun
from .block_layout import BlockLayout, ByteRange, StateLayout, padded_bytes
from .chain import Chain
from .store import Extent, StateBlock, Store

READ_BYTES = 4 * 2**20
"""The bytes of states that are copied between the device and the host at a time."""
_BYTE = np.dtype(np.uint8)


@dataclass(eq=False)
class _Block:
    """A bucket's states: in the device's memory, or, while they are released, in the host's."""

    layout: BlockLayout
    memory: Any
    """The device's tensor of bytes, or, while the states are released, the host's array of them. A reader takes this
    attribute once: another thread may replace it."""

    @property
    def released(self) -> bool:
        """True if the states are on the host."""
        return isinstance(self.memory, np.ndarray)


class StatesOnDevice(Store):
    """Keeps the states of some buckets in the device's memory, where the device's kernels update them.

    A bucket's states are one run of bytes, as on disk. Reads and writes copy a few MiB at a time through pinned memory:
    no state moves to the host for good, but by :meth:`release`.
    """

    place = DEVICE

    def __init__(self, config: OffloadConfig, memory: HostMemory, n_ranks: int, queue: DeviceQueue) -> None:
        super().__init__(config, memory, n_ranks)
        self._queue = queue
        self._blocks: dict[int, _Block] = {}
        self._through: np.ndarray | None = None
        """The pinned memory through which states are read and written."""
        self._in_use = threading.Lock()
        """The lock of ``_through``. Nobody waits for it: another thread, a signal handler or a fork that finds it taken
        allocates pageable memory for the one copy."""

    @classmethod
    def holds(cls, format: StateFormat) -> bool:
        return format.upper is None

    @classmethod
    def n_bytes(cls, format: StateFormat, numel: int) -> int:
        return padded_bytes(format, numel)

    @classmethod
    def working_bytes(cls, blocks: Collection[tuple[int, int]]) -> int:
        return 0

    @classmethod
    def free_bytes(cls, config: OffloadConfig) -> int | None:
        return None

    def allocate(
        self, buckets: Sequence[Bucket], formats: Callable[[Bucket], Mapping[str, StateFormat]], budget: int
    ) -> None:
        layouts = {bucket.index: BlockLayout(formats(bucket), self.n_ranks * bucket.shard_numel) for bucket in buckets}
        if layouts and self._through is None:
            self._through = self.memory.allocate(READ_STATES, READ_BYTES, _BYTE, pinned=True)
        self._blocks |= {i: _Block(layout, self._queue.allocate(layout.n_bytes)) for i, layout in layouts.items()}

    def expect(self, buckets: Iterable[int]) -> None:
        pass

    def read(self, bucket: int) -> StateBlock:
        block = self._blocks[bucket]
        assert not block.released, "states that are released were to be updated"
        [start] = self._queue.arrays([block.memory]).addresses.tolist() if block.layout.n_bytes else [0]
        return StateBlock(bucket, {name: _at(start, state) for name, state in block.layout.states.items()})

    def _load(self, bucket: int) -> StateBlock:
        return self.read(bucket)

    def commit(self, block: StateBlock) -> None:
        pass  # the kernels write where the states are

    def run(self, extents: Sequence[Extent]) -> dict[str, StateRun]:
        parts: dict[str, list[StateRun]] = {}
        for bucket, offset, numel in extents:
            for name, state in self._blocks[bucket].layout.states.items():
                parts.setdefault(name, []).append(RunOnDevice(self, bucket, state, offset, numel))
        return {name: runs[0] if len(runs) == 1 else Chain(runs) for name, runs in parts.items()}

    def held(self) -> dict[str, int]:
        held: dict[str, int] = {}
        for block in self._blocks.values():
            for name, state in block.layout.states.items() if not block.released else ():
                held[name] = held.get(name, 0) + padded_bytes(state.format, state.numel)
        return held

    def copies(self) -> dict[int, np.ndarray]:
        there = {i: block for i, block in self._blocks.items() if not block.released}
        copies = {i: self.memory.allocate(RELEASED_STATES, block.layout.n_bytes, _BYTE) for i, block in there.items()}
        for i, host in copies.items():
            if host.size:
                self._queue.to_host(there[i].memory, host).wait()
        return copies

    def release(self, copies: Mapping[int, np.ndarray]) -> None:
        for i, host in copies.items():
            self._blocks[i].memory = host

    def restore(self) -> None:
        blocks = [block for block in self._blocks.values() if block.released]
        memories = [self._queue.allocate(block.layout.n_bytes) for block in blocks]
        for block, memory in zip(blocks, memories, strict=True):
            if block.layout.n_bytes:
                self._queue.to_device(block.memory, memory).wait()
        for block, memory in zip(blocks, memories, strict=True):
            block.memory = memory

    def close(self) -> None:
        self._blocks, self._through = {}, None

    # --- bytes of a block ------------------------------------------------------------------------------

    @contextmanager
    def bytes_of(self, bucket: int, span: ByteRange, *, write: bool = False) -> Iterator[np.ndarray]:
        """Return a context in which the host has a copy of at most ``READ_BYTES`` bytes of a bucket's states.

        Args:
            write: True to copy the bytes back at the end.
        """
        memory, (start, n_bytes) = self._blocks[bucket].memory, span
        part = memory[start : start + n_bytes]
        if isinstance(memory, np.ndarray):
            yield part
            return
        with self._host_bytes(n_bytes) as host:
            if n_bytes:
                self._queue.to_host(part, host).wait()
            yield host
            if write and n_bytes:
                self._queue.to_device(host, part).wait()

    @contextmanager
    def _host_bytes(self, n_bytes: int) -> Iterator[np.ndarray]:
        if self._through is None or not self._in_use.acquire(blocking=False):
            yield np.empty(n_bytes, np.uint8)
            return
        try:
            yield self._through[:n_bytes]
        finally:
            self._in_use.release()


def _at(start: int, state: StateLayout) -> "AddressedStates":
    beside = 0 if state.beside is None else start + state.beside.start
    return AddressedStates(state.format, StateAddresses(state.format, start + state.data.start, beside))


@dataclass(frozen=True)
class AddressedStates:
    """A state of a bucket in the device's memory, for the device's kernels."""

    format: StateFormat
    at: StateAddresses


class RunOnDevice(StateRun):
    """A run of a state's elements in the device's memory. Each read makes a copy."""

    def __init__(self, store: StatesOnDevice, bucket: int, state: StateLayout, first: int, size: int) -> None:
        self._store = store
        self._bucket = bucket
        self._state = state
        self._first = first
        self.format = state.format
        self.size = size

    def __getitem__(self, run: slice) -> "RunOnDevice":
        start, stop, _ = run.indices(self.size)
        return RunOnDevice(self._store, self._bucket, self._state, self._first + start, max(stop - start, 0))

    def read(self, at: int, out: np.ndarray) -> None:
        done = 0
        while done < out.size:
            with self._part(self._first + at + done, self._first + at + out.size) as (start, array):
                skip = self._first + at + done - start
                numel = min(array.size - skip, out.size - done)
                array.read(skip, out[done : done + numel])
            done += numel

    def write(self, values: np.ndarray) -> None:
        assert values.size == self.size
        done = 0
        while done < values.size:
            with self._part(self._first + done, self._first + values.size, write=True) as (_, array):
                array.write(values[done : done + array.size])
                done += array.size

    @contextmanager
    def _part(self, first: int, stop: int, *, write: bool = False) -> Iterator[tuple[int, StateArray]]:
        """Return a context in which the host has a copy of some elements: ``(number of the first one, elements)``.

        Args:
            first: the number in the bucket of an element that must be among them.
            stop: no element from this number on is needed.
            write: True to copy the elements back at the end.
        """
        state, block = self._state, self.format.block
        start = first // block * block
        most = READ_BYTES // state.format.stored.itemsize // 2 // block * block
        stop = min(start + most, stop)
        beside = state.beside
        spans = [
            ByteRange(
                state.data.start + start * state.format.stored.itemsize, (stop - start) * state.format.stored.itemsize
            )
        ]
        if beside is not None:
            spans.append(ByteRange(beside.start + start // block, -(-stop // block) - start // block))
        bytes_of = self._store.bytes_of
        with bytes_of(self._bucket, spans[0], write=write) as data:
            if beside is None:
                yield start, state.array_of(0, stop - start, lambda span: data, self._store.threads)
                return
            with bytes_of(self._bucket, spans[1], write=write) as shared:
                parts = iter((data, shared))
                yield start, state.array_of(0, stop - start, lambda span: next(parts), self._store.threads)
