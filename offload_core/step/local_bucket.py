"""One bucket in one process: the process's shards, their gradients in this step, and the bucket's tasks in flight."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

import numpy as np

from ..config.state_formats import Master
from ..device.events import Done, Event
from ..device.protocols import Arrival, HostArray, HostArrays, Matrices
from ..dtypes import BY_CODE, ElementType
from ..layout.partition import Bucket, ParamSpec, Piece
from ..memory.host_memory import Lease
from ..native import kernels
from ..native.grad_norm import SumOfSquares
from ..rules import Rule, Scalars
from ..support.state_machine import StateMachine
from ..support.threads import Task
from .bucket_states import (
    GRADIENT,
    OWNER,
    PUBLICATION,
    Gradient,
    GradientEvent,
    Owner,
    OwnerEvent,
    Publication,
    PublicationEvent,
)


class Writes(Enum):
    """The memory to which an update's kernel writes parameters. If a parameter is its own master weight, it counts as a
    state: each update writes it."""

    STATES = "none"
    IN_PLACE = "the parameters where they are"
    STAGING = "memory of the executor, from which they are published"


@dataclass(eq=False)
class Direction:
    """The directions of a bucket's update, which the device computes from whole matrices (``directions.py``)."""

    shards: HostArray
    """The directions in bfloat16: one element for each element of the process's shards, at the same offset."""
    lease: Lease | None
    """The staging that they take; None: they take none."""
    computed: Event = field(default_factory=Done)

    def addresses(self, offsets: np.ndarray) -> np.ndarray:
        """Return the address of the direction at each of these offsets."""
        return self.shards.address + (offsets * self.shards.dtype.itemsize).astype(np.uintp)


class PieceTable:
    """A process's pieces of a bucket, as a table. Each array is one column, with one element for each piece."""

    def __init__(self, bucket: Bucket, pieces: Sequence[Piece], specs: Mapping[int, ParamSpec]) -> None:
        self.params = np.array([piece.param for piece in pieces], np.int64)
        """The index of each piece's parameter."""
        self.offsets = np.array([piece.offset for piece in pieces], np.int64)
        """The offset of each piece in the concatenation of this process's shards, in elements."""
        self.starts = np.array([piece.start for piece in pieces], np.int64)
        """The offset of each piece in its parameter, in elements."""
        self.in_tensor = np.array([bucket.in_tensor(piece) for piece in pieces], np.int64)
        """The offset of each piece in its parameter's tensor, in elements."""
        self.numels = np.array([piece.numel for piece in pieces], np.int64)
        self.numbers = self.starts + np.array([specs[piece.param].first or 0 for piece in pieces], np.int64)
        """For each piece, the index of its first element in the parameter's sequence of random numbers. These numbers
        round the parameter's states, one number for each element."""
        self.seeds = np.array([specs[piece.param].seed for piece in pieces], np.uint64)
        """The seed of the random numbers of each piece's states."""
        self.counted = np.array([specs[piece.param].counted for piece in pieces], bool)
        """True for each piece whose gradient counts in the norm."""
        self.positions: dict[int, list[int]] = {}
        """Maps each parameter to the indices of its pieces. There is one piece, unless the process's ranks are not
        consecutive."""
        for i, piece in enumerate(pieces):
            self.positions.setdefault(piece.param, []).append(i)


