"""Steps on machines that are not there: the pipeline runs in virtual time (``bench.cluster``).

First the simulation is held against what it can be held against: steps that the same pipeline takes by the wall clock,
on the fake device and on two gloo ranks, as predicted / measured. Then it is asked about the machines of the published
figures, under the assumptions of ``ASSUMPTIONS``, or with ``--gpus`` about one's own.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.cluster import WAITING, Job, Machines, Result, SimulatedGroup, SimulatedRank, on_ranks, simulate, virtual
from bench.overlap import CASES, GB, SCHEDULES, Case, Run, slow_kernels
from bench.record import append, parser, ratio, row, versions
from bench.turns import take_turns
from offload_core.quantities import count, rate

HALF = {name: case._replace(forward=case.forward / 2, backward=case.backward / 2) for name, case in CASES.items()}
"""With half the parameters."""
RANK_CASES = {
    "compute": Case(forward=0.04, backward=0.08, link=1 * GB, host=8 * GB),
    "exchange": Case(forward=0.01, backward=0.02, link=1 * GB, host=8 * GB),
}
RANKS, RANK_BUCKETS, RANK_NUMEL = 2, 8, 2**20
PATIENCE = timedelta(seconds=60)

DGX2 = Machines(
    gpus=1, machines=1, flops=39e12, link=12 * GB, dram=192 * GB, peer=120 * GB, network=80 * GB, links=48 * GB
)
ASSUMPTIONS = [
    ("a V100's rate", "39 TFLOPS", "1.2 B on one GPU without offload: Megatron-LM, arXiv:1909.08053, abstract"),
    ("link of one GPU", "12 GB/s each way", "of PCIe 3.0 x16's 15.75; assumed, usual for pinned memory"),
    ("links of a machine", "48 GB/s", "16 GPUs at a time reach 3.0 each: ZeRO-Infinity, arXiv:2104.07857, section 3"),
    ("DRAM", "192 GB/s", "3/4, assumed, of 2 x 6 channels of DDR4-2666 (Xeon 8168)"),
    ("between GPUs", "120 GB/s", "4/5, assumed, of NVSwitch's 150 each way"),
    ("between machines", "80 GB/s", "4/5, assumed, of 8 x 100 Gbit/s InfiniBand"),
    ("an exchange's latency", "30 us", "assumed"),
    ("model", "50 layers, 10 sequences of 1024 tokens", "DeepSpeed's ZeRO-Offload tutorial; the length is assumed"),
    ("operations", "8 a parameter and token", "6, and 2 for activations that are computed again"),
    ("clipping", "on", "Megatron-LM's default"),
]
"""What, how much, and where it is from."""
BATCH, LENGTH, LAYERS = 10, 1024, 50
PUBLISHED_ADAM = {1e9: 0.22, 2e9: 0.51, 4e9: 1.03, 8e9: 2.41, 10e9: 2.57}
"""Seconds of ZeRO-Offload's CPU-Adam: arXiv:2101.06840, section 6, as are the other published figures."""
PUBLISHED_TFLOPS = 40.0
PUBLISHED_DELAYED = (1.1, 1.6)
CLUSTERS = ((1, 1), (4, 1), (16, 1), (16, 2), (16, 4), (16, 8))
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
    predicted: float


# --- against the wall clock ------------------------------------------------------------------------------


def predicted(case: Case, params: int, buckets: int, scale: int, clips: bool, schedule: str, steps: int = 4) -> float:
    """Seconds of a step of ``bench.overlap``'s machine."""
    with virtual(case.host / scale):
        run = Run(case, params, buckets, scale, clips, schedule)
        run.turn(2)
        seconds = statistics.mean(run.turn(steps))
        run.close()
    return seconds


def on_fake_device(cases: dict[str, Case], rounds: int, steps: int = 2) -> list[Cell]:
    params, buckets, scale = 2**29, 16, 2**10
    cells = []
    for name, case in cases.items():
        for clips in (True, False):
            runs = {s: Run(case, params, buckets, scale, clips, s) for s in SCHEDULES}
            try:
                with slow_kernels(case.host / scale):
                    measured = take_turns({s: partial(mean_of, run.turn, steps) for s, run in runs.items()}, rounds)
            finally:
                for run in runs.values():
                    run.close()
            for schedule in SCHEDULES:
                label = f"{name}, {'clipped' if clips else 'not clipped'}, {schedule}"
                expected = predicted(case, params, buckets, scale, clips, schedule, steps)
                cells.append(Cell(f"fake device: {label}", measured[schedule], expected))
    return cells


