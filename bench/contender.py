"""The other end of ``bench.processes``: a process that answers each line that it is asked.

Between two lines it waits in a read, so that it costs the others nothing; how much of a processor it took all the same
is part of the answer.
"""

import itertools
import json
import os
import resource
import time
from collections.abc import Callable
from typing import Any, TextIO

Step = Callable[[int], dict[str, float]]
"""A training step of so many windows: ms of each phase, the loss, and the norm of the gradients where it is known."""


STREAMS = "BENCH_STREAMS"
"""An environment variable: of each rank the file descriptors of questions and answers, "3:4 5:6"."""


def become_rank() -> tuple[TextIO, TextIO]:
    """Where this rank's questions come from, and where its answers go.

    Several ranks are forks of this process, which ends when they have: call it when all is imported that they share,
    and before anything has threads. ``RANK`` and ``LOCAL_RANK`` are set in each.
    """
    streams = [tuple(map(int, pair.split(":"))) for pair in os.environ.pop(STREAMS).split()]
    rank = 0 if len(streams) == 1 else _fork(streams)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    questions, answers = streams.pop(rank)
    _close(streams)
    for fd in (questions, answers):
        os.set_inheritable(fd, False)
    return os.fdopen(questions), os.fdopen(answers, "w")


def _fork(streams: list[tuple[int, int]]) -> int:
    """The rank, in each fork; the first process stays here until all have ended, and fails if one did."""
    children = []
    for rank in range(len(streams)):
        child = os.fork()
        if not child:
            return rank
        children.append(child)
    _close(streams)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    os._exit(int(any(statuses)))


def _close(streams: list[tuple[int, int]]) -> None:
    """Else nobody sees that whose they are has ended."""
    for fd in itertools.chain(*streams):
        os.close(fd)


def serve(questions: TextIO, answers: TextIO, micro_batch: int, make_step: Callable[[], Step], **imported: Any) -> None:
    """Tell what was imported; on the first question build and warm up, on each further one train."""

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    answer(pid=os.getpid(), **imported)
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
        answer(steps=done, idle=idle, cpu=time.process_time() - turn, faults=page_faults() - faults)


def page_faults() -> int:
    """Pages that this process has been given by the kernel so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
