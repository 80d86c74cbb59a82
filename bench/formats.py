"""The formats of optimizer states: bytes, time of an update, and what they do to the loss.

``python -m bench.formats`` prints the tables and appends to ``bench/results/formats.jsonl``; with ``--write`` it draws
``docs/pictures/formats.svg`` too. ``--only bytes``, ``update`` or ``loss`` does one part. Losses are those of ``python
-m bench.train`` on the same data, a run for each format and seed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.rounds import interleave, timed
from bench.plots import pyplot
from bench.record import commit, machine, quantiles
from offload_core.config.options import OffloadConfig
from offload_core.device.host import HostDevice
from offload_core.device.host_ranks import HostRanks
from offload_core.dtypes import BFLOAT16
from offload_core.layout.partition import ParamSpec
from offload_core.memory.host_memory import HostMemory
from offload_core.memory.plan import format_table
from offload_core.native import kernels
from offload_core.rules.adam import Adam, AdamHyper, Scalars
from offload_core.states.arrays import StateArray
from offload_core.step.pipeline import Pipeline

RESULTS = Path(__file__).resolve().parent / "results" / "formats.jsonl"
PICTURE = Path(__file__).resolve().parent.parent / "docs" / "pictures" / "formats.svg"
FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"state_format": "bf16"},
    "8bit": {"state_format": "8bit"},
    "8bit, bf16 masters": {"state_format": "8bit", "master_dtype": "bfloat16"},
}
_IN_CACHE = 2**14
"""Elements whose states, gradient and parameter stay in a core's own cache in every format."""
_TURNS = 200


def allocated(fields: Mapping[str, Any], numel: int) -> float:
    """Measured: bytes a parameter that states take of the host."""
    config = OffloadConfig(op_order="torch", **fields)
    pipeline = Pipeline(config, HostRanks(HostDevice()), None)
    tensor = np.zeros(numel, BFLOAT16.numpy)
    pipeline.add_parameters([ParamSpec("w", numel, BFLOAT16)], [tensor])
    states = {name: n for name, n in pipeline.memory.report().items() if name in Adam.state_names}
    own = tensor.nbytes if "master" not in states else 0  # on the CPU the parameter is its own master weight
    return (sum(states.values()) + own) / numel


def update(fields: Mapping[str, Any], numel: int, threads: int, memory: HostMemory) -> Callable[[], None]:
    """One update of that many bf16 parameters; it may be called again and again."""
    rng = np.random.default_rng(0)
    config = OffloadConfig(op_order="torch", **fields)
    formats = config.state_formats(BFLOAT16)
    states = {
        name: StateArray.allocate(format, numel, partial(memory.allocate, name), threads)
        for name, format in formats.items()
    }
    small = rng.standard_normal(2**16, np.float32)
    grad = memory.allocate("gradients", numel, BFLOAT16.numpy)
    param = memory.allocate("parameters", numel, BFLOAT16.numpy)
    for start in range(0, numel, small.size):
        grad[start : start + small.size] = (0.01 * small)[: numel - start]
        states["master"].view[start : start + small.size] = (0.02 * small)[: numel - start]
    rule = Adam("torch", "adamw")
    segments = rule.segments(states, np.zeros(1, np.int64), np.array([numel]))
    segments["grad"], segments["param"] = kernels.address(grad), kernels.address(param)
    segments["seed"] = 1
    step = 0

    def run() -> None:
        nonlocal step
        step += 1
        scalars = Scalars(rule, [AdamHyper(1e-4)], [0], {0: step}, grad_scale=1.0)
        kept = (states, grad, param)
        rule.update(
            segments,
            scalars,
            formats,
            grad_dtype=BFLOAT16,
            param_dtype=BFLOAT16,
            threads=threads,
            keep_states=False,
        )
        del kept

    return run


def moved(fields: Mapping[str, Any]) -> float:
    """Bytes that an update of a bf16 parameter reads and writes."""
    formats = OffloadConfig(**fields).state_formats(BFLOAT16).values()
    return 4 + 2 * sum(format.n_bytes(256) for format in formats) / 256


def turns(run: Callable[[], None], n: int) -> Callable[[], None]:
    def in_a_row() -> None:
        for _ in range(n):
            run()

    return in_a_row


