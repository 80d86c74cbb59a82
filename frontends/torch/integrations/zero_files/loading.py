"""Loads DeepSpeed's ZeRO checkpoints into engines and models."""

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from offload_core.config.schedules import GroupSchedule
from offload_core.engine import LossScaler, Want, encode
from offload_core.errors import CheckpointError
from offload_core.rules import MASTER, Rule
from offload_core.support.checks import kind_of, shown

from ...engine import Engine
from ...internals.private import grad_mode_kept
from ...params.tensors import NUMPY_DTYPES
from ...stage3.gathering import gathered_parameters
from ...training.rule_words import NAMES
from ...weights.checkpoint import TENSORS, ModelCheckpoints
from ...weights.reading import named_tensors
from .contents import SavedTensor, ZeroContents
from .pickles import some
from .reading import read_contents


def load_deepspeed(
    model: nn.Module, folder: str | os.PathLike[str], *, tag: str | None = None, states: bool = False
) -> None:
    """Load a DeepSpeed checkpoint (ZeRO stage 0 to 3, any number of ranks) into a model.

    An :class:`Engine`'s master weights become exactly the checkpoint's, and its parameters the rounded ones; a plain
    module's parameters take the values in their own element type. Buffers and frozen parameters are loaded, too. The
    files are mapped, and one parameter at a time is in memory. All ranks must call this, and each must be able to read
    the files.

    Args:
        folder: the folder that ``save_checkpoint`` was given.
        tag: the checkpoint's name in it; None: the checkpoint that the file ``latest`` names.
        states: True also loads an engine's optimizer states, as :meth:`ZeroCheckpoint.load` does: the run goes on.

    Raises:
        CheckpointError: a file is missing, does not fit, or holds objects other than weights; nothing was changed.
    """
    if not isinstance(model, Engine):
        if states:
            raise CheckpointError(
                f"states=True into {kind_of(model)}, which has no optimizer states; expected an engine: "
                "wrap(model, ...)"
            )
        _load_each(_matched(model, read_contents(Path(folder), tag)), _load_device)
        return
    with model.optimizer.checkpoints.together("load"):
        checkpoint = zero_checkpoint(folder, tag)
    checkpoint.load(model, optimizer_states=states)


def zero_checkpoint(folder: str | os.PathLike[str], tag: str | None = None) -> "ZeroCheckpoint":
    """Open a checkpoint that DeepSpeed has saved. Tensors stay on the disk until :meth:`ZeroCheckpoint.load`.

    Each rank calls this on its own, and must be able to read the files.

    Args:
        folder: the folder that ``save_checkpoint`` was given.
        tag: the checkpoint's name in it; None: the checkpoint that the file ``latest`` names.

    Raises:
        CheckpointError: a file is missing or damaged, or it is a checkpoint of another kind (a pipeline's, of
            tensor-parallel ranks, of experts, or ours).
    """
    return ZeroCheckpoint(read_contents(Path(folder), tag))


