"""The memory that the buckets of a process already have."""

from collections.abc import Sequence

from ..layout.partition import Bucket, Kinds, kinds_of
from .terms import BucketTerms

_RESERVED = 10
"""If states may take all free memory, a tenth stays free. A plan leaves out temporary memory of autograd, the framework
and the page cache, which grows with the model. More states on disk only cost time."""
_LEAST_RESERVE = 2**30
"""At least 1 GiB stays free, because libraries take some hundred MiB beside a small model, too."""


class Allocated:
    """The sizes of existing buffers and states, so that plans of new parameters count only what these need besides.

    :class:`LocalBuckets` changes it when it adds parameters.
    """

    def __init__(self, terms: BucketTerms) -> None:
        self._terms = terms
        self.staging_slot_bytes = 0
        self.gradient_slot_bytes = 0
        self.direction_slot_bytes = 0
        self.shard_slots = (0, 0)
        """The number of slots for shards in flight from disk, and the bytes of each slot."""
        self.blocks: list[tuple[int, int]] = []
        """The states in the store's own place, in the form that :meth:`Store.working_bytes` takes."""
        self.state_budget = terms.host_budget or 0
        """The bytes of host memory that states of new buckets may take, if the store also has another place."""

    def add_states(self, buckets: Sequence[Bucket]) -> None:
        """Record the states of new buckets."""
        kept, elsewhere = self._terms.split(kinds_of(buckets), self.state_budget)
        self.state_budget = max(self.state_budget - sum(size * n for size, n in kept), 0)
        self.blocks += elsewhere

    def add_shard_slots(self, trained: Kinds, frozen: Kinds) -> None:
        """Record the slots for shards in flight from disk that new parameters have."""
        self.shard_slots = self._terms.shard_slots(trained, frozen, self.shard_slots)

    def take_free(self, free: int, others: int) -> None:
        """Have the states of new buckets take the free host memory, less a reserve.

        Args:
            free: the free bytes that this process may take.
            others: the bytes that everything else in its plan takes.
        """
        self.state_budget = max(free - others - max(free // _RESERVED, _LEAST_RESERVE), 0)
