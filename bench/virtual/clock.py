"""A clock that runs as fast as events follow each other: code that sleeps and waits, threads and all, in its own time.

Threads are real, and one at a time runs: the one whose moment is the earliest. Its work between two waits takes
no time. Threads that are due at the same moment run in the order in which they were scheduled, so that every run is the
same.
"""

import heapq
import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import offload_core.device.events
import offload_core.device.trace
import offload_core.step.worker
import offload_core.testing.fake_device

_MODULES = (
    offload_core.device.events,
    offload_core.testing.fake_device,
    offload_core.step.worker,
    offload_core.device.trace,
)


class DeadlockError(Exception):
    """All threads wait for each other."""


class Clock:
    """Stands in for the module ``time``."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds."""
        self._agenda: list[tuple[float, int, threading.Semaphore]] = []
        self._numbers = itertools.count()
        self._waiting: set[threading.Semaphore] = set()
        self._stuck = False

    @contextmanager
    def rules(self, *modules: ModuleType) -> Iterator[None]:
        """Return a context in which these modules, and new pipelines, fake devices and traces, use this time."""
        with ExitStack() as stack:
            for module in (*_MODULES, *modules):
                for name, stand_in in (("time", self), ("TaskThread", self.thread)):
                    if hasattr(module, name):
                        stack.enter_context(mock.patch.object(module, name, stand_in))
            yield
            self.sleep(math.inf)  # what was asked for ends

    def perf_counter(self) -> float:
        return self.now

    def perf_counter_ns(self) -> int:
        return round(1e9 * self.now)

    def sleep(self, seconds: float) -> None:
        if seconds > 0:
            me = threading.Semaphore(0)
            self._wake(me, self.now + seconds)
            self._pass_on(me)

    def await_future(self, future: "Future[Any]") -> None:
        """Let time pass until it is done."""
        if not Future.done(future):
            me = threading.Semaphore(0)
            future.add_done_callback(lambda _: self._wake(me, self.now))
            self._pass_on(me)

    def future(self) -> "Future[Any]":
        """Return a future that threads wait for in this time."""
        return _Future(self)

    def thread(self, name: str) -> "_Thread":
        """Stands in for ``TaskThread``."""
        return _Thread(self, name)

    def start(self, work: Callable[[], None], name: str) -> None:
        """Have a thread begin now, when this one waits."""
        first = threading.Semaphore(0)

        def run() -> None:
            first.acquire()
            work()
            self._next()

        threading.Thread(target=run, name=name, daemon=True).start()
        self._wake(first, self.now)

    def _wake(self, who: threading.Semaphore, at: float) -> None:
        heapq.heappush(self._agenda, (at, next(self._numbers), who))

    def _next(self) -> None:
        if self._agenda:
            self.now, _, who = heapq.heappop(self._agenda)
            who.release()
        else:
            self._stuck = bool(self._waiting)
            for who in self._waiting:
                who.release()

    def _pass_on(self, me: threading.Semaphore) -> None:
        self._waiting.add(me)
        self._next()
        me.acquire()
        self._waiting.discard(me)
        if self._stuck:
            raise DeadlockError(f"at {self.now} s every thread waits for another")


class _Thread:
    def __init__(self, clock: Clock, name: str) -> None:
        self._clock = clock
        self._name = name
        self._asked: deque[tuple[_Future, Callable[[], Any]]] = deque()
        self._busy = False

    def submit(self, task: Callable[[], Any]) -> "Future[Any]":
        future = _Future(self._clock)
        self._asked.append((future, task))
        if not self._busy:
            self._busy = True
            self._clock.start(self._work, self._name)
        return future

    def _work(self) -> None:
        while self._asked:
            future, task = self._asked.popleft()
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)
        self._busy = False

    def close(self) -> None:
        """Do nothing: submitted tasks end by themselves."""


class _Future(Future):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def result(self, timeout: float | None = None) -> Any:
        self._clock.await_future(self)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._clock.await_future(self)
        return super().exception(0)
