"""``python -m bench.gpu OUT_DIR [a] [b] [c] [d] [e] [f] [g] [h]``."""

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.gpu import __doc__ as about
from bench.gpu.parts import PARTS
from bench.gpu.results import Results
from bench.gpu.session import Session, TimeIsUpError
from bench.gpu.sizes import FULL, TINY
from offload_core.support.units import count

MOST_SECONDS = 540


def accelerator(folder: Path) -> dict[str, Any]:
    """Return the accelerator that torch sees, in words. Torch is asked once, in a separate process."""
    path = folder / "accelerator.json"
    if not path.exists():
        asked = subprocess.run([sys.executable, "-m", "bench.gpu.accelerator"], capture_output=True, text=True)
        if asked.returncode:
            sys.exit(asked.stderr.strip() or "bench.gpu.accelerator ended without a word")
        path.write_text(asked.stdout)
    known: dict[str, Any] = json.loads(path.read_text())
    return known


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="OUT_DIR", help="of the results; with results it goes on there")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument(
        "--seconds", type=count, default=MOST_SECONDS, help=f"of each part at most (default: {MOST_SECONDS})"
    )
    parser.add_argument("--again", action="store_true", help="measure what is done, too")
    parser.add_argument("--only", default="", metavar="WORDS", help="measure nothing without these in its name")
    parser.add_argument("--rehearse", action="store_true", help="tiny models, to see that everything runs")
    args = parser.parse_intermixed_args(arguments)
    for part in args.parts:
        if part not in PARTS:
            parser.error(f"part {part!r}: expected one of {', '.join(PARTS)}")
    args.folder.mkdir(parents=True, exist_ok=True)
    results, status = Results(args.folder / "results.jsonl"), 0
    for part in args.parts or PARTS:
        deadline = time.monotonic() + args.seconds
        bench, title, run = PARTS[part]
        session = Session(
            bench, title, args.folder, results, TINY if args.rehearse else FULL, accelerator(args.folder),
            args.rehearse, deadline, args.again, args.only,
        )  # fmt: skip
        try:
            run(session)
        except TimeIsUpError:
            print(f"({part}): the time is up; another call with {args.folder} goes on from here", flush=True)
            status = 1
        if session.wrong:
            print(f"({part}): FAILED: {'; '.join(session.wrong)}", flush=True)
            status = 1
    return status


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # the running process ends, too
    sys.exit(main())
