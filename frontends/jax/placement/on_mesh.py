"""Parameters on a mesh axis, whose devices are the ranks: replicated, or (stage 3) each rank has a slice.

Each rank computes its gradients. A rank owns the optimizer states of exactly its slice of a sharded parameter.
The gradients of that slice are the mean over all ranks already (``mesh/gather.py``), and an update sends nothing of it
to other ranks.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from offload_core.config.options import OffloadConfig
from offload_core.device.protocols import Device
from offload_core.dtypes import BY_NUMPY, FLOAT32, ElementType
from offload_core.layout.partition import ParamSpec, cut, round_up, shard_unit
from offload_core.layout.regions import InMemory
from offload_core.memory.plan import SHARDS, ArrayBytes
from offload_core.ranks.collectives import merged
from offload_core.rules import Matrix

from ..devices.mesh.axis import REPLICATED, MeshAxis
from ..devices.mesh.device import JaxMeshDevice
from ..devices.mesh.sharded_device import ShardedMeshDevice
from ..devices.mesh.tensors import Donated, MeshGradient, MeshParameter, ShardedParameter
from ..tree.memory_kinds import HOST_MEMORY, beside_its_device, check_host_memory, in_host_memory
from ..tree.shard_layout import ShardLayout
from ..tree.trees import to_numpy
from ..tree.wrapped_tree import Leaf
from .functions import RankFunctions


class OnMesh:
    """Parameters on a mesh axis.

    In stage 3 large ones are cut along a dimension that the number of ranks divides. All others are replicated.
    """

    alone = False
    per_rank = True
    exchanges_matrices = False

    def __init__(self, axis: MeshAxis, config: OffloadConfig) -> None:
        self.on_host = axis.devices[0].platform == "cpu"
        self._axis = axis
        self._config = config
        self._memory_kind = None if config.offload_param is None else HOST_MEMORY
        """The memory of sharded parameters."""
        if self._memory_kind is not None:
            check_host_memory([axis.devices[rank] for rank in axis.ranks])
        kind = ShardedMeshDevice if config.stage == 3 else JaxMeshDevice
        self._mesh_device: JaxMeshDevice = kind(axis, native=config.reduction == "native", threads=config.threads)
        self.device: Device = self._mesh_device
        self.compile = RankFunctions(axis, config, self._memory_kind).compile

    # --- where parameters lie ------------------------------------------------------------------------

    def place(self, path: str, leaf: Any) -> jax.Array:
        dim = self._dim_of(leaf)
        if dim is None:
            return self._axis.replicate(leaf)
        if self.device.collectives.world_size > 1 and getattr(leaf, "is_fully_addressable", True):
            leaf = self._mesh_device.of_rank_0(path, self._axis.replicate(leaf))  # each process has one of its own
        return self._axis.put(leaf, self._axis.cut_along(dim), self._memory_kind)

    def sharding(self, leaf: Any, *, trained: bool) -> NamedSharding:
        dim = self._dim_of(leaf) if trained else None
        if dim is None:
            return NamedSharding(self._axis.mesh, REPLICATED)
        return NamedSharding(self._axis.mesh, self._axis.cut_along(dim), memory_kind=self._memory_kind)

    def _dim_of(self, leaf: Any) -> int | None:
        """Return the dimension along which a parameter is cut, before :meth:`place` or after it; None: it is not cut.

        A parameter that is cut already keeps its dimension. Otherwise it is the first dimension that the ranks divide,
        without the very first of several, because that may be the dimension of stacked layers.
        """
        if self._config.stage < 3 or leaf.size == 0:
            return None
        for dim, entry in enumerate(self._axis.spec_of(leaf)):
            if self._axis.cuts([entry]):
                return dim
        if leaf.size < self._config.param_persistence_threshold:
            return None
        dims = range(1, leaf.ndim) if leaf.ndim > 1 else range(leaf.ndim)
        return next((dim for dim in dims if leaf.shape[dim] % self._axis.world_size == 0), None)

    def leaf(
        self, position: int, path: str, value: Any, dtype: ElementType, first_param: int, matrix: Matrix | None
    ) -> Leaf:
        dim, layout = self._dim_of(value), None
        if dim is not None:
            n, unit = self._axis.world_size, shard_unit(self._config.state_block)
            bucket_numel = round_up(self._config.reduce_bucket_size, unit * n) // n
            layout = ShardLayout(value.shape, dim, n, bucket_numel, unit)
        leaf = Leaf(
            position, path, tuple(value.shape), dtype.numpy, range(first_param, first_param + 1), matrix, layout
        )
        if layout is not None and matrix is not None:
            buckets = cut(self._config, self.specs(leaf, dtype), world_size=layout.world_size)
            leaf = replace(leaf, layout=replace(layout, starts=tuple(bucket.shard_start for bucket in buckets)))
        if matrix is not None:
            is_cut = leaf.layout is not None and leaf.layout.dim >= len(leaf.shape) - 2
            self.exchanges_matrices |= is_cut or self.device.collectives.world_size > 1
        if leaf.layout is not None:
            assert isinstance(self._mesh_device, ShardedMeshDevice)
            self._mesh_device.layouts[first_param] = leaf.layout
        return leaf

    def specs(self, leaf: Leaf, dtype: ElementType) -> list[ParamSpec]:
        elements = leaf.layout or InMemory(leaf.shape)
        numel = math.prod(leaf.shape) if leaf.layout is None else leaf.layout.numel
        cut_at = None
        if leaf.layout is not None and leaf.matrix is not None and leaf.layout.dim < len(leaf.shape) - 2:
            cut_at = leaf.layout.world_size * math.prod(leaf.matrix)  # each rank has whole matrices
        partitioned = leaf.layout is not None
        return [
            ParamSpec(
                leaf.path, numel, dtype, elements=elements, partitioned=partitioned, matrix=leaf.matrix, cut_at=cut_at
            )
        ]

    def held(self, leaves: Sequence[Leaf], specs: Sequence[ParamSpec]) -> list[ArrayBytes]:
        found, n_ranks = [], len(self._axis.ranks)
        for leaf in leaves:
            [param] = leaf.params
            if leaf.layout is None:
                found.append(ArrayBytes.of_shards(leaf.params, [specs[param]], [n_ranks], on_host=False))
                continue
            numel = n_ranks * leaf.layout.local_numel
            n_bytes = numel * specs[param].dtype.itemsize
            where = "device" if self._memory_kind is None else "host"
            found.append(ArrayBytes(leaf.params, n_bytes, n_bytes, numel * FLOAT32.itemsize, SHARDS, where))
        return found

    def cast(self, leaf: Leaf, array: jax.Array) -> jax.Array:
        if leaf.layout is None or array.dtype == leaf.dtype:
            return array.astype(leaf.dtype)
        if not in_host_memory(array):
            return self._put(leaf, array.astype(leaf.dtype))
        parts = [np.asarray(part).astype(leaf.dtype) for part in self._axis.parts(array)]
        return self._axis.of_parts(array.shape, array.sharding, parts)

    def pass_through(self, leaf: Any) -> Any:
        return self._axis.replicate(leaf) if isinstance(leaf, jax.Array) else leaf

    def restored(self, leaf: Leaf, value: np.ndarray, like: jax.Array) -> jax.Array:
        return self._put(leaf, value.astype(like.dtype))

    def _put(self, leaf: Leaf, value: Any) -> jax.Array:
        """Return a value of a parameter where the parameter lies."""
        if leaf.layout is None:
            return self._axis.replicate(value)
        return self._axis.put(value, self._axis.cut_along(leaf.layout.dim), self._memory_kind)

    # --- the core's tensors ----------------------------------------------------------------------

    def start(self, leaves: Sequence[Leaf], arrays: Sequence[jax.Array]) -> list[Any]:
        return [
            MeshParameter(array) if leaf.layout is None else ShardedParameter(array, layout=leaf.layout)
            for leaf, array in zip(leaves, arrays, strict=True)
        ]

    def targets(self, leaves: Sequence[Leaf], arrays: Sequence[jax.Array], *, donate: bool) -> list[Any]:
        tensors = self.start(leaves, arrays)
        return [tensor.donating() if donate and not in_host_memory(tensor.array) else tensor for tensor in tensors]

    def started(self, arrays: Sequence[jax.Array], tensors: Sequence[Any]) -> list[jax.Array]:
        return [tensor.array for tensor in tensors]

    def check_gradient(self, leaf: Leaf, gradient: Any, like: jax.Array, *, unreduced: bool) -> None:
        pass

    def as_gradient(self, leaf: Leaf, gradient: Any, like: jax.Array, *, unreduced: bool, donate: bool) -> list[Any]:
        numel, dtype = like.size, like.dtype
        if leaf.layout is not None:  # the mean already
            array, unreduced = self._axis.put(gradient, self._axis.cut_along(leaf.layout.dim)), False
            numel = leaf.layout.numel
        elif unreduced:
            array, dtype = self._axis.put(gradient, self._axis.split), gradient.dtype
        else:
            array = self._axis.replicate(gradient)
        used = Donated((gradient, array), numel).use if donate else None
        return [MeshGradient(array, unreduced, numel, BY_NUMPY[np.dtype(dtype)], used)]

    def written(self, leaf: Leaf, targets: Sequence[Any], like: jax.Array) -> jax.Array:
        [target] = targets
        if like.size == 0:  # it lies in no bucket, and the old array may be donated by now
            return self._axis.replicate(np.empty(like.shape, like.dtype))
        # On one device XLA calls a sharding replicated that is cut.
        return target.array if leaf.layout is None else self._put(leaf, target.array)

    # --- whole values and states ---------------------------------------------------------------------

    def to_numpy(self, leaf: Leaf | None, array: jax.Array) -> np.ndarray:
        if leaf is None or leaf.layout is None or self.device.collectives.world_size == 1:
            return to_numpy(array)
        parts = [(shard.index, np.asarray(shard.data)) for shard in array.addressable_shards]
        return merged(self.device.collectives, array.shape, np.dtype(array.dtype), parts, "parameters")

    def joined(self, leaf: Leaf, parts: Sequence[np.ndarray], what: str) -> np.ndarray:
        [part] = parts
        return part.reshape(leaf.shape) if leaf.layout is None else leaf.layout.from_core(part)

    def cut(self, leaf: Leaf, whole: np.ndarray) -> list[np.ndarray]:
        return [whole.reshape(-1) if leaf.layout is None else leaf.layout.to_core(whole)]

    def spread(self, leaf: Leaf, parts: Sequence[np.ndarray], like: jax.Array) -> jax.Array:
        sharding = beside_its_device(like.sharding)
        if leaf.layout is not None:
            return self._axis.of_parts(leaf.shape, sharding, parts)
        [whole] = parts
        return self._axis.put(whole.reshape(leaf.shape), REPLICATED, sharding.memory_kind)

    def parts(self, leaf: Leaf, array: jax.Array) -> list[jax.Array]:
        return [array.addressable_data(0)] if leaf.layout is None else self._axis.parts(array)
