"""The seam *executor*: the memory in which a bucket's gradients wait and its states are updated, and the kernels there.

======================  ===============================  ==================================  ==========================
executor                gradients wait in                states are in                       new parameters
======================  ===============================  ==================================  ==========================
:class:`InPlace`        the caller's memory, or a sum    host memory or on disk              are written where they are
                        in host memory
:class:`ReadInPlace`    host memory of their own, or a   host memory or on disk              are written to staging and
                        sum in host memory                                                   published
:class:`Staged`         host memory                      host memory or on disk              are written to staging and
                                                                                             published
:class:`OnDevice`       the device's memory: a copy,     the device's memory                 are written where they are,
(``on_device.py``)      or a sum, or a shard                                                 or published from there
======================  ===============================  ==================================  ==========================

An executor's kernels read and write its own memory alone. The host's have run when a call returns. A device's run
later, in the order of the calls. So an update ends with an event (:meth:`Executor.end`).
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ..device.events import Done, Event
from ..device.protocols import Device, HostArray, HostArrays
from ..device.trace import REDUCTION, TO_HOST, Trace
from ..dtypes import BFLOAT16, FLOAT32
from ..memory.host_memory import Lease, StagingRing
from ..native import kernels
from ..native.grad_norm import SumOfSquares
from ..plans.terms import BucketTerms, as_it_stays
from .gradient_memory import GradientMemory
from .local_bucket import Arriving, Direction, Executor, LocalBucket


class Surroundings(Protocol):
    """The parts of a process's buckets (``LocalBuckets``) that executors use."""

    device: Device
    terms: BucketTerms
    threads: int
    trace: Trace
    gradient_memory: GradientMemory
    staging: StagingRing | None
    directions: StagingRing | None

    def await_buffer(self, bucket: LocalBucket) -> None:  # waits
        """Ensure that the bucket has host memory for gradients."""

    def make_room(self) -> None:  # waits
        """Ensure that there is staging for another bucket."""


class BaseExecutor(Executor):
    """The common part of executors."""

    def __init__(self, buckets: Surroundings) -> None:
        # A weak reference: the buckets own this object, and their memory is free when their last owner is gone.
        self._buckets: Surroundings = weakref.proxy(buckets)
        self._device = buckets.device

    def promote(self, bucket: LocalBucket) -> HostArray:
        """Return the bucket's gradient buffer, in fp32, so that gradients can be summed there. If the bucket has no
        buffer, or one of another element type, allocate a private fp32 buffer and copy the gradients into it."""
        gradient = bucket.gradient
        if gradient.buffer is None or gradient.buffer.dtype is not FLOAT32:
            buffer = self.allocate_sums(bucket)
            if gradient.buffer is not None and gradient.has_landed:
                before = gradient.buffer
                spans = kernels.spans_of([(before.address, buffer.address, before.numel)])
                self.memory.cast(spans, before.dtype, FLOAT32)
            gradient.buffer = gradient.private = buffer
        return gradient.buffer

    def keep(self, bucket: LocalBucket, gradients: Mapping[int, Any]) -> None:
        """Set the gradients of a bucket whose gradients are in this executor's memory. If no gradient is to be added to
        another, the update reads them from :meth:`own`. Otherwise sum them in the bucket's fp32 buffer."""
        pieces = np.array(
            [bucket.table.positions[param][0] for param in gradients], np.int64
        )  # this process has whole parameters
        arrived = self.arrays([*gradients.values()]).begin_at(bucket.table.starts[pieces])
        held = bucket.gradient.arrays  # keeps the arrays alive until they have been read
        waits = held.addresses[pieces] != 0
        if bucket.gradient.buffer is None and not self._buckets.terms.sums and not waits.any():
            bucket.gradient.hold(pieces, self.own(bucket, pieces, arrived))
            return
        self.promote(bucket)
        buffer, numels = bucket.gradient.in_buffer().of(pieces), bucket.table.numels[pieces]
        first = HostArrays(
            np.where(waits, held.addresses[pieces], arrived.addresses),
            np.where(waits, held.codes[pieces], arrived.codes),
            (),
        )
        for dtype, rows in first.by_type(first.addresses != buffer.addresses):
            spans = kernels.spans(first.addresses[rows], buffer.addresses[rows], numels[rows])
            self.memory.cast(spans, dtype, FLOAT32)
        for dtype, rows in arrived.by_type(waits):
            spans = kernels.spans(arrived.addresses[rows], buffer.addresses[rows], numels[rows])
            self.memory.accumulate(spans, dtype)
        bucket.gradient.hold(pieces, buffer)

    def own(self, bucket: LocalBucket, pieces: np.ndarray, arrived: HostArrays) -> HostArrays:
        """Return the memory from which an update reads gradients that have arrived: theirs.

        Args:
            pieces: the indices of the pieces in the bucket.
            arrived: the gradient of each of these pieces.
        """
        return arrived

    def in_place(self, bucket: LocalBucket, pieces: np.ndarray, tensors: Sequence[Any]) -> np.ndarray:
        """Return the address of each piece's first element in its parameter's tensor, in this executor's memory.

        Args:
            pieces: the indices of the pieces in the bucket.
            tensors: the tensors of all parameters.
        """
        arrays = self.arrays([tensors[param] for param in bucket.table.params[pieces].tolist()])
        return arrays.addresses + (bucket.table.in_tensor[pieces] * bucket.layout.dtype.itemsize).astype(np.uintp)


