"""The protocols of collectives on host memory, and the group of one rank."""

import math
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np

_PIECE_WORDS = 2**20
"""Words that :func:`merge` sums at a time, so that the backend's buffers stay small."""


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
        """Replace the array by that of process ``source``."""
        ...

    def where(self) -> str:
        """Return the exchange that this process waits for, and the last one, as lines for somebody who waits. Takes no
        lock."""
        ...


class HostCollectives(Collectives, Protocol):
    """Collectives that also carry buckets, with one rank a process."""

    sent_bytes: int
    """Bytes of gradients and parameters that this rank sent to others."""

    def exchange(self, send: np.ndarray, received: np.ndarray, what: str) -> None:
        """All-to-all of ``world_size`` equal parts: part i of ``send`` goes to rank i, part i of ``received`` comes
        from it."""
        ...

    def reduce_scatter(self, send: np.ndarray, received: np.ndarray, what: str) -> None:
        """Sum this rank's part of all ranks' ``send`` into ``received``, in the backend's own order and precision."""
        ...

    def gather(self, send: np.ndarray, received: np.ndarray, what: str) -> None:
        """All-gather: ``send`` of rank i becomes the i-th of ``world_size`` equal parts of ``received``."""
        ...

    def close(self) -> None:
        """Free the connections. No exchange follows."""
        ...


def merge(sum_integers: Callable[[np.ndarray, str], None], words: np.ndarray, what: str) -> None:
    """Give every process all of the int64 ``words``. Each process has some of them, and zeros in place of the others.

    Args:
        sum_integers: as :meth:`Collectives.sum_integers`.
    """
    for start in range(0, words.size, _PIECE_WORDS):
        sum_integers(words[start : start + _PIECE_WORDS], what)


def merged(
    collectives: Collectives,
    shape: tuple[int, ...],
    dtype: np.dtype,
    parts: Iterable[tuple[tuple[slice, ...], np.ndarray]],
    what: str,
) -> np.ndarray:
    """Return a whole array, put together of the parts that each process has. All processes must call this.

    Args:
        parts: this process's, by index. No two processes may give the same part.
        what: names the data in the errors of :class:`Collectives`.
    """
    n_bytes = math.prod(shape) * dtype.itemsize
    words = np.zeros(-(-n_bytes // 8), np.int64)
    whole = words.view(np.uint8)[:n_bytes].view(dtype).reshape(shape)
    for index, part in parts:
        whole[index] = part
    if collectives.world_size > 1:
        merge(collectives.sum_integers, words, what)
    return whole


class SingleRank:
    """The group of one rank: it receives its own data."""

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

    def where(self) -> str:
        return "exchange: none, this is the only rank"

    def close(self) -> None:
        pass
