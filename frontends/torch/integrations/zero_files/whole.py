"""Whole weights of a checkpoint on the disk, DeepSpeed's or ours, without an engine."""

import argparse
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offload_core.engine import SavedWeights, Weight, export_weights
from offload_core.errors import CheckpointError, ConfigError
from offload_core.ranks.collectives import SingleRank
from offload_core.support import units
from offload_core.support.checkpoint_folder import MANIFEST, find_tag

from ...params.tensors import NUMPY_DTYPES
from ...weights.export import write_with_torch
from ...weights.reading import bytes_in_order
from .contents import SavedTensor
from .reading import read_contents

_TORCH_DTYPES = {dtype: name for name, dtype in NUMPY_DTYPES.items()}


def whole_weights(
    folder: str | os.PathLike[str], tag: Any = None, *, frozen: bool = True
) -> tuple[list[Weight], Mapping[str, str]]:
    """Return the weights and buffers of a checkpoint, floating-point ones in float32, and the further names of tied
    ones. Each is read when it is asked for.

    Args:
        folder: the folder that ``save_checkpoint`` was given, or a checkpoint of ours itself.
        tag: the checkpoint's name in it; None: the latest.
        frozen: False leaves out parameters that are not trained (see :class:`SavedWeights`). A run of DeepSpeed's
            without ZeRO does not say which they are: then nothing is left out.

    Raises:
        CheckpointError: a file is missing or damaged, or it is a checkpoint of another kind.
    """
    path: Path | None = Path(folder)
    if tag is not None or not os.path.exists(Path(folder) / MANIFEST):
        tag = None if tag is None else str(tag)
        path = find_tag(Path(folder), tag)
    if path is not None and os.path.exists(path / MANIFEST):
        saved = SavedWeights(path, frozen=frozen)
        return saved.weights, saved.tied
    contents = read_contents(Path(folder), tag)
    kept = contents.trained | contents.others
    if not frozen and contents.unnamed is None:
        buffers = contents.described.get("buffer_names") or ()
        kept = contents.trained | {name: tensor for name, tensor in contents.others.items() if name in buffers}
    found = []
    for name, tensor in kept.items():
        own = next((part.dtype for _, part in tensor.parts()), torch.float32)
        target = torch.float32 if own.is_floating_point else own
        if target not in NUMPY_DTYPES:
            raise CheckpointError(f"{tensor.file}: {name!r} is of {own}, expected an element type of safetensors")
        found.append(Weight(name, NUMPY_DTYPES[target], tensor.shape, partial(_bytes, tensor, target)))
    return found, {alias: name for alias, name in contents.aliases.items() if name in kept}


def _bytes(saved: SavedTensor, dtype: torch.dtype, wanted: bool) -> np.ndarray | None:
    return bytes_in_order(saved.read().to(dtype)) if wanted else None


def whole_state_dict(
    folder: str | os.PathLike[str], tag: Any = None, *, frozen: bool = True
) -> dict[str, torch.Tensor]:
    """Return what :func:`whole_weights` finds as tensors by name. Tied weights are one tensor."""
    weights, tied = whole_weights(folder, tag, frozen=frozen)
    found = {weight.name: _tensor(weight) for weight in weights}
    return found | {name: found[other] for name, other in tied.items()}


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

    Raises:
        ConfigError: ``max_shard`` is no size.
        CheckpointError: as :func:`whole_weights`; or a file cannot be written, and no part of it is left.
    """
    if max_shard is None:
        write_with_torch(whole_state_dict(folder, tag, frozen=frozen), Path(output) / "pytorch_model.bin")
        return
    try:
        most = units.size(max_shard) if isinstance(max_shard, str) else max_shard
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"max_shard_size: {error}") from None
    weights, _ = whole_weights(folder, tag, frozen=frozen)
    export_weights(output, weights, max_shard_bytes=most, collectives=SingleRank())


def main(arguments: list[str] | None = None) -> None:
    """The command that takes the place of DeepSpeed's script, with its arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m frontends.torch.deepspeed.utils.zero_to_fp32",
        description="write the whole fp32 weights of a checkpoint, DeepSpeed's or ours",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint_dir", help="the folder that save_checkpoint was given")
    parser.add_argument("output_dir", help="the folder for the weights")
    parser.add_argument("--max_shard_size", default="5GB", help="the most bytes of a safetensors file")
    parser.add_argument("--safe_serialization", action="store_true", help="safetensors, not one pytorch_model.bin")
    parser.add_argument("-t", "--tag", help="the checkpoint's name in its folder; by default the latest")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="what is trained, and buffers, alone")
    parser.add_argument("-d", "--debug", action="store_true", help="changes nothing")
    given = parser.parse_args(arguments)
    most = given.max_shard_size if given.safe_serialization else None
    frozen = not given.exclude_frozen_parameters
    try:
        write_whole(given.checkpoint_dir, given.output_dir, given.tag, max_shard=most, frozen=frozen)
    except (CheckpointError, ConfigError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
