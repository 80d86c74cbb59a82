"""Threads, and waits for them, that stay correct if a signal interrupts them anywhere.

Python runs signal handlers in the main thread, between any two of its instructions. ``threading.Condition`` is written
in Python, and so are the classes built on it (``Event``, ``Semaphore``, ``Thread.start``, ``concurrent.futures``): an
interrupt in the middle of one leaves its lock taken, and the other thread then waits for ever. Here no lock that two
threads share is held while Python code runs, except where the other thread looks again. A lock of C code in a ``with``
is safe: Python takes no signal between its acquisition and the block.
"""

import atexit
import os
import sys
import threading
import time
import weakref
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar, cast

from ..errors import StateError

T = TypeVar("T")

_LOOK_AGAIN_SECONDS = 1.0


class Condition:
    """As ``threading.Condition``, without a lock: the caller's condition must be safe to look at in any thread."""

    def __init__(self) -> None:
        self._waiters: deque[threading.Lock] = deque()

    def wait_for(self, holds: Callable[[], Any]) -> None:  # waits
        """Return when ``holds()`` is true. It is called again after each :meth:`notify_all`."""
        while True:
            waiter = threading.Lock()
            waiter.acquire()
            self._waiters.append(waiter)
            if holds():
                return
            waiter.acquire(timeout=_LOOK_AGAIN_SECONDS)  # an interrupt may have cut notify_all short
            with suppress(ValueError):
                self._waiters.remove(waiter)

    def notify_all(self) -> None:
        """Have all waiters look at their conditions again."""
        for waiter in self._waiters.copy():
            with suppress(RuntimeError):  # another thread has released it
                waiter.release()
            with suppress(ValueError):
                self._waiters.remove(waiter)


class Task(Generic[T]):
    """A call that is made once, in any thread, and its result, for which any number of threads may wait."""

    def __init__(self, act: Callable[[], T]) -> None:
        self._act: Callable[[], T] | None = act
        self._process = os.getpid()
        self._claim = threading.Lock()
        """The lock that the thread takes that does the task or cancels it."""
        self._done = False
        self._going_on = threading.Lock()
        """Taken until the task has ended. Then each waiter takes it, and gives it back for the next one."""
        self._going_on.acquire()
        self._result: T | None = None
        self._error: BaseException | None = None
        self.thread: int | None = None
        """The thread that does it, by its identifier."""
        self.begun = 0.0
        """The time when it was begun, on the monotonic clock."""

    @classmethod
    def ended(cls, result: T) -> "Task[T]":
        """Return a task that is done already."""
        task = cls(lambda: result)
        task.run()
        return task

    def run(self) -> None:
        """Do the task, unless it was begun or cancelled."""
        if not self._claim.acquire(blocking=False):
            return
        assert self._act is not None
        self.thread, self.begun = threading.get_ident(), time.monotonic()
        try:
            self._result = self._act()
        except BaseException as error:
            trace = error.__traceback__
            self._error = error.with_traceback(trace and trace.tb_next)  # without this frame, which holds the task
        self._act = None
        self._done = True
        self._going_on.release()

    def cancel(self) -> bool:
        """Cancel the task, so that it never runs. Return False if it was begun."""
        return self._claim.acquire(blocking=False)

    def done(self) -> bool:
        """True if the task has ended. Never blocks."""
        return self._done

    def wait(self) -> None:  # waits
        """Return when the task has ended.

        Raises:
            StateError: it never ends, because this process is a fork of the one whose thread does it.
        """
        while not self._done:
            if os.getpid() != self._process:
                raise _forked()
            if self._going_on.acquire(timeout=_LOOK_AGAIN_SECONDS):  # an interrupt may cut another's release
                self._going_on.release()

    def where(self) -> str:
        """Return the function that is called, and since when, as text for somebody who waits for it."""
        act: Any = self._act
        while isinstance(act, partial):  # around what a worker or a section calls
            act = act.args[0] if act.args and callable(act.args[0]) else act.func
        name = getattr(act, "__qualname__", "a task that has just ended").replace("<locals>.", "")
        elsewhere = f", in process {self._process}" * (os.getpid() != self._process)  # this one is a fork
        return f"{name}, for {time.monotonic() - self.begun:.1f} s{elsewhere}"

    def exception(self) -> BaseException | None:
        """Wait for the task, and return its error; None: it had no error."""
        self.wait()
        return self._error

    def result(self) -> T:  # waits
        """Wait for the task, and return its result or raise its error."""
        self.wait()
        if self._error is None:
            return cast(T, self._result)
        try:
            raise self._error
        finally:
            del self  # the error's traceback holds this frame


