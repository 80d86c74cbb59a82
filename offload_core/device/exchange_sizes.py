"""Sizes of buffers for the exchange of buckets: on the host, between devices, or for a plan without a device.

:class:`ExchangeSizes` says what each method returns.
"""

from dataclasses import dataclass

from ..dtypes import FLOAT32, ElementType
from ..layout.partition import Bucket
from ..memory.pinning import Pinning
from .protocols import Arrival, ExchangeSizes

REFUSED_DEVICES = {
    "mps": "MPS has one stream, where copies would wait for the model, and shares the host's memory",
    "xla": "torch_xla's devices have no streams; frontends.jax trains on TPUs",
}
"""Types of devices, by torch's names, that cannot exchange while a step goes on, and the reason."""


@dataclass(frozen=True)
class OnHost:
    """Whole buckets are copied to the host, and their slices are exchanged there; parameters return the same way."""

    world_size: int
    native: bool
    """True if the collectives' own reduce-scatter sums."""
    addressable: bool
    """True if tensors are host memory, so that no device holds a copy of a bucket."""
    through_host = True
    gradients_on_host = False

    @property
    def staging_slots(self) -> int:
        return 1 if self.world_size == 1 else 2

    def arrival(self, comm_dtype: ElementType) -> Arrival:
        return Arrival(1 if self.native else self.world_size, comm_dtype, float(self.world_size))

    def leaves_as(self, comm_dtype: ElementType) -> ElementType:
        return comm_dtype

    def slot_bytes(self, bucket: Bucket, comm_dtype: ElementType) -> int:
        return bucket.padded_numel * max(comm_dtype.itemsize, bucket.dtype.itemsize)

    def link_numel(self, bucket: Bucket) -> int:
        return bucket.padded_numel

    def in_flight_bytes(self, bucket: Bucket, comm_dtype: ElementType) -> int:
        return 0 if self.addressable else self.slot_bytes(bucket, comm_dtype)


@dataclass(frozen=True)
class OnDevice:
    """Slices are exchanged and summed on the devices; only a rank's own shard is copied to the host."""

    world_size: int
    native: bool
    """True if the collectives' own reduce-scatter sums."""
    through_host = False
    gradients_on_host = False

    @property
    def staging_slots(self) -> int:
        return 1

    def arrival(self, comm_dtype: ElementType) -> Arrival:
        return Arrival(1, comm_dtype, float(self.world_size)) if self.native else Arrival(1, FLOAT32, 1.0)

    def leaves_as(self, comm_dtype: ElementType) -> ElementType:
        return self.arrival(comm_dtype).dtype

    def slot_bytes(self, bucket: Bucket, comm_dtype: ElementType) -> int:
        return bucket.shard_numel * max(bucket.dtype.itemsize, self.arrival(comm_dtype).dtype.itemsize)

    def link_numel(self, bucket: Bucket) -> int:
        return bucket.shard_numel

    def in_flight_bytes(self, bucket: Bucket, comm_dtype: ElementType) -> int:
        sent = bucket.padded_numel * comm_dtype.itemsize
        if self.native:
            return sent + bucket.shard_numel * comm_dtype.itemsize
        return 2 * sent + 2 * bucket.shard_numel * FLOAT32.itemsize  # the received parts, the sum, and one part in fp32


@dataclass(frozen=True)
class MeshSizes:
    """Slices are exchanged and summed by compiled programs, as in JAX, and widened to fp32 on the host if they were not
    summed."""

    n_ranks: int
    """The number of ranks that this process holds."""
    summed: bool
    """True if there are several ranks, whose gradients are summed in fp32."""
    staging_slots = 1  # that of the pipeline
    through_host = False
    gradients_on_host = False

    def arrival(self, comm_dtype: ElementType) -> Arrival:
        return Arrival(1, FLOAT32, 1.0)

    def leaves_as(self, comm_dtype: ElementType) -> ElementType:
        return FLOAT32 if self.summed else comm_dtype

    def slot_bytes(self, bucket: Bucket, comm_dtype: ElementType) -> int:
        return self.link_numel(bucket) * FLOAT32.itemsize

    def link_numel(self, bucket: Bucket) -> int:
        return self.n_ranks * bucket.shard_numel

    def in_flight_bytes(self, bucket: Bucket, comm_dtype: ElementType) -> int:
        return self.link_numel(bucket) * self.leaves_as(comm_dtype).itemsize  # the gradients that leave


class GradientsOnHost:
    """One rank. The model's own program copies each gradient to host memory, where kernels read it. Only new parameters
    pass through staging."""

    staging_slots = 1  # that of the pipeline
    through_host = False
    gradients_on_host = True

    def arrival(self, comm_dtype: ElementType) -> Arrival:
        return Arrival(1, comm_dtype, 1.0)

    def leaves_as(self, comm_dtype: ElementType) -> ElementType:
        return comm_dtype

    def slot_bytes(self, bucket: Bucket, comm_dtype: ElementType) -> int:
        return bucket.shard_numel * bucket.dtype.itemsize

    def link_numel(self, bucket: Bucket) -> int:
        return bucket.shard_numel

    def in_flight_bytes(self, bucket: Bucket, comm_dtype: ElementType) -> int:
        return bucket.shard_numel * bucket.dtype.itemsize  # the parameters that arrive


@dataclass(frozen=True)
class PlannedDevice:
    """The terms of a device, for a plan on a machine without it."""

    world_size: int
    addressable: bool
    updates_in_place: bool
    sizes: ExchangeSizes
    ranks: tuple[int, ...] = (0,)
    pinning: tuple[Pinning, ...] = ()


def planned_device(world_size: int, *, addressable: bool, native: bool = False) -> PlannedDevice:
    """The device of torch's front end on the CPU (``addressable``), or on CUDA with nccl."""
    meets_on_host = addressable or world_size == 1
    sizes = OnHost(world_size, native, addressable) if meets_on_host else OnDevice(world_size, native)
    return PlannedDevice(world_size, addressable, updates_in_place=addressable, sizes=sizes)


def planned_jax_device(*, on_host: bool) -> PlannedDevice:
    """A process's devices in JAX where parameters stay as they were placed: CPU devices (``on_host``), or others."""
    sizes = OnHost(1, native=False, addressable=True) if on_host else GradientsOnHost()
    return PlannedDevice(1, on_host, updates_in_place=False, sizes=sizes)
