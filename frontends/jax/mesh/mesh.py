"""Ranks that are the devices along a mesh axis: the core's ``Device`` made of XLA's collectives.

A process holds the shards of the mesh's devices that are its own. Ranks are positions along the axis, in the
mesh's order; device ids are not ranks. Buckets are exchanged and gathered by explicit collectives inside
``shard_map``, compiled once for each layout. On CPU devices XLA flushes subnormal numbers to zero, also in these sums.
"""

import functools
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import (
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

from offload_core.device.events import Done, Event, Waiting, traced
from offload_core.device.exchange_sizes import MeshSizes
from offload_core.device.host import fill
from offload_core.device.protocols import Copy, HostArray, HostArrays
from offload_core.device.trace import TO_DEVICE, TO_HOST, Trace
from offload_core.dtypes import BY_NUMPY, FLOAT32, ElementType
from offload_core.errors import ConfigError
from offload_core.layout.partition import Bucket, ParamSpec
from offload_core.memory.host_memory import Lease
from offload_core.native import kernels
from offload_core.ranks.collectives import Collectives
from offload_core.step.worker import Background

from ..device import free_bytes, read
from ..launch import meeting
from ..runs import cut_run, split_places, write_run

REPLICATED = PartitionSpec()
_LEAVE_AT_ONCE = Background.depth
"""The most packed buckets of gradients on a device: so many are on their way to the host."""


class Ranks(Protocol):
    """Devices that are ranks, and arrays that lie on them."""

    name: str
    """The name by which collectives know the ranks."""
    devices: list[jax.Device]
    """The device of each rank."""
    world_size: int
    ranks: tuple[int, ...]
    """The numbers of this process's ranks."""
    process_of: list[int]
    """The process that holds each rank."""
    split: PartitionSpec
    """The spec of an array whose first dimension is cut into one part for each rank."""

    def map(self, function: Any, in_specs: Any, out_specs: Any) -> Any:
        """A function that has each rank run ``function`` on its parts."""
        ...

    def compile(self, function: Any, **options: Any) -> Any:
        """``jax.jit`` of a function made of :meth:`map`."""
        ...

    def across(self, function: Callable[[str, jax.Array], jax.Array], in_specs: Any) -> Any:
        """A program in which every rank runs ``function(name, part)``; all get the same. Equal ranks share it."""
        ...

    def stack(self, parts: Sequence[Any]) -> jax.Array:
        """An array of one part for each rank, end to end; this process gives the parts of its ranks."""
        ...

    def parts(self, stacked: jax.Array) -> list[jax.Array]:
        """This process's parts of an array of :meth:`stack`, rank after rank."""
        ...

    def constant(self, value: np.ndarray) -> jax.Array:
        """A small array that every rank has; all processes give the same."""
        ...

    def own_slice(self, flat: jax.Array, numel: int) -> jax.Array:
        """Inside :meth:`map`: this rank's slice, where ``flat`` is cut into slices of ``numel`` elements."""
        ...

    def gather(self, shard: jax.Array) -> jax.Array:
        """Inside :meth:`map`: all ranks' shards, end to end."""
        ...


class MeshAxis:
    """The ranks along one axis of a mesh, and arrays that lie on them.

    Args:
        axis: its name; None: the mesh's only axis.

    Raises:
        ConfigError: there is no such axis, another one has more than one device, or this process has no device on it.
    """

    def __init__(self, mesh: Mesh, axis: str | None) -> None:
        if not isinstance(mesh, Mesh):
            raise ConfigError(f"mesh: got a {type(mesh).__name__}, expected a jax.sharding.Mesh")
        names = ", ".join(map(repr, mesh.axis_names))
        if axis is None and len(mesh.axis_names) != 1:
            raise ConfigError(f"axis: got None for a mesh with the axes {names}; expected the name of one")
        if axis is not None and axis not in mesh.axis_names:
            raise ConfigError(f"axis: got {axis!r}, expected one of the mesh's: {names}")
        self.name: str = mesh.axis_names[0] if axis is None else axis
        others = {name: size for name, size in mesh.shape.items() if name != self.name and size > 1}
        if others:
            sizes = ", ".join(f"{name!r} of size {size}" for name, size in others.items())
            raise ConfigError(
                f"mesh: besides {self.name!r} it has the axis {sizes}; expected size 1, since states would take their "
                "memory for each of its devices, or sharded parameters and no mesh=: wrap(params) takes them as they "
                "lie, over any axes"
            )
        self.mesh = mesh
        self.devices: list[jax.Device] = list(mesh.devices.flat)
        self.world_size = len(self.devices)
        self.ranks = tuple(r for r, d in enumerate(self.devices) if d.process_index == jax.process_index())
        if not self.ranks:
            raise ConfigError("mesh: none of its devices belongs to this process, expected at least one in each")
        self.process_of = [device.process_index for device in self.devices]
        """The process that holds each rank."""
        self.on_cpu = self.devices[0].platform == "cpu"
        self.split = PartitionSpec(mesh.axis_names)
        """As :class:`Ranks` has it: the mesh's other axes have one device."""

    def map(self, function: Any, in_specs: Any, out_specs: Any) -> Any:
        """``shard_map`` that does not check whether outputs are replicated as ``out_specs`` says."""
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def put(self, value: Any, spec: PartitionSpec, memory_kind: str | None = None) -> jax.Array:
        """A global array, cut as ``spec`` says. An array that lies so already is not copied.

        A value that only this process has is taken as the whole array; all processes must have the same.
        """
        sharding = NamedSharding(self.mesh, spec, memory_kind=memory_kind)
        if isinstance(value, jax.core.Tracer):
            return jax.device_put(value, sharding)
        if not isinstance(value, jax.Array):
            value = np.array(value)  # which device_put may alias
        elif value.sharding == sharding:
            return value
        elif value.sharding.is_equivalent_to(sharding, value.ndim):
            # The same memory, with this mesh's names: with Explicit axes, arrays of other meshes are of another type.
            shards = [shard.data for shard in value.addressable_shards]
            return jax.make_array_from_single_device_arrays(value.shape, sharding, shards)
        elif not value.is_fully_addressable:
            return jax.device_put(value, sharding)
        if len(self.ranks) == self.world_size:
            return jax.device_put(value, sharding)
        places = sharding.addressable_devices_indices_map(value.shape)
        return self.of_parts(value.shape, sharding, [value[places[self.devices[rank]]] for rank in self.ranks])

    def of_parts(self, shape: tuple[int, ...], sharding: jax.sharding.Sharding, parts: Sequence[Any]) -> jax.Array:
        """A global array; this process gives the parts of its ranks.

        On CPU devices, and in host memory, the array may share the parts' memory.
        """
        kind = sharding.memory_kind
        places = [SingleDeviceSharding(self.devices[rank], memory_kind=kind) for rank in self.ranks]
        return jax.make_array_from_single_device_arrays(shape, sharding, jax.device_put(list(parts), places))

    def replicate(self, value: Any) -> jax.Array:
        """A global array, whole on every device."""
        return self.put(value, REPLICATED)

    constant = replicate

    def stack(self, parts: Sequence[Any]) -> jax.Array:
        """A global array of one part for each rank, end to end; this process gives the parts of its ranks.

        On CPU devices the array may share the parts' memory.
        """
        shape = (self.world_size * parts[0].shape[0], *parts[0].shape[1:])
        return self.of_parts(shape, NamedSharding(self.mesh, self.split), parts)

    def parts(self, stacked: jax.Array) -> list[jax.Array]:
        """This process's parts of a global array that is cut over the axis, rank after rank."""
        on = {shard.device: shard.data for shard in stacked.addressable_shards}
        return [on[self.devices[rank]] for rank in self.ranks]

    def vary(self, array: jax.Array) -> jax.Array:
        """A replicated array as one that may differ between ranks, inside a ``shard_map`` that checks this."""
        return lax.pcast(array, self.mesh.axis_names, to="varying")

    def compile(self, function: Any, **options: Any) -> Any:
        """``jax.jit`` of a function made of :meth:`map`."""
        return jax.jit(function, **options)

    def across(self, function: Callable[[str, jax.Array], jax.Array], in_specs: Any) -> Any:
        """As :meth:`Ranks.across`."""
        return _across(self.mesh, self.name, function, in_specs)

    def own_slice(self, flat: jax.Array, numel: int) -> jax.Array:
        """As :meth:`Ranks.own_slice`."""
        return lax.dynamic_slice_in_dim(flat, lax.axis_index(self.name) * numel, numel)

    def gather(self, shard: jax.Array) -> jax.Array:
        """As :meth:`Ranks.gather`."""
        return lax.all_gather(shard, self.name, tiled=True)


class LoneDevice:
    """One device that is the only rank: nothing is exchanged, and its arrays are not committed to it."""

    def __init__(self, device: jax.Device) -> None:
        self.name = "lone"
        self.devices = [device]
        self.world_size = 1
        self.ranks: tuple[int, ...] = (0,)
        self.process_of = [device.process_index]
        self.split = PartitionSpec(self.name)

    def map(self, function: Any, in_specs: Any, out_specs: Any) -> Any:
        return function

    def stack(self, parts: Sequence[Any]) -> jax.Array:
        (part,) = parts
        with jax.default_device(self.devices[0]):
            return jax.device_put(part, may_alias=False)  # a program may give its argument back as it is

    def parts(self, stacked: jax.Array) -> list[jax.Array]:
        return [stacked]

    def constant(self, value: np.ndarray) -> jax.Array:
        with jax.default_device(self.devices[0]):
            return jax.device_put(value)

    def compile(self, function: Any, **options: Any) -> Any:
        compiled = jax.jit(function, **options)

        def call(*args: Any) -> Any:
            with jax.default_device(self.devices[0]):  # else arguments that are not committed go elsewhere
                return compiled(*args)

        return call

    def across(self, function: Callable[[str, jax.Array], jax.Array], in_specs: Any) -> Any:
        return self.compile(functools.partial(function, self.name))

    def own_slice(self, flat: jax.Array, numel: int) -> jax.Array:
        return flat

    def gather(self, shard: jax.Array) -> jax.Array:
        return shard


@functools.cache
def _across(mesh: Mesh, name: str, function: Callable[[str, jax.Array], jax.Array], in_specs: Any) -> Any:
    """Made once for each mesh: every tree that is wrapped on it needs these programs."""
    each = functools.partial(function, name)
    return jax.jit(jax.shard_map(each, mesh=mesh, in_specs=in_specs, out_specs=REPLICATED, check_vma=False))


def _sum(name: str, part: jax.Array) -> jax.Array:
    return lax.psum(part, name)


def _of_rank_0(name: str, value: jax.Array) -> jax.Array:
    bits = lax.bitcast_convert_type(value, jnp.uint32 if value.dtype.itemsize == 4 else jnp.uint16)
    mine = jnp.where(lax.axis_index(name) == 0, bits.astype(jnp.uint32), 0)
    return lax.bitcast_convert_type(lax.psum(mine, name).astype(bits.dtype), value.dtype)


def ordered_mean(parts: jax.Array) -> jax.Array:
    """The mean over the first dimension: summed in its order in fp32 (at least), divided once.

    The divisor is hidden from XLA, which would multiply by its reciprocal.
    """
    parts = parts.astype(np.promote_types(parts.dtype, np.float32))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total / lax.optimization_barrier(jnp.full(total.shape, parts.shape[0], total.dtype))


class JaxProcesses:
    """The core's ``Collectives`` between the processes that hold an axis's ranks. Number 0 holds the first rank."""

    def __init__(self, axis: Ranks) -> None:
        processes = list(dict.fromkeys(axis.process_of))
        self.rank = processes.index(jax.process_index())
        self.world_size = len(processes)
        self._axis = axis
        self._sum = axis.across(_sum, axis.split)

    def sum_integers(self, array: np.ndarray, what: str) -> None:
        if self.world_size == 1:
            return
        # JAX has no 64-bit integers here, so numbers travel in limbs of 16 bits: their sums over fewer than 32768
        # processes fit in int32.
        shifts = np.arange(0, 64, 16, dtype=np.uint64)
        limbs = ((array.view(np.uint64)[:, None] >> shifts) & np.uint64(0xFFFF)).astype(np.int32)
        parts = [limbs[None] if i == 0 else np.zeros_like(limbs)[None] for i in range(len(self._axis.ranks))]
        with meeting(self._axis.ranks[0], what):
            total = np.asarray(self._sum(self._axis.stack(parts)).addressable_data(0))[0]
        array[:] = (total.astype(np.uint64) << shifts).sum(axis=1, dtype=np.uint64).view(np.int64)

    def broadcast(self, array: np.ndarray, what: str, source: int = 0) -> None:
        if self.world_size == 1:
            return
        words = np.zeros(-(-array.nbytes // 8), np.int64)
        if self.rank == source:
            words.view(np.uint8)[: array.nbytes] = array.reshape(-1).view(np.uint8)
        self.sum_integers(words, what)
        array.reshape(-1).view(np.uint8)[:] = words.view(np.uint8)[: array.nbytes]


@dataclass
class MeshParameter:
    """A parameter on the mesh: its present value, and the part of its next value that has arrived."""

    array: jax.Array
    """The present value, replicated over the mesh."""
    partial: jax.Array | None = None
    """The next value, with zeros where nothing has arrived; None: nothing has."""
    received: int = 0
    """Elements of the next value that have arrived."""


@dataclass(frozen=True)
class MeshGradient:
    """A gradient on the mesh."""

    array: jax.Array
    """If ``unreduced``, ``[world_size, *shape]``, a slice on each rank; else the mean, of ``shape``, replicated."""
    unreduced: bool
    numel: int
    travels_as: ElementType
    """The element type in which it travels: the array's. A mean does not travel and has its parameter's."""
    used: Callable[[int], None] | None = None
    """Called when so many elements more have been read."""


class Donated:
    """Arrays of one gradient, which are deleted as soon as all of its elements have been read."""

    def __init__(self, arrays: Sequence[Any], numel: int) -> None:
        self._arrays, self._left = arrays, numel

    def use(self, numel: int) -> None:
        """So many elements more are read by programs that were launched. Memory lives as long as these need it."""
        self._left -= numel
        if self._left <= 0:
            delete(self._arrays)


def delete(arrays: Iterable[Any]) -> None:
    """Delete those that are JAX's."""
    for array in arrays:
        if isinstance(array, jax.Array) and not array.is_deleted():
            array.delete()


class _Arrival:
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


class _Run(NamedTuple):
    """A piece of a bucket: elements of an array, at ``offset`` in the bucket. An argument of the program is their place
    in the array."""

    numel: int
    offset: int


class _Write(NamedTuple):
    """The way of a gathered piece into its parameter."""

    run: _Run
    shape: tuple[int, ...]
    """The parameter's shape."""
    is_whole: bool
    """True if the piece is the whole parameter."""


class JaxMeshDevice:
    """The core's ``Device`` on a mesh axis.

    Every rank sends each other rank its slice of a bucket (all-to-all) and sums the slices that it receives, in rank
    order in fp32. A parameter that lies in several buckets is put together in place as its pieces arrive.

    Args:
        native: XLA's reduce-scatter sums instead, in the element type of the exchange and in an order of its own.
        threads: how many threads widen gradients to fp32. Gradients that were not summed leave the device in their own
            type.
    """

    addressable = False
    updates_in_place = False
    pinning = None

    def __init__(self, axis: Ranks, *, native: bool = False, threads: int = 1) -> None:
        self.axis = axis
        self.ranks = axis.ranks
        self.world_size = axis.world_size
        self.sizes = MeshSizes(len(axis.ranks), summed=axis.world_size > 1)
        self.collectives: Collectives = JaxProcesses(axis)
        self.trace = Trace(self.ranks[0], self.collectives.world_size)
        self.sent_bytes = 0
        self._native = native
        self._threads = threads
        self._leaving: deque[_Arrival] = deque()
        """Gradients that were last on their way to the host."""
        # Made here, once: each compiles once for every layout of a bucket.
        self._reduce_unreduced = axis.compile(self._reduction(self._exchange, axis.split), static_argnums=(2, 3, 4))
        self._reduce_mean = axis.compile(self._reduction(self._own_slice, REPLICATED), static_argnums=(2, 3, 4))
        self._gather = axis.compile(self._gather_and_write, static_argnums=3, donate_argnums=1)
        self._of_rank_0 = axis.across(_of_rank_0, REPLICATED)

    # --- parameters ----------------------------------------------------------------------------------

    def dtype(self, tensor: MeshParameter | MeshGradient) -> ElementType:
        if isinstance(tensor, MeshGradient):
            return tensor.travels_as
        return BY_NUMPY[np.dtype(tensor.array.dtype)]

    def numel(self, tensor: MeshParameter | MeshGradient) -> int:
        return tensor.numel if isinstance(tensor, MeshGradient) else int(tensor.array.size)

    def host_array(self, tensor: Any) -> HostArray:
        raise TypeError("parameters of a mesh are not in host memory")

    def host_arrays(self, tensors: Sequence[Any]) -> HostArrays:
        return HostArrays.columns(map(self.host_array, tensors))

    def to_host(self, copies: Sequence[Copy], host: np.ndarray) -> Event:
        local = [(c, c.tensor.array.addressable_data(0)) for c in copies]
        fill(host, [(c.offset, read(array, c.start, c.start + c.numel)) for c, array in local])
        return Done()

    def mark(self) -> Event:
        return Done()

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        pass

    def start_alike(self, specs: Sequence[ParamSpec], tensors: Sequence[MeshParameter]) -> None:
        if self.collectives.world_size == 1:
            return
        for spec, tensor in zip(specs, tensors, strict=True):
            tensor.array = self.of_rank_0(spec.name, tensor.array)

    def of_rank_0(self, name: str, array: jax.Array) -> jax.Array:
        """Rank 0's value of a replicated array, on all ranks."""
        with meeting(self.ranks[0], f"parameter {name!r}: initial value"):
            return jax.block_until_ready(self._of_rank_0(array))

    def free_bytes(self) -> int | None:
        return free_bytes([self.axis.devices[rank] for rank in self.ranks])

    # --- gradients -----------------------------------------------------------------------------------

    def reduce(
        self,
        bucket: Bucket,
        wire: ElementType,
        gradients: Mapping[int, MeshGradient],
        out: np.ndarray,
        staging: Lease,
    ) -> Event:
        while len(self._leaving) >= _LEAVE_AT_ONCE:  # before another one is packed
            self._leaving.popleft().wait()
        return traced(self.trace, TO_HOST, bucket.index, out.nbytes, lambda: self._reduce(bucket, wire, gradients, out))

    def _reduce(
        self, bucket: Bucket, wire: ElementType, gradients: Mapping[int, MeshGradient], out: np.ndarray
    ) -> Event:
        pieces = [piece for piece in bucket.pieces if piece.param in gradients]
        arrays = [gradients[piece.param].array for piece in pieces]
        runs = tuple(_Run(piece.numel, piece.offset) for piece in pieces)
        unreduced = any(gradients[piece.param].unreduced for piece in pieces)
        if not pieces:
            out[:] = 0
            return Done()
        what = f"bucket {bucket.index}: exchange of gradients"
        with meeting(self.ranks[0], what):
            program = self._reduce_unreduced if unreduced else self._reduce_mean
            if not unreduced:
                wire = max((BY_NUMPY[array.dtype] for array in arrays), key=lambda dtype: dtype.itemsize)
            places = self.axis.constant(split_places(piece.start for piece in pieces))
            shards = self.axis.parts(program(arrays, places, runs, bucket.shard_numel, wire.numpy))
        if unreduced:
            self._count_sent(bucket.shard_numel * wire.itemsize)
        for piece in pieces:
            if (used := gradients[piece.param].used) is not None:
                used(piece.numel)
        return self._receive(shards, out, what)

    def _receive(self, shards: Sequence[jax.Array], out: np.ndarray, what: str) -> Event:
        """Start the copies of this process's shards to the host."""
        for shard in shards:
            shard.copy_to_host_async()

        def finish() -> None:
            with meeting(self.ranks[0], what):
                hosts = [np.asarray(shard) for shard in shards]
            parts = out.reshape(len(hosts), -1)
            rows = [(kernels.address(a), kernels.address(b), a.size) for a, b in zip(hosts, parts, strict=True)]
            kernels.cast(kernels.spans_of(rows), BY_NUMPY[hosts[0].dtype], FLOAT32, threads=self._threads)

        self._leaving.append(arrival := _Arrival(finish))
        return arrival

    def _reduction(self, to_shard: Any, spec: PartitionSpec) -> Any:
        def reduce(
            arrays: list[jax.Array], places: jax.Array, runs: tuple[_Run, ...], shard_numel: int, wire: np.dtype
        ) -> jax.Array:
            def each(arrays: list[jax.Array], places: jax.Array) -> jax.Array:
                given = zip(arrays, places, runs, strict=True)
                cuts = [cut_run(array.reshape(-1), place, run.numel) for array, place, run in given]
                return to_shard(cuts, runs, shard_numel, wire)

            return self.axis.map(each, (spec, REPLICATED), self.axis.split)(arrays, places)

        return reduce

    def _exchange(self, cuts: list[jax.Array], runs: tuple[_Run, ...], shard_numel: int, wire: np.dtype) -> jax.Array:
        flat = _pack([cut.astype(wire) for cut in cuts], runs, self.world_size * shard_numel)
        if self._native:
            total = lax.psum_scatter(flat, self.axis.name, tiled=True).astype(jnp.float32)
            return total / self.world_size
        slices = flat.reshape(self.world_size, shard_numel)
        return ordered_mean(lax.all_to_all(slices, self.axis.name, split_axis=0, concat_axis=0, tiled=True))

    def _own_slice(self, cuts: list[jax.Array], runs: tuple[_Run, ...], shard_numel: int, wire: np.dtype) -> jax.Array:
        """This rank's slice of a mean that all ranks have: to sum equal values and divide might change them."""
        flat = _pack([cut.astype(wire) for cut in cuts], runs, self.world_size * shard_numel)
        return self.axis.own_slice(flat, shard_numel)

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
            writes.append(_Write(_Run(piece.numel, piece.offset), tensor.array.shape, piece.numel == tensor.array.size))
        what = f"bucket {bucket.index}: gathering of parameters"
        with meeting(self.ranks[0], what):
            # It may share the staging memory; nothing reads it any more when the results are there.
            stacked = self.axis.stack(list(shards.reshape(len(self.ranks), -1)))
            places = self.axis.constant(split_places(piece.start for piece in pieces))
            results = self._gather(stacked, [tensor.partial for tensor in written], places, tuple(writes))
        for piece, tensor, result in zip(pieces, written, results, strict=True):
            tensor.received += piece.numel
            tensor.partial = result  # the partial value before was donated
            if tensor.received == result.size:
                tensor.array, tensor.partial = result, None
        self._count_sent(bucket.shard_numel * bucket.dtype.itemsize)

        def finish() -> None:
            with meeting(self.ranks[0], what):
                # A later bucket may have continued a partial value: that was donated, so wait for its successor.
                jax.block_until_ready([t.array if t.partial is None else t.partial for t in written])

        return Waiting(finish)

    def _gather_and_write(
        self, shards: jax.Array, partials: list[jax.Array | None], places: jax.Array, writes: tuple[_Write, ...]
    ) -> list[jax.Array]:
        def each(shard: jax.Array, partials: list[jax.Array | None], places: jax.Array) -> list[jax.Array]:
            flat = self.axis.gather(shard)
            results = []
            for (run, shape, is_whole), partial, place in zip(writes, partials, places, strict=True):
                value = flat[run.offset : run.offset + run.numel]
                if partial is not None or not is_whole:
                    into = jnp.zeros(math.prod(shape), flat.dtype) if partial is None else partial.reshape(-1)
                    value = write_run(into, place, value)
                results.append(value.reshape(shape))
            return results

        return self.axis.map(each, (self.axis.split, REPLICATED, REPLICATED), REPLICATED)(shards, partials, places)

    def _count_sent(self, shard_bytes: int) -> None:
        """Count that each of this process's ranks sent a shard of this size to every other rank."""
        self.sent_bytes += len(self.ranks) * (self.world_size - 1) * shard_bytes


def _pack(cuts: Sequence[jax.Array], runs: Sequence[_Run], numel: int) -> jax.Array:
    """A flat bucket: the cuts at their offsets, zeros elsewhere."""
    dtype = cuts[0].dtype
    filled, end = [], 0
    for cut, run in zip(cuts, runs, strict=True):
        filled += [jnp.zeros(run.offset - end, dtype), cut] if run.offset > end else [cut]
        end = run.offset + run.numel
    return jnp.concatenate([*filled, jnp.zeros(numel - end, dtype)])
