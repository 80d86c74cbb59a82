"""Records of each step as plain numbers, for a file, TensorBoard or a progress bar.

::

    log = StepLog("steps.jsonl", TensorBoard("runs/a"), ProgressBar(1000))
    ...
    log(engine.step(), loss=loss)

A record has the number of its update. A run that continues from a checkpoint repeats some updates; their earlier
records no longer count. A writer recognises this by a step number less than the last one.
"""

import fcntl
import json
import math
import os
import sys
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from io import BufferedReader, FileIO
from numbers import Integral
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Any, Self

from .errors import ConfigError, StateError
from .step.pipeline import StepReport
from .support.checks import integer
from .support.launchers import Launched
from .support.optional import library

_SECONDS = 10
"""Seconds after which TensorBoard's files are flushed."""
Value = float | str | None
"""A value in a record: a number (also inf and NaN), a word, or None."""


class Writer(ABC):
    """Writes records down. Subclass it for another place."""

    def open(self, rank: int | None) -> None:  # noqa: B027
        """Begin, before the first record. Raises if the place cannot be written.

        Args:
            rank: this process's rank if each rank writes its own file; None: one process writes.
        """

    @abstractmethod
    def write(self, step: int, record: Mapping[str, Value]) -> None:
        """Write a step's record. A step before the last one takes back all records from that step on."""

    def close(self) -> None:  # noqa: B027
        """End. No record follows."""


class StepLog:
    """Gives each update's record to writers: ``log(engine.step(), loss=loss)``, ``log(offloaded.report, loss=loss)``.

    A record has the report's numbers (:func:`numbers`), the values of the call, and ``seconds``: the time since the
    last record, divided by the updates in between. Values of the micro-steps of an update are averaged.

    Args:
        writers: each a :class:`Writer`, or the path of a file for :class:`JsonLines`.
        every: write one record every so many updates, and one of each skipped update. Between records nothing is
            computed, and the device is not waited for.
        rank: this process's rank; only rank 0 writes. None: the launcher's, or 0 without one.
        every_rank: every rank writes, to its own file or folder, with the rank in its name.

    Raises:
        OSError, StateError, ModuleNotFoundError: a writer cannot begin.
    """

    def __init__(
        self,
        *writers: Writer | str | os.PathLike[str],
        every: int = 1,
        rank: int | None = None,
        every_rank: bool = False,
    ) -> None:
        integer("every", every)
        self._every = every
        rank = Launched.read().rank if rank is None else rank
        self._writers: list[Writer] = []
        self._given: dict[str, list[Any]] = {}
        self._updates = 0
        """Reports since the last record."""
        self._since = time.monotonic()
        if rank != 0 and not every_rank:
            return
        try:
            for writer in writers:
                writer = writer if isinstance(writer, Writer) else JsonLines(writer)
                writer.open(rank if every_rank else None)
                self._writers.append(writer)
        except BaseException:
            self.close()
            raise

    def __call__(self, report: StepReport | None, **values: Any) -> None:
        """Note a micro-step's values, and at the end of an update write its record.

        Args:
            report: the result of ``step``; None (no step yet) writes nothing.
            values: words, numbers, and anything that ``float()`` takes (tensors and arrays of one element).

        Raises:
            ConfigError: a value is named ``step``.
            TypeError, ValueError: a value is not a number.
            OSError: the record cannot be written; no part of it was.
        """
        if report is None or not self._writers:
            return
        if "step" in values:
            raise ConfigError("step: a record has its update's number under this name; expected another one")
        for name, value in values.items():
            self._given.setdefault(name, []).append(value.detach() if hasattr(value, "detach") else value)
        if report.skipped == "accumulating":
            return
        given, self._given = self._given, {}
        self._updates += 1
        if report.step % self._every and report.skipped is None:
            return
        record = {name: _mean(name, each) for name, each in given.items()}
        now = time.monotonic()
        seconds, self._since = (now - self._since) / self._updates, now
        self._updates = 0
        self.write(report.step, {"seconds": seconds, **numbers(report), **record})

    def write(self, step: int, record: Mapping[str, Value]) -> None:
        """Write a record of your own, for loops without a :class:`StepReport`."""
        for writer in self._writers:
            writer.write(step, record)

    def close(self) -> None:
        """End all writers. Later records are dropped."""
        while self._writers:
            self._writers.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def numbers(report: StepReport) -> dict[str, Value]:
    """A report's record: ``lr`` (of the first parameter group; ``lr_1`` and so on for groups with another one),
    ``grad_norm``, ``clip_coefficient``, ``loss_scale`` and ``skipped``."""
    lr = {f"lr_{i}" if i else "lr": rate for i, rate in enumerate(report.lr) if i == 0 or rate != report.lr[0]}
    return {
        **lr,
        "grad_norm": report.grad_norm,
        "clip_coefficient": report.clip_coefficient,
        "loss_scale": report.loss_scale,
        "skipped": report.skipped,
    }


def _mean(name: str, values: list[Any]) -> Value:
    try:
        plain = [_plain(value) for value in values]
    except (TypeError, ValueError) as error:
        error.add_note(f"in the log as {name!r}; expected a number, or a tensor or array of one")
        raise
    if len(plain) > 1 and all(isinstance(value, float | int) for value in plain):
        return fmean(plain)  # type: ignore[arg-type]
    return plain[-1]


def _plain(value: Any) -> Value:
    if value is None or isinstance(value, str | float):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


# --- writers ---------------------------------------------------------------------------------------------


_WRITING: "weakref.WeakValueDictionary[tuple[int, int], JsonLines]" = weakref.WeakValueDictionary()
"""The last log that began to write to each file (device and inode). A file lock does not separate logs of one
process."""