class HostExecutor(BaseExecutor):
    """Kernels of host memory. They have run when a call returns."""

    def __init__(self, buckets: Surroundings) -> None:
        super().__init__(buckets)
        self.memory = kernels.HostKernels(buckets.threads)

    def allocate_sums(self, bucket: LocalBucket) -> HostArray:
        return HostArray.of(self._buckets.gradient_memory.allocate(bucket.layout, FLOAT32))

    def release(self, bucket: LocalBucket) -> None:
        pass  # the host's memory stays

    def restore(self, bucket: LocalBucket) -> None:
        pass

    def squares(self, bucket: LocalBucket, pieces: np.ndarray) -> Callable[[], SumOfSquares]:
        total = SumOfSquares()
        for dtype, rows in bucket.gradient.held(pieces):
            spans = kernels.spans(bucket.gradient.arrays.addresses[rows], 0, bucket.table.numels[rows])
            total.add(spans, dtype, threads=self._buckets.threads)
        return lambda: total

    def read_gradient(self, bucket: LocalBucket, i: int) -> np.ndarray | None:
        held = bucket.gradient.piece(i, bucket.pieces[i].numel)
        return None if held is None else held.view().astype(np.float32)

    def clear_gradient(self, bucket: LocalBucket, i: int) -> None:
        self._in_buffer(bucket, i)[...] = 0

    def _in_buffer(self, bucket: LocalBucket, i: int) -> np.ndarray:
        assert bucket.gradient.buffer is not None
        return bucket.gradient.buffer.run(bucket.pieces[i].offset, bucket.pieces[i].numel).view()

    def arrays(self, tensors: Sequence[Any]) -> HostArrays:
        return self._device.host_arrays(tensors)

    def end(self, bucket: LocalBucket) -> Event:
        return Done()

    def new_direction(self, bucket: LocalBucket) -> Direction:
        assert self._buckets.directions is not None
        lease = Lease(self._buckets.directions)
        shards = lease.borrow(len(self._device.ranks) * bucket.layout.shard_numel, BFLOAT16.numpy)
        return Direction(HostArray.of(shards), lease)

    def transform(self, bucket: LocalBucket, direction: Direction, params: frozenset[int]) -> Event:
        assert bucket.matrices is not None
        assert direction.lease is not None
        matrices = bucket.matrices.of_params(params)
        return self._device.transform(bucket.layout, matrices, direction.shards.owner, direction.lease)

    def run_after(self, event: Event) -> None:  # waits
        event.wait()


class InPlace(HostExecutor):
    """One rank whose tensors are host memory (``BucketTerms.direct``): kernels read gradients and write parameters
    where they are."""

    def receive(self, bucket: LocalBucket, gradients: Mapping[int, Any]) -> Arriving | None:
        if gradients:  # they may have been dropped
            self.keep(bucket, gradients)
        return None

    def write_gradient(self, bucket: LocalBucket, i: int, values: np.ndarray) -> None:
        # The gradient's present memory is the caller's.
        bucket.gradient.hold(np.array([i]), HostArrays.columns([HostArray.of(values)]))

    def output(self, bucket: LocalBucket, after: Event) -> Any:
        raise AssertionError("parameters are written where they are")

    def addresses(self, bucket: LocalBucket, pieces: np.ndarray, tensors: Sequence[Any], out: Any) -> np.ndarray:
        return self.in_place(bucket, pieces, tensors)

    def publish(
        self, bucket: LocalBucket, out: Any, tensors: Sequence[Any], present: set[int], ran: Event, after: Event
    ) -> Event:
        return ran


