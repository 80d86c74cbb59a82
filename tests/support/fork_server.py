"""Runs Python commands in forks of one process that has imported their modules already.

Its arguments are those modules. In, on standard input: a line of JSON a job, ``{"seconds": ..., "folder": ...,
"environment": {...}, "processes": [{"arguments": [...], "output": FILE, "errors": FILE}, ...]}``, the arguments as
Python's command line takes them (``-c CODE``, ``-m MODULE ...``, ``FILE ...``); all processes of a job run at once.
Out: a line each, their exit statuses; those that have not ended in time are killed, and have said on their standard
error where their threads are.
"""

import atexit
import faulthandler
import importlib
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
import warnings
from typing import Any, NoReturn


def child(
    folder: str, seconds: float, arguments: list[str], environment: dict[str, str], output: str, errors: str
) -> NoReturn:
    """As ``python ARGUMENTS`` in the folder, but for its end: to take the frameworks down outlasts most jobs."""
    for fd, path in enumerate((os.devnull, output, errors)):
        flags = os.O_RDONLY if fd == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND
        os.dup2(os.open(path, flags, 0o666), fd)
    faulthandler.dump_traceback_later(0.9 * seconds)
    atexit._clear()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    status = 0
    try:
        execute(folder, arguments)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def execute(folder: str, arguments: list[str]) -> None:
    option, rest = arguments[0], arguments[1:]
    if option == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], folder
        exec(compile(rest[0], "<block>", "exec"), {"__name__": "__main__"})
    elif option == "-m":
        sys.argv, sys.path[0] = rest, folder
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = arguments, os.path.dirname(os.path.join(folder, option))
        runpy.run_path(option, run_name="__main__")


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


def started(job: dict[str, Any], process: dict[str, Any]) -> int:
    number = os.fork()
    if number == 0:
        child(job["folder"], job["seconds"], process["arguments"], job["environment"] | process.get("environment", {}),
              process["output"], process["errors"])  # fmt: skip
    return number


def main() -> None:
    warnings.filterwarnings("ignore", module=r"lightning\.")  # under -W error, but for what it says to itself
    for module in sys.argv[1:]:
        importlib.import_module(module)
    assert threading.active_count() == 1  # and nothing was computed, no backend started: a fork is safe
    for line in sys.stdin:
        job = json.loads(line)
        children = [started(job, process) for process in job["processes"]]
        print(json.dumps(ended(children, job["seconds"])), flush=True)


if __name__ == "__main__":
    main()
