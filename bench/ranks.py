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
from bench.processes import Part, Result, medians, run, show
from bench.rank_contenders import CONTENDERS, DDP, DEEPSPEED, DS_2, DS_3, FSDP2, OURS, OURS_3, TOKENS, deepspeed_config
from bench.step import MODELS, start
from bench.turns import KEEP_MEMORY
from offload_core.model_shapes import GPTConfig

GPT_34M = MODELS["34m"]
HEATS = {2: (OURS, DS_2, DDP), 3: (OURS_3, DS_3, FSDP2)}
"""Of each stage; the first is what the others are compared with."""
FURTHER = {2: ("DeepSpeed, allreduce",), 3: ("DeepSpeed, stage 3, overlap_comm",)}
"""DeepSpeed's fastest ways, where there is a target."""
TARGET, TARGET_RANKS = 1.5, 2
"""For DeepSpeed's fastest, and so for each of its ways."""
ROUNDS, STEPS = 7, 3
"""With the target's ranks; elsewhere 2 and 1."""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = record.parser("ranks", __doc__.partition("\n\n")[0])
    parser.add_argument("--stages", nargs="+", type=int, choices=HEATS, default=list(HEATS))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, metavar="NAME", help="instead of the stages'")
    parser.add_argument("--ranks", nargs="+", type=int, help="default: 1 2 4; --quick: 2")
    parser.add_argument("--threads", type=int, default=1, help="of each rank (default: 1)")
    parser.add_argument("--rounds", type=int, help=f"default: {ROUNDS} with {TARGET_RANKS} ranks, else 2")
    parser.add_argument("--steps", type=int, help=f"counted in each turn (default: {STEPS} with {TARGET_RANKS} ranks)")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before the first round (default: 2)")
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--layers", type=int, default=GPT_34M.layers)
    parser.add_argument("--width", type=int, default=GPT_34M.width)
    parser.add_argument("--vocabulary", type=int, default=GPT_34M.vocabulary)
    args = parser.parse_args(arguments)
    args.ranks = args.ranks or ([2] if args.quick else [1, 2, 4])
    if args.quick:
        args.rounds, args.steps = args.rounds or 2, args.steps or 1
    for name in ("ranks", "threads", "rounds", "steps", "micro_batch", "context", "layers", "width", "vocabulary"):
        value = getattr(args, name)
        for number in value if isinstance(value, list) else [value]:
            if number is not None and number < 1:
                parser.error(f"--{name.replace('_', '-')}: got {number}, expected at least 1")
    if args.vocabulary < TOKENS:
        parser.error(f"--vocabulary: got {args.vocabulary}, expected at least {TOKENS}, the tokens drawn")
    if args.width % GPT_34M.heads:
        parser.error(f"--width: got {args.width}, expected a multiple of the {GPT_34M.heads} heads")
    return args


def micro_batches(ranks: int, micro_batch: int) -> list[int]:
    """That of weak scaling, and where it is another one that of strong scaling."""
    strong = TARGET_RANKS * micro_batch // ranks
    return list(dict.fromkeys([micro_batch, strong or micro_batch]))


def heats(args: argparse.Namespace, ranks: int) -> list[tuple[str, ...]]:
    if args.contenders:
        return [tuple(args.contenders)]
    return [HEATS[stage] + (FURTHER[stage] if ranks == TARGET_RANKS else ()) for stage in args.stages]


def turns(args: argparse.Namespace, ranks: int) -> tuple[int, int]:
    """How many rounds, and steps counted in each turn."""
    rounds, steps = (ROUNDS, STEPS) if ranks == TARGET_RANKS else (2, 1)
    return args.rounds or rounds, args.steps or steps


def ratios_of(results: Mapping[str, Result], reference: str, ranks: int, micro_batch: int) -> Iterable[dict[str, Any]]:
    """How many times longer each other's step takes than the reference's."""
    if reference not in results:
        return
    ours = results[reference].samples("total")
    for name, other in results.items():
        if name != reference:
            target = TARGET if name in DEEPSPEED and ranks == TARGET_RANKS else None
            title = f"{ranks} {'ranks' if ranks > 1 else 'rank'}, {micro_batch} windows each: {name} / {reference}"
            yield record.ratio(title, other.samples("total"), ours, target=target, better="higher")


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    gpt = GPTConfig(args.layers, args.width, GPT_34M.heads, args.vocabulary, GPT_34M.positions)
    settings = {name: getattr(args, name) for name in ("threads", "micro_batch", "context")} | {"gpt": asdict(gpt)}
    part = Part("ranks", "Whole training steps on several ranks")
    for ranks in args.ranks:
        rounds, steps = turns(args, ranks)
        sizes = micro_batches(ranks, args.micro_batch)
        workloads = [{"micro_batch": size} for size in sizes]
        for heat in heats(args, ranks):
            groups = {name: start(settings, ranks, name) for name in heat}
            results, failures, versions = run(
                groups, rounds=rounds, steps=steps, warm_up=args.warm_up, workloads=workloads
            )
            part.versions |= versions
            for name, error in failures.items():
                part.miss(f"{name}, {ranks} ranks" if len(args.ranks) > 1 else name, error)
            for i, size in enumerate(sizes):
                of_size = {name: by_workload[i] for name, by_workload in results.items()}
                print(
                    f"{gpt.numel:,} parameters in bf16, {ranks} gloo ranks of {args.threads} threads, "
                    f"{size} x {args.context} tokens each, {rounds} rounds of {steps} steps"
                )
                show(of_size)
                extra = {"params": gpt.numel, "threads": args.threads, "ranks": ranks, "micro_batch": size}
                for name, result in of_size.items():
                    tokens = [1e3 * ranks * size * args.context / ms for ms in result.samples("total")]
                    part.rows += [*result.rows(name, **extra), record.row(name, "speed", "tokens/s", tokens, **extra)]
                part.compare(ratios_of(of_size, heat[0], ranks, size), medians(of_size))
    config = {
        **{name: getattr(args, name) for name in ("ranks", "warm_up")},
        "rounds": [turns(args, ranks)[0] for ranks in args.ranks],
        "steps": [turns(args, ranks)[1] for ranks in args.ranks],
        "param_dtype": "bfloat16",
        **settings,
        "malloc": KEEP_MEMORY,
        "deepspeed": {name: deepspeed_config(args.micro_batch, zero) for name, zero in DEEPSPEED.items()},
    }
    return part.finish(args.json, config)


if __name__ == "__main__":
    sys.exit(main())
