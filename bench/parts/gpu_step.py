"""Training steps on one GPU: AdamW in the GPU, and ours by schedule, over tokens a step; copies; exactness.

Run by ``bench/on_gpu.sh``. Writes JSON and Markdown to --out; ends non-zero where bits differ. ``--device cpu`` with
``--model toy`` only shows that it runs.
"""

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.record import commit, machine
from bench.train.gpt_torch import GPT
from bench.train.presets import PRESETS
from frontends.torch import wrap
from frontends.torch.ranks.pinning import pinning_for
from offload_core.commands.model_shapes import GPT2_VOCABULARY, GPTConfig
from offload_core.memory.host_memory import HostMemory

MODELS = {
    "toy": GPTConfig(layers=2, width=128, heads=4, vocabulary=256, positions=None),
    "124m": PRESETS["gpt2-124m"].gpt,
    "1.5b": PRESETS["gpt2-1.5b"].gpt,
    "3b": GPTConfig(layers=36, width=2560, heads=32, vocabulary=GPT2_VOCABULARY, positions=1024),
    "6b": GPTConfig(layers=32, width=4096, heads=32, vocabulary=GPT2_VOCABULARY, positions=1024),
}
CONTENDERS: dict[str, dict[str, Any] | None] = {
    "AdamW in the GPU": None,
    "serial": {"schedule": "serial"},
    "overlap": {"schedule": "overlap"},
    "overlap, clipping": {"schedule": "overlap", "gradient_clipping": 1.0},
    "overlap, update in backward": {"schedule": "overlap", "update_in_backward": True},
    "overlap, clipping, update in backward": {
        "schedule": "overlap",
        "gradient_clipping": 1.0,
        "update_in_backward": True,
    },
    "delayed": {"schedule": "delayed", "delay_warmup_steps": 1},
}


def make_model(config: GPTConfig, device: torch.device, checkpointing: bool) -> GPT:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            return GPT(config, checkpointing)
    finally:
        torch.set_default_dtype(torch.float32)


def batch(config: GPTConfig, device: torch.device, windows: int, context: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocabulary, (windows, context + 1), generator=generator).to(device)


class InGpu:
    """bf16 parameters, fp32 master weights and moments, all on the device; torch's fused AdamW."""

    def __init__(self, model: GPT) -> None:
        self.model = model
        self.masters = [p.detach().float().requires_grad_() for p in model.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-5, fused=True)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        for p, master in zip(self.model.parameters(), self.masters, strict=True):
            master.grad, p.grad = p.grad.float(), None
        self.optimizer.step()
        with torch.no_grad():
            for p, master in zip(self.model.parameters(), self.masters, strict=True):
                p.copy_(master)
                master.grad = None

    def __call__(self, *args: Any) -> Any:
        return self.model(*args)


@contextmanager
def trained(config: GPTConfig, device: torch.device, fields: dict[str, Any] | None, accumulate: int) -> Iterator[Any]:
    model = make_model(config, device, checkpointing=config.layers > 12)
    if fields is None:
        yield InGpu(model)
        return
    engine = wrap(model, lr=1e-5, gradient_accumulation_steps=accumulate, **fields)
    try:
        yield engine
    finally:
        engine.close()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def step_seconds(engine: Any, inputs: list[torch.Tensor], device: torch.device, steps: int) -> float:
    """The median over ``steps`` steps of a step from one loss to the next, after three that are not counted."""
    seconds = []
    for _ in range(steps + 3):
        start = time.perf_counter()
        for i, tokens in enumerate(inputs):
            engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
            if not isinstance(engine, InGpu) or i + 1 == len(inputs):
                engine.step()
        # Work behind the step runs on into the next one, as in training: only the device is waited for.
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[3:])


