"""Says where this process is in a step, for somebody who waits for it: ``where()`` of an engine, and ``SIGUSR1``.

With ``OFFLOAD_CORE_WHERE=1`` in the environment, ``kill -USR1`` of a rank prints ``where()`` of each of its engines to
the standard error.

[Note: where by signal] A handler of ``signal.signal`` runs between two instructions of the main thread. In a step that
hangs in C++ it never runs. So the handler is that of ``faulthandler.register``: C code, which runs at once. It writes
the interrupted thread's stack to a pipe, which serves as a bell: a thread of this module reads the pipe, and prints.
``signal.set_wakeup_fd`` would serve, too, but a process has one such descriptor, and asyncio takes it. The pipe never
blocks the handler: a full one has a bell in it. Signals of one moment may share an answer. A forked process lacks the
thread, and so gets another one, with a pipe of its own. Nothing is printed while code in C++ waits and holds the
interpreter's lock.
"""

import faulthandler
import os
import signal
from _thread import start_new_thread
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

from .living import Living

ASK = "OFFLOAD_CORE_WHERE"
"""The variable in the environment: "1" has ``SIGUSR1`` answered."""
_BELL = b"Stack (most recent call first)"
"""The handler's first words."""
_PIPE_BYTES = 2**20


class _Tells(Protocol):
    def where(self) -> str: ...


_TELLING: Living[_Tells] = Living()
"""The engines that a signal asks."""
_pipe: tuple[int, int] | None = None
"""The descriptors that are read and written; None: no signal is answered."""


def told(title: str, *parts: Callable[[], str]) -> str:
    """Return all parts' lines below a title. A part that another thread changes meanwhile may fail: its error then
    stands in place of its lines."""
    return "\n".join([title, *(f"  {line}" for part in parts for line in _attempt(part).splitlines())])


def _attempt(part: Callable[[], str]) -> str:
    try:
        return part()
    except Exception as error:
        return f"{part.__qualname__}: not to be read now ({type(error).__name__}: {error})"


def answer_signals(teller: _Tells, environ: Mapping[str, str] = os.environ) -> None:
    """From now on have ``SIGUSR1`` print where this object is, as long as it lives, if the environment asks for it.

    A handler that the program has set before is called, too, except one of ``faulthandler``, of which there is one a
    signal. One that it sets later takes the signal over.
    """
    if environ.get(ASK) == "1":
        _TELLING.add(teller)
        if _pipe is None:
            _listen()


def _listen() -> None:
    global _pipe
    _pipe = read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.getsignal(signal.SIGUSR1)
    chain = before not in (signal.SIG_DFL, signal.SIG_IGN)  # the default one would end the process
    # The thread takes no signal: before it runs Python code its stack is none, and rings no bell.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        with suppress(RuntimeError):  # no thread can be started
            start_new_thread(_answer, (read,))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    faulthandler.register(signal.SIGUSR1, file=write, all_threads=False, chain=chain)


def _answer(read: int) -> None:
    while said := os.read(read, _PIPE_BYTES):
        if _BELL in said:
            _tell()


def _tell() -> None:
    """Print past ``sys.stderr``, whose lock the main thread may hold."""
    for teller in _TELLING:
        with suppress(OSError):  # there is no standard error
            os.write(2, f"{_attempt(teller.where)}\n".encode())


def _listen_anew() -> None:
    if _pipe is not None:
        parents = _pipe
        _listen()
        for descriptor in parents:
            os.close(descriptor)


os.register_at_fork(after_in_child=_listen_anew)