def mean_of(turn: Callable[[int], list[float]], steps: int) -> float:
    return statistics.mean(turn(steps))


def on_two_ranks(cases: dict[str, Case], rounds: int, steps: int = 3) -> list[Cell]:
    """Real gloo ranks on fake devices. How long an exchange takes is measured by itself, in the same ranks."""
    with tempfile.TemporaryDirectory() as folder:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(RANKS, mp_context=spawn) as pool:
            running = [pool.submit(real_rank, r, f"file://{folder}/ranks", cases, rounds, steps) for r in range(RANKS)]
            ranks = [rank.result() for rank in running]
    cells = []
    for name, case in cases.items():
        for schedule in SCHEDULES:
            measured, took = zip(*(rank[name, schedule] for rank in ranks), strict=True)
            exchange, gather, tell = (statistics.mean(each) for each in zip(*took, strict=True))
            with virtual(case.host) as clock:
                group = SimulatedGroup(
                    clock, RANKS, lambda n_bytes: exchange, lambda n_bytes: gather if n_bytes >= RANK_NUMEL else tell
                )
                turn = partial(simulated_rank, case, schedule, steps, group)
                expected = statistics.mean(on_ranks(clock, RANKS, turn))
            cells.append(
                Cell(f"2 gloo ranks: {name}, {schedule}", list(map(statistics.mean, zip(*measured))), expected)
            )
    return cells


def rank_run(case: Case, schedule: str, collectives: Any) -> Run:
    return Run(case, RANK_BUCKETS * RANK_NUMEL, RANK_BUCKETS, 1, True, schedule, collectives)


def simulated_rank(case: Case, schedule: str, steps: int, group: SimulatedGroup, rank: int) -> float:
    run = rank_run(case, schedule, SimulatedRank(group, rank))
    run.turn(2)
    seconds = mean_of(run.turn, steps)
    run.close()
    return seconds


def real_rank(
    rank: int, store: str, cases: dict[str, Case], rounds: int, steps: int
) -> dict[tuple[str, str], tuple[list[float], tuple[float, float, float]]]:
    """Of each case and schedule: the mean step of each round, and the seconds of an exchange, a gather and a sum."""
    import torch
    import torch.distributed as dist

    from frontends.torch.collectives import TorchRanks

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=PATIENCE)
    answers = {}
    for name, case in cases.items():
        runs = {s: rank_run(case, s, TorchRanks(None)) for s in SCHEDULES}
        with slow_kernels(case.host):
            measured = take_turns({s: partial(mean_of, run.turn, steps) for s, run in runs.items()}, rounds)
        took = alone(TorchRanks(None))
        for schedule, run in runs.items():
            run.close()
            answers[name, schedule] = measured[schedule], took
    dist.destroy_process_group()
    return answers


def alone(ranks: Any, times: int = 20) -> tuple[float, float, float]:
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
    exchange, gather, tell = seconds
    return exchange, gather, tell


# --- beside the published figures --------------------------------------------------------------------------


def adam_rows(sizes: dict[float, float]) -> list[dict[str, Any]]:
    rows = []
    for parameters, published in sizes.items():
        result = simulate(DGX2, Job(parameters, LAYERS, LENGTH), "overlap")
        seconds = result.busy["update"]
        rows.append(row("CPU Adam, one V100", "update", "s", [seconds], params=parameters, published=published))
    return rows


def schedule_rows(parameters: float, accumulations: tuple[int, ...]) -> list[dict[str, Any]]:
    """TFLOPS of one GPU."""
    rows = []
    for micro_steps in accumulations:
        job = Job(parameters, LAYERS, BATCH * LENGTH, micro_steps)
        for schedule in (*SCHEDULES, WAITING) if micro_steps == 1 else ("overlap", WAITING):
            rows.append(gpu_row(f"one V100, {schedule}", DGX2, job, schedule, published=PUBLISHED_TFLOPS))
    return rows


def gpu_row(name: str, machines: Machines, job: Job, schedule: str, **extra: Any) -> dict[str, Any]:
    result = simulate(machines, job, schedule)
    known = {"params": job.parameters, "micro_steps": job.micro_steps, "gpus": machines.world_size}
    known["step_s"] = result.seconds
    return row(name, "rate of a GPU", "TFLOPS", [result.tflops], **known, **extra)


