"""Step times of the real pipeline on a simulated machine, against a model of time.

The model of K equal buckets. A step spends on each bucket f in forward, b in backward, c in its copy each way (2 bytes
a parameter over the link's bandwidth), n in the norm (2 bytes over the host's, with clipping only) and u in the update
(28 bytes over the host's). Buckets that go one after another through stages, each of which does one at a time, take

    flow(stages) = sum of the stages' times + (K - 1) x the longest of them.

``serial`` does one thing after the other:

    serial = K (f + b + c + n + u + c)

``overlap`` hides copies and norms behind backward. The boundary, where all gradients are on the host, is when updates
start; they hide behind the next forward, which waits for one bucket at a time:

    overlap = flow(b, c, n) + flow(u, c, f)

With clipping no schedule of these stages that keeps them exact is faster: no update can start before the last gradient
has been looked at. Where compute dominates (b and f are the longest) this is T_compute + c + n + u + c, the issue's
max(T_compute, T_update, T_link) + the last bucket's tail. Where the update or the link does it is more, as what comes
before the boundary cannot hide what comes after: about T_backward + T_update, or T_to_host + T_to_device.

Without clipping a bucket could be updated as soon as it is on the host. The pipeline does not do so yet: its updates
start at the boundary, n being 0. What that would take is shown beside. In the order of arrival alone, which is the
reverse of the next forward's, so that forward waits for all of them:

    early = flow(b, c, u, c) + K f

And where what the next forward needs first overtakes the rest, each of the four resources (compute, the link's two
ways, the host) works through the whole step:

    limit = flow(f + b, c, u, c) = max(T_compute, T_update, T_link) + the tail

The machine: tensors hold 1/scale of the parameters, and bandwidths are divided likewise. Compute, and what the kernels
do not take of their time, is slept, and who overslept sleeps less the next time; the pipeline, its thread, the kernels
and the copies' threads are the real ones. Schedules take turns, so that the machine's drift hits both.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.cpu_adam import commit, machine
from offload_core.config import OffloadConfig
from offload_core.cpu_adam import AdamHyper
from offload_core.dtypes import BFLOAT16
from offload_core.fake_device import FakeDevice, FakeTensor
from offload_core.host_ranks import HostRanks
from offload_core.partition import ParamSpec
from offload_core.pipeline import Pipeline
from offload_core.trace import COMPUTE

SCHEDULES = ("overlap", "serial")
TARGET = 0.08
UPDATE_BYTES = 28
"""A parameter: its gradient and the new parameter, 2 each, and three fp32 states, read and written."""
GB = 1e9


class Case(NamedTuple):
    """What a machine and a model take: seconds a step, bytes a second."""

    forward: float
    backward: float
    link: float
    """Each way."""
    host: float


CASES = {
    "compute": Case(forward=0.10, backward=0.20, link=40 * GB, host=400 * GB),
    "link": Case(forward=0.03, backward=0.06, link=12 * GB, host=400 * GB),
    "update": Case(forward=0.04, backward=0.08, link=40 * GB, host=100 * GB),
}
"""By what dominates."""


class Times(NamedTuple):
    """Seconds of one bucket."""

    forward: float
    backward: float
    copy: float
    norm: float
    update: float

    @classmethod
    def of(cls, case: Case, params: int, buckets: int, clips: bool) -> "Times":
        numel = params / buckets
        norm = BFLOAT16.itemsize * numel / case.host if clips else 0.0
        copy = BFLOAT16.itemsize * numel / case.link
        return cls(case.forward / buckets, case.backward / buckets, copy, norm, UPDATE_BYTES * numel / case.host)


def flow(buckets: int, *stages: float) -> float:
    """Seconds until all buckets went through the stages."""
    return sum(stages) + (buckets - 1) * max(stages)


def model(buckets: int, t: Times) -> dict[str, float]:
    """Seconds a step."""
    return {
        "serial": buckets * (sum(t) + t.copy),
        "overlap": flow(buckets, t.backward, t.copy, t.norm) + flow(buckets, t.update, t.copy, t.forward),
        "early": flow(buckets, t.backward, t.copy, t.update, t.copy) + buckets * t.forward,
        "limit": flow(buckets, t.forward + t.backward, t.copy, t.update, t.copy),
    }


class Sleeper:
    """Sleeps so long on average: what it overslept it makes up for."""

    def __init__(self) -> None:
        self._overslept = 0.0

    def sleep(self, seconds: float) -> None:
        start = time.perf_counter()
        time.sleep(max(seconds - self._overslept, 0.0))
        self._overslept += time.perf_counter() - start - seconds

    def lasting(self, seconds: float, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, made to take so long."""

        def run(*args: Any) -> Any:
            start = time.perf_counter()
            result = function(*args)
            self.sleep(seconds - (time.perf_counter() - start))
            return result

        return run


