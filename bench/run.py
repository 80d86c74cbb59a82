"""``make bench``: every part in a separate process, their records in one file, then the report.

A part that fails or outlives its time is reported, and the rest go on.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

from bench import report
from bench.parts import ON_REQUEST, PARTS
from bench.record import append, commit, hardware, missing, module_of

_PATIENCE = 10.0
_LAST_LINES = 20


def free_path(folder: Path, parts: Sequence[str], quick: bool) -> Path:
    """Return the path of a new file, named after the parts (none: all), the hardware, the date and the commit."""
    stem = f"{'+'.join(parts) or 'all'}-{hardware()}-{datetime.now(UTC):%Y-%m-%d}-{commit()[:7]}"
    stem += "-quick" if quick else ""
    later = (folder / f"{stem}{'' if i == 1 else f'-{i}'}.jsonl" for i in range(1, 1000))
    return next(path for path in later if not path.exists())


def size(path: Path) -> int:
    """Return the bytes of a file; 0 if it does not exist."""
    return path.stat().st_size if path.exists() else 0


def run(part: str, path: Path, quick: bool, seconds: float) -> str:
    """Run a part, and return the reason why it failed, in its own last words; empty: it did not fail."""
    module = module_of(part)
    if find_spec(module) is None:
        return f"there is no {module}"
    command = [sys.executable, "-m", module, "--json", str(path), *(["--quick"] if quick else [])]
    # In a new session, so that its children end with it. Contenders have their own sessions, and end when nobody asks.
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        _, errors = process.communicate(timeout=seconds)
    except BaseException as error:  # an interrupt too: the terminal tells this session only
        with suppress(ProcessLookupError):  # all have ended
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE)
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            return f"took longer than its {seconds:.0f} s"
        raise
    lines = errors.strip().splitlines()
    if process.returncode:
        print(*lines[-_LAST_LINES:], sep="\n", file=sys.stderr)
        return f"exit status {process.returncode}: {lines[-1] if lines else 'without a word'}"
    return ""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.run", description="Runs the benchmarks and reports.")
    known = PARTS | ON_REQUEST
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join(known)} (default: all but {', '.join(ON_REQUEST)})"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes and two rounds, to see that all runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append to it (default: a new file)")
    args = parser.parse_args(arguments)
    for part in args.parts:
        if part not in known:
            parser.error(f"part {part!r}: expected one of {', '.join(known)}")
    path = args.json or free_path(report.RESULTS, args.parts, args.quick)
    failed = []
    for part in args.parts or PARTS:
        print(f"== {part}, at most {known[part]} s", flush=True)
        start, before = time.monotonic(), size(path)
        why = run(part, path, args.quick, known[part])
        if why:
            failed.append(part)
            print(f"{part}: FAILED: {why}", flush=True)
        if why and size(path) == before:  # else it has printed itself what could not run
            record = {"bench": part, "title": part, "config": {}, "versions": {}, "rows": [], "ratios": []}
            append(path, {**record, "missing": [missing(part, why)], "notes": []})
        print(f"== {part}: {time.monotonic() - start:.0f} s", flush=True)
    report.main([str(path)])
    return 1 if failed else 0


if __name__ == "__main__":
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda number, _: sys.exit(128 + number))  # as an interrupt: the part ends too
    sys.exit(main())