def cluster_rows(parameters: float) -> list[dict[str, Any]]:
    rows = []
    for reduction in ("ordered", "native"):
        job = Job(parameters, LAYERS, BATCH * LENGTH, reduction=reduction)
        for gpus, machines in CLUSTERS:
            where = replace(DGX2, gpus=gpus, machines=machines)
            rows.append(gpu_row(f"overlap, {reduction} reduction", where, job, "overlap", published="near-linear"))
    return rows


def delayed_rows(batches: tuple[int, ...]) -> list[dict[str, Any]]:
    """How many times faster than the step that waits; every time is in proportion to the parameters."""
    slow_adam = 28 * 10e9 / PUBLISHED_ADAM[10e9]
    rows = []
    for dram, whose in ((DGX2.dram, "assumed DRAM"), (slow_adam, "the published Adam's DRAM")):
        for batch in batches:
            job, machines = Job(1e9, LAYERS, batch * LENGTH), replace(DGX2, dram=dram)
            seconds = {s: simulate(machines, job, s).seconds for s in (WAITING, "delayed", "overlap", "in backward")}
            for schedule, each in seconds.items():
                if schedule != WAITING:
                    samples = [seconds[WAITING] / each]
                    known = {"batch": batch, "published": PUBLISHED_DELAYED if schedule == "delayed" else None}
                    rows.append(row(f"{schedule}, {whose}", "faster than waiting", "x", samples, **known))
    return rows


# --- as a command --------------------------------------------------------------------------------------------


def show_cells(cells: list[Cell]) -> None:
    print(f"{'ms a step':58}{'measured':>10}{'predicted':>11}{'p/m':>7}")
    for cell in cells:
        middle = statistics.median(cell.measured)
        print(f"{cell.name:58}{1e3 * middle:10.1f}{1e3 * cell.predicted:11.1f}{cell.predicted / middle:7.3f}")


