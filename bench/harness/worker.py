"""The contender's end of ``bench.harness.processes``: a process that answers each line that it reads.

Between two lines it waits in a read, so that it costs the others nothing. Its answer includes the processor time that
it took meanwhile.
"""

import json
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TextIO

Step = Callable[[int], dict[str, float]]
"""A training step of so many windows: ms of each phase, the loss, and the norm of the gradients where it is known."""

_PATIENCE = 5.0
"""Seconds in which a rank may end by itself after its questioner has gone."""
LONGEST, MOST_FDS = 2**16, 64
"""Bytes of a request, and the file descriptors that come with it: a log, where to tell pids, two of each rank."""


class Rank(NamedTuple):
    """The arguments and streams that one rank of a contender was started with."""

    arguments: list[str]
    questions: TextIO
    answers: TextIO


def become_rank() -> Rank:
    """Start contenders as ``bench.harness.processes`` asks on standard input, a socket; return in each of their ranks.

    All are forks of this process, which ends when nobody can ask any more: call it when all is imported that they
    share, and before anything has threads. ``RANK`` and ``LOCAL_RANK`` are set in each.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # their exit status is not read
    channel = socket.socket(fileno=sys.stdin.fileno())
    while True:
        words, fds, *_ = socket.recv_fds(channel, LONGEST, MOST_FDS)
        if not words:
            os._exit(0)
        request = json.loads(words)
        log, started, *streams = fds
        pids = []
        for rank in range(len(streams) // 2):
            pids.append(os.fork())
            if not pids[-1]:
                channel.detach()
                os.close(started)
                return _become(rank, log, streams, **request)
        os.write(started, json.dumps(pids).encode())
        for fd in fds:
            os.close(fd)


def _become(rank: int, log: int, streams: list[int], arguments: list[str], environment: dict[str, str]) -> Rank:
    """Become a rank, in a new session, with its output in the log of its contender."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, as_fd in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(fd, as_fd)
    questions, answers = (os.dup(fd) for fd in streams[2 * rank : 2 * rank + 2])
    for fd in (nothing, log, *streams):  # a copy left open would hide from the reader that its writer has ended
        os.close(fd)
    os.environ |= environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    threading.Thread(target=_end_when_nobody_asks, args=[questions], daemon=True).start()
    return Rank(arguments, os.fdopen(questions), os.fdopen(answers, "w"))


def _end_when_nobody_asks(questions: int) -> None:
    """End this process when nobody can ask it. Otherwise a rank that waits in a collective for a lost one would keep
    its memory for half an hour."""
    hung_up = select.poll()
    hung_up.register(questions, 0)
    hung_up.poll()
    time.sleep(_PATIENCE)
    os.killpg(0, signal.SIGKILL)  # with its compilers


def serve(
    questions: TextIO,
    answers: TextIO,
    micro_batch: int,
    make_step: Callable[[], Step],
    device_peak: Callable[[], int | None] = lambda: None,
    **imported: Any,
) -> None:
    """Tell what was imported; on the first question build and warm up, on each further one train.

    ``device_peak`` gives the most bytes that this process had on a device since it was last asked; None: not known.
    """

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    answer(**imported)
    step: Step | None = None
    idle_cpu = idle_wall = 0.0
    while True:
        cpu, wall = time.process_time(), time.perf_counter()
        line = questions.readline()
        if not line:
            return
        turn, faults = time.process_time(), page_faults()
        if step is None:
            step = make_step()
        else:
            idle_cpu, idle_wall = idle_cpu + turn - cpu, idle_wall + time.perf_counter() - wall
        question = {"micro_batch": micro_batch, **json.loads(line)}
        done = [step(question["micro_batch"]) for _ in range(question["steps"])]
        idle = idle_cpu / idle_wall if idle_wall else 0.0
        used = {"cpu": time.process_time() - turn, "faults": page_faults() - faults, "device_peak": device_peak()}
        answer(steps=done, idle=idle, **used)


def page_faults() -> int:
    """Pages that this process has been given by the kernel so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
