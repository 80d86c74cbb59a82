"""The host memory in which gradients wait for their update.

Each bucket borrows a *buffer* for its gradients when it is launched, and returns the buffer when its update has read
the gradients, or when they are dropped. Between a return and the next launch, other engines of the process may borrow
the buffer (``memory/working_memory.py``). If each update follows the arrival of its bucket's gradients
(``BucketTerms.lends_gradient_memory``), all buckets share a few slots instead. Only ``BucketGradient.buffer`` records
which bucket has a buffer, so that an interrupt cannot lose one. If kernels read gradients in place
(``BucketTerms.gradients_in_place``), each bucket keeps private memory for its sums.

A bucket in a slot must wait for ``step()`` if nobody announced the step (a plain ``loss.backward()``), or if another
rank does not take part. If such buckets have all slots, no slot gets free. Then the next bucket gets private memory,
and keeps it.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..device.protocols import Device, HostArray
from ..dtypes import ElementType
from ..errors import HostMemoryWarning
from ..layout.partition import Bucket
from ..memory.host_memory import HostMemory, Reservation, format_bytes
from ..plans.allocated import Allocated
from ..plans.terms import GRADIENT_SLOTS, GRADIENTS_ON_HOST, BucketTerms
from ..support.user_line import UserLine
from .local_bucket import LocalBucket


@dataclass(eq=False)
class _BufferSlot:
    holder: LocalBucket | None = None
    """The bucket that borrowed the slot last."""
    lent: "weakref.ref[np.ndarray] | None" = None
    """The buffer of the last loan. The bucket keeps this array alive as long as it has the slot."""
    turn: int = 0
    """The count of all loans of slots at this slot's last loan: the slot that was lent first has the smallest."""

    @property
    def held(self) -> bool:
        buffer = None if self.lent is None else self.lent()
        if buffer is None or self.holder is None or self.holder.gradient.buffer is None:
            return False
        return self.holder.gradient.buffer.owner is buffer


class GradientMemory:
    """Gives buckets the memory in which their gradients wait."""

    def __init__(self, memory: HostMemory, device: Device, terms: BucketTerms, allocated: Allocated) -> None:
        self._memory = memory
        self._device = device
        self._terms = terms
        self._allocated = allocated
        self._buffers: dict[int, Reservation] = {}
        """Maps a bucket's index to the reservation from which the bucket borrows its gradient buffer. A bucket that
        borrows a slot has no entry."""
        self._of_slots: Reservation | None = None
        self._slots: list[_BufferSlot] = []
        self._turns = 0
        self._warned = False

    def register(self, buckets: Sequence[Bucket]) -> list[HostArray | None]:
        """Reserve gradient memory for new buckets. Return, for each bucket, its private memory; None: the bucket
        borrows a buffer, or needs none."""
        terms = self._terms
        if terms.gradients_in_place:
            own = [self.allocate(b, terms.buffer_dtype(b)) if terms.has_buffer else None for b in buckets]
            return [None if each is None else HostArray.of(each) for each in own]
        existing = self._allocated.gradient_slot_bytes
        slot_bytes = terms.gradient_slot_bytes([(bucket, 1) for bucket in buckets], existing)
        if slot_bytes is None:
            for pinned in (True, False):
                alike = [bucket for bucket in buckets if terms.buffer_is_pinned(bucket) is pinned]
                sizes = [terms.buffer_bytes(bucket) for bucket in alike]
                buffers = self._memory.reserve(GRADIENTS_ON_HOST, sizes, pinned=pinned)
                self._buffers |= dict.fromkeys((bucket.index for bucket in alike), buffers)
        elif slot_bytes > existing:
            self._slots, self._of_slots = [], None  # a bucket that holds one keeps it
            pinned = any(map(terms.buffer_is_pinned, buckets))
            sizes = GRADIENT_SLOTS * [slot_bytes]
            self._of_slots = self._memory.reserve(GRADIENTS_ON_HOST, sizes, pinned=pinned)
            self._slots = [_BufferSlot() for _ in range(GRADIENT_SLOTS)]
            self._allocated.gradient_slot_bytes = slot_bytes
        return [None] * len(buckets)

    def allocate(self, bucket: Bucket, dtype: ElementType) -> np.ndarray:
        """Return new private memory for a bucket's gradients, in element type ``dtype``."""
        numel = len(self._device.ranks) * bucket.shard_numel
        pinned = self._terms.may_arrive_as(bucket, dtype)
        return self._memory.allocate(GRADIENTS_ON_HOST, numel, dtype.numpy, pinned=pinned)

    def lend(self, bucket: LocalBucket, await_use: Callable[[LocalBucket], None]) -> None:
        """Lend a bucket a buffer for its gradients. If the bucket needs a slot and no slot gets free, give it private
        memory, which it keeps.

        Args:
            await_use: waits for a bucket's task. If the task was the bucket's update, the bucket's slot is free then.
        """
        dtype = bucket.gradient.buffer_dtype
        numel = len(self._device.ranks) * bucket.layout.shard_numel
        if (buffers := self._buffers.get(bucket.layout.index)) is not None:
            bucket.gradient.buffer = HostArray.of(buffers.borrow(numel, dtype.numpy))
            return
        slot = self._free_slot()
        for lent in sorted(self._slots, key=lambda slot: slot.turn) if slot is None else ():  # the oldest first
            if lent.holder is not None:
                await_use(lent.holder)
            if (slot := self._free_slot()) is not None:
                break
        if slot is None:
            self._warn(bucket)
            bucket.gradient.private = bucket.gradient.buffer = HostArray.of(self.allocate(bucket.layout, dtype))
            return
        assert self._of_slots is not None
        buffer = self._of_slots.borrow(numel, dtype.numpy)
        slot.turn = self._turns = self._turns + 1
        slot.lent = weakref.ref(buffer)
        slot.holder = bucket
        bucket.gradient.buffer = HostArray.of(buffer)

    def _free_slot(self) -> _BufferSlot | None:
        return next((slot for slot in self._slots if not slot.held), None)

    def _warn(self, bucket: LocalBucket) -> None:
        if self._warned:
            return
        self._warned = True
        UserLine.now().warn(
            HostMemoryWarning(
                f"bucket {bucket.layout.index}: {format_bytes(self._terms.buffer_bytes(bucket.layout))} of gradients "
                f"wait on the host for step(), beside {len(self._slots)} buckets that are planned; with "
                "update_in_backward=True updates should follow backward, and this one was not announced: expected "
                "engine.backward(loss) outside gathered_parameters(), and no compiled modules, else "
                "update_in_backward=False"
            )
        )
