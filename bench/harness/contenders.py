"""Contenders in separate processes, measured in turn, and the results of each.

One contender runs a few steps while the others wait in a read. "Others CPU" tells how quiet the machine was.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from bench.harness.processes import ContenderError, ProcessGroup, in_parallel
from bench.harness.rounds import turns
from bench.record import quantiles, row
from offload_core.support.processors import available_cpus


@dataclass(frozen=True)
class Measurement:
    """One contender in one round under one workload: so many steps, one after another."""

    steps: list[dict[str, float]]
    """For each step but the first, the mean over the ranks: ms by phase, loss, norm, bytes by the place where they
    lie."""
    losses: list[float]
    """The losses of all steps."""
    sent: float
    """Bytes a step that this machine sent to itself."""
    others: float
    """Processors that other programs took meanwhile."""
    idle: float
    """Share of a processor that one of the ranks took while others were measured."""
    faults: float
    """Page faults a step of all ranks."""
    peak: int
    """The peak of the largest rank, in bytes."""
    device_peak: int | None = None
    """The peak on a device, in bytes; None: unknown."""
    cpu: float = 0.0
    """Processor seconds a step of all ranks."""


class Contender:
    """One contender through a run."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.failure: ContenderError | None = None
        self.versions: dict[str, str] = {}
        self.losses: list[float] = []
        """The losses of the warm-up."""
        self.setup_peak = 0
        self.measurements: list[list[Measurement]] = []
        """A list for each round, with a measurement for each workload."""

    def imported(self) -> None:
        self.versions = self._guarded(self.group.answers)[0].get("versions", {})

    def build(self, warm_up: int) -> None:
        self.losses = _mean_losses(self._guarded(partial(self.group.ask, steps=warm_up)))
        self.setup_peak = self.group.peak()
        self.group.forget_peak()  # the peak of building is kept

    def measure(self, steps: int, workloads: Sequence[Mapping[str, Any]]) -> list[Measurement] | None:
        if self.failure:
            return None
        try:
            return [self._measure(steps, workload) for workload in workloads]
        except ContenderError:
            return None

    def _measure(self, steps: int, workload: Mapping[str, Any]) -> Measurement:
        sent, busy, start = loopback_bytes(), busy_seconds(), time.perf_counter()
        answers = self._guarded(partial(self.group.ask, steps=steps + 1, **workload))
        seconds = time.perf_counter() - start
        busy, sent = busy_seconds() - busy, loopback_bytes() - sent
        by_step = list(zip(*(answer["steps"] for answer in answers), strict=True))
        return Measurement(
            steps=[{k: statistics.mean(rank[k] for rank in step) for k in step[0]} for step in by_step[1:]],
            losses=_mean_losses(answers),
            sent=sent / len(by_step),
            others=max(busy - sum(answer["cpu"] for answer in answers), 0.0) / seconds,
            idle=max(answer["idle"] for answer in answers),
            faults=sum(answer["faults"] for answer in answers) / len(by_step),
            peak=self.group.peak(),
            device_peak=max((answer["device_peak"] or 0 for answer in answers), default=0) or None,
            cpu=sum(answer["cpu"] for answer in answers) / len(by_step),
        )

    def _guarded(self, act: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        try:
            return act()
        except ContenderError as error:
            self.failure = error
            raise


def _mean_losses(answers: list[dict[str, Any]]) -> list[float]:
    by_step = zip(*(answer["steps"] for answer in answers), strict=True)
    return [round(statistics.mean(rank["loss"] for rank in step), 5) for step in by_step if "loss" in step[0]]


class Result:
    """All measurements of one contender under one workload, one for each round."""

    def __init__(self, measurements: list[Measurement], setup_peak: int, losses: list[float]) -> None:
        self.measurements = measurements
        self.setup_peak = setup_peak
        """The peak of the largest rank while it was built and warmed up, in bytes."""
        self.losses = losses

    @classmethod
    def of(cls, contender: Contender, workload: int) -> "Result":
        measurements = [of_round[workload] for of_round in contender.measurements]
        losses = [loss for each in measurements for loss in each.losses]
        return cls(measurements, contender.setup_peak, contender.losses + losses)

    def __add__(self, later: "Result") -> "Result":
        """Return the result with the measurements of another repetition; the losses are the first one's."""
        return Result(self.measurements + later.measurements, max(self.setup_peak, later.setup_peak), self.losses)

    def samples(self, *phases: str) -> list[float]:
        """Return the ms of the phases together, for each step."""
        return [sum(step[phase] for phase in phases) for each in self.measurements for step in each.steps]

    @property
    def processor_times(self) -> list[float]:
        """The processor seconds a step of all ranks, of each round. Other programs change them less than the time."""
        return [each.cpu for each in self.measurements]

    @property
    def phases(self) -> list[str]:
        """The keys of times, in ms."""
        return [key for key in self.measurements[0].steps[0] if key not in ("loss", "grad_norm", *self.places)]

    @property
    def places(self) -> list[str]:
        """The keys of bytes: those that end with "bytes"."""
        return [key for key in self.measurements[0].steps[0] if key.endswith(" bytes")]

    def rows(self, name: str, **extra: Any) -> list[dict[str, Any]]:
        """Return the rows of the record. The loss's row has the curve of all steps."""
        rows = [row(name, phase, "ms", self.samples(phase), **extra) for phase in self.phases]
        last = self.measurements[-1].steps[-1]
        rows += [row(name, f"{place} after backward", "MB", [last[place] / 1e6], **extra) for place in self.places]
        if self.losses:
            rows.append(row(name, "loss, last", "nats", self.losses[-1:], **extra) | {"curve": self.losses})
        if "grad_norm" in self.measurements[-1].steps[-1]:
            rows.append(row(name, "gradient norm, last", "", [self.measurements[-1].steps[-1]["grad_norm"]], **extra))
        rows.append(row(name, "peak memory", "GB", [max(each.peak for each in self.measurements) / 1e9], **extra))
        rows.append(row(name, "peak memory while it is built", "GB", [self.setup_peak / 1e9], **extra))
        on_device = [each.device_peak / 1e9 for each in self.measurements if each.device_peak]
        if on_device:
            rows.append(row(name, "peak device memory", "GB", [max(on_device)], **extra))
        rows.append(row(name, "sent", "MB/step", [each.sent / 1e6 for each in self.measurements], **extra))
        rows.append(
            row(name, "page faults", "thousands/step", [each.faults / 1e3 for each in self.measurements], **extra)
        )
        rows.append(row(name, "processor time", "s/step", self.processor_times, **extra))
        rows.append(row(name, "others' CPU", "processors", [each.others for each in self.measurements], **extra))
        rows.append(row(name, "CPU while waiting", "processors", [self.measurements[-1].idle], **extra))
        return rows


Results = dict[str, list[Result]]
"""A result for each workload, by contender."""


def measure_all(
    groups: Mapping[str, Callable[[], ProcessGroup]],
    *,
    rounds: int,
    steps: int,
    warm_up: int,
    workloads: Sequence[Mapping[str, Any]] = ({},),
    repetitions: int = 1,
    each_round: Callable[[Results], None] = lambda results: None,
) -> tuple[Results, dict[str, ContenderError], dict[str, str]]:
    """Start all contenders and measure them in turn. Return a result for each workload, the errors of those that could
    not run, and versions.

    After each round ``each_round`` is given the results so far.

    Each repetition starts new processes: a process may be faster or slower for as long as it lives, which more rounds
    would not show.
    Where libraries lie in the address space is drawn once, as they are forks of the processes that imported them.
    """
    results: Results = {}
    failures: dict[str, ContenderError] = {}
    versions: dict[str, str] = {}

    def with_earlier(of_repetition: Results) -> Results:
        return {
            name: [a + b for a, b in zip(results[name], by_workload, strict=True)] if name in results else by_workload
            for name, by_workload in of_repetition.items()
        }

    for repetition in range(repetitions):
        able = {name: start for name, start in groups.items() if name not in failures}
        of_repetition, failed, known = _measure_once(
            able, rounds, steps, warm_up, workloads, repetition, lambda found: each_round(with_earlier(found))
        )
        failures |= failed
        versions |= known
        results = with_earlier(of_repetition)
    return results, failures, versions


def _measure_once(
    groups: Mapping[str, Callable[[], ProcessGroup]],
    rounds: int,
    steps: int,
    warm_up: int,
    workloads: Sequence[Mapping[str, Any]],
    seed: int,
    each_round: Callable[[Results], None],
) -> tuple[Results, dict[str, ContenderError], dict[str, str]]:
    """Start all contenders. All import at once, and as many are built at a time as there are processors.

    Each keeps the memory of its peak, unless its allocator is told otherwise: together they must fit.
    """
    contenders: dict[str, Contender] = {}
    results: Results = {}

    def ready(name: str) -> None:
        with suppress(ContenderError):
            contenders[name].imported()
            start = time.perf_counter()
            contenders[name].build(warm_up)
            print(f"{name}: built and warmed up in {time.perf_counter() - start:.1f} s", file=sys.stderr)

    try:
        for name, start in groups.items():
            contenders[name] = Contender(start())
        ranks = max((contender.group.ranks for contender in contenders.values()), default=1)
        in_parallel(
            [contender.group for contender in contenders.values()], ready, contenders, available_cpus() // ranks
        )
        able = {name: contender for name, contender in contenders.items() if not contender.failure}
        measure = {name: partial(contender.measure, steps, workloads) for name, contender in able.items()}
        for of_round in turns(measure, rounds, seed=seed):
            for name, taken in of_round.items():
                if taken is not None:
                    able[name].measurements.append(taken)
            results = _results(able, len(workloads))
            each_round(results)
    finally:
        for contender in contenders.values():
            contender.group.dismiss()
        for contender in contenders.values():
            contender.group.close()
    failures = {name: contender.failure for name, contender in contenders.items() if contender.failure}
    versions = {k: v for contender in contenders.values() for k, v in contender.versions.items()}
    return results, failures, versions


def _results(contenders: Mapping[str, Contender], workloads: int) -> Results:
    """Return the results of the contenders that have run in every round."""
    return {
        name: [Result.of(contender, i) for i in range(workloads)]
        for name, contender in contenders.items()
        if not contender.failure
    }


def medians(results: Mapping[str, Result]) -> str:
    """Return the ms of each phase of each contender, as text."""
    known = {
        name: ", ".join(f"{phase} {quantiles(result.samples(phase))[1]:.1f}" for phase in result.phases)
        for name, result in results.items()
    }
    return "ms: " + "; ".join(f"{name}: {phases}" for name, phases in known.items())


def loopback_bytes() -> int:
    """Bytes that this machine has sent to itself: gloo's data and headers, and those of any other program."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("lo:"))


def busy_seconds() -> float:
    """Processor time of the whole machine."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq


def show(results: Mapping[str, Result]) -> None:
    """A table of the contenders of one workload."""
    if not results:
        return
    phases = max((result.phases for result in results.values()), key=len)
    columns = ("peak memory", "and setup", "MB a step", "idle CPU", "others CPU", "loss", "norm")
    print(f"{'ms, median (p20 to p80)':36}" + "".join(f"{p:>26}" for p in phases))
    for name, result in results.items():
        cells = [f"{q[1]:.1f} ({q[0]:.1f} to {q[2]:.1f})" for q in _of_phases(result, phases)]
        print(f"{name:36}" + "".join(f"{cell:>26}" for cell in cells))
    print(f"{'':36}" + "".join(f"{column:>12}" for column in columns))
    for name, result in results.items():
        last = result.measurements[-1].steps[-1]
        cells = [
            f"{max(each.peak for each in result.measurements) / 1e9:.2f} GB",
            f"{result.setup_peak / 1e9:.2f} GB",
            f"{statistics.median(each.sent for each in result.measurements) / 1e6:.1f}",
            f"{100 * result.measurements[-1].idle:.2f} %",
            f"{100 * statistics.median(each.others for each in result.measurements):.0f} %",
            *(f"{last[k]:.4f}" if k in last else "" for k in ("loss", "grad_norm")),
        ]
        print(f"{name:36}" + "".join(f"{cell:>12}" for cell in cells))


def _of_phases(result: Result, phases: Iterable[str]) -> Iterable[tuple[float, float, float]]:
    nan = float("nan")
    return (quantiles(result.samples(p)) if p in result.phases else (nan, nan, nan) for p in phases)
