"""The place of a rank's shards of a partitioned parameter: memory, or a disk from which they are read ahead."""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from ..device.events import Event
from ..device.protocols import HostArray
from ..dtypes import ElementType
from ..layout.partition import Bucket
from ..memory.host_memory import HostMemory
from ..memory.plan import PARAMETERS_ON_WAY
from ..support.threads import TaskThread, clear_up
from .scratch import ScratchFiles, Transfer, aligned
from .space import DiskSpace

T = TypeVar("T")

SLOTS = 4
"""Buckets' shards that are in host memory on their way from disk: one crosses to the device, others are read."""


class ShardSource(Protocol):
    """A rank's shards of a partitioned parameter, which lie one bucket after the other."""

    reads_ahead: bool
    """True if a shard comes sooner where it was expected."""

    def expect(self, bucket: Bucket) -> None:
        """Announce that the shard of this bucket is lent soon."""

    def lend(self, bucket: Bucket, updated: Event) -> Any:
        """Return the shard of a bucket, a tensor or a :class:`HostArray`, to be read only until it is given back.

        Args:
            updated: the event after which it has its values. It orders the device's reads; what is read here waits.
        """

    def give_back(self, bucket: Bucket, read: Event | None) -> None:
        """Take a shard back after the event until which it is read (None: at once)."""


class ShardsInMemory:
    """Shards in memory.

    Args:
        array: all, end to end: a device's tensor, of which a slice is a view, or a :class:`HostArray`.
    """

    reads_ahead = False

    def __init__(self, array: Any) -> None:
        self._array = array

    def expect(self, bucket: Bucket) -> None:
        pass

    def lend(self, bucket: Bucket, updated: Event) -> Any:
        if isinstance(self._array, HostArray):
            return self._array.run(bucket.shard_start, bucket.shard_numel)
        return self._array[bucket.shard_start : bucket.shard_start + bucket.shard_numel]

    def give_back(self, bucket: Bucket, read: Event | None) -> None:
        pass


class DiskPart(Protocol):
    """The shard of one bucket. It may be kept with the bucket's states, of whose run this is a part."""

    size: int
    """In elements."""

    @property
    def parameter_dtype(self) -> np.dtype:
        """The element type in which it is read."""

    @property
    def version(self) -> int | None:
        """A number that differs after each change; None: changes are not counted, and it is not read ahead."""

    def begin_parameter(self, memory: np.ndarray) -> Transfer | None:
        """As :meth:`StateRun.begin_parameter`."""

    def read_parameter(self, at: int, out: np.ndarray) -> None:
        """Copy elements from ``at`` on to ``out``."""


class OnDisk:
    """Shards on disk.

    Args:
        parts: by bucket, in order.
        dtype: the parameter's.
        owner: reads them ahead.
    """

    reads_ahead = True

    def __init__(self, parts: Sequence[tuple[Bucket, DiskPart]], dtype: ElementType, owner: "DiskShards") -> None:
        self._parts = {bucket.shard_start: part for bucket, part in parts}
        self._owner = owner
        self._ahead = ahead = owner.ahead
        self.dtype = dtype
        self.numel = sum(part.size for part in self._parts.values())
        ahead.add(len(parts), max(map(bytes_of, self._parts.values()), default=0))

    def read(self, at: int, out: np.ndarray) -> None:
        """Copy elements of the shards, end to end, from ``at`` on to ``out``."""
        for start, part in self._parts.items():
            low, high = max(at, start), min(at + out.size, start + part.size)
            if low < high:
                part.read_parameter(low - start, out[low - at : high - at])

    def write(self, values: np.ndarray, at: int = 0) -> None:
        """Replace whole buckets' shards, from element ``at`` of the shards on, by values of the parameter's element
        type; only those that are in a space of their own."""
        for start, part in self._parts.items():
            if at <= start < at + values.size:
                assert isinstance(part, DiskSpace)
                part.write(values[start - at : start - at + part.size])

    def expect(self, bucket: Bucket) -> None:
        self._ahead.expect(self._parts[bucket.shard_start])

    def lend(self, bucket: Bucket, updated: Event) -> HostArray:
        updated.order()  # its update has given the states back to the store
        return HostArray.of(self._ahead.take(self._parts[bucket.shard_start], self.dtype), self.dtype)

    def give_back(self, bucket: Bucket, read: Event | None) -> None:
        if read is not None:
            read.wait()
        self._ahead.give_back(self._parts[bucket.shard_start])


def bytes_of(part: DiskPart) -> int:
    """Return the bytes of a slot for this part."""
    return aligned(part.size * part.parameter_dtype.itemsize)


@dataclass(eq=False)
class _Entry:
    """A part in a slot."""

    slot: np.ndarray
    version: int | None
    arriving: Transfer | None
    taken: bool = False

    @property
    def failed(self) -> bool:
        """True if it was read ahead in vain."""
        return self.arriving is not None and self.arriving.done() and self.arriving.error() is not None


