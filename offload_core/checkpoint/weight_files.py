"""Weights in a folder as Hugging Face's libraries write them, read part by part."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError
from ..layout.regions import Region
from ..support.checks import shown
from ..support.files import open_regular, read_regular
from .safetensors import NOT_AS_WRITTEN, StoredTensor, read_header

INDEX = "model.safetensors.index.json"
_LONGEST_JSON = 2**28


class WeightFiles:
    """The tensors of ``model.safetensors.index.json``'s files, or else of all ``.safetensors`` files of a folder.

    Raises:
        CheckpointError: there is no such file, or one of them is damaged.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        index = self.folder / INDEX
        try:
            if index.exists():
                files = files_of(index, json_object(index, "no index of safetensors files"))
            else:
                files = sorted(self.folder.glob("*.safetensors"))
            headers = {file: read_header(file) for file in files}
        except OSError as error:
            raise CheckpointError(f"{error.filename or index}: {error.strerror}; expected a file of weights") from None
        if not headers:
            raise CheckpointError(
                f"{self.folder}: holds neither {INDEX} nor a .safetensors file; expected a folder of weights, as "
                "export_safetensors() writes it"
            )
        self._files = {name: file for file, header in headers.items() for name in header}
        self.tensors: Mapping[str, StoredTensor] = {
            name: tensor for header in headers.values() for name, tensor in header.items()
        }

    def read(self, name: str, box: tuple[tuple[int, int], ...]) -> np.ndarray:
        """Return a part of a tensor, given by its ``(begin, end)`` in each dimension.

        Raises:
            CheckpointError: it cannot be read.
        """
        path, tensor = self._files[name], self.tensors[name]
        shape = tuple(end - begin for begin, end in box)
        out = np.empty(math.prod(shape), tensor.dtype)
        at = 0
        try:
            with open(open_regular(path), "rb", buffering=0) as file:
                for start, numel in Region(tensor.shape, 0, out.size, None, box).runs().tolist():
                    run = out[at : at + numel].view(np.uint8)
                    at, offset, done = at + numel, tensor.offset + start * tensor.dtype.itemsize, 0
                    while done < run.size and (n := os.preadv(file.fileno(), [run[done:].data], offset + done)):
                        done += n
                    if done < run.size:
                        raise CheckpointError(
                            f"{path}: {name!r} ends after {done} of {run.size} bytes at {offset}; the file was cut off "
                            "since it was opened"
                        )
        except OSError as error:
            raise CheckpointError(f"{path}: {name!r}: {error.strerror}") from None
        return out.reshape(shape)


def json_object(path: Path, otherwise: str) -> dict[str, Any]:
    """The content of a JSON file that is an object.

    Args:
        otherwise: begins the error's words for a file that is none.

    Raises:
        CheckpointError: it is no JSON object.
        OSError: it cannot be read.
    """
    try:
        content = json.loads(read_regular(path, most_bytes=_LONGEST_JSON))
        if not isinstance(content, dict):
            raise TypeError(f"got {shown(content)}")
        return content
    except NOT_AS_WRITTEN as error:
        raise CheckpointError(f"{path}: {otherwise} ({error!r})") from None


def files_of(index: Path, content: Mapping[str, Any]) -> list[Path]:
    """The files that an index names. Raises :class:`CheckpointError` if one of them is not in its folder."""
    try:
        names = sorted(set(content["weight_map"].values()))
        elsewhere = [name for name in names if Path(name).name != name]
        if elsewhere:
            raise ValueError(f"{shown(elsewhere[0])} is not in its folder")
        return [index.parent / name for name in names]
    except NOT_AS_WRITTEN as error:
        raise CheckpointError(f"{index}: no index of safetensors files ({error!r})") from None
