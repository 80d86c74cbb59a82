"""What ranks say to each other through host memory, and the group of one."""

from typing import Protocol

import numpy as np


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
