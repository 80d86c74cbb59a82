"""Contenders that are processes of their own: started, asked, and ended."""

import atexit
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil

from bench.turns import KEEP_MEMORY

_LOG_LINES = 40
_PATIENCE = 400.0
"""Seconds: DeepSpeed compiles meanwhile."""
_PATIENCE_TO_END = 10.0
_ERROR = re.compile(r"[\w.]*(Error|Exception|Exit|Interrupt)\b(: .*)?$")


class ContenderError(Exception):
    """A contender cannot run here; its message is the end of what it printed."""

    @property
    def why(self) -> str:
        """The first line of the last error in it."""
        lines = str(self).splitlines()
        return next((line for line in reversed(lines) if _ERROR.match(line)), lines[-1])


class _Importer:
    """A process that has imported what contenders share, and forks their ranks."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - lives as long as the process
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                command, stdin=theirs, stdout=self.log, stderr=self.log, start_new_session=True, env=environment
            )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def fork(self, fds: Sequence[int], **request: Any) -> None:
        """Have it fork ranks, as soon as it has imported; where it cannot, the other ends of the pipes are told."""
        with suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._channel, [json.dumps(request).encode()], fds)

    def close(self) -> None:
        self._channel.close()
        try:
            self._process.wait(_PATIENCE_TO_END)
        except subprocess.TimeoutExpired:  # it is importing
            self._process.kill()
            self._process.wait()
        self.log.close()


_importers: dict[tuple[Any, ...], _Importer] = {}
"""By command and environment, which all that they fork have; they end with this process."""


def _importer(command: Sequence[str], environment: Mapping[str, str]) -> _Importer:
    key = (*command, os.getcwd(), *sorted(environment.items()))
    known = _importers.get(key)
    if known is None or not known.alive:
        known = _importers[key] = _Importer(command, environment)
        atexit.register(known.close)
    return known


class Group:
    """The processes of one contender, which answer lines as ``bench.contender`` does.

    They are forks of one that has imported, with all contenders of the same module, library and environment: several
    imports of PyTorch at once are most of a short run.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        ranks: int,
        threads: int,
        library: str = "",
        environment: Mapping[str, str] = {},
        malloc: Mapping[str, str] = KEEP_MEMORY,
    ) -> None:
        self.ranks = ranks
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - lives as long as the ranks
        # What this shell asks of malloc is not the contenders'.
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
        shared = {
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "passive",
            # DeepSpeed compiles its Adam on first use, with the ninja of this environment and for its torch.
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
            "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix, "torch_extensions"))),
            **malloc,
            **environment,
        }
        command = [sys.executable, "-m", module, *([library] if library else [])]
        self._importer = _importer(command, inherited | shared)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        of_group = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
        }
        asked, answered = [os.pipe() for _ in range(ranks)], [os.pipe() for _ in range(ranks)]
        theirs = [fd for i in range(ranks) for fd in (asked[i][0], answered[i][1])]
        self._importer.fork([self._log.fileno(), *theirs], arguments=list(arguments), environment=of_group)
        for fd in theirs:
            os.close(fd)
        self._questions = [os.fdopen(questions[1], "w") for questions in asked]
        self._answers = [os.fdopen(answers[0]) for answers in answered]
        self.pids: list[int] = []
        """Of the ranks, once all have answered."""
        self._running: dict[int, int] = {}
        """What tells when one has ended, of each pid that has answered."""

    def answers(self) -> list[dict[str, Any]]:
        """One from each rank."""
        answers: dict[Any, dict[str, Any]] = {}
        while len(answers) < len(self._answers):
            ready = select.select([a for a in self._answers if a not in answers], [], [], _PATIENCE)[0]
            if not ready:
                self.kill()
                raise ContenderError(f"no answer in {_PATIENCE} s")
            for output in ready:
                line = output.readline()
                if not line:  # one is gone; the others may be waiting for it
                    self.kill()
                    words = [line for log in (self._importer.log, self._log) for line in _lines(log)]
                    raise ContenderError("".join(words[-_LOG_LINES:]).rstrip() or "ended without a word")
                answers[output] = json.loads(line)
                if "pid" in answers[output]:  # the first
                    with suppress(ProcessLookupError):  # it has ended
                        self._running[answers[output]["pid"]] = os.pidfd_open(answers[output]["pid"])
        told = [answers[output] for output in self._answers]
        self.pids = self.pids or [answer["pid"] for answer in told]
        return told

    def ask(self, **question: Any) -> list[dict[str, Any]]:
        for questions in self._questions:
            with suppress(BrokenPipeError):  # it has ended: `answers` finds out
                print(json.dumps(question), file=questions, flush=True)
        return self.answers()

    def resident(self) -> int:
        """Bytes: the most that one of them has resident."""
        return max(psutil.Process(pid).memory_info().rss for pid in self.pids)

    def peak(self) -> int:
        """Bytes: the most that one of them has had resident since :meth:`forget_peak`."""
        return max(map(_high_water_mark, self.pids))

    def forget_peak(self) -> None:
        for pid in self.pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")

    def dismiss(self) -> None:
        """Tell the processes that no more is asked."""
        for questions in self._questions:
            with suppress(BrokenPipeError):
                questions.close()

    def close(self, patience: float = _PATIENCE_TO_END) -> None:
        """End the processes; kill those that have not ended after so many seconds."""
        self._end(patience)
        for answers in self._answers:
            answers.close()
        self._log.close()

    def kill(self) -> None:
        """End them now; whoever waits for an answer gets none."""
        self._end(0.0)

    def _end(self, patience: float) -> None:
        """Those that have not answered yet end by themselves, when they find that nobody asks."""
        self.dismiss()
        deadline = time.monotonic() + patience
        for pid, process in self._running.items():
            if not select.select([process], [], [], max(deadline - time.monotonic(), 0.0))[0]:
                os.killpg(pid, signal.SIGKILL)  # with its compilers
                select.select([process], [], [])
            os.close(process)
        self._running.clear()


def _lines(log: IO[str]) -> list[str]:
    log.seek(0)
    return log.readlines()


def _high_water_mark(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)  # none: it has ended


def together(groups: Iterable[Group], act: Callable[[str], None], names: Iterable[str], at_a_time: int) -> None:
    """Act on each name, so many at a time. What interrupts it ends the groups that the others wait for."""
    with ThreadPoolExecutor(max(1, at_a_time)) as actors:
        try:
            list(actors.map(act, names))
        except BaseException:
            for group in groups:
                group.kill()
            raise
