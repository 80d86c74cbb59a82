"""The host memory in which gradients wait for their update.

Each bucket has memory of its own (*home*), or all pass through a few slots: where a bucket's update follows its
arrival (``BucketTerms.lends_gradient_memory``). A slot is a bucket's from its launch until its update has read it, or
its gradients are dropped; ``LocalBucket.home`` alone says so, and an interrupt can therefore lose none.

The update of a bucket may have to wait for ``step()`` after all: if nobody announced the step (a plain
``loss.backward()``), or another rank does not take part. If such buckets hold all slots, waiting would be for ever, and
the next bucket gets memory of its own, for good.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..device.protocols import Device
from ..dtypes import ElementType
from ..errors import HostMemoryWarning
from ..layout.partition import Bucket
from ..memory.host_memory import HostMemory, format_bytes
from ..plans.terms import GRADIENT_SLOTS, GRADIENTS_ON_HOST, BucketTerms, as_it_stays
from ..support.user_line import UserLine
from .local_bucket import LocalBucket


@dataclass(eq=False)
class _Slot:
    memory: np.ndarray
    lent: np.ndarray | None = None
    """The part of it that was lent last."""
    holder: LocalBucket | None = None
    """The bucket that it was lent to last."""
    turn: int = 0
    """Slots that were lent before this one."""

    @property
    def held(self) -> bool:
        return self.holder is not None and self.holder.home is self.lent


class GradientMemory:
    """Gives buckets the memory in which their gradients wait."""

    def __init__(self, memory: HostMemory, device: Device, terms: BucketTerms) -> None:
        self._memory = memory
        self._device = device
        self._terms = terms
        self._slots: list[_Slot] = []
        self._turns = 0
        self._warned = False

    def take_on(self, buckets: Sequence[Bucket]) -> list[np.ndarray | None]:
        """Allocate for new buckets. The memory that each has of its own; None: it gets a slot, or needs none."""
        slot_bytes = self._terms.gradient_slot_bytes(buckets)
        if slot_bytes is None:
            return [self.allocate(b, self._terms.home_dtype(b)) if self._terms.has_home else None for b in buckets]
        if slot_bytes > self._terms.lent_bytes:
            self._slots = []  # free before allocating their successors; a bucket that holds one keeps it
            pinned = any(self._arrives_as(bucket, self._terms.home_dtype(bucket)) for bucket in buckets)
            for _ in range(GRADIENT_SLOTS):
                array = self._memory.allocate(GRADIENTS_ON_HOST, slot_bytes, np.dtype(np.uint8), pinned=pinned)
                self._slots.append(_Slot(array))
            self._terms.gradient_slots_were_made(slot_bytes)
        return [None] * len(buckets)

    def allocate(self, bucket: Bucket, dtype: ElementType) -> np.ndarray:
        """Memory of a bucket's own."""
        numel = len(self._device.ranks) * bucket.shard_numel
        return self._memory.allocate(GRADIENTS_ON_HOST, numel, dtype.numpy, pinned=self._arrives_as(bucket, dtype))

    def _arrives_as(self, bucket: Bucket, dtype: ElementType) -> bool:
        """True if the device's copies may end there."""
        return self._device.sizes.arrival(self._terms.wire(bucket)) == as_it_stays(dtype)

    @property
    def has_free(self) -> bool:
        return not all(slot.held for slot in self._slots)

    def holders(self) -> list[LocalBucket]:
        """The buckets that were lent a slot, in the order in which they got it."""
        return [slot.holder for slot in sorted(self._slots, key=lambda slot: slot.turn) if slot.holder is not None]

    def lend(self, work: LocalBucket) -> None:
        """Give a bucket a free slot; if there is none, memory of its own."""
        dtype = self._terms.home_dtype(work.bucket)
        slot = next((slot for slot in self._slots if not slot.held), None)
        if slot is None:
            self._warn(work)
            work.own = work.home = self.allocate(work.bucket, dtype)
            return
        n_bytes = self._terms.home_bytes(work.bucket)
        slot.turn = self._turns = self._turns + 1
        slot.lent = slot.memory[:n_bytes].view(dtype.numpy)
        slot.holder = work
        work.home = slot.lent

    def _warn(self, work: LocalBucket) -> None:
        if self._warned:
            return
        self._warned = True
        UserLine.now().warn(
            HostMemoryWarning(
                f"bucket {work.bucket.index}: {format_bytes(self._terms.home_bytes(work.bucket))} of gradients wait on "
                f"the host for step(), beside {len(self._slots)} buckets that are planned; with "
                "update_in_backward=True updates should follow backward, and this one was not announced: expected "
                "engine.backward(loss) outside gathered_parameters(), and no compiled modules, else "
                "update_in_backward=False"
            )
        )
