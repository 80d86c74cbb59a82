"""Trains a GPT whose states and parameters lie on disk, on a machine whose memory is much smaller: `make demo-disk`.

The model is built in shards, each of which goes to the disk at once. A bucket is updated as soon as its gradients are
there (`update_in_backward`), so that the gradients of few parameters are in memory at a time.
"""

import argparse
import math
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.harness import rounds
from bench.train.gpt_torch import GPT
from frontends.torch import init, wrap
from offload_core.commands.machine import measure_bandwidths, measure_disk
from offload_core.commands.model_shapes import GPTConfig
from offload_core.config.options import OffloadConfig
from offload_core.device.exchange_sizes import planned_device
from offload_core.dtypes import BFLOAT16
from offload_core.layout.partition import ParamSpec
from offload_core.memory.host_memory import format_bytes
from offload_core.plans.planner import Planner
from offload_core.plans.prediction import Speeds, predict
from offload_core.plans.terms import BucketTerms

SIZES = {
    "0.1b": GPTConfig(layers=8, width=1024, heads=8, positions=0, vocabulary=256),
    "1b": GPTConfig(layers=20, width=2048, heads=16, positions=0, vocabulary=256),
    "3b": GPTConfig(layers=26, width=3072, heads=24, positions=0, vocabulary=256),
}


def settings(folder: str) -> dict[str, Any]:
    """The configuration: what it holds in memory follows from the bucket size and `max_live_parameters`."""
    return {
        "stage": 3,
        "lr": 1e-6,  # the rate of a first step, before a warm-up
        "offload_optimizer": "nvme",
        "offload_param": "nvme",
        "nvme_path": folder,
        "nvme_host_bytes": 0,
        "update_in_backward": True,
        "reduce_bucket_size": 16 * 2**20,
        "max_live_parameters": 100_000_000,
        "max_reuse_distance": 50_000_000,
        "prefetch_bucket_size": 40_000_000,
    }


def peak_bytes() -> int:
    """The most memory that this process has had so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def expected(gpt: GPTConfig, config: dict[str, Any], steps: int, tokens: int) -> str:
    """Measure the disk and the processor for some seconds, and say how long the run will take about."""
    terms = BucketTerms(OffloadConfig.resolve(config, op_order="torch"), planned_device(1, addressable=True))
    persistent = terms.config.param_persistence_threshold
    specs = [
        ParamSpec(name, math.prod(shape), BFLOAT16, partitioned=math.prod(shape) >= persistent)
        for name, shape in gpt.shapes.items()
    ]
    numel = sum(spec.numel for spec in specs)
    disk, dram = measure_disk(terms.config.nvme_path).both, measure_bandwidths(terms.config.threads).dram
    weight, x = torch.randn(4096, 4096, dtype=torch.bfloat16), torch.randn(tokens, 4096, dtype=torch.bfloat16)
    seconds = min(rounds.seconds(lambda: x @ weight) for _ in range(3))
    flops = 2 * x.shape[0] * weight.numel() / seconds
    planner = Planner(terms)
    step = predict(planner, specs, Speeds(dram=dram, disk=disk, flops=flops), tokens=tokens)
    states = planner.traffic(specs)[0].disk_write
    making = 6 * states / disk  # parameters are made, cut, read and written with their states
    return (
        f"{numel:,} parameters, {format_bytes(states)} of disk in {config['nvme_path']} ({disk / 1e9:.1f} GB/s): about "
        f"{making:.0f} s to make the model, and {step.seconds:.0f} s for each of {steps} steps. "
        "Ctrl-C ends it and frees the disk."
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.disk_demo", description=__doc__)
    parser.add_argument("--size", choices=tuple(SIZES), default="3b", help="of the model, in parameters (default: 3b)")
    parser.add_argument(
        "--nvme-path", default=tempfile.gettempdir(), help="the folder on a disk (default: that of temporary files)"
    )
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--context", type=int, default=32, help="bytes of text a step")
    args = parser.parse_args()
    config = settings(args.nvme_path)
    print(expected(SIZES[args.size], config, args.steps, args.context), flush=True)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    start = time.perf_counter()
    with init(config=config):
        model = GPT(SIZES[args.size])
    torch.set_default_dtype(torch.float32)
    print(f"built in {time.perf_counter() - start:.0f} s, peak {format_bytes(peak_bytes())}", flush=True)
    start = time.perf_counter()
    engine = wrap(model, **config)
    numel = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{numel:,} parameters, wrapped in {time.perf_counter() - start:.0f} s, peak {format_bytes(peak_bytes())}",
        flush=True,
    )
    print(engine.memory_report())
    text = np.frombuffer(Path(__file__).read_bytes(), np.uint8)
    for step in range(args.steps):
        start = time.perf_counter()
        window = torch.from_numpy(text[: args.context + 1].astype(np.int64))[None]
        loss = engine(window[:, :-1], window[:, 1:])
        forward = time.perf_counter() - start
        engine.backward(loss)
        engine.step()
        print(
            f"step {step + 1}: loss {loss.item():.4f}, {time.perf_counter() - start:.1f} s (forward {forward:.1f}), "
            f"peak {format_bytes(peak_bytes())}",
            flush=True,
        )
    engine.close()


if __name__ == "__main__":
    main()