def _forked() -> StateError:
    return StateError(
        "this process was forked, and the background thread of the optimizer is in its parent: an update that was "
        "on its way does not end here, and none begins; expected engine.flush() (offloaded.flush() in JAX) before "
        "the fork if this process reads parameters, and wrap() in this process if it trains"
    )


class TaskThread:
    """One thread that does tasks in the order in which they are submitted.

    It ends when this object is gone and all tasks are done. At the interpreter's end all tasks are done first.
    """

    def __init__(self, name: str) -> None:
        self._tasks = _Tasks()
        self._process = os.getpid()
        self._closed = False
        weakref.finalize(self, self._tasks.put, None).atexit = False
        self._thread = threading.Thread(target=partial(_serve, self._tasks), name=name, daemon=True)
        uninterrupted(self._thread.start)
        _SERVING[self._tasks] = self._thread

    def submit(self, act: Callable[[], T]) -> Task[T]:
        """Have the thread call ``act`` after all that was submitted before.

        Raises:
            StateError: the thread was told to end, or this process is a fork of the one that it is in.
        """
        if os.getpid() != self._process:
            raise _forked()
        if self._closed:
            raise StateError(f"the thread {self._thread.name!r} has ended; expected submit() before close()")
        task = Task(act)
        self._tasks.put(task)
        return task

    @property
    def is_here(self) -> bool:
        """True unless this process is a fork of the one that the thread is in."""
        return os.getpid() == self._process

    def close(self) -> None:
        """Return when all tasks are done and the thread has ended."""
        self._closed = True
        self._tasks.put(None)
        self._thread.join()


class _Tasks(SimpleQueue["Task[Any] | None"]):
    """The tasks of one thread that were not begun; None: there are no others."""

    begun: Task[Any] | None = None
    """The one that the thread does now."""


_SERVING: dict[_Tasks, threading.Thread] = {}


