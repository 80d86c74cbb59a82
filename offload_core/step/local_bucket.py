"""One bucket as one process sees it: its shards, their gradients in this step, and what it is in the middle of."""

from collections.abc import Iterable, Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any

import numpy as np

from ..device.events import Event
from ..device.protocols import HostArray
from ..dtypes import ElementType
from ..layout.partition import Bucket, Piece
from ..memory.host_memory import Lease
from ..native.grad_norm import SumOfSquares
from ..support.threads import Task
from .bucket_states import (
    GradientEvent,
    OwnerEvent,
    PublicationEvent,
    gradient_of,
    owner_of,
    publication_of,
)


@dataclass(eq=False)
class LocalBucket:
    """The three state machines of ``bucket_states.py`` and the data that belongs to each."""

    bucket: Bucket
    pieces: tuple[Piece, ...]
    """The runs of parameters that this process's ranks own."""
    seeds: InitVar[Mapping[int, int]]
    """Of the random numbers of each parameter's states."""
    wire: ElementType
    """The element type in which gradients travel."""
    home: np.ndarray | None
    """The host memory in which gradients wait: fp32 if they are summed here, else of type ``wire``. None where they are
    read in the device's own memory."""
    without_master: bool
    """The parameters are their own master weights."""
    written_by_kernel: bool
    """The update writes the new parameters where they are: nothing is left to publish."""
    waiting: dict[int, Any] = field(default_factory=dict)
    """Gradient: device gradients that arrived since the last launch, by parameter."""
    gradients: list[HostArray | None] = field(init=False)
    """Gradient: the host gradient of each piece."""
    squares: SumOfSquares | None = None
    """Gradient: the sum of squares; None where it was not taken since the gradients changed."""
    stale: set[int] = field(default_factory=set)
    """Publication: parameters whose master weights are to be sent."""
    written: Task[Event] | None = None
    """Publication: the start of the last one that nobody has waited for; its result orders reads after it."""
    task: Task[Any] | None = None
    """Ownership: the last task that the worker was given for this bucket."""
    lease: Lease | None = None
    """Staging memory of the bucket's last journey."""

    def __post_init__(self, seeds: Mapping[int, int]) -> None:
        self.gradient = gradient_of(self.bucket.index)
        self.publication = publication_of(self.bucket.index)
        self.owner = owner_of(self.bucket.index)
        self.members = frozenset(piece.param for piece in self.bucket.pieces)
        self.offsets = np.array([piece.offset for piece in self.pieces], np.int64)
        """Where each piece begins among this process's shards, in elements."""
        self.numels = np.array([piece.numel for piece in self.pieces], np.int64)
        self.places = np.zeros(len(self.pieces), [("start", np.int64), ("seed", np.uint64)])
        """The first element of each piece within its parameter, and that parameter's seed."""
        for i, piece in enumerate(self.pieces):
            self.places[i] = piece.start, seeds[piece.param]
        self.positions: dict[int, list[int]] = {}
        """The indices of a parameter's pieces: one, unless the process's ranks are not neighbours."""
        for i, piece in enumerate(self.pieces):
            self.positions.setdefault(piece.param, []).append(i)
        self.gradients = [None] * len(self.pieces)

    # --- gradient --------------------------------------------------------------------------------------

    @property
    def has_landed(self) -> bool:
        """Whether gradients of this or of earlier micro-steps are on the host."""
        return any(gradient is not None for gradient in self.gradients)

    def at_home(self, i: int) -> HostArray:
        """The memory in which the gradient of piece ``i`` waits."""
        assert self.home is not None
        piece = self.pieces[i]
        return HostArray.of(self.home[piece.offset : piece.offset + piece.numel])

    def held(self) -> dict[ElementType, list[tuple[int, HostArray]]]:
        """The host gradients, with the index of their piece, by element type."""
        by_dtype: dict[ElementType, list[tuple[int, HostArray]]] = {}
        for i, gradient in enumerate(self.gradients):
            if gradient is not None:
                by_dtype.setdefault(gradient.dtype, []).append((i, gradient))
        return by_dtype

    def forget_gradients(self, event: GradientEvent) -> None:
        """Let go of all gradients, for this reason."""
        self.waiting = {}
        self.squares = None
        self.gradients = [None] * len(self.pieces)
        self.gradient.on(event)

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
        self.publication.on(PublicationEvent.CONFIRM)
        if self.written is None:  # somebody has waited for them
            self.publication.on(PublicationEvent.ARRIVE)

    def arrive(self, written: Task[Event]) -> None:
        """This publication has been waited for."""
        if self.written is written:
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

    def release(self) -> None:
        """Give back the staging."""
        if self.lease is not None:
            self.lease.release()
