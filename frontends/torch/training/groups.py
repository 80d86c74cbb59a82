"""Torch's parameter groups: their hyper-parameters and other options."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from offload_core.config.options import OffloadConfig, check_group_keys
from offload_core.config.schedules import GroupSchedule
from offload_core.config.settings import SettingsButLr
from offload_core.errors import ConfigError, ParameterError
from offload_core.rules import RULES, Hyper
from offload_core.support.checks import choice, kind_of, shown

from .rule_words import NAMES, OPTIONS, REFUSED, WORDS


class OptimizerSettings(SettingsButLr, total=False):
    """The keywords of an optimizer beside ``lr``: settings, and the options of torch's own optimizer."""

    amsgrad: bool
    maximize: bool
    capturable: bool
    differentiable: bool
    foreach: bool | None
    fused: bool | None


def number(name: str, value: Any) -> Any:
    """Return the Python number in a tensor of one element. Return any other value unchanged.

    Raises:
        ConfigError: the tensor has more or fewer elements.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() != 1:
        raise ConfigError(f"{name}: got a tensor of {value.numel()} elements, expected one element")
    return value.item()


def numbers(name: str, value: Any) -> Any:
    """Apply :func:`number` to each element of a tuple or list. Return any other value unchanged."""
    return tuple(number(f"{name}[{i}]", x) for i, x in enumerate(value)) if isinstance(value, tuple | list) else value


def without_torchs_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords without the options of torch's own optimizers, which have no effect here.

    Raises:
        ConfigError: an option asks for something that this optimizer does not do.
    """
    _refuse("", options)
    return {name: value for name, value in options.items() if name not in OPTIONS}


def defaults_of(config: OffloadConfig) -> dict[str, Any]:
    """Return the default values of a parameter group: hyperparameters, and the options that torch's own optimizer needs
    to continue from this optimizer's state."""
    values = config.values(0)
    words = WORDS[config.optimizer]
    return {**{name: values[name] for name in NAMES[config.optimizer]}, **words.options, **words.kind(config)}


def with_own_defaults(where: str, group: Mapping[str, Any], optimizer: str) -> dict[str, Any]:
    """Return a parameter group. If it names another optimizer than ``optimizer``, it gets the defaults of that
    optimizer.

    Raises:
        ConfigError: the optimizer that the group names does not exist, or a hyperparameter has a wrong name.
    """
    name = _checked_name(where, group.get("optimizer", optimizer))
    check_group_keys(where, group, NAMES[name])
    if name == optimizer:
        for other, names in NAMES.items():
            for key in names:
                if key in group and key not in NAMES[name]:
                    raise ConfigError(
                        f"{where}: {key!r} is a hyperparameter of optimizer={other!r}; expected 'optimizer': {other!r} "
                        "beside it"
                    )
        return dict(group)
    defaults = RULES[name].hyper()
    own = {field: getattr(defaults, field) for field in NAMES[name] if field != "lr"}
    return {**own, **WORDS[name].options, **group}


def _checked_name(where: str, optimizer: Any) -> str:
    try:
        choice("optimizer", optimizer, RULES)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return str(optimizer)


def all_or_given(model: nn.Module, params: Iterable[Any] | None) -> list[Any] | None:
    """Return parameters or groups as a list. Return None if ``params`` is None, or has no groups and includes all
    parameters of the model that require a gradient.

    Raises:
        ParameterError: ``params`` is empty, or a parameter is not the model's.
    """
    if params is not None and not isinstance(params, Iterable):
        raise ParameterError(f"params: got {kind_of(params)}, expected parameters or groups")
    listed = None if params is None else [*params]
    if listed is not None and not listed:
        raise ParameterError("params: got none, expected at least one parameter (an iterator that was used is empty)")
    if listed is not None:
        in_model(model, listed)
    if listed is None or any(not isinstance(each, torch.Tensor) for each in listed):
        return listed
    asked, own = {*listed}, {*model.parameters()}
    return None if asked <= own and all(param in asked for param in own if param.requires_grad) else listed


