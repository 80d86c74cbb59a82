"""Checkpoints beside the disk they go to: saving and loading against plain sequential input and output of as many bytes
(blocks of 8 MiB, as ``dd`` does it; written ones flushed with fsync), and what saving costs the steps during it.

All take turns in one process, in another order each round. Reading is measured from the page cache, and from the disk
after the files were dropped from it. Steps are real ones of the model, some while a checkpoint is written and some not:
the call that starts the save counts as part of them.
"""

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

from bench import record
from bench.harness.rounds import seconds
from bench.harness.working_dtype import working_dtype
from bench.train.gpt_torch import GPT
from bench.train.presets import PRESETS
from frontends.torch import wrap
from offload_core.checkpoint.reader import Checkpoint
from offload_core.support.processors import available_cpus

CHUNK = 8 * 2**20
WAYS = {
    "save": "sequential write",
    "load from the disk": "sequential read from the disk",
    "load from the page cache": "sequential read from the page cache",
}
"""The transfers, and the plain transfer with which each is compared."""
STEP, STEP_IN_SAVE = "a step", "a step during a save"


class Run:
    """A model in training, and its checkpoints."""

    def __init__(self, preset: str, micro_batch: int, context: int, param_dtype: str) -> None:
        config = PRESETS[preset].gpt
        torch.manual_seed(0)
        self.engine = wrap(GPT(config), lr=1e-4, param_dtype=param_dtype)
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
    """Drop the files' pages that are on the disk already from the page cache."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def transfers(run: Run, folder: Path, rounds: int) -> tuple[int, dict[str, list[float]]]:
    """Return the bytes of a checkpoint, and for each transfer its seconds in each round."""
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
    """Return the seconds of the steps that a save touches, and in turn of as many steps without a save."""
    times: dict[str, list[float]] = {STEP: [], STEP_IN_SAVE: [], "touched": [], "call": []}
    for _ in range(2):
        run.step()
    for _ in range(rounds):
        start, n = time.perf_counter(), 0
        run.save(folder, wait=False)
        times["call"].append(time.perf_counter() - start)
        while n == 0 or run.checkpoints.saving:
            run.step()
            n += 1
        times[STEP_IN_SAVE].append((time.perf_counter() - start) / n)
        times["touched"].append(n)
        run.checkpoints.wait()
        os.sync()
        start = time.perf_counter()
        for _ in range(max(n, 2)):
            run.step()
        times[STEP].append((time.perf_counter() - start) / max(n, 2))
    return times


def main(arguments: list[str] | None = None) -> None:
    parser = record.parser("checkpoint", __doc__.partition("\n\n")[0])
    parser.add_argument("--preset", choices=PRESETS, help="default: gpt2-124m; --quick: tiny")
    parser.add_argument("--rounds", type=int, help="of saving and loading (default: 5)")
    parser.add_argument("--step-rounds", type=int, help="of steps with a save behind them and without (default: 3)")
    parser.add_argument("--micro-batch", type=int, help="sequences a step (default: the preset's)")
    parser.add_argument("--context", type=int, help="tokens of a sequence (default: the preset's)")
    parser.add_argument("--folder", type=Path, help="where checkpoints go (default: a temporary folder)")
    args = parser.parse_args(arguments)
    name = args.preset or ("tiny" if args.quick else "gpt2-124m")
    preset = PRESETS[name]
    rounds, step_rounds = args.rounds or (2 if args.quick else 5), args.step_rounds or (2 if args.quick else 3)
    context, micro_batch = args.context or preset.context, args.micro_batch or preset.micro_batch
    torch.set_num_threads(available_cpus())
    dtype = working_dtype(available_cpus())
    run = Run(name, micro_batch, context, dtype.name)
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        n_bytes, times = transfers(run, folder, rounds)
        shutil.rmtree(folder / "saved")
        steps = steps_during(run, folder / "steps", step_rounds)
    finally:
        shutil.rmtree(folder)
    rows = record.rows("speed", "MB/s", {way: [n_bytes / s / 1e6 for s in taken] for way, taken in times.items()})
    rows += record.rows("a step", "s", {STEP: steps[STEP], STEP_IN_SAVE: steps[STEP_IN_SAVE]})
    rows += record.rows("the call that starts it", "s", {STEP_IN_SAVE: steps["call"]})
    ratios = [
        record.ratio(f"speed: {ours} / {plain}", times[plain], times[ours], target=0.6, better="higher")
        for ours, plain in WAYS.items()
    ]
    ratios.append(record.ratio(f"{STEP_IN_SAVE} / {STEP}", steps[STEP_IN_SAVE], steps[STEP], target=1.1))
    print(f"{record.machine()}; {name}, {n_bytes:,} bytes, {rounds} rounds; {micro_batch} x {context} tokens")
    for each in rows:
        print(f"{each['name']:36} {each['metric']:24} {each['p50']:8.2f} {each['unit']}")
    for each in ratios:
        print(f"{each['name']}: {each['p50']:.3f} ({each['p20']:.3f} to {each['p80']:.3f}; target {each['target']})")
    config = {
        "preset": name, "param_dtype": dtype.name,
        "bytes": n_bytes, "rounds": rounds, "step rounds": step_rounds, "micro batch": micro_batch,
        "context": context, "threads": available_cpus(), "steps touched": statistics.median(steps["touched"]),
    }  # fmt: skip
    record.append(
        args.json,
        {
            "bench": "checkpoint",
            "title": "Checkpoints beside the disk they go to",
            "config": config,
            "versions": record.versions("torch"),
            "rows": rows,
            "ratios": ratios,
            "missing": [],
            "notes": dtype.notes,
        },
    )


if __name__ == "__main__":
    main()
