"""The update kernel with states in narrow formats, against fp32 states: bf16 gradients and parameters."""

import time
from collections.abc import Callable, Iterable
from functools import partial

import ml_dtypes
import numpy as np

from bench.harness.rounds import interleave, timed
from bench.record import append, parser, ratio, rows, versions
from offload_core.dtypes import BFLOAT16
from offload_core.memory.host_memory import HostMemory
from offload_core.native import kernels
from offload_core.rules.adam import STATE_NAMES, AdamHyper
from offload_core.support.processors import available_cpus

IN_CACHE = 1 << 14
"""Elements whose states fit into the second cache of one core."""
_NUMPY = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float8": np.uint8, "split": np.uint16}

FORMATS = {
    "fp32": ("float32", "float32", "float32"),
    "bf16 moments": ("float32", "bfloat16", "bfloat16"),
    "8-bit moments": ("float32", "float8", "float8"),
    "split masters": ("split", "float32", "float32"),
    "split masters, 8-bit moments": ("split", "float8", "float8"),
    "bf16 masters, 8-bit moments": ("bfloat16", "float8", "float8"),
}
LARGE_TARGETS = {"bf16 moments": 0.80, "8-bit moments": 0.85, "split masters": 0.97}
CACHED_TARGETS = {"bf16 moments": 1.4, "8-bit moments": 1.9}


def update(
    memory: HostMemory, threads: int, shared: dict[str, np.ndarray], names: tuple[str, ...], times: int
) -> Callable[[], None]:
    """One call that updates states in these formats so often; all share the gradient and the parameter."""
    n = shared["grad"].size
    arrays = []
    for state, name in zip(STATE_NAMES, names, strict=True):
        data = memory.allocate(state, n, np.dtype(_NUMPY[name]))
        kinds: dict[str, np.ndarray] = {}
        if name == "float8":
            kinds["scales"] = memory.allocate("scale", -(-n // 256), np.dtype(np.uint8))
        if name == "split":
            kinds["high"] = shared["param"]
            kinds["ties"] = memory.allocate("ties", -(-n // 8), np.dtype(np.uint8))
        arrays.append({"data": data, **kinds})
        values = shared["grad"].astype(np.float32)
        kernels.encode(
            name,
            values * values if state == "exp_avg_sq" else values,
            data,
            **kinds,
            has_sign=state != "exp_avg_sq",
            threads=threads,
        )
    (master, *moments) = ({name: kernels.address(array) for name, array in kinds.items()} for kinds in arrays)
    row = {name: kernels.address(array) for name, array in shared.items()}
    row |= {"master": master.pop("data"), "moments": [moment["data"] for moment in moments], "numel": n, **master}
    segments = kernels.segments_of([row | {"scales": [moment.get("scales", 0) for moment in moments]}] * times)
    scalars = np.array([AdamHyper(1e-3).scalars(10, op_order="torch", grad_scale=0.5)], kernels.SCALARS)

    def run(held: object = (shared, arrays)) -> None:
        kernels.update(
            segments,
            scalars,
            grad_dtype=BFLOAT16,
            param_dtype=BFLOAT16,
            rule="adam_torch",
            threads=threads,
            master_format=names[0],
            moment_formats=names[1:],
        )

    return run


def shared_arrays(memory: HostMemory, n: int) -> dict[str, np.ndarray]:
    """A gradient and a device parameter, in bf16."""
    shared = {name: memory.allocate(name, n, BFLOAT16.numpy) for name in ("grad", "param")}
    shared["grad"][:] = np.resize(np.random.default_rng(0).standard_normal(1 << 14).astype(np.float32) * 1e-3, n)
    return shared


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
    make = partial(update, memory, threads, shared_arrays(memory, n))
    runs = {name: timed(make(FORMATS[name], times), clock) for name in formats}
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
