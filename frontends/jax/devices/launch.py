"""Join the processes that torchrun, ``srun`` or ``mpirun`` started, and stop waiting for a process that is lost."""

import atexit
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import jax

from offload_core.errors import CollectiveError
from offload_core.ranks.exchanges import Exchanges
from offload_core.support.launchers import Launched
from offload_core.support.threads import Condition

_STATUS = re.compile(r"[A-Z]+(_[A-Z]+)*: ")
"""XLA's errors begin with the name of their status."""
_OURS = ("INVALID_ARGUMENT: ", "UNIMPLEMENTED: ")
"""The statuses of wrong calls; a lost process causes others."""

_HEARTBEATS = 2
"""The number of timeouts after which JAX's heartbeats end the process: later than :class:`Watch`, which names the
exchange that was waited for."""


def initialize(local_device_ids: Sequence[int] | None = None, *, timeout_seconds: int | None = None) -> None:
    """Join the other processes of a job; a single process has nothing to join. Call it before anything else of JAX.

    It calls ``jax.distributed.initialize()``, but it also knows torchrun and every form of Slurm's host lists. A
    process that an exception ends does not wait for the others at its exit.

    Args:
        local_device_ids: the devices of this process among those that it sees. None: the device with its number on the
            machine; all devices if it is the only process there or sees just one.
        timeout_seconds: the time that ``wrap`` and its updates wait for other processes. Then an error names the
            exchange, and the process ends, because JAX cannot break off a collective. Where the program itself waits
            for others, JAX's heartbeats end it, after twice the time at most. None: only JAX's own heartbeats, of 100
            seconds.

    Raises:
        ConfigError: the launcher's environment variables are incomplete.
        CollectiveError: the other processes did not come.
    """
    launched = Launched.read()
    if launched.world_size == 1:
        return
    host, port = launched.meeting_point()
    port += os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's agent listens there
    coordinator = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")  # numbers, or names such as GPU-5ad0...
    sees_one = visible != "" and "," not in visible
    if local_device_ids is None and launched.local_world_size > 1 and not sees_one:
        local_device_ids = [launched.local_rank]
    timeouts: dict[str, Any] = {}
    if timeout_seconds is not None:
        timeouts = {
            "heartbeat_timeout_seconds": _HEARTBEATS * timeout_seconds,
            "shutdown_timeout_seconds": timeout_seconds,
        }
    try:
        if launched.rank == 0:
            _check_free(port)
        jax.distributed.initialize(
            coordinator,
            launched.world_size,
            launched.rank,
            local_device_ids,
            cluster_detection_method="deactivate",  # it would take one device of each machine
            **timeouts,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise CollectiveError(
            f"process {launched.rank} of {launched.world_size} did not meet the others at {host}, port {port} "
            f"({type(error).__name__}: {error}); expected all of them to be started, that machine and port to be "
            "reached from all, and the port to be free there (MASTER_PORT)"
        ) from error
    atexit.register(_leave_at_once_after_an_error)
    if timeout_seconds is not None:
        global _watch
        _watch = Watch(timeout_seconds, _end)


def _check_free(port: int) -> None:
    """Raise :class:`OSError` if another program listens at this port: JAX would end this process by SIGSEGV."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    socket.create_server(("", port), family=family, dualstack_ipv6=both).close()


EXCHANGES = Exchanges()
"""Those of this process, of all its trees."""


def meetings(rank: int, *, alone: bool) -> Callable[[str], AbstractContextManager[None]]:
    """Return :func:`meeting` for a rank.

    Args:
        alone: True if no other process takes part. Then none is waited for, and an error is one of the devices.
    """
    return partial(_naming if alone else meeting, rank)


@contextmanager
def meeting(rank: int, what: str) -> Iterator[None]:
    """A context around a wait for other processes: if one is lost it raises :class:`CollectiveError`.

    After the ``timeout_seconds`` of :func:`initialize` the process prints that error and ends.
    """
    watched = nullcontext() if _watch is None else _watch.over(rank, what)
    with EXCHANGES.over(what), watched, _naming(rank, what):
        yield


@contextmanager
def _naming(rank: int, what: str) -> Iterator[None]:
    """Raise the errors of an exchange as :class:`CollectiveError`, with its name."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        # Some of JAX's ways of waiting raise gloo's errors as ValueError; those of Python code are others.
        status = _STATUS.match(str(error))
        if (isinstance(error, ValueError) and status is None) or (status and status[0] in _OURS):
            raise
        raise CollectiveError.of(rank, what, error) from error


class Watch:
    """Calls ``end`` with a message when a wait takes longer than ``seconds``."""

    def __init__(self, seconds: float, end: Callable[[str], None]) -> None:
        self._seconds, self._end = seconds, end
        self._waits: dict[object, tuple[float, int, str]] = {}  # the oldest first
        self._begun = Condition()
        threading.Thread(target=self._run, name="offload-core waits", daemon=True).start()

    @contextmanager
    def over(self, rank: int, what: str) -> Iterator[None]:
        """A context around a wait; ``what`` is waited for."""
        wait = object()
        try:
            self._waits[wait] = (time.monotonic() + self._seconds, rank, what)
            self._begun.notify_all()
            yield
        finally:
            self._waits.pop(wait, None)

    def _run(self) -> None:
        while True:
            self._begun.wait_for(lambda: self._waits)
            waits = [*self._waits.values()]
            if not waits:
                continue  # it has ended meanwhile
            deadline, rank, what = waits[0]
            left = deadline - time.monotonic()
            if left > 0:
                time.sleep(min(left, 1))
                continue
            timeout = TimeoutError(f"no answer in {self._seconds} seconds")
            self._end(str(CollectiveError.of(rank, what, timeout)))
            return


_watch: Watch | None = None


def _end(message: str) -> None:
    print(f"{CollectiveError.__module__}.{CollectiveError.__name__}: {message}", file=sys.stderr)
    _leave()


def _leave_at_once_after_an_error() -> None:
    """End the process at exit, after an error: JAX would wait for the other processes, and they wait for this one."""
    if getattr(sys, "last_value", None) is not None and jax.distributed.is_initialized():
        _leave()


def _leave() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