class BucketGradient(StateMachine[Gradient, GradientEvent]):
    """A bucket's gradients, from their arrival on the device until the update. ``bucket_states.py`` has the states.

    Args:
        offsets: the bucket's :attr:`PieceTable.offsets`.
    """

    def __init__(
        self,
        bucket: int,
        offsets: np.ndarray,
        comm_dtype: ElementType,
        arrival: Arrival,
        buffer_dtype: ElementType,
        private: HostArray | None,
    ) -> None:
        super().__init__(f"bucket {bucket}", Gradient.ABSENT, GRADIENT)
        self._offsets = offsets
        self._none = HostArrays.none(len(offsets))
        self.comm_dtype = comm_dtype
        """The element type in which gradients travel."""
        self.arrival = arrival
        """The form in which the device delivers gradients."""
        self.buffer_dtype = buffer_dtype
        """The element type in which gradients wait: fp32 if they are summed there."""
        self.private = private
        """The bucket's private memory for gradients. None: the bucket borrows a buffer, or the update reads gradients
        in place."""
        self.buffer = private
        """The memory in which gradients wait, private or borrowed; None: the bucket has no such memory now."""
        self.waiting: dict[int, Any] = {}
        """The device gradients that came since the bucket's last launch, by parameter."""
        self.arrays = self._none
        """The landed gradient of each piece, in the memory of the bucket's executor. Methods replace the whole object,
        so that an interrupt leaves either the old or the new gradients."""
        self.squares: SumOfSquares | None = None
        """The sum of squares of the landed gradients; None: it was not computed since the gradients changed."""

    @property
    def has_landed(self) -> bool:
        """True if gradients of this or of earlier micro-steps are where the update reads them."""
        return bool(self.arrays.addresses.any())

    def in_buffer(self) -> HostArrays:
        """Return the landed gradients of all pieces, with addresses in the bucket's buffer."""
        assert self.buffer is not None
        n, buffer = len(self._offsets), self.buffer
        addresses = buffer.address + self._offsets * buffer.dtype.itemsize
        codes = np.full(n, buffer.dtype.code, np.uint8)
        return HostArrays(addresses.astype(np.uintp), codes, [buffer.owner] * n)

    def piece(self, i: int, numel: int) -> HostArray | None:
        """Return the landed gradient of piece ``i``, which has ``numel`` elements; None: there is none."""
        addresses, codes, owners = self.arrays
        return HostArray(int(addresses[i]), numel, BY_CODE[int(codes[i])], owners[i]) if addresses[i] else None

    def hold(self, pieces: np.ndarray, arrays: HostArrays) -> None:
        """Set the landed gradients of pieces, without a copy.

        Args:
            pieces: the indices of the pieces.
            arrays: the gradient of each of these pieces.
        """
        addresses, codes, owners = self.arrays
        addresses, codes, owners = addresses.copy(), codes.copy(), list(owners)
        addresses[pieces], codes[pieces] = arrays.addresses, arrays.codes
        for i, owner in zip(pieces.tolist(), arrays.owners, strict=True):
            owners[i] = owner
        self.arrays = HostArrays(addresses, codes, owners)

    def held(self, among: np.ndarray) -> list[tuple[ElementType, np.ndarray]]:
        """Return the pieces that have a landed gradient, one entry for each element type of gradients.

        Args:
            among: bool[pieces]: return only pieces for which this is True.
        """
        return self.arrays.by_type((self.arrays.addresses != 0) & among)

    def forget(self, event: GradientEvent) -> None:
        """Discard all gradients of the bucket, and move to the state after ``event``."""
        self.waiting = {}
        self.squares = None
        self.give_back()
        self.on(event)

    def give_back(self) -> None:
        """Release the landed gradients and the memory borrowed for them."""
        self.arrays = self._none
        self.buffer = self.private


class BucketPublication(StateMachine[Publication, PublicationEvent]):
    """The device parameters of a bucket, compared with the master weights. ``bucket_states.py`` has the states."""

    def __init__(self, bucket: int) -> None:
        super().__init__(f"bucket {bucket}", Publication.CURRENT, PUBLICATION)
        self.stale: set[int] = set()
        """The stale parameters of the bucket. Only :meth:`mark_stale`, :meth:`send` and :meth:`confirm` edit this
        set."""
        self.sent_early: frozenset[int] = frozenset()
        """The parameters of the bucket's last early send."""
        self.written: Task[Event] | None = None
        """The task that starts the last send. Its result is the event at the parameters' arrival. None: somebody has
        waited for the arrival."""
        self.arrived: Task[None] | None = None
        """The worker's task that waits for the last arrival. None: somebody has waited for it."""

    def mark_stale(self, params: Iterable[int], event: PublicationEvent = PublicationEvent.GO_STALE) -> None:
        """Mark these parameters as stale."""
        self.stale.update(params)
        self.on(event)

    def send(self, params: Iterable[int]) -> None:
        """Record that these parameters are sent now."""
        self.stale.difference_update(params)
        self.on(PublicationEvent.SEND)

    def confirm(self) -> None:
        """Record that the step for which the parameters in :attr:`sent_early` were sent has come. These parameters are
        no longer stale."""
        self.stale -= self.sent_early
        self.on(PublicationEvent.CONFIRM)
        if self.written is None:  # somebody has waited for their arrival
            self.on(PublicationEvent.ARRIVE)

    def arrive(self) -> None:
        """Record that somebody has waited for the last send."""
        self.written = None
        self.on(PublicationEvent.ARRIVE)


