"""Threads of one worker each, played by one real thread, so that what a test sees is the same in every run.

With ``seed`` None each task is done as late as can be: when somebody waits for it, or for one behind it. A wait that is
missing then shows, for what it should have waited for has not even begun. With a number, tasks are done in between at
random moments, in an order that no thread's own order forbids.
"""

import random
import threading
from collections import deque
from concurrent.futures import Future

import offload_core.support.worker
import offload_core.testing.fake_device
import offload_core.testing.late_store


class Threads:
    """The threads of one rank; an instance stands in for ``TaskThread``."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = None if seed is None else random.Random(seed)
        self._threads: list[_Thread] = []

    def __call__(self, name: str) -> "_Thread":
        thread = _Thread(self)
        self._threads.append(thread)
        return thread

    def play(self, monkeypatch, *modules) -> None:
        """Take the place of the threads of pipelines, fake devices and late stores that are made from now on."""
        testing = offload_core.testing
        for module in (testing.fake_device, testing.late_store, offload_core.support.worker, *modules):
            monkeypatch.setattr(module, "TaskThread", self)

    def go_on(self) -> None:
        """Time passes."""
        if self._random is None or any(thread.busy for thread in self._threads):
            return  # what is being done does only what it waits for
        while (ready := [thread for thread in self._threads if thread.queue]) and self._random.random() < 0.6:
            self._random.choice(ready).do_next()


class ThreadsOfRanks(threading.local, Threads):
    """Threads of ranks that are threads. Each rank sets ``here``, which plays the threads that it makes."""

    here: Threads

    def __call__(self, name: str) -> "_Thread":
        return self.here(name)


class _Thread:
    is_here = True

    def __init__(self, threads: Threads) -> None:
        self.threads = threads
        self.queue: deque[tuple[_Late, object]] = deque()
        self.busy = False

    def submit(self, task):
        self.threads.go_on()
        future = _Late(self)
        self.queue.append((future, task))
        self.threads.go_on()
        return future

    def do_next(self) -> None:
        assert not self.busy, "a thread waits for itself"
        future, task = self.queue.popleft()
        self.busy = True
        try:
            future.set_result(task())
        except BaseException as error:
            future.set_exception(error)
        finally:
            self.busy = False

    def close(self) -> None:
        while self.queue and not self.busy:
            self.do_next()


class _Late(Future):
    def __init__(self, thread: _Thread) -> None:
        super().__init__()
        self._thread = thread

    def _await(self) -> None:
        self._thread.threads.go_on()
        while not self.done():
            self._thread.do_next()

    def result(self, timeout=None):
        self._await()
        return super().result(0)

    def exception(self, timeout=None):
        self._await()
        return super().exception(0)
