"""Step times of the real pipeline on a simulated machine, against a model of time.

The model of K equal buckets. A step spends on each bucket f in forward, b in backward, c in its copy each way (2 bytes
a parameter over the link's bandwidth), n in the norm (2 bytes over the host's, with clipping only) and u in the update
(28 bytes over the host's: a gradient, three states read and written, a parameter). Buckets go through stages one after
another, and each stage takes one bucket at a time:

    flow(stages) = sum of the stages' times + (K - 1) x the longest of them.

``serial`` does one thing after the other:

    serial = K (f + b + c + n + u + c)

``overlap`` hides copies and norms behind backward. At the boundary all gradients are on the host, and updates start.
They hide behind the next forward, which waits for one bucket at a time:

    overlap = flow(b, c, n) + flow(u, c, f)

If compute dominates (b and f are the longest) this is T_compute + c + n + u + c, that is
max(T_compute, T_update, T_link) + the last bucket's tail. If the update or the link dominates, it is more: about
T_backward + T_update, or T_to_host + T_to_device, because activities before the boundary cannot hide those after it.

``in backward`` (``update_in_backward=True``) updates a bucket and sends its parameters as soon as its gradients are
on the host. There gradients take the memory of few buckets, for which backward waits. With clipping it sends parameters
tentatively (e: 16 bytes, states are only read) and updates states after the boundary, behind the next forward and
backward (a: 26 bytes). After the last gradient has arrived, buckets that still wait for the host go as in ``overlap``.
While the host keeps pace,

    in backward = flow(b, c, n + e, c) + K f        (u for n + e without clipping)

In general :func:`in_backward` computes it, bucket by bucket. If compute dominates, it is the limit below. If the update
dominates, it is the limit, too, without clipping: updates that remain at the boundary hide behind the forward. If the
link dominates, the forward comes on top of the limit: the bucket that the forward needs first is the last to come to
the host and to go back.

``delayed`` publishes at a boundary the changes of the step before (r: masters rounded, 6 bytes), and then updates (a)
behind forward and backward, in the order of backward: a bucket's new gradient replaces the old one after it was read.
Norms come after all updates:

    delayed = max(flow(r, c, f) + flow(b, c, n), flow(r, c) + max(flow(a, b, c, n) - b, K a + K n))

The limit, if each of four resources (compute, the link's two ways, the host) is busy during the complete step:

    limit = flow(f + b, c, u, c) = max(T_compute, T_update, T_link) + the tail

The machine: tensors hold 1/scale of the parameters, and bandwidths are divided by the same scale. Compute, and the rest
of the kernels' time, is slept; a sleep that was too long shortens the next one. The pipeline, its thread, the kernels
and the copies' threads are the real ones. There are several rounds, so that the machine's drift is the same for all
schedules.
"""

import argparse
import random
import statistics
from pathlib import Path
from typing import Any

from bench.parts.overlap_run import GB, SCHEDULES, Case, Run, Times, slow_kernels
from bench.record import append, parser, ratio, row, versions
from offload_core.plans.terms import GRADIENT_SLOTS
from offload_core.support.units import count

TARGET = 0.08
CASES = {
    "compute": Case(forward=0.10, backward=0.20, link=40 * GB, host=400 * GB),
    "link": Case(forward=0.03, backward=0.06, link=12 * GB, host=400 * GB),
    "update": Case(forward=0.04, backward=0.08, link=40 * GB, host=100 * GB),
}
"""The simulated machines, by the resource that dominates."""


def flow(buckets: int, *stages: float) -> float:
    """Seconds until all buckets went through the stages."""
    return sum(stages) + (buckets - 1) * max(stages)


