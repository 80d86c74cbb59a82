"""What ranks say to each other through host memory, and the group of one."""

from collections.abc import Callable
from typing import Protocol

import numpy as np

_PIECE_WORDS = 2**20
"""Words that :func:`merge` sums at a time: what a backend needs for it stays small."""


class Collectives(Protocol):
    """Small host arrays between the processes that share one layout.

    All processes make the same calls in the same order. Arrays are C-contiguous. ``what`` names the data in the
    :class:`CollectiveError` that a lost or late process causes.
    """

    rank: int
    world_size: int

    def sum_integers(self, array: np.ndarray, what: str) -> None:
        """Replace a small int64 array by its sum over the processes, exactly."""
        ...

    def broadcast(self, array: np.ndarray, what: str, source: int = 0) -> None:
        """Replace the array by one process's."""
        ...


class HostCollectives(Collectives, Protocol):
    """Buckets too, one rank a process."""

    sent_bytes: int
    """Bytes of gradients and parameters that this rank sent to others."""

    def exchange(self, send: np.ndarray, received: np.ndarray, what: str) -> None:
        """All-to-all: of ``world_size`` equal parts, the i-th of ``send`` goes to rank i, the i-th received is its."""
        ...

    def reduce_scatter(self, send: np.ndarray, received: np.ndarray, what: str) -> None:
        """The sum over ranks of this rank's part of ``send``, in the backend's own order and precision."""
        ...

    def gather(self, send: np.ndarray, received: np.ndarray, what: str) -> None:
        """All-gather: ``send`` of rank i becomes the i-th of ``world_size`` equal parts of ``received``."""
        ...


def merge(sum_integers: Callable[[np.ndarray, str], None], words: np.ndarray, what: str) -> None:
    """Give every process the int64 words of which each has a part, and zeros elsewhere; piece by piece.

    Args:
        sum_integers: as :meth:`Collectives.sum_integers`.
    """
    for start in range(0, words.size, _PIECE_WORDS):
        sum_integers(words[start : start + _PIECE_WORDS], what)


class SingleRank:
    """The only rank: what it would send it has."""

    rank = 0
    world_size = 1
    sent_bytes = 0

    def exchange(self, send: np.ndarray, received: np.ndarray, what: str) -> None:
        np.copyto(received, send)

    def reduce_scatter(self, send: np.ndarray, received: np.ndarray, what: str) -> None:
        np.copyto(received, send)

    def gather(self, send: np.ndarray, received: np.ndarray, what: str) -> None:
        np.copyto(received, send)

    def sum_integers(self, array: np.ndarray, what: str) -> None:
        pass

    def broadcast(self, array: np.ndarray, what: str, source: int = 0) -> None:
        pass