def in_model(model: nn.Module, params: Iterable[Any]) -> tuple[list[Any], bool]:
    """Return parameters or groups with the names that the parameters have in the model, as torch's optimizers take
    them. Also return True if some were given with names.

    Raises:
        ParameterError: a parameter is not the model's.
    """
    if not isinstance(params, Iterable):
        raise ParameterError(f"params: got {kind_of(params)}, expected parameters or groups")
    names = names_in(model)
    listed = [_listed(entry) for entry in params]
    return [_named(names, entry) for entry in listed], any(map(_has_names, listed))


def _listed(entry: Any) -> Any:
    """Return a parameter, or a group whose parameters can be iterated more than once."""
    if not isinstance(entry, dict):
        return entry
    params = entry["params"]
    return {**entry, "params": [params] if isinstance(params, torch.Tensor) else list(params)}


def _has_names(entry: Any) -> bool:
    if isinstance(entry, dict):
        return "param_names" in entry or any(map(_has_names, entry["params"]))
    return isinstance(entry, tuple)


def without_names(params: Iterable[Any]) -> tuple[list[Any], dict[torch.Tensor, str]]:
    """Return parameters or groups without names, as torch's optimizers take them, and the names by parameter."""
    bare: list[Any] = []
    names: dict[torch.Tensor, str] = {}
    for entry in params:
        if isinstance(entry, dict):
            inside, of_group = without_names(entry["params"])
            names |= of_group
            bare.append({**entry, "params": inside})
        else:
            name, param = entry
            names[param] = name
            bare.append(param)
    return bare, names


def names_in(model: nn.Module) -> dict[torch.Tensor, str]:
    """Return the name of each parameter of a model."""
    return {param: name for name, param in model.named_parameters()}


def _named(names: Mapping[torch.Tensor, str], entry: Any) -> Any:
    if isinstance(entry, dict):
        return {**entry, "params": [_named(names, param) for param in entry["params"]]}
    param = entry[1] if isinstance(entry, tuple) else entry
    if not isinstance(param, torch.Tensor):
        raise ParameterError(f"params: got {kind_of(param)}, expected parameters of the model, or groups of them")
    if param not in names:
        raise ParameterError(
            f"params: a tensor of shape {tuple(param.shape)} is no parameter of the model, which would not be trained; "
            "expected parameters of the model that is wrapped (is this another model's, or from before a copy?)"
        )
    return names[param], param


def hyper_of(g: int, group: Mapping[str, Any], optimizer: str) -> Hyper:
    """Check and return the hyperparameters of group ``g``.

    Args:
        optimizer: the optimizer of a group that names none.

    Raises:
        ConfigError: a value is out of range, or asks for something that this optimizer does not do.
    """
    where, name = f"parameter group {g}", group.get("optimizer", optimizer)
    names = NAMES[name if isinstance(name, str) and name in NAMES else _checked_name(where, name)]
    if lacks := [field for field in names if field not in group]:
        raise ConfigError(f"{where}: there is no {lacks[0]!r}, expected the hyperparameters of optimizer={name!r}")
    values = [group[field] for field in names]
    if _are_plain(values):
        hyper = _checked_once(where, name, *values)
    else:
        fields = zip(NAMES[name], values, strict=True)
        hyper = _checked(where, name, *[_plain(f"{where}: {field}", value) for field, value in fields])
    _refuse(f"{where}: ", group)
    return hyper


