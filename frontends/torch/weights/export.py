"""Exports weights for other programs, in Hugging Face's format."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from offload_core.engine import Weight, export_weights
from offload_core.errors import CheckpointError
from offload_core.support.disks import to_disk

from ..optim.optimizer import OffloadedOptimizer
from ..params.tensors import NUMPY_DTYPES
from ..stage3.gathering import gathered_parameters
from .reading import NamedWeight, Weights, bytes_in_order, dtype_of, weights_of, whole_of


def export_safetensors(
    model: nn.Module,
    optimizer: OffloadedOptimizer,
    folder: str | os.PathLike[str],
    *,
    max_shard_bytes: int,
    dtype: str | torch.dtype | None,
) -> None:
    """As ``Engine.export_safetensors``."""
    found = weights_of(model, dtype_of(dtype), "export_safetensors")
    optimizer.flush()
    reader = Weights(optimizer)
    weights = [
        Weight(weight.name, NUMPY_DTYPES[weight.dtype], weight.shape, partial(_bytes, reader, weight, dtype is None))
        for weight in found
    ]
    core = optimizer.core
    export_weights(folder, weights, max_shard_bytes=max_shard_bytes, collectives=core.collectives)


def _bytes(reader: Weights, weight: NamedWeight, as_it_runs: bool, wanted: bool) -> np.ndarray | None:
    values = reader.whole(weight.tensor, None if as_it_runs else weight.dtype, wanted=wanted)
    return None if values is None else bytes_in_order(values)


def write_with_torch(values: Any, path: Path) -> None:
    """Write values to a file that ``torch.load`` reads, which appears complete, in place of an earlier one.

    Raises:
        CheckpointError: it cannot be written; no part of it is left, and an earlier one stays.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            torch.save(values, temporary)
            with temporary.open("rb") as file:
                to_disk(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except (OSError, RuntimeError) as error:  # torch's writer raises the second
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CheckpointError(f"{path}: cannot be written ({why}); expected a folder with room for it") from error


def whole_state_dict(model: nn.Module, *, wanted: bool) -> dict[str, Any]:
    """The model's ``state_dict()`` in host memory; one parameter at a time is whole on the device.

    All ranks must call this. Tied weights are one tensor.

    Args:
        wanted: False has None for each tensor.
    """
    found = model.state_dict(keep_vars=True)
    copies: dict[torch.Tensor, torch.Tensor | None] = {}
    for name, value in found.items():
        if isinstance(value, torch.Tensor):
            if value not in copies:
                with gathered_parameters(value):
                    values = whole_of(value)
                    copies[value] = values.to("cpu", copy=True) if wanted else None
            found[name] = copies[value]
    return found
