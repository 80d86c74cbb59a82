"""The processor's time of a training step by function, as Linux's ``perf`` samples it, and the page faults.

Contenders run one after another, each alone, on one rank.
"""

import argparse
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from bench import record
from bench.harness.processes import KEEP_FREED_MEMORY, ContenderError, ProcessGroup
from bench.harness.recording import Recording
from bench.harness.working_dtype import working_dtype
from bench.parts.step import MODELS, WARM_UP, start
from bench.parts.torch_contenders import CONTENDERS, DS_2, OURS
from offload_core.support.processors import available_cpus

HERTZ = 199
LEAST = 0.01
"""The least share of a contender's samples; functions with less are not listed."""
_LINE = re.compile(r"\s*([\d.]+)%? *;([^;]*);\s*(?:\[.\] )?([^;]*).*")


@contextmanager
def sampled(group: ProcessGroup, path: Path) -> Iterator[None]:
    """Sample the processes during the body."""
    pids = ",".join(str(pid) for pid in group.pids)
    command = ["perf", "record", "--quiet", "-e", "cpu-clock", "-F", str(HERTZ), "-o", str(path), "-p", pids]
    perf = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    time.sleep(0.5)  # until it has attached
    try:
        yield
    finally:
        perf.send_signal(signal.SIGINT)
        _, errors = perf.communicate()
    if not path.exists() or not path.stat().st_size:
        raise ContenderError(f"perf record: {errors.strip() or 'no samples'}")


def shares(path: Path) -> dict[str, float]:
    """Return the share of all samples, by library and function."""
    command = ["perf", "report", "--stdio", "--no-children", "--sort", "dso,symbol", "-t", ";", "-i", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = {}
    for line in done.stdout.splitlines():
        if match := _LINE.fullmatch(line):
            share, library, function = match.groups()
            function = re.sub(r"(?<=\w)[(<].*", "", function).strip()
            library = re.sub(r" tid \d+", "", library).strip()
            name = f"{library}: {'without a symbol' if function.startswith('0x') else function}"
            found[name] = found.get(name, 0.0) + float(share) / 100
    return found


def measure(name: str, group: ProcessGroup, steps: int, recording: Recording) -> None:
    group.answers()
    group.ask(steps=WARM_UP)
    with tempfile.TemporaryDirectory() as folder:
        samples = Path(folder) / "samples"
        with sampled(group, samples):
            answers = group.ask(steps=steps)
        by_function = shares(samples)
    total = 1e3 * sum(answer["cpu"] for answer in answers) / steps
    rest = 1.0
    for where, share in sorted(by_function.items(), key=lambda pair: -pair[1]):
        if share >= LEAST:
            recording.rows.append(record.row(name, "processor time", "ms/step", [share * total], where=where))
            rest -= share
    recording.rows.append(record.row(name, "processor time", "ms/step", [rest * total], where="elsewhere"))
    faults = sum(answer["faults"] for answer in answers) / steps
    recording.rows.append(record.row(name, "page faults", "thousands/step", [faults / 1e3], where="all"))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = record.parser("profile", __doc__.partition("\n\n")[0])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, metavar="NAME", default=[OURS, DS_2])
    parser.add_argument("--model", choices=MODELS, help="default: 319m; --quick: 34m")
    parser.add_argument("--threads", type=int, default=available_cpus())
    parser.add_argument("--steps", type=int, default=5, help="sampled of each contender (default: 5)")
    args = parser.parse_args(arguments)
    args.model = args.model or ("34m" if args.quick else "319m")
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    settings = {"threads": args.threads, "micro_batch": 2, "context": 64, "gpt": asdict(MODELS[args.model])}
    dtype = working_dtype(args.threads)
    settings["param_dtype"] = dtype.name
    config = {
        "model": args.model,
        "steps": args.steps,
        "samples a second": HERTZ,
        "malloc": KEEP_FREED_MEMORY,
        **settings,
    }
    recording = Recording("profile", "Where the processor's time goes", args.json, config)
    recording.notes += dtype.notes
    for name in args.contenders:
        if shutil.which("perf") is None:
            recording.add_missing(name, ContenderError("perf is not installed (Debian: apt install linux-perf)"))
            continue
        group = start(settings, 1, name)()
        try:
            measure(name, group, args.steps, recording)
        except ContenderError as error:
            recording.add_missing(name, error)
        finally:
            group.close()
        recording.keep()
    for row in recording.rows:
        print(f"{row['name']:24}{row['p50']:10.1f} {row['unit']:16}{row['where'][:90]}")
    return recording.finish()


if __name__ == "__main__":
    sys.exit(main())
