"""``manifest.json``: what the files of a checkpoint hold.

It is ``{"format", "version", "checksum", "content"}``; the checksum is that of the content's text. The content names
each file, its size, the checksums of its blocks, and which part of which parameter each of its tensors holds. Nothing
in it is executed, no name in it leads out of the folder, and every number in it is checked against the files.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import CheckpointError
from ..layout.regions import Region
from ..support.disks import names_to_disk
from .folder import FILE_NAME, MANIFEST, durable
from .safetensors import NAME_OF, NUMPY_OF
from .shard_writer import ShardWriter, checksum

FORMAT = "offload-core checkpoint"
VERSION = 1
_LARGEST = 2**62
NOT_A_MANIFEST = (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError)
"""The errors that reading JSON with unexpected content can raise."""


class Tensor(NamedTuple):
    """The record of a tensor in a file."""

    name: str
    kind: str
    region: Region
    dtype: np.dtype
    file: int
    """The file's index in the manifest."""
    offset: int
    """Bytes from the file's start."""

    def to_json(self) -> dict[str, Any]:
        region = self.region
        entry = {"name": self.name, "kind": self.kind, "dtype": NAME_OF[self.dtype], "offset": self.offset}
        entry |= {"shape": region.shape, "start": region.start, "numel": region.numel}
        return entry | {k: v for k, v in (("order", region.order), ("box", region.box)) if v is not None}

    @classmethod
    def of_json(cls, entry: dict[str, Any], file: int) -> "Tensor":
        """The inverse of :meth:`to_json`. Raises one of ``NOT_A_MANIFEST`` if the entry is wrong."""
        order, box = entry.get("order"), entry.get("box")
        region = Region(
            tuple(map(int, entry["shape"])),
            int(entry["start"]),
            int(entry["numel"]),
            None if order is None else tuple(map(int, order)),
            None if box is None else tuple((int(low), int(high)) for low, high in box),
        )
        region.check()
        if math.prod(region.shape) >= _LARGEST:
            raise ValueError(f"shape {region.shape}")
        return cls(entry["name"], entry["kind"], region, NUMPY_OF[entry["dtype"]], file, int(entry["offset"]))


def file_record(writer: ShardWriter) -> dict[str, Any]:
    """The manifest's record of a file that is being written, without its checksums."""
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


def tensors_of(record: dict[str, Any], file: int) -> list[Tensor]:
    """Check the record of a file, and return its tensors. Their bytes lie inside the file, aligned to their type.

    Args:
        file: the record's index in the manifest.

    Raises:
        one of ``NOT_A_MANIFEST``: the record is wrong.
    """
    name, size, block_bytes = record["file"], record["bytes"], record["block_bytes"]
    numbers = all(type(n) is int for n in (size, block_bytes)) and size >= 0 and block_bytes > 0
    if not FILE_NAME.fullmatch(name) or not numbers or len(record["blocks"]) != -(-size // block_bytes):
        raise ValueError(f"the record of {name!r}")
    tensors = [Tensor.of_json(entry, file) for entry in record["tensors"]]
    for tensor in tensors:
        item = tensor.dtype.itemsize
        inside = 0 <= tensor.offset <= tensor.offset + tensor.region.numel * item <= size
        if not inside or tensor.offset % item or block_bytes % item:
            raise ValueError(f"where {tensor.name!r} is in {name!r}")
    return tensors


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Write the manifest, and sync it and the folder's entries to the disk."""
    durable(folder / MANIFEST, _manifest(content))
    names_to_disk(folder)


def _manifest(content: Any) -> str:
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)  # keeps the order of keys
    head = {"format": FORMAT, "version": VERSION, "checksum": checksum(text.encode())}
    return f'{json.dumps(head)[:-1]}, "content": {text}}}\n'


def read_manifest(path: Path) -> dict[str, Any]:
    """The content of a manifest.

    Raises:
        CheckpointError: it cannot be read, is damaged, or has a newer version.
    """
    try:
        text = path.read_bytes()
        head = json.loads(text)
        if head["format"] != FORMAT:
            raise ValueError(f"format {head['format']!r}")
        version, content = head["version"], head["content"]
        if type(version) is not int:
            raise ValueError(f"version {version!r}")
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; take another checkpoint") from None
    except NOT_A_MANIFEST as error:
        raise CheckpointError(
            f"{path}: not the manifest of a checkpoint, or damaged ({error!r}); take another checkpoint"
        ) from None
    if version > VERSION:
        raise CheckpointError(
            f"{path}: version {version} of the format, and this offload-core reads up to {VERSION}; expected a newer "
            "offload-core"
        )
    try:
        whole = _manifest(content).encode() == text
    except NOT_A_MANIFEST:
        whole = False
    if not whole:
        raise CheckpointError(f"{path}: what it says is not what was written; take another checkpoint")
    return content