def _serve(tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None:
        tasks.begun = task
        task.run()
        del task, tasks.begun  # else its objects stay alive until the next task comes
    _SERVING.pop(tasks, None)


def where() -> str:
    """Return a line for each of this process's threads that does a task, for somebody who waits. Takes no lock."""
    busy = [(thread.name, tasks, tasks.begun) for tasks, thread in [*_SERVING.items()]]
    lines = [f"thread {name!r}: {task.where()}; {tasks.qsize()} later" for name, tasks, task in busy if task]
    lines += [f"section: {task.where()}" for task in [*RUNNING_SECTIONS]]
    return "\n".join(lines or ["threads: all idle"])


@atexit.register
def _end_tasks() -> None:
    """Wait for all submitted tasks before the interpreter ends: other ranks may wait for them."""
    for tasks, thread in [*_SERVING.items()]:
        last = Task(lambda: None)
        tasks.put(last)
        while thread.is_alive() and not last.done():
            time.sleep(1e-4)
    while _CLEARING:  # Python would end their threads in the middle of a framework's C++, which aborts the process
        time.sleep(1e-4)


_CLEARING: set[object] = set()
"""One object for each thread of :func:`clear_up`."""
os.register_at_fork(after_in_child=_CLEARING.clear)


def do_in_threads(acts: Sequence[Callable[[], object]]) -> None:
    """Make these calls at the same time, each in its own thread. When all have ended, raise the first one's error.

    An interrupt is raised when they have ended.
    """
    tasks = [Task(act) for act in acts]

    def do_all() -> None:
        with suppress(RuntimeError):  # no thread can be started: this one makes the remaining calls
            for task in tasks[1:]:
                start_new_thread(task.run, ())
        for task in tasks:
            task.run()
        for task in tasks:
            task.wait()

    uninterrupted(do_all)
    for task in tasks:
        task.result()


RUNNING_SECTIONS: list[Task[None]] = []
"""Sections of :func:`uninterrupted` that have begun and not ended."""
_sections: "SimpleQueue[Task[None]] | None" = None
"""The sections that the thread has yet to run; None: it was not started in this process."""


def _run_sections(sections: "SimpleQueue[Task[None]]") -> None:
    while True:
        sections.get().run()


def _forget_thread() -> None:
    global _sections
    _sections = None


os.register_at_fork(after_in_child=_forget_thread)


def uninterrupted(section: Callable[[], object]) -> None:
    """Run a section of code completely or not at all, even if signals come, and raise its error.

    Python raises ``KeyboardInterrupt`` and the like in the main thread only, between any two of its instructions. So
    the section runs in another thread, while the caller waits; the first interrupt of this wait is raised when the
    section has ended. The thread is started once, for all sections. Where none can be started, or at the interpreter's
    end, which stops it, the caller runs the section; and so does a thread that is not the main one.
    """
    global _sections
    if threading.get_ident() != threading.main_thread().ident:
        _run_here(section)
        return
    if sys.is_finalizing():
        section()
        return

    def run(section: Callable[[], object]) -> None:
        RUNNING_SECTIONS.append(task)
        try:
            section()
        finally:
            RUNNING_SECTIONS.remove(task)

    task = Task(partial(run, section))
    try:
        if (sections := _sections) is None:
            sections = SimpleQueue()
            start_new_thread(_run_sections, (sections,))
            _sections = sections
        sections.put(task)
        task.wait()
    except BaseException as error:
        if task.cancel():  # it has not begun
            if not _no_thread(error):
                raise
            section()
            return
        while not task.done():
            with suppress(BaseException):  # further interrupts; the first one is raised
                task.wait()
        task.result()
        raise
    task.result()


def _run_here(section: Callable[[], object]) -> None:
    """Run a section in this thread, which no signal interrupts."""
    before, _HERE.runs = _HERE.runs, True
    try:
        section()
    finally:
        _HERE.runs = before


class _Here(threading.local):
    runs = False
    """True while this thread, which is not the main one, runs a section for itself."""


_HERE = _Here()


def _no_thread(error: BaseException) -> bool:
    """True if ``start_new_thread`` raised this. A signal handler's ``RuntimeError`` has passed the handler's frame."""
    trace = error.__traceback__
    return isinstance(error, RuntimeError) and trace is not None and trace.tb_next is None


def clear_up(act: Callable[[], object]) -> None:
    """Make a call that may wait, when garbage is collected: in another thread, for which the main thread waits.

    Python collects garbage in any thread, also in the very one whose tasks ``act`` waits for; and between any two
    instructions, also while a framework has switched that thread to tensors without values, to compile. ``act`` must
    import nothing: the main thread may be in the middle of the same import.
    """
    if threading.get_ident() == threading.main_thread().ident:
        uninterrupted(act)
    else:
        this = object()

        def run() -> None:
            try:
                act()
            finally:
                _CLEARING.discard(this)

        _CLEARING.add(this)
        try:
            start_new_thread(run, ())
        except RuntimeError:  # no thread can be started: nothing is cleared up
            _CLEARING.discard(this)


def in_section() -> bool:
    """True in a section of :func:`uninterrupted`, unless it runs in the main thread, where a signal handler may ask."""
    return _HERE.runs or runs_for_another()


def runs_for_another() -> bool:
    """True in the thread of sections of :func:`uninterrupted`, whose callers wait in the main thread."""
    return bool(RUNNING_SECTIONS) and any(task.thread == threading.get_ident() for task in RUNNING_SECTIONS)


def await_sections() -> None:
    """Wait for sections that several interrupts at once have separated from their callers."""
    for task in [*RUNNING_SECTIONS]:
        task.wait()


def forget_sections() -> None:
    """Forget all sections in a forked process: it lacks their thread, and a new thread may get its identifier."""
    RUNNING_SECTIONS.clear()
