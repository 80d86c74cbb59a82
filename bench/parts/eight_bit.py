"""The update with 8-bit moments, beside bitsandbytes' and torchao's 8-bit AdamW on the CPU.

Ours has bf16 gradients and parameters, and fp32 master weights; theirs has gradients of its parameters' type, and no
master weights. Times are the processors' of all threads, so that other work here does not count. A library that is not
installed, or does not run here, is named.
"""

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from bench.harness.rounds import interleave, timed
from bench.harness.rule_updates import gradient
from bench.parts import state_formats
from bench.record import append, missing, parser, ratio, row, versions
from offload_core.dtypes import BFLOAT16
from offload_core.memory.host_memory import HostMemory
from offload_core.support.processors import available_cpus

OURS = "offload-core"
TARGET = 10
"""The target: their time divided by ours."""
_WARM_UP = 4
"""Steps that are not counted: the libraries compile in them."""


def ours(n: int, threads: int) -> Callable[[], None]:
    memory = HostMemory(threads)
    return state_formats.update(memory, threads, gradient(memory, n, BFLOAT16), "8-bit moments", 1)


def theirs(make: Callable[[], Any], n: int, dtype: str) -> Callable[[], object]:
    """Return the step of an optimizer of one parameter, after the warm-up."""
    import torch

    param = torch.nn.Parameter((torch.randn(n) * 1e-3).to(getattr(torch, dtype)))
    param.grad = torch.randn_like(param) * 1e-3
    optimizer = make()([param], lr=1e-3)
    for _ in range(_WARM_UP):
        optimizer.step()
    return optimizer.step


def bitsandbytes() -> Any:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit


def torchao() -> Any:
    from torchao.optim import AdamW8bit

    return AdamW8bit


def main(arguments: list[str] | None = None) -> None:
    options = parser("eight_bit", (__doc__ or "").partition("\n\n")[0])
    options.add_argument("--numel", type=int, help="parameters (default: 20 M; --quick: 1 M)")
    options.add_argument("--threads", type=int, default=available_cpus())
    options.add_argument("--rounds", type=int, help="default: 7; --quick: 2")
    args = options.parse_args(arguments)
    n = args.numel or (10**6 if args.quick else 2 * 10**7)
    rounds = args.rounds or (2 if args.quick else 7)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin while they wait would count
    contenders: dict[str, Callable[[], object]] = {OURS: ours(n, args.threads)}
    absent = []
    for make in (bitsandbytes, torchao):
        for dtype in ("float32", "bfloat16"):
            name = f"{make.__name__}, {dtype}"
            try:
                import torch

                torch.set_num_threads(args.threads)
                contenders[name] = theirs(make, n, dtype)
            except Exception as error:  # not installed, or it cannot compile here
                absent.append(missing(name, error))
                print(f"{name}: COULD NOT RUN: {absent[-1]['why']}")
    seconds = interleave({name: timed(run, time.process_time) for name, run in contenders.items()}, rounds)
    ns = {name: [s / n * 1e9 for s in values] for name, values in seconds.items()}
    found = [row(name, "update", "ns/param", values, params=n, threads=args.threads) for name, values in ns.items()]
    compared = partial(ratio, bottom=ns[OURS], target=TARGET, better="higher")
    ratios = [compared(f"{name} / ours", values) for name, values in ns.items() if name != OURS]
    for each in found:
        print(f"{each['name']:26}{each['p50']:>10.2f} ns/param")
    for known in ratios:
        print(f"  {known['name']}: {known['p50']:.1f} ({known['p20']:.1f} to {known['p80']:.1f}) (target: {TARGET})")
    record = {"bench": "eight_bit", "title": "8-bit AdamW on the CPU"}
    record |= {"versions": versions("numpy", "torch", "bitsandbytes", "torchao"), "rows": found, "ratios": ratios}
    config = {"params": n, "threads": args.threads, "rounds": rounds}
    append(args.json, {**record, "config": config, "missing": absent, "notes": []})


if __name__ == "__main__":
    main()
