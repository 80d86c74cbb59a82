"""State dicts of an optimizer: saved and loaded here, and exported for torch's own optimizers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from offload_core.device.protocols import Device
from offload_core.engine import Engine, LossScaler
from offload_core.errors import ConfigError, ConfigWarning, StateError
from offload_core.rules import MASTER, STATE_NAMES, Rule
from offload_core.support.checks import checked_count
from offload_core.support.user_line import UserLine

from ..training.components import Components
from ..training.groups import hyper_of, loaded, scheduled
from ..training.rule_words import WORDS
from ..training.state_views import STEP, Views

IN_SHARDS = "in_shards"
"""The key in a library's file of an optimizer; its value is the name of the folder that has the states."""
STEPS = "steps"
"""The key of a state dict that has the numbers of updates of parameters whose entries list none (torch's optimizer
counts none of them), by the parameters' numbers."""


def stub(folder: str) -> dict[str, Any]:
    """A state dict without states, which says where they are."""
    return {"state": {}, "param_groups": [], IN_SHARDS: folder}


@dataclass(frozen=True)
class Hidden:
    """Hides a state entry from ``Optimizer.load_state_dict``, which would cast bare tensors."""

    value: Any


def partition(device: Device) -> dict[str, int]:
    """The rank and world size that a state dict's parts belong to."""
    return {"rank": device.ranks[0], "world_size": device.world_size}


def check_partition(device: Device, groups: Iterable[Mapping[str, Any]], state_dict: Mapping[str, Any]) -> None:
    """Raise :class:`StateError` if the states are another rank's, or are parts of an unknown rank.

    Args:
        groups: the optimizer's parameter groups.
    """
    own, saved = partition(device), state_dict.get("partition")
    if saved is not None and saved != own:
        raise StateError(
            f"load_state_dict: the states of rank {saved['rank']} of {saved['world_size']}, expected those of rank "
            f"{own['rank']} of {own['world_size']}: each rank saves and loads its own"
        )
    if saved is not None or device.world_size == 1:
        return
    params = [param for group in groups for param in group["params"]]
    indices = [i for group in state_dict["param_groups"] for i in group["params"]]
    for param, i in zip(params, indices, strict=False):
        entry = state_dict["state"].get(i, {})
        value = next((entry[name] for name in STATE_NAMES if name in entry), None)
        if isinstance(value, torch.Tensor) and value.shape != param.shape:
            raise StateError(
                f"load_state_dict: states of a part of parameter {i}, {tuple(value.shape)} of {tuple(param.shape)}, "
                "and no 'partition' that says of which rank; expected this rank's state_dict() as it was, or whole "
                "states"
            )


