"""The protocols of a device, which holds parameters and gradients, and carries their buckets between ranks.

Tensors are the front end's: one-dimensional, contiguous, and opaque here. A process holds the shards of one rank
(torch) or of several (JAX: one for each local device).
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..dtypes import BY_CODE, BY_NUMPY, ElementType
from ..layout.partition import Bucket, ParamSpec
from ..memory.host_memory import Lease
from ..memory.pinning import Pinning
from ..native import kernels
from ..ranks.collectives import Collectives
from ..rules import DeviceKernel, Matrix
from .events import Event
from .trace import Trace

_ITEMSIZES = np.array([BY_CODE[code].itemsize for code in range(len(BY_CODE))])


@dataclass(frozen=True)
class HostArray:
    """A contiguous run of memory: address, length, element type, and the object that keeps it alive.

    The memory is the host's, unless a device's queue returned the run or takes it (:class:`DeviceQueue`).
    """

    address: int
    numel: int
    dtype: ElementType
    owner: Any

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def run(self, start: int, numel: int) -> "HostArray":
        """Elements ``[start, start + numel)``."""
        return HostArray(self.address + start * self.dtype.itemsize, numel, self.dtype, self.owner)

    def view(self) -> np.ndarray:
        """Host memory as a NumPy array; it lives as long as ``owner`` does."""
        return kernels.view(self.address, self.numel, self.dtype)

    @classmethod
    def of(cls, array: np.ndarray, dtype: ElementType | None = None) -> "HostArray":
        """A C-contiguous NumPy array; ``dtype`` is its element type if no kernel computes with that."""
        return cls(kernels.address(array), array.size, dtype or BY_NUMPY[array.dtype], array)


class HostArrays(NamedTuple):
    """Contiguous runs of memory, as :class:`HostArray` describes one, a column for each of their properties."""

    addresses: np.ndarray
    """The address of each run; 0: an empty run."""
    codes: np.ndarray
    """The code of each run's element type."""
    owners: Sequence[Any]
    """The object that keeps each run's memory alive."""

    @classmethod
    def none(cls, n: int) -> "HostArrays":
        """Return ``n`` empty runs."""
        return cls(np.zeros(n, np.uintp), np.zeros(n, np.uint8), [None] * n)

    @classmethod
    def columns(cls, arrays: Iterable[HostArray]) -> "HostArrays":
        """Return these runs as columns."""
        rows = [(array.address, array.dtype.code, array.owner) for array in arrays]
        addresses, codes, owners = zip(*rows, strict=True) if rows else ((), (), ())
        return cls(np.array(addresses, np.uintp), np.array(codes, np.uint8), owners)

    def begin_at(self, elements: np.ndarray) -> "HostArrays":
        """Return the rest of each run, from the element of this number on."""
        offsets = elements * _ITEMSIZES[self.codes]
        return self._replace(addresses=self.addresses + offsets.astype(np.uintp))

    def of(self, rows: np.ndarray) -> "HostArrays":
        """Return the runs of these numbers."""
        return HostArrays(self.addresses[rows], self.codes[rows], [self.owners[i] for i in rows])

    def by_type(self, chosen: np.ndarray) -> list[tuple[ElementType, np.ndarray]]:
        """Return, by element type, the numbers of the runs that ``chosen`` marks with True."""
        rows = np.flatnonzero(chosen)
        codes = self.codes[rows]
        return [(BY_CODE[code], rows[codes == code]) for code in np.flatnonzero(np.bincount(codes)).tolist()]


class Copy(NamedTuple):
    """Elements ``[start, start + numel)`` of ``tensor``, at ``offset`` of a flat host array."""

    tensor: Any
    start: int
    numel: int
    offset: int


class Arrival(NamedTuple):
    """The form in which :meth:`Device.reduce` delivers a shard."""

    parts: int
    """The number of slices, each as long as the shard, end to end. The shard's gradient is their sum in this order."""
    dtype: ElementType
    divisor: float
    """The divisor that is still to be applied to the sum."""


