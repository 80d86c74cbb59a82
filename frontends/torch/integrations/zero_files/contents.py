"""The content of a DeepSpeed checkpoint, by the names of parameters."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offload_core.errors import CheckpointError
from offload_core.layout.regions import Region, common
from offload_core.support.checks import shown

from ...params.tensors import memory
from .pickles import REMEDY, as_zero_lays_out, entry_of, has_values, is_float, kind_of, some

_STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer", "sum")
"""The states that an update rule of ours has."""
_OTHER_RULES = {"lamb": "lamb", "onebitlamb": "lamb", "onebitadam": "onebitadam", "zerooneadam": "zerooneadam"}
"""DeepSpeed's types that keep Adam's states, and are another rule."""


@dataclass(frozen=True)
class SavedTensor:
    """A tensor in a checkpoint, in parts."""

    shape: tuple[int, ...]
    file: Path
    """The file that holds it, or a part of it."""
    parts: Callable[[], list[tuple[int, torch.Tensor]]]
    """Return its elements as runs: the number of the first element, and a flat tensor."""

    def read(self) -> torch.Tensor:
        """The whole tensor, in its own element type."""
        parts = self.parts()
        whole = torch.cat([part for _, part in parts]) if parts else torch.empty(0, device="cpu")
        return whole.view(self.shape)

    def fill(self, region: Region, out: np.ndarray) -> None:
        """Copy a region's elements to an array of any floating-point type."""
        parts = self.parts()
        regions = [Region(self.shape, start, part.numel()) for start, part in parts]
        with np.errstate(all="ignore"):
            for i, at, to, numel in common(regions, region).tolist():
                np.copyto(out[to : to + numel], memory(parts[i][1][at : at + numel]), casting="unsafe")


def whole(tensor: torch.Tensor, path: Path) -> SavedTensor:
    return SavedTensor(tuple(tensor.shape), path, lambda: [(0, tensor.detach().contiguous().view(-1))])


@dataclass
class ZeroContents:
    """A checkpoint's content, by the names of parameters."""

    path: Path
    """The checkpoint's own folder."""
    described: dict[str, Any]
    """The file of the model, of rank 0."""
    trained: dict[str, SavedTensor] = field(default_factory=dict)
    """The fp32 weights of trained parameters."""
    others: dict[str, SavedTensor] = field(default_factory=dict)
    """Frozen parameters and buffers."""
    states: dict[str, dict[str, SavedTensor]] = field(default_factory=dict)
    """The states of trained parameters, by our names for them. Empty dicts: a parameter has had no update."""
    steps: dict[str, int] = field(default_factory=dict)
    """The number of updates that each trained parameter has had."""
    group_of: dict[str, int] = field(default_factory=dict)
    """The number of each trained parameter's group."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """The hyperparameters of each group, under torch's names."""
    rules: list[str | None] = field(default_factory=list)
    """The optimizer of each group, as ``OffloadConfig.optimizer`` names it; None: nothing tells."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Further names of tied weights, with the name under which they are saved."""
    unnamed: "Unnamed | None" = None
    """The optimizer of a run without ZeRO, until :meth:`Unnamed.named` has named its parameters."""
    read_states: Callable[[], None] = lambda: None
    """Fills ``states``, ``steps``, ``group_of``, ``groups`` and ``rules``, which are empty."""
    loss_scale: dict[str, Any] | None = None
    """DeepSpeed's numbers of the loss scale; None: there was none."""
    client_state: dict[str, Any] = field(default_factory=dict)

    def with_states(self) -> None:
        """Read the optimizer's states.

        Raises:
            CheckpointError: they are damaged, or no rule of ours has them.
        """
        for held in (self.states, self.steps, self.group_of, self.groups, self.rules):
            held.clear()
        with as_zero_lays_out(self.path):
            self.read_states()

    def count(self, key: str) -> int:
        """A count of the run's, such as ``global_steps``; 0 if it has none.

        Raises:
            CheckpointError: it is no count.
        """
        value = self.described.get(key)
        if value is not None and (type(value) is not int or value < 0):
            raise CheckpointError(f"{self.path}: {key} is {shown(value)}, expected a count; {REMEDY}")
        return value or 0

    @property
    def updates(self) -> int:
        """The updates that the run had made."""
        return max(self.count("global_steps") - self.count("skipped_steps"), 0)


