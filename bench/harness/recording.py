"""The record of a part that compares processes, as it grows."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bench import record
from bench.harness.processes import ContenderError


class Recording:
    """Rows, ratios and notes of one part, printed and written at its end."""

    def __init__(self, bench: str, title: str) -> None:
        self.bench, self.title = bench, title
        self.versions: dict[str, str] = record.versions()
        self.rows: list[dict[str, Any]] = []
        self.ratios: list[dict[str, Any]] = []
        self.missing: list[dict[str, str]] = []
        self.notes: list[str] = []

    def add_missing(self, name: str, error: ContenderError) -> None:
        """Say that one could not run, and why."""
        print(f"{name}: COULD NOT RUN\n{error}")
        self.missing.append(record.missing(name, error.why))

    def add_ratios(self, ratios: Iterable[dict[str, Any]], why: str) -> None:
        """Add them; ``why`` is noted of one that misses its target."""
        for ratio in ratios:
            self.ratios.append(ratio)
            if record.missed_by(ratio):
                self.notes.append(f"{ratio['name']}: {ratio['p50']:.2f}, target {record.bound(ratio)}; {why}")

    def finish(self, path: Path | None, config: Mapping[str, Any]) -> int:
        """Print ratios and notes, write the record, and return the exit status: 1 where one could not run."""
        for ratio in self.ratios:
            target = "" if ratio["target"] is None else f" (target: {record.bound(ratio)})"
            print(f"{ratio['name']}: {ratio['p50']:.2f}, {ratio['p20']:.2f} to {ratio['p80']:.2f}{target}")
        for note in self.notes:
            print(note)
        known = {"bench": self.bench, "title": self.title, "config": config, "versions": self.versions}
        lists = {"rows": self.rows, "ratios": self.ratios, "missing": self.missing, "notes": self.notes}
        record.append(path, known | lists)
        return 1 if self.missing else 0
