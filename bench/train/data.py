"""Real text that every machine has: the Python standard library's own source, as bytes."""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# `encodings` is generated tables and `config-*` is build output: neither reads like the rest.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings"}
HELD_OUT_ONE_IN = 16


@dataclass(frozen=True)
class Corpus:
    """Training and held-out bytes, cut between files; `training` and `held_out` are uint8 arrays."""

    training: np.ndarray
    held_out: np.ndarray
    training_files: int
    held_out_files: int


def is_held_out(relative_path: str) -> bool:
    """A file's side depends on its name alone, so that adding files never moves another across."""
    digest = hashlib.sha256(relative_path.encode()).digest()
    return int.from_bytes(digest[:8], "little") % HELD_OUT_ONE_IN == 0


def load_corpus(root: Path | None = None) -> Corpus:
    """Read every *.py below `root` (the standard library by default), in sorted order."""
    root = Path(root or sysconfig.get_path("stdlib"))
    sides: dict[bool, list[bytes]] = {False: [], True: []}
    for path in sorted(root.rglob("*.py")):
        folders = path.relative_to(root).parts[:-1]
        if SKIPPED_FOLDERS.intersection(folders) or any(name.startswith("config-") for name in folders):
            continue
        if not path.is_file():  # distributions leave dangling links here
            continue
        relative = path.relative_to(root).as_posix()
        sides[is_held_out(relative)].append(path.read_bytes())
    if not sides[False] or not sides[True]:
        raise FileNotFoundError(f"{root} holds too few *.py files to train on; is the standard library zipped?")

    def joined(files: list[bytes]) -> np.ndarray:
        return np.frombuffer(b"\0".join(files), dtype=np.uint8)

    return Corpus(joined(sides[False]), joined(sides[True]), len(sides[False]), len(sides[True]))


def training_batch(text: np.ndarray, seed: int, index: int, batch: int, context: int) -> np.ndarray:
    """Random windows, int32 of shape (batch, context + 1); a function of (seed, index) alone."""
    generator = np.random.default_rng((seed, index))
    starts = generator.integers(0, len(text) - context, size=batch)
    return windows(text, starts, context)


def held_out_batches(text: np.ndarray, count: int, batch: int, context: int) -> list[np.ndarray]:
    """Windows spread evenly over the held-out text: the same ones whatever the seed."""
    starts = np.linspace(0, len(text) - context - 1, num=count * batch).astype(np.int64)
    return [windows(text, chunk, context) for chunk in starts.reshape(count, batch)]


def windows(text: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    """The `context + 1` bytes from each start on: inputs are all but the last, targets all but the first."""
    return text[starts[:, None] + np.arange(context + 1)].astype(np.int32)
