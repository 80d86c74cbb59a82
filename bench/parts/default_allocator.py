"""Whole training steps of the largest model with glibc's malloc as it comes: what is freed in large blocks goes back to
the kernel. ``bench.step`` has the same with an allocator that keeps it.
"""

import argparse
import sys
from dataclasses import asdict

from bench import record
from bench.part import Part
from bench.rank_contenders import DS_2, GRADIENTS_ONLY, OURS
from bench.sittings import medians, run, show
from bench.step import LARGEST, MODELS, WARM_UP, ratios_of, start
from offload_core.cpus import available_cpus
from offload_core.quantities import count

CONTENDERS = (OURS, DS_2, GRADIENTS_ONLY)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = record.parser("given_back", __doc__.strip())
    parser.add_argument("--model", choices=MODELS, help=f"default: {LARGEST}; --quick: 34m")
    parser.add_argument("--threads", type=count, default=available_cpus())
    parser.add_argument("--rounds", type=count, help="default: 3; --quick: 2")
    parser.add_argument("--steps", type=count, help="counted in each turn (default: 3; --quick: 1)")
    args = parser.parse_args(arguments)
    args.model = args.model or ("34m" if args.quick else LARGEST)
    args.rounds = args.rounds or (2 if args.quick else 3)
    args.steps = args.steps or (1 if args.quick else 3)
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    gpt = MODELS[args.model]
    settings = {"threads": args.threads, "micro_batch": 2, "context": 64, "gpt": asdict(gpt)}
    part = Part("given_back", "Whole training steps on one rank, memory given back")
    groups = {name: start(settings, 1, name, malloc={}) for name in CONTENDERS}
    by_workload, failures, versions = run(groups, rounds=args.rounds, steps=args.steps, warm_up=WARM_UP)
    results = {name: result for name, [result] in by_workload.items()}
    part.versions |= versions
    show(results)
    for name, error in failures.items():
        part.miss(name, error)
    part.compare(ratios_of(results, f"{gpt.numel / 1e6:.0f} M", targets=False), medians(results))
    for name, result in results.items():
        part.rows += result.rows(name, params=gpt.numel, threads=args.threads, ranks=1)
    config = {"rounds": args.rounds, "steps": args.steps, "warm_up": WARM_UP, "param_dtype": "bfloat16", "malloc": {}}
    return part.finish(args.json, config | settings)


if __name__ == "__main__":
    sys.exit(main())
