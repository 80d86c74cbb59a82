"""``engine.accumulate()`` beside a loop over micro-batches: with parameters on disk, on two gloo ranks in stage 3, and
with one micro-batch whose parameters are on the device.

``disk``: the GPT of `make demo-disk` and its settings. Micro-batches have few tokens, so that reading parameters takes
most of a step, as it does beside a GPU, which computes a hundred times as fast as these processors. Both contenders
take turns. Each has a separate engine, and so its files: with ``--one-engine`` both use that of accumulate(), which
needs half of the disk. The loop's gradients then travel in fp32, too, and take twice the host memory. The peak of
accumulate() is that of its first two steps, before the loop has run. The memory that malloc keeps is in it: a
process that gives every block back to the kernel takes twice as long, for page faults.

``ranks``: whole steps of several micro-batches beside DeepSpeed's stage 3 and FSDP2, of few tokens as well, and the
bytes that all ranks send. The loop keeps activations, or runs its blocks again in backward, as accumulate() does.

``one``: an update of one micro-batch in stage 2 on one rank, beside a loop under ``torch.utils.checkpoint``. Nothing is
gathered, so that the ratio shows what the work around blocks costs.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench import record
from bench.disk_demo import SIZES
from bench.harness.contenders import Result, measure_all, medians, show
from bench.harness.processes import KEEP_FREED_MEMORY, ContenderError, ProcessGroup
from bench.harness.recording import Recording
from bench.harness.rounds import turns
from bench.harness.working_dtype import WorkingDtype, working_dtype
from bench.parts.layerwise_run import ACCUMULATE, BUILD, LOOP
from bench.parts.step import MODELS, start
from bench.parts.torch_contenders import ACCUMULATE as OF_ENGINE
from bench.parts.torch_contenders import ACCUMULATE_3, DS_3, FSDP2, OURS, OURS_3
from offload_core.commands.model_shapes import GPTConfig
from offload_core.support.processors import available_cpus
from offload_core.support.units import count

DISK, RANKS, ONE = "disk", "ranks", "one"
MODEL = "34m"
MICRO_BATCHES, N_RANKS = 8, 2
"""The numbers that the targets are for."""
LOOP_3, LOOP_3_AGAIN = f"{OURS_3}, loop", f"{OURS_3}, loop, checkpointed blocks"
LOOP_AGAIN = f"{OURS}, loop, checkpointed blocks"
AGAIN = {"activation_checkpointing": True}
TARGET_ON_DISK, TARGET_ON_RANKS, TARGET_OF_ONE = 0.4, 0.6, 1.05
"""The targets for the time of accumulate() divided by the loop's."""
MOST_BYTES = 4 * 2**30
"""The target for the peak of a process with all on disk, beside the inputs of blocks."""
STATE_BYTES = 12
"""Bytes of a parameter's states: the master weight and two moments."""
PATIENCE = 3600.0
"""Seconds for one step, or for making the model."""


@dataclass(frozen=True)
class Experiment:
    """Contenders that take turns, each by its name in ``torch_contenders`` and its own settings."""

    contenders: Mapping[str, tuple[str, Mapping[str, Any]]]
    ours: str
    loop: str
    """The contender that the target compares with."""
    target: float
    counts: Mapping[str, int]


