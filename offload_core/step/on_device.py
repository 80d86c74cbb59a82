"""The executor of buckets whose states are in the device's memory. Their gradients do not leave the device, and only
the sums of their squares do."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..device.events import Event
from ..device.protocols import HostArray, HostArrays
from ..dtypes import BFLOAT16, FLOAT32, ElementType
from ..memory.host_memory import Lease
from ..native import kernels
from ..native.grad_norm import SumOfSquares
from ..plans.terms import as_it_stays
from .executor import BaseExecutor, Surroundings
from .local_bucket import Arriving, Direction, LocalBucket


class OnDevice(BaseExecutor):
    """Runs the kernels in the queue of the device.

    One rank: gradients are copied once, and kernels write parameters where they are. Among ranks, the device's exchange
    fills a shard of gradients, and gathers the parameters from a shard.
    """

    runs_later = True

    def __init__(self, buckets: Surroundings) -> None:
        super().__init__(buckets)
        self.memory = self._queue = self._device.queue()

    # --- gradients -----------------------------------------------------------------------------------

    def receive(self, bucket: LocalBucket, gradients: Mapping[int, Any]) -> Arriving:
        if self._device.world_size == 1:
            self._queue.order(self._device.mark())
            used = [*gradients.values(), bucket.gradient.arrays, bucket.gradient.buffer]
            if gradients:  # they may have been dropped
                self.keep(bucket, gradients)
            return Arriving(self._queue.mark(used), lambda: None)
        return self._exchange(bucket, gradients)

    def own(self, bucket: LocalBucket, pieces: np.ndarray, arrived: HostArrays) -> HostArrays:
        """Copy the gradients: the update reads them later than the step returns, and the program may have written the
        next ones to their memory by then."""
        addresses, owners = arrived.addresses.copy(), list(arrived.owners)
        for dtype, rows in arrived.by_type(arrived.addresses != 0):
            memory = self._new(bucket, dtype)
            offsets = bucket.table.offsets[pieces[rows]] * dtype.itemsize
            addresses[rows] = memory.address + offsets.astype(np.uintp)
            spans = kernels.spans(arrived.addresses[rows], addresses[rows], bucket.table.numels[pieces[rows]])
            self._queue.cast(spans, dtype, dtype)
            for row in rows.tolist():
                owners[row] = memory
        return HostArrays(addresses, arrived.codes, owners)

    def _exchange(self, bucket: LocalBucket, gradients: Mapping[int, Any]) -> Arriving:
        buckets, gradient = self._buckets, bucket.gradient
        arrival = gradient.arrival
        assert gradient.buffer is not None
        stays = arrival == as_it_stays(gradient.buffer.dtype) and not gradient.has_landed
        buckets.make_room()
        bucket.lease = Lease(buckets.staging)
        received = gradient.buffer if stays else self._new(bucket, arrival.dtype, arrival.parts)
        if not stays:  # the queue may still use memory that it has had before
            self._queue.mark().order()
        reduced = self._device.reduce(bucket.layout, gradient.comm_dtype, gradients, received.owner, bucket.lease)

        def finish() -> None:  # waits
            bucket.release()
            if not stays:
                out, add = self.promote(bucket), gradient.has_landed
                self._queue.reduce(received, arrival.parts, out, divisor=arrival.divisor, add=add)
                self._queue.mark(received)
            gradient.arrays = gradient.in_buffer()

        return Arriving(reduced, finish)

    def _new(self, bucket: LocalBucket, dtype: ElementType, parts: int = 1) -> HostArray:
        """Return new memory of the device: ``parts`` times as long as the process's shards of the bucket."""
        numel = parts * len(self._device.ranks) * bucket.layout.shard_numel
        tensor = self._queue.typed(self._queue.allocate(numel * dtype.itemsize), dtype)
        return self._of(tensor, numel, dtype)

    def _of(self, tensor: Any, numel: int, dtype: ElementType) -> HostArray:
        return HostArray(int(self._queue.arrays([tensor]).addresses[0]), numel, dtype, tensor)

    def allocate_sums(self, bucket: LocalBucket) -> HostArray:
        sums = self._new(bucket, FLOAT32)
        self._queue.mark().wait()  # exchanges write there, too, and do not wait for the queue's zeros
        return sums

    def release(self, bucket: LocalBucket) -> None:
        bucket.gradient.private = bucket.gradient.buffer = None

    def restore(self, bucket: LocalBucket) -> None:
        if self._buckets.terms.sums:
            bucket.gradient.private = bucket.gradient.buffer = self.allocate_sums(bucket)

    def squares(self, bucket: LocalBucket, pieces: np.ndarray) -> Callable[[], SumOfSquares]:
        arrays, numels = bucket.gradient.arrays, bucket.table.numels
        held = bucket.gradient.held(pieces)
        bins = self._queue.squares(
            [(kernels.spans(arrays.addresses[rows], 0, numels[rows]), dtype) for dtype, rows in held]
        )

        def total() -> SumOfSquares:
            found = SumOfSquares()
            found.bins += bins()
            return found

        return total

    def read_gradient(self, bucket: LocalBucket, i: int) -> np.ndarray | None:
        numel = bucket.pieces[i].numel
        held = bucket.gradient.piece(i, numel)
        if held is None:
            return None
        values, host = self._new_piece(numel), np.empty(numel, np.float32)
        self._queue.cast(kernels.spans_of([(held.address, values.address, numel)]), held.dtype, FLOAT32)
        self._queue.to_host(values.owner, host).wait()
        return host

    def write_gradient(self, bucket: LocalBucket, i: int, values: np.ndarray) -> None:
        gradient, piece = bucket.gradient, bucket.pieces[i]
        memory = self._new_piece(values.size)
        self._queue.to_device(values, memory.owner)
        held = gradient.piece(i, piece.numel)
        if gradient.buffer is None or held is None or held.address != gradient.in_buffer().addresses[i]:
            gradient.hold(np.array([i]), HostArrays.columns([memory]))
            return
        spans = kernels.spans_of([(memory.address, held.address, piece.numel)])
        self._queue.cast(spans, FLOAT32, held.dtype)
        self._queue.mark(memory)

    def clear_gradient(self, bucket: LocalBucket, i: int) -> None:
        gradient, piece = bucket.gradient, bucket.pieces[i]
        assert gradient.buffer is not None
        to = gradient.buffer.run(piece.offset, piece.numel)
        zeros = self._new_piece(piece.numel)
        self._queue.cast(kernels.spans_of([(zeros.address, to.address, piece.numel)]), FLOAT32, to.dtype)
        self._queue.mark(zeros)

    def _new_piece(self, numel: int) -> HostArray:
        return self._of(self._queue.typed(self._queue.allocate(numel * FLOAT32.itemsize), FLOAT32), numel, FLOAT32)

    def arrays(self, tensors: Sequence[Any]) -> HostArrays:
        return self._queue.arrays(tensors)

    # --- updates -------------------------------------------------------------------------------------

    def output(self, bucket: LocalBucket, after: Event) -> HostArray | None:
        self._queue.order(after)
        if self._device.world_size == 1 or bucket.layout.partitioned:
            return None
        return self._new(bucket, bucket.layout.dtype)

    def addresses(self, bucket: LocalBucket, pieces: np.ndarray, tensors: Sequence[Any], out: Any) -> np.ndarray:
        if out is None:
            return self.in_place(bucket, pieces, tensors)
        return np.uintp(out.address) + (bucket.table.offsets[pieces] * out.dtype.itemsize).astype(np.uintp)

    def end(self, bucket: LocalBucket) -> Event:
        return self._queue.mark((bucket.gradient.arrays.owners, bucket.direction))

    def publish(
        self, bucket: LocalBucket, out: Any, tensors: Sequence[Any], present: set[int], ran: Event, after: Event
    ) -> Event:
        if out is None:
            return ran
        bucket.lease = Lease(self._buckets.staging)
        return self._device.publish(bucket.layout, out.owner, tensors, present, bucket.lease, ran)

    # --- directions ----------------------------------------------------------------------------------

    def new_direction(self, bucket: LocalBucket) -> Direction:
        return Direction(self._new(bucket, BFLOAT16), None)

    def transform(self, bucket: LocalBucket, direction: Direction, params: frozenset[int]) -> Event:
        assert bucket.matrices is not None
        matrices = bucket.matrices.of_params(params)
        if self._device.world_size == 1:
            self._queue.transform(matrices, direction.shards.owner)
            return self._queue.mark()
        direction.lease = Lease(self._buckets.directions)
        return self._device.transform(bucket.layout, matrices, direction.shards.owner, direction.lease)

    def run_after(self, event: Event) -> None:  # waits
        self._queue.order(event)
