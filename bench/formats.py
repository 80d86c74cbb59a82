"""The formats of optimizer states: bytes, the loss, and curves of training. Their times are parts of ``bench.parts``:
``state_formats``, ``many_cores`` and ``eight_bit``.

``python -m bench.formats`` prints the tables and appends to ``bench/results/formats.jsonl``; with ``--write`` it draws
``docs/pictures/formats.svg`` and ``formats-curves.svg`` too. ``--only PART`` does one part. Losses are those of
``python -m bench.train`` on the same data, a run for each format and seed; curves are of a larger model, with fp32 and
8-bit states, in few steps of few tokens.
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from bench.losses import Trained, draw, train_all
from bench.plots import pyplot
from bench.record import commit, machine
from offload_core.config.options import OffloadConfig
from offload_core.device.host import HostDevice
from offload_core.device.host_ranks import HostRanks
from offload_core.dtypes import BFLOAT16
from offload_core.engine import Engine
from offload_core.layout.partition import ParamSpec
from offload_core.memory.plan import format_table
from offload_core.rules import STATE_NAMES

RESULTS = Path(__file__).resolve().parent / "results" / "formats.jsonl"
PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
FORMATS: dict[str, dict[str, str]] = {
    "fp32": {},
    "bf16": {"state_format": "bf16"},
    "8bit": {"state_format": "8bit"},
    "8bit, bf16 masters": {"state_format": "8bit", "master_dtype": "bfloat16"},
}
IN_CURVES = ("fp32", "8bit")
OPTIONS = {
    name: [item for field, value in fields.items() for item in (f"--{field.replace('_', '-')}", value)]
    for name, fields in FORMATS.items()
}
"""Of ``bench.train``."""
CURVES = ["--preset", "gpt2-124m", "--steps", "150", "--micro-batch", "2", "--context", "64", "--eval-batches", "64"]
"""A step takes 0.7 s on two cores."""
AVERAGED = 10
"""Steps of a curve that are drawn as their mean."""


def allocated(fields: Mapping[str, Any], numel: int) -> float:
    """Measured: bytes a parameter that states take of the host."""
    config = OffloadConfig(op_order="torch", **fields)
    engine = Engine(config, HostRanks(HostDevice()), None)
    tensor = np.zeros(numel, BFLOAT16.numpy)
    engine.state_lock.change("", engine.add_parameters, [ParamSpec("w", numel, BFLOAT16)], [tensor])
    states = {name: n for name, n in engine.memory.report().items() if name in STATE_NAMES}
    own = tensor.nbytes if "master" not in states else 0  # on the CPU the parameter is its own master weight
    return (sum(states.values()) + own) / numel


def draw_curves(found: Mapping[str, Sequence[Trained]], picture: Path) -> None:
    """The training loss in each format over the seeds' mean, and its distance from fp32's for each seed."""
    plt = pyplot()
    figure, (above, below) = plt.subplots(2, 1, figsize=(6.5, 4), sharex=True, height_ratios=(2, 1))

    def smooth(losses: np.ndarray) -> np.ndarray:
        return losses[: len(losses) // AVERAGED * AVERAGED].reshape(-1, AVERAGED).mean(1)

    curves = {name: np.array([smooth(np.array(run.training)) for run in runs]) for name, runs in found.items()}
    steps = (np.arange(next(iter(curves.values())).shape[1]) + 1) * AVERAGED
    for (name, each), color in zip(curves.items(), ("#2a6f97", "#f4a259"), strict=True):
        above.plot(steps, each.mean(0), color=color, label=name)
    (first, base), *others = curves.items()
    for name, each in others:
        below.plot(steps, (each - base).T, color="#f4a259", alpha=0.6)
        below.set(ylabel=f"{name} - {first}")
    below.axhline(0, color="#2a6f97", linewidth=0.8)
    below.set(xlabel="step")
    above.set(ylabel="training loss, nats a byte")
    above.legend(frameon=False)
    above.set_title(f"mean of {len(base)} seeds and {AVERAGED} steps; below, a line a seed", loc="left", fontsize=8)
    figure.savefig(picture)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.formats", description=(__doc__ or "").partition("\n\n")[0])
    parts = ("bytes", "loss", "curves")
    parser.add_argument("--only", choices=parts, help="one part (default: all)")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="runs of each format (default: 5)")
    parser.add_argument("--train", default="", metavar="ARGUMENTS", help="more arguments for bench.train")
    parser.add_argument("--write", action="store_true", help="draw docs/pictures/formats*.svg")
    args = parser.parse_args(arguments)
    record: dict[str, Any] = {"bench": "formats", "machine": machine(), "commit": commit(), "config": vars(args)}

    def wanted(part: str) -> bool:
        return args.only in (None, part)

    if wanted("bytes"):
        record["bytes"] = {name: allocated(fields, 10**7) for name, fields in FORMATS.items()}
        rows = [[name, f"{n:.2f}"] for name, n in record["bytes"].items()]
        print(format_table(rows, ["format", "bytes of states a bf16 parameter, measured"]), end="\n\n")
    if wanted("loss"):
        runs = train_all(OPTIONS, args.seeds, args.train.split())
        record["loss"] = found = {name: [run.held_out for run in each] for name, each in runs.items()}
        fp32 = found["fp32"]
        spread = statistics.stdev(fp32) if len(fp32) > 1 else float("nan")
        rows = [
            [name, f"{statistics.mean(v):.4f}", f"{(statistics.mean(v) - statistics.mean(fp32)) / spread:+.2f}"]
            for name, v in found.items()
        ]
        print(format_table(rows, ["format", "held-out loss, mean", "from fp32's, in its standard deviations"]))
        if args.write:
            draw(found, PICTURES / "formats.svg")
    if wanted("curves"):
        in_curves = {name: OPTIONS[name] for name in IN_CURVES}
        runs = train_all(in_curves, args.seeds, [*CURVES, *args.train.split()])
        record["curves"] = {name: [asdict(run) for run in each] for name, each in runs.items()}
        rows = [[name, *(f"{run.held_out:.4f}" for run in each)] for name, each in runs.items()]
        print(format_table(rows, ["held-out loss", *(f"seed {seed}" for seed in range(args.seeds))]))
        if args.write:
            draw_curves(runs, PICTURES / "formats-curves.svg")
    with RESULTS.open("a") as out:
        out.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