class ZeroCheckpoint:
    """A checkpoint that DeepSpeed has saved, of ZeRO stage 0 to 3 or in its universal format."""

    def __init__(self, contents: ZeroContents) -> None:
        self._contents = contents
        described = contents.described
        self.path = contents.path
        """The checkpoint's own folder."""
        self.tag = contents.path.name
        """Its name in the folder that was given to DeepSpeed."""
        self.global_steps = contents.count("global_steps")
        """The steps that the run had made, skipped ones included."""
        self.global_samples = contents.count("global_samples")
        """The samples that it had seen."""
        self.skipped_steps = contents.count("skipped_steps")
        """The steps that were skipped because a gradient was not finite."""
        self.loss_scale = contents.loss_scale
        """The numbers of DeepSpeed's loss scaler, under its names (``cur_scale``, ``cur_iter``, …); None: none."""
        held = described.get("lr_scheduler")
        self.lr_scheduler: dict[str, Any] | None = held if isinstance(held, dict) else None
        """The ``state_dict()`` of the scheduler; None: there was none."""
        self.client_state = contents.client_state
        """The values that the script gave to ``save_checkpoint``, without objects, which are never made again."""

    def load(
        self,
        engine: Engine,
        *,
        stateful: Mapping[str, Any] | None = None,
        optimizer_states: bool = True,
        strict: bool = True,
    ) -> None:
        """Load the checkpoint into an engine, of any number of ranks and in any stage. All ranks call this.

        Master weights, frozen parameters and buffers get the checkpoint's values; with ``optimizer_states`` also the
        moments and step counts of each parameter, the hyperparameters of the parameter groups, the number of updates,
        on which schedules depend, and a dynamic loss scale.

        Args:
            stateful: objects that ``load_state_dict`` gives what the checkpoint has of them: ``"lr_scheduler"`` a
                scheduler's state, ``"deepspeed"`` the counts (``global_steps``, ``global_samples``, ``skipped_steps``).
            optimizer_states: False loads weights alone; states and counts stay as they are.
            strict: False ignores tensors that this model lacks, and leaves frozen parameters and buffers that the
                checkpoint lacks as they are.

        Raises:
            CheckpointError: on all ranks. It is of another model or of another optimizer; nothing has changed, unless
                the message says that loading broke off.
        """
        engine.optimizer.follow_sizes()
        checkpoints = ModelCheckpoints(engine.module, engine.optimizer)
        counts = {name: getattr(self, name) for name in ("global_steps", "global_samples", "skipped_steps")}
        held = {"deepspeed": counts} | ({} if self.lr_scheduler is None else {"lr_scheduler": self.lr_scheduler})
        beside = dict.fromkeys(held if callable(engine.offload_config.lr) else ("deepspeed",))  # they need no object
        checkpoints.load(
            partial(_ToLoad.of, self._contents, engine, checkpoints, held, states=optimizer_states),
            stateful=beside | {name: item for name, item in (stateful or {}).items() if name in held},
            names=None,
            random_state=False,
            states=optimizer_states,
            strict=strict,
        )


# --- into a plain module -----------------------------------------------------------------------------


def _load_each(
    matched: Sequence[tuple[torch.Tensor, SavedTensor]], load_one: Callable[[torch.Tensor, SavedTensor], None]
) -> None:
    for i, (tensor, value) in enumerate(matched):
        try:
            load_one(tensor, value)
        except Exception as error:
            raise CheckpointError(
                f"{value.file}: loading broke off ({error}): {i} of {len(matched)} tensors are the checkpoint's, the "
                "others are as they were; load again, or make the model anew"
            ) from error


def _load_device(tensor: torch.Tensor, value: SavedTensor) -> None:
    with gathered_parameters(tensor, modifier_rank=0), grad_mode_kept(), torch.no_grad():
        tensor.copy_(value.read())


def _matched(module: nn.Module, contents: ZeroContents) -> list[tuple[torch.Tensor, SavedTensor]]:
    """Each parameter and buffer with its value."""
    path, values = contents.path, {**contents.others, **contents.trained}
    tensors = named_tensors(module)
    names: dict[torch.Tensor, str] = {}
    for name, tensor in tensors.items():
        names.setdefault(tensor, name)
    stored = _stored(contents, module, [*names.values()])
    matched = []
    for name in names.values():
        if name not in stored:
            raise CheckpointError(f"{path}: has no {name!r}; expected a checkpoint of this model: {some(values)}")
        tensor, value = tensors[name], values[stored[name]]
        if tuple(tensor.shape) != value.shape:
            raise CheckpointError(
                f"{value.file}: {name!r} has shape {list(value.shape)}, expected {list(tensor.shape)}: the checkpoint "
                "is of another model"
            )
        matched.append((tensor, value))
    unknown = [name for name in stored if name not in tensors]
    if unknown:
        raise CheckpointError(f"{path}: has {some(unknown)}, which the model has not; expected one of this model")
    return matched


# --- into an engine ----------------------------------------------------------------------------------


