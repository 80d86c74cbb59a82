"""A round of ``release()`` and ``restore()``, beside one of DeepSpeed's ``offload_states()`` and ``reload_states()``.

Each contender trains the same GPT in a separate process, on the device that torch finds, or on the CPU and the
simulated accelerator of the tests. A round begins after an update, and ends when all parameters are on the device
again; a loss before and after it is the same bit for bit. Bytes are those that crossed in a round. Beside them are
plain copies of as many bytes from and to pinned memory, in the same process.

On the CPU nothing leaves: offload-core's memory stays, and DeepSpeed copies within host memory. On the simulated device
a copy is the host's memcpy after a random delay, and times say little; bytes and allocated memory are exact. DeepSpeed
runs ``gc.collect()`` up to three times in a round, and pins its memory again. Both are in its times, so that a ratio of
rounds is no ratio of copies; the time of one collection in the same process stands beside them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench import record
from bench.harness.processes import ContenderError
from bench.harness.recording import Recording
from bench.markdown import table
from bench.parts.phases_run import CONTENDERS, CPU, DS, DS_OFFLOADED, OURS, SIMULATED, Run
from bench.parts.step import MODELS
from offload_core.commands.model_shapes import GPTS, GPTConfig
from offload_core.support.processors import available_cpus
from offload_core.support.units import count

GPT_OF = {**MODELS, "tiny": GPTS["tiny"], "1.5b": GPTS["gpt2-1.5b"]}
AWAY, BACK, COLLECTING = "away", "back", "a gc.collect() in that process"
_SECONDS = 200
_LOG_LINES = 40
_ROOT = Path(__file__).resolve().parents[2]


def devices() -> list[str]:
    """The accelerator that torch finds, else the CPU and the simulated one."""
    import torch

    known = torch.accelerator.current_accelerator(check_available=True)
    return [CPU, SIMULATED] if known is None else [known.type]


def run(contender: str, settings: dict[str, Any]) -> Run:
    """Run a contender. Raises :class:`ContenderError` with its output if it fails."""
    paths = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "result.json")
        command = [sys.executable, "-m", "bench.parts.phases_run", contender, str(path), json.dumps(settings)]
        try:
            done = subprocess.run(
                command, cwd=folder, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True,
                timeout=_SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise ContenderError(f"no end in {_SECONDS} s") from None
        if done.returncode:
            raise ContenderError("\n".join((done.stdout + done.stderr).splitlines()[-_LOG_LINES:]))
        return Run(**json.loads(path.read_text()))


def rows_of(contender: str, device: str, known: Run) -> Iterable[dict[str, Any]]:
    """The rows of a run: seconds of each way, bytes a parameter, and GB/s beside a plain copy's."""
    extra = {"device": device, "params": known.params}
    ways = [
        (AWAY, known.away, known.to_host, known.plain_to_host),
        (BACK, known.back, known.to_device, known.plain_to_device),
    ]
    for way, taken, n_bytes, copy in ways:
        yield record.row(contender, way, "ms", [1e3 * s for s in taken], **extra)
        if n_bytes is not None:
            yield record.row(contender, f"{way}, crossed", "bytes/parameter", [n_bytes / known.params], **extra)
        if n_bytes and copy:
            for name, times in ((way, taken), (f"{way}, plain copy", copy)):
                yield record.row(contender, name, "GB/s", [n_bytes / s / 1e9 for s in times], **extra)
    yield record.row(contender, COLLECTING, "ms", [1e3 * s for s in known.collecting], **extra)
    if known.held is not None:
        for name, n_bytes in zip(("before", "after"), known.held, strict=True):
            what = f"allocated on the device, {name} it leaves"
            yield record.row(contender, what, "bytes/parameter", [n_bytes / known.params], **extra)


def ratios_of(device: str, name: str, theirs: Run, ours: Run) -> list[dict[str, Any]]:
    """Their times divided by ours: of the way back, and of a round, which has DeepSpeed's collections in it."""
    rounds = [[a + b for a, b in zip(of.away, of.back, strict=True)] for of in (theirs, ours)]
    collecting = f"one gc.collect() there takes {1e3 * statistics.median(theirs.collecting):.0f} ms"
    return [
        record.ratio(f"back, {device}: {name} / {OURS}", theirs.back, ours.back, better="higher"),
        record.ratio(f"a round, {device}: {name} / {OURS}", *rounds, better="higher", note=collecting),
    ]


def line_of(contender: str, device: str, rows: Iterable[dict[str, Any]]) -> list[str]:
    known = {(row["metric"], row["unit"]): row["p50"] for row in rows}

    def cell(metric: str, unit: str, digits: int = 2) -> str:
        value = known.get((metric, unit))
        return "" if value is None else f"{value:.{digits}f}"

    line = [contender, device]
    for way in (AWAY, BACK):
        line += [cell(way, "ms", 1), cell(f"{way}, crossed", "bytes/parameter"), cell(way, "GB/s")]
        line.append(cell(f"{way}, plain copy", "GB/s"))
    return [*line, cell(COLLECTING, "ms", 1), cell("allocated on the device, after it leaves", "bytes/parameter")]


HEAD = [
    "a round of", "device", "away, ms", "bytes/param", "GB/s", "plain", "back, ms", "bytes/param", "GB/s", "plain",
    "gc, ms", "stays, bytes/param",
]  # fmt: skip


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = record.parser("phases", (__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--model", choices=GPT_OF, help="default: 34m; --quick: tiny")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, metavar="NAME", default=[*CONTENDERS])
    parser.add_argument("--devices", nargs="+", metavar="DEVICE", help="default: torch's, else cpu and simulated")
    parser.add_argument("--rounds", type=count, help="default: 5; --quick: 2")
    parser.add_argument("--threads", type=int, default=available_cpus())
    args = parser.parse_args(arguments)
    args.model = args.model or ("tiny" if args.quick else "34m")
    args.rounds = args.rounds or (2 if args.quick else 5)
    args.devices = args.devices or devices()
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    gpt: GPTConfig = GPT_OF[args.model]
    settings = {"gpt": asdict(gpt), "rounds": args.rounds, "threads": args.threads, "context": 32}
    config = {"model": args.model, **settings, "devices": args.devices}
    recording = Recording("phases", "A model leaves the device and comes back", args.json, config)
    lines, peer = [], find_spec("deepspeed") is not None
    for device in args.devices:
        runs: dict[str, Run] = {}
        for contender in args.contenders:
            if contender.startswith(DS.partition(",")[0]) and not peer:
                recording.add_missing(f"{contender}, {device}", ContenderError("ModuleNotFoundError: no deepspeed"))
                continue
            print(f"{contender}, {device}", file=sys.stderr)
            try:
                known = runs[contender] = run(contender, {**settings, "device": device})
            except ContenderError as error:
                recording.add_missing(f"{contender}, {device}", error)
                continue
            rows = list(rows_of(contender, device, known))
            recording.rows += rows
            recording.versions |= known.versions
            lines.append(line_of(contender, device, rows))
            recording.keep()
        for theirs in (DS, DS_OFFLOADED):
            if {OURS, theirs} <= runs.keys():
                recording.ratios += ratios_of(device, theirs, runs[theirs], runs[OURS])
    print(f"{gpt.numel:,} parameters in bf16")
    print(*table(HEAD, lines), "", sep="\n")
    return recording.finish()


if __name__ == "__main__":
    sys.exit(main())
