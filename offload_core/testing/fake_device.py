"""An asynchronous device made of threads, for tests and simulations.

It has its own memory, a lane for computing, two for copies and one for the kernels of updates; these finish late, and
not in one order. A copy's
destination is overwritten with NaNs as soon as it may be written, and its source is read only when the copy runs. So
code that does not wait for an event sees wrong bits here already, and not only on a GPU.
"""

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from ..device.events import Done, Event
from ..device.host import compute_in, fill
from ..device.protocols import Copy, DeviceQueue, HostArray, HostArrays, Matrices
from ..dtypes import BY_NUMPY, FLOAT32, ElementType
from ..memory.working_memory import unprotected
from ..native import kernels
from ..native.grad_norm import SumOfSquares
from ..support.threads import Task, TaskThread


class FakeTensor:
    """A one-dimensional array in the fake device's memory; only copies and tests look at ``memory``."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory.copy()

    def __getitem__(self, run: slice) -> "FakeTensor":
        return FakeTensor.at(self.memory[run])

    @classmethod
    def at(cls, memory: np.ndarray) -> "FakeTensor":
        """Return a tensor with this memory, without a copy."""
        tensor = object.__new__(cls)
        tensor.memory = memory
        return tensor


class _LaneEvent:
    """The end of a lane's task. ``order`` delays the device's computing, not the caller."""

    def __init__(self, device: "FakeDevice", future: Task[Any]) -> None:
        self._device = device
        self._future = future
        self._ran: tuple[int, int] | None = None

    @property
    def ran(self) -> tuple[int, int] | None:
        """The task's begin and end in nanoseconds; None before :meth:`wait`."""
        return self._ran

    def wait(self) -> None:  # waits
        self._ran = self._future.result()

    def order(self) -> None:  # waits
        self._device.compute(self._future.exception)

    def done(self) -> bool:
        return self._future.done()


