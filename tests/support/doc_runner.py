"""Runs the documentation's code: imports both frameworks once, then each job in a fork of its own.

In, on standard input: a line of JSON a job, ``{"folder": ..., "arguments": [...]}``, the arguments as Python's command
line takes them (``-c CODE``, ``-m MODULE ...``, ``FILE ...``). Out: a line each, ``[exit status, output]``.
"""

import json
import os
import runpy
import sys
import tempfile
import traceback
import warnings
from typing import NoReturn

import jax  # noqa: F401
import torch  # noqa: F401

import frontends.jax
import frontends.torch  # noqa: F401


def child(folder: str, arguments: list[str], output: int) -> NoReturn:
    """As ``python ARGUMENTS`` in the folder, but for its end: to take the frameworks down outlasts most jobs."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdin.close()
    sys.stdout.reconfigure(line_buffering=True)
    os.chdir(folder)
    sys.path[0] = folder
    status = 0
    try:
        execute(arguments)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    os._exit(status)


def execute(arguments: list[str]) -> None:
    option, rest = arguments[0], arguments[1:]
    if option == "-c":
        sys.argv = ["-c"]
        names = {"__name__": "__main__"}
        exec(compile(rest[0], "<block>", "exec"), names)
    elif option == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(option, run_name="__main__")


def main() -> None:
    warnings.filterwarnings("ignore", module=r"lightning\.")  # warnings are errors, but for what it says to itself
    for line in sys.stdin.read().splitlines():
        job = json.loads(line)
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            process = os.fork()  # safe: no backend of JAX has been started, and torch has computed nothing
            if process == 0:
                child(job["folder"], job["arguments"], output.fileno())
            status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            output.seek(0)
            print(json.dumps([status, output.read()]), flush=True)


if __name__ == "__main__":
    main()
