"""Whole training steps of the largest model with glibc's default malloc, which gives large freed blocks back to the
kernel. ``bench.parts.step`` measures the same steps with an allocator that keeps them.
"""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import asdict

from bench import record
from bench.harness.contenders import Result, measure_all, show
from bench.harness.recording import Recording
from bench.harness.working_dtype import working_dtype
from bench.parts.step import LARGEST, MODELS, WARM_UP, start, tell
from bench.parts.torch_contenders import DS_2, GRADIENTS_ONLY, OURS
from offload_core.support.processors import available_cpus
from offload_core.support.units import count

CONTENDERS = (OURS, DS_2, GRADIENTS_ONLY)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = record.parser("default_allocator", __doc__.strip())
    parser.add_argument("--model", choices=MODELS, help=f"default: {LARGEST}; --quick: 34m")
    parser.add_argument("--threads", type=count, default=available_cpus())
    parser.add_argument("--rounds", type=count, help="default: 3; --quick: 2")
    parser.add_argument("--steps", type=count, help="counted in each round (default: 3; --quick: 1)")
    args = parser.parse_args(arguments)
    args.model = args.model or ("34m" if args.quick else LARGEST)
    args.rounds = args.rounds or (2 if args.quick else 3)
    args.steps = args.steps or (1 if args.quick else 3)
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    gpt = MODELS[args.model]
    settings = {"threads": args.threads, "micro_batch": 2, "context": 64, "gpt": asdict(gpt)}
    dtype = working_dtype(args.threads)
    settings["param_dtype"] = dtype.name
    config = {"rounds": args.rounds, "steps": args.steps, "warm_up": WARM_UP, "malloc": {}, **settings}
    recording = Recording("default_allocator", "Whole training steps on one rank, default allocator", args.json, config)
    recording.notes += dtype.notes

    def keep(by_workload: Mapping[str, list[Result]]) -> None:
        results = {name: result for name, [result] in by_workload.items()}
        tell(recording, [(args.model, results)], args.threads, targets=False)

    groups = {name: start(settings, 1, name, malloc={}) for name in CONTENDERS}
    by_workload, failures, versions = measure_all(
        groups, rounds=args.rounds, steps=args.steps, warm_up=WARM_UP, each_round=keep
    )
    recording.versions |= versions
    show({name: result for name, [result] in by_workload.items()})
    for name, error in failures.items():
        recording.add_missing(name, error)
    keep(by_workload)
    return recording.finish()


if __name__ == "__main__":
    sys.exit(main())