class FakeDevice:
    """A device that is not the host.

    Args:
        seed: the seed of the delays.
        max_delay: the longest delay of a copy, in seconds.
        bandwidth: bytes a second of each lane; None: as fast as the host copies.
        fail_at: the numbers (counted from 0, both directions together) of the copies that fail.
    """

    addressable = False
    updates_in_place = False
    pinning = ()

    def __init__(
        self,
        *,
        seed: int = 0,
        max_delay: float = 0.0,
        bandwidth: float | None = None,
        fail_at: frozenset[int] = frozenset(),
    ) -> None:
        self._random = random.Random(seed)
        self._max_delay = max_delay
        self._bandwidth = bandwidth
        self._fail_at = fail_at
        self._copies = 0
        self._lock = threading.Lock()
        ways = ("to_host", "to_device", "compute", "updates")
        self._lanes = {way: TaskThread(way) for way in ways}
        self._free = dict.fromkeys(self._lanes, 0.0)
        """The time at which each lane will have done its copies, so that inexact sleeps do not add up."""
        self._computing: Task[object] | None = None
        """The last task of the compute lane."""
        self._queue = FakeQueue(self)

    def queue(self) -> DeviceQueue:
        """As :attr:`Device.queue`."""
        return self._queue

    def fail_after(self, copies: int | None) -> None:
        """Let the copy after ``copies`` more ones fail; None: no later copy fails."""
        with self._lock:
            asked = {number for number in self._fail_at if number < self._copies}
            self._fail_at = frozenset(asked if copies is None else asked | {self._copies + copies})

    def close(self) -> None:
        """End the lanes' threads."""
        for lane in self._lanes.values():
            lane.close()

    def free_bytes(self) -> None:
        return None

    def dtype(self, tensor: FakeTensor | np.ndarray) -> ElementType:
        return BY_NUMPY[(tensor.memory if isinstance(tensor, FakeTensor) else tensor).dtype]

    def numel(self, tensor: FakeTensor | np.ndarray) -> int:
        return (tensor.memory if isinstance(tensor, FakeTensor) else tensor).size

    def host_array(self, tensor: FakeTensor | np.ndarray) -> HostArray:
        if isinstance(tensor, FakeTensor):
            raise TypeError("a FakeTensor is not in host memory")
        return HostArray.of(tensor)

    def host_arrays(self, tensors: Sequence[FakeTensor | np.ndarray]) -> HostArrays:
        return HostArrays.columns(map(self.host_array, tensors))

    def to_host(self, copies: Sequence[Copy], host: np.ndarray) -> Event:
        after, host = self.mark(), unprotected(host)
        host.view(np.uint8)[:] = 0xFF  # a NaN in every element type
        runs = [(c.offset, c.tensor.memory[c.start : c.start + c.numel]) for c in copies]

        def read() -> None:
            after.wait()
            fill(host, runs)

        return self._enqueue("to_host", host.nbytes, read)

    def to_device(self, host: np.ndarray, copies: Sequence[Copy], after: Event) -> Event:
        host = unprotected(host)
        runs = [(c.tensor.memory[c.start : c.start + c.numel], host[c.offset : c.offset + c.numel]) for c in copies]

        def spoil() -> None:
            after.wait()
            for destination, _ in runs:
                destination.view(np.uint8)[:] = 0xFF

        def write() -> None:
            for destination, source in runs:
                assert destination.dtype == source.dtype
                np.copyto(destination, source)

        if isinstance(after, Done):
            spoil()
        else:
            self._lanes["to_device"].submit(spoil)
        return self._enqueue("to_device", host.nbytes, write)

    def transform(self, matrices: Matrices, host: np.ndarray) -> Event:
        host = unprotected(host)

        def compute() -> None:
            moved = host.copy()
            for matrix in matrices.in_(host):
                matrix.view(np.uint8)[:] = 0xFF
            compute_in(matrices, moved)
            for into, made in zip(matrices.in_(host), matrices.in_(moved), strict=True):
                np.copyto(into, made)

        return self._enqueue("to_host", host.nbytes, compute)

    def compute(self, task: Callable[[], object]) -> Event:
        """Call ``task`` in the compute lane, after all earlier tasks of that lane."""
        self._computing = self._lanes["compute"].submit(task)
        return _LaneEvent(self, self._computing)

    def mark(self) -> Event:
        computing = self._computing
        return Done() if computing is None or computing.done() else _LaneEvent(self, computing)

    def synchronize(self) -> None:  # waits
        for way in ("to_host", "to_device"):
            self._lanes[way].submit(lambda: None).result()
        self._lanes["updates"].submit(self._queue.forget_failure).result()

    def _enqueue(self, way: str, n_bytes: int, copy: Callable[[], None], *, counts: bool = True) -> Event:
        asked = time.perf_counter()
        with self._lock:
            number, self._copies = (self._copies, self._copies + 1) if counts else (None, self._copies)
            delay = self._random.uniform(0, self._max_delay)
        if self._bandwidth is not None:
            delay += n_bytes / self._bandwidth

        def run() -> tuple[int, int]:
            began = time.perf_counter_ns()
            self._free[way] = max(asked, self._free[way]) + delay
            time.sleep(max(self._free[way] - time.perf_counter(), 0.0))
            if number in self._fail_at:
                raise OSError(f"fake device: copy {number} failed as asked")
            copy()
            return began, time.perf_counter_ns()

        return _LaneEvent(self, self._lanes[way].submit(run))