def _names_by_group(engine: Engine) -> list[list[str]]:
    """The model's names of the trained parameters of each group."""
    optimizer = engine.optimizer
    names = ModelCheckpoints(engine.module, optimizer).names()
    named = {slot.param: name for slot, name in zip(optimizer.slots, names, strict=True)}
    return [[named[param] for param in group["params"] if param in named] for group in optimizer.param_groups]


class _ToLoad:
    """A checkpoint of DeepSpeed as :class:`offload_core.checkpoint.reader.Checkpoint` shows one of ours.

    Attributes:
        path: its folder.
        content: as in a manifest.
    """

    def __init__(
        self, contents: ZeroContents, stored: Mapping[str, str], rules: Mapping[str, Rule], content: dict[str, Any]
    ) -> None:
        self.path = contents.path
        self.content = content
        self._contents = contents
        self._stored = stored
        """The name in the checkpoint of each tensor of the model."""
        self._rules = rules
        """The update rules of the trained parameters, by name."""
        self._arrays: list[np.ndarray] = []

    @classmethod
    def of(
        cls,
        contents: ZeroContents,
        engine: Engine,
        checkpoints: ModelCheckpoints,
        stateful: Mapping[str, Any],
        *,
        states: bool,
    ) -> "_ToLoad":
        """The checkpoint as an engine can load it.

        Args:
            stateful: the states that it has of a user's objects.

        Raises:
            CheckpointError: it is of another optimizer, or its numbers are out of range.
        """
        if contents.unnamed is not None and (states or contents.unnamed.masters is not None):
            contents.unnamed.named(contents, _names_by_group(engine))
        if states:
            contents.with_states()
            _check_adam(contents, engine)
        core = engine.optimizer.core
        states_of, scaler = core.states, core.scaler
        rules = {
            name: states_of.rule(slot.index)
            for name, slot in zip(checkpoints.names(), engine.optimizer.slots, strict=True)
        }
        stored = _stored(contents, engine.module, [*rules, *checkpoints.untrained()])
        content = {
            "step": contents.updates,
            "parameters": {
                mine: _parameter(contents, name) for mine, name in stored.items() if name in contents.trained
            },
            "others": {
                mine: _other(name, contents.others[name]) for mine, name in stored.items() if name in contents.others
            },
            "loss_scale": None if contents.loss_scale is None else _scale(contents.loss_scale, scaler),
            "own": [],
        }
        made = cls(contents, stored, rules, content)
        scheduled = isinstance(engine.offload_config.lr, GroupSchedule)
        state = {
            "updates": contents.updates,
            "groups": [
                _hyperparameters(group, rule, scheduled=scheduled)
                for group, rule in zip(contents.groups, contents.rules, strict=True)
            ],
            "modules": _extra_states(contents),
            "stateful": stateful,
            "extras": None,
        }
        content["state"] = encode(state, made._arrays, [TENSORS], where=f"{contents.path}: state")
        return made

    def has(self, name: str, kind: str) -> bool:
        """True if it holds this kind of a tensor."""
        name_there = self._stored.get(name, name)
        if kind in (MASTER, "param"):
            return name_there in (self._contents.trained if kind == MASTER else self._contents.others)
        found = self._contents.states.get(name_there)
        if found is None:
            return False
        return kind in (found or {state.name for state in self._rules[name].states} if name in self._rules else found)

    def array(self, name: str, kind: str) -> np.ndarray:
        """A plain value's array."""
        return self._arrays[int(name.partition(".")[2])]

    def read(self, wants: Iterable[Want]) -> None:
        """Read regions into their arrays."""
        for want in wants:
            name = self._stored.get(want.name, want.name)
            if want.kind in (MASTER, "param"):
                value = self._contents.trained.get(name) or self._contents.others[name]
            elif not (found := self._contents.states[name]):  # it has had no update
                want.out[:] = next(s.first for s in self._rules[want.name].states if s.name == want.kind)
                continue
            else:
                value = found[want.kind]
            value.fill(want.region, want.out)

    def verify(self, besides: Collection[str] = ()) -> None:
        """Do nothing: DeepSpeed's files have no checksums, and are complete if they could be opened."""


