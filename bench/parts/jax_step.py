"""Whole training steps in JAX on the CPU, 34 M parameters in bf16, clipping on: offload-core, optax.adamw in memory and
optax.adamw whose states rest in host memory and are moved in and out of the compiled step.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from bench import record
from bench.harness.contenders import Result, measure_all, medians, show
from bench.harness.processes import KEEP_FREED_MEMORY, ProcessGroup
from bench.harness.recording import Recording
from bench.parts.step import MODELS
from offload_core.support.processors import available_cpus
from offload_core.support.units import count

OURS = "offload-core"
OTHERS = ("optax.adamw, in memory", "optax.adamw, states in pinned_host")
GPT = MODELS["34m"]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = record.parser("jax_step", __doc__.strip())
    parser.add_argument("--threads", type=count, default=available_cpus())
    parser.add_argument("--rounds", type=count, help="default: 5")
    parser.add_argument("--steps", type=count, help="counted in each round (default: 3; --quick: 1)")
    args = parser.parse_args(arguments)
    args.rounds = args.rounds or (2 if args.quick else 5)
    args.steps = args.steps or (1 if args.quick else 3)
    return args


def ratios_of(results: Mapping[str, Result]) -> list[dict[str, Any]]:
    """Return the ratio of each other contender's step to ours."""
    if OURS not in results:
        return []
    ours = results[OURS].samples("total")
    return [
        record.ratio(f"JAX, step: {name} / {OURS}", results[name].samples("total"), ours, better="higher")
        for name in OTHERS
        if name in results
    ]


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    settings = {"micro_batch": 2, "context": 64, "gpt": asdict(GPT)}
    environment = {"JAX_PLATFORMS": "cpu", "NPROC": str(args.threads)}  # the latter is how many XLA takes
    groups = {
        name: partial(
            ProcessGroup, "bench.parts.jax_contenders", [name, json.dumps(settings)],
            ranks=1, threads=args.threads, environment=environment,
        )
        for name in (OURS, *OTHERS)
    }  # fmt: skip
    config = {"rounds": args.rounds, "steps": args.steps, "threads": args.threads, "param_dtype": "bfloat16"}
    config |= {"malloc": KEEP_FREED_MEMORY, **settings}
    recording = Recording("jax_step", "Whole training steps in JAX", args.json, config)
    recording.versions |= record.versions("jax")

    def keep(by_workload: dict[str, list[Result]]) -> None:
        results = {name: result for name, [result] in by_workload.items()}
        recording.clear()
        recording.add_ratios(ratios_of(results), medians(results))
        for name, result in results.items():
            recording.rows += result.rows(name, params=GPT.numel, threads=args.threads)
        recording.keep()

    by_workload, failures, versions = measure_all(
        groups, rounds=args.rounds, steps=args.steps, warm_up=3, each_round=keep
    )
    recording.versions |= versions
    print(f"{GPT.numel:,} parameters in bf16, 2 x 64 tokens, {args.threads} threads, {args.rounds} rounds")
    show({name: result for name, [result] in by_workload.items()})
    for name, error in failures.items():
        recording.add_missing(name, error)
    keep(by_workload)
    return recording.finish()


if __name__ == "__main__":
    sys.exit(main())
