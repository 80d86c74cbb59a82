"""Two processes of JAX that check laws together, and say how each law has ended in them."""

import itertools
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

import pytest

from tests.support.processes import ROOT, environment_of

WORKER = ROOT / "tests" / "workers" / "jax_pair_worker.py"
MEMBER = "member of a pair"
"""The plugin of pytest that the processes of a pair have, and no other."""
PATIENCE = 60
"""Seconds that one process has for its answer once the other has failed, for which it may wait for ever."""
Said = list[tuple[str, str]] | None
"""Outcomes of a law other than "passed", each with its text; None of a process that has ended."""


class Pair:
    """Two processes with two CPU devices each, joined by ``jax.distributed``; they live until ``close``.

    They meet at a socket in a folder, not at a port that another process could take first. They end with this process,
    however it ends.

    Args:
        folder: that of the socket, and of what they say.
        laws: files or folders with the tests that they can be asked for.
        options: of pytest, for both.
    """

    def __init__(self, folder: Path, *laws: Path, options: Sequence[str] = ()) -> None:
        self.lost: str | None = None
        self._logs = [folder / f"{number}.log" for number in range(2)]
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen] = []
        environment = {name: value for name, value in environment_of(ROOT).items() if not name.startswith("PYTEST_")}
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they take as long to import as all the rest
        for number, file in enumerate(self._logs):
            ours, theirs = Pipe()
            with theirs, file.open("wb") as log:
                process = subprocess.Popen(
                    [sys.executable, WORKER, str(theirs.fileno()), "unix:meeting", str(number), *laws, *options],
                    cwd=folder,  # paths of sockets are short
                    env=environment,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C is for pytest, which ends them
                )
            self._connections.append(ours)
            self._processes.append(process)

    def ask(self, law: str, folder: Path | None = None) -> list[Said]:
        """Have both check this law; return what each has said. If one does not answer, both are ended."""
        said: dict[Connection, Said] = {}
        try:
            for each in self._connections:
                with suppress(BrokenPipeError):  # it has ended
                    each.send((law, folder))
            while left := [each for each in self._connections if each not in said]:
                failed = any(answer is None or "failed" in dict(answer) for answer in said.values())
                if not (ready := wait(left, PATIENCE if failed else None)):
                    break
                for each in ready:
                    try:
                        said[each] = each.recv()
                    except (EOFError, ConnectionError):
                        said[each] = None
        except BaseException:  # a time limit, or Ctrl-C
            self._end(f"{law} was broken off")
            raise
        answers = [said.get(each) for each in self._connections]
        if None in answers:
            self._end("\n".join([f"{law} was their last law", *failures(answers)]))
        return answers

    def check(self, law: str, folder: Path | None = None) -> None:
        """Pass, skip or fail as the law does there. Fail if the processes have ended."""
        said = self.ask(law, folder) if self.lost is None else []
        if self.lost is not None:
            pytest.fail(self.lost, pytrace=False)
        if texts := failures(said):
            pytest.fail("\n".join(texts), pytrace=False)
        for _, reason in itertools.chain(*said):
            pytest.skip(reason)

    def _end(self, why: str) -> None:
        """End both before their time. Whoever asks for another law is told why, and what they last said."""
        words = [f"the two processes have ended: {why}"]
        for number, process in enumerate(self._processes):
            process.send_signal(signal.SIGABRT)  # on which it says where its threads are, unless it has ended
            with suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
            said = self._logs[number].read_text(errors="replace").partition("\nExtension modules")[0]
            words.append(f"process {number} has ended with {process.returncode}, after these words:\n{said[-5000:]}")
        self.lost = "\n".join(words)
        self.close()

    def close(self) -> None:
        """Have both end."""
        for each in self._connections:
            each.close()
        for process in self._processes:
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def codes(self) -> list[int | None]:
        """Return the exit code of each process, or None while it lives."""
        return [process.poll() for process in self._processes]


def failures(said: list[Said]) -> list[str]:
    """The text of each failure, with the process that has said it."""
    return [
        f"in process {number}:\n{text}"
        for number, answer in enumerate(said)
        for outcome, text in answer or ()
        if outcome == "failed"
    ]