EXPERIMENTS = {
    ONE: Experiment(
        {LOOP_AGAIN: (OURS, AGAIN), OF_ENGINE: (OF_ENGINE, {})},
        OF_ENGINE, LOOP_AGAIN, TARGET_OF_ONE, {"repetitions": 3, "rounds": 4, "steps": 3},
    ),
    RANKS: Experiment(
        {
            LOOP_3: (OURS_3, {}),
            LOOP_3_AGAIN: (OURS_3, AGAIN),
            ACCUMULATE_3: (ACCUMULATE_3, {}),
            DS_3: (DS_3, {}),
            FSDP2: (FSDP2, {}),
        },
        ACCUMULATE_3, LOOP_3, TARGET_ON_RANKS, {"repetitions": 2, "rounds": 3, "steps": 2},
    ),
}  # fmt: skip
QUICK_COUNTS = {"repetitions": 1, "rounds": 2, "steps": 1}
WARM_UP = 1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = record.parser("layerwise", (__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=(DISK, RANKS, ONE), default=(DISK, RANKS, ONE))
    parser.add_argument("--micro-batches", type=count, default=MICRO_BATCHES, help=f"default: {MICRO_BATCHES}")
    for name, what in (
        ("repetitions", f"of {RANKS} and {ONE}, each with new processes"),
        ("rounds", "of each repetition"),
        ("steps", f"of {RANKS} and {ONE}, counted in each round"),
    ):
        parser.add_argument(f"--{name}", type=count, help=what)
    of_disk = parser.add_argument_group(DISK)
    of_disk.add_argument("--size", choices=SIZES, help="of the model, in parameters (default: 3b; --quick: 0.1b)")
    of_disk.add_argument("--folder", type=Path, help="on the disk (default: a temporary folder)")
    of_disk.add_argument("--tokens", type=count, default=8, help="of a micro-batch (default: 8)")
    of_disk.add_argument("--one-engine", action="store_true", help="one engine for both: half of the disk")
    of_rest = parser.add_argument_group(f"{RANKS} and {ONE}")
    of_rest.add_argument("--model", choices=MODELS, default=MODEL, help=f"default: {MODEL}")
    of_rest.add_argument("--ranks", type=count, default=N_RANKS, help=f"of {RANKS}; a thread each (default: {N_RANKS})")
    of_rest.add_argument("--context", type=count, default=32, help=f"tokens of a micro-batch of {RANKS} (default: 32)")
    args = parser.parse_args(arguments)
    args.size = args.size or ("0.1b" if args.quick else "3b")
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    dtype = working_dtype(available_cpus())
    named = ("micro_batches", "size", "tokens", "one_engine", "model", "ranks", "context")
    config: dict[str, Any] = {name: getattr(args, name) for name in named} | {"parts": list(args.only)}
    config |= {"counts": {name: counts_of(args, name) for name in EXPERIMENTS}, "rounds on disk": rounds_on_disk(args)}
    config |= {"warm_up": WARM_UP, "param_dtype": dtype.name, "malloc": KEEP_FREED_MEMORY}
    recording = Recording("layerwise", "Micro-batches block by block", args.json, config)
    recording.versions |= record.versions("torch", "deepspeed")
    if dtype.notes:
        recording.notes.append(f"in fp32: a bf16 matrix product takes {dtype.slowdown:.0f} times as long here")
    measure_steps(args, dtype, recording)
    if DISK in args.only:
        OnDisk(args, dtype, recording).measure()
    return recording.finish()


# --- ranks, and one micro-batch ----------------------------------------------------------------------


def counts_of(args: argparse.Namespace, name: str) -> dict[str, int]:
    known = QUICK_COUNTS if args.quick else EXPERIMENTS[name].counts
    return {what: getattr(args, what) or number for what, number in known.items()}


def settings_of(args: argparse.Namespace, name: str) -> tuple[dict[str, Any], int]:
    """Return the settings of an experiment's contenders, and the number of ranks."""
    gpt = asdict(MODELS[args.model])
    if name == ONE:  # the tokens of the other parts, so that the ratio is that of usual steps
        return {"gpt": gpt, "micro_batch": 2, "context": 64, "threads": available_cpus()}, 1
    windows = {"micro_batch": args.micro_batches, "windows": 1}
    return {"gpt": gpt, **windows, "context": args.context, "threads": 1}, args.ranks


def measure_steps(args: argparse.Namespace, dtype: WorkingDtype, recording: Recording) -> None:
    numel = MODELS[args.model].numel
    measured: dict[str, dict[str, Result]] = {}

    def keep(name: str, by_workload: Mapping[str, list[Result]]) -> None:
        measured[name] = {of: result for of, [result] in by_workload.items()}
        recording.clear()
        for known, results in measured.items():
            settings, ranks = settings_of(args, known)
            extra = {"part": known, "params": numel, "ranks": ranks, "threads": settings["threads"]}
            extra["micro_batches"] = n_of(settings)
            for contender, result in results.items():
                recording.rows += result.rows(contender, **extra)
            usual = args.model == MODEL and (known == ONE or (ranks, n_of(settings)) == (N_RANKS, MICRO_BATCHES))
            recording.add_ratios(ratios_of(EXPERIMENTS[known], results, where(args, known), usual), medians(results))
        recording.keep()

    for name, experiment in EXPERIMENTS.items():
        if name not in args.only:
            continue
        settings, ranks = settings_of(args, name)
        settings["param_dtype"] = dtype.name
        groups = {of: start({**settings, **own}, ranks, known) for of, (known, own) in experiment.contenders.items()}
        counts = counts_of(args, name)
        by_workload, failures, versions = measure_all(groups, warm_up=WARM_UP, each_round=partial(keep, name), **counts)
        recording.versions |= versions
        for of, error in failures.items():
            recording.add_missing(of, error)
        keep(name, by_workload)
        print(f"{numel:,} parameters in {dtype.words}, {where(args, name)}, {counts}")
        show(measured[name])


def n_of(settings: Mapping[str, Any]) -> int:
    """Return the number of micro-batches of a step."""
    number: int = settings["micro_batch"] // settings.get("windows", settings["micro_batch"])
    return number


def where(args: argparse.Namespace, name: str) -> str:
    settings, ranks = settings_of(args, name)
    n, tokens = n_of(settings), settings["micro_batch"] * settings["context"]
    words = f"{ranks} rank{'s' * (ranks > 1)}, {n} micro-batch{'es' * (n > 1)} of {tokens // n} tokens"
    return f"{MODELS[args.model].numel / 1e6:.0f} M, {words}"


def ratios_of(
    experiment: Experiment, results: Mapping[str, Result], title: str, targets: bool
) -> Iterator[dict[str, Any]]:
    """Yield the time of accumulate() divided by each other contender's, and the bytes that it sends by theirs."""
    if experiment.ours not in results:
        return
    ours = results[experiment.ours]
    for name, other in results.items():
        if name == experiment.ours:
            continue
        target = experiment.target if targets and name == experiment.loop else None
        words = f"{experiment.ours} / {name}"
        yield record.ratio(f"{title}: {words}", ours.samples("total"), other.samples("total"), target=target)
        yield record.ratio(f"{title}, processor time: {words}", ours.processor_times, other.processor_times)
        sent = [[each.sent for each in side.measurements] for side in (ours, other)]
        if min(sent[1]) > 0 and len(results) > 2:  # between ranks, and not what other programs send
            yield record.ratio(f"{title}, bytes sent: {words}", *sent)


# --- on disk -----------------------------------------------------------------------------------------


def rounds_on_disk(args: argparse.Namespace) -> int:
    number: int = args.rounds or (1 if args.quick else 2)
    return number


def inputs_of_blocks(gpt: GPTConfig, tokens: int, itemsize: int) -> int:
    """Return the bytes of the inputs of all blocks for so many tokens."""
    return gpt.layers * tokens * gpt.width * itemsize


class OnDisk:
    """Steps of the loop and of accumulate(), in turn."""

    def __init__(self, args: argparse.Namespace, dtype: WorkingDtype, recording: Recording) -> None:
        self.args, self.recording, self.gpt = args, recording, SIZES[args.size]
        self.dtype = dtype.name
        self.itemsize = 2 if dtype.words == "bf16" else 4
        self.engines = 1 if args.one_engine else 2

    @property
    def needed(self) -> int:
        """Bytes of the disk that the engines need."""
        return self.engines * (self.itemsize + STATE_BYTES) * self.gpt.numel + 2**30

    def measure(self) -> None:
        folder = self.args.folder or Path(tempfile.gettempdir())
        free = shutil.disk_usage(folder).free
        if free < self.needed:
            why = f"{self.needed / 1e9:.0f} GB of disk in {folder} are needed, and {free / 1e9:.0f} GB are free"
            self.recording.missing.append(record.missing(DISK, f"{why}: --one-engine, or a smaller --size"))
            print(f"{DISK}: COULD NOT RUN: {why}")
            return
        groups: dict[str, ProcessGroup] = {}
        with tempfile.TemporaryDirectory(dir=self.args.folder) as name:
            try:
                groups[ACCUMULATE] = self._start(name, layerwise=True)
                groups[LOOP] = groups[ACCUMULATE] if self.args.one_engine else self._start(name, layerwise=False)
                self._measure(groups)
            except ContenderError as error:
                self.recording.add_missing(DISK, error)
            finally:
                for group in groups.values():
                    group.close()

    def _start(self, folder: str, *, layerwise: bool) -> ProcessGroup:
        args = self.args
        settings: dict[str, Any] = {"gpt": asdict(self.gpt), "param_dtype": self.dtype, "nvme_path": folder}
        settings |= {"tokens": args.tokens, "micro_batches": args.micro_batches, "layerwise": layerwise}
        settings["threads"] = available_cpus()
        group = ProcessGroup(
            "bench.parts.layerwise_run", [json.dumps(settings)],
            ranks=1, threads=available_cpus(), patience=PATIENCE,
        )  # fmt: skip
        try:
            group.answers()
            group.ask(act=BUILD)
        except ContenderError:
            group.close()
            raise
        return group

    def _measure(self, groups: Mapping[str, ProcessGroup]) -> None:
        def step(name: str) -> dict[str, float]:
            groups[name].forget_peak()
            (known,) = groups[name].ask(act=name)
            print(f"{name}: {known['seconds']:.1f} s, loss {known['loss']:.4f}", file=sys.stderr)
            return {**known, "peak": groups[name].peak()}

        peaks = {ACCUMULATE: [step(ACCUMULATE)["peak"] for _ in range(2)], LOOP: [step(LOOP)["peak"]]}
        taken: dict[str, list[dict[str, float]]] = {name: [] for name in groups}
        for of_round in turns({name: partial(step, name) for name in groups}, rounds_on_disk(self.args)):
            for name, known in of_round.items():
                taken[name].append(known)
        self._record(taken, peaks)

    def _record(self, taken: Mapping[str, list[dict[str, float]]], peaks: Mapping[str, list[float]]) -> None:
        args, gpt, recording = self.args, self.gpt, self.recording
        extra = {"part": DISK, "params": gpt.numel, "one_engine": args.one_engine}
        extra |= {"micro_batches": args.micro_batches, "tokens": args.tokens}
        for name, steps in taken.items():
            rows = [record.row(name, "step", "s", [step["seconds"] for step in steps], **extra)]
            for what in ("read", "written"):
                rows.append(record.row(name, what, "GB/step", [step[what] / 1e9 for step in steps], **extra))
            rows.append(record.row(name, "peak memory", "GB", [max(peaks[name]) / 1e9], **extra))
            rows.append(record.row(name, "loss, last", "nats", [steps[-1]["loss"]], **extra))
            recording.rows += rows
            for row in rows:
                print(f"{name:16} {row['metric']:16} {row['p50']:10.2f} {row['unit']}")
        ours, loop = ([step["seconds"] for step in taken[name]] for name in (ACCUMULATE, LOOP))
        sides = [[step["read"] for step in taken[name]] for name in (ACCUMULATE, LOOP)]
        inputs = inputs_of_blocks(gpt, args.micro_batches * args.tokens, self.itemsize)
        size = f"{gpt.numel / 1e6:,.0f} M"
        title = f"{size} on disk, {args.micro_batches} micro-batches of {args.tokens} tokens"
        target = TARGET_ON_DISK if args.micro_batches == MICRO_BATCHES else None
        why = f"s: {ACCUMULATE} {ours[-1]:.1f}, {LOOP} {loop[-1]:.1f}"
        recording.add_ratios([record.ratio(f"{title}: {ACCUMULATE} / {LOOP}", ours, loop, target=target)], why)
        if min(sides[1]) > 0:
            recording.add_ratios([record.ratio(f"{title}, bytes read: {ACCUMULATE} / {LOOP}", *sides)], "")
        peak = max(peaks[ACCUMULATE]) - inputs
        name = f"{size} on disk, peak memory of {ACCUMULATE} without inputs of blocks / 4 GiB"
        recording.add_ratios([record.ratio(name, [peak], [MOST_BYTES], target=1.0)], f"{peak / 2**30:.2f} GiB")
        recording.keep()


if __name__ == "__main__":
    sys.exit(main())
