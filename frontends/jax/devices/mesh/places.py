"""Devices with memory of their own, each of which holds parameters that are its alone: nothing is exchanged.

Kernels read gradients in host memory. New parameters are copied from staging to the device that holds them.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from offload_core.device.events import Event
from offload_core.device.exchange_sizes import GradientsOnHost
from offload_core.device.protocols import HostArray, Matrices
from offload_core.device.trace import Trace
from offload_core.layout.partition import Bucket, ParamSpec
from offload_core.memory.host_memory import Lease
from offload_core.ranks.collectives import Collectives

from ..device import ArrayMemory, free_bytes, host_array
from .axis import LoneDevice
from .device import JaxMeshDevice
from .tensors import HostGradient


class Places(ArrayMemory):
    """The core's ``Device`` made of this process's devices: a bucket goes to the device of its place.

    Args:
        devices: by place.
        processes: those that agree on each update.
    """

    addressable = False
    sent_bytes = 0
    world_size = 1
    ranks: tuple[int, ...] = (0,)

    def __init__(self, devices: Sequence[jax.Device], processes: Collectives, *, threads: int = 1) -> None:
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
        return self.places[bucket.place].transform(bucket, matrices, shards, staging)

    def publish(
        self,
        bucket: Bucket,
        shards: np.ndarray,
        tensors: Sequence[Any],
        present: set[int],
        staging: Lease,
        after: Event,
    ) -> Event:
        return self.places[bucket.place].publish(bucket, shards, tensors, present, staging, after)
