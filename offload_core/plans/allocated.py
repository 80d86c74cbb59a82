"""Records the memory that the buckets of a process already have."""

from collections.abc import Sequence

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

    def add_states(self, buckets: Sequence[Bucket]) -> None:
        """Record the states of new buckets."""
        kept, elsewhere = self._terms.split(kinds_of(buckets), self.state_budget)
        self.state_budget = max(self.state_budget - sum(size * n for size, n in kept), 0)
        self.blocks += elsewhere

    def add_shard_slots(self, trained: Kinds, frozen: Kinds) -> None:
        """Record the slots that new parameters need for shards in flight from disk.

        Args:
            trained: the kinds of the trained parameters' buckets.
            frozen: the kinds of the frozen parameters' buckets.
        """
        self.shard_slots = self._terms.shard_slots(trained, frozen, self.shard_slots)

    def take_free(self, free: int, others: int) -> None:
        """Set :attr:`state_budget` to the free host memory, less a reserve.

        Args:
            free: the free bytes that this process may take.
            others: the bytes of host memory in the plan for all but these states.
        """
        self.state_budget = max(free - others - max(free // _RESERVED, _LEAST_RESERVE), 0)
