"""Reads a checkpoint. Each block that is read is checked against its checksum in the manifest."""

import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash

from ..config.state_formats import FORMATS
from ..errors import CheckpointError
from ..layout.regions import Region, common
from ..rules import MASTER, STATE_NAMES
from ..support.checkpoint_folder import CHECKPOINT_NAME, MANIFEST, find
from ..support.checks import is_in, shown
from ..support.disks import begin_reading
from ..support.files import open_regular
from ..support.processors import default_threads
from ..support.threads import do_in_threads
from .manifest import Tensor, read_manifest, tensors_of
from .safetensors import NOT_AS_WRITTEN, checked_integer, checked_shape
from .values import ArrayType, decode

_READERS = 4
_READ_AHEAD = 4
"""The number of blocks that the system is asked to read ahead."""
_MOST_ROWS = 2**20
"""Runs of elements to look up at a time. A tensor saved in another layout has many short runs."""
_MOST_IN_PLACE = 16
"""A block with at most so many runs is read directly into the arrays."""
_OTHER = {"shape": list, "dtype": str}
_PARAMETER = {"step": int, "group": int, "behind": bool}


@dataclass(frozen=True)
class Want:
    """A region of a parameter, and the array to read it into: as many elements, of any floating-point type."""

    name: str
    kind: str
    region: Region
    out: np.ndarray


class Readable(Protocol):
    """A checkpoint that states can be loaded from: one of ours, or another program's that a front end can read."""

    path: Path
    """Its folder."""
    content: dict[str, Any]
    """As in the manifest of ours."""

    def has(self, name: str, kind: str) -> bool:
        """True if it holds any part of this kind of a parameter."""
        ...

    def array(self, name: str, kind: str) -> np.ndarray:
        """A whole tensor, with its shape and element type."""
        ...

    def read(self, wants: Iterable[Want]) -> None:
        """Read regions into their arrays. Raises :class:`CheckpointError`."""
        ...

    def verify(self, besides: Collection[str] = ()) -> None:
        """Check all that is not of these kinds. Raises :class:`CheckpointError`."""
        ...


Opened = str | os.PathLike[str] | Callable[[], Readable]
"""The path of a checkpoint of ours, or a function that opens another."""


