"""The slots of a ring (``ring.py``): host memory for a few buckets' states. Each bucket also has a block on disk.

**Content**: the copy of a bucket's states in a slot, compared with the copy on disk.

======  =============================================================================
state   the valid states of the bucket are
======  =============================================================================
CLEAN   in the slot and on disk, and the slot may be reused
NEWER   in the slot, and not yet written to disk
LENT    on disk; an update changes the copy in the slot, until it gives the copy back
======  =============================================================================

If an update breaks off, the ring drops its LENT copy.

**In flight**: transfers that nobody has waited for yet. A copy does not change until its transfer has ended.

========  ============  =======================================================================
field     content       from, until
========  ============  =======================================================================
arriving  CLEAN, LENT   the read begins, until somebody who changes the copy has waited for the read
leaving   NEWER         the write begins, until somebody has waited for the write
========  ============  =======================================================================
"""

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..disk.scratch import ScratchFiles, Transfer
from ..errors import DiskError, StateError
from ..memory.host_memory import HostMemory
from ..memory.plan import BLOCKS
from ..support.state_machine import Named, StateMachine
from ..support.threads import Task
from .arrays import StateArray
from .block_layout import BlockLayout, ByteRange

SLOTS = 4
"""The most slots: one for a block that is updated, one for a block that is written, and two for blocks that are read.
With three slots, a read would wait for a write."""


class Content(Named):
    CLEAN = "equal to the disk's"
    NEWER = "newer than the disk's"
    LENT = "lent to an update"


class ContentEvent(Named):
    LEND = "lend"
    GIVE_BACK = "give back"
    CHANGE = "change from outside"
    SAVE = "save"


C, CE = Content, ContentEvent
CONTENT: dict[tuple[Content, ContentEvent], Content] = {
    (C.CLEAN, CE.LEND): C.LENT,
    (C.LENT, CE.GIVE_BACK): C.NEWER,
    (C.CLEAN, CE.CHANGE): C.NEWER,
    (C.NEWER, CE.CHANGE): C.NEWER,
    (C.NEWER, CE.SAVE): C.CLEAN,
}


@dataclass(eq=False)
class BlockOnDisk:
    """A bucket's block on disk."""

    bucket: int
    layout: BlockLayout
    start: int
    """The offset at which the block begins in the scratch files, in bytes."""
    version: int = 0
    """How often the bucket's states have changed so far."""
    saved: bool = False
    """True if the block was ever written to disk. Until then the states on disk count as zeros."""


class LoadedBlock(StateMachine[Content, ContentEvent]):
    """The copy of a bucket's states in a slot."""

    def __init__(self, on_disk: BlockOnDisk, slot: np.ndarray, arrays: dict[str, StateArray]) -> None:
        super().__init__(f"states of bucket {on_disk.bucket}", C.CLEAN, CONTENT)
        self.on_disk = on_disk
        self.bucket = on_disk.bucket
        self.slot = slot
        self.arrays = arrays
        self.arriving: Transfer | None = None
        self.leaving: Transfer | None = None
        self.failed: BaseException | None = None
        """The error of the block's last write, until :meth:`Slots.lend` raises it."""


