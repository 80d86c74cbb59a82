"""Devices that each hold parameters of their own. They exchange only matrices of which each holds a part.

Kernels read gradients in host memory. New parameters are copied from staging to the device that holds them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from offload_core.device.events import AfterAll, Event
from offload_core.device.exchange_sizes import GradientsOnHost
from offload_core.device.host_ranks import HostRanks
from offload_core.device.protocols import HostArray, Matrices
from offload_core.device.trace import Trace
from offload_core.layout.partition import Bucket, ParamSpec
from offload_core.memory.host_memory import Lease
from offload_core.ranks.collectives import Collectives

from ..device import ArrayMemory, JaxDevice, free_bytes, host_array
from .axis import LoneDevice
from .cut_matrices import CutMatrices
from .device import JaxMeshDevice
from .tensors import HostGradient


class Places(ArrayMemory):
    """The core's ``Device`` made of this process's devices: a bucket goes to the device of its place.

    Args:
        devices: by place.
        processes: those that agree on each update.
        cut_matrices: the parameters of which several devices hold parts of each matrix.
    """

    addressable = False
    world_size = 1
    ranks: tuple[int, ...] = (0,)

    def __init__(
        self,
        devices: Sequence[jax.Device],
        processes: Collectives,
        cut_matrices: CutMatrices,
        *,
        threads: int = 1,
    ) -> None:
        self._devices = list(devices)
        self._cut_matrices = cut_matrices
        self.places = [JaxMeshDevice(LoneDevice(device), threads=threads) for device in devices]
        self.pinning = self.places[0].pinning
        self.collectives = processes
        self.sizes = GradientsOnHost()
        self.trace = Trace(processes.rank, processes.world_size)
        for device in self.places:
            device.trace = self.trace
        self.dtype = self.places[0].dtype
        self.numel = self.places[0].numel
        self.to_host = self.places[0].to_host

    @property
    def sent_bytes(self) -> int:
        return self._cut_matrices.sent_bytes

    def start_alike(self, specs: Sequence[ParamSpec], tensors: Sequence[Any]) -> None:
        pass  # global arrays are alike in all processes

    def free_bytes(self) -> int | None:
        return free_bytes([place.axis.devices[0] for place in self.places])

    def close(self) -> None:
        pass

    def host_array(self, tensor: HostGradient) -> HostArray:
        return host_array(tensor.array)

    def reduce(self, *args: Any) -> Event:
        raise AssertionError("kernels read gradients in host memory")

    def transform(self, bucket: Bucket, matrices: Matrices, shards: np.ndarray, staging: Lease) -> Event:
        if bucket.together is None:
            return self.places[bucket.place].transform(bucket, matrices, shards, staging)
        return self._cut_matrices.start(self.trace, bucket, matrices, shards)

    def publish(
        self,
        bucket: Bucket,
        shards: np.ndarray,
        tensors: Sequence[Any],
        present: set[int],
        staging: Lease,
        after: Event,
    ) -> Event:
        if bucket.together is None:
            return self.places[bucket.place].publish(bucket, shards, tensors, present, staging, after)
        sent = []
        for piece in bucket.pieces:
            if piece.param in present:  # each to the device that holds it
                place = self.places[self._devices.index(self._cut_matrices.shard_of(bucket, piece).primary)]
                alone = replace(bucket, pieces=(replace(piece, offset=0),), shard_numel=piece.numel)
                run = shards[piece.offset : piece.offset + piece.numel]
                sent.append(place.publish(alone, run, tensors, present, staging, after))
        return AfterAll(sent)


class HostParts(HostRanks):
    """The core's ``Device`` made of parameters in host memory, which devices may hold parts of."""

    def __init__(self, cut_matrices: CutMatrices, processes: Collectives) -> None:
        super().__init__(JaxDevice(), processes=processes)
        self._cut_matrices = cut_matrices

    @property
    def sent_bytes(self) -> int:
        return self._cut_matrices.sent_bytes

    def transform(self, bucket: Bucket, matrices: Matrices, shards: np.ndarray, staging: Lease) -> Event:
        if bucket.together is None:
            return super().transform(bucket, matrices, shards, staging)
        return self._cut_matrices.start(self.trace, bucket, matrices, shards)
