"""A whole training step on the CPU, one rank: what ``wrap`` costs forward and backward, and its step beside the
streaming limit of its bytes.

Contenders take turns, a step each, in another order each round; ratios are of medians over rounds. The plain loop does
forward and backward only. The streaming limit is measured on fewer elements and given for the model's number.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

import offload_core
from bench.cpu_adam import Buffers, build_stream
from bench.gpt_torch import GPT
from bench.record import append, machine
from frontends.torch import wrap
from offload_core.cpus import available_cpus
from offload_core.dtypes import BFLOAT16
from offload_core.model_shapes import GPTConfig

MODELS = {
    "34m": GPTConfig(layers=8, width=512, heads=8, vocabulary=16384, positions=None),
    "319m": GPTConfig(layers=24, width=1024, heads=16, vocabulary=16384, positions=None),
}
_STREAMED = 50_000_000

Parts = dict[str, float]


def batch(config: GPTConfig, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(config.vocabulary, (2, 65), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def timed(*acts: tuple[str, Callable[[], None]]) -> Parts:
    parts = {}
    for name, act in acts:
        start = time.perf_counter()
        act()
        parts[name] = (time.perf_counter() - start) * 1e3
    return parts


def plain(config: GPTConfig) -> Callable[[int], Parts]:
    """Forward and backward of a bf16 model, gradients freed afterwards."""
    torch.manual_seed(0)
    model = GPT(config).bfloat16()

    def run(seed: int) -> Parts:
        inputs, targets = batch(config, seed)
        loss: list[torch.Tensor] = []
        parts = timed(
            ("forward", lambda: loss.append(model(inputs, targets))), ("backward", lambda: loss[0].backward())
        )
        model.zero_grad()
        return parts

    return run


def wrapped(config: GPTConfig, clipping: float | None) -> Callable[[int], Parts]:
    """The same through ``wrap``, with its step."""
    torch.manual_seed(0)
    engine = wrap(GPT(config), lr=1e-4, param_dtype="bfloat16", gradient_clipping=clipping)

    def run(seed: int) -> Parts:
        inputs, targets = batch(config, seed)
        loss: list[torch.Tensor] = []
        return timed(
            ("forward", lambda: loss.append(engine(inputs, targets))),
            ("backward", lambda: engine.backward(loss[0])),
            ("step", lambda: engine.step() and None),
        )

    return run


def streamed(numel: int, threads: int) -> Callable[[int], Parts]:
    """Reading a bf16 gradient and three fp32 states, writing the states and a bf16 parameter."""
    run = Buffers(_STREAMED, threads).stream(*build_stream(), BFLOAT16)
    return lambda seed: {"step": timed(("step", run))["step"] * numel / _STREAMED}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="319m")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="append the record to this file")
    args = parser.parse_args()
    config, threads = MODELS[args.model], available_cpus()
    torch.set_num_threads(threads)
    runs = {
        "plain": plain(config),
        "wrap": wrapped(config, None),
        "wrap, clipping": wrapped(config, 1.0),
        "streaming limit": streamed(config.numel, threads),
    }
    order = random.Random(0)
    times: dict[str, dict[str, list[float]]] = {name: {} for name in runs}
    for i in range(args.rounds + 2):  # two are not counted
        for name, run in order.sample(list(runs.items()), len(runs)):
            for part, ms in run(i).items():
                times[name].setdefault(part, []).append(ms)
    medians = {
        name: {part: statistics.median(values[2:]) for part, values in parts.items()} for name, parts in times.items()
    }
    limit = medians["streaming limit"]["step"]
    ratios = {
        "wrap / plain, forward and backward": sum(medians["wrap"][p] for p in ("forward", "backward"))
        / sum(medians["plain"].values()),
        "step / streaming limit": medians["wrap"]["step"] / limit,
        "step with clipping / streaming limit": medians["wrap, clipping"]["step"] / limit,
    }
    print(f"{machine()}; {config.numel:,} parameters in bf16, 2 x 64 tokens, {threads} threads, {args.rounds} rounds")
    for name, parts in medians.items():
        print(f"{name:16}", *(f"{part} {ms:8.1f} ms" for part, ms in parts.items()))
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.3f}")
    record = {
        "bench": "step", "torch": torch.__version__, "threads": threads,
        "model": args.model, "kernels": asdict(offload_core.kernel_info()), "ms": times, "ratios": ratios,
    }  # fmt: skip
    append(args.json, record)


if __name__ == "__main__":
    main()