def model(buckets: int, t: Times) -> dict[str, float]:
    """Seconds a step."""
    forward = flow(buckets, t.round, t.copy, t.forward)
    published = flow(buckets, t.round, t.copy)
    behind = max(flow(buckets, t.advance, t.backward, t.copy, t.norm) - t.backward, buckets * (t.advance + t.norm))
    to_host = flow(buckets, t.backward, t.copy, t.norm)
    return {
        "serial": buckets * (t.forward + t.backward + 2 * t.copy + t.norm + t.update),
        "overlap": to_host + flow(buckets, t.update, t.copy, t.forward),
        "in backward": in_backward(buckets, t),
        "delayed": max(forward + to_host, published + behind),
        "limit": flow(buckets, t.forward + t.backward, t.copy, t.update, t.copy),
    }


def in_backward(buckets: int, t: Times) -> float:
    """Seconds of a step among others like it. Buckets are counted in the order of backward."""
    tentative = t.norm > 0
    slots = buckets if tentative else min(GRADIENT_SLOTS, buckets)
    order = range(buckets)
    now = host = to_host = to_device = 0.0
    written, committed = [0.0] * buckets, [0.0] * buckets
    ends = []

    def send(bucket: int, seconds: float) -> None:
        nonlocal host, to_device
        host += seconds
        to_device = written[bucket] = max(to_device, host) + t.copy

    for _ in range(8):
        for i in reversed(order):
            now = max(now, written[i]) + t.forward
        arrived: list[float] = []
        for i in order:
            now = max(now + t.backward, committed[i])
            if i >= slots:
                host = max(host, arrived[i - slots])
                send(i - slots, t.update)
                now = max(now, host)
            to_host = max(to_host, now) + t.copy
            arrived.append(to_host)
        waiting = []
        for i in order[buckets - slots :]:
            host = max(host, arrived[i]) + t.norm
            if host < arrived[-1]:
                send(i, t.emit if tentative else t.update)
            else:
                waiting.append(i)
        now = max(now, host)
        for i in reversed(waiting):
            send(i, t.update)
        if tentative:
            host = max(host, to_device)  # staging is given back first
            for i in order[: buckets - len(waiting)]:
                host += t.advance
                committed[i] = host
        ends.append(now)
    return ends[-1] - ends[-2]


