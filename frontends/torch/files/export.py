"""Exports weights for other programs, in Hugging Face's format."""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from offload_core.checkpoint.checkpoints import InOrder
from offload_core.checkpoint.export import Weight, export_weights
from offload_core.errors import ParameterError
from offload_core.support import checks

from ..compiled import uncompiled, uncompiled_module
from ..optimizer import OffloadedOptimizer
from ..placed import is_placed
from ..stage3.gathering import gathered_parameters
from ..tensors import ELEMENT_TYPES, NUMPY_DTYPES, memory

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in ELEMENT_TYPES}


def export_safetensors(
    model: nn.Module,
    optimizer: OffloadedOptimizer,
    folder: str | os.PathLike[str],
    *,
    max_shard_bytes: int,
    dtype: str | torch.dtype | None,
) -> None:
    """As ``Engine.export_safetensors``."""
    target = None
    if dtype is not None:
        checks.choice("dtype", str(dtype).removeprefix("torch."), _DTYPES)
        target = _DTYPES[str(dtype).removeprefix("torch.")]
    optimizer.flush()
    weights = [_weight(optimizer, name, tensor, target) for name, tensor in _untied(model)]
    pipeline = optimizer.pipeline
    export_weights(folder, weights, max_shard_bytes=max_shard_bytes, collectives=InOrder(pipeline))


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that ``state_dict()`` lists, as the model's own objects; none is read, since it may be in shards.

    Raises:
        ParameterError: an entry is not a tensor.
    """
    found = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        name = uncompiled(name)
        if not isinstance(tensor, torch.Tensor):
            raise ParameterError(
                f"{name!r} of the model's state_dict() is a {type(tensor).__name__}, expected a tensor: weights "
                "are nothing else (a get_extra_state() that returns one will do)"
            )
        found[name] = tensor
    return found


def whole_state_dict(model: nn.Module, *, wanted: bool) -> dict[str, Any]:
    """The model's ``state_dict()`` in host memory; one parameter at a time is whole on the device.

    All ranks must call this. Tied weights are one tensor.

    Args:
        wanted: False has None for each tensor.
    """
    found = model.state_dict(keep_vars=True)
    copies: dict[int, torch.Tensor | None] = {}
    for name, value in found.items():
        if isinstance(value, torch.Tensor):
            if id(value) not in copies:
                with gathered_parameters(value):
                    values = whole_of(value)
                    copies[id(value)] = values.to("cpu", copy=True) if wanted else None
            found[name] = copies[id(value)]
    return found


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor; all processes that hold parts of a DTensor must call this."""
    detached: Any = tensor.detach()
    return detached.full_tensor() if is_placed(tensor) else detached


def _untied(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor once: under the name that ``transformers`` ties others to, or the first one."""
    names: dict[int, list[str]] = {}
    found = named_tensors(model)
    for name, tensor in found.items():
        names.setdefault(id(tensor), []).append(name)
    tied = getattr(uncompiled_module(model), "all_tied_weights_keys", {})  # {the one that is left out: other}
    for same in names.values():
        kept = next((name for name in same if name not in tied), same[0])
        yield kept, found[kept]


def _weight(optimizer: OffloadedOptimizer, name: str, tensor: torch.Tensor, target: torch.dtype | None) -> Weight:
    dtype = target if target is not None and tensor.dtype.is_floating_point else tensor.dtype
    if is_traceable_wrapper_subclass(tensor) and not is_placed(tensor):
        raise ParameterError(
            f"export_safetensors: {name!r} is a {type(tensor).__name__}, which files cannot hold; expected a dense "
            "tensor: save the adapters alone, or the model by the library that quantised it"
        )
    if tensor.layout is not torch.strided or dtype not in NUMPY_DTYPES or tensor.is_meta:
        where = " on the meta device" * tensor.is_meta
        raise ParameterError(
            f"export_safetensors: {name!r} is {tensor.dtype}, {tensor.layout}{where}; expected a dense tensor with "
            f"values, of one of {', '.join(str(d).removeprefix('torch.') for d in NUMPY_DTYPES)}"
        )
    master = target is not None and optimizer.has_states(tensor)

    def read(wanted: bool) -> np.ndarray | None:
        if master:
            values = optimizer.whole_states(tensor, ["master"])["master"]
            return _in_order(values.to(dtype)) if wanted else None
        with gathered_parameters(tensor):
            values = whole_of(tensor)
            return _in_order(values.to("cpu", dtype)) if wanted else None

    return Weight(name, NUMPY_DTYPES[dtype], tuple(tensor.shape), read)


def _in_order(tensor: torch.Tensor) -> np.ndarray:
    return memory(tensor.resolve_conj().resolve_neg().contiguous().view(-1))
