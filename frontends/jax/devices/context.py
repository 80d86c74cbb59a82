"""The context of a user's call: JAX's tracing, the mesh that is set, and the update that was not waited for."""

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, get_abstract_mesh

from offload_core.engine import StateLock
from offload_core.errors import StateError
from offload_core.support.threads import Task, TaskThread

P = ParamSpec("P")
T = TypeVar("T")

_NO_MESH = Mesh(np.empty((), object), ())


def is_traced() -> bool:
    """True while JAX traces the caller (``jit``, ``scan``). The compiled program does not repeat Python's actions."""
    with jax.transfer_guard("allow"):
        return isinstance(jnp.zeros(()), jax.core.Tracer)


def is_manual() -> bool:
    """True inside ``shard_map``, where programs see one device's part of arrays."""
    return bool(get_abstract_mesh().manual_axes)


def refuse_jit(what: str, why: str = "the states are in host memory") -> None:
    """Raise :class:`StateError` under jit: it would run the caller once only, while it traces."""
    if is_traced():
        raise StateError(f"{what} under jit; expected a call outside: {why}")


def without_context_mesh(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function, called as if no mesh were set: JAX refuses arrays of other devices where one is."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if get_abstract_mesh().empty:
            return function(*args, **kwargs)
        try:
            context = jax.set_mesh(_NO_MESH)
        except ValueError:  # under jit, where the mesh cannot be changed
            return function(*args, **kwargs)
        with context:
            return function(*args, **kwargs)

    return call


class LaterUpdate:
    """The update that was asked for and not waited for (``update(wait=False)``), and the thread that makes it."""

    def __init__(self) -> None:
        self.turn = threading.RLock()
        """Held while a call waits for the update and does its own work: another thread asks for none in between."""
        self._task: Task[None] | None = None
        self._thread: TaskThread | None = None

    def ask(self, act: Callable[[], None]) -> None:
        """Have the thread make an update."""
        if self._thread is None:
            self._thread = TaskThread("offload-core update")
        # It is noted, then asked for: after an interrupt between the two, the call that waits for it makes it.
        self._task = Task(act)
        self._thread.submit(self._task.run)

    def wait(self) -> None:
        """Return when the update is made; raise its error, once."""
        task = self._task
        if task is None or task.thread == threading.get_ident():
            return
        try:
            task.run()  # unless the thread has begun it
            task.result()
        finally:
            if task.done():  # else an interrupt ended the wait
                self._task = None


def public(
    what: str, how: Callable[..., Any] = StateLock.consistent
) -> Callable[[Callable[Concatenate[Any, P], T]], Callable[Concatenate[Any, P], T]]:
    """Decorate a method that users call, of an object with a ``_later`` and a ``_state_lock``.

    It runs after the update that was asked for, with states of one step, and with no mesh set.

    Args:
        how: ``StateLock.begin`` for a method that is a change of states from its beginning to its end.
    """

    def decorate(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
        locked: Callable[..., T] = without_context_mesh(how)

        @wraps(method)
        def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
            later: LaterUpdate = self._later
            with later.turn:
                later.wait()
                return locked(self._state_lock, what, method, self, *args, **kwargs)

        return call

    return decorate