@dataclass(frozen=True)
class Arriving:
    """A bucket's gradients on their way to the memory in which they wait."""

    event: Event
    """The end of the device's part."""
    finish: Callable[[], None]
    """Does the rest after ``event``: sums the parts that the device delivered."""


class Executor(ABC):
    """Receives the gradients of buckets, and runs the kernels of their updates."""

    memory: kernels.Kernels
    """The kernels of the executor's memory."""
    runs_later: ClassVar[bool] = False
    """True if kernels run after their call has returned, so that a later error can leave an update made in part."""

    # --- gradients -----------------------------------------------------------------------------------

    @abstractmethod
    def receive(self, bucket: "LocalBucket", gradients: Mapping[int, Any]) -> Arriving | None:
        """Start to reduce a bucket's gradients over the ranks, and to bring this process's shards to the memory in
        which they wait.

        Args:
            gradients: device gradients, by parameter.

        Returns:
            The gradients in flight; None: they are there.
        """

    @abstractmethod
    def allocate_sums(self, bucket: "LocalBucket") -> HostArray:
        """Return new fp32 memory for the bucket's gradients, which the bucket keeps."""

    @abstractmethod
    def squares(self, bucket: "LocalBucket", pieces: np.ndarray) -> Callable[[], SumOfSquares]:
        """Start to sum the squares of gradients that have landed. Return a function that waits for the sum.

        Args:
            pieces: bool[pieces]: sum only gradients of pieces for which this is True.
        """

    @abstractmethod
    def read_gradient(self, bucket: "LocalBucket", i: int) -> np.ndarray | None:
        """Return a copy of the gradient of piece ``i`` in fp32 on the host; None: this rank has none."""

    @abstractmethod
    def write_gradient(self, bucket: "LocalBucket", i: int, values: np.ndarray) -> None:
        """Replace the gradient of piece ``i`` by fp32 values. The memory of the caller's gradient stays as it is."""

    @abstractmethod
    def clear_gradient(self, bucket: "LocalBucket", i: int) -> None:
        """Write zeros to the buffer of piece ``i``'s gradient."""

    @abstractmethod
    def arrays(self, tensors: Sequence[Any]) -> HostArrays:
        """Return the memory of tensors that this executor's kernels read and write in place."""

    @abstractmethod
    def promote(self, bucket: "LocalBucket") -> HostArray:
        """Return the bucket's gradient buffer, in fp32, so that gradients can be summed there. If the bucket has no
        buffer, or one of another element type, allocate a private fp32 buffer and copy the gradients into it."""

    @abstractmethod
    def release(self, bucket: "LocalBucket") -> None:
        """Free the device's memory for sums of the bucket's gradients. No gradient waits."""

    @abstractmethod
    def restore(self, bucket: "LocalBucket") -> None:
        """Allocate the memory of :meth:`release` again."""

    # --- updates -------------------------------------------------------------------------------------

    @abstractmethod
    def output(self, bucket: "LocalBucket", after: Event) -> Any:
        """Return the memory to which an update writes the bucket's parameters, from which :meth:`publish` sends them.

        Args:
            after: a mark of the device. The device's parameters are written after it.
        """

    @abstractmethod
    def addresses(self, bucket: "LocalBucket", pieces: np.ndarray, tensors: Sequence[Any], out: Any) -> np.ndarray:
        """Return the address to which each of these pieces of parameters is written.

        Args:
            pieces: the indices of the pieces in the bucket.
            tensors: the device parameters.
            out: the memory of :meth:`output`; None: the parameters where they are.
        """

    @abstractmethod
    def end(self, bucket: "LocalBucket") -> Event:
        """Return the event after which the kernels of the bucket's update have run."""

    @abstractmethod
    def publish(
        self, bucket: "LocalBucket", out: Any, tensors: Sequence[Any], present: set[int], ran: Event, after: Event
    ) -> Event:
        """Start to write the parameters of :meth:`output` to every rank's parameters, and return the end.

        Args:
            present: the parameters to write.
            ran: the event of :meth:`end`.
            after: the mark that :meth:`output` got.
        """

    @abstractmethod
    def in_place(self, bucket: "LocalBucket", pieces: np.ndarray, tensors: Sequence[Any]) -> np.ndarray:
        """Return the address of each piece's first element in its parameter's tensor, in this executor's memory.

        Args:
            pieces: the indices of the pieces in the bucket.
            tensors: the tensors of all parameters.
        """

    # --- directions ----------------------------------------------------------------------------------

    @abstractmethod
    def new_direction(self, bucket: "LocalBucket") -> Direction:
        """Return memory for the directions of the bucket's update."""

    @abstractmethod
    def transform(self, bucket: "LocalBucket", direction: Direction, params: frozenset[int]) -> Event:
        """Start to compute with the whole matrices of these parameters, in the bucket's directions."""

    @abstractmethod
    def run_after(self, event: Event) -> None:  # waits
        """Have later kernels run after an event."""


