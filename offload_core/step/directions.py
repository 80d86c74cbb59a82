"""The directions of an update: whole matrices that the device transforms between the two passes of the kernel."""

import numpy as np

from ..device.events import Done
from ..device.trace import UPDATE
from ..dtypes import BFLOAT16
from ..memory.host_memory import Lease
from ..rules import Scalars
from .buckets import LocalBuckets
from .local_bucket import Direction, LocalBucket


class Directions:
    """Computes directions. This changes no state, so an update that failed can start again."""

    def __init__(self, buckets: LocalBuckets) -> None:
        self._buckets = buckets

    def start(self, work: LocalBucket, scalars: Scalars, among: frozenset[int] | None = None) -> None:
        """Start to compute a bucket's directions, once, if it has any. All processes call it in the same order.

        Args:
            among: only these parameters, the same on all processes.
        """
        buckets = self._buckets
        if work.matrices is None or work.direction is not None:
            return
        assert buckets.directions is not None
        lease = Lease(buckets.directions)
        shards = lease.borrow(len(buckets.device.ranks) * work.bucket.shard_numel, BFLOAT16.numpy)
        work.direction = Direction(shards, lease)
        try:
            self._compute(work, work.direction, scalars, among)
        except BaseException:
            work.release_direction()
            raise

    def _compute(self, work: LocalBucket, direction: Direction, scalars: Scalars, among: frozenset[int] | None) -> None:
        assert work.matrices is not None
        buckets = self._buckets
        states = buckets.store.read(work.bucket.index)
        for dtype, pieces in work.gradient.held(work.chosen(scalars, among)):
            segments = work.rule.segments(states.arrays, work.table.offsets[pieces], work.table.numels[pieces])
            segments["grad"] = work.gradient.arrays.addresses[pieces]
            segments["scalars"] = scalars.rows[work.table.params[pieces]]
            segments["param"] = direction.addresses(work.table.offsets[pieces])
            with buckets.trace.span(UPDATE, "directions", work.bucket.index):
                work.rule.directions(segments, scalars, grad_dtype=dtype, threads=buckets.threads)
        matrices = work.matrices.of_params(scalars.present(work.members, among))
        direction.computed = buckets.device.transform(work.bucket, matrices, direction.shards, direction.lease)

    def of(
        self, work: LocalBucket, scalars: Scalars, among: frozenset[int] | None, then: LocalBucket | None
    ) -> np.ndarray | None:
        """Return the address of each piece's direction; None: the bucket has none.

        Args:
            then: the next bucket, started before this one is waited for.
        """
        self.start(work, scalars, among)
        if then is not None:
            self.start(then, scalars)
        if work.direction is None:
            return None
        try:
            work.direction.computed.wait()
        except BaseException:
            work.release_direction()
            raise
        work.direction.computed = Done()  # the wait exchanges it between ranks, so it must not be repeated
        return work.direction.addresses(work.table.offsets)
