"""Each update rule in torch's words: the optimizer that torch has of it, and what its groups and states have there."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from offload_core.config.options import OffloadConfig, names_of
from offload_core.rules import MASTER, RULES, Rule

REFUSED = {
    "amsgrad": "there is no third moment",
    "maximize": "negate the loss",
    "capturable": "the update runs on the host, outside CUDA graphs",
    "differentiable": "the update runs outside autograd",
}
"""Options of torch's optimizers that this one does not have, with the reason."""
_EVERY = {"maximize": False, "differentiable": False, "foreach": None, "fused": None}
"""Options of torch's optimizers that have a fused implementation, with torch's own defaults: torch's SGD and Adagrad
refuse ``fused=True`` over DTensors. The last two have no effect here."""


@dataclass(frozen=True)
class TorchWords:
    """A rule in torch's words."""

    optimizer: Callable[[OffloadConfig], type[torch.optim.Optimizer]] | None
    """Return torch's own optimizer of this rule. None: torch has none."""
    options: Mapping[str, Any] = field(default_factory=lambda: _EVERY)
    """The options in its groups that are no hyperparameters here, with the values that match this optimizer."""
    kind: Callable[[OffloadConfig], Mapping[str, Any]] = lambda _: {}
    """Return the entries of its groups that say which of torch's classes has made them."""
    counted_by: str | None = None
    """The state without which a parameter has had no update, if torch's optimizer (or the one that its users take)
    keeps no count. At most a parameter's first update differs from the others then. None: torch counts.

    Torch's tools load each state that they find in an entry, and add no other. So an entry lists ``step`` only where
    torch counts; else it may be read and assigned by name, and ``state_dict()`` has it beside the entries."""
    hidden: tuple[str, ...] = ()
    """Hyperparameters that torch's optimizer lacks."""


WORDS: dict[str, TorchWords] = {
    "adamw": TorchWords(
        lambda config: torch.optim.AdamW if config.adam_mode == "adamw" else torch.optim.Adam,
        {**dict.fromkeys(REFUSED, False), "foreach": None, "fused": True},
        lambda config: {"decoupled_weight_decay": config.adam_mode == "adamw"},
        hidden=("eps_root",),
    ),
    "sgd": TorchWords(lambda _: torch.optim.SGD, counted_by="momentum_buffer"),
    "lion": TorchWords(None, counted_by="exp_avg"),
    "adagrad": TorchWords(lambda _: torch.optim.Adagrad),
    "muon": TorchWords(lambda _: torch.optim.Muon, {}, counted_by="momentum_buffer"),
}
"""By the value of ``OffloadConfig.optimizer``."""
NAMES = {
    name: tuple(field for field in names_of(rule) if field not in WORDS[name].hidden) for name, rule in RULES.items()
}
"""The hyperparameters in torch's groups, by optimizer."""
OPTIONS = frozenset(option for words in WORDS.values() for option in words.options)
"""The options of all optimizers that are no hyperparameters here."""


def counted(entry: Mapping[str, Any], rule: Rule) -> Mapping[str, Any]:
    """Return a parameter's states with a number of updates: 1 where there have been some that nobody counted. Of SGD
    without momentum a master weight says so.

    A state that is an empty dict is left out: that is how torch's tools say that a flattened checkpoint lacks it.
    """
    entry = {name: value for name, value in entry.items() if not (isinstance(value, dict) and not value)}
    first = WORDS[rule.name].counted_by
    if "step" in entry or first is None:
        return entry
    said = first if first in rule.state_names else MASTER
    return {**entry, "step": 1.0} if entry.get(said) is not None or entry.get(first) is not None else {}