class DiskShards:
    """The shards on disk of one engine's model, or of one that is being built: their space, and what reads them ahead.

    The space is free again when this object and all its shards are gone, or at :meth:`close`.

    Args:
        folders: as ``nvme_path``.
        memory: of the slots.
    """

    def __init__(self, folders: Sequence[str], memory: HostMemory) -> None:
        self._files = ScratchFiles(folders)
        self.ahead = ReadAhead(memory)
        self._end = weakref.finalize(self, clear_up, partial(_close, self.ahead, self._files))
        self._end.atexit = False

    @property
    def n_bytes(self) -> int:
        """The bytes of the space."""
        return self._files.n_bytes

    def keep(self, shards: Iterable[tuple[Bucket, np.ndarray]], dtype: ElementType) -> OnDisk:
        """Copy a parameter's shards, bucket by bucket, to a space of their own."""
        parts: list[tuple[Bucket, DiskPart]] = []
        for bucket, values in shards:
            space = DiskSpace(self._files, bucket.shard_numel, dtype.numpy)
            space.write(values)
            parts.append((bucket, space))
        return OnDisk(parts, dtype, self)

    def with_states(self, parts: Sequence[tuple[Bucket, DiskPart]], dtype: ElementType) -> OnDisk:
        """Return a parameter's shards that lie in the store of its states."""
        return OnDisk(parts, dtype, self)

    def close(self) -> None:
        """Give back the space, when nothing is read any more."""
        if self._end.detach() is not None:
            _close(self.ahead, self._files)


def _close(ahead: "ReadAhead", files: ScratchFiles) -> None:
    ahead.close()
    files.close()


class ReadAhead:
    """A few slots in host memory, to which shards are read from disk before they are taken.

    One thread alone changes what is recorded here.
    """

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._thread = TaskThread("parameters from disk")
        self._largest: list[int] = []
        self._free: list[np.ndarray] = []
        self._n_bytes = 0
        self._n_slots = 0
        self._entries: dict[DiskPart, _Entry] = {}
        self._expected: deque[DiskPart] = deque()

    def add(self, n: int, n_bytes: int) -> None:
        """Take on so many parts, each of at most so many bytes."""
        self._do(partial(self._add, n, n_bytes))

    def expect(self, part: DiskPart) -> None:
        """Begin to read this part as soon as a slot is free."""
        if part.version is not None:
            self._thread.submit(partial(self._expect, part))

    def take(self, part: DiskPart, dtype: ElementType) -> np.ndarray:
        """Return a part, as it is now, in a slot that is its own until :meth:`give_back`.

        Raises:
            DiskError: it cannot be read.
        """
        entry = self._do(partial(self._take, part))
        if entry.arriving is not None:
            try:
                entry.arriving.result()
            except BaseException:
                self.give_back(part)
                raise
        values = entry.slot[: part.size * part.parameter_dtype.itemsize].view(part.parameter_dtype)
        return values.astype(dtype.numpy, copy=False)

    def give_back(self, part: DiskPart) -> None:
        """Have the part's slot filled anew."""
        self._thread.submit(partial(self._drop, part))

    def close(self) -> None:
        """Return when nothing is read any more."""
        if self._thread.is_here:
            self._do(self._await_all)
        self._thread.close()

    def _do(self, act: Callable[[], T]) -> T:
        return self._thread.submit(act).result()

    def _add(self, n: int, n_bytes: int) -> None:
        self._n_slots = min(self._n_slots + n, SLOTS)
        if n_bytes > self._n_bytes:
            self._await_all()
            self._free = []
            self._n_bytes = n_bytes
        while len(self._free) < self._n_slots - len(self._entries):
            self._free.append(self._slot())

    def _slot(self) -> np.ndarray:
        return self._memory.allocate(PARAMETERS_ON_WAY, self._n_bytes, np.dtype(np.uint8), pinned=True)

    def _await_all(self) -> None:
        for part, entry in [*self._entries.items()]:
            if entry.arriving is not None:
                entry.arriving.error()
            if not entry.taken:
                del self._entries[part]
                self._free.append(entry.slot)

    def _expect(self, part: DiskPart) -> None:
        if part not in self._entries and part not in self._expected:
            self._expected.append(part)
            self._begin()

    def _begin(self) -> None:
        while self._expected and self._free:
            self._read(self._expected.popleft(), self._free.pop())

    def _read(self, part: DiskPart, slot: np.ndarray) -> _Entry:
        version = part.version  # first: a change while it is read is one after it
        try:
            arriving = part.begin_parameter(slot[: bytes_of(part)])
        except BaseException:
            self._keep(slot)
            raise
        entry = self._entries[part] = _Entry(slot, version, arriving)
        return entry

    def _take(self, part: DiskPart) -> _Entry:
        if part in self._expected:
            self._expected.remove(part)
        entry = self._entries.get(part)
        if entry is not None and (entry.version is None or entry.version != part.version or entry.failed):
            self._drop(part, begin=False)
            entry = None
        if entry is None:
            entry = self._read(part, self._room())
        entry.taken = True
        return entry

    def _room(self) -> np.ndarray:
        if self._free:
            return self._free.pop()
        for other, entry in self._entries.items():
            if not entry.taken:
                self._drop(other, begin=False)
                break
        return self._free.pop() if self._free else self._slot()  # several callers at once

    def _drop(self, part: DiskPart, *, begin: bool = True) -> None:
        entry = self._entries.pop(part)
        if entry.arriving is not None:
            entry.arriving.error()
        self._keep(entry.slot)
        if begin:
            self._begin()

    def _keep(self, slot: np.ndarray) -> None:
        """Keep a slot that nothing needs now, unless there are enough, or it is too small."""
        if len(self._free) + len(self._entries) < self._n_slots and slot.size == self._n_bytes:
            self._free.append(slot)