class OneMatrix(NamedTuple):
    """A matrix of a parameter, row by row in a flat array."""

    param: int
    offset: int
    """The number in the array of its first element."""
    owner: int
    """The rank that computes with it."""


@dataclass(frozen=True)
class Matrices:
    """Whole matrices in a flat array in bfloat16."""

    kernel: DeviceKernel
    """The computation, of each matrix alone."""
    shape: Matrix
    rows: tuple["OneMatrix", ...]

    def of_params(self, params: Collection[int]) -> "Matrices":
        """Return those of these parameters."""
        return replace(self, rows=tuple(row for row in self.rows if row.param in params))

    def of_ranks(self, ranks: Collection[int]) -> "Matrices":
        """Return those of these owners."""
        return replace(self, rows=tuple(row for row in self.rows if row.owner in ranks))

    def in_(self, array: Any) -> list[Any]:
        """Return each one's elements in the array, which has one dimension."""
        numel = math.prod(self.shape)
        return [array[row.offset : row.offset + numel] for row in self.rows]


class DeviceQueue(kernels.Kernels, Protocol):
    """Runs kernels on memory of a device, one after the other, beside the device's other work.

    A call returns before its kernel has run. Kernels run in the order of the calls, of whatever thread. Addresses are
    the device's. A tensor that a kernel reads or writes must live until the event of a later :meth:`mark`.
    """

    def allocate(self, n_bytes: int) -> Any:
        """Return a one-dimensional tensor of zeroed bytes in the device's memory.

        Raises:
            DeviceMemoryError: the device has too little memory.
        """
        ...

    def typed(self, memory: Any, dtype: ElementType) -> Any:
        """Return bytes of :meth:`allocate`, or of a run of them, as a tensor of elements of this type."""
        ...

    def arrays(self, tensors: Sequence[Any]) -> HostArrays:
        """Return the device's memory of each tensor."""
        ...

    def order(self, after: Event) -> None:  # waits
        """Have later kernels run after an event."""
        ...

    def mark(self, used: object = None) -> Event:
        """Return the event after all kernels so far.

        Args:
            used: is kept alive until the event has been waited for, or a later event of this queue.
        """
        ...

    def reduce(self, parts: HostArray, n_parts: int, out: HostArray, *, divisor: float, add: bool) -> None:
        """As ``kernels.reduce``: ``out`` (fp32) = or += the sum of ``n_parts`` equal runs of ``parts``, divided."""
        ...

    def squares(self, runs: Sequence[tuple[np.ndarray, ElementType]]) -> Callable[[], np.ndarray]:
        """Start to sum the squares of runs of gradients exactly.

        Args:
            runs: ``(spans, element type)`` pairs, as ``kernels.sum_squares`` takes them.

        Returns:
            A function that waits for the sum and returns its bins (``c_src/api.h``).
        """
        ...

    def to_host(self, memory: Any, host: np.ndarray) -> Event:
        """Start to copy bytes of the device's memory to as many bytes of the host."""
        ...

    def to_device(self, host: np.ndarray, memory: Any) -> Event:
        """Start to copy bytes of the host to as many bytes of the device's memory."""
        ...

    def transform(self, matrices: Matrices, tensor: Any) -> None:
        """Compute with matrices of a flat tensor in bfloat16, and put the results in their place."""
        ...


