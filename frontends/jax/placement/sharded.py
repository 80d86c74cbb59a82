"""Stage 3 on a mesh axis: each rank's device, or its host memory, holds a slice of each large parameter.

A rank owns the optimizer states of exactly that slice. Its gradients are the mean over all ranks already
(``gather.py``), and an update sends nothing to other ranks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from offload_core.config.options import OffloadConfig
from offload_core.device.events import Done, Event, Waiting
from offload_core.device.host import fill
from offload_core.device.protocols import Copy
from offload_core.dtypes import BY_NUMPY, FLOAT32, ElementType
from offload_core.errors import ConfigError
from offload_core.layout.partition import Bucket, ParamSpec, round_up, shard_unit
from offload_core.ranks.collectives import merge
from offload_core.step.at_once import SHARDS, Held

from ..device import HOST_MEMORY, beside_its_device, in_host_memory, read
from ..launch import meeting
from ..mesh.gather import Gathering, Shard
from ..mesh.mesh import Donated, JaxMeshDevice, MeshAxis, MeshGradient, MeshParameter
from ..runs import cut_run, split_places, write_run
from ..tree.shard_layout import ShardLayout
from ..tree.wrapped_tree import Leaf
from .on_mesh import Differentiated, OnMesh, names


@dataclass
class ShardedParameter:
    """A parameter of which each rank has a slice: its present value, and the arrived part of its next value."""

    array: jax.Array
    layout: ShardLayout
    partial: Any = None
    """The next value: an array like ``array``; for a parameter in host memory, a NumPy array for each of this process's
    ranks."""
    received: int = 0
    """Elements of each rank's padded slice that have arrived."""


