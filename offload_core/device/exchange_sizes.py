"""How gradients come to a rank's host memory, in sizes: what :class:`DeviceTerms` the two ways between ranks have."""

from .device import Arrival
from .dtypes import FLOAT32, ElementType
from .partition import Bucket


class ExchangeOnHost:
    """A bucket is copied to the host whole, and its slices are exchanged there; the parameters' come back likewise."""

    addressable: bool
    world_size: int
    native: bool
    """Whether the collectives' own reduce-scatter sums."""

    @property
    def staging_slots(self) -> int:
        """As :attr:`DeviceTerms.staging_slots`."""
        return 1 if self.world_size == 1 else 2

    def arrival(self, wire: ElementType) -> Arrival:
        """As :meth:`DeviceTerms.arrival`."""
        return Arrival(1 if self.native else self.world_size, wire, float(self.world_size))

    def slot_bytes(self, bucket: Bucket, wire: ElementType) -> int:
        """As :meth:`DeviceTerms.slot_bytes`."""
        return bucket.padded_numel * max(wire.itemsize, bucket.dtype.itemsize)

    def link_numel(self, bucket: Bucket) -> int:
        """As :meth:`DeviceTerms.link_numel`."""
        return bucket.padded_numel

    def way_bytes(self, bucket: Bucket, wire: ElementType) -> int:
        """As :meth:`DeviceTerms.way_bytes`."""
        return 0 if self.addressable else self.slot_bytes(bucket, wire)


class ExchangeOnDevice:
    """Slices are exchanged between the devices, and summed there; only a rank's own shard crosses to the host."""

    addressable: bool
    world_size: int
    native: bool
    staging_slots = 1

    def arrival(self, wire: ElementType) -> Arrival:
        """As :meth:`DeviceTerms.arrival`."""
        return Arrival(1, wire, float(self.world_size)) if self.native else Arrival(1, FLOAT32, 1.0)

    def slot_bytes(self, bucket: Bucket, wire: ElementType) -> int:
        """As :meth:`DeviceTerms.slot_bytes`."""
        return bucket.shard_numel * max(bucket.dtype.itemsize, self.arrival(wire).dtype.itemsize)

    def link_numel(self, bucket: Bucket) -> int:
        """As :meth:`DeviceTerms.link_numel`."""
        return bucket.shard_numel

    def way_bytes(self, bucket: Bucket, wire: ElementType) -> int:
        """As :meth:`DeviceTerms.way_bytes`."""
        sent = bucket.padded_numel * wire.itemsize
        if self.native:
            return sent + bucket.shard_numel * wire.itemsize
        return 2 * sent + 2 * bucket.shard_numel * FLOAT32.itemsize  # what was received, the sum, and one part widened


class _Planned:
    updates_in_place: bool
    wants_pinned: bool
    ranks = (0,)

    def __init__(self, world_size: int, *, addressable: bool, native: bool) -> None:
        self.world_size = world_size
        self.addressable = self.updates_in_place = addressable
        self.wants_pinned = not addressable
        self.native = native


class PlannedOnHost(_Planned, ExchangeOnHost):
    """The terms of a device that need not be there: the host itself, or one rank's accelerator."""


class PlannedOnDevice(_Planned, ExchangeOnDevice):
    """The terms of an accelerator that need not be there, whose ranks meet on their devices."""


def planned_device(world_size: int, *, addressable: bool, native: bool = False) -> PlannedOnHost | PlannedOnDevice:
    """What torch's front end would use on the CPU (``addressable``), or on CUDA devices that meet over nccl."""
    way = PlannedOnHost if addressable or world_size == 1 else PlannedOnDevice
    return way(world_size, addressable=addressable, native=native)