def show_rows(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{title}")
    hidden = {"name", "metric", "unit", "p20", "p50", "p80", "n", "published"}
    for each in rows:
        where = ", ".join(f"{key} {value:.4g}" for key, value in each.items() if key not in hidden)
        beside = "" if each.get("published") is None else f"   published: {each['published']}"
        print(f"  {each['name']:42}{where:58}{each['p50']:9.3f} {each['unit']}{beside}")


def published(quick: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows beside the published figures, and what they say together."""
    size = 1e9 if quick else 10e9
    print("\nassumed:")
    for what, value, source in ASSUMPTIONS:
        print(f"  {what:24}{value:42}{source}")
    adam = adam_rows({1e9: 0.22} if quick else PUBLISHED_ADAM)
    show_rows("CPU Adam, seconds a step", adam)
    single = schedule_rows(size, (1,) if quick else (1, 4))
    show_rows(f"{size / 1e9:.0f} B on one V100-32GB, {BATCH} x {LENGTH} tokens a micro-step", single)
    clusters = cluster_rows(size)
    show_rows(f"{size / 1e9:.0f} B on DGX-2s", clusters)
    delayed = delayed_rows((8,) if quick else (1, 2, 4, 8, 16))
    show_rows("What hides the update, beside a step that waits for all parameters", delayed)
    notes = [f"{what}: {value} ({source})" for what, value, source in ASSUMPTIONS]
    notes.append(f"not modelled: {NOT_MODELLED}")
    last = adam[-1]
    implied = 28 * last["params"] / last["published"] / GB
    notes.append(
        f"CPU Adam at {last['params'] / 1e9:.0f} B: {last['p50']:.2f} s simulated, {last['published']} s published, "
        f"which is 28 bytes a parameter at {implied:.0f} GB/s"
    )
    for reduction in ("ordered", "native"):
        rates = [each["p50"] for each in clusters if reduction in each["name"]]
        notes.append(
            f"{reduction} reduction: a GPU of {CLUSTERS[-1][0] * CLUSTERS[-1][1]} keeps "
            f"{100 * rates[-1] / rates[0]:.1f} % of one GPU's rate, the worst of all sizes "
            f"{100 * min(rates) / rates[0]:.1f} %"
        )
    low, high = (f([e["p50"] for e in delayed if e["name"].startswith("delayed")]) for f in (min, max))
    notes.append(f"delayed: {low:.2f} to {high:.2f} times faster, published {PUBLISHED_DELAYED}; the batch decides")
    return [*adam, *single, *clusters, *delayed], notes


def own(args: argparse.Namespace) -> tuple[Machines, Job]:
    """The user's machines and job."""
    machines = Machines(
        gpus=args.gpus or 1,
        machines=args.machines,
        flops=args.tflops * 1e12,
        link=args.link,
        dram=args.dram,
        peer=args.peer,
        network=args.network,
        links=args.links or float("inf"),
    )
    tokens = args.micro_batch * args.context
    known = {"checkpointing": args.checkpointing, "clips": args.clipping, "reduction": args.reduction}
    return machines, Job(args.parameters, args.layers, tokens, args.micro_steps, **known)


def show_own(machines: Machines, job: Job, trace: Path | None) -> list[dict[str, Any]]:
    rows = []
    for schedule in (*SCHEDULES, WAITING):
        path = trace and trace / f"{schedule.replace(' ', '-')}.json"
        result: Result = simulate(machines, job, schedule, path)
        lanes = {lane: round(seconds, 6) for lane, seconds in result.busy.items()}
        rows.append(row(schedule, "step", "s", [result.seconds], tflops=result.tflops, busy=lanes))
        busy = ", ".join(f"{lane} {seconds:.3f}" for lane, seconds in lanes.items())
        print(f"{schedule:12}{result.seconds:10.3f} s{result.tflops:8.1f} TFLOPS a GPU   busy (s): {busy}")
    return rows


def parse(arguments: list[str] | None) -> argparse.Namespace:
    known = parser("simulate", __doc__.splitlines()[0])
    known.add_argument("--gpus", type=int, help="of a machine: simulate one's own machines instead")
    known.add_argument("--machines", type=int, default=1)
    known.add_argument("--parameters", type=count, default=10e9, metavar="N", help="such as 10B (default)")
    known.add_argument("--layers", type=int, default=LAYERS)
    known.add_argument("--micro-batch", type=int, default=BATCH, help=f"sequences a GPU (default: {BATCH})")
    known.add_argument("--context", type=int, default=LENGTH, help=f"tokens of a sequence (default: {LENGTH})")
    known.add_argument("--micro-steps", type=int, default=1, help="gradients accumulate over so many (default: 1)")
    known.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=True)
    known.add_argument("--clipping", action=argparse.BooleanOptionalAction, default=True)
    known.add_argument("--reduction", choices=("ordered", "native"), default="ordered")
    known.add_argument("--tflops", type=float, default=DGX2.flops / 1e12, help="that a GPU reaches")
    for name, what in (
        ("link", "of a GPU to the host, each way"),
        ("links", "of all GPUs of a machine to the host together (default: no bound)"),
        ("dram", "of a machine"),
        ("peer", "out of a GPU to others of its machine"),
        ("network", "out of a machine"),
    ):
        default = None if name == "links" else getattr(DGX2, name)
        known.add_argument(f"--{name}", type=rate, default=default, metavar="BYTES", help=f"a second, {what}")
    known.add_argument("--trace", type=Path, help="write a trace of each schedule to this folder (with --gpus)")
    args = known.parse_args(arguments)
    for name in ("gpus", "machines", "layers", "micro_batch", "context", "micro_steps"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            known.error(f"--{name.replace('_', '-')}: got {getattr(args, name)}, expected at least 1")
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    if args.gpus:
        machines, job = own(args)
        if args.trace:
            args.trace.mkdir(parents=True, exist_ok=True)
        rows = show_own(machines, job, args.trace)
        config = {"machines": asdict(machines), "job": job._asdict()}
        record = {"rows": rows, "ratios": [], "notes": [f"not modelled: {NOT_MODELLED}"]}
    else:
        rounds = 1 if args.quick else 2
        cells = on_fake_device({"compute": HALF["compute"]} if args.quick else HALF, rounds)
        cells += on_two_ranks({"exchange": RANK_CASES["exchange"]} if args.quick else RANK_CASES, rounds)
        show_cells(cells)
        rows = [row(c.name, "step", "ms", [1e3 * s for s in c.measured], predicted=1e3 * c.predicted) for c in cells]
        ratios = [ratio(f"predicted / measured, {c.name}", [c.predicted] * len(c.measured), c.measured) for c in cells]
        more, notes = published(args.quick)
        print("", *notes[len(ASSUMPTIONS) :], sep="\n")
        config = {"machines": asdict(DGX2), "batch": BATCH, "length": LENGTH, "layers": LAYERS}
        record = {"rows": [*rows, *more], "ratios": ratios, "notes": notes}
    title = "Scale on paper: the pipeline in virtual time"
    append(
        args.json,
        {
            "bench": "simulate",
            "title": title,
            "config": config,
            "versions": versions("torch", "numpy"),
            "missing": [],
            **record,
        },
    )


if __name__ == "__main__":
    main()