@dataclass(frozen=True)
class Unnamed:
    """An optimizer's states as torch numbers them: by group, and in the order of its parameters."""

    file: Path
    optimizer: Mapping[str, Any]
    """``state`` and ``param_groups``."""
    masters: list[list[torch.Tensor]] | list[torch.Tensor] | None
    """Of each group the fp32 weights, or all in one flat tensor; None: the parameters are their own."""

    def named(self, contents: ZeroContents, names: Sequence[Sequence[str]]) -> None:
        """Give the states to these parameters, by group.

        Raises:
            CheckpointError: they are not of these parameters.
        """
        groups = groups_in(self.optimizer, self.file)
        sizes, here = [len(group["params"]) for group in groups], [len(group) for group in names]
        if sizes != here:
            raise CheckpointError(
                f"{self.file}: was saved without ZeRO, which numbers the parameters of its groups: {sizes}; expected "
                f"the same groups here, in the same order: there are {here}"
            )
        trained = {}
        for g, (group, of_group) in enumerate(zip(groups, names, strict=True)):
            at = 0
            for i, name in enumerate(of_group):
                model = contents.others.get(name)
                if model is None:
                    raise CheckpointError(f"{self.file}: has no {name!r}; expected a checkpoint of this model")
                numel = math.prod(model.shape)
                if self.masters is not None:
                    held = self.masters[g]
                    master = held[at : at + numel] if isinstance(held, torch.Tensor) else held[i].reshape(-1)
                    there = model.read()
                    if master.numel() != numel or not _equal(master.view(model.shape).to(there.dtype), there):
                        raise CheckpointError(
                            f"{self.file}: was saved without ZeRO, which numbers parameters, and number "
                            f"{group['params'][i]} is not {name!r}; expected the parameters in the same order here"
                        )
                    model = whole(master.view(model.shape), self.file)
                if not all(is_float(part) for _, part in model.parts()):
                    raise CheckpointError(f"{self.file}: {name!r} is of no floating-point type; {REMEDY}")
                at += numel
                trained[name] = model
        contents.trained = trained
        contents.others = {name: value for name, value in contents.others.items() if name not in trained}
        contents.unnamed = None
        contents.read_states = partial(self._read_states, contents, groups, names)

    def _read_states(
        self, contents: ZeroContents, groups: list[dict[str, Any]], names: Sequence[Sequence[str]]
    ) -> None:
        for g, (group, of_group) in enumerate(zip(groups, names, strict=True)):
            for number, name in zip(group["params"], of_group, strict=True):
                entry, shape = self.optimizer["state"].get(number, {}), contents.trained[name].shape
                states = states_in(entry, self.file)
                for state, tensor in states.items():
                    if not has_values(tensor) or tuple(tensor.shape) != shape or not is_float(tensor):
                        raise CheckpointError(
                            f"{self.file}: {state} of {name!r} has shape {list(tensor.shape)}, expected {list(shape)}; "
                            f"was it saved without ZeRO, with the parameters in another order?"
                        )
                contents.group_of[name] = g
                saved = {state: whole(tensor, self.file) for state, tensor in states.items()}
                add_states(contents, name, entry, group, saved)
        add_groups(contents, groups)


def _equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(x.nan_to_num(), y.nan_to_num())


# --- optimizers --------------------------------------------------------------------------------------


def groups_in(optimizer: Any, path: Path) -> list[dict[str, Any]]:
    """The parameter groups of an optimizer's state dict."""
    if not isinstance(optimizer, dict) or not isinstance(optimizer.get("state"), dict):
        raise CheckpointError(f"{path}: the optimizer's states are {kind_of(optimizer)}, expected a dict; {REMEDY}")
    groups = entry_of(optimizer, path, "param_groups", list)
    for group in groups:
        entry_of(group, path, "params", list)
    return list(groups)


