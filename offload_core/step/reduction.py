"""Brings a bucket's gradients from the device, through the reduction over the ranks, to the host memory in which they
wait for the update."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..device.events import Done, WaitedOnce
from ..device.protocols import Arrival, HostArrays
from ..device.trace import REDUCTION
from ..dtypes import BY_NUMPY, FLOAT32
from ..errors import GradientError
from ..memory.host_memory import Lease
from ..native import kernels
from ..native.grad_norm import SumOfSquares
from ..plans.terms import as_it_stays
from .bucket_states import GradientEvent
from .buckets import LocalBuckets
from .local_bucket import LocalBucket


class Reduction:
    """Brings the gradients of launched buckets to the host, where they stay until the update."""

    def __init__(self, buckets: LocalBuckets) -> None:
        self._buckets = buckets
        self.last = WaitedOnce(Done())
        """The arrival of the bucket that was launched last."""

    def check(self, param: int, gradient: Any) -> None:
        """Raise :class:`GradientError` if ``gradient`` does not have the parameter's number of elements, or its element
        type is not the parameter's. Any element type is allowed with ``communication_dtype`` or ``layerwise``, or
        if the update reads gradients in place."""
        spec = self._buckets.params[param]
        numel, dtype = self._buckets.device.numel(gradient), self._buckets.device.dtype(gradient)
        if numel != spec.numel:
            raise GradientError(
                f"parameter {spec.name!r}: gradient has {numel} elements, expected {spec.numel}; "
                "was the parameter resized after wrap()?"
            )
        config = self._buckets.config
        rounds = not (self._buckets.terms.direct or config.layerwise) and config.communication_dtype is None
        if dtype is not spec.dtype and rounds:
            raise GradientError(
                f"parameter {spec.name!r}: gradient is {dtype}, expected {spec.dtype} as the parameter is: it would be "
                f"rounded on its way; set communication_dtype={dtype.name!r}"
            )

    def launch(self, bucket: LocalBucket, *, examine: bool) -> frozenset[int]:
        """Start to reduce the gradients of this bucket over the ranks, and to copy them to their owners' host memory.

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
        if self._buckets.terms.direct:
            if gradients:  # they may have been dropped
                self._keep(bucket, gradients)
            bucket.gradient.on(GradientEvent.LAND)
            return frozenset(gradients)
        try:
            self._reduce(bucket, gradients, examine=examine)
        except BaseException:
            self._buckets.recover()
            raise
        return frozenset(gradients)

    def _reduce(self, bucket: LocalBucket, gradients: Mapping[int, Any], *, examine: bool) -> None:
        """Have the device reduce the bucket's gradients. The worker adds the result to the gradients of earlier
        micro-steps."""
        buckets = self._buckets
        assert buckets.staging is not None
        buckets.await_buffer(bucket)
        layout, gradient = bucket.layout, bucket.gradient
        arrival, buffer = gradient.arrival, gradient.buffer
        assert buffer is not None
        stays = arrival == as_it_stays(BY_NUMPY[buffer.dtype]) and not gradient.has_landed
        if len(buckets.in_staging) == buckets.worker.depth:
            oldest, landed = buckets.in_staging.popleft()
            buckets.wait(landed, oldest.layout.index)
        bucket.lease = Lease(buckets.staging)
        numel = arrival.parts * buffer.size
        received = buffer if stays else bucket.lease.borrow(numel, arrival.dtype.numpy)
        reduced = buckets.device.reduce(layout, gradient.comm_dtype, gradients, received, bucket.lease)
        self.last = event = WaitedOnce(reduced)  # the last bucket's memory must not stay lent until the next launch
        del reduced

        def land() -> None:
            event.wait()
            if not stays:
                with buckets.trace.span(REDUCTION, "sum", layout.index, received.nbytes):
                    self._sum(bucket, arrival, received)
            bucket.release()
            gradient.arrays = gradient.in_buffer()
            if examine:
                squares = SumOfSquares()
                self._square(bucket, squares)
                gradient.squares = squares
            gradient.on(GradientEvent.LAND)

        staged = len(bucket.lease)
        bucket.give(landed := buckets.worker.submit(land))
        if staged:
            buckets.in_staging.append((bucket, landed))

    def _sum(self, bucket: LocalBucket, arrival: Arrival, received: np.ndarray) -> None:
        """For each shard, sum the parts that the device delivered, in order and in fp32, divide the sum once, and add
        it to the gradients of earlier micro-steps.

        Args:
            received: the parts of all shards, end to end.
        """
        add = bucket.gradient.has_landed
        buffer = self._buckets.promote(bucket)
        n_ranks, threads = len(self._buckets.device.ranks), self._buckets.threads
        for parts, shard in zip(received.reshape(n_ranks, -1), buffer.reshape(n_ranks, -1), strict=True):
            kernels.reduce(
                parts, arrival.parts, arrival.dtype, shard, divisor=arrival.divisor, add=add, threads=threads
            )

    def _keep(self, bucket: LocalBucket, gradients: Mapping[int, Any]) -> None:
        """Set the host gradients of a bucket whose gradients are host memory. If no gradient is to be added to another,
        the update reads ``gradients`` in place. Otherwise sum them in the bucket's fp32 buffer."""
        pieces = np.array(
            [bucket.table.positions[param][0] for param in gradients]
        )  # this process has whole parameters
        arrived = self._buckets.device.host_arrays([*gradients.values()]).begin_at(bucket.table.starts[pieces])
        held = bucket.gradient.arrays  # keeps the arrays alive until they have been read
        waits = held.addresses[pieces] != 0
        if bucket.gradient.buffer is None and not self._buckets.terms.sums and not waits.any():
            bucket.gradient.hold(pieces, arrived)
            return
        self._buckets.promote(bucket)
        buffer, threads = bucket.gradient.in_buffer().of(pieces), self._buckets.threads
        numels = bucket.table.numels[pieces]
        first = HostArrays(
            np.where(waits, held.addresses[pieces], arrived.addresses),
            np.where(waits, held.codes[pieces], arrived.codes),
            (),
        )
        for dtype, rows in first.by_type(first.addresses != buffer.addresses):
            spans = kernels.spans(first.addresses[rows], buffer.addresses[rows], numels[rows])
            kernels.cast(spans, dtype, FLOAT32, threads=threads)
        for dtype, rows in arrived.by_type(waits):
            spans = kernels.spans(arrived.addresses[rows], buffer.addresses[rows], numels[rows])
            kernels.accumulate(spans, dtype, threads=threads)
        bucket.gradient.hold(pieces, buffer)

    def _square(self, bucket: LocalBucket, total: SumOfSquares) -> None:
        with self._buckets.trace.span(REDUCTION, "norm", bucket.layout.index):
            for dtype, pieces in bucket.gradient.held(bucket.table.counted):
                spans = kernels.spans(bucket.gradient.arrays.addresses[pieces], 0, bucket.table.numels[pieces])
                total.add(spans, dtype, threads=self._buckets.threads)

    def add_squares(self, total: SumOfSquares) -> None:
        """Add the squares of all host gradients to ``total``. A bucket's gradients are read only if their squares were
        not summed on arrival."""
        for bucket in self._buckets.all:
            if bucket.gradient.squares is None:
                self._square(bucket, total)
            else:
                total.bins += bucket.gradient.squares.bins
