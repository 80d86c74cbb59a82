"""The core's ``Device`` on a mesh axis in stage 3: each rank holds a slice of each large parameter."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

from offload_core.device.events import Done, Event
from offload_core.device.host import fill
from offload_core.device.protocols import Copy, Matrices, OneMatrix
from offload_core.dtypes import ElementType
from offload_core.layout.partition import Bucket

from ...tree.memory_kinds import in_host_memory
from ...tree.shard_layout import ShardLayout
from ..device import read
from ..device_kernels import computed
from . import programs
from .axis import MeshAxis
from .device import JaxMeshDevice
from .tensors import MeshGradient, ShardedParameter


class ShardedMeshDevice(JaxMeshDevice):
    """The core's ``Device`` on a mesh axis, for parameters that are sharded and for those that are not."""

    axis: MeshAxis

    def __init__(self, axis: MeshAxis, *, native: bool = False, threads: int = 1) -> None:
        super().__init__(axis, native=native, threads=threads)
        self.layouts: dict[int, ShardLayout] = {}
        """The layout of each sharded parameter, by the core's number."""
        self._cut = axis.compile(programs.cut_from_slice(axis), static_argnums=(2, 3, 4))
        self._write = axis.compile(programs.write_to_slice(axis), static_argnums=(3, 4, 5), donate_argnums=1)

    def to_host(self, copies: Sequence[Copy], host: np.ndarray) -> Event:
        if any(not isinstance(copy.tensor, ShardedParameter) for copy in copies):
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

    def _transform(self, bucket: Bucket, matrices: Matrices, shards: np.ndarray) -> Event:
        if not bucket.partitioned or not matrices.rows:
            return super()._transform(bucket, matrices, shards)
        param, (rows, columns), n = matrices.rows[0].param, matrices.shape, self.world_size
        layout, numel = self.layouts[param], rows * columns
        valid = min(bucket.shard_numel, layout.local_numel - bucket.shard_start)
        local = [shard[:valid] for shard in shards.reshape(len(self.ranks), -1)]
        dim = layout.dim - len(layout.shape)
        if dim < -2:  # each rank has whole matrices
            own = [
                OneMatrix(param, i * bucket.shard_numel + offset, rank)
                for i, rank in enumerate(self.ranks)
                for offset in range(0, valid, numel)
            ]
            return computed(replace(matrices, rows=tuple(own)), shards, self.axis.devices.__getitem__)
        count = n * valid // numel
        owned = zip(range(count), matrices.rows, strict=False)  # padding may count as one more
        own = [OneMatrix(param, i * numel, row.owner) for i, row in owned]
        shape = (count, rows // n, columns) if dim == -2 else (count, rows, columns // n)
        parts = dict(zip(self._own_devices(), [part.reshape(shape) for part in local], strict=True))
        self._count_sent(2 * valid * shards.itemsize)
        spec = self.axis.cut_along(3 + dim)
        return self._exchange(bucket, replace(matrices, rows=tuple(own)), (count, rows, columns), spec, parts)

    def _reduce(
        self, bucket: Bucket, comm_dtype: ElementType, gradients: Mapping[int, MeshGradient], out: np.ndarray
    ) -> Event:
        if not bucket.partitioned or not gradients:
            return super()._reduce(bucket, comm_dtype, gradients, out)
        [gradient] = gradients.values()
        array, start, stop = gradient.array, bucket.shard_start, bucket.shard_start + bucket.shard_numel
        what = f"bucket {bucket.index}: copies of gradients"
        valid = min(stop, array.size // self.world_size) - start
        at = self._places((start,))
        assert isinstance(array.sharding, NamedSharding)
        with self._meeting(what):
            shards = self._cut(array, at, array.sharding.spec, valid, bucket.shard_numel)
        if gradient.used is not None:
            gradient.used(bucket.padded_numel)
        return self._receive(self.axis.parts(shards), out, what)

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
        assert isinstance(tensor.array.sharding, NamedSharding)
        spec = tensor.array.sharding.spec
        with self._meeting(what):
            stacked = self.axis.stack(list(local))
            at = self._places((bucket.shard_start,))
            result = self._write(stacked, tensor.partial, at, spec, valid, layout.local_shape)
        tensor.advance(result, bucket.shard_numel, of=layout.padded_numel)
        return self._arrives([tensor], what)

    def _write_to_host(self, bucket: Bucket, local: np.ndarray, tensor: ShardedParameter) -> None:
        layout = tensor.layout
        value = tensor.partial or [np.empty(layout.local_numel, local.dtype) for _ in self.ranks]
        for shard, into in zip(local, value, strict=True):
            run = into[bucket.shard_start : bucket.shard_start + bucket.shard_numel]
            run[:] = shard[: run.size]
        if tensor.received + bucket.shard_numel == layout.padded_numel:
            parts = [part.reshape(layout.local_shape) for part in value]  # nothing writes to them after this
            value = self.axis.of_parts(layout.shape, tensor.array.sharding, parts)
        tensor.advance(value, bucket.shard_numel, of=layout.padded_numel)
