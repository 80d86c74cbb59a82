"""Steps on machines that are not there: the pipeline runs in virtual time (``bench.virtual.cluster``).

First the simulation is held against steps that the same pipeline takes by the wall clock on two gloo ranks, as
predicted / measured; ``bench.parts.overlap`` does so on one rank, in each regime that it measures. Then it is asked
about the machines of the published figures, under the assumptions of ``ASSUMPTIONS``, or with ``--gpus`` about one's
own.
"""

import argparse
import math
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.harness.rounds import interleave
from bench.record import append, parser, ratio, row, versions
from bench.virtual.cluster import WAITING, Job, Machines, Result, SimulatedGroup, SimulatedRank, on_ranks, simulate
from bench.virtual.machine import GB, SCHEDULES, Case, Run, slow_kernels, virtual
from offload_core.support.processors import available_cpus
from offload_core.support.units import count, rate

RANK_CASES = {
    "compute": Case(forward=0.04, backward=0.08, link=1 * GB, host=2 * GB),
    "exchange": Case(forward=0.01, backward=0.02, link=1 * GB, host=2 * GB),
}
RANKS, RANK_BUCKETS, RANK_NUMEL = 2, 8, 2**20
ALONE = "exchanges alone"
PATIENCE = timedelta(seconds=60)

DGX2 = Machines(
    gpus=1, machines=1, flops=39e12, link=12 * GB, dram=192 * GB, peer=120 * GB, network=80 * GB, links=48 * GB
)
ASSUMPTIONS = [
    (
        "a V100's rate",
        "39 TFLOPS",
        "1.2 B on one GPU without offload: Megatron-LM, arXiv:1909.08053, abstract, section 1",
    ),
    ("link of one GPU", "12 GB/s each way", "of PCIe 3.0 x16's 15.75; assumed, usual for pinned memory"),
    (
        "links of a machine",
        "48 GB/s",
        "assumed: 3.0 a GPU where 16 copy at a time, as ZeRO-Infinity, arXiv:2104.07857, is remembered",
    ),
    ("DRAM", "192 GB/s", "3/4, assumed, of 2 x 6 channels of DDR4-2666 (Xeon 8168)"),
    ("between GPUs", "120 GB/s", "4/5, assumed, of NVSwitch's 150 each way"),
    ("between machines", "80 GB/s", "4/5, assumed, of 8 x 100 Gbit/s InfiniBand"),
    ("an exchange's latency", "30 us", "assumed"),
    ("model", "50 layers, 10 sequences of 1024 tokens", "DeepSpeed's ZeRO-Offload tutorial; the length is assumed"),
    ("operations", "8 a parameter and token", "6, and 2 for activations that are computed again"),
    ("clipping", "on", "Megatron-LM's default"),
]
"""Each with its value and its source."""
BATCH, LENGTH, LAYERS = 10, 1024, 50
PUBLISHED_ADAM = {1e9: 0.22, 2e9: 0.51, 4e9: 1.03, 8e9: 2.41, 10e9: 2.57}
"""Seconds of ZeRO-Offload's CPU-Adam: arXiv:2101.06840, section 6, as are the other published figures."""
PUBLISHED_RATE = "about 40 TFLOPS with accumulation"
PUBLISHED_SCALING = "published: near-linear"
PUBLISHED_DELAYED = "published: 1.1 to 1.6"
BYTES = 28
"""Bytes of an fp16 parameter's update."""
CLUSTERS = ((4, 1), (16, 1), (16, 2), (16, 4), (16, 8))
"""GPUs of a machine, machines."""
NOT_MODELLED = (
    "Python and launches of kernels; copies and exchanges that slow down the host's memory or the GPU; memory that is "
    "not enough; slower ranks"
)


class Cell(NamedTuple):
    """One regime of the validation."""

    name: str
    measured: list[float]
    """Seconds of a step, one a round."""
    predicted: list[float]
    """Predicted seconds of a step, one a round, from that round's measured exchanges."""


# --- against the wall clock ------------------------------------------------------------------------------


def mean_of(step_times: Callable[[int], list[float]], steps: int) -> float:
    return statistics.mean(step_times(steps))


