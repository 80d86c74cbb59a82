"""One bucket as one process sees it: its shards, their gradients in this step, and its tasks in flight."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from ..config.state_formats import Master
from ..device.events import Done, Event
from ..device.protocols import Arrival, HostArrays, Matrices
from ..dtypes import BY_NUMPY, ElementType
from ..layout.partition import Bucket, ParamSpec, Piece
from ..memory.host_memory import Lease
from ..native import kernels
from ..native.grad_norm import SumOfSquares
from ..rules import Rule, Scalars
from ..support.threads import Task
from .bucket_states import (
    GradientEvent,
    OwnerEvent,
    PublicationEvent,
    gradient_of,
    owner_of,
    publication_of,
)


class Writes(Enum):
    """The memory that the kernel writes besides states. (A parameter may be a state: its own master weight.)"""

    STATES = "none"
    IN_PLACE = "the parameters where they are"
    STAGING = "staging, from which they are published"


@dataclass(eq=False)
class Direction:
    """The direction of a bucket's update, which the device computes from whole matrices (``directions.py``)."""

    shards: np.ndarray
    """The direction in bfloat16, with the same offsets as the process's shards."""
    lease: Lease
    computed: Event = field(default_factory=Done)

    def addresses(self, offsets: np.ndarray) -> np.ndarray:
        """Return the addresses of the elements at these offsets."""
        return kernels.address(self.shards) + (offsets * self.shards.itemsize).astype(np.uintp)