class TensorAccess(Protocol):
    """Reads tensors, and tells of the memory that they are in."""

    @property
    def pinning(self) -> Sequence[Pinning]:
        """The ways to pin host memory, best first. Copies from and to other memory are not asynchronous. Empty: no copy
        needs it."""
        ...

    def free_bytes(self) -> int | None:
        """Bytes that this process can still allocate; None: unknown, or the memory is the host's."""
        ...

    def dtype(self, tensor: Any) -> ElementType: ...

    def numel(self, tensor: Any) -> int: ...

    def host_array(self, tensor: Any) -> HostArray:
        """The tensor's own memory. Only where ``addressable``."""
        ...

    def host_arrays(self, tensors: Sequence[Any]) -> HostArrays:
        """The memory of each of these tensors, which have been computed then. Only where ``addressable``, and for
        gradients where ``sizes.gradients_on_host``."""
        ...

    def to_host(self, copies: Sequence[Copy], host: np.ndarray) -> Event:
        """Start to fill ``host``, cast to its element type; elements that no copy names become zero.

        The caller changes neither side before the event.
        """
        ...

    def mark(self) -> Event:
        """The end of what this thread has asked of the device so far."""
        ...

    def synchronize(self) -> None:  # waits
        """Block until all copies have ended, also those that fail."""
        ...


class TensorMemory(TensorAccess, Protocol):
    """Memory that holds tensors, and copies between it and the host's."""

    @property
    def queue(self) -> Callable[[], DeviceQueue]:
        """As :attr:`Device.queue`."""
        ...

    addressable: bool
    """True if tensors are host memory, so that kernels can read and write them in place."""
    updates_in_place: bool
    """True if an fp32 parameter is its own master weight (``addressable``, and tensors are mutable)."""

    def to_device(self, host: np.ndarray, copies: Sequence[Copy], after: Event) -> Event:
        """Start to write runs of ``host`` to the tensors, after the mark ``after``.

        The caller changes neither side before the event.
        """
        ...

    def transform(self, matrices: Matrices, host: np.ndarray) -> Event:
        """Start to compute with matrices of a host array, and to put the results in their place.

        The caller does not touch the array before the event.
        """
        ...


class ExchangeSizes(Protocol):
    """Sizes of the buffers for the exchange of a bucket between ranks and its copies to and from the host.

    ``comm_dtype`` is the element type in which gradients travel.
    """

    @property
    def staging_slots(self) -> int:
        """The most staging buffers of one bucket in use at a time, the pipeline's own included."""
        ...

    @property
    def through_host(self) -> bool:
        """True if ranks exchange buckets in host memory."""
        ...

    @property
    def gradients_on_host(self) -> bool:
        """True if each gradient is an array in host memory when the core gets it. Kernels read it there
        (``TensorAccess.host_arrays``). There is one rank then."""
        ...

    def arrival(self, comm_dtype: ElementType) -> Arrival:
        """The form in which :meth:`Device.reduce` delivers a shard."""
        ...

    def leaves_as(self, comm_dtype: ElementType) -> ElementType:
        """The element type in which gradients are copied to the host."""
        ...

    def slot_bytes(self, bucket: Bucket, comm_dtype: ElementType) -> int:
        """Bytes of a staging buffer that suffice for every use of one for this bucket."""
        ...

    def link_numel(self, bucket: Bucket) -> int:
        """Elements of the bucket that are copied between device and host, in each direction."""
        ...

    def in_flight_bytes(self, bucket: Bucket, comm_dtype: ElementType) -> int:
        """Bytes of the device's own memory for the bucket's exchange, besides gradients and parameters."""
        ...


