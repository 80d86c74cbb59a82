"""Contenders of ``bench.parts.update`` for every update rule: the kernel with states in each format, torch's fused
optimizer, DeepSpeed's, and the streaming limit of the bytes of each.

Muon has two passes. The time between them, in which a device iterates, is not a part of these.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch

from bench.harness.rounds import interleave, timed
from bench.harness.rule_updates import FORMATS, Call, calls, distinct_formats, formats_of, gradient
from bench.harness.streaming import bytes_a_parameter, streaming
from bench.record import missing, ratio, row
from offload_core.config.options import OffloadConfig
from offload_core.dtypes import BFLOAT16, FLOAT32
from offload_core.memory.host_memory import HostMemory

LIMIT = 1.10
"""The target for the time of a rule with states in fp32, over that of the streaming limit."""
METRIC = "update by rule"
FUSED = "torch, fused"
_FP32 = next(iter(FORMATS))


Optimizer = Callable[..., torch.optim.Optimizer]


@dataclass(frozen=True)
class Peers:
    """A rule, and the optimizers of other libraries that compute it."""

    fields: dict[str, Any]
    """Of ``OffloadConfig``."""
    fused: Optimizer | None = None
    deepspeed: tuple[str, dict[str, Any]] | None = None
    """The module in ``deepspeed.ops`` and the class, and its arguments."""


RULES = {
    "AdamW": Peers({}, torch.optim.AdamW, ("adam.DeepSpeedCPUAdam", {"weight_decay": 0.01})),
    "Adam, L2": Peers(
        {"adam_mode": "adam", "weight_decay": 0.01},
        partial(torch.optim.Adam, weight_decay=0.01),
        ("adam.DeepSpeedCPUAdam", {"weight_decay": 0.01, "adamw_mode": False}),
    ),
    "SGD, momentum": Peers({"optimizer": "sgd", "momentum": 0.9}, partial(torch.optim.SGD, momentum=0.9)),
    "Lion": Peers({"optimizer": "lion"}, None, ("lion.DeepSpeedCPULion", {})),
    "Adagrad": Peers({"optimizer": "adagrad"}, torch.optim.Adagrad, ("adagrad.DeepSpeedCPUAdagrad", {})),
    "Muon": Peers({"optimizer": "muon"}),
}


def measure_rule(name: str, n: int, threads: int, rounds: int) -> dict[str, Any]:
    """Measure a rule on n parameters, with fp32 gradients and parameters, and with bf16 ones and each format."""
    peers = RULES[name]
    ours = _ours(peers, n, threads)
    contenders: dict[str, Callable[[], object]] = {}
    for what, call in ours.items():
        contenders |= {what: call.run, f"{what}, limit": streaming(call.traffic, n, threads)}
    absent = []
    if peers.fused is not None or peers.deepspeed is not None:
        param = torch.nn.Parameter(torch.randn(n) * 1e-3)
        param.grad = torch.randn(n) * 1e-3
    if peers.fused is not None:
        contenders[FUSED] = peers.fused([param], fused=True).step
    if peers.deepspeed is not None:
        path, arguments = peers.deepspeed
        module, _, theirs = path.partition(".")
        try:
            make = getattr(import_module(f"deepspeed.ops.{module}"), theirs)
            contenders[theirs] = make([param], lr=1e-3, **arguments).step
        except Exception as error:  # not installed, or its C++ does not compile here
            absent.append(missing(f"{name}: {theirs}", error))
    seconds = interleave({what: timed(run) for what, run in contenders.items()}, rounds, warm_up=2, pause=0.02)
    ns = {what: [s / n * 1e9 for s in values] for what, values in seconds.items()}
    n_bytes = {what: bytes_a_parameter(call.traffic, n) for what, call in ours.items()}
    fp32 = next(iter(ours))
    found = [
        row(f"{name}: {what}", METRIC, "ns/param", values, params=n, threads=threads,
            bytes=round(n_bytes.get(what.removesuffix(", limit"), n_bytes[fp32]), 3))
        for what, values in ns.items()
    ]  # fmt: skip
    ratios = []
    for what in ours:
        target = LIMIT if "moments" not in what and "masters" not in what else None
        ratios.append(ratio(f"{name}: {what} / its limit", ns[what], ns[f"{what}, limit"], target=target))
    for other in contenders:
        if other.removesuffix(", limit") not in ours:
            target = 1.0 if other == FUSED else None
            ratios.append(ratio(f"{name}: {fp32} / {other}", ns[fp32], ns[other], target=target))
    return {"rows": found, "ratios": ratios, "missing": absent, "notes": []}


def _ours(peers: Peers, n: int, threads: int) -> dict[str, Call]:
    config = OffloadConfig(op_order="torch", **peers.fields)
    rule, memory = config.rule(), HostMemory(threads)
    hyper = rule.hyper(**config.values(0))
    wide, narrow = (gradient(memory, n, dtype) for dtype in (FLOAT32, BFLOAT16))
    param = memory.allocate("param", n, BFLOAT16.numpy)
    found = {}

    def add(what: str, made: dict[str, Call]) -> None:
        for stage, call in made.items():
            found[what if len(made) == 1 else f"{what}, {stage}"] = call

    add("fp32", calls(memory, threads, rule, hyper, formats_of(rule, _FP32), wide, None))
    for formats in distinct_formats(rule):
        what = "bf16" if formats == _FP32 else f"bf16, {formats}"
        add(what, calls(memory, threads, rule, hyper, formats_of(rule, formats), narrow, param))
    return found
