"""Checks which tensors the models of several engines can share, with one error for each kind that they cannot.

Engines that keep parameters whole may share frozen parameters and buffers. One engine may train a parameter that
another engine keeps frozen, because updates write parameters in place and all readers wait for them. No engine can use
a parameter that another engine has in shards. No engine can cast a tensor that another engine uses.
"""

import gc
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from offload_core.config.options import OffloadConfig
from offload_core.errors import ParameterError, StateError
from offload_core.support.living import Living

from ..internals.private import no_read
from ..params.casting import Casts
from ..params.slots import OwningOptimizer
from ..params.tensors import is_offloadable

_OPTIMIZERS: Living[Any] = Living()
"""All optimizers of this process that are alive, used alone or by an engine. They are hashed by identity."""


def note_optimizer(optimizer: Any) -> None:
    """Record an optimizer, so that later engines check which tensors they share with it."""
    _OPTIMIZERS.add(optimizer)


def owners_of_shards(model: nn.Module) -> list[Any]:
    """Return the open optimizers whose engines hold parameters of this model in shards."""
    params = [*model.parameters()]
    return [each for each in _OPTIMIZERS if each.is_open and any(param in each.sharding for param in params)]


def end_earlier(owners: Collection[Any]) -> None:
    """End the engines of these optimizers, so that another engine may have their models. Collective, because parameters
    become whole.

    Raises:
        StateError: an engine is not idle. Then no engine has ended.
    """
    for owner in owners:
        if owner.is_open and (reason := owner.occupied()) is not None:
            raise StateError(
                f"the model is in shards of another engine, {reason}; expected its step(), or its .close(), before a "
                "later Trainer trains the model"
            )
    for owner in owners:
        if owner.is_open:
            owner.give_way()


def check_shared(
    model: nn.Module, config: OffloadConfig, casts: Casts, *, shards_params: bool, give_way: Collection[OwningOptimizer]
) -> None:
    """Check that a new engine can use the tensors that its model shares with other optimizers.

    Args:
        shards_params: True if the new engine holds large parameters in shards.
        give_way: the optimizers that will be closed for this engine.

    Raises:
        StateError, ParameterError: the engine cannot use one of these tensors. Nothing has changed.
    """
    error = _conflict(model, config, casts, shards_params, give_way)
    if error is not None:
        gc.collect()  # a reference cycle of an old trainer may keep its engine
        error = _conflict(model, config, casts, shards_params, give_way)
    if error is not None:
        raise error


def _conflict(
    model: nn.Module, config: OffloadConfig, casts: Casts, shards_params: bool, give_way: Collection[OwningOptimizer]
) -> StateError | ParameterError | None:
    params = [*model.named_parameters()]
    for other in _OPTIMIZERS:
        if not other.is_open or any(other is owner for owner in give_way):
            continue
        held = {*other.held_tensors()}
        for name, param in params:
            if param in other.sharding:
                return StateError(
                    f"parameter {name!r} is there in shards of another engine; expected one owner: end that one with "
                    ".close(), or give this model a parameter of its own"
                )
            if shards_params and param in held and _may_be_cut(param, config):
                return StateError(
                    f"parameter {name!r} is used by another engine or optimizer, which needs it whole, and stage=3 "
                    "would hold it in shards; expected stages 1 and 2 in both, one wrap() of a module that holds both "
                    "models, or .close() of the other one before"
                )
        for name, tensor in (*params, *model.named_buffers()):
            if tensor in held and casts.would_change(tensor):
                asked = "param_dtype" if isinstance(tensor, nn.Parameter) else "buffer_dtype"
                return ParameterError(
                    f"{name!r} is used by another engine or optimizer as {tensor.dtype}, and {asked}="
                    f"{getattr(config, asked)!r} would cast it; expected the same {asked} in both engines"
                )
    return None


def _may_be_cut(param: torch.Tensor, config: OffloadConfig) -> bool:
    with no_read():
        return is_offloadable(param) and param.numel() >= max(config.param_persistence_threshold, 1)
