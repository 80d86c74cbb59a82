"""Whole weights of a checkpoint on the disk, DeepSpeed's or ours, without an engine."""

import argparse
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offload_core.checkpoint.export import Weight, export_weights
from offload_core.checkpoint.folder import MANIFEST, find_tag
from offload_core.checkpoint.saved_weights import SavedWeights
from offload_core.errors import ConfigError
from offload_core.ranks.collectives import SingleRank
from offload_core.support import units

from ..tensors import ELEMENT_TYPES, NUMPY_DTYPES
from ..weights import bytes_in_order
from .contents import Saved
from .reading import read_contents

_TORCH_DTYPES = {dtype: name for name, dtype in NUMPY_DTYPES.items()}


def whole_weights(
    folder: str | os.PathLike[str], tag: Any = None, *, frozen: bool = True
) -> tuple[list[Weight], Mapping[str, str]]:
    """Return the weights and buffers of a checkpoint, floating-point ones in float32, and the further names of tied
    ones. Each is read when it is asked for.

    Args:
        folder: the folder that ``save_checkpoint`` was given.
        tag: the checkpoint's name in it; None: the latest.
        frozen: False leaves out parameters that are not trained; of ours, buffers too. A run of DeepSpeed's without
            ZeRO does not say which are trained: then nothing is left out.

    Raises:
        CheckpointError: a file is missing or damaged, or it is a checkpoint of another kind.
    """
    tag = None if tag is None else str(tag)
    path = find_tag(Path(folder), tag)
    if path is not None and os.path.exists(path / MANIFEST):
        return SavedWeights(path, frozen=frozen).weights, {}
    contents = read_contents(Path(folder), tag)
    kept = contents.trained | contents.others
    if not frozen and contents.unnamed is None:
        buffers = contents.described.get("buffer_names") or ()
        kept = contents.trained | {name: saved for name, saved in contents.others.items() if name in buffers}
    found = []
    for name, saved in kept.items():
        own = next((part.dtype for _, part in saved.parts()), torch.float32)
        target = torch.float32 if own in ELEMENT_TYPES else own
        found.append(Weight(name, NUMPY_DTYPES[target], saved.shape, partial(_bytes, saved, target)))
    return found, {alias: name for alias, name in contents.aliases.items() if name in kept}


def _bytes(saved: Saved, dtype: torch.dtype, wanted: bool) -> np.ndarray | None:
    return bytes_in_order(saved.read().to(dtype)) if wanted else None


def whole_state_dict(
    folder: str | os.PathLike[str], tag: Any = None, *, frozen: bool = True
) -> dict[str, torch.Tensor]:
    """Return what :func:`whole_weights` finds as tensors by name. Tied weights are one tensor."""
    weights, aliases = whole_weights(folder, tag, frozen=frozen)
    found = {weight.name: _tensor(weight) for weight in weights}
    return found | {alias: found[name] for alias, name in aliases.items()}


def _tensor(weight: Weight) -> torch.Tensor:
    values = weight.read(True)
    assert values is not None
    flat = torch.from_numpy(values.reshape(-1).view(np.uint8))
    return flat.view(_TORCH_DTYPES[weight.dtype]).view(weight.shape)


def write_whole(
    folder: str | os.PathLike[str],
    output: str | os.PathLike[str],
    tag: Any = None,
    *,
    max_shard: int | str | None = None,
    frozen: bool = True,
) -> None:
    """Write what :func:`whole_weights` finds to another folder.

    Args:
        max_shard: the most bytes of a safetensors file, or a size such as ``"5GB"``; None: ``pytorch_model.bin``, one
            file that ``torch.load`` reads.
    """
    if max_shard is None:
        found = whole_state_dict(folder, tag, frozen=frozen)
        os.makedirs(output, exist_ok=True)
        torch.save(found, os.path.join(output, "pytorch_model.bin"))
        return
    try:
        most = units.size(max_shard) if isinstance(max_shard, str) else max_shard
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"max_shard_size: {error}") from None
    weights, _ = whole_weights(folder, tag, frozen=frozen)
    export_weights(output, weights, max_shard_bytes=most, collectives=SingleRank())
