"""Runs of ``bench.train`` that differ in one option, and their losses as a picture."""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.plots import pyplot


@dataclass(frozen=True)
class Trained:
    """A run of ``bench.train``: its losses, in nats a byte."""

    training: list[float]
    """The loss of each step."""
    held_out: float
    """Infinity if it is no number."""


def train(name: str, seed: int, arguments: Sequence[str]) -> Trained:
    """Train bfloat16 parameters with these arguments of ``bench.train``, and print the loss under this name. Runs of
    one seed have the same data and the same first parameters."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bench.train", "--param-dtype", "bfloat16", "--compare", "0"]
        command += ["--sample-bytes", "0", "--seed", str(seed), "--out", folder, *arguments]
        env = os.environ | {"OMP_WAIT_POLICY": "passive"}
        subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
        summary = json.loads((Path(folder) / "summary.json").read_text())
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    held_out = math.inf if summary["held_out_loss"] is None else summary["held_out_loss"]
    print(f"seed {seed}, {name}: held-out loss {held_out:.4f}", flush=True)
    return Trained([round(json.loads(line)["loss"], 4) for line in lines], held_out)


def train_all(options: Mapping[str, Sequence[str]], seeds: int, arguments: Sequence[str]) -> dict[str, list[Trained]]:
    """Return, by name of its options, a run for each seed. The runs of one seed follow each other."""
    runs: dict[str, list[Trained]] = {name: [] for name in options}
    for seed in range(seeds):
        for name, found in runs.items():
            found.append(train(name, seed, [*options[name], *arguments]))
    return runs


def draw(found: Mapping[str, Sequence[float]], picture: Path) -> None:
    """A point a seed, and the mean with the standard deviation of the seeds of each name."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(6.5, 2.2))
    for i, values in enumerate(found.values()):
        axes.plot([i] * len(values), values, "o", color="#2a6f97", alpha=0.5, markersize=4)
        axes.errorbar([i + 0.15], [statistics.mean(values)], yerr=[spread(values)], fmt="_", color="#f4a259", capsize=4)
    axes.set_xticks(range(len(found)), list(found))
    axes.set(ylabel="held-out loss, nats a byte")
    seeds = len(next(iter(found.values())))
    axes.set_title(f"{seeds} seeds each; orange: their mean and standard deviation", loc="left", fontsize=8)
    figure.savefig(picture)


def spread(values: Sequence[float]) -> float:
    """Return the standard deviation; 0 of a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0
