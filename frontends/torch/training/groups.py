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
    """The keywords without those options of torch's own optimizers that have no effect here.

    Raises:
        ConfigError: one of them asks for something that this optimizer does not do.
    """
    _refuse("", options)
    return {name: value for name, value in options.items() if name not in OPTIONS}


def defaults_of(config: OffloadConfig) -> dict[str, Any]:
    """Return the default values of a parameter group: hyperparameters, and the options that torch's own optimizer needs
    to continue from this one's state."""
    values = config.values(0)
    words = WORDS[config.optimizer]
    return {**{name: values[name] for name in NAMES[config.optimizer]}, **words.options, **words.kind(config)}


def with_own_defaults(where: str, group: Mapping[str, Any], optimizer: str) -> dict[str, Any]:
    """A parameter group with the defaults of its own optimizer, if that is another one than ``optimizer``.

    Raises:
        ConfigError: there is no such optimizer, or a hyperparameter has a wrong name.
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
    """Parameters or groups as a list; None if they are all of a model's that require a gradient, in no groups.

    Raises:
        ParameterError: there are none, or one is not the model's.
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
    """Parameters or groups, as torch's optimizers take them, with the names that they have in the model; True if some
    came with names.

    Raises:
        ParameterError: one is not the model's.
    """
    if not isinstance(params, Iterable):
        raise ParameterError(f"params: got {kind_of(params)}, expected parameters or groups")
    names = names_in(model)
    listed = [_listed(entry) for entry in params]
    return [_named(names, entry) for entry in listed], any(map(_has_names, listed))


def _listed(entry: Any) -> Any:
    """An entry that can be read twice."""
    if not isinstance(entry, dict):
        return entry
    params = entry["params"]
    return {**entry, "params": [params] if isinstance(params, torch.Tensor) else list(params)}


def _has_names(entry: Any) -> bool:
    if isinstance(entry, dict):
        return "param_names" in entry or any(map(_has_names, entry["params"]))
    return isinstance(entry, tuple)


def without_names(params: Iterable[Any]) -> tuple[list[Any], dict[torch.Tensor, str]]:
    """Parameters or groups as torch's optimizers take them without names, and the names."""
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
    """The names of a model's parameters."""
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
    """The hyperparameters of group ``g``, checked.

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
    """The hyperparameters of each group, checked, for the update that follows ``updates`` others. Those that are
    functions of the number of updates are written to the groups first.

    Args:
        note: called before, with these values by name. Not for a schedule that knows groups: that is DeepSpeed's, whose
            schedulers write to groups, too.

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
    """The values of those hyperparameters that are functions, for the update that follows ``updates`` others."""
    names = [name for name in ("lr", "betas") if callable(getattr(config, name))]
    if not names:
        return {}
    lr, betas = config.hyperparameters(updates)
    return {name: {"lr": lr, "betas": betas}[name] for name in names}


def under_schedules(config: OffloadConfig, group: dict[str, Any]) -> dict[str, Any]:
    """A group that is to be added, without values that a schedule sets. A schedule that knows groups has the group's
    own rate as ``initial_lr``.

    Raises:
        ConfigError: the group has a value of its own, and a schedule sets that of all groups.
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
    """The number of each parameter's group."""
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


def checked_values(g: int, group: Mapping[str, Any], saved: Any, optimizer: str) -> dict[str, Any]:
    """The values of a saved group, as group ``g`` can take them.

    Raises:
        ConfigError: a value is out of range, or asks for something that this optimizer does not do.
        TypeError, ValueError: it is no group of values.
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
    """Return the hyperparameters of a saved group that differ from the group's: each name with the two values.

    Of a rate that a scheduler of torch's changes, the values that it began with are compared. A rate that is no longer
    the one that its optimizer began with, because a loop or ``ReduceLROnPlateau`` has set it, is not compared, nor are
    values that a function gives, or a scheduler of momenta.

    Args:
        firsts: the rates that this optimizer and the saved one began with.
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
    """True if two values are equal, or as far apart as a tensor of float32 and the number that it was made of."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6)
    return bool(one == other)


def check_unwritten(written: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> None:
    """Raise :class:`ConfigError` if other code has set a value that a function gives.

    Args:
        written: groups, each with the values that may be in it, by name.
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
    """Give each group its values. A number that is a tensor stays that tensor: schedulers may hold it."""
    for group, saved in zip(groups, values, strict=False):
        for key, value in saved.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = value


def loaded(group: Mapping[str, Any], defaults: Mapping[str, Any], config: OffloadConfig) -> dict[str, Any]:
    """A group of a state dict, with defaults for options that an older one lacks. Its kind stays this optimizer's own,
    as in torch, whichever class saved the states."""
    return {**defaults, **group, **WORDS[config.optimizer].kind(config)}
