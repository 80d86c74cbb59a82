"""``deepspeed.utils``: whole states and gradients of a parameter, leaf modules, and small helpers.

The functions of one parameter find its optimizer themselves. They work in every stage; those of gradients, between
``backward`` and ``step``. On several ranks all call them alike. They return None for a parameter that no engine trains.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from logging import INFO, getLogger
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from offload_core.deepspeed.names import refuse

from ...optim.optimizer import mark_leaves, optimizer_of
from ...params.casting import built_as
from ...stage3.leaf_modules import chosen_modules, is_marked_leaf, is_of_one
from ..parameter_states import get_gradient, get_state, left_in_place, set_gradient, set_state

logger = getLogger("DeepSpeed")
"""DeepSpeed's logger, without a handler of its own."""


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = INFO) -> None:
    """Log a message on these ranks; -1: on all. Without a process group it is always logged."""
    rank = dist.get_rank() if dist.is_initialized() else -1
    if rank == -1 or (ranks and (ranks[0] == -1 or rank in ranks)):
        logger.log(level, "[Rank %d] %s", rank, message)


class RepeatingLoader:
    """An iterator over a data loader that begins again at its end."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


def OnDevice(dtype: torch.dtype, device: Any = "meta", enabled: bool = True) -> AbstractContextManager[None]:
    """Return a context in which modules are made on a device, in an element type."""
    return built_as(dtype, device) if enabled else nullcontext()


def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """Return a copy of a parameter's whole master weight."""
    return get_state(param, "master", own=False)


def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Overwrite a parameter's whole master weight, and the parameter with it."""
    set_state(param, value, "master", own=False)


def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """Return a copy of a whole state of a parameter (``"exp_avg"``)."""
    return get_state(param, optim_state_key, own=False)


def safe_set_full_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """Overwrite a whole state of a parameter."""
    set_state(param, value, optim_state_key, own=False)


def safe_get_local_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """Return a copy of this rank's part of a parameter's master weight, one-dimensional."""
    return get_state(param, "master", own=True)


def safe_set_local_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Overwrite this rank's part of a parameter's master weight, and the parameter with it."""
    set_state(param, value, "master", own=True)


def safe_get_local_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """Return a copy of this rank's part of a state, one-dimensional."""
    return get_state(param, optim_state_key, own=True)


def safe_set_local_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """Overwrite this rank's part of a state."""
    set_state(param, value, optim_state_key, own=True)


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Return a copy of a parameter's whole gradient: averaged, and multiplied by the loss scale under fp16."""
    gradient = left_in_place(param)
    return get_gradient(param, own=False) if gradient is None else gradient


def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Overwrite a parameter's whole gradient, which carries the loss scale under fp16."""
    gradient = left_in_place(param)
    if gradient is None:
        set_gradient(param, value, own=False)
    else:
        gradient.copy_(value)


def safe_get_local_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Return a copy of this rank's part of a gradient, one-dimensional."""
    return get_gradient(param, own=True)


def safe_set_local_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Overwrite this rank's part of a gradient."""
    set_gradient(param, value, own=True)


def safe_update_full_grad_vectorized(
    param_list: Iterable[torch.Tensor], update_func: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    """Overwrite the gradient of each parameter that has one with ``update_func(gradient, parameter)``."""
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


def _chosen(
    model: nn.Module, wanted: Sequence[Any], fits: Callable[[str, nn.Module, Any], bool], flag: bool, must: bool
) -> tuple[list[nn.Module], list[Any]]:
    found, missing = chosen_modules(model, wanted, fits)
    if missing and must:
        raise ValueError(f"{type(model).__name__} has no modules {missing}; expected some of its named_modules()")
    return mark_leaves(model, found, leaf=flag), missing


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Have the modules of these classes, or of classes with these names, be leaf modules; return them."""
    return _chosen(model, [tuple(leaf_module_classes)], is_of_one, True, raise_if_not_found)[0]


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Have the modules of these classes be leaf modules no longer; return them."""
    return _chosen(model, [tuple(leaf_module_classes)], is_of_one, False, raise_if_not_found)[0]


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Have the modules of these names be leaf modules; return them, and the names of none."""
    return _chosen(model, module_names, lambda name, module, each: name == each, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Have the modules whose names end so be leaf modules; return them, and the suffixes of none."""
    return _chosen(
        model, module_name_suffixes, lambda name, module, each: name.endswith(each), flag, raise_if_not_found
    )


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Have this one module be a leaf module, or not."""
    mark_leaves(model, [model], leaf=flag)


def z3_leaf_module(model: nn.Module) -> bool:
    """Return True if this module is a leaf module."""
    return is_marked_leaf(model) or any(model in leaves for leaves in map(_leaves, model.parameters()))


def z3_leaf_parameter(model: torch.Tensor) -> bool:
    """Return True if this parameter of an engine is inside a leaf module."""
    return any(model is param for leaf in _leaves(model) for param in leaf.parameters())


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the leaf modules of a model."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def _leaves(param: torch.Tensor) -> Collection[nn.Module]:
    """Return the leaf modules of the engine that has this parameter."""
    optimizer = optimizer_of(param)
    return () if optimizer is None else optimizer.sharding.leaf_modules


def __getattr__(name: str) -> Any:
    raise AttributeError(f"deepspeed.utils.{name}: {refuse('utils', name)}")
