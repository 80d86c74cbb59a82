"""One bucket as one process sees it: its shards, their gradients in this step, and what it is in the middle of."""

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
    """The memory that the kernel writes besides states, of which a parameter may be one."""

    STATES = "none"
    IN_PLACE = "the parameters where they are"
    STAGING = "staging, from which they are published"


@dataclass(eq=False)
class Direction:
    """The direction of a bucket's update: what the device computes from whole matrices (``directions.py``)."""

    shards: np.ndarray
    """In bfloat16, in the places of the process's shards."""
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
    """The runs of parameters that this process's ranks own."""
    specs: InitVar[Mapping[int, ParamSpec]]
    """Of each parameter."""
    rule: Rule
    """The update rule of its parameters."""
    wire: ElementType
    """The element type in which gradients travel."""
    arrival: Arrival
    """The form in which the device delivers them."""
    home_dtype: ElementType
    """The element type in which they wait: fp32 if they are summed here."""
    own: np.ndarray | None
    """The host memory of the bucket's own in which gradients wait. None where memory is lent to the bucket, and where
    gradients are read in the device's own memory."""
    master: Master
    """Parameters may lag behind master weights that lie apart. Others change with them."""
    writes: Writes
    """The memory of the parameters that a step updates."""
    matrices: Matrices | None = None
    """The matrices that the device computes with in an update; None: its rule has no such part."""
    direction: Direction | None = None
    """That of the update that is under way, or comes next."""
    home: np.ndarray | None = field(init=False)
    """Gradient: the memory in which gradients wait, its own or lent; None: it has none now."""
    waiting: dict[int, Any] = field(default_factory=dict)
    """Gradient: device gradients that arrived since the last launch, by parameter."""
    gradients: HostArrays = field(init=False)
    """Gradient: the host gradient of each piece. It is replaced whole, so that an interrupt leaves one or the other."""
    squares: SumOfSquares | None = None
    """Gradient: the sum of squares; None where it was not taken since the gradients changed."""
    stale: set[int] = field(default_factory=set)
    """Publication: the parameters that are STALE. :meth:`fall_behind`, :meth:`send` and :meth:`confirm` alone edit it.
    """
    sent_early: frozenset[int] = frozenset()
    """Publication: the parameters that were sent early last."""
    written: Task[Event] | None = None
    """Publication: the start of the last one that nobody has waited for; its result orders reads after it."""
    arrived: Task[None] | None = None
    """Publication: the wait for the last arrival, which the worker was given; None: somebody has waited for it."""
    owed: tuple[Scalars, Sequence[Any], frozenset[int] | None] | None = None
    """The scalars, the parameters and those to update (None: all) of the step that has yet to update the states; its
    task takes them out."""
    task: Task[Any] | None = None
    """Ownership: the last task that the worker was given for this bucket."""
    updated: Task[None] | None = None
    """Ownership: the last update of its states that sends nothing; None: somebody has waited for it."""
    lease: Lease | None = None
    """Staging memory of the bucket's last journey."""

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
        """The number of each piece's first element among the random numbers of its states."""
        seeds = {param: specs[param].seed for param in self.members}
        self.seeds = np.array([seeds[piece.param] for piece in self.pieces], np.uint64)
        """Of the random numbers of each piece's states."""
        self.counted = np.array([specs[piece.param].counted for piece in self.pieces], bool)
        """The pieces whose gradients count in the norm."""
        self.positions: dict[int, list[int]] = {}
        """The indices of a parameter's pieces: one, unless the process's ranks are not neighbours."""
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
        """The memory in which the gradient of each piece waits."""
        assert self.home is not None
        addresses = kernels.address(self.home) + self.offsets * self.home.itemsize
        codes = np.full(len(self.pieces), BY_NUMPY[self.home.dtype].code, np.uint8)
        return HostArrays(addresses.astype(np.uintp), codes, [self.home] * len(self.pieces))

    def hold(self, pieces: np.ndarray, arrays: HostArrays) -> None:
        """The host gradients of these pieces are these arrays."""
        addresses, codes, owners = self.gradients
        addresses, codes, owners = addresses.copy(), codes.copy(), list(owners)
        addresses[pieces], codes[pieces] = arrays.addresses, arrays.codes
        for i, owner in zip(pieces.tolist(), arrays.owners, strict=True):
            owners[i] = owner
        self.gradients = HostArrays(addresses, codes, owners)

    def held(self, among: np.ndarray) -> list[tuple[ElementType, np.ndarray]]:
        """Return the chosen pieces (True) that have a host gradient, by its element type."""
        return self.gradients.by_type((self.gradients.addresses != 0) & among)

    def forget_gradients(self, event: GradientEvent) -> None:
        """Let go of all gradients, for this reason."""
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
        """The master weights of these parameters are not on the device."""
        self.stale.update(params)
        self.publication.on(event)

    def send(self, params: Iterable[int]) -> None:
        """These parameters are sent now."""
        self.stale.difference_update(params)
        self.publication.on(PublicationEvent.SEND)

    def confirm(self) -> None:
        """The step has come for which the parameters were sent early."""
        self.stale -= self.sent_early
        self.publication.on(PublicationEvent.CONFIRM)
        if self.written is None:  # somebody has waited for them
            self.publication.on(PublicationEvent.ARRIVE)

    def release_parameters(self) -> None:
        """The parameters lose their memory on the device."""
        self.publication.on(PublicationEvent.RELEASE)

    def restore_parameters(self) -> None:
        """The parameters have memory on the device again, and no values."""
        self.fall_behind(self.members, PublicationEvent.RESTORE)

    def arrive(self) -> None:
        """The last publication has been waited for."""
        self.written = None
        self.publication.on(PublicationEvent.ARRIVE)

    # --- ownership -------------------------------------------------------------------------------------

    def give(self, task: Task[Any]) -> None:
        """The bucket is the worker's until this task has ended."""
        self.task = task
        self.owner.on(OwnerEvent.GIVE)

    def take(self) -> None:
        """The worker's task has ended: the bucket is the caller's."""
        self.task = None
        self.owner.on(OwnerEvent.TAKE)

    def chosen(self, scalars: Scalars, among: frozenset[int] | None = None) -> np.ndarray:
        """True for each piece that is updated with these scalars; ``among``: of these parameters alone."""
        chosen = scalars.rows[self.params] >= 0
        if among is not None and among != self.members:
            chosen &= np.isin(self.params, list(among))
        return chosen

    def release(self) -> None:
        """Give back the staging."""
        if self.lease is not None:
            self.lease.release()

    def release_direction(self) -> None:
        """Give back the memory of the direction."""
        if self.direction is not None:
            self.direction.lease.release()
            self.direction = None
