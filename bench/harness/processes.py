"""Contenders in separate processes: they are started, asked over pipes, and ended."""

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
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from bench.harness.worker import MOST_FDS
from bench.peers import EXTENSIONS, free_port

KEEP_FREED_MEMORY = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**62)}
"""Has glibc keep the memory that a process frees. By default large blocks go back to the kernel, and each page of a new
block costs a page fault. On a virtual machine that hands free memory to its host, a fault takes several times as long
in one hour as in another, so that times would depend on the memory that contenders free. One arena, because the arena
of a thread is mapped and unmapped whatever the other settings say (XLA's threads had 70,000 faults a step)."""
MOST_RANKS = MOST_FDS // 2 - 1
_LOG_LINES = 40
_PATIENCE = 400.0
"""Seconds to wait for an answer: DeepSpeed may compile."""
_PATIENCE_TO_END = 10.0
_ERROR = re.compile(r"[\w.]*(Error|Exception|Exit|Interrupt)\b(: .*)?$")


class ContenderError(Exception):
    """A contender cannot run here; the message is the end of its output."""

    @property
    def why(self) -> str:
        """The first line of the last error in it."""
        lines = str(self).splitlines()
        return next((line for line in reversed(lines) if _ERROR.match(line)), lines[-1])


class _Importer:
    """A process that has imported what contenders share, and forks their ranks."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - lives as long as the process
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                command, stdin=theirs, stdout=self._log, stderr=self._log, start_new_session=True, env=environment
            )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def fork(self, fds: Sequence[int], **request: Any) -> None:
        """Have it fork ranks as soon as it has imported. If it cannot, the other ends of the pipes are told."""
        with suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._channel, [json.dumps(request).encode()], fds)

    def last_words(self) -> list[str]:
        """Return the last lines of its output; none while it lives."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
            return _lines(self._log)
        return []

    def close(self) -> None:
        self._channel.close()
        try:
            self._process.wait(_PATIENCE_TO_END)
        except subprocess.TimeoutExpired:  # it is importing
            self._process.kill()
            self._process.wait()
        self._log.close()


_importers: dict[tuple[Any, ...], _Importer] = {}
"""Importers by the command and environment that their forks share; they end with this process."""


def _importer(command: Sequence[str], environment: Mapping[str, str]) -> _Importer:
    key = (*command, os.getcwd(), *sorted(environment.items()))
    known = _importers.get(key)
    if known is None or not known.alive:
        known = _importers[key] = _Importer(command, environment)
        atexit.register(known.close)
    return known


