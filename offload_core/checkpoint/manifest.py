"""``manifest.json``: the contents of a checkpoint's files.

It is ``{"format", "version", "checksum", "content"}``; the checksum is that of the content's text. The content names
each file, its size, the checksums of its blocks, and which part of which parameter each of its tensors holds. Nothing
in it is executed, no name in it leads out of the folder, and every number in it is checked against the files.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..dtypes import BY_NUMPY, SAFETENSORS_DTYPES, SAFETENSORS_NAMES
from ..errors import CheckpointError, NewerCheckpointError
from ..layout.regions import Region
from ..rules import STATE_NAMES
from ..support.checkpoint_folder import FILE_NAME, MANIFEST, durable
from ..support.checks import shown
from ..support.disks import names_to_disk
from ..support.files import read_regular
from .safetensors import NOT_AS_WRITTEN, checked_integer, checked_shape
from .shard_writer import ShardWriter, checksum

FORMAT = "offload-core checkpoint"
VERSION = 1
_LONGEST = 2**30
"""Bytes of a manifest: that of a thousand processes and a thousand parameters has a few hundred million."""
_LARGEST_BLOCK = 2**28
"""Bytes of a block that a reader makes room for; blocks of 2^23 are written."""


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
        entry = {"name": self.name, "kind": self.kind, "dtype": SAFETENSORS_NAMES[self.dtype], "offset": self.offset}
        entry |= {"shape": region.shape, "start": region.start, "numel": region.numel}
        return entry | {k: v for k, v in (("order", region.order), ("box", region.box)) if v is not None}

    @classmethod
    def of_json(cls, entry: dict[str, Any], file: int) -> "Tensor":
        """The inverse of :meth:`to_json`. Raises one of ``NOT_AS_WRITTEN`` if the entry is wrong."""
        order, box = entry.get("order"), entry.get("box")
        region = Region(
            checked_shape(entry["shape"]),
            checked_integer(entry["start"]),
            checked_integer(entry["numel"]),
            None if order is None else tuple(map(checked_integer, order)),
            None if box is None else tuple((checked_integer(low), checked_integer(high)) for low, high in box),
        )
        region.check()
        name, kind, dtype = entry["name"], entry["kind"], entry["dtype"]
        if kind in STATE_NAMES and SAFETENSORS_DTYPES[dtype] not in BY_NUMPY:
            raise ValueError(f"{kind} of {shown(name)} is of {dtype}, expected F32")
        return cls(name, kind, region, SAFETENSORS_DTYPES[dtype], file, checked_integer(entry["offset"]))


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
        one of ``NOT_AS_WRITTEN``: the record is wrong.
    """
    name, blocks = record["file"], record["blocks"]
    size, block_bytes = checked_integer(record["bytes"]), checked_integer(record["block_bytes"])
    if not FILE_NAME.fullmatch(name) or not 0 < block_bytes <= _LARGEST_BLOCK:
        raise ValueError(f"the record of {name!r}")
    if type(blocks) is not list or len(blocks) != -(-size // block_bytes):
        raise ValueError(f"the blocks of {name!r}")
    tensors = [Tensor.of_json(entry, file) for entry in record["tensors"]]
    for tensor in tensors:
        item = tensor.dtype.itemsize
        if tensor.offset + tensor.region.numel * item > size or tensor.offset % item or block_bytes % item:
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
        text = read_regular(path, most_bytes=_LONGEST)
        head = json.loads(text)
        if head["format"] != FORMAT:
            raise ValueError(f"format {head['format']!r}")
        version, content = head["version"], head["content"]
        if type(version) is not int:
            raise ValueError(f"version {version!r}")
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; take another checkpoint") from None
    except NOT_AS_WRITTEN as error:
        raise CheckpointError(
            f"{path}: not the manifest of a checkpoint, or damaged ({error!r}); take another checkpoint"
        ) from None
    if version > VERSION:
        raise NewerCheckpointError(
            f"{path}: version {version} of the format, and this offload-core reads up to {VERSION}; expected a newer "
            "offload-core"
        )
    try:
        whole = _manifest(content).encode() == text
    except NOT_AS_WRITTEN:
        whole = False
    if not whole:
        raise CheckpointError(f"{path}: it was changed or damaged after it was written; take another checkpoint")
    return content
