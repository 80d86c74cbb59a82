"""Torch's parameter groups: their hyper-parameters and other options."""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from offload_core.config.options import check_hyperparameters
from offload_core.config.settings import SettingsButLr
from offload_core.errors import ConfigError, ParameterError
from offload_core.rules.adam import AdamHyper
from offload_core.support.checks import shown

_REFUSED = {
    "amsgrad": "there is no third moment",
    "maximize": "negate the loss",
    "capturable": "the update runs on the host, outside CUDA graphs",
    "differentiable": "the update runs outside autograd",
}
_OPTIONS = {**dict.fromkeys(_REFUSED, False), "foreach": None, "fused": True}
"""The other options in the groups of ``torch.optim.AdamW``, with the values that match this optimizer. The last two
select one of torch's implementations and have no effect here."""


class OptimizerSettings(SettingsButLr, total=False):
    """The keywords of ``OffloadedAdamW`` beside ``lr``: settings, and the options of ``torch.optim.AdamW``."""

    amsgrad: bool
    maximize: bool
    capturable: bool
    differentiable: bool
    foreach: bool | None
    fused: bool | None


def number(name: str, value: Any) -> Any:
    """The Python number in a tensor of one element; any other value as it is.

    Raises:
        ConfigError: a tensor of more or fewer elements.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() != 1:
        raise ConfigError(f"{name}: got a tensor of {value.numel()} elements, expected one element")
    return value.item()


def numbers(name: str, value: Any) -> Any:
    """Apply :func:`number` to each element of a pair; any other value stays as it is."""
    return tuple(number(f"{name}[{i}]", x) for i, x in enumerate(value)) if isinstance(value, tuple | list) else value


def without_torchs_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords without those options of ``torch.optim.AdamW`` that have no effect here.

    Raises:
        ConfigError: one of them asks for something that this optimizer does not do.
    """
    _refuse("", options)
    return {name: value for name, value in options.items() if name not in _OPTIONS}


def torchs_options(adam_mode: str) -> dict[str, Any]:
    """The options that torch's own optimizer needs in its groups to continue from this one's state."""
    return {**_OPTIONS, "decoupled_weight_decay": adam_mode == "adamw"}


_check_once = lru_cache(maxsize=1024)(check_hyperparameters)
"""The same check, run once for equal values: every step asks for it, and the values rarely change."""


def in_model(model: nn.Module, params: Iterable[Any]) -> list[Any]:
    """Parameters or groups, as torch's optimizers take them, with the names that they have in the model.

    Raises:
        ParameterError: one is not the model's.
    """
    names = names_in(model)
    return [_named(names, entry) for entry in params]


def names_in(model: nn.Module) -> dict[int, str]:
    """The names of a model's parameters, by ``id``."""
    return {id(param): name for name, param in model.named_parameters()}


def _named(names: Mapping[int, str], entry: Any) -> Any:
    if isinstance(entry, dict):
        params = entry["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        return {**entry, "params": [_named(names, param) for param in params]}
    param = entry[1] if isinstance(entry, tuple) else entry
    if not isinstance(param, torch.Tensor):
        raise ParameterError(
            f"params: got a {type(param).__name__}, expected parameters of the model, or groups of them"
        )
    if id(param) not in names:
        raise ParameterError(
            f"params: a tensor of shape {tuple(param.shape)} is no parameter of the model, which would not be trained; "
            "expected parameters of the model that is wrapped (is this another model's, or from before a copy?)"
        )
    return names[id(param)], param


def some_of(names: Sequence[str], most: int = 3) -> str:
    """The first names, and how many others there are."""
    rest = len(names) - most
    return ", ".join(map(repr, names[:most])) + (f" and {rest} others" if rest > 0 else "")


def hyper_of(g: int, group: Mapping[str, Any]) -> AdamHyper:
    """The hyper-parameters of group ``g``, checked.

    Raises:
        ConfigError: a value is out of range, or asks for something that this optimizer does not do.
    """
    where = f"parameter group {g}"
    lr, betas, eps, weight_decay = group["lr"], group["betas"], group["eps"], group["weight_decay"]
    if type(betas) is tuple and {type(x) for x in (lr, *betas, eps, weight_decay)} <= {float, int}:
        _check_once(where, lr, betas, eps, weight_decay)
    else:
        lr, betas = number(f"{where}: lr", lr), numbers(f"{where}: betas", betas)
        check_hyperparameters(where, lr, betas, eps, weight_decay)
    _refuse(f"{where}: ", group)
    beta1, beta2 = betas
    return AdamHyper(float(lr), (float(beta1), float(beta2)), float(eps), float(weight_decay))


def _refuse(where: str, options: Mapping[str, Any]) -> None:
    for name, why in _REFUSED.items():
        if options.get(name):
            raise ConfigError(f"{where}{name}={options[name]!r} is not supported; expected False ({why})")


def paired(theirs: Mapping[str, int], mine: Mapping[str, int], n_groups: int) -> list[int]:
    """The number in a checkpoint of each of this optimizer's groups: the one with the same parameters.

    Groups without a parameter in the checkpoint keep their order.

    Args:
        theirs, mine: the number of each parameter's group, by the parameter's name in the checkpoint.

    Raises:
        ConfigError: parameters that are in one group there are in two here, or the other way round.
    """
    shared = sorted(mine.keys() & theirs.keys())
    there = {mine[name]: theirs[name] for name in shared}
    here = {theirs[name]: mine[name] for name in shared}
    for name in shared:
        if there[mine[name]] != theirs[name] or here[theirs[name]] != mine[name]:
            other = next(o for o in shared if (mine[o] == mine[name]) != (theirs[o] == theirs[name]))
            together = "one group here and in two" if mine[other] == mine[name] else "two groups here and in one"
            raise ConfigError(
                f"{name!r} and {other!r} are in {together} there; expected the same parameters in each group, in any "
                "order of groups"
            )
    left = iter(g for g in range(n_groups) if g not in here)
    return [there[g] if g in there else next(left) for g in range(n_groups)]


def checked_values(g: int, group: Mapping[str, Any], saved: Any) -> dict[str, Any]:
    """The values of a saved group, as group ``g`` can take them.

    Raises:
        ConfigError: a value is out of range, or asks for something that this optimizer does not do.
        TypeError, ValueError: it is no group of values.
    """
    if not isinstance(saved, dict) or not saved.keys().isdisjoint(("params", "param_names")):
        raise TypeError(f"parameter group {g}: got {shown(saved)}, expected values by name")
    hyper_of(g, {**group, **saved})
    return {
        key: float(number(key, value)) if isinstance(group.get(key), torch.Tensor) else value
        for key, value in saved.items()
    }


def set_values(groups: Sequence[dict[str, Any]], values: Sequence[Mapping[str, Any]]) -> None:
    """Give each group its values. A number that is a tensor stays that tensor: schedulers may hold it."""
    for group, saved in zip(groups, values, strict=False):
        for key, value in saved.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = value


def loaded(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A group of a state dict, with defaults for options that an older one lacks.

    ``decoupled_weight_decay`` stays this optimizer's own, as in torch, whichever class saved the states.
    """
    return {**defaults, **group, "decoupled_weight_decay": defaults["decoupled_weight_decay"]}
