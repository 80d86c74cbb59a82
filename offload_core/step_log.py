"""What each step did, as plain numbers, given to those who write it down: a file, TensorBoard, a progress bar.

::

    log = StepLog("steps.jsonl", TensorBoard("runs/a"), ProgressBar(1000))
    ...
    log(engine.step(), loss=loss)

A record is named by its update, and a run that goes on from a checkpoint makes some updates again: records of these
that were written before do not count any more. Who writes sees that by a step that is not after the last one.
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
"""After which what TensorBoard is to show has been written."""
Value = float | str | None
"""Of a record: a number (inf and NaN among them), a word, or None where there is none."""


class Writer(ABC):
    """Writes records down. Subclass it for another place."""

    def open(self, rank: int | None) -> None:  # noqa: B027
        """Begin, before the first record; what cannot be written is an error now.

        Args:
            rank: this process's, where each writes a file of its own; None: one process writes.
        """

    @abstractmethod
    def write(self, step: int, record: Mapping[str, Value]) -> None:
        """A step's record. One of an earlier step than the last takes back all from there on."""

    def close(self) -> None:  # noqa: B027
        """End; nothing is written any more."""


class StepLog:
    """Gives each update's record to writers: ``log(engine.step(), loss=loss)``, ``log(offloaded.report, loss=loss)``.

    A record has the report's numbers (:func:`numbers`), what the call names, and ``seconds``, the time from record to
    record divided by the updates in between. What is named in the micro-steps of an update is averaged over them.

    Args:
        writers: each a :class:`Writer`, or the path of a file for :class:`JsonLines`.
        every: a record of each so many updates; what was skipped for an overflow has one always. Between them nothing
            is computed and the device not waited for.
        rank: this process's; of several one alone writes, the first. None: as the launcher says, else 0.
        every_rank: each rank writes, to a file or folder of its own, named by the rank.

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
            report: what ``step`` returned; None, where there has been none yet, is nothing.
            values: numbers, or what ``float()`` takes (tensors and arrays of one element), and words.

        Raises:
            ConfigError: a value is named ``step``.
            TypeError, ValueError: a value is no number.
            OSError: the record cannot be written; none of it was.
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
        """A record of one's own making, for loops without a :class:`StepReport`."""
        for writer in self._writers:
            writer.write(step, record)

    def close(self) -> None:
        """End all writers; further records go nowhere."""
        while self._writers:
            self._writers.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def numbers(report: StepReport) -> dict[str, Value]:
    """A report's record: ``lr`` (the first parameter group's; ``lr_1`` and so on of those with another), ``grad_norm``,
    ``clip_coefficient``, ``loss_scale`` and ``skipped``."""
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
"""Of this process, which a lock does not keep apart: who writes to a file (device and number), the last to begin."""


class JsonLines(Writer):
    """A file of one JSON object a line, ``{"step": 17, "loss": 2.1, ...}``; inf and NaN, which JSON lacks, are null.

    A line is in the system's hands, whole, when ``write`` returns: a killed process loses none. An existing file goes
    on. Lines of steps that are made again after a checkpoint, and what is no line at its end, are moved to
    ``NAME.superseded.jsonl`` beside it.

    Args:
        path: its folder is made. With a file a rank, ``steps.jsonl`` becomes ``steps.rank0.jsonl`` and so on.
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
        weakref.finalize(self, file.close)  # a log that nobody ends has lost nothing

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
        """Move lines from this step on, and those that are none, out of the file."""
        assert self._file is not None
        self._file.seek(0)
        reader, keep = BufferedReader(self._file), 0  # of the same file: closing another would give up the lock
        for line in reader:
            if not line.endswith(b"\n") or _step_of(line) >= step:
                break
            keep += len(line)
        reader.seek(keep)
        rest = reader.read()
        reader.detach()
        if rest:
            with open(self.path.with_name(f"{self.path.stem}.superseded{self.path.suffix}"), "ab") as aside:
                aside.write(rest if rest.endswith(b"\n") else rest + b"\n")
                aside.flush()
                os.fsync(aside.fileno())
            os.ftruncate(self._file.fileno(), keep)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _append(file: FileIO, record: bytes) -> None:
    """Write all of a record to an unbuffered file, or, where the system does not take it, nothing."""
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
    """-inf, before all others, of a line that has none."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, LookupError):
        return -math.inf
    return step if isinstance(step, int) else -math.inf


class TensorBoard(Writer):
    """Event files that TensorBoard shows (``tensorboard --logdir FOLDER``), written by tensorboardX, in a thread of its
    own: a process that is killed loses the last seconds.

    A file a run; one that goes on from a checkpoint says from which step on others do not count.

    Args:
        folder: a run's; it is made. With a file a rank, ``rank0`` and so on in it.
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
            own = f".{time.time_ns()}.{os.getpid()}"  # names have whole seconds, and are read in their order
            self._file = self._new_file(str(self.folder), purge_step=step, filename_suffix=own, flush_secs=_SECONDS)
        self._last = step
        for name, value in record.items():
            if isinstance(value, float | int):
                self._file.add_scalar(name, value, step)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class ProgressBar(Writer):
    """A bar on the terminal, by tqdm; a line now and then where the output is a file.

    Args:
        total: updates of the whole run; one that goes on from a checkpoint begins where that was.
        show: what is shown of a record beside the bar, where it has it.
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
