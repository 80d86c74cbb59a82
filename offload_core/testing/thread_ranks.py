"""Ranks that are threads of one process: collectives for tests and simulations."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ..errors import CollectiveError
from ..ranks.exchanges import Exchanges


class _Group:
    """Shared by the ranks: posted arrays, and a barrier.

    If all ranks have reached the barrier, it lets all of them pass, even if a rank is lost before the others wake up
    (``threading.Barrier`` would break). So results do not depend on timing.
    """

    def __init__(self, world_size: int, timeout: float) -> None:
        self.posted: list[tuple[str, np.ndarray] | None] = [None] * world_size
        self._timeout = timeout
        self._condition = threading.Condition()
        self._meetings = 0
        self._present = 0
        self._lost = False

    def meet(self, what: str) -> None:  # waits
        """Wait for all ranks, or raise :class:`CollectiveError`."""
        with self._condition:
            meeting = self._meetings
            self._present += 1
            if self._present == len(self.posted):
                self._present = 0
                self._meetings += 1
                self._condition.notify_all()
            self._condition.wait_for(lambda: self._meetings != meeting or self._lost, self._timeout)
            if self._meetings == meeting:
                self._lose()
                raise CollectiveError(f"{what}: a rank was lost or did not come in time")

    def lose(self) -> None:
        """Make present and later waits fail, because a rank is lost."""
        with self._condition:
            self._lose()

    def _lose(self) -> None:
        self._lost = True
        self._condition.notify_all()


class ThreadRank:
    """One rank of a group of threads."""

    def __init__(self, group: _Group, rank: int) -> None:
        self._group = group
        self.rank = rank
        self.world_size = len(group.posted)
        self.sent_bytes = 0
        """Bytes of gradients and parameters that this rank sent to others."""
        self._exchanges = Exchanges()
        self.where = self._exchanges.where

    def _share(self, what: str, array: np.ndarray, read: Callable[[Sequence[np.ndarray]], None]) -> None:
        """Show the others an array, read theirs, and wait until all have read."""
        group = self._group
        with self._exchanges.over(what):
            group.posted[self.rank] = (what, array)
            group.meet(what)
            posted = [entry for entry in group.posted if entry is not None]
            if {name for name, _ in posted} != {what}:
                raise CollectiveError(f"rank {self.rank} is at {what!r}, others at {sorted({n for n, _ in posted})}")
            read([array for _, array in posted])
            group.meet(what)

    def exchange(self, send: np.ndarray, received: np.ndarray, what: str) -> None:
        parts = received.reshape(self.world_size, -1)

        def read(arrays: Sequence[np.ndarray]) -> None:
            for part, theirs in zip(parts, arrays, strict=True):
                np.copyto(part, theirs.reshape(self.world_size, -1)[self.rank])

        self.sent_bytes += send.nbytes * (self.world_size - 1) // self.world_size
        self._share(what, send, read)

    def reduce_scatter(self, send: np.ndarray, received: np.ndarray, what: str) -> None:
        def read(arrays: Sequence[np.ndarray]) -> None:
            parts = [array.reshape(self.world_size, -1)[self.rank] for array in arrays]
            np.copyto(received, sum(parts[1:], start=parts[0]))

        self.sent_bytes += send.nbytes * (self.world_size - 1) // self.world_size
        self._share(what, send, read)

    def gather(self, send: np.ndarray, received: np.ndarray, what: str) -> None:
        parts = received.reshape(self.world_size, -1)

        def read(arrays: Sequence[np.ndarray]) -> None:
            for part, theirs in zip(parts, arrays, strict=True):
                np.copyto(part, theirs.reshape(-1))

        self.sent_bytes += send.nbytes * (self.world_size - 1)
        self._share(what, send, read)

    def sum_integers(self, array: np.ndarray, what: str) -> None:
        total = np.zeros_like(array)
        self._share(what, array, lambda arrays: np.copyto(total, np.sum(arrays, axis=0)))
        np.copyto(array, total)

    def broadcast(self, array: np.ndarray, what: str, source: int = 0) -> None:
        given = np.empty_like(array)
        self._share(what, array, lambda arrays: np.copyto(given, arrays[source]))
        np.copyto(array, given)

    def close(self) -> None:
        pass


def run_ranks(world_size: int, body: Callable[[ThreadRank], Any], *, timeout: float = 60.0) -> list[Any]:
    """Run ``body(rank)`` on ``world_size`` threads, and return their results.

    If one raises, the others get :class:`CollectiveError` at their next meeting. The first other error is raised here.
    """
    group = _Group(world_size, timeout)

    def guarded(rank: int) -> Any:
        try:
            return body(ThreadRank(group, rank))
        except BaseException:
            group.lose()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(guarded, rank) for rank in range(world_size)]
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, CollectiveError)), errors[0])
    return [future.result() for future in futures]