def on_two_ranks(cases: dict[str, Case], rounds: int, steps: int = 2) -> list[Cell]:
    """Real gloo ranks on fake devices. How long an exchange takes is measured by itself, in the same ranks."""
    with tempfile.TemporaryDirectory() as folder:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(RANKS, mp_context=spawn) as pool:
            running = [pool.submit(real_rank, r, f"file://{folder}/ranks", cases, rounds, steps) for r in range(RANKS)]
            ranks = [rank.result() for rank in running]
    cells = []
    for name, case in cases.items():
        both = zip(*(rank[name][ALONE] for rank in ranks), strict=True)
        took = [[statistics.mean(each) for each in zip(*of_round, strict=True)] for of_round in both]
        for schedule in SCHEDULES:
            measured = [statistics.mean(each) for each in zip(*(rank[name][schedule] for rank in ranks), strict=True)]
            expected = []
            for seconds in took:
                with virtual(case.host) as clock:
                    group = SimulatedGroup(clock, RANKS, *durations(*seconds))
                    body = partial(simulated_rank, case, schedule, steps, group)
                    expected.append(statistics.mean(on_ranks(clock, RANKS, body)))
            cells.append(Cell(f"{RANKS} gloo ranks: {name}, {schedule}", measured, expected))
    return cells


def durations(exchange: float, gather: float, tell: float) -> tuple[Callable[[int], float], Callable[[int], float]]:
    """Seconds of an exchange and a gather, of a bucket's bytes or a few."""
    return lambda n_bytes: exchange, lambda n_bytes: gather if n_bytes >= RANK_NUMEL else tell


def rank_run(case: Case, schedule: str, collectives: Any) -> Run:
    return Run(case, RANK_BUCKETS * RANK_NUMEL, RANK_BUCKETS, 1, True, schedule, collectives)


def simulated_rank(case: Case, schedule: str, steps: int, group: SimulatedGroup, rank: int) -> float:
    run = rank_run(case, schedule, SimulatedRank(group, rank))
    run.step_times(2)
    seconds = mean_of(run.step_times, steps)
    run.close()
    return seconds


def real_rank(
    rank: int, store: str, cases: dict[str, Case], rounds: int, steps: int
) -> dict[str, dict[str, list[Any]]]:
    """Return, for each case and round, each schedule's mean step and the result of :func:`alone`."""
    import torch
    import torch.distributed as dist

    from frontends.torch.ranks.collectives import TorchRanks

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=PATIENCE)
    answers: dict[str, dict[str, list[Any]]] = {}
    for name, case in cases.items():
        runs = {s: rank_run(case, s, TorchRanks(None)) for s in SCHEDULES}
        contenders: dict[str, Callable[[], Any]] = {
            s: partial(mean_of, run.step_times, steps) for s, run in runs.items()
        }
        with slow_kernels(case.host):
            answers[name] = interleave({**contenders, ALONE: partial(alone, TorchRanks(None))}, rounds)
        for run in runs.values():
            run.close()
    dist.destroy_process_group()
    return answers


