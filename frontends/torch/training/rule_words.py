"""Each update rule in torch's words: torch's own optimizer for the rule, and the entries of that optimizer's groups and
states."""

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
"""Options of torch's optimizers that must be False here, with the reason."""
_EVERY = {"maximize": False, "differentiable": False, "foreach": None, "fused": None}
"""Options of those optimizers of torch's that have a fused implementation, with torch's own defaults. ``fused`` is not
True, because torch's SGD and Adagrad refuse ``fused=True`` over DTensors. ``foreach`` and ``fused`` have no effect
here."""


@dataclass(frozen=True)
class TorchWords:
    """One update rule in torch's words."""

    optimizer: Callable[[OffloadConfig], type[torch.optim.Optimizer]] | None
    """Returns torch's own optimizer class for this rule. None: torch has none."""
    options: Mapping[str, Any] = field(default_factory=lambda: _EVERY)
    """The options in the groups of torch's optimizer that are no hyperparameters here, with the values that match this
    optimizer."""
    kind: Callable[[OffloadConfig], Mapping[str, Any]] = lambda _: {}
    """Returns the group entries by which torch tells which of its classes has made a group."""
    counted_by: str | None = None
    """For a rule whose optimizer in torch (or in the library that its users take) keeps no ``step``: a state that a
    parameter has only after its first update. This says enough, because at most a parameter's first update differs from
    later ones. None: torch's optimizer keeps ``step``.

    Torch's tools load each state that they find in an entry, and add no other. So an entry lists ``step`` only if
    torch's optimizer keeps it. Otherwise ``step`` can be read and assigned by name, and ``state_dict()`` has it beside
    the entries.
    """
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
"""Maps a value of ``OffloadConfig.optimizer`` to its rule in torch's words."""
NAMES = {
    name: tuple(field for field in names_of(rule) if field not in WORDS[name].hidden) for name, rule in RULES.items()
}
"""Maps an optimizer's name to its hyperparameters in torch's groups."""
OPTIONS = frozenset(option for words in WORDS.values() for option in words.options)
"""The options of all optimizers that are no hyperparameters here."""


def counted(entry: Mapping[str, Any], rule: Rule) -> Mapping[str, Any]:
    """Return a parameter's states with ``step``, the number of its updates.

    If ``step`` is missing, it becomes 1 if the entry has the state that ``TorchWords.counted_by`` names, or, for SGD
    without momentum, a master weight. Otherwise the parameter had no update, and the result is empty. A state that is
    an empty dict is left out, because torch's tools write one for a state that a flattened checkpoint lacks.
    """
    entry = {name: value for name, value in entry.items() if not (isinstance(value, dict) and not value)}
    first = WORDS[rule.name].counted_by
    if "step" in entry or first is None:
        return entry
    said = first if first in rule.state_names else MASTER
    return {**entry, "step": 1.0} if entry.get(said) is not None or entry.get(first) is not None else {}