def hypers_of(
    groups: Sequence[dict[str, Any]],
    config: OffloadConfig,
    updates: int,
    note: Callable[[dict[str, Any]], object] = lambda values: None,
) -> list[Hyper]:
    """Check and return the hyperparameters of each group for the next update. Hyperparameters that are functions of the
    number of updates are first evaluated and written to the groups.

    Args:
        updates: the number of updates made so far.
        note: called with the functions' values, by name, before they are written. Not called for a
            :class:`GroupSchedule`, which is DeepSpeed's: DeepSpeed's schedulers write to groups, too.

    Raises:
        ConfigError: as :func:`hyper_of`.
    """
    values, hypers = scheduled(config, updates), []
    knows_groups = bool(values) and isinstance(config.lr, GroupSchedule)
    if values and not knows_groups:
        note(values)
    for g, group in enumerate(groups):
        group.update(values)
        if knows_groups and "initial_lr" in group:
            group["lr"], _ = config.hyperparameters(updates, group["initial_lr"])
        hypers.append(hyper_of(g, group, config.optimizer))
    return hypers


def scheduled(config: OffloadConfig, updates: int) -> dict[str, Any]:
    """Return the values of the hyperparameters that are functions, by name, for the update after ``updates``
    updates."""
    names = [name for name in ("lr", "betas") if callable(getattr(config, name))]
    if not names:
        return {}
    lr, betas = config.hyperparameters(updates)
    return {name: {"lr": lr, "betas": betas}[name] for name in names}


def under_schedules(config: OffloadConfig, group: dict[str, Any]) -> dict[str, Any]:
    """Return a new group without the values that a schedule sets. Under a :class:`GroupSchedule`, the new group's
    ``lr`` becomes its ``initial_lr``.

    Raises:
        ConfigError: the group has a value that a function sets for all groups.
    """
    names = [name for name in ("lr", "betas") if callable(getattr(config, name))]
    if isinstance(config.lr, GroupSchedule):
        own = {name: value for name, value in group.items() if name not in names}
        return own | ({"initial_lr": number("lr", group["lr"])} if "lr" in group else {})
    for name in names:
        if name in group:
            raise ConfigError(
                f"{name}={group[name]!r} of a parameter group, and {name} is a function, which sets that of all "
                "groups; expected one of them (torch.optim.lr_scheduler knows groups)"
            )
    return group


def groups_of_params(groups: Sequence[Mapping[str, Any]]) -> dict[torch.Tensor, int]:
    """Return the index of each parameter's group."""
    return {param: g for g, group in enumerate(groups) for param in group["params"]}


_PLAIN = frozenset((float, int, bool, str, type(None)))


def _are_plain(values: Iterable[Any]) -> bool:
    return all(
        type(value) in _PLAIN or (type(value) is tuple and {type(x) for x in value} <= {float, int}) for value in values
    )


def _plain(name: str, value: Any) -> Any:
    return numbers(name, value) if isinstance(value, tuple | list) else number(name, value)


def _checked(where: str, optimizer: str, *values: Any) -> Hyper:
    rule = RULES[optimizer]
    given = dict(zip(NAMES[optimizer], values, strict=True))
    try:
        rule.hyper(**given).check()
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    hyper: Hyper = rule.hyper(**{name: _as_float(value) for name, value in given.items()})
    return hyper