def measure(runs: dict[str, Run], rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds of each step of each schedule; the first of a turn is not counted."""
    order = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in order.sample(list(runs.items()), len(runs)):
            seconds[name] += run.step_times(steps)
    return seconds


def compare(
    name: str, params: int, buckets: int, scale: int, clips: bool, rounds: int, steps: int, traces: Path | None
) -> list[dict[str, Any]]:
    """A line of the table for each schedule."""
    case = CASES[name]
    runs = {schedule: Run(case, params, buckets, scale, clips, schedule) for schedule in SCHEDULES}
    try:
        with slow_kernels(case.host / scale):
            seconds = measure(runs, rounds, steps)
            for schedule, run in runs.items() if traces else ():
                label = f"{name}-{buckets}-{'clip' if clips else 'free'}-{schedule.replace(' ', '-')}.json"
                with run.engine.trace(traces / label):
                    run.step_times(1)
    finally:
        for run in runs.values():
            run.close()
    expected = model(buckets, runs["serial"].times)
    rows = []
    for schedule, taken in seconds.items():
        median = statistics.median(taken)
        rows.append(
            {
                "dominates": name,
                "buckets": buckets,
                "clipping": clips,
                "schedule": schedule,
                "seconds": taken,
                "median": median,
                "model": expected[schedule],
                "deviation": median / expected[schedule] - 1,
                "limit": expected["limit"],
            }
        )
    return rows


def show(result: dict[str, Any]) -> str:
    clipping = "yes" if result["clipping"] else "no"
    where = f"{result['dominates']:9}{result['buckets']:8}  {clipping:10}{result['schedule']:12}"
    low, high = min(result["seconds"]), max(result["seconds"])
    times = f"{1e3 * result['median']:9.1f}{f'({1e3 * low:.1f} to {1e3 * high:.1f})':>18}{1e3 * result['model']:9.1f}"
    limit = f"{1e3 * result['limit']:9.1f}{result['median'] / result['limit']:8.2f}"
    return f"{where}{times}{100 * result['deviation']:+8.1f} %{limit}"


def record(args: argparse.Namespace, results: list[dict[str, Any]]) -> dict[str, Any]:
    """A row for each case and schedule; ratios to the limit, with clipping; ratios to the models, over all cases."""
    found, compared = [], []
    for result in results:
        extra = {key: result[key] for key in ("dominates", "buckets", "clipping")}
        extra |= {f"{name}_ms": 1e3 * result[name] for name in ("model", "limit")}
        found.append(row(result["schedule"], "step", "ms", [1e3 * s for s in result["seconds"]], **extra))
        if result["clipping"] and result["schedule"] in ("overlap", "in backward"):
            name = f"{result['schedule']} / limit, {result['dominates']} dominates, {result['buckets']} buckets"
            compared.append(ratio(name, result["seconds"], [result["limit"]] * len(result["seconds"])))
    for schedule in SCHEDULES:
        of_it = [result for result in results if result["schedule"] == schedule]
        taken = [s for result in of_it for s in result["seconds"]]
        models = [result["model"] for result in of_it for _ in result["seconds"]]
        target = None if schedule == "serial" else 1 + TARGET
        compared.append(ratio(f"{schedule} / its model, all cases", taken, models, target=target))
    return {
        "bench": "overlap",
        "title": "What the schedules hide, on a simulated machine",
        "config": {
            "params": args.numel,
            "scale": args.scale,
            "rounds": args.rounds,
            "steps": args.steps,
            "cases": {name: CASES[name]._asdict() for name in args.cases},
        },
        "versions": versions("numpy"),
        "rows": found,
        "ratios": compared,
        "missing": [],
        "notes": [
            "The pipeline, its thread and the kernels are the real ones; the link, the host's bandwidth and compute "
            "are slept. The limit is what would keep compute, link and host busy all the time.",
        ],
    }


def main(arguments: list[str] | None = None) -> None:
    options = parser("overlap", __doc__.splitlines()[0])
    options.add_argument("--numel", type=int, default=2**30, help="of the simulated model (default: 2^30)")
    options.add_argument("--scale", type=int, default=2**10, help="how much smaller tensors are (default: 1024)")
    options.add_argument("--buckets", type=int, nargs="+", default=[16])
    options.add_argument("--cases", nargs="+", choices=CASES, metavar="NAME", help="default: all")
    options.add_argument("--rounds", type=count, default=1, help="default: 1")
    options.add_argument("--steps", type=count, help="counted in each round of each schedule (default: 4; --quick: 2)")
    options.add_argument("--trace", type=Path, help="write a trace of two steps of each case to this folder")
    args = options.parse_args(arguments)
    args.cases = args.cases or list(CASES)[: 1 if args.quick else None]
    args.steps = args.steps or (2 if args.quick else 4)
    if args.trace:
        args.trace.mkdir(parents=True, exist_ok=True)
    steps = args.rounds * args.steps
    print(f"{args.numel:,} parameters, tensors {args.scale} times smaller; ms a step, median of {steps} steps")
    print(
        f"{'dominates':9}{'buckets':>8}  {'clipping':10}{'schedule':12}{'measured':>9}{'':18}{'model':>9}{'off':>10}"
        f"{'limit':>9}{'over it':>8}"
    )
    results = []
    for name in args.cases:
        for clips in (True, False):
            for buckets in args.buckets:
                those = compare(name, args.numel, buckets, args.scale, clips, args.rounds, args.steps, args.trace)
                results += those
                print(*map(show, those), sep="\n", flush=True)
    for schedule in SCHEDULES:
        worst = max((abs(result["deviation"]) for result in results if result["schedule"] == schedule), default=0.0)
        target = f" (target: at most {100 * TARGET:.0f} %)" if schedule != "serial" else ""
        over = max(
            (result["median"] / result["limit"] - 1 for result in results if result["schedule"] == schedule),
            default=0.0,
        )
        print(f"{schedule}: at most {100 * worst:.1f} % off its model{target}, {100 * over:.0f} % over the limit")
    append(args.json, record(args, results))


if __name__ == "__main__":
    main()