class Staged(HostExecutor):
    """Gradients wait in host memory, to which the device copies them. New parameters are written to staging, and the
    device copies them from there."""

    def receive(self, bucket: LocalBucket, gradients: Mapping[int, Any]) -> Arriving | None:
        buckets = self._buckets
        assert buckets.staging is not None
        buckets.await_buffer(bucket)
        layout, gradient = bucket.layout, bucket.gradient
        arrival, buffer = gradient.arrival, gradient.buffer
        assert buffer is not None
        stays = arrival == as_it_stays(buffer.dtype) and not gradient.has_landed
        buckets.make_room()
        bucket.lease = Lease(buckets.staging)
        numel = arrival.parts * buffer.numel
        received = buffer.owner if stays else bucket.lease.borrow(numel, arrival.dtype.numpy)
        reduced = self._device.reduce(layout, gradient.comm_dtype, gradients, received, bucket.lease)

        def finish() -> None:  # waits
            if not stays:
                with buckets.trace.span(REDUCTION, "sum", layout.index, received.nbytes):
                    self._sum(bucket, received)
            bucket.release()
            gradient.arrays = gradient.in_buffer()

        return Arriving(reduced, finish)

    def _sum(self, bucket: LocalBucket, received: np.ndarray) -> None:
        """For each shard, sum the parts that the device delivered, in order and in fp32, divide the sum once, and add
        it to the gradients of earlier micro-steps.

        Args:
            received: the parts of all shards, end to end.
        """
        arrival, add = bucket.gradient.arrival, bucket.gradient.has_landed
        buffer = self.promote(bucket).view()
        n_ranks, threads = len(self._device.ranks), self._buckets.threads
        for parts, shard in zip(received.reshape(n_ranks, -1), buffer.reshape(n_ranks, -1), strict=True):
            kernels.reduce(
                parts, arrival.parts, arrival.dtype, shard, divisor=arrival.divisor, add=add, threads=threads
            )

    def write_gradient(self, bucket: LocalBucket, i: int, values: np.ndarray) -> None:
        self.promote(bucket)
        bucket.gradient.arrays = bucket.gradient.in_buffer()
        self._in_buffer(bucket, i)[...] = values

    def output(self, bucket: LocalBucket, after: Event) -> np.ndarray:
        """Borrow staging memory for the process's shards of a bucket."""
        assert self._buckets.staging is not None
        bucket.lease = Lease(self._buckets.staging)
        numel = len(self._device.ranks) * bucket.layout.shard_numel
        return bucket.lease.borrow(numel, bucket.layout.dtype.numpy)

    def addresses(self, bucket: LocalBucket, pieces: np.ndarray, tensors: Sequence[Any], out: Any) -> np.ndarray:
        if out is None:
            return self.in_place(bucket, pieces, tensors)
        return kernels.address(out) + bucket.table.offsets[pieces] * out.itemsize

    def publish(
        self, bucket: LocalBucket, out: Any, tensors: Sequence[Any], present: set[int], ran: Event, after: Event
    ) -> Event:
        assert bucket.lease is not None
        return self._device.publish(bucket.layout, out, tensors, present, bucket.lease, after)


class ReadInPlace(Staged):
    """Gradients come in host memory of their own (``sizes.gradients_on_host``), where kernels read them. New parameters
    are written to staging, and the device copies them from there."""

    def receive(self, bucket: LocalBucket, gradients: Mapping[int, Any]) -> Arriving | None:
        if not gradients:
            return None

        def finish() -> None:  # waits
            with self._buckets.trace.span(TO_HOST, "gradients", bucket.layout.index):
                self.keep(bucket, gradients)

        return Arriving(Done(), finish)

    write_gradient = InPlace.write_gradient
