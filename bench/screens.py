"""The pictures of the documentation that show real runs: a loss curve, the memory of a process, a step's trace.

``python -m bench.screens`` trains for some minutes and writes them into ``docs/pictures``; ``python -m bench.screens
trace`` makes one of them. Their figures depend on the machine and on what else runs there.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.plots import pyplot

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
SHARED_MACHINE = {"OMP_WAIT_POLICY": "passive"}
"""PyTorch's threads sleep where they would spin: runs are as fast beside other processes (docs/troubleshooting.md)."""


def run(*arguments: str, ranks: int = 1) -> None:
    """Run ``python -m bench.train``, on its own or under torchrun."""
    launcher = ["torch.distributed.run", "--nproc-per-node", str(ranks), "-m"] if ranks > 1 else []
    command = [sys.executable, "-m", *launcher, "bench.train", *arguments]
    subprocess.run(command, check=True, env=os.environ | SHARED_MACHINE)


def draw_loss(metrics: Path, picture: Path) -> None:
    """The losses of a run with ``--compare``: ours, and those of the framework's own AdamW in dashes on top."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [record["step"] for record in records]
    differ = sum(record["loss"] != record["plain_loss"] for record in records)
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(6.5, 2.6))
    axes.plot(steps, [record["loss"] for record in records], color="#2a6f97", linewidth=2.5, label="offload-core")
    plain = [record["plain_loss"] for record in records]
    axes.plot(steps, plain, color="#f4a259", linewidth=1, linestyle="--", label="torch.optim.AdamW(fused=True)")
    axes.set(xlabel="step", ylabel="training loss, nats a byte")
    axes.set_title(f"{differ} of {len(records)} losses differ in any bit", loc="left", fontsize=8)
    axes.legend(frameon=False)
    save(figure, picture)


def draw_trace(trace: Path, picture: Path) -> None:
    """The spans of a trace's file as Perfetto shows them: a row a lane, a color a bucket."""
    events = json.loads(trace.read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    began = min(span["ts"] for span in spans)
    plt = pyplot()
    colors = plt.get_cmap("Set2").colors
    figure, axes = plt.subplots(figsize=(9, 0.4 * len(lanes) + 0.9))
    said = ""
    for span in sorted(spans, key=lambda span: span["ts"]):
        bucket, waits = span["args"].get("bucket"), span["name"].endswith("wait")
        color = "#d9d9d9" if bucket is None else colors[bucket % len(colors)]
        style = {"height": 0.35, "color": "white", "edgecolor": "#777777", "hatch": "////"} if waits else {}
        start, length = (span["ts"] - began) / 1e3, span["dur"] / 1e3
        axes.barh(span["tid"], length, left=start, **({"height": 0.75, "color": color, "edgecolor": "white"} | style))
        if span["tid"] == 0 and not waits and span["name"] != said:  # of several parts the first one has the name
            said = span["name"]
            axes.text(start + length / 2, -0.42, said, ha="center", va="bottom")
    for bucket in sorted({span["args"]["bucket"] for span in spans if span["args"].get("bucket") is not None}):
        axes.barh(0, 0, color=colors[bucket % len(colors)], label=f"bucket {bucket}")
    axes.barh(0, 0, color="white", edgecolor="#777777", hatch="////", label="waiting")
    axes.set_yticks([*lanes], lanes.values())
    axes.set(xlabel="ms", ylim=(max(lanes) + 0.6, -0.9))
    figure.legend(loc="outside lower center", ncols=6, frameon=False)
    save(figure, picture)


def save(figure: Any, picture: Path) -> None:
    figure.savefig(picture, metadata={"Date": None})
    print(picture)


def loss(folder: Path, picture: Path) -> None:
    run("--compare", "--clip", "0", "--sample-bytes", "0", "--out", str(folder))
    draw_loss(folder / "metrics.jsonl", picture)


def memory(folder: Path, picture: Path) -> None:
    """GPT-2 with bf16 parameters on one rank, between backward and step, when its gradients are there."""
    import torch

    from bench.train.gpt_torch import GPT
    from bench.train.presets import PRESETS
    from frontends.torch import wrap

    gpt = PRESETS["gpt2-124m"].gpt
    engine = wrap(GPT(gpt), param_dtype="bfloat16", lr=1e-4)
    tokens = torch.zeros(1, 32, dtype=torch.int64)
    engine.backward(engine(tokens).float().square().mean())
    pyplot()  # its settings: text stays text, so that the file is small
    engine.memory_report().plot(picture)
    print(picture)


def trace(folder: Path, picture: Path) -> None:
    """One step of two ranks: a single rank on the CPU copies and exchanges nothing."""
    small = ("--steps", "4", "--micro-batch", "2", "--context", "128", "--eval-batches", "1", "--sample-bytes", "0")
    recorded = folder / "step.json"
    run("--preset", "gpt2-124m", *small, "--out", str(folder), "--trace", str(recorded), ranks=2)
    draw_trace(folder / "step.rank0.json", picture)


def layers(folder: Path, picture: Path) -> None:
    """One step of two ranks in which four micro-batches pass block by block, parameters in shards (stage 3)."""
    small = ("--steps", "3", "--micro-batch", "2", "--context", "64", "--eval-batches", "1", "--sample-bytes", "0")
    way = ("--accumulate", "4", "--layerwise", "--stage", "3", "--offload-param", "cpu", "--clip", "0")
    way = (*way, "--persistence-threshold", "2000000")  # a bar for each of a block's two largest matrices is enough
    recorded = folder / "step.json"
    run("--preset", "gpt2-124m", *small, *way, "--out", str(folder), "--trace", str(recorded), ranks=2)
    draw_trace(folder / "step.rank0.json", picture)


SCREENS = {"loss": loss, "memory": memory, "trace": trace, "layers": layers}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.screens", description=__doc__.splitlines()[0])
    parser.add_argument("screens", nargs="*", metavar="screen", help=f"of {', '.join(SCREENS)} (default: all)")
    asked = parser.parse_args(arguments).screens or [*SCREENS]
    if unknown := [name for name in asked if name not in SCREENS]:
        parser.error(f"got {', '.join(unknown)}, expected some of {', '.join(SCREENS)}")
    PICTURES.mkdir(exist_ok=True)
    for name in asked:
        with tempfile.TemporaryDirectory() as folder:
            SCREENS[name](Path(folder), PICTURES / f"{name}.svg")


if __name__ == "__main__":
    main()
