"""The core's ``Device`` on a mesh axis, made of XLA's collectives.

A process holds the shards of the mesh's devices that are its own.
"""

import functools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from offload_core.device.events import Done, Event, Waiting, traced
from offload_core.device.exchange_sizes import MeshSizes
from offload_core.device.host import fill
from offload_core.device.protocols import Copy, Matrices
from offload_core.device.trace import MATRICES, TO_DEVICE, TO_HOST, Trace
from offload_core.dtypes import BY_NUMPY, FLOAT32, ElementType
from offload_core.layout.partition import Bucket, ParamSpec
from offload_core.memory.host_memory import Lease
from offload_core.native import kernels
from offload_core.ranks.collectives import Collectives
from offload_core.support.worker import Background

from ...tree.memory_kinds import pinning_for, start_to_host
from ..device import ArrayMemory, free_bytes, read
from ..device_kernels import computed
from ..launch import meetings
from ..runs import split_places
from . import programs
from .axis import REPLICATED, MeshAxis, Ranks
from .matrices import MatrixExchange
from .processes import JaxProcesses
from .programs import BucketRange, Write
from .tensors import MeshGradient, MeshParameter

_LEAVE_AT_ONCE = Background.depth
"""The most packed buckets of gradients on a device: so many are on their way to the host."""


