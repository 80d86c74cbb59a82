"""Host memory at the peak of ``from_pretrained``, ``wrap``, ``save_checkpoint`` and ``export_safetensors`` of a Llama.

The target is the memory that stays (parameters and states, as planned) and one file of the model. The model is bf16, in
several safetensors files. Each way to load it is a separate process on one rank of the CPU, whose device memory is the
host's, and counts. A process's memory is looked at from outside, every few milliseconds: its own pages without those of
mapped files, which the kernel takes back where memory is short, and beside it all resident pages (``VmHWM``). Libraries
do not count.
"""

import argparse
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from bench import record
from bench.harness.processes import ContenderError
from bench.harness.recording import Recording
from bench.parts.loading_run import FIELDS, PHASES
from offload_core.support.processors import available_cpus
from offload_core.support.units import count

MODELS: dict[str, dict[str, Any]] = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 14, "num_attention_heads": 16},
    "500m": {"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 12, "num_attention_heads": 12},
    "tiny": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 4},
}
VOCABULARY = {"1b": 32768, "500m": 32768, "tiny": 4096}
OWN, ALL = "own pages", "resident pages"
_EVERY = 0.002
"""Seconds between two looks."""
_LOG_LINES = 20
_ROOT = Path(__file__).resolve().parents[2]


class Peak(NamedTuple):
    """Bytes at the peak of one phase, beyond the libraries'."""

    own: int
    resident: int
    before: int
    """Own pages at its begin."""
    after: int


def status(pid: int) -> dict[str, int]:
    """Bytes that the kernel reports of a process, by field; nothing: it has ended."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {line.partition(":")[0]: 1024 * int(line.split()[1]) for line in lines if line.endswith(" kB")}


def own(fields: dict[str, int]) -> int:
    """Bytes of pages that no file can give back."""
    return fields["RssAnon"] + fields["RssShmem"]


def settings_of(model: str, folder: Path, file_bytes: int, threads: int) -> dict[str, Any]:
    shapes = {
        **MODELS[model],
        "vocab_size": VOCABULARY[model],
        "num_key_value_heads": MODELS[model]["num_attention_heads"],
    }
    return {"folder": str(folder), "model": shapes, "file_bytes": file_bytes, "threads": threads}


class Child:
    """A process of ``loading_run``, which waits for a line before each phase and after it."""

    def __init__(self, variant: str, settings: dict[str, Any]) -> None:
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.parts.loading_run", variant, json.dumps(settings)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, cwd=_ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    def go_on(self) -> None:
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)

    def answered(self, seconds: float) -> bool:
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], seconds)[0])

    def answer(self) -> dict[str, Any]:
        """Return the next answer. Raises :class:`ContenderError` with the end of the log where the process ended."""
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            status = self._process.wait()
            self._log.seek(0)
            lines = self._log.read().splitlines()[-_LOG_LINES:]
            raise ContenderError("\n".join([*lines, f"SystemExit: {status}"] if status < 0 else lines or ["no word"]))
        known: dict[str, Any] = json.loads(line)
        return known

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()


def measure(child: Child) -> tuple[dict[str, Peak], int]:
    """Return the peak of each phase, and the planned bytes."""
    peaks, planned, libraries = {}, 0, dict[str, int]()
    for phase in PHASES:
        child.answer()
        Path(f"/proc/{child.pid}/clear_refs").write_text("5")  # forget the peak
        now = status(child.pid)
        libraries = libraries or now
        before, highest = own(now), own(now)
        child.go_on()
        while not child.answered(_EVERY):
            highest = max(highest, own(status(child.pid)))
        planned = child.answer()["planned"] or planned
        now = status(child.pid)
        base = own(libraries)
        peaks[phase] = Peak(
            max(highest, own(now)) - base, now["VmHWM"] - libraries["VmRSS"], before - base, own(now) - base
        )
        child.go_on()
    return peaks, planned


def written(settings: dict[str, Any]) -> tuple[int, int]:
    """Write the model in a process of its own; return its parameters, and the bytes of its largest file."""
    child = Child("write", settings)
    try:
        numel = child.answer()["numel"]
    finally:
        child.close()
    files = Path(settings["folder"], "model").glob("*.safetensors")
    return numel, max(path.stat().st_size for path in files)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = record.parser("loading", (__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--model", choices=MODELS, help="default: 1b; --quick: tiny")
    parser.add_argument("--file-bytes", type=count, help="of each file of the model (default: 500 MB; tiny: 5 MB)")
    parser.add_argument("--variants", nargs="+", choices=FIELDS, metavar="NAME", default=[*FIELDS])
    parser.add_argument("--folder", type=Path, help="for the files: 18 bytes a parameter (default: a temporary one)")
    parser.add_argument("--threads", type=int, default=available_cpus())
    args = parser.parse_args(arguments)
    args.model = args.model or ("tiny" if args.quick else "1b")
    args.file_bytes = args.file_bytes or (5 * 10**6 if args.model == "tiny" else 500 * 10**6)
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        settings = settings_of(args.model, Path(folder), args.file_bytes, args.threads)
        numel, file_bytes = written(settings)
        config = {"model": args.model, "shapes": settings["model"], "params": numel, "file_bytes": file_bytes}
        recording = Recording("loading", "Host memory of loading and saving", args.json, config)
        recording.versions = record.versions("torch", "transformers", "safetensors")
        print(f"{numel:,} parameters in bf16; the largest file has {file_bytes / 1e6:.0f} MB")
        for variant in args.variants:
            child = Child(variant, settings)
            try:
                peaks, planned = measure(child)
            except ContenderError as error:
                recording.add_missing(variant, error)
                continue
            finally:
                child.close()
                for name in ("saved", "exported"):
                    shutil.rmtree(Path(folder, name), ignore_errors=True)
            show(variant, peaks, planned, file_bytes)
            recording.rows.append(record.row(variant, "planned", "GB", [planned / 1e9]))
            for phase, peak in peaks.items():
                for metric, n_bytes in ((OWN, peak.own), (ALL, peak.resident)):
                    recording.rows.append(record.row(variant, metric, "GB", [n_bytes / 1e9], phase=phase))
            highest = max(peak.own for peak in peaks.values())
            name = f"peak of host memory / planned and one file: {variant}"
            recording.add_ratios(
                [record.ratio(name, [highest], [planned + file_bytes], target=1.0)],
                f"planned {planned / 1e9:.2f} GB, a file {file_bytes / 1e9:.2f} GB",
            )
            recording.keep()
    return recording.finish()


def show(variant: str, peaks: dict[str, Peak], planned: int, file_bytes: int) -> None:
    print(f"{variant}: planned {planned / 1e9:.2f} GB, with a file {(planned + file_bytes) / 1e9:.2f} GB")
    for phase, peak in peaks.items():
        words = f"{peak.own / 1e9:.2f} GB own, {peak.resident / 1e9:.2f} GB resident"
        print(f"  {phase:20}{words}; own before {peak.before / 1e9:.2f}, after {peak.after / 1e9:.2f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
