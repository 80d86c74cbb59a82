"""What the pipeline asks of the device that holds parameters and gradients, and of the way between ranks.

Tensors are the front end's: one-dimensional, contiguous, and opaque here. A process holds the shards of one rank
(torch) or of several (JAX: one for each local device).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..dtypes import BY_NUMPY, ElementType
from ..layout.partition import Bucket, ParamSpec
from ..memory.host_memory import Lease
from ..native import kernels
from ..ranks.collectives import Collectives
from .events import Event
from .trace import Trace


@dataclass(frozen=True)
class HostArray:
    """A contiguous run of host memory: address, length, element type, and the object that keeps it alive."""

    address: int
    numel: int
    dtype: ElementType
    owner: Any

    def run(self, start: int, numel: int) -> "HostArray":
        """Elements ``[start, start + numel)``."""
        return HostArray(self.address + start * self.dtype.itemsize, numel, self.dtype, self.owner)

    def view(self) -> np.ndarray:
        """The memory as a NumPy array; it lives as long as ``owner`` does."""
        return kernels.view(self.address, self.numel, self.dtype)

    @classmethod
    def of(cls, array: np.ndarray) -> "HostArray":
        """A C-contiguous NumPy array."""
        return cls(kernels.address(array), array.size, BY_NUMPY[array.dtype], array)


class Copy(NamedTuple):
    """Elements ``[start, start + numel)`` of ``tensor``, at ``offset`` of a flat host array."""

    tensor: Any
    start: int
    numel: int
    offset: int


class Arrival(NamedTuple):
    """What :meth:`Device.reduce` brings of a shard."""

    parts: int
    """Slices of one shard's length, end to end, whose sum in this order is wanted."""
    dtype: ElementType
    divisor: float
    """What their sum is yet to be divided by."""


class TensorMemory(Protocol):
    """Memory that holds tensors, and copies between it and the host's."""

    addressable: bool
    """Tensors are host memory: kernels can read and write them where they are."""
    updates_in_place: bool
    """An fp32 parameter is its own master weight (addressable, and the tensors are mutable)."""
    wants_pinned: bool
    """Copies run asynchronously only from and to memory registered with the CUDA driver."""

    def free_bytes(self) -> int | None:
        """Bytes that can still be allocated here; None: not known, or the host's."""
        ...

    def dtype(self, tensor: Any) -> ElementType: ...

    def numel(self, tensor: Any) -> int: ...

    def host_array(self, tensor: Any) -> HostArray:
        """The tensor's own memory. Only where ``addressable``."""
        ...

    def to_host(self, copies: Sequence[Copy], host: np.ndarray) -> Event:
        """Start filling ``host``, cast to its element type; elements that no copy names become zero.

        Both sides must stay as they are until the event.
        """
        ...

    def to_device(self, host: np.ndarray, copies: Sequence[Copy], after: Event) -> Event:
        """Start writing runs of ``host`` to the tensors, after a mark.

        Both sides must stay as they are until the event.
        """
        ...

    def mark(self) -> Event:
        """The end of what this thread has asked of the device so far."""
        ...

    def synchronize(self) -> None:
        """Block until no copy is on its way, whether or not it succeeds."""
        ...


class ExchangeSizes(Protocol):
    """What the way of a bucket between the ranks and to the host takes."""

    @property
    def staging_slots(self) -> int:
        """Staging buffers in use at a time, the pipeline's own included."""
        ...

    def arrival(self, wire: ElementType) -> Arrival:
        """What :meth:`Device.reduce` brings where gradients travel as ``wire``."""
        ...

    def slot_bytes(self, bucket: Bucket, wire: ElementType) -> int:
        """Bytes of a staging buffer that every use of one for this bucket fits in."""
        ...

    def link_numel(self, bucket: Bucket) -> int:
        """Elements of the bucket that cross between device and host, each way."""
        ...

    def way_bytes(self, bucket: Bucket, wire: ElementType) -> int:
        """Bytes of the device's own memory that the bucket takes on its way, besides gradients and parameters."""
        ...


