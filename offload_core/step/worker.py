"""Where a step's tasks run: in the caller, or in one thread in the order in which they were asked for; and the part of
a step that an interrupt must not cut in two."""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


class Inline:
    """The caller does each task at once (``schedule="serial"``)."""

    behind = False
    """Whether the caller goes on meanwhile."""
    depth = 1
    """Buckets on their way at a time, each way."""

    def submit(self, task: Callable[[], T]) -> "Future[T]":
        """The task's result; its error is raised here."""
        done: Future[T] = Future()
        done.set_result(task())
        return done

    def recover(self) -> None:
        """Forget a failure."""


class Background:
    """One thread does the tasks. After a failure it does none until :meth:`recover`: they all fail likewise."""

    behind = True
    depth = 2

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="offload")
        self._failure: BaseException | None = None
        weakref.finalize(self, self._executor.shutdown, wait=False)

    def submit(self, task: Callable[[], T]) -> "Future[T]":
        """The task's result, some time; whoever asks for it gets its error."""

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
        """Wait for all tasks, and forget a failure."""
        self._executor.submit(lambda: None).result()
        self._failure = None


def uninterrupted(section: Callable[[], None]) -> None:
    """Run a section of code whole, or not at all, whatever signals the main thread gets; raise its error.

    Python raises ``KeyboardInterrupt`` and the like in the main thread only, between any two of its instructions. So
    the section runs in another thread, while the caller waits; the first interrupt of this wait is raised when the
    section has ended. Where no thread can be started, as at the interpreter's end, the caller runs the section.
    """
    if threading.current_thread() is not threading.main_thread():
        section()
        return
    done: Future[None] = Future()

    def run() -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            section()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    try:
        threading.Thread(target=run, name="offload-step", daemon=True).start()
        wait([done])
    except BaseException as error:
        if done.cancel():  # it has not begun
            if not isinstance(error, RuntimeError):
                raise
            section()
            return
        while not done.done():
            with suppress(BaseException):  # further interrupts; the first one is raised
                wait([done])
        done.result()
        raise
    done.result()
