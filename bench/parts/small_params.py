"""Models of many small parameters on the CPU, where Python counts and not the update: a step of ``OffloadedAdamW``
beside torch's own AdamW, and what an engine's hooks add to backward.
"""

import argparse
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from bench import record
from bench.harness.recording import Recording
from bench.harness.rounds import interleave, seconds
from frontends.torch import OffloadedAdamW, wrap
from offload_core.support.processors import available_cpus
from offload_core.support.units import count

MODELS = {(1_000, 16): 0.6, (5_000, 3): 1.0}
"""Parameters and their elements, and the target of a step over that of torch's fused AdamW."""
OURS, FUSED, FOREACH = "OffloadedAdamW", "torch's AdamW, fused", "torch's AdamW, foreach"
ENGINE, PLAIN = "engine", "PyTorch"


class Model(nn.Module):
    """The sum of all squares: backward makes each gradient and does little else."""

    def __init__(self, n: int, numel: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.params = nn.ParameterList([nn.Parameter(torch.randn(numel)) for _ in range(n)])

    def forward(self) -> torch.Tensor:
        return torch.cat(list(self.params)).square().sum()


def step_of(optimizer: torch.optim.Optimizer, clock: Callable[[], float]) -> Callable[[], float]:
    """Seconds of a step that takes its gradients from ``p.grad``."""
    params = [param for group in optimizer.param_groups for param in group["params"]]

    def step() -> float:
        for param in params:
            param.grad = torch.ones_like(param)
        return seconds(optimizer.step, clock)

    return step


def iteration_of(
    forward: Callable[[], torch.Tensor],
    backward: Callable[[torch.Tensor], object],
    step: Callable[[], object],
    clock: Callable[[], float],
) -> Callable[[], tuple[float, float]]:
    """Seconds of a backward and of the step that follows."""

    def run() -> tuple[float, float]:
        loss = forward()
        return seconds(lambda: backward(loss), clock), seconds(step, clock)

    return run


def measure(recording: Recording, n: int, numel: int, target: float, args: argparse.Namespace) -> None:
    """Steps of the optimizers in one run, backward and step of the engine in another."""
    made = {
        OURS: OffloadedAdamW(Model(n, numel).parameters(), lr=1e-3, num_threads=args.threads),
        FUSED: torch.optim.AdamW(Model(n, numel).parameters(), lr=1e-3, fused=True),
        FOREACH: torch.optim.AdamW(Model(n, numel).parameters(), lr=1e-3, foreach=True),
    }
    clock = time.process_time if args.processor else time.perf_counter
    steps = interleave({name: step_of(optimizer, clock) for name, optimizer in made.items()}, args.rounds, warm_up=3)
    made[OURS].close()
    engine, plain = wrap(Model(n, numel), lr=1e-3, num_threads=args.threads), Model(n, numel)
    fused = torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)

    def forward() -> torch.Tensor:
        plain.zero_grad()
        return plain()

    runs = {
        ENGINE: iteration_of(engine, engine.backward, engine.step, clock),
        PLAIN: iteration_of(forward, torch.Tensor.backward, fused.step, clock),
    }
    found = interleave(runs, args.rounds, warm_up=3)
    backwards = {name: [one for one, _ in times] for name, times in found.items()}
    engine.close()

    size = f"{n:,} parameters of {numel}"
    per_param = {name: [s / n * 1e6 for s in times] for name, times in steps.items()}
    per_param[ENGINE] = [s / n * 1e6 for _, s in found[ENGINE]]
    hooks = [(a - b) / n * 1e6 for a, b in zip(backwards[ENGINE], backwards[PLAIN], strict=True)]
    rows = [
        *record.rows("step", "us/param", per_param, params=n, numel=numel),
        *record.rows("added to backward", "us/gradient", {ENGINE: hooks}, params=n, numel=numel),
    ]
    for row in rows:
        print(f"{size}: {row['name']:24} {row['metric']:18} {row['p50']:7.2f} {row['unit']}")
    recording.rows += rows
    ratios = [
        record.ratio(f"step of {size}, {OURS} / {FUSED}", steps[OURS], steps[FUSED], target=target),
        record.ratio(f"step of {size}, {OURS} / {FOREACH}", steps[OURS], steps[FOREACH]),
        record.ratio(f"step of {size}, {ENGINE} / {PLAIN}", *([s for _, s in times] for times in found.values())),
        record.ratio(f"backward of {size}, {ENGINE} / {PLAIN}", backwards[ENGINE], backwards[PLAIN]),
    ]
    recording.add_ratios(ratios, "reading and checking each parameter and gradient from Python is what is left")


def main(arguments: list[str] | None = None) -> int:
    options = record.parser("small_params", __doc__.strip())
    options.add_argument("--threads", type=count, default=available_cpus())
    options.add_argument("--rounds", type=count, help="default: 30; --quick: 2")
    options.add_argument("--processor", action="store_true", help="the processor's time, if others use the machine too")
    args = options.parse_args(arguments)
    args.rounds = args.rounds or (2 if args.quick else 30)
    torch.set_num_threads(args.threads)
    config = {"models": [list(model) for model in MODELS], "threads": args.threads, "rounds": args.rounds}
    config["clock"] = "processor" if args.processor else "wall"
    recording = Recording("small_params", "Steps of many small parameters", args.json, config)
    recording.versions |= record.versions("torch")
    for (n, numel), target in MODELS.items():
        measure(recording, n, numel, target, args)
        recording.keep()
    return recording.finish()


if __name__ == "__main__":
    sys.exit(main())
