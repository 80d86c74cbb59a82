"""The contender's end of ``bench.parts.nvme``, started with SETTINGS: updates of bf16 parameters in host memory.

Gradients are given, and all parameters have the same memory for them. A store has the states.
"""

import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.worker import Step, become_rank, serve
from offload_core.config.options import OffloadConfig
from offload_core.device.host import HostDevice
from offload_core.device.host_ranks import HostRanks
from offload_core.dtypes import BFLOAT16
from offload_core.engine import Engine
from offload_core.layout.partition import ParamSpec
from offload_core.rules.adam import AdamHyper
from offload_core.step.decision import StepArguments

PARAM = 1 << 22
"""Elements of a parameter."""
_DRAWN = 1 << 14


def sizes(numel: int) -> Iterator[int]:
    """Yield the elements of each parameter."""
    for start in range(0, numel, PARAM):
        yield min(PARAM, numel - start)


def tensor_bytes(numel: int) -> int:
    """Return the bytes of the parameters and the gradient, which are no states."""
    return (numel + min(numel, PARAM)) * BFLOAT16.itemsize


def moved() -> tuple[int, int]:
    """Return the bytes that this process has read from disks and written to them."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:  # no Linux, or a container that hides it
        return 0, 0
    known = dict(line.split(": ") for line in lines)
    return int(known["read_bytes"]), int(known["write_bytes"])


def make_step(numel: int, fields: dict[str, Any]) -> Step:
    """Return the update of so many parameters, in ms, with the bytes a parameter that it read and wrote on disks."""
    config = OffloadConfig(**fields)
    engine = Engine(config, HostRanks(HostDevice()), None)
    change, add = engine.state_lock.change, engine.gradients.add
    drawn = (np.random.default_rng(0).standard_normal(_DRAWN) * 1e-3).astype(BFLOAT16.numpy)
    tensors = [np.resize(drawn, n) for n in sizes(numel)]
    gradient = np.resize(drawn, max(sizes(numel)))
    specs = [ParamSpec(f"p{i}", tensor.size, BFLOAT16) for i, tensor in enumerate(tensors)]
    change("add_parameters()", partial(engine.add_parameters, specs, tensors))
    gradients = {i: gradient[: spec.numel] for i, spec in enumerate(specs)}
    arguments = StepArguments([AdamHyper(1e-3)], tensors)

    def update() -> None:
        add(gradients)
        engine.step(arguments)
        engine.finish()

    def step(micro_batch: int) -> dict[str, float]:
        before, start = moved(), time.perf_counter()
        change("step()", update)
        seconds, after = time.perf_counter() - start, moved()
        read, written = ((b - a) / numel for a, b in zip(before, after, strict=True))
        return {"total": 1e3 * seconds, "read": read, "written": written}

    return step


def main() -> None:
    (words,), *streams = become_rank()
    settings = json.loads(words)
    serve(*streams, 0, partial(make_step, settings["numel"], settings["fields"]))


if __name__ == "__main__":
    main()
