"""Whole training steps on 1, 2 and 4 gloo ranks: offload-core against DeepSpeed, FSDP2 and training without offload.

DeepSpeed is no dependency: `make bench` installs it. A contender that cannot run is reported, and the exit status is 1.
Weak scaling is at one micro-batch a rank, strong scaling at that of two ranks together.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from bench import record
from bench.harness.contenders import Result, measure_all, medians, show
from bench.harness.processes import KEEP_FREED_MEMORY, MOST_RANKS
from bench.harness.recording import Recording
from bench.harness.working_dtype import working_dtype
from bench.parts.step import MODELS, start
from bench.parts.torch_contenders import (
    CONTENDERS,
    DDP,
    DEEPSPEED,
    DS_2,
    DS_3,
    FSDP2,
    OURS,
    OURS_3,
    TOKENS,
    deepspeed_config,
)
from offload_core.commands.model_shapes import GPTConfig
from offload_core.support.units import count

GPT_34M = MODELS["34m"]
CONTENDERS_OF_STAGE = {2: (OURS, DS_2, DDP), 3: (OURS_3, DS_3, FSDP2)}
"""The contenders of each stage; the others are compared with the first."""
FURTHER = {2: ("DeepSpeed, allreduce",), 3: ("DeepSpeed, stage 3, overlap_comm",)}
"""DeepSpeed's fastest settings, for the comparisons with a target."""
TARGET, TARGET_RANKS = 1.5, 2
"""The target for DeepSpeed's fastest setting, and so for each of them; and its number of ranks."""
COUNTS = {"repetitions": 2, "rounds": 2, "steps": 2}
"""The counts with the target's number of ranks."""
COUNTS_ELSEWHERE = {"repetitions": 1, "rounds": 1, "steps": 2}
QUICK_COUNTS = {"repetitions": 1, "rounds": 2, "steps": 1}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = record.parser("ranks", __doc__.partition("\n\n")[0])
    parser.add_argument("--stages", nargs="+", type=int, choices=CONTENDERS_OF_STAGE, default=list(CONTENDERS_OF_STAGE))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, metavar="NAME", help="instead of the stages'")
    parser.add_argument("--ranks", nargs="+", type=count, help="default: 1 2 4; --quick: 2")
    parser.add_argument("--threads", type=count, default=1, help="of each rank (default: 1)")
    for name, what in (
        ("repetitions", "each with new processes"),
        ("rounds", "of each repetition"),
        ("steps", "counted in each round"),
    ):
        with_target, elsewhere = COUNTS[name], COUNTS_ELSEWHERE[name]
        default = f"default: {with_target} with {TARGET_RANKS} ranks, else {elsewhere}"
        parser.add_argument(f"--{name}", type=count, help=f"{what} ({default})")
    parser.add_argument("--warm-up", type=int, default=1, help="steps before the first round (default: 1)")
    parser.add_argument("--micro-batch", type=count, default=2)
    parser.add_argument("--context", type=count, default=64)
    parser.add_argument("--layers", type=count, default=GPT_34M.layers)
    parser.add_argument("--width", type=count, default=GPT_34M.width)
    parser.add_argument("--vocabulary", type=count, default=GPT_34M.vocabulary)
    args = parser.parse_args(arguments)
    args.ranks = args.ranks or ([2] if args.quick else [1, 2, 4])
    if max(args.ranks) > MOST_RANKS:
        parser.error(f"--ranks: got {max(args.ranks)}, expected at most {MOST_RANKS} on one machine")
    if args.vocabulary < TOKENS:
        parser.error(f"--vocabulary: got {args.vocabulary}, expected at least {TOKENS}, the tokens drawn")
    if args.width % GPT_34M.heads:
        parser.error(f"--width: got {args.width}, expected a multiple of the {GPT_34M.heads} heads")
    return args


def micro_batches(ranks: int, micro_batch: int) -> list[int]:
    """Return the micro-batch of weak scaling, and the one of strong scaling if it differs."""
    strong = TARGET_RANKS * micro_batch // ranks
    return list(dict.fromkeys([micro_batch, strong or micro_batch]))


Stages = list[tuple[str, ...]]
"""The contenders of each stage; the others are compared with the first."""


def experiments(args: argparse.Namespace, ranks: int) -> list[Stages]:
    """Return the stages of each experiment. Contenders of one rank are few enough to run together in one."""
    if args.contenders:
        return [[tuple(args.contenders)]]
    stages = [CONTENDERS_OF_STAGE[stage] + (FURTHER[stage] if ranks == TARGET_RANKS else ()) for stage in args.stages]
    return [stages] if ranks == 1 else [[stage] for stage in stages]


