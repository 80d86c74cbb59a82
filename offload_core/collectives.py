"""What the pipeline asks of a group of ranks, and the group of one."""

from typing import Protocol

import numpy as np


class Collectives(Protocol):
    """Communication among the ranks that share one layout.

    All ranks make the same calls in the same order. Arrays are C-contiguous host memory. ``what`` names the data in
    the :class:`CollectiveError` that a lost or late rank causes.
    """

    rank: int
    world_size: int

    def exchange(self, send: np.ndarray, received: np.ndarray, what: str) -> None:
        """All-to-all: of ``world_size`` equal parts, the i-th of ``send`` goes to rank i, the i-th received is its."""
        ...

    def gather(self, send: np.ndarray, received: np.ndarray, what: str) -> None:
        """All-gather: ``send`` of rank i becomes the i-th of ``world_size`` equal parts of ``received``."""
        ...

    def sum_integers(self, array: np.ndarray, what: str) -> None:
        """Replace a small int64 array by its sum over the ranks, exactly."""
        ...

    def broadcast(self, array: np.ndarray, what: str) -> None:
        """Replace the array by rank 0's."""
        ...


class SingleRank:
    """The only rank: what it would send it has."""

    rank = 0
    world_size = 1

    def exchange(self, send: np.ndarray, received: np.ndarray, what: str) -> None:
        np.copyto(received, send)

    def gather(self, send: np.ndarray, received: np.ndarray, what: str) -> None:
        np.copyto(received, send)

    def sum_integers(self, array: np.ndarray, what: str) -> None:
        pass

    def broadcast(self, array: np.ndarray, what: str) -> None:
        pass
