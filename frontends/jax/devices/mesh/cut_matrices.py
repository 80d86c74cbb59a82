"""Parameters that were placed so that several devices hold parts of each of their matrices."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from offload_core.device.events import Done, Event, Waiting, traced
from offload_core.device.protocols import Matrices, OneMatrix
from offload_core.device.trace import MATRICES, Trace
from offload_core.errors import ParameterError
from offload_core.layout.partition import Bucket, Piece
from offload_core.support.checks import kind_of

from ...tree.shards import ArrayShard
from ...tree.wrapped_tree import Leaf
from .matrices import MatrixExchange


@dataclass(frozen=True)
class _CutLeaf:
    """A parameter whose matrices are cut."""

    leaf: Leaf
    exchange: MatrixExchange
    spec: tuple[object, ...]
    """An entry for each dimension."""
    stack: int
    """Matrices of a part."""
    owners: Sequence[int]
    """The number of the device that computes with each matrix."""
    is_one_part: bool
    """True if each process has one part."""

    @property
    def cuts_stack(self) -> bool:
        return self.stack < len(self.owners)

    @property
    def part_numel(self) -> int:
        """The number of elements at whose multiples a bucket may cut a part: the elements of one matrix's part. If the
        stack is cut, too, or a process has several parts, it is the whole part."""
        numel = self.leaf.shards[0].numel
        return numel if self.cuts_stack or not self.is_one_part else numel // self.stack


class CutMatrices:
    """The parameters of a tree whose matrices are cut."""

    def __init__(self) -> None:
        self.of: dict[int, _CutLeaf] = {}
        """By their places among the tree's leaves, which are also the core's ``Bucket.together``."""
        self._loads: dict[int, int] = {}
        self.sent_bytes = 0
        """As ``Device.sent_bytes``: the bytes that reach this process's devices, and go back."""

    def add(self, leaf: Leaf, sharding: jax.sharding.Sharding) -> None:
        """Add a parameter. All processes add the same ones in the same order.

        Raises:
            ParameterError: its sharding names no mesh.
        """
        if not isinstance(sharding, NamedSharding):
            raise ParameterError(
                f"{leaf.path}: its matrices are cut by a {kind_of(sharding)}, which names no mesh; expected "
                "jax.device_put(array, NamedSharding(mesh, spec))"
            )
        assert leaf.matrix is not None
        assert isinstance(sharding.mesh, Mesh)
        exchange = MatrixExchange(sharding.mesh)
        owners = []
        for _ in range(math.prod(leaf.shape[:-2])):
            owner = min(range(len(exchange.devices)), key=lambda n: self._loads.get(n, 0))
            self._loads[owner] = self._loads.get(owner, 0) + math.prod(leaf.matrix) * min(leaf.matrix)
            owners.append(owner)
        spec = (*sharding.spec, *[None] * (len(leaf.shape) - len(sharding.spec)))
        stack = math.prod(sharding.shard_shape(leaf.shape)[:-2])
        indices: Mapping[jax.Device, Any] = sharding.devices_indices_map(leaf.shape)
        parts = {(device.process_index, str(index)) for device, index in indices.items()}
        is_one_part = len(parts) == len({process for process, _ in parts})
        self.of[leaf.position] = _CutLeaf(leaf, exchange, spec, stack, owners, is_one_part)

    def shard_of(self, bucket: Bucket, piece: Piece) -> ArrayShard:
        """Return the part of an array that a piece is a run of."""
        assert bucket.together is not None
        leaf = self.of[bucket.together].leaf
        return leaf.shards[leaf.params.index(piece.param)]

    def start(self, trace: Trace, bucket: Bucket, matrices: Matrices, shards: np.ndarray) -> Event:
        """As ``Device.transform``, for a bucket of one of these parameters."""
        return traced(trace, MATRICES, bucket.index, shards.nbytes, lambda: self._start(bucket, matrices, shards))

    def _start(self, bucket: Bucket, matrices: Matrices, shards: np.ndarray) -> Event:
        if not matrices.rows:
            return Done()
        assert bucket.together is not None
        cut = self.of[bucket.together]
        leaf, what = cut.leaf, f"bucket {bucket.index}: exchange of matrices"
        if cut.cuts_stack:
            first, count, shape, spec = 0, len(cut.owners), leaf.shape, cut.spec
        else:
            numel = leaf.shards[0].numel // cut.stack
            first, count = bucket.pieces[0].start // numel, bucket.pieces[0].numel // numel
            shape, spec = (count, *leaf.shape[-2:]), (None, *cut.spec[-2:])
        sharding = NamedSharding(cut.exchange.mesh, PartitionSpec(*spec))
        runs: list[tuple[np.ndarray, jax.Device]] = []
        parts: dict[jax.Device, np.ndarray] = {}
        for piece in bucket.pieces:
            run = shards[piece.offset : piece.offset + piece.numel]
            shard = self.shard_of(bucket, piece)
            runs.append((run.view(np.uint16), shard.primary))
            parts |= dict.fromkeys(shard.devices, run.reshape(sharding.shard_shape(shape)))
        numel = math.prod(matrices.shape)
        rows = tuple(OneMatrix(leaf.params[0], i * numel, cut.owners[first + i]) for i in range(count))
        self.sent_bytes += sum(2 * (numel * count - part.size) * part.itemsize for part in parts.values())
        exchange = cut.exchange.start(replace(matrices, rows=rows), shape, PartitionSpec(*spec), parts, what)

        def finish() -> None:
            with cut.exchange.meeting(what):
                for run, device in runs:
                    run[...] = np.asarray(exchange[device]).reshape(-1)

        return Waiting(finish)
