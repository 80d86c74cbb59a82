"""Writes one file of a checkpoint while training goes on and changes its sources.

The file is cut into blocks. Before a block is written it is copied to a staging buffer: by the writing thread, or, if
that comes first, by the thread that is about to change its source (:meth:`ShardWriter.capture`). So the file holds
everything as it was at the beginning, and copies take no more memory than the buffers.
"""

import os
import threading
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from ..errors import CheckpointError
from ..layout.regions import Region
from ..memory.host_memory import HostMemory
from ..support.disks import begin_writing, reserve, to_disk
from ..support.threads import Condition
from .safetensors import plan_file

BLOCK_BYTES = 8 * 2**20
"""The bytes of a block, each with its own checksum; a multiple of every element size."""
_WRITE_BACK_BLOCKS = 4
"""The number of blocks after which the system starts to write them to the disk, so that little is left for the final
sync, and little stays in the page cache."""
BUFFERS = 8
"""Staging buffers, of one block each."""


@dataclass(frozen=True)
class Source:
    """A one-dimensional array to be saved with its present values."""

    name: str
    """The parameter's name."""
    kind: str
    """``"master"``, ``"exp_avg"``, ``"exp_avg_sq"``, ``"param"`` (a tensor's own value) or ``"value"``."""
    region: Region
    """The part of the parameter that it holds."""
    dtype: np.dtype
    read: Callable[[int, np.ndarray], None]
    """``read(start, out)`` copies the elements from ``start`` on to ``out``; from any thread, if ``changes_with``."""
    changes_with: int | None = None
    """The parameter (its number in the pipeline) whose updates alone write to it. None: it may change in any way after
    the save has returned."""

    @classmethod
    def of(cls, name: str, kind: str, region: Region, array: np.ndarray, changes_with: int | None = None) -> "Source":
        """The source for a NumPy array."""
        return cls(name, kind, region, array.dtype, partial(_read, array.reshape(-1)), changes_with)

    @property
    def n_bytes(self) -> int:
        return self.region.numel * self.dtype.itemsize

    @property
    def shape(self) -> tuple[int, ...]:
        return self.region.shape if self.region.is_whole else (self.region.numel,)


def _read(array: np.ndarray, start: int, out: np.ndarray) -> None:
    np.copyto(out, array[start : start + out.size])


def checksum(data: bytes | np.ndarray) -> str:
    """XXH3 (128 bits), in hexadecimal: https://xxhash.com."""
    return xxhash.xxh3_128_hexdigest(memoryview(data))  # type: ignore[arg-type]