def check_counts(state_dict: Mapping[str, Any], scaler: LossScaler | None) -> None:
    """Raise :class:`StateError` unless the number of updates and the loss scale, where they are given, can be taken."""
    try:
        if "updates" in state_dict:
            checked_count(state_dict["updates"])
        if scaler is not None and "loss_scale" in state_dict:
            LossScaler.checked(state_dict["loss_scale"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise StateError(
            f"load_state_dict: its number of updates or its loss scale cannot be taken ({error!r}); expected those of "
            "state_dict()"
        ) from None


def completed(state_dict: dict[str, Any], core: Engine) -> dict[str, Any]:
    """Return torch's state dict of an optimizer with plain tensors, and with the states that torch knows nothing of."""
    if "state" in state_dict:  # a hook may have replaced the whole dict
        entries = state_dict["state"]
        live = all(e.are_live for e in entries.values() if isinstance(e, Views))  # else they would be of two steps
        state_dict["state"] = {
            k: e.for_state_dict(live=live) if isinstance(e, Views) else e for k, e in entries.items()
        }
        steps = {k: int(e.unlisted[STEP]) for k, e in entries.items() if isinstance(e, Views) and e.unlisted}
        if steps:
            state_dict[STEPS] = steps
    if core.world_size > 1:
        state_dict["partition"] = partition(core.device)
    if scheduled(core.config, core.update_count):
        state_dict["updates"] = core.update_count
    scaler = core.scaler
    return state_dict if scaler is None else state_dict | {"loss_scale": scaler.state_dict()}


def checked_and_hidden(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict with hidden entries, if an optimizer can take it; the call to make after loading them is at
    the key ``Hidden``. A pre-hook of ``Optimizer.load_state_dict``.

    Raises:
        StateError: the states are another rank's, or a count is out of range; nothing has changed.
    """
    core: Engine = optimizer.core
    scaler, states = core.scaler, core.states
    check_partition(core.device, optimizer.param_groups, state_dict)
    check_counts(state_dict, scaler)

    entries = with_steps(state_dict["state"], state_dict.get(STEPS, {}))

    def take_counts() -> None:
        optimizer.updates = int(state_dict.get("updates", states.largest_step_count()))
        if scaler is not None and "loss_scale" in state_dict:
            scaler.load_state_dict(state_dict["loss_scale"])

    if "updates" not in state_dict and not any(STEP in entry for entry in entries.values()):
        _warn_of_schedule(core)
    groups = state_dict["param_groups"]
    if not optimizer.takes_names:  # an engine's, of before, or with names of the user's
        groups = [{name: value for name, value in group.items() if name != "param_names"} for group in groups]
    hidden: dict[Any, Any] = {key: Hidden(entry) for key, entry in entries.items()}
    return {**state_dict, "param_groups": groups, "state": hidden | {Hidden: take_counts}}


def _warn_of_schedule(core: Engine) -> None:
    """Warn if a schedule would go on from the first update, because the states count none."""
    names = scheduled(core.config, 0)
    if names:
        UserLine.now("torch").warn(
            ConfigWarning(
                f"load_state_dict: {' and '.join(names)} is a function of the number of updates, and these states have "
                "none (as those of torch.optim.SGD and Muon); it goes on as after the first update. Expected "
                "optimizer.updates = the number of updates made, after the load"
            )
        )


def with_steps(entries: Mapping[Any, Any], steps: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the entries of a state dict, with those numbers of updates that are beside them."""
    counted = {key: {STEP: n, **entries.get(key, {})} for key, n in steps.items() if key in entries}
    return {**entries, **counted}


@dataclass(frozen=True)
class LoadedState:
    """The argument of an optimizer's ``__setstate__``, hidden entries and others, in parts.

    Attributes:
        entries: states by parameter.
        others: entries of ``state`` that a user has added.
        rest: attributes beside ``state``.
        after: the call to make when the entries are loaded.
    """

    entries: dict[torch.Tensor, Mapping[str, Any]]
    others: dict[Any, Any]
    rest: dict[str, Any]
    after: Callable[[], object]

    @classmethod
    def of(cls, state: dict[str, Any]) -> "LoadedState":
        after = state["state"].pop(Hidden, lambda: None)
        saved = {key: e.value if isinstance(e, Hidden) else e for key, e in state["state"].items()}
        return cls(
            {p: entry for p, entry in saved.items() if isinstance(p, torch.Tensor) and entry},
            {key: entry for key, entry in saved.items() if not isinstance(key, torch.Tensor)},
            {name: value for name, value in state.items() if name != "state"},
            after,
        )

    def load(
        self, components: Components, defaults: Mapping[str, Any], set_rest: Callable[[dict[str, Any]], object]
    ) -> None:
        """Load the states and the attributes into an open optimizer.

        Args:
            defaults: of its parameter groups.
            set_rest: takes the attributes.

        Raises:
            StateError, ConfigError: they do not fit; nothing has changed.
        """
        config, given = components.core.config, self.rest["param_groups"]
        for g, group in enumerate(given):
            hyper_of(g, group, config.optimizer)
        groups = [loaded(group, defaults, config) for group in given]
        rules = [config.rule(group) for group in groups]
        _check_same_rules(components, groups, rules)
        rule_of = {param: rule for rule, group in zip(rules, groups, strict=True) for param in group["params"]}
        entries = components.states.checked(self.entries, rule_of)
        components.register_all(entries, groups)  # needs memory, and changes no states that are there
        components.states.load(entries, partial(set_rest, {**self.rest, "param_groups": groups}), self.after)


def _check_same_rules(components: Components, groups: Sequence[Mapping[str, Any]], rules: Sequence[Rule]) -> None:
    """Raise :class:`ConfigError` if parameters would be in a group of another rule than that of their states."""
    for g, (rule, group) in enumerate(zip(rules, groups, strict=True)):
        for slot in components.registration.slots.values():
            mine = components.core.params[slot.index].rule
            if mine != rule and any(slot.param is param for param in group["params"]):
                raise ConfigError(
                    f"load_state_dict: parameter group {g} is of {rule.name}, and the states of {slot.name!r} are of "
                    f"{mine.name if mine else None}; expected the state dict of an optimizer with the same 'optimizer' "
                    "in each group, and a momentum of 0 in both or in none"
                )


class AwaitedStates:
    """The states that a library's file names and does not hold. Steps are refused until they are loaded."""

    def __init__(self) -> None:
        self._refusal: RemovableHandle | None = None

    def __bool__(self) -> bool:
        """True if states are awaited."""
        return self._refusal is not None

    def begin(self, optimizer: torch.optim.Optimizer, folder: str) -> None:
        """Refuse steps of the optimizer until the states in this folder are loaded."""

        def refuse(*_: Any) -> None:
            raise StateError(
                f"load_state_dict: the states are not in the file but in shards, in {folder}/ beside it, and have not "
                "been loaded; expected what saved them: Trainer(callbacks=[OffloadCallback()]), or save_in_shards() "
                "before Accelerate's load_state()"
            )

        self.end()
        self._refusal = optimizer.register_step_pre_hook(refuse)

    def end(self) -> None:
        """Allow steps: states are loaded."""
        if self._refusal is not None:
            self._refusal.remove()
        self._refusal = None


def torch_state_dict(optimizer: Any, *, rank0_only: bool) -> dict[str, Any] | None:
    """As ``OffloadedAdamW.torch_state_dict``."""
    names = {group.get("optimizer", optimizer.rule_name) for group in optimizer.param_groups}
    if len(names) > 1:
        raise StateError(
            "torch_state_dict: groups of several optimizers, and torch has one for each; expected save_checkpoint() or "
            "state_dict(), or groups without 'optimizer'"
        )
    [name] = names
    torchs: Any = WORDS[name].optimizer
    if torchs is None:
        raise StateError(
            f"torch_state_dict: torch has none of optimizer={name!r}; expected save_checkpoint() or state_dict()"
        )
    optimizer.flush()
    made = torchs(optimizer.config)([torch.empty(0, 0, device="cpu")], lr=1e-3).param_groups[0]
    settings = {name: value for name, value in made.items() if name != "params"}
    fused = {"fused": True} if "fused" in settings else {}
    groups = [{**settings, **group, **fused} for group in optimizer.state_dict()["param_groups"]]
    wanted = optimizer.core.rank == 0 or not rank0_only
    numbers = [i for group in groups for i in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    state = {}
    for i, param in zip(numbers, params, strict=True):
        if optimizer.has_states(param) and optimizer.state[param]["step"] > 0:  # torch has no states before an update
            whole = optimizer.whole_states(param)
            del whole[MASTER]
            if WORDS[name].counted_by is None:
                whole = {STEP: optimizer.state[param][STEP].clone(), **whole}
            if wanted and whole:  # torch's SGD without momentum has no entries
                state[i] = whole
    return {"state": state, "param_groups": groups} if wanted else None
