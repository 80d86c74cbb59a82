"""Runs Python in forks of one process that has imported modules already.

Its arguments are those modules. In, on standard input: a line of JSON a job, ``{"seconds": ..., "folder": ...,
"environment": {...}, "processes": [{"output": FILE, "errors": FILE, ...}, ...]}``; all processes of a job run at once.
Out: a line each, their exit statuses, or ``{"error": ...}``. Those that have not ended in time say on their standard
error where their threads are, and are ended. All end with this process, and this one with the process that started it.

A process has ``arguments`` as Python's command line takes them (``-c CODE``, ``-m MODULE ...``, ``FILE ...``), or
``call``, a function of these arguments: ``[MODULE, FUNCTION, {...}]``, which also gets what :class:`Job` says.
"""

import atexit
import faulthandler
import gc
import importlib
import json
import os
import resource
import runpy
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from contextlib import ExitStack
from typing import Any, NoReturn

SAYING = 10
"""Seconds that a process has to say where its threads are."""


def child(job: dict[str, Any], process: dict[str, Any]) -> NoReturn:
    """As ``python ARGUMENTS`` in the folder, but for its end: to take the frameworks down outlasts most jobs."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for fd, path in enumerate((os.devnull, process["output"], process["errors"])):
        flags = os.O_RDONLY if fd == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND
        os.dup2(os.open(path, flags, 0o666), fd)
    atexit._clear()
    os.environ.clear()
    os.environ.update(job["environment"] | process.get("environment", {}))
    os.chdir(job["folder"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if process.get("alone"):
        os.execv(sys.executable, [sys.executable, "-P", __file__, "call", json.dumps(process["call"])])
    status = 0
    try:
        execute(job["folder"], process)
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


def execute(folder: str, process: dict[str, Any]) -> None:
    if "call" in process:
        call(*process["call"])
        return
    faulthandler.enable(file=2)
    arguments = process["arguments"]
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


def call(module: str, function: str, arguments: dict[str, Any]) -> None:
    faulthandler.enable(file=2)
    getattr(importlib.import_module(module), function)(**arguments)


class Job:
    """The processes of a job, and how each has ended.

    With ``ranks`` (``{"killed": [PLACE, ...], "grace": SECONDS}``) they belong together. They are told a free ``port``,
    whose open socket, ``listener``, the first one has. One that has a result writes its place to ``finished``, and
    stays until all have: so none sees another one go. When one fails that was not to be killed, the others have these
    seconds. A rank that is ``alone`` is a process of its own.
    """

    def __init__(self, job: dict[str, Any], woken: int) -> None:
        self.job, self.woken = job, woken
        self.children: list[int] = []
        self.statuses: dict[int, int] = {}
        """The exit statuses, by place; minus the signal of those that one has ended."""
        self.finished: set[int] = set()

    def run(self) -> list[int]:
        ranks = "ranks" in self.job
        with ExitStack() as opened:
            finished, told = os.pipe()
            os.set_inheritable(told, True)
            opened.callback(os.close, finished)
            listener = opened.enter_context(socket.create_server(("127.0.0.1", 0))) if ranks else None
            for place, process in enumerate(self.job["processes"]):
                number = os.fork()
                if number == 0:
                    os.close(finished)
                    if listener is not None:
                        process["call"][2] |= {"port": listener.getsockname()[1], "finished": told}
                        if place == 0:
                            process["call"][2]["listener"] = listener.fileno()
                            listener.set_inheritable(True)
                        else:
                            listener.close()
                    child(self.job, process)
                self.children.append(number)
            os.close(told)
            self.wait(finished)
        return [self.statuses.get(place, 0) for place in range(len(self.children))]

    def wait(self, finished: int) -> None:
        deadline, asked = time.monotonic() + self.job["seconds"], False
        with selectors.DefaultSelector() as selector:
            for fd in (0, self.woken, finished):
                selector.register(fd, selectors.EVENT_READ)
            while left := {*range(len(self.children))} - self.statuses.keys() - self.finished:
                for key, _ in selector.select(max(deadline - time.monotonic(), 0)):
                    said = os.read(key.fd, 1024)
                    if key.fd == 0:  # whoever has started this is gone
                        os.killpg(0, signal.SIGKILL)
                    elif key.fd == finished:
                        self.finished.update(said)
                        if not said:
                            selector.unregister(finished)
                if self.reap(left):
                    deadline = min(deadline, time.monotonic() + self.job["ranks"]["grace"])
                if time.monotonic() >= deadline:
                    for place in left - self.statuses.keys():
                        os.kill(self.children[place], signal.SIGKILL if asked else signal.SIGABRT)
                    asked, deadline = True, time.monotonic() + SAYING
        for place in self.finished - self.statuses.keys():
            os.kill(self.children[place], signal.SIGKILL)
            os.waitpid(self.children[place], 0)

    def reap(self, places: set[int]) -> bool:
        """True if a rank has failed."""
        failed = False
        for place in places:
            number, status = os.waitpid(self.children[place], os.WNOHANG)
            if number:
                self.statuses[place] = os.waitstatus_to_exitcode(status)
                failed |= "ranks" in self.job and place not in self.job["ranks"]["killed"]
        return failed


def import_all(modules: list[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    assert threading.active_count() == 1, f"{modules} start threads"  # and nothing was computed: a fork is safe
    gc.collect()
    gc.freeze()  # a collection in a fork would copy the pages of all that is here


def main() -> None:
    warnings.filterwarnings("ignore", module=r"lightning\.")  # under -W error, but for what it says to itself
    import_all(sys.argv[1:])
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *arguments: None)
    for line in sys.stdin:
        job = json.loads(line)
        try:
            import_all(job.get("modules", []))
            answer: Any = Job(job, woken).run()
        except BaseException:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["call"]:
        call(*json.loads(sys.argv[2]))
    else:
        main()
