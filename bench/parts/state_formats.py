"""The update kernel with states in narrow formats, against fp32 states: bf16 gradients and parameters."""

import time
from collections.abc import Callable, Iterable

import numpy as np

from bench.harness.rounds import interleave, timed
from bench.harness.rule_updates import FORMATS, calls, formats_of, gradient
from bench.record import append, parser, ratio, rows, versions
from offload_core.dtypes import BFLOAT16
from offload_core.memory.host_memory import HostMemory
from offload_core.rules.adam import Adam, AdamHyper
from offload_core.support.processors import available_cpus

IN_CACHE = 1 << 14
"""Elements whose states fit into the second cache of one core."""
LARGE_TARGETS = {"bf16 moments": 0.80, "8-bit moments": 0.85, "split masters": 0.97}
CACHED_TARGETS = {"bf16 moments": 1.4, "8-bit moments": 1.9}


def update(memory: HostMemory, threads: int, grad: np.ndarray, formats: str, times: int) -> Callable[[], None]:
    """One call that updates AdamW's states in these formats so often; the parameter is bf16."""
    rule, param = Adam("torch"), memory.allocate("param", grad.size, BFLOAT16.numpy)
    return calls(memory, threads, rule, AdamHyper(1e-3), formats_of(rule, formats), grad, param, times)["update"].run


def measure(
    n: int,
    threads: int,
    times: int,
    rounds: int,
    formats: Iterable[str] = FORMATS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Nanoseconds an element of each format in each round, by that clock."""
    memory = HostMemory(threads)
    grad = gradient(memory, n, BFLOAT16)
    runs = {name: timed(update(memory, threads, grad, name, times), clock) for name in formats}
    seconds = interleave(runs, rounds, pause=0.02)
    return {name: [s / n / times * 1e9 for s in values] for name, values in seconds.items()}


def main(arguments: list[str] | None = None) -> None:
    options = parser("state_formats", __doc__.strip())
    options.add_argument("--numel", type=int, help="parameters (default: 100 M; --quick: 2 M)")
    options.add_argument("--threads", type=int, default=available_cpus())
    options.add_argument("--rounds", type=int, help="default: 15; --quick: 2")
    args = options.parse_args(arguments)
    numel = args.numel or (2 * 10**6 if args.quick else 10**8)
    rounds = args.rounds or (2 if args.quick else 15)
    found, ratios = [], []
    for where, n, threads, times, targets, clock in (
        (f"{numel:,} parameters", numel, args.threads, 1, LARGE_TARGETS, time.perf_counter),
        ("in cache, processor time of one core", IN_CACHE, 1, 500, CACHED_TARGETS, time.process_time),
    ):
        ns = measure(n, threads, times, rounds, clock=clock)
        found += rows("update", "ns/param", ns, params=n, threads=threads)
        ratios += [
            ratio(f"{name} / fp32, {where}", values, ns["fp32"], target=targets.get(name))
            for name, values in ns.items()
            if name != "fp32"
        ]
    for row in found:
        print(f"{row['params']:>12,}{row['threads']:>3} {row['name']:30} {row['p50']:8.3f} ns/param")
    for known in ratios:
        target = "" if known["target"] is None else f" (target: {known['target']})"
        print(f"  {known['name']}: {known['p50']:.3f} ({known['p20']:.3f} to {known['p80']:.3f}){target}")
    record = {
        "bench": "state_formats",
        "title": "The update of states in narrow formats",
        "versions": versions("numpy"),
    }
    config = {"params": numel, "threads": args.threads, "rounds": rounds}
    append(args.json, {**record, "config": config, "rows": found, "ratios": ratios, "missing": [], "notes": []})


if __name__ == "__main__":
    main()