class Run:
    """A pipeline on a simulated machine, one layer a bucket."""

    def __init__(self, case: Case, params: int, buckets: int, scale: int, clips: bool, schedule: str) -> None:
        numel = params // scale // buckets
        self.times = Times.of(case, params, buckets, clips)
        self.layers = range(buckets)
        self.fake = FakeDevice(bandwidth=case.link / scale)
        config = OffloadConfig(
            reduce_bucket_size=numel, gradient_clipping=1.0 if clips else None, schedule=schedule, num_threads=1
        )
        self.pipeline = Pipeline(config, HostRanks(self.fake), None)
        weights = np.ones(numel, BFLOAT16.numpy)
        self.tensors = [FakeTensor(weights) for _ in self.layers]
        self.gradients = [FakeTensor(weights) for _ in self.layers]
        self.pipeline.add_parameters([ParamSpec(f"layer {i}", numel, BFLOAT16) for i in self.layers], self.tensors)
        updates, gradients = self.pipeline._updates, self.pipeline._gradients
        self.device, host = Sleeper(), Sleeper()
        updates._run_adam = host.lasting(self.times.update, updates._run_adam)
        if clips:
            gradients._squares = host.lasting(self.times.norm, gradients._squares)

    def compute(self, what: str, layer: int, seconds: float) -> None:
        with self.pipeline.device.trace.span(COMPUTE, f"{what} of layer {layer}"):
            self.device.sleep(seconds)

    def step(self) -> None:
        for layer in self.layers:
            self.pipeline.await_param(layer)
            self.compute("forward", layer, self.times.forward)
        for layer in reversed(self.layers):
            self.compute("backward", layer, self.times.backward)
            self.pipeline.add_gradient(layer, self.gradients[layer])
        self.pipeline.end_micro_step()
        assert self.pipeline.step([AdamHyper(1e-3)], self.tensors).updated

    def turn(self, steps: int) -> list[float]:
        """Seconds of so many steps in a row, each from the boundary before to its own."""
        self.step()
        ends = [time.perf_counter()]
        for _ in range(steps):
            self.step()
            ends.append(time.perf_counter())
        self.pipeline.finish()
        return [after - before for before, after in pairwise(ends)]

    def close(self) -> None:
        self.pipeline.finish()
        self.fake.close()


def measure(runs: dict[str, Run], rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds of each step of each schedule, after one turn that is not counted."""
    order = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds + 1):
        for name, run in order.sample(list(runs.items()), len(runs)):
            taken = run.turn(steps)
            seconds[name] += taken if i else []
    return seconds


def compare(
    name: str, params: int, buckets: int, scale: int, clips: bool, rounds: int, steps: int, traces: Path | None
) -> dict[str, Any]:
    """One line of the table."""
    case = CASES[name]
    runs = {schedule: Run(case, params, buckets, scale, clips, schedule) for schedule in SCHEDULES}
    try:
        seconds = measure(runs, rounds, steps)
        if traces is not None:
            for schedule, run in runs.items():
                label = f"{name}-{buckets}-{'clip' if clips else 'free'}-{schedule}.json"
                with run.pipeline.trace(traces / label):
                    run.turn(1)
    finally:
        for run in runs.values():
            run.close()
    expected = model(buckets, runs["overlap"].times)
    median = {schedule: statistics.median(s) for schedule, s in seconds.items()}
    return {
        "dominates": name,
        "buckets": buckets,
        "clipping": clips,
        "case": case._asdict(),
        "seconds": {schedule: [round(s, 6) for s in taken] for schedule, taken in seconds.items()},
        "median": median,
        "model": expected,
        "deviation": {schedule: median[schedule] / expected[schedule] - 1 for schedule in SCHEDULES},
    }


def show(row: dict[str, Any]) -> str:
    cells = [f"{row['dominates']:9}{row['buckets']:8}  {'yes' if row['clipping'] else 'no':8}"]
    for schedule in SCHEDULES:
        ms, expected = 1e3 * row["median"][schedule], 1e3 * row["model"][schedule]
        cells.append(f"{ms:9.1f}{expected:8.1f}{100 * row['deviation'][schedule]:+7.1f}%")
    cells.append(f"{row['median']['serial'] / row['median']['overlap']:9.2f}")
    cells += [f"{1e3 * row['model'][name]:9.1f}" for name in ("early", "limit")]
    return "".join(cells)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.overlap", description=__doc__.splitlines()[0])
    parser.add_argument("--params", type=int, default=2**30, help="of the simulated model (default: 2^30)")
    parser.add_argument("--scale", type=int, default=2**10, help="how much smaller tensors are (default: 1024)")
    parser.add_argument("--buckets", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="counted in each round of each schedule (default: 3)")
    parser.add_argument("--trace", type=Path, help="write a trace of two steps of each case to this folder")
    parser.add_argument("--json", type=Path, help="append the result to this file, one JSON object a line")
    args = parser.parse_args(arguments)
    if args.trace:
        args.trace.mkdir(parents=True, exist_ok=True)
    print(f"{args.params:,} parameters, tensors {args.scale} times smaller; ms a step, median of {args.rounds} rounds")
    heads = "".join(f"{schedule:>9}{'model':>8}{'':8}" for schedule in SCHEDULES)
    print(f"{'dominates':9}{'buckets':>8}  {'clipping':8}{heads}{'gain':>9}{'early':>9}{'limit':>9}")
    rows = []
    for name in args.cases:
        for clips in (True, False):
            for buckets in args.buckets:
                row = compare(name, args.params, buckets, args.scale, clips, args.rounds, args.steps, args.trace)
                rows.append(row)
                print(show(row), flush=True)
    worst = max((abs(row["deviation"]["overlap"]) for row in rows), default=0.0)
    print(f"overlap's largest deviation from its model: {100 * worst:.1f} % (target: at most {100 * TARGET:.0f} %)")
    if args.json:
        record = {
            "bench": "overlap",
            "machine": machine(),
            "commit": commit(),
            "params": args.params,
            "scale": args.scale,
            "rounds": args.rounds,
            "steps": args.steps,
            "results": rows,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        with args.json.open("a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