class ShardedMeshDevice(JaxMeshDevice):
    """The core's ``Device`` on a mesh axis, for parameters of both kinds."""

    def __init__(self, axis: MeshAxis, *, native: bool = False, threads: int = 1) -> None:
        super().__init__(axis, native=native, threads=threads)
        self._mesh_axis = axis
        self._cut = axis.compile(self._cut_from_slice, static_argnums=(2, 3, 4))
        self._write = axis.compile(self._write_to_slice, static_argnums=(3, 4, 5), donate_argnums=1)

    def numel(self, tensor: MeshParameter | MeshGradient | ShardedParameter) -> int:
        return tensor.layout.numel if isinstance(tensor, ShardedParameter) else super().numel(tensor)

    def to_host(self, copies: Sequence[Copy], host: np.ndarray) -> Event:
        whole = [copy for copy in copies if not isinstance(copy.tensor, ShardedParameter)]
        if whole:
            return super().to_host(copies, host)  # the core reads one parameter at a time
        runs = []
        for copy in copies:
            parts, layout = self.axis.parts(copy.tensor.array), copy.tensor.layout
            offset = copy.offset
            for rank, start, stop in layout.locate(copy.start, copy.numel, len(self.ranks)):
                runs.append((offset, read(parts[rank], start, min(stop, layout.local_numel))))
                offset += stop - start
        fill(host, runs)
        return Done()

    # --- gradients -----------------------------------------------------------------------------------

    def _reduce(
        self, bucket: Bucket, wire: ElementType, gradients: Mapping[int, MeshGradient], out: np.ndarray
    ) -> Event:
        if not bucket.partitioned or not gradients:
            return super()._reduce(bucket, wire, gradients, out)
        [gradient] = gradients.values()
        array, start, stop = gradient.array, bucket.shard_start, bucket.shard_start + bucket.shard_numel
        what = f"bucket {bucket.index}: copies of gradients"
        valid = min(stop, array.size // self.world_size) - start
        at = self._mesh_axis.replicate(split_places([start]))
        assert isinstance(array.sharding, NamedSharding)
        with meeting(self.ranks[0], what):
            shards = self._cut(array, at, array.sharding.spec, valid, bucket.shard_numel)
        if gradient.used is not None:
            gradient.used(bucket.padded_numel)
        return self._receive(self.axis.parts(shards), out, what)

    def _cut_from_slice(
        self, array: jax.Array, start: jax.Array, spec: PartitionSpec, numel: int, shard_numel: int
    ) -> jax.Array:
        def each(local: jax.Array, start: jax.Array) -> jax.Array:
            run = cut_run(local.reshape(-1), start[0], numel)
            return jnp.concatenate([run, jnp.zeros(shard_numel - numel, run.dtype)])

        return self.axis.map(each, (spec, PartitionSpec()), self.axis.split)(array, start)

    # --- publishing ----------------------------------------------------------------------------------

    def _publish(self, bucket: Bucket, shards: np.ndarray, tensors: Sequence[Any], present: set[int]) -> Event:
        if not bucket.partitioned:
            return super()._publish(bucket, shards, tensors, present)
        tensor: ShardedParameter = tensors[bucket.pieces[0].param]
        local = shards.reshape(len(self.ranks), -1)
        if in_host_memory(tensor.array):
            self._write_to_host(bucket, local, tensor)
            return Done()
        layout, what = tensor.layout, f"bucket {bucket.index}: copies of parameters"
        valid = min(bucket.shard_numel, layout.local_numel - bucket.shard_start)
        spec = tensor.array.sharding.spec  # type: ignore[attr-defined]
        with meeting(self.ranks[0], what):
            stacked = self.axis.stack(list(local))
            result = self._write(
                stacked,
                tensor.partial,
                self._mesh_axis.replicate(split_places([bucket.shard_start])),
                spec,
                valid,
                layout.local_shape,
            )
        tensor.partial = result
        self._count_received(bucket, tensor)

        def finish() -> None:
            with meeting(self.ranks[0], what):
                # A later bucket may have continued a partial value: that was donated, so wait for its successor.
                jax.block_until_ready(tensor.array if tensor.partial is None else tensor.partial)

        return Waiting(finish)

    def _count_received(self, bucket: Bucket, tensor: ShardedParameter) -> None:
        tensor.received += bucket.shard_numel
        if tensor.received == tensor.layout.padded_numel:
            tensor.array, tensor.partial = tensor.partial, None

    def _write_to_slice(
        self,
        stacked: jax.Array,
        partial: jax.Array | None,
        start: jax.Array,
        spec: PartitionSpec,
        numel: int,
        local_shape: tuple[int, ...],
    ) -> jax.Array:
        def each(shard: jax.Array, partial: jax.Array | None, start: jax.Array) -> jax.Array:
            value = shard[:numel]
            if numel < math.prod(local_shape):
                into = jnp.zeros(math.prod(local_shape), shard.dtype) if partial is None else partial.reshape(-1)
                value = write_run(into, start[0], value)
            return value.reshape(local_shape)

        return self.axis.map(each, (self.axis.split, spec, PartitionSpec()), spec)(stacked, partial, start)

    def _write_to_host(self, bucket: Bucket, local: np.ndarray, tensor: ShardedParameter) -> None:
        layout = tensor.layout
        if tensor.partial is None:
            tensor.partial = [np.empty(layout.local_numel, local.dtype) for _ in self.ranks]
        for shard, into in zip(local, tensor.partial, strict=True):
            run = into[bucket.shard_start : bucket.shard_start + bucket.shard_numel]
            run[:] = shard[: run.size]
        if tensor.received + bucket.shard_numel == layout.padded_numel:
            parts = [part.reshape(layout.local_shape) for part in tensor.partial]  # they are never written again
            tensor.partial = self._mesh_axis.of_parts(layout.shape, tensor.array.sharding, parts)
        self._count_received(bucket, tensor)


class ShardedOnMesh(OnMesh):
    """Large parameters are cut along a dimension that the mesh axis divides; others are replicated."""

    def __init__(self, axis: MeshAxis, config: OffloadConfig) -> None:
        super().__init__(axis, config)
        self._sharded = ShardedMeshDevice(axis, native=config.reduction == "native", threads=config.threads)
        self.device = self._sharded
        self._config = config
        self._memory_kind = None if config.offload_param is None else HOST_MEMORY
        if self._memory_kind is not None:
            kinds = [memory.kind for memory in axis.devices[axis.ranks[0]].addressable_memories()]
            if self._memory_kind not in kinds:
                raise ConfigError(
                    f"offload_param={config.offload_param!r}: the {axis.devices[0].platform} backend has the memory "
                    f"kinds {', '.join(map(repr, kinds))} and no {HOST_MEMORY!r}; expected offload_param=None here"
                )
        self._unit = shard_unit(config.state_block)
        world_size = axis.world_size
        self._bucket_numel = round_up(config.reduce_bucket_size, self._unit * world_size) // world_size
        self._layouts: list[ShardLayout | None] = []

    # --- where parameters lie ------------------------------------------------------------------------

    def place(self, path: str, leaf: Any) -> jax.Array:
        dim = self._dim_of(leaf)
        if dim is None:
            return super().place(path, leaf)
        if self.device.collectives.world_size > 1 and getattr(leaf, "is_fully_addressable", True):
            leaf = self._sharded.of_rank_0(path, self._axis.replicate(leaf))  # each process has one of its own
        return self._axis.put(leaf, self._cut_along(dim), self._memory_kind)

    def _cut_along(self, dim: int) -> PartitionSpec:
        all_names = self._axis.mesh.axis_names  # the other axes have one device
        return PartitionSpec(*[None] * dim, all_names if len(all_names) > 1 else self._axis.name)

    def _dim_of(self, leaf: Any) -> int | None:
        """Return the dimension along which a parameter is cut; None: it is not cut.

        A parameter that is cut already keeps its dimension. Otherwise it is the first dimension that the ranks divide,
        without the very first of several, because that may be the dimension of stacked layers.
        """
        n = self._axis.world_size
        if leaf.size == 0:
            return None
        for dim, entry in enumerate(self.spec_of(leaf)):
            if self._axis.name in names((entry,)):
                return dim
        if leaf.size < self._config.param_persistence_threshold:
            return None
        dims = range(1, leaf.ndim) if leaf.ndim > 1 else range(leaf.ndim)
        return next((dim for dim in dims if leaf.shape[dim] % n == 0), None)

    def layout(self, leaf: Any) -> ShardLayout | None:
        dim = self._dim_of(leaf)
        if dim is None:
            return None
        return ShardLayout(leaf.shape, dim, self._axis.world_size, self._bucket_numel, self._unit)

    def held(self, leaves: Sequence[Leaf], specs: Sequence[ParamSpec]) -> list[Held]:
        self._layouts = [leaf.layout for leaf in leaves]
        return [self._replicated(leaf, specs) if leaf.layout is None else self._cut(leaf, specs) for leaf in leaves]

    def _cut(self, leaf: Leaf, specs: Sequence[ParamSpec]) -> Held:
        assert leaf.layout is not None
        numel = len(self._axis.ranks) * leaf.layout.local_numel
        n_bytes = numel * specs[leaf.params[0]].dtype.itemsize
        where = "device" if self._memory_kind is None else "host"
        return Held(leaf.params, n_bytes, n_bytes, numel * FLOAT32.itemsize, SHARDS, where)

    def start(self, leaves: Sequence[Leaf], arrays: Sequence[jax.Array]) -> list[Any]:
        return [
            MeshParameter(array) if leaf.layout is None else ShardedParameter(array, leaf.layout)
            for leaf, array in zip(leaves, arrays, strict=True)
        ]

    def cast(self, leaf: Leaf, array: jax.Array) -> jax.Array:
        if leaf.layout is None or array.dtype == leaf.dtype:
            return super().cast(leaf, array)
        if not in_host_memory(array):
            return self._axis.put(array.astype(leaf.dtype), self._cut_along(leaf.layout.dim))
        parts = [np.asarray(part).astype(leaf.dtype) for part in self._axis.parts(array)]
        return self._axis.of_parts(array.shape, array.sharding, parts)

    def written(self, leaf: Leaf, targets: Sequence[Any], like: jax.Array) -> jax.Array:
        [target] = targets
        if isinstance(target, MeshParameter):
            return super().written(leaf, targets, like)
        # On one device XLA calls a sharding replicated that is cut.
        return self._axis.put(target.array, self._cut_along(target.layout.dim), self._memory_kind)

    def restored(self, leaf: Leaf, value: np.ndarray, like: jax.Array) -> jax.Array:
        if leaf.layout is None:
            return super().restored(leaf, value, like)
        return self._axis.put(value.astype(like.dtype), self._cut_along(leaf.layout.dim), self._memory_kind)

    def spread(self, leaf: Leaf, parts: Sequence[np.ndarray], like: jax.Array) -> jax.Array:
        if leaf.layout is None:
            return super().spread(leaf, parts, like)
        return self._axis.of_parts(leaf.shape, beside_its_device(like.sharding), parts)

    def parts(self, leaf: Leaf, array: jax.Array) -> list[jax.Array]:
        return super().parts(leaf, array) if leaf.layout is None else self._axis.parts(array)

    def to_numpy(self, leaf: Leaf | None, array: jax.Array) -> np.ndarray:
        collectives = self.device.collectives
        if leaf is None or leaf.layout is None or collectives.world_size == 1:
            return super().to_numpy(leaf, array)
        words = np.zeros(-(-array.nbytes // 8), np.int64)  # each process adds the bits that it has to zeros
        whole = words.view(np.uint8)[: array.nbytes].view(array.dtype).reshape(array.shape)
        for shard in array.addressable_shards:
            whole[shard.index] = np.asarray(shard.data)
        merge(collectives.sum_integers, words, "parameters")
        return whole

    # --- gradients -----------------------------------------------------------------------------------

    def as_gradient(self, leaf: Leaf, gradient: Any, like: jax.Array, *, unreduced: bool, donate: bool) -> list[Any]:
        if leaf.layout is None:
            return super().as_gradient(leaf, gradient, like, unreduced=unreduced, donate=donate)
        array = self._axis.put(gradient, self._cut_along(leaf.layout.dim))
        used = Donated((gradient, array), leaf.layout.numel).use if donate else None
        return [MeshGradient(array, False, leaf.layout.numel, BY_NUMPY[np.dtype(like.dtype)], used)]

    def _on_axis(self, trained: Sequence[Any]) -> list[jax.Array]:
        return [
            self._axis.replicate(array)
            if layout is None
            else self._axis.put(array, self._cut_along(layout.dim), self._memory_kind)
            for array, layout in zip(trained, self._layouts, strict=True)
        ]

    def _specs(self, whole: PartitionSpec) -> list[PartitionSpec]:
        return [whole if layout is None else self._cut_along(layout.dim) for layout in self._layouts]

    def _differentiated(self, trained: Sequence[jax.Array], *, varying: bool) -> Differentiated:
        def leaf_of(array: jax.Array, layout: ShardLayout | None) -> jax.Array:
            # Only its gradient is used. The value is NaN, so that a model which computes with it, and has not gathered
            # the parameter, gives NaN. Under jax.debug_nans that would be the first NaN that JAX finds.
            unusable = jnp.inf if jax.config.jax_debug_nans else jnp.nan  # type: ignore[attr-defined]
            leaf = array if layout is None else jnp.full(array.shape, unusable, jnp.float32)
            return self._axis.vary(leaf) if varying else leaf

        def seen(leaves: Sequence[Any]) -> list[Any]:
            found = []
            for leaf, array, layout in zip(leaves, trained, self._layouts, strict=True):
                if layout is not None:
                    leaf = Shard(array, leaf, self._gathering(layout, array))
                found.append(leaf)
            return found

        return Differentiated(list(map(leaf_of, trained, self._layouts)), seen)

    def _gathering(self, layout: ShardLayout, array: jax.Array) -> Gathering:
        config = self._config
        wire = jnp.dtype(config.communication_dtype or array.dtype)
        dim = layout.dim - len(layout.shape)
        return Gathering(self._axis.name, layout.world_size, dim, wire, config.reduction == "native")

    def _as_outputs(self, gradients: Sequence[jax.Array]) -> list[jax.Array]:
        return [
            gradient[None] if layout is None else gradient
            for gradient, layout in zip(gradients, self._layouts, strict=True)
        ]
