"""Runs the workers of torch ranks: imports torch once, then each rank in a fork of its own.

In, on standard input: a line of JSON for each run, ``{"seconds": ..., "environment": {...}, "ranks": [{"command":
[FILE, ...], "log": FILE}, ...]}``. Out: a line each, the exit statuses of its ranks; those that have not ended in time
are killed.
"""

import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from typing import NoReturn

import safetensors.torch  # noqa: F401
import torch._dynamo  # what the first torch.optim.Optimizer imports
import torch.distributed  # noqa: F401

import frontends.torch  # noqa: F401


def child(command: list[str], environment: dict[str, str], log: str) -> NoReturn:
    """As ``python COMMAND``, but for its end: to take torch down takes longer than most scenarios."""
    with open(log, "wb") as output, open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = command
    sys.path[0] = os.path.dirname(command[0])
    status = 1
    try:
        runpy.run_path(command[0], run_name="__main__")
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(status)


def ended(children: list[int], seconds: float) -> list[int]:
    """The exit statuses of all children, in order; minus the signal of those that one has ended."""
    deadline, found = time.monotonic() + seconds, {}
    while len(found) < len(children):
        for process in children:
            if process not in found and (status := os.waitpid(process, os.WNOHANG))[0]:
                found[process] = os.waitstatus_to_exitcode(status[1])
            elif process not in found and time.monotonic() > deadline:
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)
    return [found[process] for process in children]


def main() -> None:
    assert threading.active_count() == 1  # and torch has computed nothing: a fork is safe
    for line in sys.stdin:
        run = json.loads(line)
        children = []
        for rank in run["ranks"]:
            process = os.fork()
            if process == 0:
                child(rank["command"], run["environment"], rank["log"])
            children.append(process)
        print(json.dumps(ended(children, run["seconds"])), flush=True)


if __name__ == "__main__":
    main()
