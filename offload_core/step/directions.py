"""The directions of an update, for rules such as Muon. A first pass of the kernel computes them from gradients and
moments, the device transforms them as whole matrices, and a second pass applies the result to the master weights."""

import numpy as np

from ..device.events import Done
from ..device.trace import UPDATE
from ..rules import Scalars
from .buckets import LocalBuckets
from .local_bucket import Direction, LocalBucket


class Directions:
    """Computes the directions of buckets. This changes no optimizer state, so a failed update can start again."""

    def __init__(self, buckets: LocalBuckets) -> None:
        self._buckets = buckets

    def start(self, bucket: LocalBucket, scalars: Scalars, among: frozenset[int] | None = None) -> None:
        """Start to compute a bucket's directions. Do nothing if the bucket's rule has none or they were started before.
        All processes call this for the same buckets in the same order.

        Args:
            among: compute the directions of these parameters only, the same on all processes; None: of all.
        """
        if bucket.matrices is None or bucket.direction is not None:
            return
        bucket.direction = bucket.executor.new_direction(bucket)
        try:
            self._compute(bucket, bucket.direction, scalars, among)
        except BaseException:
            bucket.release_direction()
            raise

    def _compute(
        self, bucket: LocalBucket, direction: Direction, scalars: Scalars, among: frozenset[int] | None
    ) -> None:
        buckets, executor = self._buckets, bucket.executor
        states = buckets.store.read(bucket.layout.index)
        for dtype, pieces in bucket.gradient.held(bucket.chosen(scalars, among)):
            segments = bucket.rule.segments(states.arrays, bucket.table.offsets[pieces], bucket.table.numels[pieces])
            segments["grad"] = bucket.gradient.arrays.addresses[pieces]
            segments["scalars"] = scalars.rows[bucket.table.params[pieces]]
            segments["param"] = direction.addresses(bucket.table.offsets[pieces])
            with buckets.trace.span(UPDATE, "directions", bucket.layout.index):
                bucket.rule.directions(executor.memory, segments, scalars, grad_dtype=dtype)
        direction.computed = executor.transform(bucket, direction, scalars.present(bucket.members, among))

    def of(
        self, bucket: LocalBucket, scalars: Scalars, among: frozenset[int] | None, then: LocalBucket | None
    ) -> np.ndarray | None:
        """Wait for a bucket's directions. Return the address of the direction of each piece; None: the bucket's rule
        has no directions.

        Args:
            among: compute the directions of these parameters only; None: of all.
            then: the next bucket. Its directions are started before this call waits.
        """
        self.start(bucket, scalars, among)
        if then is not None:
            self.start(then, scalars)
        if bucket.direction is None:
            return None
        try:
            bucket.executor.run_after(bucket.direction.computed)
        except BaseException:
            bucket.release_direction()
            raise
        bucket.direction.computed = Done()  # the wait exchanges it between ranks, so it must not be repeated
        return bucket.direction.addresses(bucket.table.offsets)
