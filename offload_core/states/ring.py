"""The blocks of states in flight between disk and host memory.

A ring has a few slots (``slots.py``), each for one bucket's states. While one block is updated, the next ones are read
and the earlier ones are written. Any thread calls the ring. Only the ring's thread changes the slots, so that no
interrupt and no other thread finds them half changed. Four more threads for each disk move the bytes.
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
"""Elements read from disk at a time, for states that are not in a slot: whole blocks of every format."""


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
        """As :meth:`Store.expect`."""
        self._thread.submit(partial(self._slots.expect, [*buckets]))

    def lend(self, bucket: int) -> dict[str, StateArray]:
        """Return a bucket's states, to be changed and then given back. A block that was lent and not given back keeps
        its old states.

        Raises:
            DiskError: the states cannot be read, or an earlier block could not be written, which is tried again now.
        """
        block = self._do(partial(self._slots.lend, bucket))
        if block.arriving is not None and (error := block.arriving.error()) is not None:
            self._do(partial(self._slots.drop, block))
            raise error
        return block.arrays

    def give_back(self, bucket: int) -> None:
        """Begin to write the new values of a bucket that was lent."""
        self._do(partial(self._slots.give_back, bucket))  # returns after the version has changed

    def copy(self, bucket: int) -> dict[str, StateArray]:
        """Return a copy of a bucket's states."""
        there = self._slots.on_disk[bucket]
        memory = self._memory.allocate(BLOCK_COPY, there.layout.n_bytes, np.dtype(np.uint8))
        if not self._do(partial(self._slots.copy, bucket, ByteRange(0, memory.size), memory)):
            self._files.read(there.start, memory).result()
        return there.layout.arrays(memory, self._threads)

    def read(self, bucket: int, name: str, at: int, out: np.ndarray) -> None:
        """Copy elements of a state from ``at`` on to ``out``, of any floating-point type."""
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
        """Copy elements of this state's parameter, from ``at`` on, to ``out``."""
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
        """Begin to read the whole parameter that is kept with this state, or the whole state that is rounded to it.

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
        """Return the number of changes of a bucket's states so far, without waiting."""
        return self._slots.on_disk[bucket].version

    def write(self, bucket: int, name: str, at: int, values: np.ndarray) -> None:
        """Replace elements of a state from ``at`` on, as :meth:`StateRun.write`."""
        self._do(partial(self._slots.write, bucket, name, at, values))

    def close(self) -> None:
        """Wait for all transfers, and free the space on disk."""
        if self._thread.is_here:
            self._do(self._slots.await_all)
        self._thread.close()
        self._files.close()

    def _bytes(self, start: int, span: ByteRange) -> np.ndarray:
        """Read bytes of the block at offset ``start`` from disk."""
        whole = around(span)
        memory = self._memory.allocate(BLOCKS, whole.n_bytes, np.dtype(np.uint8))
        self._files.read(start + whole.start, memory).result()
        return memory[span.start - whole.start :][: span.n_bytes]

    def _do(self, act: Callable[[], T]) -> T:
        return self._thread.submit(act).result()
