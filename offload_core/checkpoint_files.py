"""A checkpoint on disk: a folder with a manifest and the files it names, checked block by block as they are read.

``manifest.json`` is ``{"format", "version", "checksum", "content"}``; the checksum is that of the content's text. The
content names each file, its size, the checksums of its blocks, and what its tensors hold of which parameter. Nothing in
it is run, and no name in it leads out of the folder.

A checkpoint is written in a folder whose name begins with a dot, and renamed when it is complete. ``latest`` names the
last one.
"""

import json
import os
import re
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .cpus import default_threads
from .errors import CheckpointError
from .regions import Region, common
from .safetensors_files import NAME_OF, NUMPY_OF
from .shard_writer import ShardWriter, checksum

FORMAT = "offload-core checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
LATEST = "latest"
UNFINISHED = ".saving"
_DISCARDED = ".discarded"
_CHECKPOINT = re.compile(r"step-(\d{8,})(\.\d+)?")
_READERS = 4


class Tensor(NamedTuple):
    """What a file holds at some place."""

    name: str
    kind: str
    region: Region
    dtype: np.dtype
    file: int
    """Its index in the manifest."""
    offset: int
    """In bytes, from the file's start."""

    def to_json(self) -> dict[str, Any]:
        region = self.region
        entry = {"name": self.name, "kind": self.kind, "dtype": NAME_OF[self.dtype], "offset": self.offset}
        entry |= {"shape": region.shape, "start": region.start, "numel": region.numel}
        return entry | {k: v for k, v in (("order", region.order), ("box", region.box)) if v is not None}

    @classmethod
    def of_json(cls, entry: dict[str, Any], file: int) -> "Tensor":
        """Raises ValueError, KeyError or TypeError where it is no such thing."""
        order, box = entry.get("order"), entry.get("box")
        region = Region(
            tuple(map(int, entry["shape"])),
            int(entry["start"]),
            int(entry["numel"]),
            None if order is None else tuple(map(int, order)),
            None if box is None else tuple((int(low), int(high)) for low, high in box),
        )
        region.check()
        return cls(entry["name"], entry["kind"], region, NUMPY_OF[entry["dtype"]], file, int(entry["offset"]))


def file_record(writer: ShardWriter) -> dict[str, Any]:
    """A file that is being written, as the manifest will have it but for its checksums."""
    tensors = [
        Tensor(source.name, source.kind, source.region, source.dtype, 0, writer.offset(i)).to_json()
        for i, source in enumerate(writer.sources)
    ]
    return {
        "file": writer.path.name,
        "bytes": writer.n_bytes,
        "block_bytes": writer.block_bytes,
        "tensors": tensors,
    }


# --- writing ---------------------------------------------------------------------------------------------


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Write the manifest and see to it that it is on the disk, and the folder's entries too."""
    text = _canonical(content)
    head = {"format": FORMAT, "version": VERSION, "checksum": checksum(text.encode())}
    durable(folder / MANIFEST, f'{json.dumps(head)[:-1]}, "content": {text}}}\n')
    _sync(folder)


def durable(path: Path, text: str) -> None:
    """Write a small file whole: whoever sees it under its name sees all of it."""
    aside = path.with_name(f".{path.name}.new")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def commit(unfinished: Path, name: str) -> Path:
    """Make a complete checkpoint known, under this name, and as the latest."""
    folder = unfinished.parent
    unfinished.rename(folder / name)
    _sync(folder)
    durable(folder / LATEST, f"{name}\n")
    _sync(folder)
    return folder / name


def free_name(folder: Path, step: int) -> str:
    """A name for a checkpoint of that step; another one may have been there before."""
    name, n = f"step-{step:08d}", 0
    while (folder / (chosen := f"{name}.{n}" if n else name)).exists():
        n += 1
    return chosen


def rotate(folder: Path, keep: int) -> None:
    """Delete all but the last ``keep`` checkpoints, as they were written one after the other."""
    found = sorted(_committed(folder), key=lambda path: ((path / MANIFEST).stat().st_mtime_ns, path.name))
    for path in found[: max(len(found) - keep, 0)]:
        discard(path)


