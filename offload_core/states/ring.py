"""The blocks of states in flight between disk and host memory.

A ring has a few slots, each for one bucket's states. While one block is updated, the next ones are read and the earlier
ones are written. Only the ring's thread changes the ring's fields, so that no interrupt and no other thread finds them
half changed. Four more threads for each disk move the bytes.

======  =================================================================================
block   meaning
======  =================================================================================
clean   it equals the block on disk, and its slot may be reused
newer   it was changed, and is not yet written
lent    an update changes it; until it is given back, the valid block is the one on disk
======  =================================================================================

A block may also be arriving (read) or leaving (written). It does not change until that transfer has ended.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import TypeVar

import numpy as np

from ..disk.scratch import ScratchFiles, Transfer, aligned
from ..errors import DiskError, StateError
from ..memory.host_memory import HostMemory
from ..memory.plan import BLOCK_COPY, BLOCKS
from ..support.threads import TaskThread
from .arrays import StateArray
from .block_layout import BlockLayout, Span, around

T = TypeVar("T")

SLOTS = 4
"""Blocks in host memory: one is updated, one is written, and two are read. With three, a read waits for a write."""
_READ_AT_A_TIME = 2**20
"""Elements read from disk at a time, for states that are not in a slot: whole blocks of every format."""


class Block:
    """A bucket's states in a slot."""

    def __init__(self, bucket: int, slot: np.ndarray, arrays: dict[str, StateArray]) -> None:
        self.bucket = bucket
        self.slot = slot
        self.arrays = arrays
        self.arriving: Transfer | None = None
        self.leaving: Transfer | None = None
        self.newer = False
        self.lent = False
        self.failed: BaseException | None = None
        """The error of its last write, until it is raised."""


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
        self._layouts: dict[int, BlockLayout] = {}
        self._starts: dict[int, int] = {}
        """The offset of each bucket's block in the files."""
        self._versions: dict[int, int] = {}
        self._stored: set[int] = set()
        """Buckets that are on disk. Other buckets' states are still zeros."""
        self._blocks: dict[int, Block] = {}
        """The blocks in slots, least recently used first."""
        self._free: list[np.ndarray] = []
        self._slot_bytes = 0
        self._expected: deque[int] = deque()
        self._followers: dict[int, int] = {}
        """By bucket, the bucket that was lent next after it, the last time."""
        self._last: int | None = None
        """The bucket that was lent last."""

    # --- called by any thread ------------------------------------------------------------------------

    def add(self, layouts: Mapping[int, BlockLayout]) -> None:
        """Add new buckets, whose states are zeros.

        Raises:
            DiskError: the disk has no room.
            HostMemoryError: there is no memory for the slots.
        """
        start = self._files.grow(sum(layout.n_bytes for layout in layouts.values()))  # here, where it may warn
        self._do(partial(self._add, layouts, start))

    def expect(self, buckets: Iterable[int]) -> None:
        """As :meth:`Store.expect`."""
        self._thread.submit(partial(self._expect, [*buckets]))

    def lend(self, bucket: int) -> dict[str, StateArray]:
        """Return a bucket's states, to be changed and then given back. A block that was lent and not given back keeps
        its old states.

        Raises:
            DiskError: the states cannot be read, or an earlier block could not be written, which is tried again now.
        """
        block = self._do(partial(self._lend, bucket))
        if block.arriving is not None and (error := block.arriving.error()) is not None:
            self._do(partial(self._drop, block))
            raise error
        return block.arrays

    def give_back(self, bucket: int) -> None:
        """Begin to write the new values of a bucket that was lent."""
        self._do(partial(self._give_back, bucket))  # returns after the version has changed

    def copy(self, bucket: int) -> dict[str, StateArray]:
        """Return a copy of a bucket's states."""
        layout = self._layouts[bucket]
        memory = self._memory.allocate(BLOCK_COPY, layout.n_bytes, np.dtype(np.uint8))
        if not self._do(partial(self._copy, bucket, memory)):
            self._files.read(self._starts[bucket], memory).result()
        return layout.arrays(memory, self._threads)

    def read(self, bucket: int, name: str, at: int, out: np.ndarray) -> None:
        """Copy elements of a state from ``at`` on to ``out``, of any floating-point type."""
        if self._do(partial(self._read, bucket, name, at, out)):
            return
        state, start = self._layouts[bucket].states[name], self._starts[bucket]
        done = 0
        while done < out.size:
            first = (at + done) // state.format.block * state.format.block
            stop = min(first + _READ_AT_A_TIME, at + out.size)
            array = state.array_of(first, stop, partial(self._bytes, start), self._threads)
            n = stop - at - done
            array.read(at + done - first, out[done : done + n])
            done += n

    def read_parameter(self, bucket: int, name: str, at: int, out: np.ndarray) -> None:
        """Copy elements of this state's parameter, from ``at`` on, to ``out``."""
        state, start = self._layouts[bucket].states[name], self._starts[bucket]
        for done in range(0, out.size, _READ_AT_A_TIME):
            part = out[done : done + _READ_AT_A_TIME]
            span = state.parameter(at + done, at + done + part.size)
            found = self._do(partial(self._bytes_here, bucket, span))
            if found is None:
                found = self._bytes(start, span)
            np.copyto(part, found.view(state.parameter_dtype))

    def begin_parameter(self, bucket: int, name: str, memory: np.ndarray) -> Transfer | None:
        """Begin to read the whole parameter that is kept with this state, or the whole state that is rounded to it.

        Returns:
            The transfer to wait for; None: the copy is complete.
        """
        span = self._layouts[bucket].states[name].parameter(0, self._layouts[bucket].states[name].numel)
        if self._do(partial(self._copy_bytes, bucket, span, memory)):
            return None
        return self._files.read(self._starts[bucket] + span.start, memory[: aligned(span.n_bytes)])

    def version(self, bucket: int) -> int:
        """Return the number of changes of a bucket's states so far, without waiting."""
        return self._versions[bucket]

    def _bytes(self, start: int, span: Span) -> np.ndarray:
        """Read bytes of the block at offset ``start`` from disk."""
        whole = around(span)
        memory = self._memory.allocate(BLOCKS, whole.n_bytes, np.dtype(np.uint8))
        self._files.read(start + whole.start, memory).result()
        return memory[span.start - whole.start :][: span.n_bytes]

    def write(self, bucket: int, name: str, at: int, values: np.ndarray) -> None:
        """Replace elements of a state from ``at`` on, as :meth:`StateRun.write`."""
        self._do(partial(self._write, bucket, name, at, values))

    def close(self) -> None:
        """Wait for all transfers, and free the space on disk."""
        if self._thread.is_here:
            self._do(self._await_all)
        self._thread.close()
        self._files.close()

    def _do(self, act: Callable[[], T]) -> T:
        return self._thread.submit(act).result()

    # --- in the ring's thread ------------------------------------------------------------------------

    def _add(self, layouts: Mapping[int, BlockLayout], start: int) -> None:
        n_bytes = max(self._slot_bytes, *(layout.n_bytes for layout in layouts.values()))
        if n_bytes > self._slot_bytes:
            self._end()
            self._blocks.clear()
            self._free.clear()
            self._slot_bytes = n_bytes
        n_slots = min(SLOTS, len(self._layouts) + len(layouts))
        for _ in range(n_slots - len(self._free) - len(self._blocks)):
            self._free.append(self._memory.allocate(BLOCKS, n_bytes, np.dtype(np.uint8)))
        for bucket, layout in layouts.items():
            self._layouts[bucket], self._starts[bucket], self._versions[bucket] = layout, start, 0
            start += layout.n_bytes

    def _expect(self, buckets: list[int]) -> None:
        self._expected = deque([bucket for bucket in self._expected if bucket not in buckets] + buckets)
        self._read_ahead()

    def _lend(self, bucket: int) -> Block:
        self._raise_failed()
        self._drop_lent()
        block = self._in_slot(bucket) or self._fetch(bucket)
        if block.newer:
            self._begin_writing(block)
        self._await_left(block)
        block.lent = True
        self._blocks[bucket] = self._blocks.pop(bucket)
        while bucket in self._expected and self._expected.popleft() != bucket:
            pass
        if self._last is not None:
            self._followers[self._last] = bucket
        self._last = bucket
        self._read_ahead()
        return block

    def _give_back(self, bucket: int) -> None:
        block = self._blocks[bucket]
        assert block.lent
        block.lent = False
        block.newer = True
        self._versions[bucket] += 1
        self._begin_writing(block)

    def _copy(self, bucket: int, memory: np.ndarray) -> bool:
        """Copy a bucket's states to ``memory``. Return False if they must be read from disk instead."""
        if (block := self._readable(bucket)) is not None:
            np.copyto(memory, block.slot[: memory.size])
            return True
        return bucket not in self._stored  # zeros, as new memory is

    def _read(self, bucket: int, name: str, at: int, out: np.ndarray) -> bool:
        if (block := self._readable(bucket)) is not None:
            block.arrays[name].read(at, out)
            return True
        if bucket in self._stored:
            return False
        out.fill(0)
        return True

    def _bytes_here(self, bucket: int, span: Span) -> np.ndarray | None:
        """Return a copy of bytes of a block; None: they must be read from disk."""
        memory = np.zeros(span.n_bytes, np.uint8)
        return memory if self._copy_bytes(bucket, span, memory) else None

    def _copy_bytes(self, bucket: int, span: Span, memory: np.ndarray) -> bool:
        if (block := self._readable(bucket)) is not None:
            np.copyto(memory[: span.n_bytes], block.slot[span.start : span.start + span.n_bytes])
            return True
        if bucket in self._stored:
            return False
        memory[: span.n_bytes] = 0
        return True

    def _readable(self, bucket: int) -> Block | None:
        """Return the block in its slot if it is valid: not lent, not arriving. Else None: read the block on disk."""
        block = self._in_slot(bucket)
        if block is None or block.lent or (block.arriving is not None and not block.arriving.done()):
            return None
        return block

    def _write(self, bucket: int, name: str, at: int, values: np.ndarray) -> None:
        self._drop_lent()
        block = self._in_slot(bucket) or self._fetch(bucket)
        self._await_arrived(block)
        with suppress(DiskError):  # the block will be written again, with these values
            self._await_left(block)
        block.arrays[name][at : at + values.size].write(values)
        block.newer = True
        block.failed = None
        self._versions[bucket] += 1
        self._blocks[bucket] = self._blocks.pop(bucket)

    def _end(self) -> None:
        """Write all newer blocks, and wait for all transfers."""
        for block in self._blocks.values():
            if block.newer and block.leaving is None:
                self._begin_writing(block)
        for block in [*self._blocks.values()]:
            self._settle(block)

    def _await_all(self) -> None:
        """Wait for all transfers, and ignore their errors."""
        for block in self._blocks.values():
            for transfer in (block.arriving, block.leaving):
                if transfer is not None:
                    transfer.error()

    # --- slots ---------------------------------------------------------------------------------------

    def _in_slot(self, bucket: int) -> Block | None:
        """Return the block if it is in a slot or arriving there. Drop it, and return None, if its read has failed."""
        block = self._blocks.get(bucket)
        if block is None or block.arriving is None or not block.arriving.done() or block.arriving.error() is None:
            return block
        self._drop(block)
        return None

    def _fetch(self, bucket: int, slot: np.ndarray | None = None) -> Block:
        """Begin to read a bucket's block."""
        slot = self._slot() if slot is None else slot
        layout = self._layouts[bucket]
        block = self._blocks[bucket] = Block(bucket, slot, layout.arrays(slot, self._threads))
        if bucket in self._stored:
            block.arriving = self._files.read(self._starts[bucket], slot[: layout.n_bytes])
        else:
            slot[: layout.n_bytes] = 0
        return block

    def _slot(self) -> np.ndarray:
        """Return a free slot, or else the slot of the block whose next use is farthest."""
        if self._free:
            return self._free.pop()
        soon = {bucket: i for i, bucket in enumerate(reversed(self._upcoming()), 1)}
        idle = [block for block in self._blocks.values() if not block.lent]
        block = min(idle, key=lambda block: (soon.get(block.bucket, 0), block.newer, block.leaving is not None))
        if block.newer and block.leaving is None:
            self._begin_writing(block)
        if block.arriving is not None:
            block.arriving.error()  # nobody needs the block: ignore the error
        self._await_left(block)
        del self._blocks[block.bucket]
        return block.slot

    def _drop_lent(self) -> None:
        """Drop blocks that are still lent: their update broke off, because one thread at a time updates."""
        for block in [block for block in self._blocks.values() if block.lent]:
            self._drop(block)

    def _drop(self, block: Block) -> None:
        """Free the block's slot. The valid block is then the one on disk."""
        for transfer in (block.arriving, block.leaving):
            if transfer is not None:
                transfer.error()
        if self._blocks.get(block.bucket) is block:
            del self._blocks[block.bucket]
            self._free.append(block.slot)

    def _settle(self, block: Block) -> None:
        """Wait until the block is neither arriving nor leaving, and raise its error."""
        self._await_arrived(block)
        self._await_left(block)

    def _await_arrived(self, block: Block) -> None:  # waits
        if block.arriving is not None and (error := block.arriving.error()) is not None:
            self._drop(block)
            raise error
        block.arriving = None

    def _await_left(self, block: Block) -> None:  # waits
        if block.leaving is not None:
            error, block.leaving = block.leaving.error(), None
            if error is not None:
                raise error  # the block stays newer, and is written again when its slot is needed
            block.newer = False
            self._stored.add(block.bucket)

    def _begin_writing(self, block: Block) -> None:
        if block.leaving is None:
            memory = block.slot[: self._layouts[block.bucket].n_bytes]
            block.leaving = self._files.write(self._starts[block.bucket], memory, partial(self._tell, block))

    def _tell(self, block: Block) -> None:
        """In a thread that has written a block: have the ring's thread handle the end of the write."""
        with suppress(StateError):  # the ring is closed, and has waited for the write
            self._thread.submit(partial(self._after_write, block))

    def _after_write(self, block: Block) -> None:
        try:
            self._await_left(block)  # the writing thread may not have recorded the end yet
        except BaseException as error:
            block.failed = error
        self._read_ahead()

    def _raise_failed(self) -> None:
        """Raise the error of a failed write that was not raised yet, and begin all failed writes again."""
        failed = [block for block in self._blocks.values() if block.failed is not None]
        errors = [block.failed for block in failed]
        for block in failed:
            block.failed = None
            self._begin_writing(block)
        for error in errors:
            assert error is not None
            raise error

    # --- ahead ---------------------------------------------------------------------------------------

    def _upcoming(self) -> list[int]:
        """The buckets that are lent next: first the expected ones, then the order of the last time. So the next step's
        first blocks are read as soon as this step's last blocks leave slots free."""
        found = [*self._expected][:SLOTS]
        at = found[-1] if found else self._last
        while len(found) < SLOTS and at is not None and (at := self._followers.get(at)) is not None and at not in found:
            found.append(at)
        return found

    def _read_ahead(self) -> None:
        """Begin to read as many upcoming blocks as there are free slots."""
        upcoming = self._upcoming()
        for bucket in upcoming:
            if bucket not in self._blocks:
                if not self._free and (block := self._spare(upcoming)) is not None:
                    del self._blocks[block.bucket]
                    self._free.append(block.slot)
                if not self._free:
                    return
                self._fetch(bucket, self._free.pop())

    def _spare(self, upcoming: list[int]) -> Block | None:
        """Return a block that need not be in memory now."""
        for block in self._blocks.values():
            busy = block.lent or block.newer or block.leaving is not None or block.bucket in upcoming
            if not busy and (block.arriving is None or block.arriving.done()):
                return block
        return None
