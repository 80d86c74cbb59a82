"""The lock of a pipeline's states. One thread at a time uses the states, and no save runs in the middle of a change.

A save in another thread waits until the change (a step, a gradient's arrival, a load) has ended, and the next change
waits for the save. A signal handler interrupts the main thread. If that thread is in the middle of a change, waiting
for the end of the change would be a deadlock, so a save in the handler raises :class:`StateError`.

The outermost caller takes the lock, once: the calls that users make, autograd's hooks, readers of pending parameters,
and checkpoints. Inner methods only assert that a change is in progress (``changing.locked()``).

A change may call :func:`uninterrupted`. In the main thread, this runs a *section* of the change in another thread, and
the caller waits and holds the lock. Several interrupts at once can end that wait. The caller then releases the lock
while the section still runs, and the next holder of the lock waits for the section. So methods that a load calls in a
section assert ``changing.locked() or RUNNING_SECTIONS``.
"""

import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from ..errors import StateError
from ..support.living import Living
from ..support.threads import RUNNING_SECTIONS, await_sections, forget_sections, in_section, runs_for_another

P = ParamSpec("P")
T = TypeVar("T")


class StateLock:
    """The lock of one pipeline. A thread holds it only during a call, and other threads wait meanwhile.

    ``_of_thread`` and ``changing`` are implemented in C and held in ``with``, so that no interrupt leaves them locked.
    """

    def __init__(self) -> None:
        self._of_thread = threading.RLock()
        self.changing = threading.Lock()
        """Held, inside ``_of_thread``, while states change."""
        self._change = ""
        """The name of the call that is in progress, for error messages."""
        self._mixes_steps = False
        """True if a snapshot taken during this change would mix two steps."""
        self._unfinished = ""
        """In a forked process: the change that another thread had not finished at the fork."""
        _LOCKS.add(self)

    def run(self, act: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``act`` while no other thread uses the states."""
        return self._run(act, args, kwargs)

    def is_changing(self) -> bool:
        """True if this thread is in the middle of a change."""
        return self.changing.locked() and self._of_thread._is_owned() and not RUNNING_SECTIONS  # type: ignore[attr-defined]

    def change(self, what: str, act: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``act``, which changes states. This thread may already be in the middle of a change."""
        return self._run(act, args, kwargs, what, mixes_steps=True)

    def use(self, what: str, act: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``act``, which changes no states. Meanwhile :meth:`consistent` and :meth:`begin` raise if a signal
        handler of this thread calls them."""
        return self._run(act, args, kwargs, what, mixes_steps=False)

    def consistent(self, what: str, act: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``act``, which needs consistent states.

        Raises:
            StateError: this thread is in the middle of a change.
        """
        return self._run(act, args, kwargs, what, consistent=True)

    def begin(self, what: str, act: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``act``, which changes consistent states.

        Raises:
            StateError: this thread is already in the middle of a change.
        """
        return self._run(act, args, kwargs, what, consistent=True, mixes_steps=True)

    def _run(
        self,
        act: Callable[..., T],
        args: Any,
        kwargs: Any,
        what: str = "",
        *,
        consistent: bool = False,
        mixes_steps: bool | None = None,
    ) -> T:
        """Call ``act`` while no other thread uses the states.

        Args:
            what: the call's name.
            consistent: True to raise :class:`StateError` if this thread is in the middle of a change.
            mixes_steps: :attr:`_mixes_steps` of the change that the call is, unless it is a part of one; None: it is
                none.
        """
        held = bool(RUNNING_SECTIONS) and runs_for_another()  # by this thread's caller
        with _HELD if held else self._of_thread:
            if not held and self._unfinished:
                raise StateError(
                    f"this process was forked while another thread was in the middle of {self._unfinished}: its copy "
                    "of the states is of no step; expected no use of them here: load a checkpoint in a new process"
                )
            if not held and RUNNING_SECTIONS:
                await_sections()
            if consistent and self.changing.locked() and not in_section():
                raise StateError(
                    f"{what} in the middle of {self._change}, in the same thread (in a signal handler?): some states "
                    "and parameters are of one step, others of the next; expected it between two steps: "
                    "save_on_signal(folder) notes a signal, and saves when the step has ended"
                )
            if mixes_steps is None or self.changing.locked():
                return act(*args, **kwargs)
            with self.changing:
                self._change, self._mixes_steps = what, mixes_steps
                return act(*args, **kwargs)

    def where(self) -> str:
        """Return the name of the call that has the lock, as a line for a user who waits. Takes no lock."""
        return f"call: {self._change if self.changing.locked() else 'none that changes anything'}"

    def after_fork(self) -> None:
        """Replace locks that other threads held at a fork. A forked process calls this: it has no other threads."""
        if self._of_thread.acquire(blocking=False):  # free, or this thread's own
            self._of_thread.release()
            if RUNNING_SECTIONS and not self.changing.locked():  # a change may have been separated from its caller
                self._unfinished = self._change
            return
        if self.changing.locked() and self._mixes_steps:
            self._unfinished = self._change
        self._of_thread, self.changing = threading.RLock(), threading.Lock()


_HELD = nullcontext()
"""Stands for the lock in a thread whose caller holds it."""
_LOCKS: Living[StateLock] = Living()


def _after_fork() -> None:
    for lock in _LOCKS:
        lock.after_fork()
    forget_sections()


os.register_at_fork(after_in_child=_after_fork)


Method = Callable[Concatenate[Any, P], T]


def changes(what: str) -> Callable[[Method[P, T]], Method[P, T]]:
    """Decorate a method that changes states: it runs in :meth:`StateLock.change` of its object's ``_state_lock``."""
    return partial(_locked, StateLock.change, what)


def uses(what: str) -> Callable[[Method[P, T]], Method[P, T]]:
    """Decorate a method that uses states and changes none: it runs in :meth:`StateLock.use` of its object's
    ``_state_lock``."""
    return partial(_locked, StateLock.use, what)


def consistent(what: str) -> Callable[[Method[P, T]], Method[P, T]]:
    """Decorate a method that needs consistent states: it runs in :meth:`StateLock.consistent` of its object's
    ``_state_lock``."""
    return partial(_locked, StateLock.consistent, what)


def begins(what: str) -> Callable[[Method[P, T]], Method[P, T]]:
    """Decorate a method that changes consistent states: it runs in :meth:`StateLock.begin` of its object's
    ``_state_lock``."""
    return partial(_locked, StateLock.begin, what)


def _locked(how: Callable[..., T], what: str, method: Method[P, T]) -> Method[P, T]:
    @wraps(method)
    def locked(self: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        return how(self._state_lock, what, method, self, *args, **kwargs)

    return locked  # type: ignore[return-value]  # it may be called with self=
