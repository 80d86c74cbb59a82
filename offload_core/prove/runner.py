"""Starts the processes of a way, one for each rank, and compares the arrays that they leave with another way's."""

import hashlib
import importlib.util
import multiprocessing
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np

from ..checkpoint.reader import Checkpoint
from . import worker
from .ways import STEPS, Run, Task, Way
from .worker import LEFT_OUT, LeftOut, Place

MODULES = {"torch": "frontends.torch.prove", "jax": "frontends.jax.prove"}
"""By front end, the module with its programs."""
LONGEST = 240.0
"""Seconds that a part of a way has."""
GRACE = 5.0
"""Seconds that the other ranks have after one has failed."""
Arrays = Mapping[str, np.ndarray]


@dataclass
class Result:
    """How a way has ended."""

    way: Way
    seconds: float = 0.0
    arrays: Arrays = field(default_factory=dict)
    """Weights, as the model runs with them, and states, by kind and name."""
    left_out: str = ""
    """Why it did not run, if it cannot here."""
    failed: str = ""
    """What its processes said last, if one failed."""

    @property
    def digest(self) -> str:
        """SHA-256 of all arrays, with their names and shapes."""
        total = hashlib.sha256()
        for name, array in sorted(self.arrays.items()):
            total.update(f"{name} {array.shape} {array.dtype}".encode())
            total.update(np.ascontiguousarray(array).tobytes())
        return total.hexdigest()

    def differences(self, other: "Result") -> Iterator[str]:
        """What differs, one array after the other."""
        for name in sorted(self.arrays.keys() ^ other.arrays.keys()):
            yield f"only one of both has {name}"
        for name in sorted(self.arrays.keys() & other.arrays.keys()):
            mine, theirs = self.arrays[name].reshape(-1), other.arrays[name].reshape(-1)
            if mine.size != theirs.size:
                yield f"{name}: {mine.size} elements, expected {theirs.size}"
            elif (n := int((bits := mine.view(np.uint32) != theirs.view(np.uint32)).sum())) > 0:
                at = int(np.argmax(bits))
                yield f"{name}: {n} of {mine.size} elements, the first [{at}] {mine[at]!s}, expected {theirs[at]!s}"


def installed() -> dict[str, bool]:
    """The front ends, and whether their frameworks are installed."""
    return {name: importlib.util.find_spec(name) is not None for name in MODULES}


class Runner:
    """Runs ways in forks of one process that has imported the front ends.

    Args:
        folder: for what the ways write; each part deletes its own when its way has ended.
        device: as ``torch.device`` takes it.
        frontends: those that are installed.
    """

    def __init__(self, folder: Path, device: str, frontends: Sequence[str]) -> None:
        self._folder = folder
        self._device = device
        self._frontends = frontends
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([MODULES[name] for name in frontends])

    def run(self, task: Task, way: Way) -> Result:
        """Run all parts of a way.

        Raises:
            OSError: the folder cannot be written.
        """
        result, begin = Result(way), time.monotonic()
        folder = self._folder / "way"
        shared = self._folder / task.name.replace(" ", "-").replace(":", "").replace("?", "")
        shared.mkdir(exist_ok=True)
        try:
            before = None
            for i, part in enumerate(way.runs):
                if part.frontend not in self._frontends:
                    raise LeftOut(f"needs {part.frontend}, which is not installed")
                (here := folder / str(i)).mkdir(parents=True)
                first, last = (STEPS * n // len(way.runs) for n in (i, i + 1))
                self._run(task, part, here, before, shared, first, last)
                before = here
            result.arrays = arrays_of(here)
        except LeftOut as why:
            result.left_out = str(why)
        except _Failed as error:
            result.failed = str(error)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        result.seconds = time.monotonic() - begin
        return result

    def _run(
        self, task: Task, part: Run, folder: Path, before: Path | None, shared: Path, first: int, last: int
    ) -> None:
        """Run a part: a process for each rank."""
        places = [
            Place(
                part.program, {**task.settings, **part.settings}, first, last, task.micro_batches, rank, part.ranks,
                part.instruction_set, self._device, folder, before, shared,
            )
            for rank in range(part.ranks)
        ]  # fmt: skip
        module = MODULES[part.frontend]
        processes = [self._context.Process(target=worker.run, args=(module, place), daemon=True) for place in places]
        try:
            for process in processes:
                process.start()
            failed = _first_failed(processes)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        for place, process in zip(places, processes, strict=True):
            if process is failed or (failed is None and process.exitcode != 0):
                said = _said(place)
                if process.exitcode == LEFT_OUT:
                    raise LeftOut(said)
                how = _end_of(None if failed is None else failed.exitcode)
                raise _Failed(f"rank {place.rank} {how}{said or 'nothing was said'}")


class _Failed(Exception):
    """A process of a way has failed; the message has its last words."""


def _first_failed(processes: Sequence[BaseProcess]) -> BaseProcess | None:
    """Wait for all, but not longer than a part has. Return the first that failed."""
    deadline = time.monotonic() + LONGEST
    first: BaseProcess | None = None
    left = {process.sentinel: process for process in processes}
    while left:
        ended = wait(list(left), max(deadline - time.monotonic(), 0))
        if not ended:
            return first
        for sentinel in ended:
            process = left.pop(sentinel)  # type: ignore[arg-type]  # these are descriptors
            process.join()
            if process.exitcode and first is None:
                first = process
                deadline = min(deadline, time.monotonic() + GRACE)
    return first


def _end_of(status: int | None) -> str:
    if status is None:
        return f"had not ended after {LONGEST:.0f} s: "
    return f"was ended by signal {-status}: " if status < 0 else ""


def _said(place: Place) -> str:
    """The last line that a process said."""
    try:
        lines = place.said(place.rank).read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1].strip() if lines else ""


def arrays_of(folder: Path) -> Arrays:
    """What a program has given, and the states of the checkpoint that it has saved.

    All ranks give the same arrays. What another rank has otherwise than rank 0 is there beside it.
    """
    arrays, *others = map(_read, sorted(folder.glob("result-*.npz")))
    for rank, other in enumerate(others, 1):
        differ = [name for name, array in other.items() if array.tobytes() != arrays[name].tobytes()]
        arrays |= {f"{name} of rank {rank}": other[name] for name in differ}
    if (saved := folder / "checkpoints").exists():
        checkpoint = Checkpoint(saved)
        for name, kind in checkpoint.states():
            arrays[f"{kind}/{name}"] = checkpoint.array(name, kind).astype(np.float32)
    return arrays


def _read(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return {name: file[name] for name in file.files}
