"""The error that ends a run under torchrun, said once more after the tracebacks of all ranks.

Each rank prints a traceback, and torchrun's own follows: a hundred lines around one sentence. The first rank of a
machine that ends by an error therefore repeats it when the other ranks have printed theirs, and gives it to torchrun,
whose summary closes the output. Ranks find each other by files in the folder that torchrun has made for its workers'
errors: no network is needed, which may be what failed.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import CollectiveError

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""The variable in which torchrun names the file for a worker's error, ``…/attempt_0/LOCAL_RANK/error.json``."""
_PATIENCE = 1.0
"""Seconds to wait for the other ranks' tracebacks. A rank that computes comes to no end."""
_POLL_SECONDS = 0.02


def say_error_last(environ: Mapping[str, str] = os.environ) -> None:
    """From now on have one rank of this machine repeat the error that ends the run. Without torchrun, or with one
    process, this does nothing.

    Call it again where another hook may have been set: torch sets one as it makes the first process group.
    """
    try:
        file, ranks = environ[ERROR_FILE], int(environ["LOCAL_WORLD_SIZE"])
        rank, local_rank = int(environ["RANK"]), int(environ["LOCAL_RANK"])
    except (KeyError, ValueError):
        return
    if ranks > 1 and not isinstance(sys.excepthook, _LastWords):
        sys.excepthook = _LastWords(Path(file), rank, local_rank, ranks, sys.excepthook)


def say_lost(what: str) -> None:
    """Say at once that another rank was lost, if this is the first rank of this machine that ends: torchrun soon ends
    this one, too."""
    hook = sys.excepthook
    if isinstance(hook, _LastWords):
        with suppress(OSError, ValueError):
            hook.take_turn()
            hook.say(what)


class _LastWords:
    """An exception hook that goes on from another one."""

    def __init__(self, file: Path, rank: int, local_rank: int, ranks: int, before: Callable[..., Any]) -> None:
        self._file, self._folder = file, file.parent.parent
        self._rank, self._local_rank, self._ranks = rank, local_rank, ranks
        self._before = before
        self._process = os.getpid()

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._before(kind, error, trace)
        mine = os.getpid() == self._process and sys.excepthook is self  # a forked process is no rank
        if mine and isinstance(error, Exception):
            with suppress(OSError, ValueError):  # there is no such folder, or no stderr
                self._repeat(error)

    def take_turn(self) -> None:
        """Be the rank that says why the run ends.

        Raises:
            FileExistsError: another one is.
        """
        self._mark("claimed").touch(exist_ok=False)

    def say(self, what: str) -> None:
        """Print a line."""
        print(f"\noffload-core: rank {self._rank}: {what}", file=sys.stderr, flush=True)
        self._mark("said").touch()

    def _repeat(self, error: Exception) -> None:
        self._mark(f"failed-{self._local_rank}").touch()
        with suppress(FileExistsError), _until_terminated() as terminated:
            self.take_turn()
            others = [self._mark(f"failed-{i}") for i in range(self._ranks)]
            _poll(lambda: terminated() or all(mark.exists() for mark in others), _PATIENCE)
            self.say(f"{type(error).__name__}: {error}")
            # torchrun takes the earliest error for the cause. That of a rank that lost another one is not the cause.
            if not isinstance(error, CollectiveError) and not self._file.exists():
                said = {"message": f"{type(error).__name__}: {error}", "timestamp": int(time.time())}
                self._file.write_text(json.dumps(said), encoding="utf-8")
            return
        _poll(self._mark("said").exists, 2 * _PATIENCE)  # torchrun ends all ranks when the first one has ended

    def _mark(self, what: str) -> Path:
        return self._folder / f"offload-core-{what}"


@contextmanager
def _until_terminated() -> Iterator[Callable[[], bool]]:
    """Hold back SIGTERM, which torchrun sends to the others when a rank was killed. Yield a function that returns True
    if it came."""
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
        if came:
            os.kill(os.getpid(), signal.SIGTERM)


def _poll(ended: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not ended() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
