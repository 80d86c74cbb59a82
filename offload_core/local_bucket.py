"""What a process holds of one bucket: its shards' states, and their gradients in the present step."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .device import Event, HostArray
from .dtypes import ElementType
from .grad_norm import SumOfSquares
from .host_memory import Lease
from .partition import Bucket, Piece
from .step_state import BucketLife


@dataclass(eq=False)
class LocalBucket:
    """A bucket as one process sees it."""

    bucket: Bucket
    pieces: tuple[Piece, ...]
    """What its ranks own of the parameters."""
    segments: np.ndarray
    """What the kernel is told of each piece, less what changes from step to step."""
    wire: ElementType
    """The element type in which gradients travel."""
    home: np.ndarray | None
    """Where gradients wait on the host: fp32 if they are summed here, else of type ``wire``. None where they are read
    in the device's own memory."""
    life: BucketLife = field(init=False)
    waiting: dict[int, Any] = field(default_factory=dict)
    """Device gradients that arrived since the last launch, by parameter."""
    launched: bool = False
    """Whether it has been launched in the present round."""
    gradients: list[HostArray | None] = field(init=False)
    """The host gradient of each piece."""
    squares: SumOfSquares | None = None
    """Of the gradients; None where they were not looked at since they changed."""
    task: "Future[Any] | None" = None
    """The last that was asked for on this bucket: until it has ended the bucket is its own."""
    behind: set[int] = field(default_factory=set)
    """Parameters whose master weights are ahead of the device's."""
    lease: Lease | None = None
    """Staging that its last journey goes through."""
    written: "Future[Event] | None" = None
    """The start of the last publication; its result orders reads after it."""

    def __post_init__(self) -> None:
        self.life = BucketLife(self.bucket.index)
        self.members = frozenset(piece.param for piece in self.bucket.pieces)
        self.positions: dict[int, list[int]] = {}
        """The indices of a parameter's pieces: one, unless the process's ranks are not neighbours."""
        for i, piece in enumerate(self.pieces):
            self.positions.setdefault(piece.param, []).append(i)
        self.gradients = [None] * len(self.pieces)

    @property
    def is_full(self) -> bool:
        """Whether every parameter of the bucket has a gradient waiting."""
        return len(self.waiting) == len(self.members)

    @property
    def holds_gradients(self) -> bool:
        """Whether gradients of earlier micro-steps are on the host."""
        return any(gradient is not None for gradient in self.gradients)

    def at_home(self, i: int) -> HostArray:
        """Where piece ``i``'s gradient waits."""
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

    def release(self) -> None:
        """Give back the staging."""
        if self.lease is not None:
            self.lease.release()

    def clear(self) -> None:
        """Forget all gradients."""
        self.waiting = {}
        self.squares = None
        self.gradients = [None] * len(self.pieces)
