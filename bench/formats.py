"""The formats of optimizer states: bytes, time of an update (``bench.parts.state_formats``), and the loss.

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.parts import state_formats
from bench.plots import pyplot
from bench.record import commit, machine
from offload_core.config.options import OffloadConfig
from offload_core.device.host import HostDevice
from offload_core.device.host_ranks import HostRanks
from offload_core.dtypes import BFLOAT16
from offload_core.layout.partition import ParamSpec
from offload_core.memory.plan import format_table
from offload_core.rules.adam import STATE_NAMES
from offload_core.step.pipeline import Pipeline

RESULTS = Path(__file__).resolve().parent / "results" / "formats.jsonl"
PICTURE = Path(__file__).resolve().parent.parent / "docs" / "pictures" / "formats.svg"
FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"state_format": "bf16"},
    "8bit": {"state_format": "8bit"},
    "8bit, bf16 masters": {"state_format": "8bit", "master_dtype": "bfloat16"},
}


def allocated(fields: Mapping[str, Any], numel: int) -> float:
    """Measured: bytes a parameter that states take of the host."""
    config = OffloadConfig(op_order="torch", **fields)
    pipeline = Pipeline(config, HostRanks(HostDevice()), None)
    tensor = np.zeros(numel, BFLOAT16.numpy)
    pipeline.add_parameters([ParamSpec("w", numel, BFLOAT16)], [tensor])
    states = {name: n for name, n in pipeline.memory.report().items() if name in STATE_NAMES}
    own = tensor.nbytes if "master" not in states else 0  # on the CPU the parameter is its own master weight
    return (sum(states.values()) + own) / numel


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
        state_formats.main(["--numel", str(args.numel), "--threads", str(args.threads), "--rounds", str(args.rounds)])
        print()
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