def _as_float(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(map(float, value))
    return value if value is None or isinstance(value, bool | str) else float(value)


_checked_once = lru_cache(maxsize=1024, typed=True)(_checked)
"""As :func:`_checked`, but equal values are checked once: every step asks for them, and they rarely change."""


def _refuse(where: str, options: Mapping[str, Any]) -> None:
    for name, why in REFUSED.items():
        if options.get(name):
            raise ConfigError(f"{where}{name}={options[name]!r} is not supported; expected False ({why})")


def paired(theirs: Mapping[str, int], mine: Mapping[str, int], n_groups: int) -> list[int]:
    """Return, for each of this optimizer's groups, the index of the checkpoint's group with the same parameters.

    Groups without a parameter in the checkpoint get the checkpoint's other groups, in order.

    Args:
        theirs: maps a parameter's name in the checkpoint to the index of its group there.
        mine: maps a parameter's name in the checkpoint to the index of its group in this optimizer.

    Raises:
        ConfigError: two parameters are in one group in the checkpoint and in two groups here, or the other way round.
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


def checked_values(g: int, group: Mapping[str, Any], saved: Any, optimizer: str) -> dict[str, Any]:
    """Check the values of a saved group, and return them. If group ``g`` has a tensor for a value, the value is
    returned as a float.

    Raises:
        ConfigError: a value is out of range, or asks for something that this optimizer does not do.
        TypeError, ValueError: ``saved`` is no group of values.
    """
    if not isinstance(saved, dict) or not saved.keys().isdisjoint(("params", "param_names")):
        raise TypeError(f"parameter group {g}: got {shown(saved)}, expected values by name")
    hyper_of(g, {**group, **saved}, optimizer)
    return {
        key: float(number(key, value)) if isinstance(group.get(key), torch.Tensor) else value
        for key, value in saved.items()
    }


def differing(
    group: Mapping[str, Any], saved: Mapping[str, Any], config: OffloadConfig, firsts: Sequence[Any]
) -> list[tuple[str, Any, Any]]:
    """Return the hyperparameters whose values differ between a saved group and ``group``, as ``(name, saved value,
    group's value)``.

    If one of torch's schedulers changes a rate, the rates before the scheduler (``initial_lr``) are compared. A rate is
    not compared if a loop or ``ReduceLROnPlateau`` has set it to another value than its optimizer began with. Values
    that a function or a scheduler of momenta gives are not compared either.

    Args:
        firsts: the rate that this optimizer began with, and the rate that the saved optimizer began with.
    """
    names = {*NAMES.get(group.get("optimizer", config.optimizer), ())} - {*scheduled(config, 0)}
    if {"base_momentum", "max_momentum"} & saved.keys():
        names -= {"betas", "momentum"}
    values = [{**each, "lr": each.get("initial_lr", each.get("lr"))} for each in (group, saved)]
    mine, theirs = ({name: numbers(name, number(name, each.get(name))) for name in names} for each in values)
    for each, found, first in zip((group, saved), (mine, theirs), firsts, strict=True):
        if "initial_lr" not in each and isinstance(first, float | int) and found.get("lr") != first:
            names.discard("lr")
    return [
        (name, theirs[name], mine[name])
        for name in sorted(names)
        if name in saved and not _are_close(theirs[name], mine[name])
    ]


def _are_close(one: Any, other: Any) -> bool:
    """True if two values are equal, or differ by no more than a float and its rounding to float32."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6)
    return bool(one == other)


def check_unwritten(written: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> None:
    """Raise :class:`ConfigError` if other code has set a value that a function gives.

    Args:
        written: groups, each with the allowed values of each hyperparameter, by name.
    """
    for g, (group, values) in enumerate(written):
        for name, value in values.items():
            if group.get(name) not in value:
                raise ConfigError(
                    f"parameter group {g}: {name}={group.get(name)!r} was set, by a scheduler or by hand, and {name} "
                    f"is a function, which sets that of all groups (here {value[-1]!r}); expected one of them: "
                    f"{name}=a number in wrap() beside a scheduler, or the function alone"
                )


def set_values(groups: Sequence[dict[str, Any]], values: Sequence[Mapping[str, Any]]) -> None:
    """Write each group's values to the group. A tensor in the group is filled in place, because schedulers may hold
    it."""
    for group, saved in zip(groups, values, strict=False):
        for key, value in saved.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = value


def loaded(group: Mapping[str, Any], defaults: Mapping[str, Any], config: OffloadConfig) -> dict[str, Any]:
    """Return a group of a state dict, with ``defaults`` for options that older state dicts lack. The entries of
    ``TorchWords.kind`` stay this optimizer's own, as in torch, whichever class saved the states."""
    return {**defaults, **group, **WORDS[config.optimizer].kind(config)}
