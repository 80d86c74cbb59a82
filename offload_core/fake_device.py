"""An asynchronous device made of threads, for tests and simulations.

It has its own memory and two copy lanes that finish late and out of step. A copy's destination is spoilt
when the copy is asked for and its source is read only when the copy runs, so a reader or a writer that does
not wait for the event sees wrong bits here, not on the first GPU.
"""

import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from .device import Copy, Event, HostArray
from .dtypes import BY_NUMPY, ElementType


class FakeTensor:
    """A one-dimensional array in the fake device's memory; only copies and tests look at ``memory``."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory.copy()


class _CopyEvent:
    def __init__(self, futures: Sequence[Future]) -> None:
        self._futures = futures

    def wait(self) -> None:
        for future in self._futures:
            future.result()


class FakeDevice:
    """A device that is not the host.

    Args:
        seed: of the delays.
        max_delay: seconds that a copy may lag behind, at most.
        fail_at: the numbers (counted from 0, both directions together) of the copies that fail.
    """

    addressable = False
    updates_in_place = False
    wants_pinned = False

    def __init__(self, *, seed: int = 0, max_delay: float = 0.0, fail_at: frozenset[int] = frozenset()) -> None:
        self._random = random.Random(seed)
        self._max_delay = max_delay
        self._fail_at = fail_at
        self._copies = 0
        self._lock = threading.Lock()
        self._lanes = {way: ThreadPoolExecutor(1, thread_name_prefix=way) for way in ("to_host", "to_device")}

    def close(self) -> None:
        """End the lanes' threads."""
        for lane in self._lanes.values():
            lane.shutdown()

    def dtype(self, tensor: FakeTensor) -> ElementType:
        return BY_NUMPY[tensor.memory.dtype]

    def numel(self, tensor: FakeTensor) -> int:
        return tensor.memory.size

    def host_array(self, tensor: FakeTensor) -> HostArray:
        raise TypeError("a FakeTensor is not in host memory")

    def to_host(self, copies: Sequence[Copy]) -> Event:
        return self._enqueue("to_host", [(c.host, c.tensor.memory[c.start : c.start + c.host.size]) for c in copies])

    def to_device(self, copies: Sequence[Copy]) -> Event:
        return self._enqueue("to_device", [(c.tensor.memory[c.start : c.start + c.host.size], c.host) for c in copies])

    def _enqueue(self, way: str, copies: Sequence[tuple[np.ndarray, np.ndarray]]) -> Event:
        futures = []
        for destination, source in copies:
            assert destination.dtype == source.dtype
            with self._lock:
                number, self._copies = self._copies, self._copies + 1
                delay = self._random.uniform(0, self._max_delay)
            destination.view(np.uint8)[:] = 0xFF  # a NaN in every element type
            futures.append(self._lanes[way].submit(self._copy, number, delay, destination, source))
        return _CopyEvent(futures)

    def _copy(self, number: int, delay: float, destination: np.ndarray, source: np.ndarray) -> None:
        if delay:
            time.sleep(delay)
        if number in self._fail_at:
            raise OSError(f"fake device: copy {number} failed as asked")
        np.copyto(destination, source)
