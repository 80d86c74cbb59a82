"""Parameter groups as torch has them: their hyper-parameters, and what else is written in them."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from offload_core.config.options import check_hyperparameters
from offload_core.errors import ConfigError
from offload_core.rules.adam import AdamHyper

_REFUSED = {
    "amsgrad": "there is no third moment",
    "maximize": "negate the loss",
    "capturable": "the update runs on the host, outside CUDA graphs",
    "differentiable": "the update runs outside autograd",
}
_OPTIONS = {**dict.fromkeys(_REFUSED, False), "foreach": None, "fused": True}
"""What else is in the groups of ``torch.optim.AdamW``, as this optimizer would be one; the last two choose among
torch's implementations, and so nothing here."""


def number(name: str, value: Any) -> Any:
    """A hyper-parameter as a Python number where it is a tensor of one element; else as it is.

    Raises:
        ConfigError: a tensor of more or fewer elements.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() != 1:
        raise ConfigError(f"{name}: got a tensor of {value.numel()} elements, expected one element")
    return value.item()


def numbers(name: str, value: Any) -> Any:
    """As :func:`number`, of a pair."""
    return tuple(number(f"{name}[{i}]", x) for i, x in enumerate(value)) if isinstance(value, tuple | list) else value


def without_torchs_options(options: dict[str, Any]) -> dict[str, Any]:
    """The keywords that are left when those of ``torch.optim.AdamW`` that mean nothing here are taken out.

    Raises:
        ConfigError: one of them asks for what this optimizer does not do.
    """
    _refuse("", options)
    return {name: value for name, value in options.items() if name not in _OPTIONS}


def torchs_options(adam_mode: str) -> dict[str, Any]:
    """What torch's own optimizer would have in its groups besides numbers, so that it takes over from this one."""
    return {**_OPTIONS, "decoupled_weight_decay": adam_mode == "adamw"}


_check_once = lru_cache(maxsize=1024)(check_hyperparameters)
"""The same check, made once for equal values: a step repeats it for values that rarely change."""


def hyper_of(g: int, group: Mapping[str, Any]) -> AdamHyper:
    """The hyper-parameters of group ``g``, checked.

    Raises:
        ConfigError: a value is out of range, or asks for what this optimizer does not do.
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


def loaded(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A group of a state dict, with what an older one has not.

    Like torch's own classes this one keeps its way to decay weights, whatever class the states are of.
    """
    return {**defaults, **group, "decoupled_weight_decay": defaults["decoupled_weight_decay"]}
