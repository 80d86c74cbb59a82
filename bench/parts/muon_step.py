"""Whole training steps with Muon on one rank of the CPU, beside a plain loop with ``torch.optim.Muon`` and fused AdamW.

Both have the same matrices, rates, clipping and types. Beside the times stand the bytes of host memory that a matrix's
states take.
"""

import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from bench import record
from bench.harness.contenders import Result, measure_all, medians, show
from bench.harness.processes import KEEP_FREED_MEMORY
from bench.harness.recording import Recording
from bench.harness.working_dtype import working_dtype
from bench.parts.step import MODELS, WARM_UP, start
from bench.parts.torch_contenders import MUON, TORCH_MUON, muon_arguments
from offload_core.commands.model_shapes import GPTConfig
from offload_core.support.processors import available_cpus
from offload_core.support.units import count

MODEL = "34m"
TARGET = 1.10
BYTES = 8.0
"""The target for a matrix's host memory: four bytes of the master weight, and four of the momentum."""


def matrix_bytes(gpt: GPTConfig) -> float:
    """Return the host memory of the states of matrices, by the memory report of an engine, in bytes a parameter."""
    from bench.train.gpt_torch import GPT
    from frontends.torch import wrap

    engine = wrap(GPT(gpt), optimizer="muon", param_dtype="bfloat16")
    report = engine.memory_report()
    held = {row.what: row.held for row in report.rows if row.where == "host"}
    matrices = engine.optimizer.param_groups[0]["params"]
    return held["master"] / report.numel + held["momentum_buffer"] / sum(matrix.numel() for matrix in matrices)


def main(arguments: list[str] | None = None) -> int:
    parser = record.parser("muon_step", (__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--threads", type=count, default=available_cpus())
    parser.add_argument("--rounds", type=count, help="(default: 6; --quick: 2)")
    parser.add_argument("--steps", type=count, default=2, help="counted in each round (default: 2)")
    args = parser.parse_args(arguments)
    gpt, dtype = MODELS[MODEL], working_dtype(args.threads)
    settings = {"threads": args.threads, "micro_batch": 2, "context": 64, "gpt": asdict(gpt)}
    settings["param_dtype"] = dtype.name
    config = {"model": MODEL, **settings, "muon": muon_arguments(), "malloc": KEEP_FREED_MEMORY}
    recording = Recording("muon_step", "Whole training steps with Muon", args.json, config)
    recording.versions |= record.versions("torch")
    recording.notes += dtype.notes
    known = [matrix_bytes(gpt)]
    what = f"{MODEL}, host memory of a matrix / {BYTES:g} bytes a parameter"
    on_host = record.ratio(what, known, [BYTES], target=1.0)

    def keep(by_workload: Mapping[str, list[Result]]) -> None:
        results = {name: result for name, [result] in by_workload.items()}
        recording.clear()
        recording.add_ratios([on_host], "")
        recording.rows.append(record.row(MUON, "states of a matrix on the host", "bytes/param", known))
        if {MUON, TORCH_MUON} <= results.keys():
            sides = [results[name].samples("total") for name in (MUON, TORCH_MUON)]
            whole: dict[str, Any] = record.ratio(f"{MODEL}, whole step: {MUON} / {TORCH_MUON}", *sides, target=TARGET)
            recording.add_ratios([whole], medians(results))
        for name, result in results.items():
            recording.rows += result.rows(name, params=gpt.numel, threads=args.threads, ranks=1)
        recording.keep()

    groups = {name: start(settings, 1, name) for name in (MUON, TORCH_MUON)}
    rounds = args.rounds or (2 if args.quick else 6)
    by_workload, failures, versions = measure_all(
        groups, rounds=rounds, steps=args.steps, warm_up=WARM_UP, each_round=keep
    )
    recording.versions |= versions
    for name, error in failures.items():
        recording.add_missing(name, error)
    keep(by_workload)
    print(f"{gpt.numel:,} parameters in {dtype.words}, 2 x 64 tokens, {args.threads} threads, {rounds} rounds")
    show({name: result for name, [result] in by_workload.items()})
    return recording.finish()


if __name__ == "__main__":
    sys.exit(main())
