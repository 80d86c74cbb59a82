"""What a measurement is recorded with, and where."""

import json
import platform
import subprocess
from pathlib import Path
from typing import Any

from offload_core.cpus import available_cpus


def machine() -> str:
    """The processor's own name, and how many this process may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.machine()
    return f"{name}, {available_cpus()} processors, {platform.system()} {platform.release()}"


def commit() -> str:
    """The checkout's commit, marked where files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def append(path: Path | None, record: dict[str, Any]) -> None:
    """Add a record, with the machine and the commit, to a JSON-lines file; None: nowhere."""
    if path is not None:
        record = {"machine": machine(), "commit": commit(), **record}
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")
