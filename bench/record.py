"""Records of measurements, with machine and commit, and the file that they are appended to.

A part's record, one JSON line a run:

    {"bench": PART, "title": str, "config": {...}, "versions": {...},
     "rows": [row(...)], "ratios": [ratio(...)], "missing": [missing(...)], "notes": [str]}
"""

import argparse
import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from offload_core.support.processors import available_cpus


def processor() -> str:
    """The processor's own name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def machine() -> str:
    """The processor's own name, and how many this process may use."""
    return f"{processor()}, {available_cpus()} processors, {platform.system()} {platform.release()}"


def hardware() -> str:
    """Return the machine as a part of a file's name: ``xeon-2core``, without the maker and the frequency."""
    known = re.sub(r"\((r|tm)\)|@.*|\b(\d+-core|intel|amd|processor|cpu)\b", " ", processor().lower())
    return f"{'-'.join(re.findall(r'[a-z0-9]+', known))}-{available_cpus()}core"


def memory() -> int:
    """Bytes of this machine's memory."""
    return psutil.virtual_memory().total


def commit() -> str:
    """The checkout's commit, marked where files other than results differ from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True)
        return done.stdout.strip()

    known = git("rev-parse", "--short=12", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":/!bench/results")
    return f"{known}-dirty" if known and changed else known or "unknown"


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python and of the installed ones of these packages."""
    known = {"python": platform.python_version()}
    for package in packages:
        try:
            known[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return known


def quantiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """The 20th, 50th and 80th percentile, between neighbours in proportion."""
    p20, p50, p80 = np.quantile(np.asarray(samples, np.float64), (0.2, 0.5, 0.8)).tolist()
    return p20, p50, p80


def row(name: str, metric: str, unit: str, samples: Sequence[float], **extra: Any) -> dict[str, Any]:
    """One contender's measurements of one thing; ``extra`` tells it from others of that name and metric."""
    p20, p50, p80 = quantiles(samples)
    return {
        "name": name,
        "metric": metric,
        "unit": unit,
        "p20": p20,
        "p50": p50,
        "p80": p80,
        "n": len(samples),
        **extra,
    }


def rows(metric: str, unit: str, samples: Mapping[str, Sequence[float]], **extra: Any) -> list[dict[str, Any]]:
    """A :func:`row` of each contender."""
    return [row(name, metric, unit, values, **extra) for name, values in samples.items()]


def ratio(
    name: str,
    top: Sequence[float],
    bottom: Sequence[float],
    *,
    target: float | None = None,
    better: str = "lower",
    note: str = "",
) -> dict[str, Any]:
    """top / bottom, sample by sample in the order they were taken, so that drift cancels.

    ``name`` is what the README prints. ``note`` says why, where the target is missed.
    """
    p20, p50, p80 = quantiles([a / b for a, b in zip(top, bottom, strict=True)])
    known = {"name": name, "p20": p20, "p50": p50, "p80": p80, "target": target, "better": better}
    return {**known, "note": note} if note else known


def missed_by(ratio: Mapping[str, Any]) -> float:
    """Return the distance of the median from the target, divided by the target; 0 if it is met or there is none."""
    if ratio["target"] is None:
        return 0.0
    beyond = ratio["p50"] / ratio["target"] - 1
    return max(beyond if ratio["better"] == "lower" else -beyond, 0.0)


def bound(ratio: Mapping[str, Any]) -> str:
    """The target in words, of a ratio that has one."""
    return f"at {'most' if ratio['better'] == 'lower' else 'least'} {ratio['target']:g}"


def missing(name: str, error: BaseException | str) -> dict[str, str]:
    """A contender that could not run, and the first line of why."""
    words = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return {"name": name, "why": words.strip().partition("\n")[0]}


def module_of(part: str) -> str:
    """Return the module of a part, which runs by ``python -m``."""
    return {"peers": "bench.peers"}.get(part, "bench.gpu" if part.startswith("gpu_") else f"bench.parts.{part}")


def parser(part: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every part: ``--quick`` and ``--json``."""
    known = argparse.ArgumentParser(prog=f"python -m {module_of(part)}", description=description)
    known.add_argument("--quick", action="store_true", help="small sizes and two rounds, to see that it runs")
    known.add_argument("--json", type=Path, metavar="FILE", help="append the record to this file, one JSON line a run")
    return known


def append(path: Path | None, record: dict[str, Any]) -> None:
    """Add a record, with date, machine, memory and commit, to a JSON-lines file; None: nowhere."""
    if path is not None:
        rewrite(path, lines_of(path), record)


def lines_of(path: Path) -> bytes:
    """The lines of a file, each with its end: one whose writer was killed must not take the next one with it."""
    lines = path.read_bytes() if path.exists() else b""
    return lines if lines.endswith(b"\n") else lines + b"\n" * bool(lines)


def rewrite(path: Path, before: bytes, record: dict[str, Any]) -> None:
    """Replace the file's content by these lines and this record, in one step that nothing can cut in two."""
    where = {"machine": machine(), "memory": memory(), "commit": commit()}
    record = {"date": datetime.now(UTC).isoformat(timespec="seconds"), **where, **record}
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    with new.open("wb") as file:
        file.write(before + json.dumps(record).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