class JaxMeshDevice(ArrayMemory):
    """The core's ``Device`` on a mesh axis.

    Every rank sends each other rank its slice of a bucket (all-to-all) and sums the slices that it receives, in rank
    order in fp32. A parameter that lies in several buckets is put together in place as its pieces arrive.

    Args:
        native: XLA's reduce-scatter sums instead, in the element type of the exchange and in an order of its own.
        threads: how many threads widen gradients to fp32. Gradients that were not summed leave the device in their own
            type.
    """

    addressable = False

    def __init__(self, axis: Ranks, *, native: bool = False, threads: int = 1) -> None:
        self.axis = axis
        self.pinning = pinning_for(axis.devices[axis.ranks[0]])
        self.ranks = axis.ranks
        self.world_size = axis.world_size
        self.sizes = MeshSizes(len(axis.ranks), summed=axis.world_size > 1)
        self.collectives: Collectives = JaxProcesses(axis)
        self._meeting = meetings(self.ranks[0], alone=self.collectives.world_size == 1)
        self.trace = Trace(self.ranks[0], self.collectives.world_size)
        self.sent_bytes = 0
        self._threads = threads
        self._leaving: deque[_ArrivalEvent] = deque()
        """Gradients that were last on their way to the host."""
        # A bucket asks for the same places in every step. They take 8 bytes for each of its pieces.
        self._places = functools.lru_cache(4096)(lambda starts: axis.replicate(split_places(starts)))
        self._reduce_unreduced = axis.compile(programs.reduce_unreduced(axis, native=native), static_argnums=(2, 3, 4))
        self._reduce_mean = axis.compile(programs.reduce_mean(axis), static_argnums=(2, 3, 4))
        self._gather = axis.compile(programs.gather_and_write(axis), static_argnums=3, donate_argnums=1)
        self._of_rank_0 = axis.across(_of_rank_0, REPLICATED)
        if isinstance(axis, MeshAxis):
            self.matrices = MatrixExchange(axis.mesh)

    # --- parameters ----------------------------------------------------------------------------------

    def dtype(self, tensor: MeshParameter | MeshGradient) -> ElementType:
        return tensor.dtype

    def numel(self, tensor: MeshParameter | MeshGradient) -> int:
        return tensor.numel

    def to_host(self, copies: Sequence[Copy], host: np.ndarray) -> Event:
        local = [(c, c.tensor.array.addressable_data(0)) for c in copies]
        fill(host, [(c.offset, read(array, c.start, c.start + c.numel)) for c, array in local])
        return Done()

    def start_alike(self, specs: Sequence[ParamSpec], tensors: Sequence[MeshParameter]) -> None:
        if self.collectives.world_size == 1:
            return
        for spec, tensor in zip(specs, tensors, strict=True):
            tensor.array = self.of_rank_0(spec.name, tensor.array)

    def of_rank_0(self, name: str, array: jax.Array) -> jax.Array:
        """Return rank 0's value of a replicated array, on all ranks."""
        with self._meeting(f"parameter {name!r}: initial value"):
            return jax.block_until_ready(self._of_rank_0(array))

    def free_bytes(self) -> int | None:
        return free_bytes([self.axis.devices[rank] for rank in self.ranks])

    def close(self) -> None:
        pass

    # --- gradients -----------------------------------------------------------------------------------

    def reduce(
        self,
        bucket: Bucket,
        comm_dtype: ElementType,
        gradients: Mapping[int, MeshGradient],
        out: np.ndarray,
        staging: Lease,
    ) -> Event:
        while len(self._leaving) >= _LEAVE_AT_ONCE:  # before another one is packed
            self._leaving.popleft().wait()
        return traced(
            self.trace, TO_HOST, bucket.index, out.nbytes, lambda: self._reduce(bucket, comm_dtype, gradients, out)
        )

    def _reduce(
        self, bucket: Bucket, comm_dtype: ElementType, gradients: Mapping[int, MeshGradient], out: np.ndarray
    ) -> Event:
        pieces = [piece for piece in bucket.pieces if piece.param in gradients]
        arrays = [gradients[piece.param].array for piece in pieces]
        runs = tuple(BucketRange(piece.numel, piece.offset) for piece in pieces)
        unreduced = any(gradients[piece.param].unreduced for piece in pieces)
        if not pieces:
            out[:] = 0
            return Done()
        what = f"bucket {bucket.index}: exchange of gradients"
        with self._meeting(what):
            program = self._reduce_unreduced if unreduced else self._reduce_mean
            if not unreduced:
                comm_dtype = max((BY_NUMPY[array.dtype] for array in arrays), key=lambda dtype: dtype.itemsize)
            places = self._places(tuple(piece.start for piece in pieces))
            shards = self.axis.parts(program(arrays, places, runs, bucket.shard_numel, comm_dtype.numpy))
        if unreduced:
            self._count_sent(bucket.shard_numel * comm_dtype.itemsize)
        for piece in pieces:
            if (used := gradients[piece.param].used) is not None:
                used(piece.numel)
        return self._receive(shards, out, what)

    def _receive(self, shards: Sequence[jax.Array], out: np.ndarray, what: str) -> Event:
        """Start the copies of this process's shards to the host."""
        copies = [start_to_host(shard) for shard in shards]

        def finish() -> None:
            with self._meeting(what):
                hosts = [np.asarray(copy) for copy in copies]
            parts = [*out.reshape(len(hosts), -1)]
            kernels.cast_arrays(hosts, BY_NUMPY[hosts[0].dtype], parts, FLOAT32, self._threads)

        self._leaving.append(arrival := _ArrivalEvent(finish))
        return arrival

    # --- publishing ----------------------------------------------------------------------------------

    def publish(
        self,
        bucket: Bucket,
        shards: np.ndarray,
        tensors: Sequence[MeshParameter],
        present: set[int],
        staging: Lease,
        after: Event,
    ) -> Event:
        return traced(
            self.trace, TO_DEVICE, bucket.index, shards.nbytes, lambda: self._publish(bucket, shards, tensors, present)
        )

    def _publish(
        self, bucket: Bucket, shards: np.ndarray, tensors: Sequence[MeshParameter], present: set[int]
    ) -> Event:
        pieces = [piece for piece in bucket.pieces if piece.param in present]
        written = [tensors[piece.param] for piece in pieces]
        writes = []
        for piece, tensor in zip(pieces, written, strict=True):
            writes.append(
                Write(BucketRange(piece.numel, piece.offset), tensor.array.shape, piece.numel == tensor.array.size)
            )
        what = f"bucket {bucket.index}: gathering of parameters"
        with self._meeting(what):
            # It may share the staging memory; nothing reads it any more when the results are there.
            stacked = self.axis.stack(list(shards.reshape(len(self.ranks), -1)))
            places = self._places(tuple(piece.start for piece in pieces))
            partials = [None if write.is_whole else of.partial for of, write in zip(written, writes, strict=True)]
            results = self._gather(stacked, partials, places, tuple(writes))
        for piece, tensor, result in zip(pieces, written, results, strict=True):
            tensor.advance(result, piece.numel, of=result.size)
        self._count_sent(bucket.shard_numel * bucket.dtype.itemsize)
        return self._arrives(written, what)

    def _arrives(self, written: Sequence[MeshParameter], what: str) -> Event:
        """Return the event of parameters that are being written."""

        def finish() -> None:
            with self._meeting(what):
                # A later bucket may have continued a partial value: that was donated, so wait for its successor.
                jax.block_until_ready([t.array if t.partial is None else t.partial for t in written])

        return Waiting(finish)

    def transform(self, bucket: Bucket, matrices: Matrices, shards: np.ndarray, staging: Lease) -> Event:
        start = partial(self._transform, bucket, matrices, shards)
        return traced(self.trace, MATRICES, bucket.index, shards.nbytes, start)

    def _transform(self, bucket: Bucket, matrices: Matrices, shards: np.ndarray) -> Event:
        if len(self.ranks) == self.world_size:
            return computed(matrices, shards, self.axis.devices.__getitem__)
        parts = dict(zip(self._own_devices(), shards.reshape(len(self.ranks), -1), strict=True))
        self._count_sent(2 * bucket.shard_numel * shards.itemsize)
        return self._exchange(bucket, matrices, (bucket.padded_numel,), self.axis.split, parts)

    def _exchange(
        self,
        bucket: Bucket,
        matrices: Matrices,
        shape: Sequence[int],
        spec: PartitionSpec,
        parts: Mapping[jax.Device, np.ndarray],
    ) -> Event:
        """Compute with matrices of which each rank has parts, and put the results in their place in ``parts``."""
        if not matrices.rows:
            return Done()
        what = f"bucket {bucket.index}: exchange of matrices"
        results = self.matrices.start(matrices, shape, spec, parts, what)

        def finish() -> None:
            with self._meeting(what):
                for device, part in parts.items():
                    part.view(np.uint16)[...] = np.asarray(results[device])

        return Waiting(finish)

    def _own_devices(self) -> list[jax.Device]:
        return [self.axis.devices[rank] for rank in self.ranks]

    def _count_sent(self, shard_bytes: int) -> None:
        """Count that each of this process's ranks sent a shard of this size to every other rank."""
        self.sent_bytes += len(self.ranks) * (self.world_size - 1) * shard_bytes


class _ArrivalEvent:
    """The event of shards that arrive on the host. Their device memory is free when it has been waited for."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish
        self._lock = threading.Lock()

    def wait(self) -> None:
        with self._lock:
            if self._finish is not None:
                self._finish()
                self._finish = None

    order = wait

    def done(self) -> bool:
        return False


def _of_rank_0(name: str, value: jax.Array) -> jax.Array:
    bits = lax.bitcast_convert_type(value, jnp.uint32 if value.dtype.itemsize == 4 else jnp.uint16)
    mine = jnp.where(lax.axis_index(name) == 0, bits.astype(jnp.uint32), 0)
    return lax.bitcast_convert_type(lax.psum(mine, name).astype(bits.dtype), value.dtype)
