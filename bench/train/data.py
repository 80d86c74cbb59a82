"""Text to train on, as bytes: a user's file or folder, or the source of Python's standard library."""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from offload_core.errors import OffloadError

# `encodings` is generated tables and `config-*` is build output: neither reads like the rest.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings"}
SUFFIXES = {".py", ".txt", ".md"}
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


def load_corpus(text: Path | None = None) -> Corpus:
    """The text of a file, whose last sixteenth is held out, or of a folder's files with one of :data:`SUFFIXES`, in
    sorted order; by default of the standard library.

    Raises:
        OffloadError: there is no such file or folder, or it holds too little.
    """
    root = text or Path(sysconfig.get_path("stdlib"))
    if root.is_file():
        data = np.frombuffer(root.read_bytes(), dtype=np.uint8)
        cut = len(data) - len(data) // HELD_OUT_ONE_IN
        return Corpus(data[:cut], data[cut:], 1, 1)
    if not root.is_dir():
        raise OffloadError(f"--text {root}: there is no such file or folder")
    sides: dict[bool, list[bytes]] = {False: [], True: []}
    for path in sorted(root.rglob("*")):
        if path.suffix not in (SUFFIXES if text else {".py"}) or not path.is_file():  # some links lead nowhere
            continue
        folders = path.relative_to(root).parts[:-1]
        if SKIPPED_FOLDERS.intersection(folders) or any(name.startswith("config-") for name in folders):
            continue
        relative = path.relative_to(root).as_posix()
        sides[is_held_out(relative)].append(path.read_bytes())
    if not sides[False] or not sides[True]:
        found = len(sides[False]) + len(sides[True])
        raise OffloadError(
            f"{root} holds {found} files of text ({', '.join(sorted(SUFFIXES))}), of which about one in "
            f"{HELD_OUT_ONE_IN} is held out; expected more files, or name one file with --text"
        )

    def joined(files: list[bytes]) -> np.ndarray:
        return np.frombuffer(b"\0".join(files), dtype=np.uint8)

    return Corpus(joined(sides[False]), joined(sides[True]), len(sides[False]), len(sides[True]))


def training_batch(text: np.ndarray, seed: int, index: int, batch: int, context: int) -> np.ndarray:
    """Random windows, int32 of shape (batch, context + 1); a function of (seed, index) alone."""
    generator = np.random.default_rng((seed, index))
    starts = generator.integers(0, len(text) - context, size=batch)
    return windows(text, starts, context)


def held_out_batches(text: np.ndarray, count: int, batch: int, context: int) -> list[np.ndarray]:
    """Return windows spread evenly over the held-out text, the same for every seed."""
    starts = np.linspace(0, len(text) - context - 1, num=count * batch).astype(np.int64)
    return [windows(text, chunk, context) for chunk in starts.reshape(count, batch)]


def windows(text: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    """The `context + 1` bytes from each start on: inputs are all but the last, targets all but the first."""
    return text[starts[:, None] + np.arange(context + 1)].astype(np.int32)