@dataclass(eq=False)
class LocalBucket:
    """The three state machines of ``bucket_states.py`` and the data that belongs to each."""

    bucket: Bucket
    pieces: tuple[Piece, ...]
    """The ranges of parameters that this process's ranks own."""
    specs: InitVar[Mapping[int, ParamSpec]]
    """The spec of each parameter."""
    rule: Rule
    """The update rule of its parameters."""
    wire: ElementType
    """The element type in which gradients travel."""
    arrival: Arrival
    """The form in which the device delivers gradients."""
    home_dtype: ElementType
    """The element type in which gradients wait on the host: fp32 if they are summed there."""
    own: np.ndarray | None
    """The bucket's private host memory for gradients. None: the bucket borrows memory, or gradients are read in place.
    """
    master: Master
    """The place of the master weights. A parameter can be stale only if it is APART."""
    writes: Writes
    """The memory of the parameters that a step updates."""
    matrices: Matrices | None = None
    """The matrices that the device computes with in an update; None: the rule computes nothing on the device."""
    direction: Direction | None = None
    """The direction of the present or the next update."""
    home: np.ndarray | None = field(init=False)
    """Gradient: the memory in which gradients wait, private or borrowed; None: the bucket has none now."""
    waiting: dict[int, Any] = field(default_factory=dict)
    """Gradient: device gradients that arrived since the last launch, by parameter."""
    gradients: HostArrays = field(init=False)
    """Gradient: the host gradient of each piece, replaced as one object, so that an interrupt leaves the old or new."""
    squares: SumOfSquares | None = None
    """Gradient: the sum of squares; None: not computed since the gradients changed."""
    stale: set[int] = field(default_factory=set)
    """Publication: the parameters that are STALE. :meth:`fall_behind`, :meth:`send` and :meth:`confirm` alone edit it.
    """
    sent_early: frozenset[int] = frozenset()
    """Publication: the parameters that were sent early last."""
    written: Task[Event] | None = None
    """Publication: the task that starts the last send; its result is the arrival's event. None: it has been waited for.
    """
    arrived: Task[None] | None = None
    """Publication: the worker's task that waits for the last arrival. None: somebody has waited for it."""
    owed: tuple[Scalars, Sequence[Any], frozenset[int] | None] | None = None
    """The arguments of an update that has yet to change the states: the scalars, the device parameters, and the numbers
    of the parameters to update (None: all). The update's task sets it to None."""
    task: Task[Any] | None = None
    """Ownership: the last task that the worker was given for this bucket."""
    updated: Task[None] | None = None
    """Ownership: the last task that updates states and sends nothing. None: somebody has waited for it."""
    lease: Lease | None = None
    """The staging memory of the bucket's last copy to or from the host."""

    def __post_init__(self, specs: Mapping[int, ParamSpec]) -> None:
        self.gradient = gradient_of(self.bucket.index)
        self.publication = publication_of(self.bucket.index)
        self.owner = owner_of(self.bucket.index)
        self.members = frozenset(piece.param for piece in self.bucket.pieces)
        self.params = np.array([piece.param for piece in self.pieces], np.int64)
        """The parameter of each piece."""
        self.offsets = np.array([piece.offset for piece in self.pieces], np.int64)
        """The offset of each piece among this process's shards, in elements."""
        self.starts = np.array([piece.start for piece in self.pieces], np.int64)
        """The offset of each piece in its parameter, in elements."""
        self.in_tensor = np.array([self.bucket.in_tensor(piece) for piece in self.pieces], np.int64)
        """The offset of each piece in its parameter's tensor, in elements."""
        self.numels = np.array([piece.numel for piece in self.pieces], np.int64)
        firsts = {param: specs[param].first or 0 for param in self.members}
        self.numbers = self.starts + np.array([firsts[piece.param] for piece in self.pieces], np.int64)
        """The index of each piece's first element in the random numbers of its states."""
        seeds = {param: specs[param].seed for param in self.members}
        self.seeds = np.array([seeds[piece.param] for piece in self.pieces], np.uint64)
        """The seed of the random numbers of each piece's states."""
        self.counted = np.array([specs[piece.param].counted for piece in self.pieces], bool)
        """True for each piece whose gradient counts in the norm."""
        self.positions: dict[int, list[int]] = {}
        """The indices of each parameter's pieces: one, unless the process's ranks are not consecutive."""
        for i, piece in enumerate(self.pieces):
            self.positions.setdefault(piece.param, []).append(i)
        self._no_gradients = HostArrays.none(len(self.pieces))
        self.give_back()

    # --- gradient --------------------------------------------------------------------------------------

    @property
    def has_landed(self) -> bool:
        """True if gradients of this or of earlier micro-steps are on the host."""
        return bool(self.gradients.addresses.any())

    def at_home(self) -> HostArrays:
        """Return the host gradient of each piece, in the bucket's home."""
        assert self.home is not None
        addresses = kernels.address(self.home) + self.offsets * self.home.itemsize
        codes = np.full(len(self.pieces), BY_NUMPY[self.home.dtype].code, np.uint8)
        return HostArrays(addresses.astype(np.uintp), codes, [self.home] * len(self.pieces))

    def hold(self, pieces: np.ndarray, arrays: HostArrays) -> None:
        """Set the host gradients of these pieces to these arrays."""
        addresses, codes, owners = self.gradients
        addresses, codes, owners = addresses.copy(), codes.copy(), list(owners)
        addresses[pieces], codes[pieces] = arrays.addresses, arrays.codes
        for i, owner in zip(pieces.tolist(), arrays.owners, strict=True):
            owners[i] = owner
        self.gradients = HostArrays(addresses, codes, owners)

    def held(self, among: np.ndarray) -> list[tuple[ElementType, np.ndarray]]:
        """Return the pieces in the mask ``among`` that have a host gradient, by the gradient's element type."""
        return self.gradients.by_type((self.gradients.addresses != 0) & among)

    def forget_gradients(self, event: GradientEvent) -> None:
        """Discard all gradients. ``event`` is the reason."""
        self.waiting = {}
        self.squares = None
        self.give_back()
        self.gradient.on(event)

    def give_back(self) -> None:
        """Release the host gradients and the memory borrowed for them."""
        self.gradients = self._no_gradients
        self.home = self.own

    # --- publication -----------------------------------------------------------------------------------

    def fall_behind(self, params: Iterable[int], event: PublicationEvent = PublicationEvent.FALL_BEHIND) -> None:
        """Mark these parameters as stale."""
        self.stale.update(params)
        self.publication.on(event)

    def send(self, params: Iterable[int]) -> None:
        """Record that these parameters are sent now."""
        self.stale.difference_update(params)
        self.publication.on(PublicationEvent.SEND)

    def confirm(self) -> None:
        """Record that the step has come for which parameters were sent early."""
        self.stale -= self.sent_early
        self.publication.on(PublicationEvent.CONFIRM)
        if self.written is None:  # somebody has waited for their arrival
            self.publication.on(PublicationEvent.ARRIVE)

    def release_parameters(self) -> None:
        """Record that the parameters lose their memory on the device."""
        self.publication.on(PublicationEvent.RELEASE)

    def restore_parameters(self) -> None:
        """Record that the parameters have memory on the device again, and no values yet."""
        self.fall_behind(self.members, PublicationEvent.RESTORE)

    def arrive(self) -> None:
        """Record that somebody has waited for the last send."""
        self.written = None
        self.publication.on(PublicationEvent.ARRIVE)

    # --- ownership -------------------------------------------------------------------------------------

    def give(self, task: Task[Any]) -> None:
        """Give the bucket to the worker until this task has ended."""
        self.task = task
        self.owner.on(OwnerEvent.GIVE)

    def take(self) -> None:
        """Take the bucket back, after the worker's task has ended."""
        self.task = None
        self.owner.on(OwnerEvent.TAKE)

    def chosen(self, scalars: Scalars, among: frozenset[int] | None = None) -> np.ndarray:
        """Return True for each piece that is updated with these scalars; ``among``: only pieces of these parameters."""
        chosen = scalars.rows[self.params] >= 0
        if among is not None and among != self.members:
            chosen &= np.isin(self.params, list(among))
        return chosen

    def release(self) -> None:
        """Return the staging memory."""
        if self.lease is not None:
            self.lease.release()

    def release_direction(self) -> None:
        """Return the memory of the direction."""
        if self.direction is not None:
            self.direction.lease.release()
            self.direction = None
