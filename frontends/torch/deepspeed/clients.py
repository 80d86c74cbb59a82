"""Another library's optimizer: the rule of its name takes over its groups, hyperparameters and states."""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from offload_core.config.options import names_of
from offload_core.errors import ConfigError, ConfigWarning, StateError
from offload_core.rules import RULES
from offload_core.support.user_line import UserLine

from ..optim.optimizer import OffloadedOptimizer
from ..training.rule_words import NAMES, OPTIONS, REFUSED

_RULES = {
    **dict.fromkeys(("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam"), "adamw"),
    "SGD": "sgd",
    **dict.fromkeys(("Lion", "DeepSpeedCPULion", "FusedLion"), "lion"),
    **dict.fromkeys(("Adagrad", "DeepSpeedCPUAdagrad"), "adagrad"),
    "Muon": "muon",
}
"""The rule of each class of the libraries below."""
_LIBRARIES = ("torch.optim", "deepspeed.ops", "apex.optimizers", "lion_pytorch")
_L2 = {"Adam": False, "AdamW": True}
"""Whether weight decay is decoupled where the optimizer does not say so."""
_NOT_TAKEN = {**REFUSED, "centered": "there is no RMSprop"}


@dataclass(frozen=True)
class Client:
    """Hyperparameters, groups and states of a client's optimizer, for an engine to take over."""

    fields: dict[str, Any]
    """Fields of ``OffloadConfig``: the rule and its hyperparameters."""
    groups: list[dict[str, Any]]
    states: dict[str, Any] | None
    """A ``state_dict`` of states that it already has; None: it has none."""

    @classmethod
    def of(cls, optimizer: Any) -> "Client":
        """Return what a client's optimizer says.

        Raises:
            ConfigError: it is of no rule of ours, or has an option that the rule lacks.
        """
        if isinstance(optimizer, OffloadedOptimizer):
            rule, decoupled = optimizer.rule_name, optimizer.config.adam_mode == "adamw"
            formats = {"state_format": optimizer.config.state_format}
        else:
            rule, decoupled, formats = *_rule_of(optimizer), {}
        for g, group in enumerate(optimizer.param_groups):
            _check(type(optimizer).__name__, g, group)
        names = names_of(RULES[rule])
        fields: dict[str, Any] = {"optimizer": rule, **formats}
        fields |= {name: value for name, value in optimizer.defaults.items() if name in names and value is not None}
        fields["lr"] = float(optimizer.defaults.get("lr", optimizer.param_groups[0]["lr"]))
        if rule == "adamw":
            fields["adam_mode"] = "adamw" if decoupled else "adam"
        groups = [_own(rule, group) for group in optimizer.param_groups]
        return cls(fields, groups, optimizer.state_dict() if any(optimizer.state.values()) else None)

    def load(self, engines: OffloadedOptimizer) -> None:
        """Give the engine's optimizer the states."""
        if self.states is not None:
            engines.load_state_dict(self.states)


def release_client(optimizer: Any, engines: OffloadedOptimizer) -> None:
    """Free a client's optimizer of its states, and have its schedulers write to the groups of the engine's.

    Call it last, when nothing can fail any more on any rank: until then the client's optimizer is whole.
    """
    if isinstance(optimizer, OffloadedOptimizer):
        return
    optimizer.state.clear()
    _follow(optimizer, engines)
    UserLine.now().warn(
        ConfigWarning(
            f"{type(optimizer).__name__}: {type(engines).__name__} has taken over its groups, hyperparameters and "
            "states, and makes the updates; expected engine.step(), and no step() of the former"
        )
    )


def _follow(optimizer: Any, engines: OffloadedOptimizer) -> None:
    """Have a client's optimizer show the groups of the engine's, and refuse what only the engine's can do."""
    engines_name = type(engines).__name__

    def refused(name: str) -> Any:
        def call(*_: Any, **__: Any) -> None:
            raise StateError(
                f"{kind.__name__}.{name}(): {engines_name} has taken over its groups and states; expected "
                f"{'engine.step()' if name == 'step' else f'engine.optimizer.{name}()'}"
            )

        call._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # torch's schedulers warn where it is missing
        return call

    def groups(_: Any) -> Any:
        engines = alive()
        return last if engines is None else engines.param_groups

    kind = type(optimizer)
    # its load_state_dict replaces the list, so that one alone does not do; and a client keeps no engine alive
    alive, last = weakref.ref(engines), engines.param_groups
    body: dict[str, Any] = {name: refused(name) for name in ("step", "add_param_group", "load_state_dict")}
    body["param_groups"] = property(groups, lambda _, new: None)
    optimizer.__dict__.pop("step", None)  # a scheduler's wrapper of the former step
    optimizer.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **body})
    optimizer._opt_called = True  # torch's schedulers warn if the optimizer that they were given makes no step


def _rule_of(optimizer: Any) -> tuple[str, bool]:
    """Return the rule of an optimizer of these libraries, and whether its weight decay is decoupled."""
    kind = type(optimizer)
    rule = _RULES.get(kind.__name__) if kind.__module__.startswith(_LIBRARIES) else None
    if rule is None:
        raise ConfigError(
            f"optimizer: got a {kind.__module__}.{kind.__name__}, of which there is no rule here; expected AdamW, "
            "Adam, SGD, Lion, Adagrad or Muon of torch.optim or deepspeed.ops, or an `optimizer` section"
        )
    for name in ("adam_w_mode", "adamw_mode"):
        if hasattr(optimizer, name):
            return rule, bool(getattr(optimizer, name))
    default = _L2.get(kind.__name__, True)
    of_groups = {bool(group.get("decoupled_weight_decay", default)) for group in optimizer.param_groups}
    if len(of_groups) > 1:
        raise ConfigError(
            f"optimizer: {kind.__name__} with decoupled_weight_decay=True in one group and False in another; expected "
            "one of them for all"
        )
    return rule, of_groups.pop()


def _check(kind: str, g: int, group: Mapping[str, Any]) -> None:
    for name, why in _NOT_TAKEN.items():
        if group.get(name):
            raise ConfigError(f"optimizer: {kind} with {name}={group[name]!r} in group {g}: {why}; expected it without")
    if not group.get("bias_correction", True):
        raise ConfigError(f"optimizer: {kind} with bias_correction=False in group {g}; expected True")


def _own(rule: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group with the hyperparameters of its rule and keys of the user's own."""
    others = {"decoupled_weight_decay", "bias_correction", *OPTIONS, *(n for names in NAMES.values() for n in names)}
    return {
        name: float(value) if name == "lr" and isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name in NAMES[rule] or name not in others
    }


class Inner:
    """The optimizer inside an optimizer, for programs that look for one: the same one, which has none inside."""

    def __init__(self, optimizer: OffloadedOptimizer) -> None:
        self._outer = weakref.ref(optimizer)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer" or name.startswith("__") or (outer := self._outer()) is None:
            raise AttributeError(name)
        return getattr(outer, name)