def update_times(numel: int, threads: int, rounds: int) -> dict[str, dict[str, float]]:
    """For each format seconds of an update of large memory and in cache, over those of fp32 in the same run."""
    found: dict[str, dict[str, float]] = {name: {"moved": moved(fields)} for name, fields in FORMATS.items()}
    for where, size, workers, n in (("memory", numel, threads, 1), ("cache", _IN_CACHE, 1, _TURNS)):
        memory = HostMemory(threads)
        runs = {name: timed(turns(update(fields, size, workers, memory), n)) for name, fields in FORMATS.items()}
        seconds = {name: quantiles(samples)[1] for name, samples in interleave(runs, rounds).items()}
        for name, taken in seconds.items():
            found[name] |= {f"{where} ns": 1e9 * taken / size / n, where: taken / seconds["fp32"]}
        del runs
    return found


def losses(seeds: int, arguments: Sequence[str]) -> dict[str, list[float]]:
    """Held-out losses by format, one a seed, in nats a byte. Runs of one seed differ in nothing but the format."""
    found: dict[str, list[float]] = {name: [] for name in FORMATS}
    for seed in range(seeds):
        for name, fields in FORMATS.items():
            with tempfile.TemporaryDirectory() as folder:
                options = [item for k, v in fields.items() for item in (f"--{k.replace('_', '-')}", v)]
                command = [sys.executable, "-m", "bench.train", "--param-dtype", "bfloat16", "--compare", "0"]
                command += ["--sample-bytes", "0", "--seed", str(seed), "--out", folder, *options, *arguments]
                env = os.environ | {"OMP_WAIT_POLICY": "passive"}
                subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
                summary = json.loads((Path(folder) / "summary.json").read_text())
            found[name].append(summary["held_out_loss"])
            print(f"seed {seed}, {name}: held-out loss {found[name][-1]:.4f}", flush=True)
    return found


def draw(found: Mapping[str, Sequence[float]], picture: Path) -> None:
    """A point a seed, and the mean with the standard deviation of each format's seeds."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(6.5, 2.2))
    for i, values in enumerate(found.values()):
        axes.plot([i] * len(values), values, "o", color="#2a6f97", alpha=0.5, markersize=4)
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        axes.errorbar([i + 0.15], [statistics.mean(values)], yerr=[spread], fmt="_", color="#f4a259", capsize=4)
    axes.set_xticks(range(len(found)), list(found))
    axes.set(ylabel="held-out loss, nats a byte")
    seeds = len(next(iter(found.values())))
    axes.set_title(f"{seeds} seeds each; orange: their mean and standard deviation", loc="left", fontsize=8)
    figure.savefig(picture)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.formats", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--only", choices=("bytes", "update", "loss"), help="one part (default: all)")
    parser.add_argument("--numel", type=int, default=100_000_000, metavar="N", help="of the update (default: 100 M)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="of the update (default: 2)")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="of the update (default: 9)")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="runs of each format (default: 5)")
    parser.add_argument("--train", default="", metavar="ARGUMENTS", help="more arguments for bench.train")
    parser.add_argument("--write", action="store_true", help="draw docs/pictures/formats.svg")
    args = parser.parse_args()
    record: dict[str, Any] = {"bench": "formats", "machine": machine(), "commit": commit(), "config": vars(args)}

    def wanted(part: str) -> bool:
        return args.only in (None, part)

    if wanted("bytes"):
        record["bytes"] = {name: allocated(fields, 10**7) for name, fields in FORMATS.items()}
        rows = [[name, f"{n:.2f}"] for name, n in record["bytes"].items()]
        print(format_table(rows, ["format", "bytes of states a bf16 parameter, measured"]), end="\n\n")
    if wanted("update"):
        record["update"] = update_times(args.numel, args.threads, args.rounds)
        rows = []
        for name, row in record["update"].items():
            limit = row["moved"] / record["update"]["fp32"]["moved"]
            rows.append([name, f"{row['moved']:.2f}", f"{limit:.2f}", f"{row['memory']:.2f}", f"{row['cache']:.2f}"])
        of = f"{args.numel / 1e6:.0f} M, {args.threads} threads"
        header = ["format", "bytes moved", "by bytes alone", f"time over fp32, {of}", "in cache, 1 thread"]
        print(format_table(rows, header), end="\n\n")
    if wanted("loss"):
        record["loss"] = found = losses(args.seeds, args.train.split())
        fp32 = found["fp32"]
        spread = statistics.stdev(fp32) if len(fp32) > 1 else float("nan")
        rows = [
            [name, f"{statistics.mean(v):.4f}", f"{(statistics.mean(v) - statistics.mean(fp32)) / spread:+.2f}"]
            for name, v in found.items()
        ]
        print(format_table(rows, ["format", "held-out loss, mean", "from fp32's, in its standard deviations"]))
        if args.write:
            draw(found, PICTURE)
    with RESULTS.open("a") as out:
        out.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