def _stored(contents: ZeroContents, module: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """The name in the checkpoint of each of the model's tensors that it has, and its names of others, as they are."""
    there = {**contents.others, **contents.trained}
    tied: dict[torch.Tensor, list[str]] = {}
    for name, tensor in named_tensors(module).items():
        tied.setdefault(tensor, []).append(name)
    others = {name: same for same in tied.values() for name in same}
    stored: dict[str, str] = {}
    for name in names:
        alike = [name, *others.get(name, ())]
        alike += [contents.aliases[other] for other in alike if other in contents.aliases]
        found = [other for other in alike if other in there]
        stored |= {name: found[0]} if found else {}
    known = {*stored.values(), *contents.aliases, *(other for name in names for other in others.get(name, ()))}
    return stored | {name: name for name in there if name not in known}


def _parameter(contents: ZeroContents, name: str) -> dict[str, Any]:
    group = contents.group_of.get(name, 0)
    entry = {"shape": list(contents.trained[name].shape), "dtype": "float32", "step": contents.steps.get(name, 0)}
    rule = contents.rules[group] if contents.rules else None
    return {**entry, "group": group, "behind": False, **({} if rule is None else {"optimizer": rule})}


def _other(name: str, value: SavedTensor) -> dict[str, Any]:
    dtype = value.parts()[0][1].dtype
    if dtype not in NUMPY_DTYPES:
        raise CheckpointError(f"{value.file}: {name!r} is of {dtype}; expected one of {some(NUMPY_DTYPES)}")
    return {"shape": list(value.shape), "dtype": str(NUMPY_DTYPES[dtype])}


def _hyperparameters(group: Mapping[str, Any], rule: str | None, *, scheduled: bool) -> dict[str, Any]:
    """A group's values that this optimizer has, too."""
    names = {*NAMES.get(rule or "", ("lr", "weight_decay")), *(() if scheduled else ("initial_lr",))}
    values = {name: value for name, value in group.items() if name in names}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _check_adam(contents: ZeroContents, engine: Engine) -> None:
    """Raise :class:`CheckpointError` if one of two Adams decays weights, and the other adds them to gradients."""
    mine = engine.offload_config.adam_mode
    for group, rule in zip(contents.groups, contents.rules, strict=True):
        if rule != "adamw" or not group.get("weight_decay"):
            continue
        theirs = "adamw" if group.get("decoupled_weight_decay", mine == "adamw") else "adam"
        if theirs != mine:
            raise CheckpointError(
                f"{contents.path}: was trained with adam_mode={theirs!r} (weight_decay={group['weight_decay']}), and "
                f"adam_mode={mine!r} here; expected the same"
            )


def _scale(theirs: Mapping[str, Any], scaler: LossScaler | None) -> dict[str, Any] | None:
    """The loss scaler's state; None: it keeps its own, because one of the two is fixed.

    DeepSpeed looks for a doubling before it counts an update, so that its n-th good update after an overflow is our
    n - 1.
    """
    if scaler is None or scaler.window is None or not theirs.get("dynamic"):
        return None
    try:
        good = int(theirs["cur_iter"]) - int(theirs.get("last_overflow_iter", -1)) - 1
        tolerated = int(theirs.get("cur_hysteresis", 1)) - 1
        return {
            "scale": float(theirs["cur_scale"]),
            "good_steps": max(good - 1, 0) % scaler.window,
            "tolerated": tolerated,
        }
    except (KeyError, TypeError, ValueError, OverflowError):
        raise CheckpointError(f"its loss scale is {shown(dict(theirs))}, expected DeepSpeed's numbers") from None


def _extra_states(contents: ZeroContents) -> dict[str, Any]:
    """The values of modules' ``get_extra_state()``."""
    module = contents.described.get("module")
    return {name: v for name, v in (module or {}).items() if name.rpartition(".")[2] == "_extra_state"}