def alone(ranks: Any, times: int = 20) -> list[float]:
    """Seconds of an exchange and a gather of a bucket, and of a sum of a few numbers."""
    whole, shard = np.zeros(RANK_NUMEL, np.uint16), np.zeros(RANK_NUMEL // RANKS, np.uint16)
    received, few = np.empty_like(whole), np.zeros(64, np.int64)
    calls = (
        lambda: ranks.exchange(whole, received, "exchange"),
        lambda: ranks.gather(shard, received, "gather"),
        lambda: ranks.sum_integers(few, "sum"),
    )
    seconds = []
    for call in calls:
        samples = []
        for _ in range(times):
            start = time.perf_counter()
            call()
            samples.append(time.perf_counter() - start)
        seconds.append(statistics.median(samples))
    return seconds


def show(cells: list[Cell]) -> None:
    print(f"{'ms a step':58}{'measured':>10}{'predicted':>11}{'p/m':>7}")
    for cell in cells:
        measured, predicted = (statistics.median(seconds) for seconds in (cell.measured, cell.predicted))
        print(f"{cell.name:58}{1e3 * measured:10.1f}{1e3 * predicted:11.1f}{predicted / measured:7.3f}")


def together(cells: list[Cell]) -> dict[str, Any]:
    """The ratio of all regimes and rounds."""
    predicted, measured = ([s for cell in cells for s in getattr(cell, name)] for name in ("predicted", "measured"))
    return ratio(f"simulated / measured step, {RANKS} gloo ranks, {len(cells)} regimes", predicted, measured)


# --- beside the published figures --------------------------------------------------------------------------


class Question(NamedTuple):
    """A step to simulate, and the published figure to compare with."""

    name: str
    machines: Machines
    job: Job
    schedule: str
    published: str = ""


def questions(quick: bool) -> list[Question]:
    sizes = {1e9: PUBLISHED_ADAM[1e9]} if quick else PUBLISHED_ADAM
    largest = Job(max(sizes), LAYERS, BATCH * LENGTH)
    asked = [
        Question("one V100", DGX2, largest._replace(parameters=size), "overlap", f"Adam {adam} s")
        for size, adam in sizes.items()
    ]
    for micro_steps in (1,) if quick else (1, 4):
        job = largest._replace(micro_steps=micro_steps)
        name = f"one V100, {micro_steps} micro-steps" if micro_steps > 1 else "one V100"
        for schedule in ("in backward", "delayed", "serial", WAITING) if micro_steps == 1 else ("overlap", WAITING):
            asked.append(Question(name, DGX2, job, schedule, PUBLISHED_RATE))
    for reduction in ("ordered", "native"):
        job = largest._replace(reduction=reduction)
        for gpus, machines in CLUSTERS:
            cluster = replace(DGX2, gpus=gpus, machines=machines)
            name = f"{machines} x {gpus} V100, {reduction}"
            asked.append(Question(name, cluster, job, "overlap", PUBLISHED_SCALING))
    return asked


def simulate_all(steps: Sequence[tuple[Machines, Job, str, Path | None]]) -> list[Result]:
    """:func:`simulate` of each, as many at a time as there are processors."""
    with ProcessPoolExecutor(available_cpus(), multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(simulate, *zip(*steps, strict=True)))


def answer(asked: list[Question], traces: Path | None = None) -> list[dict[str, Any]]:
    """A row of each; its table is printed."""
    header = f"{'':30}{'schedule':12}{'parameters':>12}{'GPUs':>6}{'s a step':>10}{'TFLOPS a GPU':>14}{'Adam, s':>10}"
    print(f"\n{header}  published")
    rows = []
    written = [traces and traces / f"{question.schedule.replace(' ', '-')}.json" for question in asked]
    results = simulate_all([(q.machines, q.job, q.schedule, t) for q, t in zip(asked, written, strict=True)])
    for (name, machines, job, schedule, published), result in zip(asked, results, strict=True):
        adam, size = result.busy["update"], job.parameters
        known = {"params": size, "gpus": machines.world_size, "micro_steps": job.micro_steps, "tflops": result.tflops}
        known |= {"schedule": schedule, "adam_s": adam, "published": published}
        rows.append(row(f"{name}, {schedule}", "step", "s", [result.seconds], **known))
        numbers = f"{size:12.3g}{machines.world_size:6}{result.seconds:10.3f}{result.tflops:14.2f}{adam:10.3f}"
        print(f"{name:30}{schedule:12}{numbers}  {published}", flush=True)
    return rows


def delayed(batches: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return the speed-up over the step that waits; every time is in proportion to the parameters."""
    published_adam = BYTES * 10e9 / PUBLISHED_ADAM[10e9]
    print("\ntimes faster than a step that ends when all parameters are written")
    drams = ((DGX2.dram, "DRAM as assumed"), (published_adam, "the published Adam"))
    cases = [(dram, whose, batch) for dram, whose in drams for batch in batches]
    schedules = (WAITING, "delayed", "overlap", "in backward")
    results = iter(
        simulate_all(
            [
                (replace(DGX2, dram=dram), Job(1e9, LAYERS, batch * LENGTH), schedule, None)
                for dram, _, batch in cases
                for schedule in schedules
            ]
        )
    )
    rows = []
    for _, whose, batch in cases:
        waiting, *others = (next(results).seconds for _ in schedules)
        faster = {schedule: waiting / own for schedule, own in zip(schedules[1:], others, strict=True)}
        print(f"  batch {batch:3}, {whose:20}" + "".join(f"{s:>14} {x:.2f}" for s, x in faster.items()))
        for schedule, times in faster.items():
            known: dict[str, Any] = {
                "batch": batch,
                "published": PUBLISHED_DELAYED if schedule == "delayed" else "",
            }
            rows.append(row(f"{schedule}, {whose}", "times faster than waiting", "x", [times], **known))
    return rows


def summary(rows: list[dict[str, Any]], hidden: list[dict[str, Any]]) -> list[str]:
    """The rows' figures beside the published ones."""
    said = []
    for size, published in PUBLISHED_ADAM.items():
        for each in rows:
            if each["params"] == size and each["published"].startswith("Adam"):
                implied = BYTES * size / published / GB
                said.append(
                    f"Adam, {size / 1e9:.0f} B: {each['adam_s']:.2f} s, published {published} s (28 bytes a parameter "
                    f"at {implied:.0f} GB/s)"
                )
    largest = max(each["params"] for each in rows)
    [one] = [each["tflops"] for each in rows if each["name"] == "one V100, overlap" and each["params"] == largest]
    for reduction in ("ordered", "native"):
        rates = {each["gpus"]: each["tflops"] / one for each in rows if f" {reduction}," in each["name"]}
        kept = ", ".join(f"{gpus}: {100 * rate:.1f} %" for gpus, rate in rates.items())
        said.append(f"of one GPU's rate each GPU keeps, {reduction} reduction: {kept}; {PUBLISHED_SCALING}")
    times = [each["p50"] for each in hidden if each["name"].startswith("delayed")]
    said.append(f"delayed: {min(times):.2f} to {max(times):.2f} times faster than waiting; {PUBLISHED_DELAYED}")
    return said


# --- as a command --------------------------------------------------------------------------------------------


def parse(arguments: list[str] | None) -> argparse.Namespace:
    known = parser("simulate", __doc__.splitlines()[0])
    known.add_argument("--trace", type=Path, metavar="FOLDER", help="write a trace of each schedule (with --gpus)")
    switch = argparse.BooleanOptionalAction
    known.add_argument("--checkpointing", action=switch, default=True, help="activations are computed again")
    known.add_argument("--clipping", action=switch, default=True)
    known.add_argument("--reduction", choices=("ordered", "native"), default="ordered")
    options: list[tuple[str, Callable[[str], Any], Any, str]] = [
        ("gpus", count, None, "of a machine: simulate one's own machines"),
        ("machines", count, 1, ""),
        ("parameters", count, 10e9, "such as 10B"),
        ("layers", count, LAYERS, ""),
        ("micro-batch", count, BATCH, "sequences a GPU"),
        ("context", count, LENGTH, "tokens of a sequence"),
        ("micro-steps", count, 1, "over which gradients accumulate"),
        ("flops", rate, DGX2.flops, "operations a second that a GPU reaches, such as 39T"),
        ("link", rate, DGX2.link, "bytes a second of a GPU to the host, each way, such as 12GB"),
        ("links", rate, math.inf, "of all GPUs of a machine to the host together"),
        ("dram", rate, DGX2.dram, "of a machine's memory"),
        ("peer", rate, DGX2.peer, "out of a GPU to others of its machine"),
        ("network", rate, DGX2.network, "out of a machine"),
    ]
    for name, kind, default, what in options:
        known.add_argument(f"--{name}", type=kind, default=default, help=f"{what} (default: {default})".strip())
    return known.parse_args(arguments)


def own(args: argparse.Namespace) -> list[Question]:
    """The questions of the command line."""
    speeds = {name: getattr(args, name) for name in ("flops", "link", "links", "dram", "peer", "network")}
    machines = Machines(args.gpus, args.machines, **speeds)
    tokens = args.micro_batch * args.context
    options = args.checkpointing, args.clipping, args.reduction
    job = Job(args.parameters, args.layers, tokens, args.micro_steps, *options)
    return [Question(f"{args.machines} x {args.gpus}", machines, job, schedule) for schedule in (*SCHEDULES, WAITING)]


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    ratios: list[dict[str, Any]] = []
    notes = [f"not modelled: {NOT_MODELLED}"]
    if args.gpus:
        if args.trace:
            args.trace.mkdir(parents=True, exist_ok=True)
        asked = own(args)
        rows = answer(asked, args.trace)
        config = {"machines": asdict(asked[0].machines), "job": asked[0].job._asdict()}
    else:
        cells = on_two_ranks({"exchange": RANK_CASES["exchange"]} if args.quick else RANK_CASES, rounds=1)
        show(cells)
        ratios = [together(cells)]
        notes.append("on one rank the simulation is held against the fake device's steps in bench.parts.overlap")
        notes += [f"{what}: {value} ({source})" for what, value, source in ASSUMPTIONS]
        print("", *notes, sep="\n")
        rows = answer(questions(args.quick))
        hidden = delayed((8,) if args.quick else (1, 2, 4, 8, 16))
        said = summary(rows, hidden)
        print("", *said, sep="\n")
        notes += said
        rows += hidden
        for cell in cells:
            expected = 1e3 * statistics.median(cell.predicted)
            rows.append(row(cell.name, "step", "ms", [1e3 * s for s in cell.measured], predicted=expected))
        config = {"machines": asdict(DGX2), "batch": BATCH, "length": LENGTH, "layers": LAYERS}
    title = "Scale on paper: the pipeline in virtual time"
    record = {"bench": "simulate", "title": title, "config": config, "versions": versions("torch", "numpy")}
    append(args.json, {**record, "rows": rows, "ratios": ratios, "missing": [], "notes": notes})


if __name__ == "__main__":
    main()
