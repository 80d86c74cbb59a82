"""Brings a bucket's gradients through the reduction over the ranks to the memory in which they wait for the update."""

from collections.abc import Mapping
from typing import Any

from ..device.events import Done, WaitedOnce
from ..device.trace import REDUCTION
from ..native.grad_norm import SumOfSquares
from .bucket_states import GradientEvent
from .buckets import LocalBuckets
from .local_bucket import LocalBucket


class Reduction:
    """Brings the gradients of launched buckets to the memory of their executor, where they stay until the update."""

    def __init__(self, buckets: LocalBuckets) -> None:
        self._buckets = buckets
        self.last = WaitedOnce(Done())
        """The arrival of the bucket that was launched last."""

    def launch(self, bucket: LocalBucket, *, examine: bool) -> frozenset[int]:
        """Start to reduce the gradients of this bucket over the ranks, and to bring them to their owners' memory.

        Args:
            examine: True to sum the squares of the gradients when they have arrived.

        Returns:
            The parameters of the bucket that had a gradient on this rank.
        """
        if bucket.task is not None:
            self._buckets.claim(bucket)
        bucket.gradient.on(GradientEvent.LAUNCH)
        bucket.gradient.squares = None
        gradients, bucket.gradient.waiting = bucket.gradient.waiting, {}
        try:
            self._start(bucket, gradients, examine=examine)
        except BaseException:
            self._buckets.recover()
            raise
        return frozenset(gradients)

    def _start(self, bucket: LocalBucket, gradients: Mapping[int, Any], *, examine: bool) -> None:
        """Have the bucket's executor receive the gradients. The worker does the rest when they have arrived."""
        arriving, gradient = bucket.executor.receive(bucket, gradients), bucket.gradient
        if arriving is None:
            gradient.on(GradientEvent.LAND)
            return
        self.last = event = WaitedOnce(arriving.event)  # its memory must not stay lent until the next launch
        finish = arriving.finish
        del arriving

        def land() -> None:
            event.wait()
            finish()
            if examine:
                gradient.squares = self._squares(bucket)
            gradient.on(GradientEvent.LAND)

        staged = bucket.lease is not None and len(bucket.lease)
        bucket.give(landed := self._buckets.worker.submit(land))
        if staged:
            self._buckets.in_staging.append((bucket, landed))

    def _squares(self, bucket: LocalBucket) -> SumOfSquares:
        with self._buckets.trace.span(REDUCTION, "norm", bucket.layout.index):
            return bucket.executor.squares(bucket, bucket.table.counted)()

    def add_squares(self, total: SumOfSquares) -> None:
        """Add the squares of all landed gradients to ``total``. A bucket's gradients are read only if their squares
        were not summed on arrival."""
        for bucket in self._buckets.all:
            total.bins += (bucket.gradient.squares or self._squares(bucket)).bins
