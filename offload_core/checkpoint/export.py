"""Consolidated weights as Hugging Face's libraries read them: one safetensors file, or several and an index."""

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError, ParameterError
from ..ranks.collectives import Collectives
from ..ranks.consistency import together
from ..support import checks
from ..support.disks import names_to_disk, to_disk
from ..support.progress import progress
from .safetensors import plan_file
from .weight_files import INDEX

MAX_SHARD_BYTES = 5 * 10**9
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?(\.tmp)?")
_METADATA = {"format": "pt"}  # transformers refuses a file without it


@dataclass(frozen=True)
class Weight:
    """A tensor to be written."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    read: Callable[[bool], np.ndarray | None]
    """``read(wanted)`` returns the bytes in C order, as an array of any type. All ranks call it; those that pass False
    may get None."""

    @property
    def n_bytes(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))


def export_weights(
    folder: str | os.PathLike[str],
    weights: Sequence[Weight],
    *,
    max_shard_bytes: int,
    collectives: Collectives,
) -> None:
    """Write ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` and so on with their index.

    Rank 0 writes, a tensor at a time, to names that end in ``.tmp``, and moves whole files into place, the index last;
    then it removes the files of earlier exports. At any moment the folder has the old weights or the new ones; if files
    of both have the same names, there is an instant in which neither can be loaded.

    Args:
        max_shard_bytes: the most bytes of tensors in a file; a larger tensor gets its own file.
        collectives: those that come after the pipeline's own exchanges (``Pipeline.collectives``).

    Raises:
        ConfigError, ParameterError: an argument or a name is invalid; nothing was written.
        CheckpointError: on all ranks, if a file could not be written; no partial file is left.
    """
    checks.integer("max_shard_bytes", max_shard_bytes)
    _check_names(weight.name for weight in weights)
    rank = collectives.rank
    writer = _FileWriter(Path(folder)) if rank == 0 else None

    def failed(others: str) -> CheckpointError:
        return CheckpointError(f"{folder}: rank {others} could not write there; its own error says why")

    def on_rank_0(act: Callable[..., None], *args: Any) -> None:
        """Act on rank 0, and raise on all ranks if that failed."""
        with together(collectives, "export", failed):
            if writer is not None:
                try:
                    act(writer, *args)
                except OSError as error:
                    raise CheckpointError(
                        f"{writer.path}: cannot be written ({error.strerror or error}); expected room and leave to "
                        "write there: nothing of this export was left behind; free space, or give another folder"
                    ) from error

    shards = _shards(weights, max_shard_bytes)
    n_bytes = sum(weight.n_bytes for weight in weights)
    try:
        on_rank_0(_FileWriter.start)
        with progress(f"exporting {Path(folder).name}", n_bytes, rank=rank) as advance:
            for name, shard in shards.items():
                header, _, _ = plan_file({w.name: (w.dtype, w.shape) for w in shard}, _METADATA)
                on_rank_0(_FileWriter.begin, name, header)
                for weight in shard:
                    on_rank_0(_FileWriter.write, weight.read(rank == 0))
                    advance(weight.n_bytes)
        if len(shards) > 1:
            on_rank_0(_FileWriter.begin, INDEX, _index(shards))
        on_rank_0(_FileWriter.commit)
    except BaseException:
        if writer is not None:
            writer.abandon()
        raise


def _check_names(names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen or name in ("", "__metadata__"):
            what = "two tensors have this name" if name in seen else "no tensor may have this name"
            raise ParameterError(f"export: {name!r}: {what} in a file; expected a name of its own for each: rename one")
        seen.add(name)


def _shards(weights: Sequence[Weight], max_bytes: int) -> dict[str, list[Weight]]:
    """The tensors of each file, in the order in which they are written: readers expect them aligned."""
    shards: list[list[Weight]] = [[]]
    taken = 0
    for weight in weights:
        if shards[-1] and taken + weight.n_bytes > max_bytes:
            shards.append([])
            taken = 0
        shards[-1].append(weight)
        taken += weight.n_bytes
    n = len(shards)
    names = ["model.safetensors"] if n == 1 else [f"model-{i:05}-of-{n:05}.safetensors" for i in range(1, n + 1)]
    return {
        name: sorted(shard, key=lambda weight: -weight.dtype.itemsize)
        for name, shard in zip(names, shards, strict=True)
    }


def _index(shards: dict[str, list[Weight]]) -> bytes:
    weight_map = {weight.name: name for name, shard in shards.items() for weight in shard}
    total = sum(weight.n_bytes for shard in shards.values() for weight in shard)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


class _FileWriter:
    """The files of one export: written under other names, and renamed together at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: list[Path] = []
        self._names: list[str] = []
        self._file: FileIO | None = None
        self.path = folder
        """The file or folder that is being written, for errors."""

    def start(self) -> None:
        self._made = [folder for folder in (self._folder, *self._folder.parents) if not folder.exists()]
        self._folder.mkdir(parents=True, exist_ok=True)
        self._remove(lambda name: name.endswith(".tmp"))  # left by an export that was killed

    def begin(self, name: str, header: bytes) -> None:
        """End the file before, and begin this one with ``header``."""
        self._end()
        self.path = self._folder / name
        self._names.append(name)
        self._file = FileIO(_temporary(self.path), "w")
        self.write(np.frombuffer(header, np.uint8))

    def write(self, values: np.ndarray | None) -> None:
        assert self._file is not None
        assert values is not None
        rest = values.reshape(-1).view(np.uint8).data
        while rest.nbytes:
            rest = rest[self._file.write(rest) :]

    def _end(self) -> None:
        if self._file is not None:
            to_disk(self._file.fileno())
            self._file.close()
            self._file = None

    def commit(self) -> None:
        self._end()
        if any((self._folder / name).exists() for name in self._names if name != INDEX) and INDEX in self._names:
            (self._folder / INDEX).unlink(missing_ok=True)  # an index must not list old and new files
        for name in self._names:
            self.path = self._folder / name
            if name == INDEX:
                names_to_disk(self._folder)
            os.replace(_temporary(self.path), self.path)
        names_to_disk(self._folder)
        self._remove(lambda name: name not in self._names)
        names_to_disk(self._folder)

    def _remove(self, which: Callable[[str], bool]) -> None:
        for path in self._folder.iterdir():
            if _OURS.fullmatch(path.name) and which(path.name):
                path.unlink()

    def abandon(self) -> None:
        with suppress(OSError):
            if self._file is not None:
                self._file.close()
        for name in self._names:
            with suppress(OSError):
                _temporary(self._folder / name).unlink(missing_ok=True)
        for folder in self._made:
            with suppress(OSError):
                folder.rmdir()


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")
