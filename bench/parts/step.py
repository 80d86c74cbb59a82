"""Whole training steps on one rank of the CPU: offload-core, a plain PyTorch loop, DeepSpeed and FSDP2, in bf16 with
clipping, and beside them forward and backward alone and the streaming limit of the update's bytes. In fp32 where
PyTorch is slow in bf16 (``bench.harness.working_dtype``).

Contenders are separate processes. At 319 M parameters not all of them fit in memory together: they run in several
experiments, each with the contender that its ratios compare with. Rows are of all experiments, a ratio is of its two
sides in one.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import offload_core
from bench import record
from bench.harness.contenders import Result, measure_all, medians, show
from bench.harness.processes import KEEP_FREED_MEMORY, ProcessGroup
from bench.harness.recording import Recording
from bench.harness.working_dtype import working_dtype
from bench.parts.torch_contenders import (
    CONTENDERS,
    DEEPSPEED,
    DS_2,
    DS_3,
    FSDP2,
    FUSED,
    GRADIENTS_ONLY,
    OURS,
    OURS_3,
    SERIAL,
    STREAM,
    UNCLIPPED,
    UNFUSED,
    deepspeed_config,
)
from offload_core.commands.model_shapes import GPTConfig
from offload_core.support.processors import available_cpus
from offload_core.support.units import count

MODELS = {
    "34m": GPTConfig(layers=8, width=512, heads=8, vocabulary=16384, positions=1024),
    "319m": GPTConfig(layers=24, width=1024, heads=16, vocabulary=16384, positions=None),
}


@dataclass(frozen=True)
class Experiment:
    contenders: tuple[str, ...]
    rounds: int
    """The rounds of each repetition."""
    steps: int
    """The counted steps of each round."""
    repetitions: int = 1


EXPERIMENTS = {
    "34m": [
        Experiment((OURS, SERIAL, UNCLIPPED, OURS_3, DS_2, DS_3, FUSED, UNFUSED, FSDP2, GRADIENTS_ONLY, STREAM), 2, 2)
    ],
    "319m": [
        Experiment((OURS, DS_2, GRADIENTS_ONLY, STREAM), 2, 3, repetitions=2),
        Experiment((SERIAL, UNFUSED, FSDP2), 3, 2),
        Experiment((OURS_3, DS_3), 1, 3),
    ],
}
"""Two repetitions where a target compares with DeepSpeed: each touches 20 GB of memory for the first time, which takes
longer than its steps where a host backs memory when it is touched. Those of an experiment fit in 24 GB together, with
2 GB to spare: short of memory, the kernel reads programs from disk again and again (an experiment of 23 GB took 400 s
more once)."""
WARM_UP = 1

Results = Mapping[str, Result]


@dataclass(frozen=True)
class Comparison:
    """The ratio of ``other``'s time to ours, for the whole step or for the step without some phases."""

    other: str
    ours: str
    without: tuple[str, ...] = ()
    target: float | None = None

    @property
    def what(self) -> str:
        left = [phase for phase in PHASES if phase not in self.without]
        return " + ".join(left) if self.without else "whole step"

    def of(self, results: Results, size: str) -> dict[str, Any]:
        """Return the ratio. Time that a schedule moves into the next forward counts, too: each total is less the
        other's forward."""
        other, ours = results[self.other], results[self.ours]
        sides = []
        for side in (other, ours):
            away = [(other if phase == "forward" else side).samples(phase) for phase in self.without]
            sides.append([total - sum(taken) for total, *taken in zip(side.samples("total"), *away, strict=True)])
        name = f"{size}, {self.what}: {self.other} / {self.ours}"
        return record.ratio(name, *sides, target=self.target, better="higher")


PHASES = ("forward", "backward", "step")
LARGEST = "319m"
TARGETS = [  # of the largest model
    Comparison(DS_2, OURS, target=3.5),
    Comparison(DS_2, OURS, ("forward", "backward"), target=1.25),
    Comparison(DS_2, OURS, ("forward",), target=4.0),
    Comparison(UNFUSED, SERIAL, ("forward", "backward"), target=5.0),
    Comparison(DS_3, OURS_3),
    Comparison(FUSED, OURS),
    Comparison(UNFUSED, OURS),
    Comparison(FSDP2, OURS_3),
    Comparison(FSDP2, SERIAL),
    Comparison(SERIAL, OURS),
    Comparison(UNCLIPPED, OURS),
]
BOUND = 1.10
"""The target for a step beside a plain loop's forward and backward and the streaming limit of the update."""


def least(results: Results, *phases: str) -> list[float]:
    """Return the ms of these phases in PyTorch plus the streaming limit: the least time with PyTorch's kernels."""
    gradients, limit = results[GRADIENTS_ONLY], results[STREAM]
    return [a + b for a, b in zip(gradients.samples(*phases), limit.samples("total"), strict=True)]


def beside_limit(results: Results, size: str, target: float | None) -> list[dict[str, Any]]:
    """Return the ratio of our step to the least time, and DeepSpeed's, which bounds our ratios to DeepSpeed."""
    total = least(results, "forward", "backward")
    limit = "forward and backward of PyTorch and the streaming limit"
    title = f"{size}, whole step: {OURS} / {limit}"
    known = [record.ratio(title, results[OURS].samples("total"), total, target=target)]
    if DS_2 in results:
        theirs = results[DS_2]
        title = f"{size}, at most possible: whole step, {DS_2} / {limit}"
        known.append(record.ratio(title, theirs.samples("total"), total, better="higher"))
        title = f"{size}, at most possible: backward + step, {DS_2} / backward of PyTorch and the streaming limit"
        both = theirs.samples("backward", "step")
        known.append(record.ratio(title, both, least(results, "backward"), better="higher"))
    return known


