"""The other end of ``bench.processes``: a process that answers each line on its standard input.

Between two lines it waits in a read, so that it costs the others nothing; how much of a processor it took all the same
is part of the answer.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

Step = Callable[[int], dict[str, float]]
"""A training step of so many windows: ms of each phase, the loss, and the norm of the gradients where it is known."""


def claim_stdout() -> TextIO:
    """Where answers go; what libraries print is none."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def serve(answers: TextIO, micro_batch: int, make_step: Callable[[], Step], **imported: Any) -> None:
    """Tell what was imported; on the first question build and warm up, on each further one train."""

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    answer(**imported)
    step: Step | None = None
    idle_cpu = idle_wall = 0.0
    while True:
        cpu, wall = time.process_time(), time.perf_counter()
        line = sys.stdin.readline()
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
