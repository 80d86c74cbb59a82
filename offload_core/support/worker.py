"""Workers run a step's tasks: in the caller, or in one thread in the order in which they were asked for."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from .threads import Task, TaskThread

T = TypeVar("T")


class Inline:
    """The caller does each task at once (``schedule="serial"``)."""

    is_asynchronous = False
    """True if the caller goes on meanwhile."""
    depth = 1
    """Buckets on their way at a time, each way."""

    def submit(self, task: Callable[[], T]) -> Task[T]:
        """The task's result; its error is raised here."""
        return Task.ended(task())

    def recover(self) -> None:  # waits
        """Forget a failure."""


class Background:
    """One thread does the tasks. After a failure it does none until :meth:`recover`: they all fail likewise."""

    is_asynchronous = True
    depth = 2

    def __init__(self) -> None:
        self._thread = TaskThread("offload")
        self._failure: BaseException | None = None

    def submit(self, task: Callable[[], T]) -> Task[T]:
        """The task's result, some time; whoever asks for it gets its error."""
        return self._thread.submit(partial(self._run, task))

    def _run(self, task: Callable[[], T]) -> T:
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        try:
            return task()
        except BaseException as error:
            self._failure = error
            raise

    def recover(self) -> None:  # waits
        """Wait for all tasks, and forget a failure."""
        self._thread.submit(lambda: None).result()
        self._failure = None
