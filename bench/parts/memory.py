"""Bytes a parameter of GPT-2 124M in bf16 on one rank of the CPU: planned, and taken by real processes.

The measurement is the growth of a process's resident memory since it had imported its libraries: when the model is
built, between steps, and at the peak of a step. The device is the CPU, so a process holds the host's and the device's
bytes. Activations of 8 tokens and the libraries' allocations are included.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from bench import record
from bench.harness.processes import ContenderError, ProcessGroup, in_parallel
from bench.harness.recording import Recording
from bench.parts.step import start
from bench.parts.torch_contenders import DEEPSPEED, DS_2, DS_3, OURS, OURS_3, deepspeed_config
from offload_core.commands.model_shapes import GPTS, GPTConfig, specs_of
from offload_core.config.options import OffloadConfig
from offload_core.device.exchange_sizes import planned_device
from offload_core.dtypes import FLOAT32
from offload_core.memory.plan import MemoryPlan
from offload_core.plans.planner import Planner
from offload_core.plans.terms import BucketTerms
from offload_core.support.processors import available_cpus

BUILT, BETWEEN, PEAK = "process, peak while it is built", "process, between steps", "process, peak of a step"
PRESET = "gpt2-124m"
CONTENDERS = (OURS, DS_2, OURS_3, DS_3)
STAGES = {OURS: 2, OURS_3: 3}
TARGET = 0.7
UNIT = "bytes/parameter"
ON_DEVICE = 4
"""Bytes of a bf16 parameter and its gradient, which are on the device if that is a GPU."""
# Freed blocks of 1 MiB and more go back: the threshold of glibc rises to 32 MiB, depending on earlier blocks.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}


def plan(gpt: GPTConfig, stage: int, *, on_host: bool) -> MemoryPlan:
    config = OffloadConfig(stage=stage, param_dtype="bfloat16", gradient_clipping=1.0)
    specs = specs_of(gpt.shapes, FLOAT32, config, 1)
    return Planner(BucketTerms(config, planned_device(1, addressable=on_host))).plan(specs)


def measure(group: ProcessGroup) -> dict[str, int]:
    """Return the bytes beyond those of the libraries."""
    group.answers()
    before = group.resident()
    group.ask(steps=3)
    took = {BUILT: group.peak()}
    group.forget_peak()
    group.ask(steps=2)
    took |= {BETWEEN: group.resident(), PEAK: group.peak()}
    return {what: n_bytes - before for what, n_bytes in took.items()}


def measure_all(starts: dict[str, Callable[[], ProcessGroup]], recording: Recording) -> dict[str, dict[str, int]]:
    """Measure each contender in a separate process. All import at once; a processor has one model at a time."""
    groups = {name: begin() for name, begin in starts.items()}
    took = {}

    def take(name: str) -> None:
        print(f"{name}: building", file=sys.stderr)
        try:
            took[name] = measure(groups[name])
        except ContenderError as error:
            recording.add_missing(name, error)
        groups[name].close()

    try:
        in_parallel(groups.values(), take, groups, available_cpus())
    finally:
        for group in groups.values():
            group.close()
    return {name: took[name] for name in groups if name in took}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = record.parser("memory", __doc__.partition("\n\n")[0])
    parser.add_argument("--threads", type=int, default=available_cpus())
    parser.add_argument("--rounds", type=int, help="default: 1; each with processes of its own")
    args = parser.parse_args(arguments)
    args.rounds = args.rounds or 1
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    gpt = GPTS[PRESET]
    settings = {"threads": args.threads, "micro_batch": 1, "context": 8, "gpt": asdict(gpt)}
    config = {"preset": PRESET, "rounds": args.rounds, "param_dtype": "bfloat16", **settings, "malloc": _MALLOC}
    config["deepspeed"] = {name: deepspeed_config(1, DEEPSPEED[name]) for name in (DS_2, DS_3)}
    recording = Recording("memory", "Memory of a parameter", args.json, config)
    starts = {name: start(settings, 1, name, _MALLOC) for name in CONTENDERS}
    rounds = []
    for _ in range(args.rounds):
        rounds.append(measure_all(starts, recording))
        starts = {name: begin for name, begin in starts.items() if name in rounds[-1]}
    samples = {
        name: {what: [took[name][what] / gpt.numel for took in rounds] for what in (BUILT, BETWEEN, PEAK)}
        for name in starts
    }
    extra = {"params": gpt.numel, "threads": args.threads}
    for name, of_name in samples.items():
        recording.rows += [record.row(name, what, UNIT, values, **extra) for what, values in of_name.items()]
    for name, stage in STAGES.items():
        for device, on_host in (("CPU", True), ("GPU", False)):
            planned = plan(gpt, stage, on_host=on_host)
            for where, n_bytes in (("host", planned.host_bytes), ("device", planned.device_bytes)):
                recording.rows.append(
                    record.row(name, f"planned, {where}, {device}", UNIT, [n_bytes / gpt.numel], **extra)
                )
    print(f"{PRESET}, {gpt.numel:,} parameters in bf16, bytes a parameter")
    for row in recording.rows:
        print(f"{row['name']:28}{row['metric']:34}{row['p50']:8.2f}")
    ratios = [ratio for ours, other in ((OURS, DS_2), (OURS_3, DS_3)) for ratio in ratios_of(samples, ours, other)]
    why = "; ".join(f"{row['name']}, {row['metric']} {row['p50']:.2f}" for row in recording.rows)
    recording.add_ratios(ratios, f"bytes a parameter: {why}")
    return recording.finish()


def ratios_of(samples: dict[str, dict[str, list[float]]], ours: str, other: str) -> list[dict[str, Any]]:
    if not {ours, other} <= samples.keys():
        return []
    top, bottom = samples[ours][PEAK], samples[other][PEAK]
    host = [[took - ON_DEVICE for took in side] for side in (top, bottom)]
    return [
        record.ratio(f"host memory a parameter: {ours} / {other}", *host, target=TARGET),
        record.ratio(f"host and device memory a parameter: {ours} / {other}", top, bottom),
    ]


if __name__ == "__main__":
    sys.exit(main())