def bits_after(steps: int, config: GPTConfig, device: torch.device, schedule: str) -> str:
    with trained(config, device, {"schedule": schedule, "gradient_clipping": 1.0}, 1) as engine:
        for seed in range(steps):
            tokens = batch(config, device, 2, 64, seed)
            engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
            engine.step()
        digest = hashlib.sha256()
        for p in engine.module.parameters():
            digest.update(p.detach().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def copy_rates(device: torch.device) -> dict[str, float]:
    """GB/s of one 256 MiB copy each way, from and to memory of ours (registered) and torch's pinned memory."""
    n_bytes = 1 << 28
    memory = HostMemory(4, pinning_for(device))
    ours = torch.from_numpy(memory.allocate("probe", n_bytes, np.dtype(np.uint8), pinned=True))
    hosts = {"ours": ours, "torch pinned": torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)}
    there = torch.empty(n_bytes, dtype=torch.uint8, device=device)
    rates = {}
    for name, host in hosts.items():
        ways: dict[str, Callable[[], Any]] = {
            "to device": lambda host=host: there.copy_(host, non_blocking=True),
            "to host": lambda host=host: host.copy_(there, non_blocking=True),
        }
        for way, copy in ways.items():
            seconds = []
            for _ in range(6):
                synchronize(device)
                start = time.perf_counter()
                copy()
                synchronize(device)
                seconds.append(time.perf_counter() - start)
            rates[f"{name}, {way}"] = n_bytes / statistics.median(seconds[1:]) / 1e9
    return rates


def largest_under(cap_bytes: int, device: torch.device, fields: dict[str, Any]) -> dict[str, Any]:
    """Of MODELS, each in turn with ours under a cap on device memory: its peak in bytes; None where it does not fit."""
    result: dict[str, Any] = {}
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(cap_bytes / total, 1.0), device)
    try:
        for name, config in MODELS.items():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            try:
                with trained(config, device, fields, 1) as engine:
                    step_seconds(engine, [batch(config, device, 1, 1024, 0)], device, 1)
                result[name] = torch.cuda.max_memory_allocated(device)
            except torch.cuda.OutOfMemoryError:
                result[name] = None
                break
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", choices=MODELS, default="1.5b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True, help="folder of gpu_step.json and gpu_step.md")
    args = parser.parse_args()
    device, config = torch.device(args.device), MODELS[args.model]
    record: dict[str, Any] = {
        "bench": "gpu_step", "machine": machine(), "commit": commit(), "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "model": args.model, "parameters": config.numel, "seconds": {},
    }  # fmt: skip
    digests = {schedule: bits_after(50, MODELS["toy"], device, schedule) for schedule in ("serial", "overlap")}
    record["overlap equals serial after 50 steps"] = exact = digests["serial"] == digests["overlap"]
    lines = [f"# {record['device']}, {config.numel:,} parameters in bf16", "", f"overlap equals serial: {exact}", ""]
    lines += ["| tokens a step | " + " | ".join(CONTENDERS) + " |", "|---" * (len(CONTENDERS) + 1) + "|"]
    for tokens in args.tokens:
        accumulate = max(tokens // (args.micro_batch * args.context), 1)
        row = {}
        for name, fields in CONTENDERS.items():
            inputs = [batch(config, device, args.micro_batch, args.context, i) for i in range(accumulate)]
            try:
                with trained(config, device, fields, accumulate) as engine:
                    row[name] = step_seconds(engine, inputs, device, args.steps)
            except torch.cuda.OutOfMemoryError:
                row[name] = None
            if device.type == "cuda":
                torch.cuda.empty_cache()
        record["seconds"][tokens] = row
        cells = ["out of memory" if s is None else f"{s:.3f} s" for s in row.values()]
        lines.append(f"| {tokens} | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    if device.type == "cuda":
        record["GB/s"] = copy_rates(device)
        record["peak bytes under a cap of 32 GB"] = {
            "stage 2": largest_under(32 * 10**9, device, {}),
            "parameters on the host": largest_under(32 * 10**9, device, {"stage": 3, "offload_param": "cpu"}),
        }
        lines += ["", *(f"- {name}: {rate:.1f} GB/s" for name, rate in record["GB/s"].items())]
        for how, peaks in record["peak bytes under a cap of 32 GB"].items():
            lines += [f"- under 32 GB of device memory, {how}, {name}: {peak} bytes" for name, peak in peaks.items()]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "gpu_step.json").write_text(json.dumps(record, indent=1) + "\n")
    (args.out / "gpu_step.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    if not exact:
        sys.exit("overlap and serial differ")


if __name__ == "__main__":
    main()
