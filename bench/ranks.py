"""Whole training steps on several gloo ranks: offload-core against DeepSpeed, and against training without offload.

Every contender has processes of its own, which live through the whole run; whose turn it is runs a few steps while the
others wait in a read. Turns are shuffled within each round, so that the machine's drift hits all alike.

DeepSpeed is no dependency: `make bench` installs it. A contender that cannot run is reported, and the exit
status is 1. "Others CPU" tells how quiet the machine was.
"""

import argparse
import json
import os
import random
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from bench.rank_contenders import CONTENDERS, DEEPSPEED, TOKENS, deepspeed_config
from bench.record import append
from offload_core.model_shapes import GPTConfig

PHASES = ("forward", "backward", "step", "total")
TARGET = 1.5
GPT_34M = GPTConfig(layers=8, width=512, heads=8, vocabulary=16384, positions=1024)
_LOG_LINES = 12


class ContenderError(Exception):
    """A contender cannot run here."""


class Group:
    """The ranks of one contender."""

    def __init__(self, name: str, ranks: int, settings: dict[str, Any]) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the ranks
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "bench.rank_contenders", name, json.dumps(settings)]
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "OMP_NUM_THREADS": str(settings["threads"]),
            "OMP_WAIT_POLICY": "passive",
            # DeepSpeed compiles its Adam on first use, with the ninja of this environment.
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        }
        self._processes = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(ranks)
        ]

    def answers(self) -> list[dict[str, Any]]:
        """One from each rank."""
        answers: dict[Any, dict[str, Any]] = {}
        outputs = [process.stdout for process in self._processes]
        while len(answers) < len(outputs):
            for output in select.select([o for o in outputs if o not in answers], [], [])[0]:
                line = output.readline()
                if not line:  # one is gone; the others may be waiting for it
                    self.close(0.0)
                    self._log.seek(0)
                    words = "".join(self._log.readlines()[-_LOG_LINES:]).rstrip()
                    raise ContenderError(words or "ended without a word")
                answers[output] = json.loads(line)
        return [answers[output] for output in outputs]

    def run(self, steps: int) -> list[dict[str, Any]]:
        for process in self._processes:
            with suppress(BrokenPipeError):  # it has ended: `answers` finds out
                process.stdin.write(json.dumps({"steps": steps}) + "\n")
                process.stdin.flush()
        return self.answers()

    def close(self, patience: float = 10.0) -> None:
        """End the ranks; kill those that have not ended after so many seconds."""
        for process in self._processes:
            with suppress(BrokenPipeError):
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(patience)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Result:
    """What was measured of one contender."""

    def __init__(self, start: list[dict[str, Any]]) -> None:
        self.versions: dict[str, str] = start[0]["versions"]
        self.setup_peak = max(answer["setup_peak"] for answer in start)
        self.rounds: list[list[dict[str, float]]] = []
        """Of each round, of each step but its first: the mean over the ranks."""
        self.peak, self.idle = 0, 0.0
        self.sent: list[float] = []
        self.others: list[float] = []
        """Processors that whatever else runs on the machine took during each turn."""

    def add(self, answers: list[dict[str, Any]], sent: int, busy: float, seconds: float) -> None:
        steps = list(zip(*(answer["steps"] for answer in answers), strict=True))
        self.rounds.append([{k: statistics.mean(rank[k] for rank in s) for k in s[0]} for s in steps[1:]])
        self.sent.append(sent / len(steps))
        self.others.append(max(busy - sum(answer["cpu"] for answer in answers), 0.0) / seconds)
        self.peak = max([self.peak, *(answer["peak"] for answer in answers)])
        self.idle = max(answer["idle"] for answer in answers)

    def seconds(self, phase: str) -> list[float]:
        return [step[phase] for steps in self.rounds for step in steps]

    def quantiles(self, phase: str) -> tuple[float, float, float]:
        fifths = statistics.quantiles(self.seconds(phase), n=5, method="inclusive")
        return fifths[0], statistics.median(self.seconds(phase)), fifths[-1]

    def median_of_round(self, i: int) -> float:
        return statistics.median(step["total"] for step in self.rounds[i])

    def record(self) -> dict[str, Any]:
        return {
            "seconds": {phase: [round(s, 6) for s in self.seconds(phase)] for phase in PHASES},
            "last": {key: self.rounds[-1][-1][key] for key in ("loss", "grad_norm")},
            "peak_rss": self.peak,
            "setup_peak_rss": self.setup_peak,
            "idle_cpu": self.idle,
            "others_cpu": statistics.median(self.others),
            "loopback_bytes_a_step": statistics.median(self.sent),
        }


def measure(
    names: list[str], ranks: int, rounds: int, steps: int, settings: dict[str, Any]
) -> tuple[dict[str, Result], dict[str, str]]:
    """The results, and why the others could not run."""
    groups: dict[str, Group] = {}
    results: dict[str, Result] = {}
    failures: dict[str, str] = {}
    try:
        for name in names:
            print(f"{name}: starting {ranks} ranks", file=sys.stderr)
            group = Group(name, ranks, settings)
            try:
                results[name] = Result(group.answers())
            except ContenderError as error:
                failures[name] = str(error)
            else:
                groups[name] = group
        order = random.Random(0)
        for i in range(rounds):
            print(f"round {i + 1} of {rounds}", file=sys.stderr)
            for name in order.sample(list(groups), len(groups)):
                sent, busy, start = loopback_bytes(), busy_seconds(), time.perf_counter()
                try:
                    answers = groups[name].run(steps + 1)
                except ContenderError as error:
                    failures[name] = str(error)
                    del groups[name], results[name]
                else:
                    seconds = time.perf_counter() - start
                    results[name].add(answers, loopback_bytes() - sent, busy_seconds() - busy, seconds)
    finally:
        for group in groups.values():
            group.close()
    return results, failures