class ShardWriter:
    """Writes a safetensors file.

    Args:
        path: must not exist yet.
        sources: the arrays to write.
        memory: allocates the staging buffers; they are freed at the end.

    Raises:
        CheckpointError: the file cannot be made, or the disk has no room for it.
        HostMemoryError: there is no memory for the buffers.
    """

    def __init__(self, path: Path, sources: Sequence[Source], memory: HostMemory) -> None:
        self.path = path
        self.block_bytes = block_bytes = BLOCK_BYTES
        self.sources = sorted(sources, key=lambda source: -source.dtype.itemsize)  # so that all are aligned
        self.keys: list[str] = []
        """The name of each source's tensor in the file."""
        tensors: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
        for source in self.sources:
            key = f"{source.kind}/{source.name}{source.region}"
            while key in tensors:
                key += "'"
            tensors[key] = (source.dtype, source.shape)
            self.keys.append(key)
        self._header, stored, self.n_bytes = plan_file(tensors)
        self._offsets = [stored[key].offset for key in self.keys]
        n_blocks = -(-self.n_bytes // block_bytes)
        self.checksums = [""] * n_blocks
        """The checksum of each block that was written; ``""`` for the others."""
        self._blocks_of: dict[int | None, set[int]] = {}
        for source, offset in zip(self.sources, self._offsets, strict=True):
            if source.n_bytes:
                blocks = range(offset // block_bytes, (offset + source.n_bytes - 1) // block_bytes + 1)
                self._blocks_of.setdefault(source.changes_with, set()).update(blocks)
        self._left = [True] * n_blocks
        self._copying: set[int] = set()
        self._next = 0
        self._full: deque[tuple[int, np.ndarray]] = deque()
        self._lock = threading.Lock()
        """Held while a block is claimed."""
        self._changed = Condition()
        self._error: BaseException | None = None
        self._done = False
        label, n_buffers = "checkpoint staging", min(BUFFERS, n_blocks)
        self._free = [memory.allocate(label, block_bytes, np.dtype(np.uint8)) for _ in range(n_buffers)]
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                reserve(self._file, self.n_bytes)
            except BaseException:
                os.close(self._file)
                raise
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: {error.strerror or error} while a checkpoint of {self.n_bytes:,} bytes was written; it is "
            "given up, and those before it are untouched: make room, or name another folder"
        )

    def offset(self, source: int) -> int:
        """The place of a source's bytes, counted from the file's start."""
        return self._offsets[source]

    # --- called by other threads ---------------------------------------------------------------------

    def capture(self, params: Iterable[int | None]) -> None:
        """Return when the sources that change with these parameters may change (None: sources that may always change).

        An error in copying does not raise here, so that training goes on: it cancels the file, and :meth:`write` raises
        it. If the file was cancelled, this returns at once.
        """
        if self._done:
            return
        blocks = sorted(set().union(*(self._blocks_of.get(param, ()) for param in params)))
        mine: set[int] = set()
        try:
            for block in blocks:
                buffer = self._await_claim(block, mine)
                if buffer is not None:
                    self._fill(block, buffer)
                    self._full.append((block, buffer))
                    self._copied(mine)
        except BaseException as error:
            self.cancel(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._copied(mine)
        self._changed.wait_for(lambda: self._error or self._copying.isdisjoint(blocks))

    def cancel(self, error: BaseException) -> None:
        """Give up the file because of ``error``."""
        self._error = self._error or error
        self._changed.notify_all()

    def leave(self) -> None:
        """Let go of the file in a forked process: the parent's thread writes it."""
        self._done = True

    def close(self) -> None:
        """Give up a file before :meth:`write` was called."""
        self.cancel(CheckpointError(f"{self.path}: given up"))
        os.close(self._file)

    # --- called by the writing thread ------------------------------------------------------------------

    def write(self, advance: Callable[[int], object]) -> None:
        """Write the file, and return when it is on the disk.

        Args:
            advance: called with the number of bytes of each block that was written.

        Raises:
            CheckpointError: it cannot be written.
        """
        try:
            for n in range(1, len(self.checksums) + 1):
                block, buffer = self._next_block()
                data = buffer[: min(self.block_bytes, self.n_bytes - block * self.block_bytes)]
                self.checksums[block] = checksum(data)
                self._put(data, block * self.block_bytes)
                advance(data.nbytes)
                if n % _WRITE_BACK_BLOCKS == 0:
                    begin_writing(self._file)
                self._free.append(buffer)
                self._changed.notify_all()
            to_disk(self._file)
        except OSError as error:
            self.cancel(error)
            raise self._failed(error) from error
        except BaseException as error:
            self.cancel(error)
            raise
        finally:
            os.close(self._file)
            self._changed.wait_for(lambda: not self._copying)
            with self._lock:
                self._free, self._full, self.sources = [], deque(), []
                self._done = True

    def _next_block(self) -> tuple[int, np.ndarray]:
        """The next block to write, and its bytes. Blocks that other threads have copied come first."""
        mine: set[int] = set()
        while True:
            self._changed.wait_for(lambda: self._error or self._full or (self._free and self._find_left() is not None))
            if self._error:
                raise CheckpointError(f"{self.path}: given up, because of {self._error!r}") from self._error
            if self._full:
                return self._full.popleft()
            block = self._find_left()
            buffer = None if block is None else self._claim(block, mine)
            if block is not None and buffer is not None:
                try:
                    self._fill(block, buffer)
                finally:
                    self._copied(mine)
                return block, buffer

    def _await_claim(self, block: int, mine: set[int]) -> np.ndarray | None:
        """Claim a buffer for the block as soon as one is free; None if the block no longer needs a copy."""
        while self._left[block] and not self._error:
            self._changed.wait_for(lambda: self._free or self._error or not self._left[block])
            buffer = self._claim(block, mine)
            if buffer is not None:
                return buffer
        return None

    def _copied(self, blocks: set[int]) -> None:
        """Record that this thread has copied the blocks that it claimed, or has given them up."""
        with self._lock:
            self._copying -= blocks
            blocks.clear()
        self._changed.notify_all()

    def _find_left(self) -> int | None:
        while self._next < len(self._left) and not self._left[self._next]:
            self._next += 1
        return self._next if self._next < len(self._left) else None

    def _claim(self, block: int, mine: set[int]) -> np.ndarray | None:
        """Return a buffer for a block that this thread will copy, and add the block to ``mine``; None if no buffer is
        free or another thread has claimed the block."""
        with self._lock:
            if self._error or not (self._free and self._left[block]):
                return None
            mine.add(block)
            self._copying.add(block)
            self._left[block] = False
            return self._free.pop()

    def _fill(self, block: int, buffer: np.ndarray) -> None:
        begin, end = block * self.block_bytes, min((block + 1) * self.block_bytes, self.n_bytes)
        if begin < len(self._header):
            head = self._header[begin:end]
            buffer[: len(head)] = np.frombuffer(head, np.uint8)
        for i in range(max(bisect_right(self._offsets, begin) - 1, 0), bisect_left(self._offsets, end)):
            source, offset = self.sources[i], self._offsets[i]
            low, high = max(offset, begin), min(offset + source.n_bytes, end)
            if low < high:
                source.read(
                    (low - offset) // source.dtype.itemsize, buffer[low - begin : high - begin].view(source.dtype)
                )

    def _put(self, data: np.ndarray, at: int) -> None:
        rest = memoryview(data)  # type: ignore[arg-type]
        while rest:
            n = os.pwrite(self._file, rest, at)
            rest, at = rest[n:], at + n