def counts_of(args: argparse.Namespace, ranks: int) -> dict[str, int]:
    """Return the numbers of repetitions, of rounds, and of the counted steps of each round."""
    known = QUICK_COUNTS if args.quick else COUNTS if ranks == TARGET_RANKS else COUNTS_ELSEWHERE
    return {name: getattr(args, name) or number for name, number in known.items()}


def ratios_of(
    results: Mapping[str, Result], reference: str, ranks: int, micro_batch: int, targets: bool
) -> Iterable[dict[str, Any]]:
    """Yield the ratio of each other contender's step to the reference's."""
    if reference not in results:
        return
    ours = results[reference].samples("total")
    for name, other in results.items():
        if name != reference:
            target = TARGET if targets and name in DEEPSPEED and ranks == TARGET_RANKS else None
            title = f"{ranks} {'ranks' if ranks > 1 else 'rank'}, {micro_batch} windows each: {name} / {reference}"
            yield record.ratio(title, other.samples("total"), ours, target=target, better="higher")


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    gpt = GPTConfig(args.layers, args.width, GPT_34M.heads, args.vocabulary, GPT_34M.positions)
    dtype = working_dtype(args.threads)
    settings = {name: getattr(args, name) for name in ("threads", "micro_batch", "context")} | {"gpt": asdict(gpt)}
    settings["param_dtype"] = dtype.name
    narrow = dtype.words == "bf16"
    config = {
        **{name: getattr(args, name) for name in ("ranks", "warm_up")},
        **{name: [counts_of(args, ranks)[name] for ranks in args.ranks] for name in COUNTS},
        **settings,
        "malloc": KEEP_FREED_MEMORY,
        "deepspeed": {name: deepspeed_config(args.micro_batch, zero, narrow) for name, zero in DEEPSPEED.items()},
    }
    recording = Recording("ranks", "Whole training steps on several ranks", args.json, config)
    recording.versions |= record.versions("torch", "deepspeed")
    recording.notes += dtype.notes
    measured: list[tuple[int, Stages, dict[str, list[Result]]]] = []
    """The ranks and contenders of each experiment, and their results at each micro-batch."""

    def keep(by_workload: dict[str, list[Result]]) -> None:
        measured[-1] = (*measured[-1][:2], by_workload)
        tell(recording, measured, args, gpt.numel, targets=narrow)

    for ranks in args.ranks:
        sizes = micro_batches(ranks, args.micro_batch)
        workloads = [{"micro_batch": size} for size in sizes]
        for experiment in experiments(args, ranks):
            groups = {name: start(settings, ranks, name) for stage in experiment for name in stage}
            counts = counts_of(args, ranks)
            measured.append((ranks, experiment, {}))
            results, failures, versions = measure_all(
                groups, warm_up=args.warm_up, workloads=workloads, each_round=keep, **counts
            )
            recording.versions |= versions
            for name, error in failures.items():
                recording.add_missing(f"{name}, {ranks} ranks" if len(args.ranks) > 1 else name, error)
            keep(results)
            for i, size in enumerate(sizes):
                print(
                    f"{gpt.numel:,} parameters in {dtype.words}, {ranks} gloo ranks of {args.threads} threads, "
                    f"{size} x {args.context} tokens each, {counts}"
                )
                show({name: by_workload[i] for name, by_workload in results.items()})
    return recording.finish()


def tell(
    recording: Recording,
    measured: list[tuple[int, Stages, dict[str, list[Result]]]],
    args: argparse.Namespace,
    numel: int,
    *,
    targets: bool,
) -> None:
    """Write the results of all experiments so far to the record."""
    recording.clear()
    for ranks, experiment, results in measured:
        for i, size in enumerate(micro_batches(ranks, args.micro_batch)):
            of_size = {name: by_workload[i] for name, by_workload in results.items()}
            extra = {"params": numel, "threads": args.threads, "ranks": ranks, "micro_batch": size}
            for name, result in of_size.items():
                tokens = [1e3 * ranks * size * args.context / ms for ms in result.samples("total")]
                recording.rows += [*result.rows(name, **extra), record.row(name, "speed", "tokens/s", tokens, **extra)]
            for stage in experiment:
                compared = {name: of_size[name] for name in stage if name in of_size}
                recording.add_ratios(ratios_of(compared, stage[0], ranks, size, targets), medians(compared))
    recording.keep()


if __name__ == "__main__":
    sys.exit(main())