def loopback_bytes() -> int:
    """What this machine has sent to itself: gloo's data and its headers, and what else there was meanwhile."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("lo:"))


def busy_seconds() -> float:
    """Processor time of the whole machine."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq


def compare(results: dict[str, Result], reference: str) -> dict[str, dict[str, Any]]:
    """How many times longer each other's step takes than the reference's: of the medians, the 20th percentiles, and by
    round."""
    if reference not in results:
        return {}
    ours, others = results[reference], {name: result for name, result in results.items() if name != reference}
    compared = {}
    for name, other in others.items():
        by_round = [other.median_of_round(i) / ours.median_of_round(i) for i in range(len(ours.rounds))]
        low, middle, _ = (a / b for a, b in zip(other.quantiles("total"), ours.quantiles("total"), strict=True))
        compared[name] = {"ratio": middle, "of_p20": low, "by_round": [round(r, 3) for r in by_round]}
    return compared


def show(
    results: dict[str, Result], failures: dict[str, str], compared: dict[str, dict[str, Any]], reference: str
) -> None:
    print(f"{'ms, median (p20 to p80)':34}" + "".join(f"{phase:>24}" for phase in PHASES))
    for name, result in results.items():
        cells = [tuple(1e3 * s for s in result.quantiles(phase)) for phase in PHASES]
        print(f"{name:34}" + "".join(f"{f'{mid:.1f} ({low:.1f} to {high:.1f})':>24}" for low, mid, high in cells))
    columns = ("peak RSS", "and setup", "MB a step", "idle CPU", "others CPU", "loss", "norm")
    print(f"{'':34}" + "".join(f"{column:>12}" for column in columns))
    for name, result in results.items():
        known = result.record()
        row = [f"{known[k] / 2**20:.0f} MiB" for k in ("peak_rss", "setup_peak_rss")]
        row += [f"{known['loopback_bytes_a_step'] / 1e6:.1f}", f"{100 * result.idle:.2f} %"]
        row += [f"{100 * known['others_cpu']:.0f} %"]
        row += [f"{known['last'][k]:.4f}" for k in ("loss", "grad_norm")]
        print(f"{name:34}" + "".join(f"{cell:>12}" for cell in row))
    for name, ratio in compared.items():
        rounds = f"{min(ratio['by_round']):.2f} to {max(ratio['by_round']):.2f}"
        print(f"{name} / {reference}: {ratio['ratio']:.2f} (of the p20: {ratio['of_p20']:.2f}; rounds: {rounds})")
    peers = [ratio["ratio"] for name, ratio in compared.items() if name in DEEPSPEED]
    if peers:
        print(f"fastest DeepSpeed / {reference}: {min(peers):.2f} (target: at least {TARGET})")
    for name, why in failures.items():
        print(f"{name}: COULD NOT RUN\n{why}")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.ranks", description=__doc__.splitlines()[0])
    known = [name for names in CONTENDERS.values() for name in names]
    parser.add_argument("--stage", type=int, choices=CONTENDERS, default=2, help="which to compare (default: 2)")
    parser.add_argument("--contenders", nargs="+", choices=known, metavar="NAME", help="default: all of the stage")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each rank (default: 1)")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=4, help="counted in each round of each contender (default: 4)")
    parser.add_argument("--warm-up", type=int, default=5, help="steps before the first round (default: 5)")
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--layers", type=int, default=GPT_34M.layers)
    parser.add_argument("--width", type=int, default=GPT_34M.width)
    parser.add_argument("--vocabulary", type=int, default=GPT_34M.vocabulary)
    parser.add_argument("--json", type=Path, help="append the result to this file, one JSON object a line")
    args = parser.parse_args(arguments)
    for name in ("ranks", "threads", "rounds", "micro_batch", "context", "layers", "width", "vocabulary"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: got {getattr(args, name)}, expected at least 1")
    if args.vocabulary < TOKENS:
        parser.error(f"--vocabulary: got {args.vocabulary}, expected at least {TOKENS}, the tokens drawn")
    if args.width % GPT_34M.heads:
        parser.error(f"--width: got {args.width}, expected a multiple of the {GPT_34M.heads} heads")
    if args.steps < 2:
        parser.error(f"--steps: got {args.steps}, expected at least 2: there is a spread to report")
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    gpt = GPTConfig(args.layers, args.width, GPT_34M.heads, args.vocabulary, GPT_34M.positions)
    settings = {name: getattr(args, name) for name in ("threads", "micro_batch", "context", "warm_up")}
    settings["gpt"] = asdict(gpt)
    names = args.contenders or list(CONTENDERS[args.stage])
    reference = CONTENDERS[args.stage][0]
    results, failures = measure(names, args.ranks, args.rounds, args.steps, settings)
    compared = compare(results, reference)
    print(
        f"{gpt.numel:,} parameters in bf16, {args.ranks} gloo ranks of {args.threads} threads, "
        f"micro-batch {args.micro_batch} x {args.context} tokens, {args.rounds} rounds of {args.steps} steps"
    )
    show(results, failures, compared, reference)
    record = {
        "bench": "ranks",
        "stage": args.stage,
        "versions": {key: version for result in results.values() for key, version in result.versions.items()},
        "ranks": args.ranks,
        "rounds": args.rounds,
        "steps": args.steps,
        **settings,
        "deepspeed": {name: deepspeed_config(args.micro_batch, zero) for name, zero in DEEPSPEED.items()},
        "results": {name: result.record() for name, result in results.items()},
        "compared": compared,
        "could_not_run": failures,
    }
    append(args.json, record)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