class DeviceTerms(Protocol):
    """What of a :class:`Device` the sizes of buffers follow from."""

    @property
    def addressable(self) -> bool: ...

    @property
    def updates_in_place(self) -> bool: ...

    @property
    def wants_pinned(self) -> bool: ...

    @property
    def world_size(self) -> int: ...

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks whose shards this process holds, ascending."""
        ...

    @property
    def sizes(self) -> ExchangeSizes: ...


class Device(DeviceTerms, Protocol):
    """Where device parameters and gradients live, and the way of their buckets from and to this process's shards.

    All processes make the same calls of :meth:`reduce` and :meth:`publish` in the same order; those that need another
    rank raise :class:`CollectiveError` where it was lost.
    """

    @property
    def trace(self) -> Trace:
        """Where it notes copies and what ranks do together, and its pipeline the rest."""
        ...

    @property
    def collectives(self) -> Collectives:
        """The way of small host arrays between processes."""
        ...

    @property
    def sent_bytes(self) -> int:
        """Bytes of gradients and parameters that this process's ranks have sent to others."""
        ...

    def dtype(self, tensor: Any) -> ElementType: ...

    def numel(self, tensor: Any) -> int: ...

    def host_array(self, tensor: Any) -> HostArray:
        """As :meth:`TensorMemory.host_array`."""
        ...

    def to_host(self, copies: Sequence[Copy], host: np.ndarray) -> Event:
        """As :meth:`TensorMemory.to_host`: reads parameters."""
        ...

    def mark(self) -> Event:
        """As :meth:`TensorMemory.mark`."""
        ...

    def synchronize(self) -> None:
        """As :meth:`TensorMemory.synchronize`."""
        ...

    def start_alike(self, specs: Sequence[ParamSpec], tensors: Sequence[Any]) -> None:
        """Give every rank's parameters rank 0's values."""
        ...

    def free_bytes(self) -> int | None:
        """As :meth:`TensorMemory.free_bytes`, for all of this process's ranks together."""
        ...

    def reduce(
        self, bucket: Bucket, wire: ElementType, gradients: Mapping[int, Any], out: np.ndarray, staging: Lease
    ) -> Event:
        """Start bringing every rank's gradients of a bucket to its shards' owners.

        Args:
            wire: the element type that gradients are cast to and travel as.
            gradients: this process's, by parameter; one that is absent counts as zeros.
            out: the host memory to fill, for each of ``ranks`` its shard as ``sizes.arrival`` says. The mean over
                ranks has one definition: summed in rank order in fp32, divided once.
            staging: buffers of ``sizes.slot_bytes`` to borrow; who waits for the event gives them back.

        Returns:
            The event after which ``out`` is filled; neither it nor the gradients may be touched before.
        """
        ...

    def publish(
        self,
        bucket: Bucket,
        shards: np.ndarray,
        tensors: Sequence[Any],
        present: set[int],
        staging: Lease,
        after: Event,
    ) -> Event:
        """Start bringing updated shards to every rank's parameters.

        Args:
            shards: the shards of ``ranks``, of the bucket's element type, end to end.
            tensors: all parameters, as they were given to ``Pipeline.step``.
            present: the parameters to write; others stay as they are.
            after: a :meth:`mark` that writing comes after.

        Returns:
            The event after which the parameters are written; ``shards`` may not be touched before.
        """
        ...


class GatheringDevice(Device, Protocol):
    """A device that can hold shards of parameters, in its own memory or in the host's."""

    def start_alike(self, specs: Sequence[ParamSpec], tensors: Sequence[Any], source: int = 0) -> None:
        """As :meth:`Device.start_alike`, from any rank."""
        ...

    def gather(self, bucket: Bucket, shard: Any, whole: Any, after: Event, what: str) -> Event:
        """Start bringing the shards of a partitioned bucket together.

        All processes make the same calls in the same order.

        Args:
            shard: what this rank holds of the parameter, of its element type: a tensor, or a :class:`HostArray`.
            whole: a tensor for all of it, the last bucket's padding included.
            after: what the reading of ``shard`` and the writing of ``whole`` come after.
            what: names the data in errors.

        Returns:
            The event after which the bucket's run of ``whole`` is filled.
        """
        ...