class ProcessGroup:
    """The processes of one contender, which answer lines as ``bench.harness.worker`` does.

    They are forks of one that has imported, with all contenders of the same module, library and environment: several
    imports of PyTorch at once are most of a short run.

    Args:
        patience: the seconds to wait for an answer.
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
        malloc: Mapping[str, str] = KEEP_FREED_MEMORY,
        patience: float = _PATIENCE,
    ) -> None:
        if ranks > MOST_RANKS:
            raise ValueError(f"ranks: got {ranks}, expected at most {MOST_RANKS} on one machine")
        self.ranks = ranks
        self._patience = patience
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - lives as long as the ranks
        # The shell's own settings of malloc must not reach the contenders.
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
        shared = {
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "passive",
            # DeepSpeed compiles its Adam on first use, with the ninja of this environment and for its torch.
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
            "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", str(EXTENSIONS)),
            **malloc,
            **environment,
        }
        command = [sys.executable, "-m", module, *([library] if library else [])]
        self._importer = _importer(command, inherited | shared)
        of_group = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
        }
        asked, answered = [os.pipe() for _ in range(ranks)], [os.pipe() for _ in range(ranks)]
        told, started = os.pipe()
        self._started = os.fdopen(told)
        theirs = [started, *(fd for i in range(ranks) for fd in (asked[i][0], answered[i][1]))]
        self._importer.fork([self._log.fileno(), *theirs], arguments=list(arguments), environment=of_group)
        for fd in theirs:
            os.close(fd)
        self._questions = [os.fdopen(questions[1], "w") for questions in asked]
        self._answers = [os.fdopen(answers[0]) for answers in answered]
        self.pids: list[int] = []
        """The process numbers of the ranks, once they have answered."""
        self._running: dict[int, int] = {}
        """File descriptors that become readable when a rank has ended."""
        self._ending = threading.RLock()

    def answers(self) -> list[dict[str, Any]]:
        """Return an answer from each rank."""
        answers: dict[Any, dict[str, Any]] = {}
        while len(answers) < len(self._answers):
            ready = select.select([a for a in self._answers if a not in answers], [], [], self._patience)[0]
            if not ready:
                self.kill()
                raise ContenderError(f"no answer in {self._patience} s")
            for output in ready:
                line = output.readline()
                if not line:  # one is gone; the others may be waiting for it
                    self.kill()
                    words = _lines(self._log) or self._importer.last_words()
                    raise ContenderError("".join(words[-_LOG_LINES:]).rstrip() or "ended without a word")
                answers[output] = json.loads(line)
        self._know_ranks()
        return [answers[output] for output in self._answers]

    def _know_ranks(self, patience: float = _PATIENCE) -> None:
        """Wait until the importer has told the process numbers of the ranks."""
        with self._ending:
            if self._started.closed or not select.select([self._started], [], [], patience)[0]:
                return
            with self._started:
                self.pids = json.loads(self._started.read() or "[]")  # nothing: the importer has ended
            for pid in self.pids:
                with suppress(ProcessLookupError):  # it has ended
                    self._running[pid] = os.pidfd_open(pid)

    def ask(self, **question: Any) -> list[dict[str, Any]]:
        for questions in self._questions:
            with suppress(BrokenPipeError):  # it has ended: `answers` finds out
                print(json.dumps(question), file=questions, flush=True)
        return self.answers()

    def resident(self) -> int:
        """The resident bytes of the largest process, without pages of files."""
        return max(own for own, _ in map(_memory, self.pids))

    def peak(self) -> int:
        """The most bytes that a process has had resident since :meth:`forget_peak`, without pages of files."""
        return max(peak for _, peak in map(_memory, self.pids))

    def forget_peak(self) -> None:
        for pid in self.pids:
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                Path(f"/proc/{pid}/clear_refs").write_text("5")

    def dismiss(self) -> None:
        """Tell the processes that no question follows."""
        for questions in self._questions:
            with suppress(BrokenPipeError):
                questions.close()

    def close(self, patience: float = _PATIENCE_TO_END) -> None:
        """End the processes; kill those that have not ended after so many seconds."""
        self._end(patience)
        for answers in self._answers:
            answers.close()
        self._started.close()
        self._log.close()

    def kill(self) -> None:
        """End the processes now; a caller that waits for an answer gets none."""
        self._end(0.0)

    def _end(self, patience: float) -> None:
        """End the processes. Forks of an importer that is still importing end when they find that nobody asks."""
        self.dismiss()
        deadline = time.monotonic() + patience
        with self._ending:  # others may find out that it ends while this ends it
            self._know_ranks(0.0)
            while self._running:
                pid, process = self._running.popitem()
                if not select.select([process], [], [], max(deadline - time.monotonic(), 0.0))[0]:
                    with suppress(ProcessLookupError):  # it has ended now
                        os.killpg(pid, signal.SIGKILL)  # with its compilers
                    select.select([process], [], [])
                os.close(process)


def _lines(log: IO[str]) -> list[str]:
    log.seek(0)
    return log.readlines()


def _memory(pid: int) -> tuple[int, int]:
    """Return a process's own resident bytes, now and at their peak; 0 and 0 if it has ended.

    Pages of files are left out: they are libraries' code, which a fork lacks until it runs it.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0
    known = {name: 1024 * int(rest.split()[0]) for name, _, rest in (x.partition(":") for x in lines) if "kB" in rest}
    own = known.get("RssAnon", 0) + known.get("RssShmem", 0)
    return own, known.get("VmHWM", 0) - known.get("RssFile", 0)


def in_parallel(
    groups: Iterable[ProcessGroup], act: Callable[[str], None], names: Iterable[str], at_a_time: int
) -> None:
    """Act on each name, ``at_a_time`` of them at once. An error or interrupt ends all groups, so that nobody waits."""
    with ThreadPoolExecutor(max(1, at_a_time)) as actors:
        try:
            list(actors.map(act, names))
        except BaseException:
            for group in groups:
                group.kill()
            raise
