"""The update where many cores share the memory: a model of its time, beside what this machine measures.

An element takes a core as long as its bytes do at the core's share of the memory's bandwidth, or as its arithmetic in
cache, whichever is longer. The update of fp32 states, which the memory limits, measures the share. All times are the
processors', so that other work here does not count.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from bench.parts.state_formats import IN_CACHE, measure
from bench.record import append, parser, ratio, rows, versions
from offload_core.support.processors import available_cpus

BYTES = {"fp32": 28.0, "bf16 moments": 20.0, "8-bit moments": 16 + 4 / 256}
"""Bytes read and written for an element: gradient and parameter of bf16, master, moments, scales."""
SHARES = (5.0, 10.0, 19.0)
"""The bandwidths of a core, in GB/s, for which the model predicts times."""
_STREAM = """
import os, numpy
os.sched_setaffinity(0, {{{cpu}}})
a, b = numpy.zeros(1 << 25), numpy.zeros(1 << 25)
print(flush=True)
while True:
    numpy.copyto(a, b)
"""


def predicted(compute: Mapping[str, float], share: float) -> dict[str, float]:
    """Nanoseconds of a core for an element of each format, with ``share`` GB/s and ``compute`` nanoseconds in cache."""
    return {name: max(n_bytes / share, compute[name]) for name, n_bytes in BYTES.items()}


@contextmanager
def beside_a_stream() -> Iterator[None]:
    """Run the body on one processor, while another process copies memory on a second."""
    cpus = sorted(os.sched_getaffinity(0))
    command = [sys.executable, "-c", _STREAM.format(cpu=cpus[1])]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            os.sched_setaffinity(0, cpus[:1])
            yield
        finally:
            os.sched_setaffinity(0, cpus)
            other.kill()


def core_time(n: int, threads: int, times: int, rounds: int) -> dict[str, list[float]]:
    """Nanoseconds of a core for an element of each format, in each round."""
    return measure(n, threads, times, rounds, BYTES, time.process_time)


def points(n: int, rounds: int) -> Iterator[tuple[str, int, dict[str, list[float]]]]:
    """Yield the measurements: their description, the number of threads, and :func:`core_time`."""
    threads = available_cpus()
    yield "one core", 1, core_time(n, 1, 1, rounds)
    if threads > 1:
        yield f"{threads} cores", threads, core_time(n, threads, 1, rounds)
    if threads > 1 and hasattr(os, "sched_setaffinity"):
        with beside_a_stream():
            yield "one core, another copies memory", 1, core_time(n, 1, 1, rounds)


def main(arguments: list[str] | None = None) -> None:
    options = parser("many_cores", (__doc__ or "").partition("\n\n")[0])
    options.add_argument("--numel", type=int, help="parameters (default: 50 M; --quick: 20 M)")
    options.add_argument("--rounds", type=int, help="default: 9; --quick: 2")
    args = options.parse_args(arguments)
    n = args.numel or (2 * 10**7 if args.quick else 5 * 10**7)
    rounds = args.rounds or (2 if args.quick else 9)
    cached = core_time(IN_CACHE, 1, 500, rounds)
    compute = {name: min(values) for name, values in cached.items()}
    found = rows("update", "ns/param", cached, params=IN_CACHE, threads=1)
    ratios = []
    print("in cache, one core: " + ", ".join(f"{name} {ns:.3f} ns" for name, ns in compute.items()))
    print(f"{'':34}{'GB/s a core':>12}" + "".join(f"{name:>28}" for name in BYTES if name != "fp32"))
    for how, threads, ns in points(n, rounds):
        found += rows("update", "ns/param", ns, params=n, threads=threads, how=how)
        share = BYTES["fp32"] / statistics.median(ns["fp32"])
        model, cells = predicted(compute, share), ""
        for name, values in ns.items():
            if name != "fp32":
                known = ratio(f"{name} / fp32, {how}", values, ns["fp32"])
                ratios.append(known)
                cells += f"{known['p50']:>12.2f}, model {model[name] / model['fp32']:>5.2f}    "
        print(f"{how:34}{share:>12.1f}{cells}")
    for share in SHARES:
        model = predicted(compute, share)
        cells = "".join(f"{'':12}  model {model[name] / model['fp32']:>5.2f}    " for name in BYTES if name != "fp32")
        print(f"{'':34}{share:>12.1f}{cells}")
    record = {"bench": "many_cores", "title": "The update where many cores share the memory"}
    config = {"params": n, "rounds": rounds}
    record |= {"versions": versions("numpy"), "config": config, "rows": found, "ratios": ratios}
    append(args.json, {**record, "missing": [], "notes": []})


if __name__ == "__main__":
    main()