def discard(path: Path) -> None:
    """Delete a checkpoint; one that is deleted in part is not taken for one."""
    if not path.name.startswith("."):
        path = path.rename(path.with_name(f".{path.name}{_DISCARDED}"))
    shutil.rmtree(path, ignore_errors=True)


def clean(folder: Path) -> None:
    """Delete what killed processes have left."""
    for path in folder.iterdir():
        if path.name.startswith(".") and path.name.endswith((UNFINISHED, _DISCARDED)):
            discard(path)


def _committed(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if _CHECKPOINT.fullmatch(path.name) and (path / MANIFEST).exists()]


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _canonical(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"), allow_nan=False)  # in its order


# --- reading ---------------------------------------------------------------------------------------------


def find(path: str | os.PathLike[str]) -> Path:
    """The checkpoint that is meant: this folder, or the latest in it.

    Raises:
        CheckpointError: there is none.
    """
    folder = Path(path)
    if (folder / MANIFEST).exists():
        return folder
    try:
        named = (folder / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        there = sorted(p.name for p in _committed(folder)) if folder.is_dir() else []
        raise CheckpointError(
            f"{folder}: no checkpoint: neither {MANIFEST} nor {LATEST} can be read there ({error})"
            + (f"; expected one of its folders instead: {', '.join(there[-5:])}" if there else "")
        ) from None
    if not _CHECKPOINT.fullmatch(named) or not (folder / named / MANIFEST).exists():
        there = sorted(p.name for p in _committed(folder))
        raise CheckpointError(
            f"{folder / LATEST} names {named[:80]!r}, which is no whole checkpoint there; expected one of those that "
            f"are: {', '.join(there[-5:]) or 'none'}"
        )
    return folder / named


@dataclass(frozen=True)
class Want:
    """A region of a parameter that is to be read into an array of as many elements, of any floating-point type."""

    name: str
    kind: str
    region: Region
    out: np.ndarray


class Checkpoint:
    """A checkpoint whose manifest is in order, and whose files are there in their full length.

    Raises:
        CheckpointError: it is not, or of a version that is not known here; the file is named.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = find(path)
        self.content = _read_manifest(self.path / MANIFEST)
        manifest = self.path / MANIFEST
        self._paths: list[Path] = []
        self._tensors: dict[tuple[str, str], list[Tensor]] = {}
        try:
            self.files: list[dict[str, Any]] = self.content["files"]
            for i, record in enumerate(self.files):
                name, size, block_bytes = record["file"], int(record["bytes"]), int(record["block_bytes"])
                if Path(name).name != name or block_bytes < 1 or len(record["blocks"]) != -(-size // block_bytes):
                    raise ValueError(f"the record of {name!r}")
                self._paths.append(self.path / name)
                for entry in record["tensors"]:
                    tensor = Tensor.of_json(entry, i)
                    item = tensor.dtype.itemsize
                    inside = 0 <= tensor.offset <= tensor.offset + tensor.region.numel * item <= size
                    if not inside or tensor.offset % item or block_bytes % item:
                        raise ValueError(f"where {tensor.name!r} is in {name!r}")
                    self._tensors.setdefault((tensor.name, tensor.kind), []).append(tensor)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{manifest}: not the manifest of a checkpoint ({error!r})") from None
        for path, record in zip(self._paths, self.files, strict=True):
            try:
                size = path.stat().st_size
            except OSError as error:
                raise CheckpointError(f"{path}: {error.strerror}; the checkpoint is not whole, take another") from None
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
        """Whether it holds something of a parameter."""
        return (name, kind) in self._tensors

    def array(self, name: str, kind: str) -> np.ndarray:
        """A tensor whole, as it was saved."""
        tensor = self._tensors[name, kind][0]
        shape = tensor.region.shape
        out = np.empty(int(np.prod(shape, dtype=np.int64)), tensor.dtype)
        self.read([Want(name, kind, Region(shape, 0, out.size), out)])
        return out.reshape(shape)

    def read(self, wants: Iterable[Want]) -> None:
        """Read, checking every block that is touched.

        Raises:
            CheckpointError: a block's bytes are not those that were written, or something was not saved.
        """
        pieces: dict[tuple[int, int], list[tuple[Tensor, int, np.ndarray]]] = {}
        for want in wants:
            tensors = self._tensors.get((want.name, want.kind), [])
            rows = common([tensor.region for tensor in tensors], want.region)
            if rows[:, 3].sum() != want.region.numel:
                raise CheckpointError(
                    f"{self.path}: {want.kind} of {want.name!r} is not in it as a whole; the checkpoint is not one of "
                    "this model"
                )
            for i, at, to, numel in rows.tolist():
                tensor = tensors[i]
                self._cut(pieces, tensor, at, want.out[to : to + numel])
        self._run(pieces)

    def verify(self) -> None:
        """Read all there is, and raise :class:`CheckpointError` where a block's bytes are not those written."""
        self._run({(i, block): [] for i, record in enumerate(self.files) for block in range(len(record["blocks"]))})

    def _cut(
        self,
        pieces: dict[tuple[int, int], list[tuple[Tensor, int, np.ndarray]]],
        tensor: Tensor,
        at: int,
        out: np.ndarray,
    ) -> None:
        """Distribute a run of a tensor over the blocks that it lies in; no element lies in two."""
        item, size = tensor.dtype.itemsize, int(self.files[tensor.file]["block_bytes"])
        done = 0
        while done < out.size:
            offset = tensor.offset + (at + done) * item
            numel = min((offset // size + 1) * size - offset, (out.size - done) * item) // item
            pieces.setdefault((tensor.file, offset // size), []).append(
                (tensor, offset % size, out[done : done + numel])
            )
            done += numel

    def _run(self, pieces: dict[tuple[int, int], list[tuple[Tensor, int, np.ndarray]]]) -> None:
        descriptors = {i: self._open(self._paths[i]) for i in sorted({i for i, _ in pieces})}
        blocks = sorted(pieces)

        def each(number: int, step: int) -> None:
            buffer = np.empty(max((int(self.files[i]["block_bytes"]) for i in descriptors), default=0), np.uint8)
            for i, block in blocks[number::step]:
                data = self._block(i, block, descriptors[i], buffer)
                for tensor, offset, out in pieces[i, block]:
                    end = offset + out.size * tensor.dtype.itemsize
                    np.copyto(out, data[offset:end].view(tensor.dtype), casting="unsafe")

        try:
            n = max(min(_READERS, default_threads(), len(blocks)), 1)
            with ThreadPoolExecutor(n) as pool:
                for done in [pool.submit(each, number, n) for number in range(n)]:
                    done.result()
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)

    def _open(self, path: Path) -> int:
        try:
            return os.open(path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}; take another checkpoint") from None

    def _block(self, i: int, block: int, descriptor: int, buffer: np.ndarray) -> np.ndarray:
        record, path = self.files[i], self._paths[i]
        size = int(record["block_bytes"])
        data = buffer[: min(size, int(record["bytes"]) - block * size)]
        done = 0
        try:
            while done < data.size and (n := os.preadv(descriptor, [data[done:].data], block * size + done)):
                done += n
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}; take another checkpoint") from None
        if done < data.size or checksum(data) != record["blocks"][block]:
            raise CheckpointError(
                f"{path}: bytes {block * size:,} to {block * size + data.size:,} are not those that were written; take "
                "another checkpoint"
            )
        return data


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        head = json.loads(path.read_bytes())
        if head["format"] != FORMAT:
            raise ValueError(f"format {head['format']!r}")
        version, content = head["version"], head["content"]
        if type(version) is not int:
            raise ValueError(f"version {version!r}")
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; take another checkpoint") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: not the manifest of a checkpoint, or damaged ({error!r}); take another checkpoint"
        ) from None
    if version > VERSION:
        raise CheckpointError(
            f"{path}: version {version} of the format, and this offload-core reads up to {VERSION}; expected a newer "
            "offload-core"
        )
    try:
        whole = version == VERSION and head["checksum"] == checksum(_canonical(content).encode())
    except (ValueError, RecursionError):
        whole = False
    if not whole:
        raise CheckpointError(f"{path}: what it says is not what was written; take another checkpoint")
    return content