@dataclass(eq=False)
class LocalBucket:
    """A bucket in one process: the pieces that the process owns, their gradients, the state of the device parameters,
    and the tasks in flight."""

    layout: Bucket
    pieces: tuple[Piece, ...]
    """The pieces of the bucket that this process's ranks own."""
    table: PieceTable
    """The same pieces as a table."""
    rule: Rule
    """The update rule of the bucket's parameters."""
    executor: Executor
    """The memory in which the gradients wait and the states are updated, and the kernels there."""
    gradient: BucketGradient
    master: Master
    """Tells where the bucket's master weights are. Parameters can be stale only if this is SEPARATE."""
    writes: Writes
    """The memory to which a step writes the bucket's new parameters."""
    matrices: Matrices | None = None
    """The matrices that the device computes with in an update; None: the rule computes nothing on the device."""
    direction: Direction | None = None
    """The directions of the present or the next update; None: none were started."""
    owed: tuple[Scalars, Sequence[Any], frozenset[int] | None] | None = None
    """The arguments of an update that has not changed the states yet: the scalars, the device parameters, and the
    parameters to update (None: all that have a gradient). :meth:`finish_update` sets this to None."""
    changed: Event | None = None
    """The event after which the update that is owed has changed the states; None: the update was not started."""
    launched: int = 0
    """The kernels of the update that is owed that were launched and run later: one for each element type of
    gradients."""
    task: Task[Any] | None = None
    """The last task that the worker got for this bucket. None: the bucket is the caller's."""
    updated: Task[None] | None = None
    """The last task that updates the bucket's states and sends no parameters. None: somebody has waited for it."""
    lease: Lease | None = None
    """The staging memory of the bucket's last copy to or from the host."""

    def __post_init__(self) -> None:
        index = self.layout.index
        self.publication = BucketPublication(index)
        self.owner = StateMachine[Owner, OwnerEvent](f"bucket {index}", Owner.CALLER, OWNER)
        self.members = frozenset(piece.param for piece in self.layout.pieces)

    def give(self, task: Task[Any]) -> None:
        """Give the bucket to the worker until this task has ended."""
        self.task = task
        self.owner.on(OwnerEvent.GIVE)

    def take(self) -> None:
        """Take the bucket back, after the worker's task has ended."""
        self.task = None
        self.owner.on(OwnerEvent.TAKE)

    def owe(self, scalars: Scalars, tensors: Sequence[Any], among: frozenset[int] | None = None) -> None:
        """Record that an update of the states is due (:attr:`owed`)."""
        self.changed = None
        self.launched = 0
        self.owed = scalars, tensors, among

    def finish_update(self) -> None:  # waits
        """Wait until the update that was started has changed the states. Raise its error."""
        if self.changed is not None:
            self.changed.wait()
            self.owed = None
            self.changed = None

    def chosen(self, scalars: Scalars, among: frozenset[int] | None = None) -> np.ndarray:
        """Return bool[pieces]: True for each piece that an update with these scalars changes.

        Args:
            among: True only for pieces of these parameters; None: of all parameters.
        """
        chosen = scalars.rows[self.table.params] >= 0
        if among is not None and among != self.members:
            chosen &= np.isin(self.table.params, list(among))
        return chosen

    def release(self) -> None:
        """Return the bucket's staging memory to the ring."""
        if self.lease is not None:
            self.lease.release()

    def release_direction(self) -> None:
        """Return the memory of the bucket's directions to the ring, and discard the directions."""
        if self.direction is not None:
            if self.direction.lease is not None:
                self.direction.lease.release()
            self.direction = None