class JsonLines(Writer):
    """A file of one JSON object a line, ``{"step": 17, "loss": 2.1, ...}``; inf and NaN, which JSON lacks, are null.

    When ``write`` returns, the system has the whole line: a killed process loses none. An existing file is continued.
    Lines of steps that are repeated after a checkpoint, and an incomplete line at the end, are moved to
    ``NAME.superseded.jsonl`` beside it.

    Args:
        path: the file; its folder is made. With ``every_rank``, ``steps.jsonl`` becomes ``steps.rank0.jsonl`` and so
            on.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: FileIO | None = None
        self._last: int | None = None

    def open(self, rank: int | None) -> None:
        if rank is not None:
            self.path = self.path.with_name(f"{self.path.stem}.rank{rank}{self.path.suffix}")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = FileIO(self.path, "a+b")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise StateError(
                f"{self.path}: another process is writing to it; expected a file for each run, and of several ranks "
                "one that writes: StepLog(..., rank=...), or every_rank=True"
            ) from None
        except OSError:
            pass  # a file system without locks
        self._file = file
        found = os.fstat(file.fileno())
        self._id = found.st_dev, found.st_ino
        _WRITING[self._id] = self
        weakref.finalize(self, file.close)  # a log that is not closed has lost nothing

    def write(self, step: int, record: Mapping[str, Value]) -> None:
        assert self._file is not None
        if _WRITING.get(self._id) is not self:
            raise StateError(
                f"{self.path}: another log of this process has begun to write to it since; expected a file for each"
            )
        if self._last is None or step < self._last:
            self._take_back(step)
        self._last = step
        values = {name: _in_json(value) for name, value in record.items() if name != "step"}
        _append(self._file, json.dumps({"step": step, **values}, allow_nan=False).encode() + b"\n")

    def _take_back(self, step: int) -> None:
        """Move the lines from this step on, and incomplete ones, out of the file."""
        assert self._file is not None
        self._file.seek(0)
        reader, keep = BufferedReader(self._file), 0  # not a second descriptor: closing one releases the lock
        for line in reader:
            if not line.endswith(b"\n") or _step_of(line) >= step:
                break
            keep += len(line)
        reader.seek(keep)
        rest = reader.read()
        reader.detach()
        if rest:
            with open(self.path.with_name(f"{self.path.stem}.superseded{self.path.suffix}"), "ab") as superseded:
                superseded.write(rest if rest.endswith(b"\n") else rest + b"\n")
                superseded.flush()
                os.fsync(superseded.fileno())
            os.ftruncate(self._file.fileno(), keep)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _append(file: FileIO, record: bytes) -> None:
    """Write a whole record to an unbuffered file, or nothing of it if that fails."""
    before, written = os.fstat(file.fileno()).st_size, 0
    try:
        while written < len(record):
            written += file.write(record[written:])
    except BaseException:
        if written:
            os.ftruncate(file.fileno(), before)
        raise


def _in_json(value: Value) -> Value:
    return value if not isinstance(value, float) or math.isfinite(value) else None


def _step_of(line: bytes) -> float:
    """The step of a line; -inf, before all others, if it has none."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, LookupError):
        return -math.inf
    return step if isinstance(step, int) else -math.inf


class TensorBoard(Writer):
    """Event files that TensorBoard shows (``tensorboard --logdir FOLDER``), written by tensorboardX, in a thread of its
    own: a process that is killed loses the last seconds.

    Each run writes a file. That of a continued run states the step from which on records of earlier files do not count.

    Args:
        folder: the run's folder; it is made. With ``every_rank``, each rank writes to ``rank0`` and so on in it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._file: Any = None
        self._last: int | None = None

    def open(self, rank: int | None) -> None:
        self._new_file = library("tensorboardX", "log", "TensorBoard").SummaryWriter
        self.folder = self.folder if rank is None else self.folder / f"rank{rank}"
        self.folder.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, record: Mapping[str, Value]) -> None:
        if self._last is None or step < self._last:
            self.close()
            # tensorboardX's names have whole seconds, and TensorBoard reads files in the order of their names.
            own = f".{time.time_ns()}.{os.getpid()}"
            self._file = self._new_file(str(self.folder), purge_step=step, filename_suffix=own, flush_secs=_SECONDS)
        self._last = step
        for name, value in record.items():
            if isinstance(value, float | int):
                self._file.add_scalar(name, value, step)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class ProgressBar(Writer):
    """A bar on the terminal, by tqdm; if the output is a file, a line now and then.

    Args:
        total: updates of the whole run; a continued run begins at its checkpoint's.
        show: names of values to show beside the bar, if a record has them.
    """

    def __init__(self, total: int, show: tuple[str, ...] = ("loss", "lr", "grad_norm")) -> None:
        self._total = total
        self._show = (*show, "skipped")
        self._begun = False

    def open(self, rank: int | None) -> None:
        tqdm = library("tqdm", "log", "ProgressBar").tqdm
        often = {"mininterval": 0.2} if sys.stderr.isatty() else {"mininterval": 10.0, "ascii": True}
        self._bar = tqdm(total=self._total, unit="step", dynamic_ncols=True, position=rank, **often)

    def write(self, step: int, record: Mapping[str, Value]) -> None:
        bar = self._bar
        if not self._begun or step < bar.n:
            self._begun = True
            bar.initial = bar.n = bar.last_print_n = step - 1
        shown = ((name, record.get(name)) for name in self._show)
        text = ", ".join(f"{name} {_short(value)}" for name, value in shown if value is not None)
        bar.set_postfix_str(text, refresh=False)
        bar.update(step - bar.n)

    def close(self) -> None:
        self._bar.close()


def _short(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