class DeviceTerms(Protocol):
    """The properties of a :class:`Device` that determine the sizes of buffers."""

    @property
    def addressable(self) -> bool: ...

    @property
    def updates_in_place(self) -> bool: ...

    @property
    def world_size(self) -> int: ...

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks whose shards this process holds, ascending."""
        ...

    @property
    def sizes(self) -> ExchangeSizes: ...

    @property
    def pinning(self) -> Sequence[Pinning]:
        """As :attr:`TensorAccess.pinning`."""
        ...


class Device(DeviceTerms, TensorAccess, Protocol):
    """Holds device parameters and gradients, and carries their buckets to and from this process's shards.

    All processes make the same calls of :meth:`reduce`, :meth:`publish` and :meth:`transform` in the same order. A call
    that needs a lost rank raises :class:`CollectiveError`.
    """

    @property
    def trace(self) -> Trace:
        """The record of what ran when: the device notes copies and exchanges, its pipeline the rest."""
        ...

    @property
    def queue(self) -> Callable[[], DeviceQueue]:
        """Returns the queue of the device's kernels.

        Raises:
            ConfigError: the device cannot run them. The message says why.
        """
        ...

    @property
    def collectives(self) -> Collectives:
        """Exchanges small host arrays between processes."""
        ...

    @property
    def sent_bytes(self) -> int:
        """Bytes of gradients and parameters that this process's ranks have sent to others."""
        ...

    def close(self) -> None:
        """Free the resources of exchanges between ranks. No exchange follows."""
        ...

    def start_alike(self, specs: Sequence[ParamSpec], tensors: Sequence[Any]) -> None:
        """Set every rank's parameters to rank 0's values."""
        ...

    def reduce(
        self, bucket: Bucket, comm_dtype: ElementType, gradients: Mapping[int, Any], out: Any, staging: Lease
    ) -> Event:
        """Start to bring every rank's gradients of a bucket to the owners of its shards.

        Args:
            comm_dtype: the element type in which gradients travel; they are cast to it.
            gradients: this process's gradients, by parameter number; one that is absent counts as zeros.
            out: the array to fill with the shard of each of ``ranks``, in the form of ``sizes.arrival``: a host array,
                or a tensor of the device. The mean over ranks has one definition: summed in rank order in fp32, divided
                once.
            staging: lends buffers of ``sizes.slot_bytes``. The caller releases it after the event.

        Returns:
            The event after which ``out`` is filled; neither it nor the gradients may be touched before.
        """
        ...

    def publish(
        self,
        bucket: Bucket,
        shards: Any,
        tensors: Sequence[Any],
        present: set[int],
        staging: Lease,
        after: Event,
    ) -> Event:
        """Start to write updated shards to every rank's parameters.

        Args:
            shards: the shards of ``ranks``, of the bucket's element type, end to end: a host array, or a tensor of the
                device, which is read after ``after``.
            tensors: all parameters, as given to ``Pipeline.step``.
            present: the parameters to write; others stay as they are.
            after: a :meth:`mark`; parameters are written after it.

        Returns:
            The event after which the parameters are written; ``shards`` may not be touched before.
        """
        ...

    def transform(self, bucket: Bucket, matrices: Matrices, shards: Any, staging: Lease) -> Event:
        """Start to compute with whole matrices of a bucket, and to put the results in their place in the shards.

        Args:
            matrices: of the whole bucket.
            shards: the shards of ``ranks``, in bfloat16, end to end: a host array, or a tensor of the device, which is
                read after the kernels of :attr:`queue` so far.
            staging: lends buffers for ``sizes.link_numel`` elements. The caller releases it after the event.

        Returns:
            The event after which the results are there; ``shards`` may not be touched before.
        """
        ...


class GatheringDevice(Device, Protocol):
    """A device that can hold shards of parameters, in its own memory or in the host's."""

    def start_alike(self, specs: Sequence[ParamSpec], tensors: Sequence[Any], source: int = 0) -> None:
        """Set every rank's parameters to those of rank ``source``."""
        ...

    def gather(self, bucket: Bucket, shard: Any, whole: Any, after: Event, what: str) -> Event:
        """Start to gather the shards of a partitioned bucket.

        All processes make the same calls in the same order.

        Args:
            shard: this rank's shard of the bucket, of its element type: a tensor, or a :class:`HostArray`.
            whole: a tensor for the whole parameter and the last bucket's padding.
            after: the event after which ``shard`` may be read and ``whole`` written.
            what: names the data in errors.

        Returns:
            The event after which the bucket's run of ``whole`` is filled.
        """
        ...
