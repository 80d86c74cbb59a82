"""What a pipeline does behind its caller's back: in one thread, in the order in which it was asked for."""

import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Inline:
    """Everything is done at once, by the caller (``schedule="serial"``)."""

    behind = False
    """Whether the caller goes on meanwhile."""
    depth = 1
    """Buckets on their way at a time, each way."""

    def submit(self, task: Callable[[], T]) -> "Future[T]":
        """The task's result; what it raises is raised here."""
        done: Future[T] = Future()
        done.set_result(task())
        return done

    def recover(self) -> None:
        """Forget a failure."""


class Background:
    """One thread does it. After a failure nothing is done until :meth:`recover`: what follows fails likewise."""

    behind = True
    depth = 2

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="offload")
        self._failure: BaseException | None = None
        weakref.finalize(self, self._executor.shutdown, wait=False)

    def submit(self, task: Callable[[], T]) -> "Future[T]":
        """The task's result, some time; what it raises is raised by whoever asks for it."""

        def run() -> T:
            if self._failure is not None:
                raise self._failure.with_traceback(None)
            try:
                return task()
            except BaseException as error:
                self._failure = error
                raise

        return self._executor.submit(run)

    def recover(self) -> None:
        """Wait for what was asked for, and forget a failure."""
        self._executor.submit(lambda: None).result()
        self._failure = None