def ratios_of(results: Results, size: str, targets: bool) -> list[dict[str, Any]]:
    """Return the ratios of the contenders that ran in one experiment."""
    comparisons = TARGETS if targets else [replace(c, target=None) for c in TARGETS]
    known = [c.of(results, size) for c in comparisons if {c.ours, c.other} <= results.keys()]
    if {GRADIENTS_ONLY, STREAM, OURS} <= results.keys():
        known += beside_limit(results, size, BOUND if targets else None)
    for bound in known:
        what = bound["name"].partition(", at most possible: ")[2].partition(",")[0]
        for ratio in known:
            if what and ratio["name"] == f"{size}, {what}: {DS_2} / {OURS}":
                alone = "PyTorch's own kernels and the streaming limit of the update"
                ratio["note"] = f"{alone}, measured beside it, would give {bound['p50']:.2f}; see the profile"
    return known


def start(
    settings: Mapping[str, Any], ranks: int, name: str, malloc: Mapping[str, str] = KEEP_FREED_MEMORY
) -> Callable[[], ProcessGroup]:
    return partial(
        ProcessGroup,
        "bench.parts.torch_contenders",
        [name, json.dumps(settings)],
        library=CONTENDERS[name].library,
        ranks=ranks,
        threads=settings["threads"],
        malloc=malloc,
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = record.parser("step", __doc__.partition("\n\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=None, help="default: all; --quick: 34m")
    parser.add_argument("--threads", type=count, default=available_cpus())
    parser.add_argument(
        "--repetitions", type=count, help="each with new processes (default: of each experiment its own)"
    )
    parser.add_argument("--rounds", type=count, help="of each repetition (default: of each experiment its own)")
    parser.add_argument("--steps", type=count, help="counted in each round (default: of each experiment its own)")
    args = parser.parse_args(arguments)
    args.models = args.models or (["34m"] if args.quick else list(MODELS))
    return args


def experiments(model: str, args: argparse.Namespace) -> Iterator[Experiment]:
    for experiment in EXPERIMENTS[model]:
        known = replace(experiment, rounds=2, steps=1, repetitions=1) if args.quick else experiment
        told = {name: getattr(args, name) for name in ("rounds", "steps", "repetitions") if getattr(args, name)}
        yield replace(known, **told)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    dtype = working_dtype(args.threads)
    config = {
        "models": {model: asdict(MODELS[model]) for model in args.models},
        "experiments": {model: [asdict(each) for each in experiments(model, args)] for model in args.models},
        "warm_up": WARM_UP, "threads": args.threads,
        "micro_batch": 2, "context": 64, "param_dtype": dtype.name,
        "deepspeed": {name: deepspeed_config(2, DEEPSPEED[name], dtype.words == "bf16") for name in (DS_2, DS_3)},
        "kernels": asdict(offload_core.kernel_info()), "malloc": KEEP_FREED_MEMORY,
    }  # fmt: skip
    recording = Recording("step", "Whole training steps on one rank", args.json, config)
    recording.versions |= record.versions("torch", "deepspeed")
    recording.notes += dtype.notes
    measured: list[tuple[str, Results]] = []
    """The model and the results of each experiment."""

    def keep(by_workload: Mapping[str, list[Result]]) -> None:
        measured[-1] = (measured[-1][0], {name: result for name, [result] in by_workload.items()})
        tell(recording, measured, args.threads, targets=not dtype.notes)

    for model in args.models:
        gpt = MODELS[model]
        settings = {"threads": args.threads, "micro_batch": 2, "context": 64, "gpt": asdict(gpt)}
        settings["param_dtype"] = dtype.name
        for experiment in experiments(model, args):
            groups = {name: start(settings, 1, name) for name in experiment.contenders}
            counts = {"repetitions": experiment.repetitions, "rounds": experiment.rounds, "steps": experiment.steps}
            measured.append((model, {}))
            by_workload, failures, versions = measure_all(groups, warm_up=WARM_UP, each_round=keep, **counts)
            recording.versions |= versions
            for name, error in failures.items():
                recording.add_missing(f"{name}, {gpt.numel / 1e6:.0f} M", error)
            keep(by_workload)
            print(f"{gpt.numel:,} parameters in {dtype.words}, 2 x 64 tokens, {args.threads} threads, {counts}")
            show(measured[-1][1])
    return recording.finish()


def tell(recording: Recording, measured: list[tuple[str, Results]], threads: int, *, targets: bool) -> None:
    """Write the results so far to the record: rows of each model, ratios of each experiment."""
    recording.clear()
    of_models: dict[str, dict[str, Result]] = {}
    for model, results in measured:
        size, of_all = f"{MODELS[model].numel / 1e6:.0f} M", of_models.setdefault(model, {})
        recording.add_ratios(ratios_of(results, size, targets and model == LARGEST), medians(results))
        for name, result in results.items():
            of_all[name] = of_all[name] + result if name in of_all else result
    for model, of_all in of_models.items():
        for name, result in of_all.items():
            recording.rows += result.rows(name, params=MODELS[model].numel, threads=threads, ranks=1)
    recording.keep()


if __name__ == "__main__":
    sys.exit(main())
