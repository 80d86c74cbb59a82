"""Records the memory that the buckets of a process already have."""

from collections.abc import Collection, Sequence

from ..layout.partition import Bucket, Kinds, kinds_of
from .terms import BucketTerms

_RESERVED = 10
"""The divisor of free host memory for a reserve: if states may take all free memory, a tenth stays free. A plan leaves
out temporary memory of autograd, the framework and the page cache, which grows with the model. A larger reserve only
costs time, because more states are on disk."""
_LEAST_RESERVE = 2**30
"""The least reserve, in bytes. Libraries take some hundred MiB also with a small model."""


class Allocated:
    """The sizes of existing buffers and states. A plan of new parameters counts only the bytes beyond these.

    :class:`LocalBuckets` changes this object when it adds parameters.
    """

    def __init__(self, terms: BucketTerms) -> None:
        self._terms = terms
        self.staging_slot_bytes = 0
        self.gradient_slot_bytes = 0
        self.direction_slot_bytes = 0
        self.shard_slots = (0, 0)
        """``(number of slots for shards in flight from disk, bytes of each slot)``."""
        self.blocks: list[tuple[int, int]] = []
        """``(bytes of a bucket's states, number of buckets)`` for each kind of bucket whose states are in the store's
        own memory, such as a disk."""
        self.state_budget = terms.host_budget or 0
        """The bytes of host memory that states of new buckets may take, if the store can also keep states on disk."""

        self.device_budget = terms.device_budget
        """The device's memory that states of new buckets may take. A share is that of each set of new buckets."""
        self.reads_device = False
        """True if there is host memory through which states on the device are read."""

    def add_states(self, buckets: Sequence[Bucket], there: Collection[int]) -> None:
        """Record the states of new buckets.

        Args:
            there: the indices of the buckets whose states are in the device's memory.
        """
        mine = [bucket for bucket in buckets if bucket.index in there]
        self.reads_device = self.reads_device or bool(mine)
        if isinstance(self.device_budget, int):
            self.device_budget -= sum(map(self._terms.device_state_bytes, mine))
        rest = kinds_of([bucket for bucket in buckets if bucket.index not in there])
        kept, elsewhere = self._terms.split(rest, self.state_budget)
        self.state_budget = max(self.state_budget - sum(size * n for size, n in kept), 0)
        self.blocks += elsewhere

    def add_shard_slots(self, trained: Kinds, frozen: Kinds) -> None:
        """Record the slots that new parameters need for shards in flight from disk.

        Args:
            trained: the kinds of the trained parameters' buckets.
            frozen: the kinds of the frozen parameters' buckets.
        """
        self.shard_slots = self._terms.shard_slots(trained, frozen, self.shard_slots)

    def take_free_of_device(self, buckets: Sequence[Bucket], free: int) -> None:
        """Set :attr:`device_budget` so that states of new buckets, and the gradients that then stay on the device, fit
        into the free memory, less a reserve.

        Args:
            free: the bytes that are free beside all other rows of the plan.
        """
        left, self.device_budget = free - max(free // _RESERVED, _LEAST_RESERVE), 0
        for bucket in buckets:
            states = self._terms.device_state_bytes(bucket)
            gradients = self._terms.device_sum_bytes(bucket) or bucket.padded_numel * bucket.dtype.itemsize
            if states + gradients > left:
                return
            left -= states + gradients
            self.device_budget += states

    def take_free(self, free: int, others: int) -> None:
        """Set :attr:`state_budget` to the free host memory, less a reserve.

        Args:
            free: the free bytes that this process may take.
            others: the bytes of host memory in the plan for all but these states.
        """
        self.state_budget = max(free - others - max(free // _RESERVED, _LEAST_RESERVE), 0)
