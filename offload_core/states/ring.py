"""The blocks of states in flight between disk and host memory.

A ring has a few slots of host memory (``slots.py``), each for one bucket's states. While an update changes one block,
the ring reads the next blocks and writes the earlier ones. Any thread may call the ring. Only the ring's thread changes
the slots, so that no interrupt and no other thread finds a slot half changed. Two threads for each disk read, and two
write.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TypeVar

import numpy as np

from ..disk.scratch import ScratchFiles, Transfer, aligned
from ..memory.host_memory import HostMemory
from ..memory.plan import BLOCK_COPY, BLOCKS
from ..support.threads import TaskThread
from .arrays import StateArray
from .block_layout import BlockLayout, ByteRange, around
from .slots import BlockOnDisk, Slots

T = TypeVar("T")

_READ_AT_A_TIME = 2**20
"""The number of elements read from disk at a time if a bucket's states are not in a slot, a multiple of every format's
block."""


class Ring:
    """Blocks of states on disk, and slots in host memory for a few of these blocks.

    Args:
        threads: the number of threads that decode and encode.
    """

    def __init__(self, files: ScratchFiles, memory: HostMemory, threads: int) -> None:
        self._files = files
        self._memory = memory
        self._threads = threads
        self._thread = TaskThread("states on disk")
        self._slots = Slots(files, memory, threads, self._thread.submit)

    def add(self, layouts: Mapping[int, BlockLayout]) -> None:
        """Add new buckets, whose states are zeros.

        Args:
            layouts: the layout of each bucket's block, by the bucket's index.

        Raises:
            DiskError: the disk has no room.
            HostMemoryError: there is no memory for the slots.
        """
        start = self._files.grow(sum(layout.n_bytes for layout in layouts.values()))  # here, where it may warn
        new = {}
        for bucket, layout in layouts.items():
            new[bucket] = BlockOnDisk(bucket, layout, start)
            start += layout.n_bytes
        self._do(partial(self._slots.add, new))

    def expect(self, buckets: Iterable[int]) -> None:
        """Announce that these buckets are lent next, in this order, after the buckets that were announced before. A
        bucket that is announced again moves to its new position in the order."""
        self._thread.submit(partial(self._slots.expect, [*buckets]))

    def lend(self, bucket: int) -> dict[str, StateArray]:
        """Return a bucket's states. The caller changes them and then calls :meth:`give_back`. If another block is lent
        or written before that, the bucket keeps its states from before the change.

        Raises:
            DiskError: the states cannot be read, or an earlier block could not be written. The write begins again.
        """
        block = self._do(partial(self._slots.lend, bucket))
        if block.arriving is not None and (error := block.arriving.error()) is not None:
            self._do(partial(self._slots.drop, block))
            raise error
        return block.arrays

    def give_back(self, bucket: int) -> None:
        """Begin to write the changed states of a bucket that was lent."""
        self._do(partial(self._slots.give_back, bucket))  # returns after the version has changed

    def copy(self, bucket: int) -> dict[str, StateArray]:
        """Return a copy of a bucket's states."""
        there = self._slots.on_disk[bucket]
        memory = self._memory.allocate(BLOCK_COPY, there.layout.n_bytes, np.dtype(np.uint8))
        if not self._do(partial(self._slots.copy, bucket, ByteRange(0, memory.size), memory)):
            self._files.read(there.start, memory).result()
        return there.layout.arrays(memory, self._threads)

    def read(self, bucket: int, name: str, at: int, out: np.ndarray) -> None:
        """Copy elements ``[at, at + out.size)`` of a bucket's state to ``out``, an array of any floating-point type."""
        if self._do(partial(self._slots.read, bucket, name, at, out)):
            return
        there = self._slots.on_disk[bucket]
        state = there.layout.states[name]
        done = 0
        while done < out.size:
            first = (at + done) // state.format.block * state.format.block
            stop = min(first + _READ_AT_A_TIME, at + out.size)
            array = state.array_of(first, stop, partial(self._bytes, there.start), self._threads)
            n = stop - at - done
            array.read(at + done - first, out[done : done + n])
            done += n

    def read_parameter(self, bucket: int, name: str, at: int, out: np.ndarray) -> None:
        """Copy elements ``[at, at + out.size)`` of the parameter that is stored with state ``name`` to ``out``. If no
        parameter is stored with this state, copy these elements of the state, rounded to the element type of ``out``.
        """
        there = self._slots.on_disk[bucket]
        state = there.layout.states[name]
        for done in range(0, out.size, _READ_AT_A_TIME):
            part = out[done : done + _READ_AT_A_TIME]
            span = state.parameter(at + done, at + done + part.size)
            found = np.empty(span.n_bytes, np.uint8)
            if not self._do(partial(self._slots.copy, bucket, span, found)):
                found = self._bytes(there.start, span)
            np.copyto(part, found.view(state.parameter_dtype))

    def begin_parameter(self, bucket: int, name: str, memory: np.ndarray) -> Transfer | None:
        """Begin to copy to ``memory`` all elements of the parameter that is stored with this state. If no parameter is
        stored with this state, begin to copy all elements of the state.

        Returns:
            The transfer to wait for; None: the copy is complete.
        """
        there = self._slots.on_disk[bucket]
        state = there.layout.states[name]
        span = state.parameter(0, state.numel)
        if self._do(partial(self._slots.copy, bucket, span, memory)):
            return None
        return self._files.read(there.start + span.start, memory[: aligned(span.n_bytes)])

    def version(self, bucket: int) -> int:
        """Return how often a bucket's states have changed so far. This does not wait."""
        return self._slots.on_disk[bucket].version

    def write(self, bucket: int, name: str, at: int, values: np.ndarray) -> None:
        """Replace elements ``[at, at + values.size)`` of a state by ``values``, rounded to nearest. The elements must
        begin where a block of the format begins, and end where a block or the parameter ends."""
        self._do(partial(self._slots.write, bucket, name, at, values))

    def close(self) -> None:
        """Wait for all transfers, ignore their errors, and free the space on disk."""
        if self._thread.is_here:
            self._do(self._slots.await_all)
        self._thread.close()
        self._files.close()

    def _bytes(self, start: int, span: ByteRange) -> np.ndarray:
        """Read a byte range of a block from disk.

        Args:
            start: the offset at which the block begins in the scratch files, in bytes.
            span: the byte range in the block.
        """
        whole = around(span)
        memory = self._memory.allocate(BLOCKS, whole.n_bytes, np.dtype(np.uint8))
        self._files.read(start + whole.start, memory).result()
        return memory[span.start - whole.start :][: span.n_bytes]

    def _do(self, act: Callable[[], T]) -> T:
        return self._thread.submit(act).result()
