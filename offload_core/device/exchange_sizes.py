"""What buckets take on their way between the ranks and to the host: met on the host, met on devices, or planned."""

from dataclasses import dataclass

from ..dtypes import FLOAT32, ElementType
from ..layout.partition import Bucket
from .protocols import Arrival, ExchangeSizes


@dataclass(frozen=True)
class OnHost:
    """A bucket is copied to the host whole, and its slices are exchanged there; the parameters' come back likewise."""

    world_size: int
    native: bool
    """Whether the collectives' own reduce-scatter sums."""
    addressable: bool
    """Whether tensors are host memory, so that no copy of a bucket is on a device."""

    @property
    def staging_slots(self) -> int:
        """As :attr:`ExchangeSizes.staging_slots`."""
        return 1 if self.world_size == 1 else 2

    def arrival(self, wire: ElementType) -> Arrival:
        """As :meth:`ExchangeSizes.arrival`."""
        return Arrival(1 if self.native else self.world_size, wire, float(self.world_size))

    def slot_bytes(self, bucket: Bucket, wire: ElementType) -> int:
        """As :meth:`ExchangeSizes.slot_bytes`."""
        return bucket.padded_numel * max(wire.itemsize, bucket.dtype.itemsize)

    def link_numel(self, bucket: Bucket) -> int:
        """As :meth:`ExchangeSizes.link_numel`."""
        return bucket.padded_numel

    def way_bytes(self, bucket: Bucket, wire: ElementType) -> int:
        """As :meth:`ExchangeSizes.way_bytes`."""
        return 0 if self.addressable else self.slot_bytes(bucket, wire)


@dataclass(frozen=True)
class OnDevice:
    """Slices are exchanged between the devices, and summed there; only a rank's own shard crosses to the host."""

    world_size: int
    native: bool
    """As :attr:`OnHost.native`."""

    @property
    def staging_slots(self) -> int:
        """As :attr:`ExchangeSizes.staging_slots`."""
        return 1

    def arrival(self, wire: ElementType) -> Arrival:
        """As :meth:`ExchangeSizes.arrival`."""
        return Arrival(1, wire, float(self.world_size)) if self.native else Arrival(1, FLOAT32, 1.0)

    def slot_bytes(self, bucket: Bucket, wire: ElementType) -> int:
        """As :meth:`ExchangeSizes.slot_bytes`."""
        return bucket.shard_numel * max(bucket.dtype.itemsize, self.arrival(wire).dtype.itemsize)

    def link_numel(self, bucket: Bucket) -> int:
        """As :meth:`ExchangeSizes.link_numel`."""
        return bucket.shard_numel

    def way_bytes(self, bucket: Bucket, wire: ElementType) -> int:
        """As :meth:`ExchangeSizes.way_bytes`."""
        sent = bucket.padded_numel * wire.itemsize
        if self.native:
            return sent + bucket.shard_numel * wire.itemsize
        return 2 * sent + 2 * bucket.shard_numel * FLOAT32.itemsize  # what was received, the sum, and one part widened


@dataclass(frozen=True)
class PlannedDevice:
    """The terms of a device that need not be there."""

    world_size: int
    addressable: bool
    updates_in_place: bool
    wants_pinned: bool
    sizes: ExchangeSizes
    ranks: tuple[int, ...] = (0,)


def planned_device(world_size: int, *, addressable: bool, native: bool = False) -> PlannedDevice:
    """What torch's front end would use on the CPU (``addressable``), or on CUDA devices that meet over nccl."""
    meets_on_host = addressable or world_size == 1
    sizes = OnHost(world_size, native, addressable) if meets_on_host else OnDevice(world_size, native)
    return PlannedDevice(
        world_size, addressable, updates_in_place=addressable, wants_pinned=not addressable, sizes=sizes
    )