class FakeQueue:
    """The kernels of a fake device: the host's, which run late. After a call that fails, no later one runs, and the
    events of all raise its error, until the device is synchronized."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._failed: BaseException | None = None
        self._until_failure: int | None = None
        self._used: deque[tuple[Event, object]] = deque()

    def fail_after(self, updates: int | None) -> None:
        """Let the update after ``updates`` more ones fail; None: no later update fails."""
        self._until_failure = updates

    def _may_run(self) -> None:
        """Raise the error of the update that is to fail."""
        if self._until_failure is not None:
            self._until_failure -= 1
            if self._until_failure < 0:
                self._until_failure = None
                raise OSError("fake device: an update failed as asked")

    def _submit(self, act: Callable[[], object], n_bytes: int = 0) -> Event:
        def run() -> None:
            if self._failed is None:
                try:
                    act()
                except BaseException as error:
                    self._failed = error

        return self._device._enqueue("updates", n_bytes, run, counts=False)

    def allocate(self, n_bytes: int) -> FakeTensor:
        return FakeTensor.at(np.zeros(n_bytes, np.uint8))

    def typed(self, memory: FakeTensor, dtype: ElementType) -> FakeTensor:
        return FakeTensor.at(memory.memory.view(dtype.numpy))

    def arrays(self, tensors: Sequence[FakeTensor]) -> HostArrays:
        def array(tensor: FakeTensor) -> HostArray:
            return HostArray(kernels.address(tensor.memory), tensor.memory.size, _element_type(tensor.memory), tensor)

        return HostArrays.columns(map(array, tensors))

    def order(self, after: Event) -> None:  # waits
        if not isinstance(after, Done | _LaneEvent | _QueueEvent):
            after.order()  # the device's computing waits, and so does the queue
            after = self._device.mark()
        if not isinstance(after, Done):
            self._device._lanes["updates"].submit(after.wait)

    def mark(self, used: object = None) -> Event:
        with suppress(IndexError):  # several threads add and remove some
            while (first := self._used.popleft())[0].done():
                pass
            self._used.appendleft(first)
        event = _QueueEvent()
        event.end = self._device._enqueue("updates", 0, lambda: setattr(event, "error", self._failed), counts=False)
        self._used.append((event, used))
        return event

    def forget_failure(self) -> None:
        """Let later calls run again after one that failed."""
        self._failed = None

    def update(self, segments: np.ndarray, scalars: np.ndarray, **kind: Any) -> None:
        update = partial(kernels.update, segments, scalars.copy(), **kind, threads=1)

        def run() -> None:
            self._may_run()
            update()

        self._submit(run)

    def accumulate(self, spans: np.ndarray, dtype: ElementType) -> None:
        self._submit(partial(kernels.accumulate, spans, dtype, threads=1))

    def cast(self, spans: np.ndarray, src: ElementType, dst: ElementType) -> None:
        self._submit(partial(kernels.cast, spans, src, dst, threads=1))

    def reduce(self, parts: HostArray, n_parts: int, out: HostArray, *, divisor: float, add: bool) -> None:
        self._submit(
            lambda: kernels.reduce(parts.view(), n_parts, parts.dtype, out.view(), divisor=divisor, add=add, threads=1)
        )
        self.mark((parts, out))

    def squares(self, runs: Sequence[tuple[np.ndarray, ElementType]]) -> Callable[[], np.ndarray]:
        total = SumOfSquares()

        def add() -> None:
            for spans, dtype in runs:
                total.add(spans, dtype, threads=1)

        self._submit(add)
        event = self.mark()

        def bins() -> np.ndarray:
            event.wait()
            return total.bins

        return bins

    def to_host(self, memory: FakeTensor, host: np.ndarray) -> Event:
        host = unprotected(host)
        host.view(np.uint8)[:] = 0xFF
        self._submit(partial(_copy_bytes, host, memory.memory), host.nbytes)
        return self.mark(memory)

    def to_device(self, host: np.ndarray, memory: FakeTensor) -> Event:
        self._submit(partial(_copy_bytes, memory.memory, unprotected(host)), host.nbytes)
        return self.mark(memory)

    def transform(self, matrices: Matrices, tensor: FakeTensor) -> None:
        self._submit(partial(compute_in, matrices, tensor.memory))


class _QueueEvent:
    """The end of a queue's calls so far. Waiting raises the first error among them."""

    end: Event
    error: BaseException | None = None
    """The first error among the calls."""

    def wait(self) -> None:  # waits
        self.end.wait()
        if self.error is not None:
            raise self.error

    def order(self) -> None:  # waits
        self.end.order()

    def done(self) -> bool:
        return self.end.done()


def _element_type(memory: np.ndarray) -> ElementType:
    return BY_NUMPY.get(memory.dtype, FLOAT32)  # bytes have no element type, and nobody asks for one


def _copy_bytes(to: np.ndarray, source: np.ndarray) -> None:
    np.copyto(to.view(np.uint8), source.view(np.uint8))
