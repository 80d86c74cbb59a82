"""The ``Device`` made of any tensor memory and any host collectives: ranks exchange buckets in host memory."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..dtypes import BFLOAT16, ElementType
from ..layout.partition import Bucket, ParamSpec
from ..memory.host_memory import Lease
from ..ranks.collectives import Collectives, HostCollectives, SingleRank
from .events import Done, Event, Waiting, traced
from .exchange_sizes import OnHost
from .protocols import Copy, ExchangeSizes, HostArray, Matrices, TensorMemory
from .trace import GATHER, MATRICES, REDUCTION, TO_DEVICE, TO_HOST, Trace

_BROADCAST_BYTES = 64 * 2**20
"""The most bytes that are copied at a time when all ranks get rank 0's parameters."""


class HostRanks:
    """One rank a process. Whole buckets are copied to the host, and their slices are exchanged there.

    Args:
        memory: the memory of the tensors.
        collectives: between the ranks.
        native: let the collectives' own reduce-scatter sum, in the gradients' element type and its own order.
        sizes: the sizes of the buffers; None: as :class:`OnHost` has them.
        processes: the processes that each update different parameters at the same time. They decide each update
            together, and exchange no buckets; None: the ranks.
    """

    def __init__(
        self,
        memory: TensorMemory,
        collectives: HostCollectives | None = None,
        *,
        native: bool = False,
        sizes: ExchangeSizes | None = None,
        processes: Collectives | None = None,
    ) -> None:
        self.memory = memory
        self._exchange: HostCollectives = collectives or SingleRank()
        self.collectives: Collectives = processes or self._exchange
        self.ranks = (self._exchange.rank,)
        self.world_size = self._exchange.world_size
        self.addressable = memory.addressable
        self.updates_in_place = memory.updates_in_place
        self.pinning = memory.pinning
        self.queue = memory.queue
        self.dtype = memory.dtype
        self.numel = memory.numel
        self.host_array = memory.host_array
        self.host_arrays = memory.host_arrays
        self.to_host = memory.to_host
        self.mark = memory.mark
        self.synchronize = memory.synchronize
        self.free_bytes = memory.free_bytes
        self.native = native
        self.sizes: ExchangeSizes = sizes or OnHost(self.world_size, native, memory.addressable)
        self.trace = Trace(self.collectives.rank, self.collectives.world_size)

    def close(self) -> None:
        self._exchange.close()

    @property
    def sent_bytes(self) -> int:
        """As :attr:`Device.sent_bytes`."""
        return self._exchange.sent_bytes

    def start_alike(self, specs: Sequence[ParamSpec], tensors: Sequence[Any], source: int = 0) -> None:
        if self.world_size == 1:
            return
        for spec, tensor in zip(specs, tensors, strict=True):
            dtype = self.dtype(tensor)
            chunk = _BROADCAST_BYTES // dtype.itemsize
            for start in range(0, spec.numel, chunk):
                copy = Copy(tensor, start, min(chunk, spec.numel - start), 0)
                host = np.empty(copy.numel, dtype.numpy)
                self.to_host([copy], host).wait()
                self._exchange.broadcast(host, f"parameter {spec.name!r}: rank {source}'s value", source)
                self.memory.to_device(host, [copy], self.mark()).wait()

    def reduce(
        self, bucket: Bucket, comm_dtype: ElementType, gradients: Mapping[int, Any], out: Any, staging: Lease
    ) -> Event:
        copies = [Copy(gradients[p.param], p.start, p.numel, p.offset) for p in bucket.pieces if p.param in gradients]
        if self.world_size == 1:
            return traced(self.trace, TO_HOST, bucket.index, out.nbytes, lambda: self.to_host(copies, out))
        send = staging.borrow(bucket.padded_numel, comm_dtype.numpy)
        copied = traced(self.trace, TO_HOST, bucket.index, send.nbytes, lambda: self.to_host(copies, send))
        meet = self._exchange.reduce_scatter if self.native else self._exchange.exchange  # waits
        numel = self.sizes.arrival(comm_dtype).parts * bucket.shard_numel
        received, moves = self._on_host(out, comm_dtype, numel, staging)

        def finish() -> None:  # waits
            copied.wait()
            with self.trace.span(REDUCTION, "exchange", bucket.index, send.nbytes):
                meet(send, received, f"bucket {bucket.index}: exchange of gradients")
            if moves:
                self.memory.to_device(received, [Copy(out, 0, received.size, 0)], Done()).wait()

        return Waiting(finish)

    @staticmethod
    def _on_host(array: Any, dtype: ElementType, numel: int, staging: Lease) -> tuple[np.ndarray, bool]:
        """Return ``(host memory for an array of the host or the device, True if it is not the array's own)``."""
        if isinstance(array, np.ndarray):
            return array, False
        return staging.borrow(numel, dtype.numpy), True

    def publish(
        self,
        bucket: Bucket,
        shards: Any,
        tensors: Sequence[Any],
        present: set[int],
        staging: Lease,
        after: Event,
    ) -> Event:
        shards = self._read(shards, bucket.dtype, bucket.shard_numel, staging)
        pieces = bucket.shards(self.ranks) if bucket.partitioned else bucket.pieces
        copies = [Copy(tensors[p.param], bucket.in_tensor(p), p.numel, p.offset) for p in pieces if p.param in present]
        whole = shards
        if self.world_size > 1 and not bucket.partitioned:
            whole = staging.borrow(bucket.padded_numel, bucket.dtype.numpy)
            with self.trace.span(GATHER, "", bucket.index, whole.nbytes):
                self._exchange.gather(shards, whole, f"bucket {bucket.index}: gathering of parameters")
        to_device = partial(self.memory.to_device, whole, copies, after)
        return traced(self.trace, TO_DEVICE, bucket.index, whole.nbytes, to_device)

    def _read(self, array: Any, dtype: ElementType, numel: int, staging: Lease) -> np.ndarray:
        """Return a host array of the same elements. The kernels of the device's queue write to the device's arrays."""
        host, copied = self._on_host(array, dtype, numel, staging)
        if copied:
            self.queue().to_host(array, host).wait()
        return host

    def transform(self, bucket: Bucket, matrices: Matrices, shards: Any, staging: Lease) -> Event:
        if self.world_size == 1:
            start = partial(self.memory.transform, matrices, shards)
            return traced(self.trace, MATRICES, bucket.index, shards.nbytes, start)
        given = shards
        shards = self._read(given, BFLOAT16, bucket.shard_numel, staging)
        what = f"bucket {bucket.index}: exchange of matrices"
        whole = staging.borrow(bucket.padded_numel, shards.dtype)
        with self.trace.span(GATHER, "matrices", bucket.index, whole.nbytes):
            self._exchange.gather(shards, whole, what)
        start = partial(self.memory.transform, matrices.of_ranks(self.ranks), whole)
        computed = traced(self.trace, MATRICES, bucket.index, whole.nbytes, start)

        def finish() -> None:  # waits
            computed.wait()
            for matrix, row in zip(matrices.in_(whole), matrices.rows, strict=True):
                self._exchange.broadcast(matrix, what, row.owner)
                if row.owner in self.ranks:
                    self._exchange.sent_bytes += matrix.nbytes * (self.world_size - 1)
            shards[:] = whole[self.ranks[0] * bucket.shard_numel :][: bucket.shard_numel]
            if given is not shards:
                self.queue().to_device(shards, given).wait()

        return Waiting(finish)

    def gather(self, bucket: Bucket, shard: Any, whole: Any, after: Event, what: str) -> Event:
        if self.world_size > 1:
            after.order()
        if isinstance(shard, HostArray):
            send = shard.view()
        else:
            send = np.empty(bucket.shard_numel, bucket.dtype.numpy)
            self.to_host([Copy(shard, 0, bucket.shard_numel, 0)], send).wait()
        if self.world_size == 1:
            received = send
        else:
            if self.addressable:
                received = self.host_array(whole).run(bucket.start, bucket.padded_numel).view()
            else:
                received = np.empty(bucket.padded_numel, bucket.dtype.numpy)
            with self.trace.span(GATHER, "", bucket.index, received.nbytes):
                self._exchange.gather(send, received, what)
            if self.addressable:
                return Done()
        copy = Copy(whole, bucket.start, bucket.padded_numel, 0)
        to_device = partial(self.memory.to_device, received, [copy], after)
        return traced(self.trace, TO_DEVICE, bucket.index, received.nbytes, to_device)
