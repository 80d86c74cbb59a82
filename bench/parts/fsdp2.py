"""Training under FSDP2 on several gloo ranks: whole steps with its own CPU offload, without offload, and with
offload-core, with clipping and without. And the time to resume: AdamW's states loaded by torch.distributed.checkpoint,
torch's and ours, and by our own checkpoint.

The contenders with clipping run together, and those without do. Processor times stand beside the times: other programs
change them less. Bytes are those of one rank between backward and step. On the CPU the device is the CPU, where
gradients stay until the step, as an engine has no reason to copy them; with ``--device`` they are measured on one.

Resumes take turns, each in new processes, with files that were dropped from the page cache. A load whose parameters and
states have other sums of bits than were saved does not count.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from bench import record
from bench.harness.contenders import Result, measure_all, medians, show
from bench.harness.processes import KEEP_FREED_MEMORY, ContenderError, ProcessGroup
from bench.harness.recording import Recording
from bench.harness.working_dtype import WorkingDtype, working_dtype
from bench.parts.checkpoint import drop
from bench.parts.fsdp2_run import CHECKPOINT, DCP_OURS, DCP_TORCH
from bench.parts.step import MODELS, start
from bench.parts.torch_contenders import (
    FSDP2,
    FSDP2_ALONE,
    FSDP2_ALONE_UNCLIPPED,
    FSDP2_ON_DEVICE,
    FSDP2_ON_DEVICE_UNCLIPPED,
    FSDP2_OURS,
    FSDP2_OURS_NARROW,
    FSDP2_OURS_NARROW_UNCLIPPED,
    FSDP2_OURS_UNCLIPPED,
    FSDP2_UNCLIPPED,
)
from offload_core.commands.model_shapes import gpt_of
from offload_core.support.units import count


class Experiment(NamedTuple):
    """Contenders that run together."""

    ours: tuple[str, ...]
    offload: str
    """FSDP2 with its own offload, which the target compares with."""
    on_device: str
    """FSDP2 without offload."""


EXPERIMENTS = (
    Experiment((FSDP2_OURS, FSDP2_ALONE, FSDP2_OURS_NARROW), FSDP2, FSDP2_ON_DEVICE),
    Experiment(
        (FSDP2_OURS_UNCLIPPED, FSDP2_ALONE_UNCLIPPED, FSDP2_OURS_NARROW_UNCLIPPED),
        FSDP2_UNCLIPPED,
        FSDP2_ON_DEVICE_UNCLIPPED,
    ),
)
"""With clipping, and without."""
TARGET, RANKS = 1.3, 2
"""The target for FSDP2 with CPUOffloadPolicy, and its number of ranks."""
COUNTS = {"repetitions": 2, "rounds": 3, "steps": 2}
QUICK_COUNTS = {"repetitions": 1, "rounds": 2, "steps": 1}
WARM_UP = 1
RESUMED = (DCP_OURS, CHECKPOINT, DCP_TORCH)
SAVED_BY, LOADED_BY = 4, 2
"""Ranks that save, and ranks that load."""
SAVED_BYTES, MOST_BYTES = 12, 16
"""Bytes a parameter of a checkpoint (the parameter and two states in fp32), and of a resume's memory, in which torch
makes gradients of zeros for the states' first step."""
BESIDE = 3 * 2**30
"""Bytes of memory of a resume's processes beside those."""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = record.parser("fsdp2", (__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=("steps", "resume"), default=("steps", "resume"))
    parser.add_argument("--ranks", type=count, default=RANKS, help=f"of the steps (default: {RANKS})")
    parser.add_argument("--threads", type=count, default=1, help="of each rank (default: 1)")
    parser.add_argument("--device", default="cpu", help="of the steps; one rank a device (default: cpu)")
    parser.add_argument("--model", choices=MODELS, default="34m", help="of the steps (default: 34m)")
    parser.add_argument("--micro-batch", type=count, default=2)
    parser.add_argument("--context", type=count, default=64)
    for name, what in (
        ("repetitions", "each with new processes"),
        ("rounds", "of each repetition"),
        ("steps", "counted in each round"),
    ):
        parser.add_argument(f"--{name}", type=count, help=f"{what} (default: {COUNTS[name]})")
    parser.add_argument(
        "--numel",
        type=count,
        help=f"parameters of the resume (default: 1 B, which take {SAVED_BYTES} GB of memory and {len(RESUMED)} times "
        f"{SAVED_BYTES} GB of disk, and with torch's AdamW {MOST_BYTES} GB of memory; --quick: 20 M)",
    )
    parser.add_argument("--resumes", type=count, help="of each checkpoint (default: 3; --quick: 2)")
    parser.add_argument("--folder", type=Path, help="where checkpoints go (default: a temporary folder)")
    args = parser.parse_args(arguments)
    for name, known in (QUICK_COUNTS if args.quick else COUNTS).items():
        setattr(args, name, getattr(args, name) or known)
    args.numel = args.numel or (2 * 10**7 if args.quick else 10**9)
    args.resumes = args.resumes or (2 if args.quick else 3)
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    named = ("ranks", "threads", "device", "model", "micro_batch", "context", "repetitions", "rounds", "steps")
    config: dict[str, Any] = {name: getattr(args, name) for name in named} | {"warm_up": WARM_UP}
    config |= {"parameters of the resume": args.numel, "resumes": args.resumes, "malloc": KEEP_FREED_MEMORY}
    dtype = None
    if "steps" in args.only:
        dtype = working_dtype(args.threads) if args.device == "cpu" else WorkingDtype("bfloat16", 1.0)
    config |= {"param_dtype": dtype.name} if dtype else {}
    recording = Recording("fsdp2", "Training under FSDP2", args.json, config)
    recording.versions |= record.versions("torch")
    if dtype is not None:
        measure_steps(args, dtype, recording)
    if "resume" in args.only:
        measure_resumes(args, recording)
    return recording.finish()


# --- whole steps -------------------------------------------------------------------------------------


def measure_steps(args: argparse.Namespace, dtype: WorkingDtype, recording: Recording) -> None:
    gpt = MODELS[args.model]
    recording.notes += dtype.notes
    settings = {name: getattr(args, name) for name in ("threads", "device", "micro_batch", "context")}
    settings |= {"gpt": asdict(gpt), "param_dtype": dtype.name}
    measured: list[dict[str, Result]] = []
    extra = {"params": gpt.numel, "ranks": args.ranks, "threads": args.threads}
    targets = not dtype.notes and args.device == "cpu" and args.ranks == RANKS

    def keep(by_workload: Mapping[str, list[Result]]) -> None:
        measured[-1] = {name: result for name, [result] in by_workload.items()}
        recording.clear()
        for results in measured:
            for name, result in results.items():
                recording.rows += result.rows(name, **extra)
            recording.add_ratios(ratios_of(results, gpt.numel, args.ranks, targets), medians(results))
        recording.keep()

    for ours, *others in EXPERIMENTS:
        groups = {name: start(settings, args.ranks, name) for name in (*ours, *others)}
        counts = {name: getattr(args, name) for name in COUNTS}
        measured.append({})
        by_workload, failures, versions = measure_all(groups, warm_up=WARM_UP, each_round=keep, **counts)
        recording.versions |= versions
        for name, error in failures.items():
            recording.add_missing(name, error)
        keep(by_workload)
        words = f"{args.ranks} ranks of {args.threads} threads on {args.device}, {args.micro_batch} x {args.context}"
        print(f"{gpt.numel:,} parameters in {dtype.words}, {words} tokens each, {counts}")
        show(measured[-1])


def ratios_of(results: Mapping[str, Result], numel: int, ranks: int, targets: bool) -> Iterator[dict[str, Any]]:
    """Yield the ratios of the other steps to ours, and the largest that any optimizer over FSDP2 could reach: its own
    forward and backward, without offload, take the rest of the step."""
    where = f"{numel / 1e6:.0f} M, {ranks} ranks"
    for ours, offload, on_device in EXPERIMENTS:
        totals = {name: results[name].samples("total") for name in (*ours, offload, on_device) if name in results}
        note = ""
        if {offload, on_device} <= totals.keys():
            name = f"{where}, at most possible: {offload} / forward and backward of {on_device}"
            least = results[on_device].samples("forward", "backward")
            most = record.ratio(name, totals[offload], least, better="higher")
            note = f"an optimizer that takes no time would give {most['p50']:.2f}"
            yield most
        for mine in ours:
            for other in (offload, on_device):
                if {mine, other} <= totals.keys():
                    target = TARGET if targets and other == offload else None
                    name, sides = f"{where}: {other} / {mine}", (totals[other], totals[mine])
                    yield record.ratio(name, *sides, target=target, better="higher", note=note if target else "")
                    both = (results[side].processor_times for side in (other, mine))
                    yield record.ratio(f"{where}, processor time: {other} / {mine}", *both, better="higher")


# --- resumes -----------------------------------------------------------------------------------------


def measure_resumes(args: argparse.Namespace, recording: Recording) -> None:
    gpt = gpt_of(args.numel)
    folder = args.folder or Path(tempfile.gettempdir())
    wanted = {
        "memory": (MOST_BYTES * gpt.numel + BESIDE, psutil.virtual_memory().available),
        f"disk in {folder}": (len(RESUMED) * SAVED_BYTES * gpt.numel + 2**30, shutil.disk_usage(folder).free),
    }
    for what, (needed, free) in wanted.items():
        if free < needed:
            why = f"{needed / 1e9:.0f} GB of {what} are needed, and {free / 1e9:.0f} GB are free: a lower --numel"
            recording.missing.append(record.missing("resume", why))
            print(f"resume: COULD NOT RUN: {why}")
            return
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        Resumes(args, recording, gpt.numel, asdict(gpt), Path(name)).measure()


class Resumes:
    """Checkpoints of the same model by each contender, and loads of them in turn."""

    def __init__(
        self, args: argparse.Namespace, recording: Recording, numel: int, gpt: dict[str, Any], folder: Path
    ) -> None:
        self.recording, self.numel, self.resumes = recording, numel, args.resumes
        self._settings = {"threads": args.threads, "gpt": gpt}
        self._folder = folder
        self._sums: dict[str, list[int]] = {}
        """The sums of the bits of parameters and states, as they were saved."""

    def _start(self, name: str, ranks: int) -> ProcessGroup:
        settings = self._settings | {"folder": str(self._folder / name)}
        return ProcessGroup(
            "bench.parts.fsdp2_run",
            [name, json.dumps(settings)],
            library="frontends.torch",
            ranks=ranks,
            threads=self._settings["threads"],
            malloc={},
        )

    def _ask(self, name: str, ranks: int, act: str) -> dict[str, float]:
        """Have new processes act once; return the longest seconds of each phase among the ranks, and their peak."""
        group = self._start(name, ranks)
        try:
            group.answers()
            group.ask(act="build")
            group.forget_peak()
            answers = group.ask(act=act)
            taken = {phase: max(rank["seconds"][phase] for rank in answers) for phase in answers[0]["seconds"]}
            taken["total"] = max(sum(rank["seconds"].values()) for rank in answers)
            taken["peak"] = ranks * group.peak()
        finally:
            group.close()
        sums = answers[0]["sums"]
        if self._sums.setdefault(name, sums) != sums:
            raise ContenderError(f"ValueError: {name}: loaded other bits than were saved: {sums}, {self._sums[name]}")
        return taken

    def measure(self) -> None:
        able = []
        for name in RESUMED:
            try:
                saved = self._ask(name, SAVED_BY, "save")
            except ContenderError as error:
                self.recording.add_missing(f"resume, {name}", error)
            else:
                able.append(name)
                self._add(name, "save", [saved])
        loads: dict[str, list[dict[str, float]]] = {name: [] for name in able}
        order = random.Random(0)
        for _ in range(self.resumes):
            for name in order.sample(able, len(able)):
                drop(*(path for path in (self._folder / name).rglob("*") if path.is_file()))
                try:
                    loads[name].append(self._ask(name, LOADED_BY, "load"))
                except ContenderError as error:
                    self.recording.add_missing(f"resume, {name}", error)
                    able.remove(name)
                    del loads[name]
        for name in able:
            self._add(name, "resume", loads[name])
        totals = {name: [load["total"] for load in loads[name]] for name in able}
        self.recording.add_ratios(ratios_of_resumes(totals, self.numel), "")

    def _add(self, name: str, act: str, taken: list[dict[str, float]]) -> None:
        """Record seconds of each phase, and the memory of all ranks."""
        extra = {"params": self.numel, "ranks": SAVED_BY if act == "save" else LOADED_BY}
        for key in taken[0]:
            of_key = [each[key] for each in taken]
            metric, unit = (f"{act}, {key}", "s") if key != "peak" else (f"{act}, peak memory of all ranks", "GB")
            values = [value / 1e9 for value in of_key] if key == "peak" else of_key
            self.recording.rows.append(record.row(name, metric, unit, values, **extra))
            row = self.recording.rows[-1]
            print(f"{name:44} {metric:36} {row['p50']:8.2f} {unit} ({row['p20']:.2f} to {row['p80']:.2f})")
        self.recording.keep()


def ratios_of_resumes(totals: Mapping[str, list[float]], numel: int) -> Iterator[dict[str, Any]]:
    """Yield the ratios of torch's resume to ours."""
    for ours in (DCP_OURS, CHECKPOINT):
        if {ours, DCP_TORCH} <= totals.keys():
            name = f"resume of {numel / 1e6:,.0f} M parameters: {DCP_TORCH} / {ours}"
            yield record.ratio(name, totals[DCP_TORCH], totals[ours], better="higher")


if __name__ == "__main__":
    sys.exit(main())