class Slots:
    """The slots of a ring, and the copies of buckets' states in these slots. Only the ring's thread calls the methods.

    Args:
        threads: the number of threads that decode and encode.
        submit: gives the ring's thread a task.
    """

    def __init__(
        self,
        files: ScratchFiles,
        memory: HostMemory,
        threads: int,
        submit: Callable[[Callable[[], None]], Task[None]],
    ) -> None:
        self._files = files
        self._memory = memory
        self._threads = threads
        self._submit = submit
        self.on_disk: dict[int, BlockOnDisk] = {}
        """The block of each bucket, by the bucket's index. Any thread may read this attribute."""
        self._blocks: dict[int, LoadedBlock] = {}
        """The copies in slots, by the bucket's index, least recently used first."""
        self._free: list[np.ndarray] = []
        self._slot_bytes = 0
        self._expected: deque[int] = deque()
        self._followers: dict[int, int] = {}
        """Maps a bucket to the bucket that was lent next when the first one was last lent."""
        self._last: int | None = None
        """The bucket that was lent last."""

    # --- what the ring asks for ----------------------------------------------------------------------

    def add(self, new: Mapping[int, BlockOnDisk]) -> None:
        n_bytes = max(self._slot_bytes, *(each.layout.n_bytes for each in new.values()))
        if n_bytes > self._slot_bytes:
            self._end()
            self._blocks.clear()
            self._free.clear()
            self._slot_bytes = n_bytes
        n_slots = min(SLOTS, len(self.on_disk) + len(new))
        for _ in range(n_slots - len(self._free) - len(self._blocks)):
            self._free.append(self._memory.allocate(BLOCKS, n_bytes, np.dtype(np.uint8)))
        self.on_disk |= new

    def expect(self, buckets: list[int]) -> None:
        self._expected = deque([bucket for bucket in self._expected if bucket not in buckets] + buckets)
        self._read_ahead()

    def lend(self, bucket: int) -> LoadedBlock:
        """Return a block for an update to change. The caller waits for ``block.arriving`` before it changes the
        block."""
        self._raise_failed()
        self._drop_lent()
        block = self._in_slot(bucket) or self._fetch(bucket)
        self._begin_writing(block)
        self._await_left(block)
        block.on(CE.LEND)
        self._blocks[bucket] = self._blocks.pop(bucket)
        while bucket in self._expected and self._expected.popleft() != bucket:
            pass
        if self._last is not None:
            self._followers[self._last] = bucket
        self._last = bucket
        self._read_ahead()
        return block

    def give_back(self, bucket: int) -> None:
        block = self._blocks[bucket]
        block.on(CE.GIVE_BACK)
        block.on_disk.version += 1
        self._begin_writing(block)

    def copy(self, bucket: int, span: ByteRange, memory: np.ndarray) -> bool:
        """Copy the bytes ``span`` of a bucket's block to ``memory``. Return False if the caller must read these bytes
        from disk instead."""
        if (block := self._readable(bucket)) is not None:
            np.copyto(memory[: span.n_bytes], block.slot[span.start : span.start + span.n_bytes])
            return True
        if self.on_disk[bucket].saved:
            return False
        memory[: span.n_bytes] = 0
        return True

    def read(self, bucket: int, name: str, at: int, out: np.ndarray) -> bool:
        """Copy elements ``[at, at + out.size)`` of a state to ``out``, an array of any floating-point type. Return
        False if the caller must read these elements from disk instead."""
        if (block := self._readable(bucket)) is not None:
            block.arrays[name].read(at, out)
            return True
        if self.on_disk[bucket].saved:
            return False
        out.fill(0)
        return True

    def write(self, bucket: int, name: str, at: int, values: np.ndarray) -> None:
        """Replace elements ``[at, at + values.size)`` of a state by ``values``, rounded to nearest."""
        self._drop_lent()
        block = self._in_slot(bucket) or self._fetch(bucket)
        self._await_arrived(block)
        with suppress(DiskError):  # the block will be written again, with these values
            self._await_left(block)
        block.arrays[name][at : at + values.size].write(values)
        block.on(CE.CHANGE)
        block.failed = None
        block.on_disk.version += 1
        self._blocks[bucket] = self._blocks.pop(bucket)

    def drop(self, block: LoadedBlock) -> None:
        """Free the slot of this block. The valid states of the bucket are then the states on disk."""
        for transfer in (block.arriving, block.leaving):
            if transfer is not None:
                transfer.error()
        if self._blocks.get(block.bucket) is block:
            del self._blocks[block.bucket]
            self._free.append(block.slot)

    def await_all(self) -> None:
        """Wait for all transfers, and ignore their errors."""
        for block in self._blocks.values():
            for transfer in (block.arriving, block.leaving):
                if transfer is not None:
                    transfer.error()

    # --- slots ---------------------------------------------------------------------------------------

    def _readable(self, bucket: int) -> LoadedBlock | None:
        """Return the bucket's block if a slot contains its valid states. Return None if no slot contains the block, or
        the block is LENT or still arriving. The caller then reads from disk."""
        block = self._in_slot(bucket)
        if block is None or block.state is C.LENT or (block.arriving is not None and not block.arriving.done()):
            return None
        return block

    def _in_slot(self, bucket: int) -> LoadedBlock | None:
        """Return the bucket's block if it is in a slot or arriving there, else None. If its read has failed, drop the
        block and return None."""
        block = self._blocks.get(bucket)
        if block is None or block.arriving is None or not block.arriving.done() or block.arriving.error() is None:
            return block
        self.drop(block)
        return None

    def _fetch(self, bucket: int, slot: np.ndarray | None = None) -> LoadedBlock:
        """Begin to read a bucket's block from disk to ``slot``.

        Args:
            slot: a free slot; None: choose one.
        """
        slot = self._slot() if slot is None else slot
        there = self.on_disk[bucket]
        block = self._blocks[bucket] = LoadedBlock(there, slot, there.layout.arrays(slot, self._threads))
        if there.saved:
            block.arriving = self._files.read(there.start, slot[: there.layout.n_bytes])
        else:
            slot[: there.layout.n_bytes] = 0
        return block

    def _slot(self) -> np.ndarray:
        """Return a free slot. If there is none, free the slot of a block that is not lent and whose next use is
        farthest."""
        if self._free:
            return self._free.pop()
        soon = {bucket: i for i, bucket in enumerate(reversed(self._upcoming()), 1)}
        idle = [block for block in self._blocks.values() if block.state is not C.LENT]
        block = min(
            idle, key=lambda block: (soon.get(block.bucket, 0), block.state is C.NEWER, block.leaving is not None)
        )
        self._begin_writing(block)
        if block.arriving is not None:
            block.arriving.error()  # nobody needs the block: ignore the error
        self._await_left(block)
        del self._blocks[block.bucket]
        return block.slot

    def _drop_lent(self) -> None:
        """Drop all LENT blocks. One thread at a time updates, so the update of such a block broke off."""
        for block in [block for block in self._blocks.values() if block.state is C.LENT]:
            self.drop(block)

    def _end(self) -> None:
        """Write all NEWER blocks, and wait for all transfers."""
        for block in self._blocks.values():
            self._begin_writing(block)
        for block in [*self._blocks.values()]:
            self._await_arrived(block)
            self._await_left(block)

    # --- transfers -----------------------------------------------------------------------------------

    def _await_arrived(self, block: LoadedBlock) -> None:  # waits
        if block.arriving is not None and (error := block.arriving.error()) is not None:
            self.drop(block)
            raise error
        block.arriving = None

    def _await_left(self, block: LoadedBlock) -> None:  # waits
        if block.leaving is not None:
            error, block.leaving = block.leaving.error(), None
            if error is not None:
                raise error  # the block stays newer, and is written again when its slot is needed
            block.on(CE.SAVE)
            block.on_disk.saved = True

    def _begin_writing(self, block: LoadedBlock) -> None:
        """Begin to write a block if it is NEWER and no write is in flight."""
        if block.state is C.NEWER and block.leaving is None:
            there = block.on_disk
            memory = block.slot[: there.layout.n_bytes]
            block.leaving = self._files.write(there.start, memory, partial(self._tell, block))

    def _tell(self, block: LoadedBlock) -> None:
        """Submit a task to the ring's thread that handles the end of a write. The thread that wrote calls this."""
        with suppress(StateError):  # the ring is closed, and has waited for the write
            self._submit(partial(self._after_write, block))

    def _after_write(self, block: LoadedBlock) -> None:
        try:
            self._await_left(block)  # the writing thread may not have recorded the end yet
        except BaseException as error:
            block.failed = error
        self._read_ahead()

    def _raise_failed(self) -> None:
        """If writes have failed since the last call, begin all of them again, and raise the first error."""
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
        """Return up to ``SLOTS`` buckets that will probably be lent next: first the announced buckets, then the buckets
        that followed them when they were last lent. So the ring reads the next step's first blocks as soon as this
        step's last blocks leave slots free."""
        found = [*self._expected][:SLOTS]
        at = found[-1] if found else self._last
        while len(found) < SLOTS and at is not None and (at := self._followers.get(at)) is not None and at not in found:
            found.append(at)
        return found

    def _read_ahead(self) -> None:
        """Begin to read upcoming blocks, until no slot is free and no block in a slot can be spared."""
        upcoming = self._upcoming()
        for bucket in upcoming:
            if bucket not in self._blocks:
                if not self._free and (block := self._spare(upcoming)) is not None:
                    del self._blocks[block.bucket]
                    self._free.append(block.slot)
                if not self._free:
                    return
                self._fetch(bucket, self._free.pop())

    def _spare(self, upcoming: list[int]) -> LoadedBlock | None:
        """Return a CLEAN block whose read has ended and whose bucket is not in ``upcoming``; None: there is none."""
        for block in self._blocks.values():
            busy = block.state is not C.CLEAN or block.bucket in upcoming
            if not busy and (block.arriving is None or block.arriving.done()):
                return block
        return None