def states_in(entry: Any, path: Path) -> dict[str, torch.Tensor]:
    """The tensors of one entry of an optimizer's states, by our names.

    Raises:
        CheckpointError: there are states that no rule of ours has.
    """
    if not isinstance(entry, dict):
        raise CheckpointError(f"{path}: an entry of the optimizer's states is {kind_of(entry)}; {REMEDY}")
    found = {key: value for key, value in entry.items() if isinstance(value, torch.Tensor) and key != "step"}
    unknown = [key for key in found if key not in _STATES]
    if unknown:
        raise CheckpointError(
            f"{path}: its optimizer keeps {some(unknown)}, which none of ours does (Adam without amsgrad, SGD, Lion, "
            "Adagrad, Muon); expected optimizer_states=False (load_deepspeed(), or load_optimizer_states=False)"
        )
    if found.keys() == {"exp_avg_sq"}:  # DeepSpeed's Adagrad
        return {"sum": found["exp_avg_sq"]}
    return found


def add_states(
    contents: ZeroContents,
    name: str,
    entry: Mapping[str, Any],
    group: Mapping[str, Any],
    found: dict[str, SavedTensor],
    step: Any = None,
) -> None:
    """Add a parameter's states, with the number of its updates.

    Args:
        step: the number that holds where neither the entry nor the group has one.
    """
    contents.states[name] = found
    counted = next((value for value in (entry.get("step"), group.get("step"), step) if value is not None), None)
    if counted is None:  # SGD and Muon count nothing
        counted = contents.updates if found or not group.get("momentum") else 0
    number = math.nan if isinstance(counted, str) else float(counted)
    if not 0 <= number < 2**53 or number != int(number):
        raise CheckpointError(f"{contents.path}: {name!r} has had {shown(counted)} updates, expected a count; {REMEDY}")
    contents.steps[name] = int(number)


def add_groups(contents: ZeroContents, groups: Sequence[Mapping[str, Any]]) -> None:
    """Add the groups' hyperparameters and rules. The parameters' states are known."""
    config = contents.described.get("ds_config")
    section = config.get("optimizer") if isinstance(config, dict) else None
    section = section if isinstance(section, dict) else {}
    kind, params = str(section.get("type", "")).lower(), section.get("params")
    decoupled = {"adamw": True, "adam": not isinstance(params, dict) or params.get("adam_w_mode", True)}.get(kind)
    for g, group in enumerate(groups):
        states = {state for name, i in contents.group_of.items() if i == g for state in contents.states[name]}
        rule = _OTHER_RULES.get(kind) or _rule_of(group, states)
        if rule == "lion":  # DeepSpeed's own for the CPU keeps a second moment, which it never uses
            for name in (name for name, i in contents.group_of.items() if i == g):
                contents.states[name].pop("exp_avg_sq", None)
        plain = {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
        if rule == "adamw" and decoupled is not None:
            plain = {"decoupled_weight_decay": decoupled, **plain}
        contents.groups.append({key: value for key, value in plain.items() if key != "params"})
        contents.rules.append(rule)


def _rule_of(group: Mapping[str, Any], states: set[str]) -> str | None:
    """The optimizer of a group with these states, as ``OffloadConfig.optimizer`` names it."""
    if group.get("use_muon") or "ns_steps" in group:
        return "muon"
    if "max_coeff" in group:
        return "lamb"
    if {"exp_avg", "exp_avg_sq"} == states and "betas" in group and "eps" not in group:
        return "lion"
    by_states = {
        ("exp_avg", "exp_avg_sq"): "adamw",
        ("exp_avg",): "lion",
        ("sum",): "adagrad",
        ("momentum_buffer",): "sgd",
    }
    found = by_states.get(tuple(sorted(states)))
    if found is None and "dampening" in group:
        return "sgd"
    return found
