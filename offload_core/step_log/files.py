"""Files of records: one JSON object a line, or a table of comma-separated values."""

import csv
import fcntl
import io
import json
import math
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

from ..errors import StateError
from .writer import Value, Writer

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
        self.path = _of_rank(self.path, rank)
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
            with open(_superseded(self.path), "ab") as superseded:
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


class Csv(Writer):
    """A table of comma-separated values: a row for each step, a column for each name, ``step`` first.

    A name that appears later becomes a new column: the file is then written anew, with empty cells in earlier rows, and
    replaces the old one as a whole. When ``write`` returns, the system has the whole row. Rows of steps that are
    repeated after a checkpoint are moved to ``NAME.superseded.csv`` beside the file. One process writes to a file.

    Args:
        path: the file; its folder is made. With ``every_rank``, ``steps.csv`` becomes ``steps.rank0.csv`` and so on.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._columns: list[str] = []
        self._last: int | None = None

    def open(self, rank: int | None) -> None:
        self.path = _of_rank(self.path, rank)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()

    def write(self, step: int, record: Mapping[str, Value]) -> None:
        row = {"step": step, **{name: value for name, value in record.items() if name != "step"}}
        if self._last is None or step < self._last:
            rows = _read_rows(self.path)
            keep = next((i for i, each in enumerate(rows) if _step_of_row(each) >= step), len(rows))
            if keep < len(rows):
                old = _superseded(self.path)
                _write_rows(old, [*(_read_rows(old) if old.exists() else ()), *rows[keep:]])
            self._columns = _write_rows(self.path, rows[:keep])
        self._last = step
        if row.keys() <= {*self._columns}:
            with FileIO(self.path, "a") as file:
                _append(file, _table([row], self._columns))
        else:
            self._columns = _write_rows(self.path, [*_read_rows(self.path), row])


def _of_rank(path: Path, rank: int | None) -> Path:
    return path if rank is None else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def _superseded(path: Path) -> Path:
    return path.with_name(f"{path.stem}.superseded{path.suffix}")


def _read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return [{name: value or "" for name, value in row.items() if name is not None} for row in csv.DictReader(file)]


def _write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Replace the file by these rows, and return its columns."""
    columns = [*dict.fromkeys(name for row in rows for name in row)]
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(_table([dict(zip(columns, columns, strict=True)), *rows] if columns else [], columns))
    temporary.replace(path)
    return columns


def _table(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> bytes:
    text = io.StringIO(newline="")
    csv.DictWriter(text, columns, restval="", lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _step_of_row(row: Mapping[str, str]) -> float:
    """The step of a row; inf, after all others, if it is incomplete, as a power failure may leave it."""
    try:
        return int(row["step"])
    except (LookupError, ValueError):
        return math.inf
