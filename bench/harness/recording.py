"""The record of a part that compares processes, as it grows."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bench import record
from bench.harness.processes import ContenderError


class Recording:
    """Rows, ratios and notes of one part. They are in the file as soon as they are kept, and printed at the part's end.

    Args:
        path: the file; None: none.
    """

    def __init__(self, bench: str, title: str, path: Path | None, config: Mapping[str, Any]) -> None:
        self.bench, self.title, self.config = bench, title, config
        self._path = path
        self._before = b"" if path is None else record.lines_of(path)
        self.versions: dict[str, str] = record.versions()
        self.rows: list[dict[str, Any]] = []
        self.ratios: list[dict[str, Any]] = []
        self.missing: list[dict[str, str]] = []
        self.notes: list[str] = []
        self._misses: list[str] = []
        """Notes on ratios that miss their targets."""

    def add_missing(self, name: str, error: ContenderError) -> None:
        """Record that a contender could not run, and the reason."""
        print(f"{name}: COULD NOT RUN\n{error}")
        self.missing.append(record.missing(name, error.why))

    def add_ratios(self, ratios: Iterable[dict[str, Any]], why: str) -> None:
        """Add ratios, with the note ``why`` for each that misses its target."""
        for ratio in ratios:
            self.ratios.append(ratio)
            if record.missed_by(ratio):
                self._misses.append(f"{ratio['name']}: {ratio['p50']:.2f}, target {record.bound(ratio)}; {why}")

    def clear(self) -> None:
        """Forget rows and ratios: they were of fewer rounds."""
        self.rows, self.ratios, self._misses = [], [], []

    def keep(self) -> None:
        """Write the results so far, so that they remain if the part is ended."""
        rest = record.missing(f"{self.title}, the rest", "the part was ended before it was measured")
        self._write([*self.missing, rest])

    def _write(self, missing: list[dict[str, str]]) -> None:
        if self._path is not None:
            known = {"bench": self.bench, "title": self.title, "config": self.config, "versions": self.versions}
            lists = {"rows": self.rows, "ratios": self.ratios, "missing": missing, "notes": self.notes + self._misses}
            record.rewrite(self._path, self._before, known | lists)

    def finish(self) -> int:
        """Print ratios and notes, write the record, and return the exit status: 1 where one could not run."""
        for ratio in self.ratios:
            target = "" if ratio["target"] is None else f" (target: {record.bound(ratio)})"
            print(f"{ratio['name']}: {ratio['p50']:.2f}, {ratio['p20']:.2f} to {ratio['p80']:.2f}{target}")
        for note in self.notes + self._misses:
            print(note)
        self._write(self.missing)
        return 1 if self.missing else 0
