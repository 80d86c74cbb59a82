"""The results file: a line for each measurement. If several have one name, the last counts."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench import record

Record = dict[str, Any]
TRAINED, ON_DEVICE, ON_HOST, FAILED = "trained", "device memory", "host memory", "failed"
"""The outcome for a model: it trained, did not fit one of the memories, or failed."""
DOES_NOT_FIT = (ON_DEVICE, ON_HOST)


def lines(path: Path) -> list[Record]:
    """Return the records of a file, without lines that were cut off with the process that wrote them."""
    known = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            known.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return known


def joined(records: Iterable[Record]) -> dict[str, Record]:
    """Return the measurements of each part as one record, with their commits. If several have one name, the last
    counts."""
    last = {(each["bench"], each["measurement"]): each for each in records}
    parts: dict[str, Record] = {}
    for (part, _), each in last.items():
        lists = {key: [] for key in ("rows", "missing", "notes")}
        whole = parts.setdefault(part, {**each, **lists, "versions": {}, "config": {}})
        for key in lists:
            whole[key] = [*whole[key], *(one for one in each[key] if one not in whole[key])]
        whole["commits"] = list(dict.fromkeys([*whole.get("commits", ()), each["commit"]]))
        if "trial" in each:
            whole["trials"] = [*whole.get("trials", ()), {**each["trial"], "outcome": each["outcome"]}]
        for key in ("versions", "config"):
            whole[key] = whole[key] | each[key]
    return parts


class Results:
    """The file of one folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known = {(each["bench"], each["measurement"]): each for each in lines(path)}

    def done(self, part: str, measurement: str) -> Record | None:
        """Return the measurement, unless it failed. A library that is not installed is no failure."""
        known = self._known.get((part, measurement))
        return None if known is None or failed(known) else known

    def add(self, part: str, measurement: str, **fields: Any) -> Record:
        """Write a measurement to the disk, and return its record."""
        known = {"bench": part, "measurement": measurement, "config": {}, "versions": {}, "rows": [], "ratios": []}
        known |= {"missing": [], "notes": [], **fields}
        record.append(self.path, known)
        self._known[part, measurement] = known
        return known


def failed(known: Record) -> bool:
    return any(not is_absent(each["why"]) for each in known["missing"])


def is_absent(why: str) -> bool:
    """True if these are the words of an error for a library that is not installed."""
    return why.startswith(("ModuleNotFoundError: ", "ImportError: "))
