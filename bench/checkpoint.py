"""Checkpoints beside the disk they go to: saving and loading against plain sequential input and output of as many bytes
(blocks of 8 MiB, as ``dd`` does it; written ones flushed with fsync), and what saving costs the steps during it.

All take turns in one process, in another order each round; ratios are of medians over rounds. Reading is measured from
the page cache, and from the disk after the files were dropped from it. Steps are real ones of the model, some while a
checkpoint is written and some not: the call that starts the save counts as part of them.
"""

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from bench.gpt_torch import GPT
from bench.presets import PRESETS
from bench.record import append, machine
from frontends.torch import wrap
from offload_core.checkpoint_files import Checkpoint
from offload_core.cpus import available_cpus

CHUNK = 8 * 2**20
TARGETS = {"save": 0.6, "load from the disk": 0.6, "load from the page cache": 0.6, "steps during a save": 1.1}


class Run:
    """A model in training, and its checkpoints."""

    def __init__(self, preset: str, micro_batch: int, context: int) -> None:
        config = PRESETS[preset].gpt
        torch.manual_seed(0)
        self.engine = wrap(GPT(config), lr=1e-4, param_dtype="bfloat16")
        self.checkpoints = self.engine.optimizer.checkpoints
        self.tokens = torch.randint(config.vocabulary, (micro_batch, context + 1))

    def step(self) -> None:
        self.engine.backward(self.engine(self.tokens[:, :-1], self.tokens[:, 1:]))
        self.engine.step()

    def save(self, folder: Path, *, wait: bool = True) -> Path:
        return self.engine.save_checkpoint(folder, keep=1, wait=wait)

    def load(self, path: Path) -> None:
        self.engine.load_checkpoint(path)


def write(path: Path, n_bytes: int, chunk: np.ndarray) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        while n_bytes:
            n_bytes -= os.write(file, memoryview(chunk)[:n_bytes])
        os.fsync(file)
    finally:
        os.close(file)


def read(path: Path, chunk: np.ndarray) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        while os.readv(file, [chunk]):
            pass
    finally:
        os.close(file)


def drop(*paths: Path) -> None:
    """From the page cache, what is on the disk already."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def seconds(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def transfers(run: Run, folder: Path, rounds: int) -> tuple[int, dict[str, list[float]]]:
    """Seconds of each way, a round each; and the bytes of a checkpoint."""
    chunk = np.random.default_rng(0).integers(0, 256, CHUNK, np.uint8)
    saved, plain = folder / "saved", folder / "plain"
    first = run.save(saved)
    n_bytes = Checkpoint(first).n_bytes
    files = [first]

    def save() -> None:
        files[:] = [run.save(saved)]

    def shards() -> list[Path]:
        return [*files[0].glob("*.safetensors")]

    acts: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "save": (lambda: shutil.rmtree(saved, ignore_errors=True), save),  # as the plain file goes, out of the time
        "sequential write": (lambda: plain.unlink(missing_ok=True), lambda: write(plain, n_bytes, chunk)),
        "load from the disk": (lambda: drop(*shards()), lambda: run.load(files[0])),
        "sequential read from the disk": (lambda: drop(plain), lambda: read(plain, chunk)),
        "load from the page cache": (lambda: [read(path, chunk) for path in shards()], lambda: run.load(files[0])),
        "sequential read from the page cache": (lambda: read(plain, chunk), lambda: read(plain, chunk)),
    }
    write(plain, n_bytes, chunk)
    times: dict[str, list[float]] = {name: [] for name in acts}
    order = random.Random(0)
    for _ in range(rounds):
        writing, reading = order.sample(["save", "sequential write"], 2), order.sample([*acts][2:], 4)
        for name in [*writing, *reading]:
            before, act = acts[name]
            before()
            os.sync()
            times[name].append(seconds(act))
    return n_bytes, times


def steps_during(run: Run, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds a step takes while a checkpoint is written, all that are touched by it, and while none is."""
    times: dict[str, list[float]] = {"steps during a save": [], "steps": [], "steps touched": [], "call": []}
    for _ in range(2):
        run.step()
    for i in range(2 * rounds):
        if i % 2 == 0:
            start, n = time.perf_counter(), 0
            run.save(folder, wait=False)
            times["call"].append(time.perf_counter() - start)
            while n == 0 or run.checkpoints.saving:
                run.step()
                n += 1
            times["steps during a save"].append((time.perf_counter() - start) / n)
            times["steps touched"].append(float(n))
            run.checkpoints.wait()
            os.sync()
        else:
            n = max(int(times["steps touched"][-1]), 2)
            times["steps"] += [seconds(lambda: [run.step() for _ in range(n)]) / n]  # noqa: B023
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="gpt2-124m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-rounds", type=int, default=3)
    parser.add_argument("--micro-batch", type=int, help="sequences a step; the preset's unless given")
    parser.add_argument("--context", type=int, help="tokens of a sequence; the preset's unless given")
    parser.add_argument("--folder", type=Path, help="where checkpoints go; a temporary folder unless given")
    parser.add_argument("--json", type=Path, help="append the record to this file")
    args = parser.parse_args()
    context = args.context or PRESETS[args.preset].context
    micro_batch = args.micro_batch or PRESETS[args.preset].micro_batch
    torch.set_num_threads(available_cpus())
    run = Run(args.preset, micro_batch, context)
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        n_bytes, times = transfers(run, folder, args.rounds)
        shutil.rmtree(folder / "saved")
        times |= steps_during(run, folder / "steps", args.step_rounds)
    finally:
        shutil.rmtree(folder)
    medians = {name: statistics.median(values) for name, values in times.items() if values}
    ratios = {
        "save": medians["sequential write"] / medians["save"],
        "load from the disk": medians["sequential read from the disk"] / medians["load from the disk"],
        "load from the page cache": medians["sequential read from the page cache"]
        / medians["load from the page cache"],
    }
    if args.step_rounds:
        ratios["steps during a save"] = medians["steps during a save"] / medians["steps"]
    print(f"{machine()}; {args.preset}, {n_bytes:,} bytes, {args.rounds} rounds; {micro_batch} x {context} tokens")
    for name in ("save", "sequential write", *list(times)[2:6]):
        print(f"{name:36} {medians[name]:7.2f} s {n_bytes / medians[name] / 1e6:8.0f} MB/s")
    if args.step_rounds:
        print(f"{'a step':36} {medians['steps']:7.2f} s")
        print(f"{'a step during a save':36} {medians['steps during a save']:7.2f} s, of {medians['steps touched']:.0f}")
        print(f"{'the call that starts a save':36} {medians['call']:7.2f} s")
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.3f} (target {TARGETS[name]})")
    record = {
        "bench": "checkpoint", "torch": torch.__version__, "threads": available_cpus(), "preset": args.preset,
        "micro_batch": micro_batch, "context": context, "bytes": n_bytes, "seconds": times, "ratios": ratios,
    }  # fmt: skip
    append(args.json, record)


if __name__ == "__main__":
    main()
