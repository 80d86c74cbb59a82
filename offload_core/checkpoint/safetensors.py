"""The safetensors file format, written and read piece by piece.

A file is the length of its header (8 bytes, little-endian), the header (JSON), and the tensors' bytes
(https://huggingface.co/docs/safetensors). The format's own library only takes whole tensors, and reads no element types
that NumPy lacks.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..dtypes import SAFETENSORS_DTYPES, SAFETENSORS_NAMES
from ..errors import CheckpointError
from ..support.checks import LARGEST, shown
from ..support.files import open_regular

_LENGTH_BYTES = 8
_ALIGNMENT = 64
_MOST_DIMENSIONS = 32
"""The most that NumPy has had in all its versions."""
_LONGEST_HEADER = 100_000_000  # the limit of the format's own library
FLOATING = frozenset(dtype for name, dtype in SAFETENSORS_DTYPES.items() if name.startswith(("F", "BF")))
"""Those of real numbers."""
NOT_AS_WRITTEN = (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError)
"""The errors that reading JSON with unexpected content can raise."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its element type and shape, and the place of its bytes, counted from the file's start."""

    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def n_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


def checked_shape(shape: Any) -> tuple[int, ...]:
    """A shape from a file. Nothing may be allocated by it before the bytes that it stands for are known to be there.

    Raises:
        ValueError, TypeError: it has a dimension that is no integer or is negative, or more dimensions or elements than
            any array.
    """
    if len(shape) > _MOST_DIMENSIONS or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"shape {shown(shape)}")
    if math.prod(n for n in shape if n) > LARGEST:  # of an array without elements, too: its strides are products
        raise ValueError(f"shape {shown(shape)}")
    return tuple(shape)


def checked_integer(value: Any) -> int:
    """A count or place from a file. Raises :class:`ValueError` if it is none."""
    if type(value) is not int or not 0 <= value <= LARGEST:
        raise ValueError(f"got {shown(value)}, expected a count")
    return value


def plan_file(
    tensors: Mapping[str, tuple[np.dtype, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, StoredTensor], int]:
    """The header of a file of these tensors, the place of each, and the file's size in bytes.

    Tensors follow each other without gaps, in the order given. That should be the order of falling element size,
    because readers expect aligned tensors.
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at, relative = 0, {}
    for name, (dtype, shape) in tensors.items():
        relative[name] = at
        end = at + dtype.itemsize * math.prod(shape)
        entries[name] = {"dtype": SAFETENSORS_NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGNMENT)
    start = _LENGTH_BYTES + len(text)
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    stored = {
        name: StoredTensor(dtype, tuple(shape), start + relative[name]) for name, (dtype, shape) in tensors.items()
    }
    return header, stored, start + at


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file.

    Raises:
        CheckpointError: it is not a whole safetensors file, or has an unknown element type.
        OSError: it cannot be read.
    """
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        start = _LENGTH_BYTES + length
        if length > _LONGEST_HEADER:
            raise CheckpointError(
                f"{path}: no safetensors file: its first 8 bytes are no header's length; expected a .safetensors file"
            )
        if start > size:
            raise CheckpointError(f"{path}: no safetensors file, or cut off: {size} bytes, and a header of {length}")
        text = file.read(length)
    found = {}
    try:
        for name, entry in json.loads(text).items():
            if name != "__metadata__":
                begin, end = map(checked_integer, entry["data_offsets"])
                found[name] = StoredTensor(
                    SAFETENSORS_DTYPES[entry["dtype"]], checked_shape(entry["shape"]), start + begin
                )
                if end - begin != found[name].n_bytes or end > size - start:
                    raise ValueError(f"{name} has bytes {begin} to {end}")
    except NOT_AS_WRITTEN as error:
        raise CheckpointError(
            f"{path}: no safetensors file, or cut off, or of element types that are not known here ({error!r})"
        ) from None
    return found