class Checkpoint:
    """A checkpoint with a valid manifest, and with all files present in full length.

    Raises:
        CheckpointError: the manifest or a file is damaged or missing, or the version is newer; it names the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = find(path)
        manifest = self.path / MANIFEST
        self.content = read_manifest(manifest)
        self._paths: list[Path] = []
        self._tensors: dict[tuple[str, str], list[Tensor]] = {}
        try:
            named = CHECKPOINT_NAME.fullmatch(self.path.name)
            if named and int(named[1]) != self.content["step"]:
                raise ValueError(f"it is of step {self.content['step']}")
            self.files: list[dict[str, Any]] = self.content["files"]
            for i, record in enumerate(self.files):
                self._paths.append(self.path / record["file"])
                for tensor in tensors_of(record, i):
                    self._tensors.setdefault((tensor.name, tensor.kind), []).append(tensor)
        except NOT_AS_WRITTEN as error:
            raise CheckpointError(f"{manifest}: not the manifest of this checkpoint ({error!r})") from None
        for path, record in zip(self._paths, self.files, strict=True):
            try:
                size = path.stat().st_size
            except OSError as error:
                raise CheckpointError(f"{path}: {error.strerror}; the checkpoint is incomplete, take another") from None
            if size != record["bytes"]:
                raise CheckpointError(
                    f"{path} has {size:,} bytes, expected {record['bytes']:,}: it was cut off or replaced; take "
                    "another checkpoint"
                )

    @property
    def n_bytes(self) -> int:
        """Bytes of all files that the manifest names."""
        return sum(record["bytes"] for record in self.files)

    def has(self, name: str, kind: str) -> bool:
        """True if it holds any part of this kind of a parameter."""
        return (name, kind) in self._tensors

    def states(self) -> Iterator[tuple[str, str]]:
        """Yield each parameter with the kinds of its states, ``"master"`` included."""
        return ((name, kind) for name, kind in self._tensors if kind not in ("value", "param"))

    def dtype(self, name: str, kind: str) -> np.dtype:
        """The element type of a tensor.

        Raises:
            CheckpointError: the checkpoint does not hold all of it.
        """
        tensors = self._tensors.get((name, kind), [])
        if not tensors or sum(tensor.region.numel for tensor in tensors) != math.prod(tensors[0].region.shape):
            raise CheckpointError(f"{self.path / MANIFEST}: {kind} {name!r} is not in it as a whole")
        return tensors[0].dtype

    def array(self, name: str, kind: str) -> np.ndarray:
        """A whole tensor, with its shape and element type.

        Raises:
            CheckpointError: the checkpoint does not hold all of it, or it is damaged.
        """
        dtype, shape = self.dtype(name, kind), self._tensors[name, kind][0].region.shape
        region = Region(shape, 0, math.prod(shape))
        try:
            out = np.empty(region.numel, dtype)
        except MemoryError:  # a file with holes may be larger than any memory
            raise CheckpointError(
                f"{self.path / MANIFEST}: {kind} {name!r} has {region.numel:,} elements, more than memory holds"
            ) from None
        self.read([Want(name, kind, region, out)])
        return out.reshape(shape)

    def read(self, wants: Iterable[Want]) -> None:
        """Read regions into their arrays, and check every block that is read.

        Raises:
            CheckpointError: a block is damaged, or a region was not saved.
        """
        pieces: _Pieces = {}
        n_rows = 0
        for want in wants:
            tensors = self._tensors.get((want.name, want.kind), [])
            if any(tensor.region.shape != want.region.shape for tensor in tensors):
                raise CheckpointError(f"{self.path}: {want.kind} of {want.name!r} is not of shape {want.region.shape}")
            rows = common([tensor.region for tensor in tensors], want.region)
            if not _covers(rows, want.region.numel):
                raise CheckpointError(
                    f"{self.path}: {want.kind} of {want.name!r} is not in it as a whole; the checkpoint is not one of "
                    "this model"
                )
            for first, end in _groups(rows[:, 0]):
                tensor = tensors[int(rows[first, 0])]
                for block, places in self._places(tensor, rows[first:end, 1:]):
                    pieces.setdefault((tensor.file, block), []).append((tensor.dtype, places, want.out))
            n_rows += len(rows)
            if n_rows > _MOST_ROWS:
                self._run(pieces)
                pieces, n_rows = {}, 0
        self._run(pieces)

    def verify(self, besides: Collection[str] = ()) -> None:
        """Read all blocks, and raise :class:`CheckpointError` if one is damaged.

        Args:
            besides: kinds that are checked elsewhere; blocks with a tensor of these kinds are not read.
        """
        for error in self.errors(besides):
            raise error

    def errors(self, besides: Collection[str] = ()) -> Iterator[CheckpointError]:
        """The errors that :meth:`verify` would raise, one for each damaged file."""
        others = {(i, block) for i, record in enumerate(self.files) for block in range(len(record["blocks"]))}
        for tensor in (tensor for tensors in self._tensors.values() for tensor in tensors):
            if tensor.kind in besides and tensor.region.numel:
                size, end = (
                    self.files[tensor.file]["block_bytes"],
                    tensor.offset + tensor.region.numel * tensor.dtype.itemsize,
                )
                others.difference_update(
                    (tensor.file, block) for block in range(tensor.offset // size, -(-end // size))
                )
        for i in range(len(self.files)):
            try:
                self._run({place: [] for place in others if place[0] == i})
            except CheckpointError as error:
                yield error

    def _places(self, tensor: Tensor, rows: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Cut runs of a tensor at the bounds of blocks.

        Args:
            rows: int64 ``(place in the tensor, place in the array, elements)``.

        Yields:
            For each block its number, and int64 rows ``(place in the block, place in the array, elements)``.
        """
        size = int(self.files[tensor.file]["block_bytes"]) // tensor.dtype.itemsize
        begins, to, ends = rows[:, 0] + tensor.offset // tensor.dtype.itemsize, rows[:, 1], rows[:, 2]
        ends = begins + ends
        firsts = begins // size
        counts = (ends - 1) // size - firsts + 1
        row = np.repeat(np.arange(len(rows)), counts)
        blocks = firsts[row] + np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        low, high = np.maximum(begins[row], blocks * size), np.minimum(ends[row], (blocks + 1) * size)
        places = np.stack([low - blocks * size, to[row] + low - begins[row], high - low], 1)
        order = np.argsort(blocks, kind="stable")
        blocks, places = blocks[order], places[order]
        for first, end in _groups(blocks):
            yield int(blocks[first]), places[first:end]

    def _run(self, pieces: "_Pieces") -> None:
        descriptors: dict[int, int] = {}
        blocks = sorted(pieces)
        longest = max((min(self.files[i]["block_bytes"], self.files[i]["bytes"]) for i, _ in blocks), default=0)

        def announce(places: Iterable[tuple[int, int]]) -> None:
            for i, block in places:
                size = self.files[i]["block_bytes"]
                begin_reading(descriptors[i], block * size, size)

        left = iter(range(len(blocks)))

        def each() -> None:
            buffer = np.empty(longest, np.uint8)
            for n in left:  # the threads share one iterator, so that the disk is read in sequence
                announce(blocks[n + _READ_AHEAD : n + _READ_AHEAD + 1])
                i, block = blocks[n]
                self._read_block(i, block, descriptors[i], buffer, pieces[i, block])

        try:
            for i in sorted({i for i, _ in blocks}):
                descriptors[i] = self._open(self._paths[i])
            announce(blocks[:_READ_AHEAD])
            n = max(min(_READERS, default_threads(), len(blocks)), 1)
            do_in_threads([each] * n)
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)

    def _open(self, path: Path) -> int:
        try:
            return open_regular(path)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}; take another checkpoint") from None

    def _read_block(self, i: int, block: int, descriptor: int, buffer: np.ndarray, pieces: "list[_Piece]") -> None:
        """Read and check a block, and fill the arrays with its pieces: directly where types and layout allow it."""
        record, path = self.files[i], self._paths[i]
        size = int(record["block_bytes"])
        at, data = block * size, buffer[: min(size, int(record["bytes"]) - block * size)]
        targets = _in_place(pieces, data)
        hashed = xxhash.xxh3_128()
        done = 0
        try:
            for target in targets or [data]:
                part = 0
                while part < target.size and (n := os.preadv(descriptor, [target[part:].data], at + done + part)):
                    part += n
                hashed.update(target.data)
                done += part
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}; take another checkpoint") from None
        if done < data.size or hashed.hexdigest() != record["blocks"][block]:
            raise CheckpointError(
                f"{path}: bytes {at:,} to {at + data.size:,} are not those that were written; take another checkpoint"
            )
        if targets is None:
            with np.errstate(all="ignore"):
                for dtype, places, out in pieces:
                    _scatter(data[: data.size // dtype.itemsize * dtype.itemsize].view(dtype), places, out)


_Piece = tuple[np.dtype, np.ndarray, np.ndarray]
"""The element type in the file; rows ``(place in the block, place in the array, elements)``, with places in elements;
the array."""
_Pieces = dict[tuple[int, int], list[_Piece]]
"""Pieces by ``(file, block)``."""


def _covers(rows: np.ndarray, numel: int) -> bool:
    """True if these rows of :func:`common` fill the target's ``numel`` elements, each once."""
    rows = rows[np.argsort(rows[:, 2])]
    ends = np.cumsum(rows[:, 3])
    return bool((rows[:, 2] == ends - rows[:, 3]).all()) and (int(ends[-1]) if len(ends) else 0) == numel


def _groups(sorted_values: np.ndarray) -> Iterator[tuple[int, int]]:
    """The ``(begin, end)`` of each run of equal values."""
    if not len(sorted_values):
        return
    bounds = np.flatnonzero(np.diff(sorted_values)) + 1
    yield from zip([0, *bounds.tolist()], [*bounds.tolist(), len(sorted_values)], strict=True)


def _in_place(pieces: "list[_Piece]", data: np.ndarray) -> list[np.ndarray] | None:
    """Memory to read a block into, run by run: the arrays for the pieces, ``data`` for the bytes between.

    None if the pieces must be converted, overlap or are too many.
    """
    if sum(len(places) for _, places, _ in pieces) > _MOST_IN_PLACE:
        return None
    found, end = [], 0
    runs = [
        (int(at) * dtype.itemsize, int(to), int(numel), dtype, out)
        for dtype, rows, out in pieces
        for at, to, numel in rows
    ]
    for at, to, numel, dtype, out in sorted(runs, key=lambda run: run[0]):
        if out.dtype != dtype or not out.flags.c_contiguous or at < end:
            return None
        found += [data[end:at], out[to : to + numel].view(np.uint8)]
        end = at + numel * dtype.itemsize
    return [*found, data[end:]]


def _scatter(data: np.ndarray, places: np.ndarray, out: np.ndarray) -> None:
    if len(places) <= _MOST_IN_PLACE:
        for at, to, numel in places.tolist():
            np.copyto(out[to : to + numel], data[at : at + numel], casting="unsafe")
        return
    at, to, numel = places.T
    within = np.arange(int(numel.sum())) - np.repeat(np.cumsum(numel) - numel, numel)
    out[np.repeat(to, numel) + within] = data[np.repeat(at, numel) + within].astype(out.dtype)


_FP32_STATES = dict.fromkeys((MASTER, "exp_avg", "exp_avg_sq"), "float32")
"""The formats of states in a checkpoint of the first version, which has Adam only and does not name them."""


def _state_formats(given: Any) -> dict[str, str]:
    if type(given) is not dict or MASTER not in given or not given.keys() <= set(STATE_NAMES):
        raise TypeError(f"state_formats is {shown(given)}")
    for state, name in given.items():
        if not is_in(name, FORMATS):
            raise ValueError(
                f"{state} was kept as {shown(name)}, and this offload-core knows {', '.join(FORMATS)}; a newer one may "
                "know it"
            )
    return given


class Loaded:
    """The content of a checkpoint besides its tensors.

    Args:
        rank: this process's rank; None: do not read the values of single processes.

    Raises:
        CheckpointError: the manifest is incomplete.
    """

    def __init__(self, checkpoint: Readable, rank: int | None, types: Sequence[ArrayType] = ()) -> None:
        self.checkpoint = checkpoint
        self.content = content = checkpoint.content
        self._types = types
        try:
            self.step: int = content["step"]
            self.state_formats = _state_formats(content.get("state_formats", _FP32_STATES))
            """The format in which each state was kept."""
            self.parameters: dict[str, dict[str, Any]] = content["parameters"]
            """Shape, dtype, step and group of each trained parameter, and ``behind``: True if it is stale."""
            self.others: dict[str, dict[str, Any]] = content["others"]
            self.left_out: dict[str, dict[str, Any]] = content.get("left_out", {})
            """The shape of each tensor that was frozen and not saved."""
            self.tied: dict[str, str] = content.get("tied", {})
            """Further names of tied tensors, each with the name under which the tensor is there."""
            self.buffers: list[str] = content.get("buffers", [])
            """The names of ``others`` that are no parameters. Empty, too, in a checkpoint of before they were noted."""
            known = {**self.parameters, **self.others, **self.left_out}
            if any(name not in known for name in self.tied.values()) or set(self.buffers) - self.others.keys():
                raise ValueError("a tied name or a buffer that is not there")
            for entry in (*self.parameters.values(), *self.others.values()):
                _check_types(entry, _OTHER)
            for entry in self.left_out.values():
                _check_types(entry, {"shape": list})
            for entry in self.parameters.values():
                _check_types(entry, _PARAMETER)
            _check_types(content, {"step": int, "own": list})
            self.state = self._decode(0, content["state"])
            own = content["own"]
            self.own = self._decode(rank, own[rank]) if rank is not None and rank < len(own) else None
            """The values that the process of this rank saved for itself; None if there was no such process."""
        except NOT_AS_WRITTEN as error:
            raise CheckpointError(f"{checkpoint.path / MANIFEST}: incomplete ({error!r})") from None

    def _decode(self, rank: int, value: Any) -> Any:
        return decode(value, _PlainArrays(self.checkpoint, rank), self._types)


class _PlainArrays(Sequence[np.ndarray]):
    """The arrays of a process's plain values."""

    def __init__(self, checkpoint: Readable, rank: int) -> None:
        self._checkpoint, self._rank = checkpoint, rank

    def __getitem__(self, i: Any) -> Any:
        return self._checkpoint.array(f"{self._rank}.{i}", "value")

    def __len__(self) -> int:
        raise NotImplementedError


def _check_types(entry: Any, types: Mapping[str, type]) -> None:
    """Raise one of ``NOT_AS_WRITTEN`` unless values have these types, and integers are counts."""
    for key, expected in types.items():
        if type(entry[key]) is not expected:
            raise TypeError(f"{key} is {shown(entry[key])}")
        if expected is int:
            checked_integer(entry[key])
    if "shape" in types:
        checked_shape(entry["shape"])
