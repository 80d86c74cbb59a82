"""Writes a run as a universal checkpoint of DeepSpeed's, which it loads in any of its stages."""

import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from offload_core.config.schedules import GroupSchedule
from offload_core.deepspeed.keys import VERSION
from offload_core.errors import CheckpointError
from offload_core.support.checkpoint_folder import PREPARED, UNFINISHED, checked_tag, commit, make_folder, put_back
from offload_core.support.disks import names_to_disk
from offload_core.support.threads import uninterrupted

from ...engine import Engine
from ...training.rule_words import NAMES
from ...weights.checkpoint import ModelCheckpoints
from ...weights.export import write_with_torch
from ...weights.reading import named_tensors

_LATEST = "latest_universal"
_THEIR_STATES = {"master": "fp32", "sum": "exp_avg_sq"}
"""DeepSpeed's names of states, where they differ from ours: its Adagrad has the second one."""
_OF_STAGE_3 = "zero_pp_rank_0_mp_rank_00_model_states.pt"
"""The name under which stage 3 looks for what is in ``mp_rank_00_model_states.pt``."""


def export_deepspeed(
    engine: Engine,
    folder: str | os.PathLike[str],
    *,
    tag: str | None = None,
    client_state: Mapping[str, Any] | None = None,
    lr_scheduler: Mapping[str, Any] | None = None,
    counts: Mapping[str, int] | None = None,
) -> Path:
    """Write a universal checkpoint that DeepSpeed 0.19.8 loads, and return its folder. All ranks must call this.

    There, ``"checkpoint": {"load_universal": true}`` in the configuration and ``load_checkpoint(folder)`` go on from
    it, in stages 1 to 3, on any number of ranks, with the same parameter groups in the same order. It has fp32
    weights, states, step counts and hyperparameters. DeepSpeed itself loads no frozen parameters, buffers and loss
    scale from such a checkpoint: the file ``mp_rank_00_model_states.pt`` has the first two under ``"module"``. In stage
    3 it takes Adam's states alone, and the same hyperparameters for all groups: only those that all groups share are
    given to it. Files hold plain dicts and tensors. Rank 0 writes, and holds one parameter with its states in memory at
    a time.

    Args:
        folder: gets the checkpoint, and a file ``latest_universal`` that names it.
        tag: the checkpoint's name in it; None: ``global_stepN_universal``.
        client_state: plain values that ``load_checkpoint`` returns there.
        lr_scheduler: the ``state_dict()`` for the scheduler there; None: that of DeepSpeed's own schedulers, if the
            learning rate is one of theirs here, too.
        counts: ``global_steps``, ``global_samples`` and ``skipped_steps``; None: the number of updates.

    Raises:
        CheckpointError: on all ranks, if the run cannot be given to DeepSpeed or a file cannot be written; no part of
            the checkpoint is left, and an earlier one of this name is as it was.
    """
    optimizer = engine.optimizer
    engine.flush()
    steps = (counts or {}).get("global_steps", optimizer.updates)
    path = Path(folder) / (f"global_step{steps}_universal" if tag is None else checked_tag(str(tag), "tag"))
    unfinished = path.with_name(f".{path.name}{UNFINISHED}")
    together, first = optimizer.checkpoints.together, optimizer.core.rank == 0
    named = {
        slot.param: name
        for slot, name in zip(optimizer.slots, ModelCheckpoints(engine.module, optimizer).names(), strict=True)
    }
    others: dict[str, torch.Tensor] = {}
    groups: list[dict[str, Any]] = []

    def on_first(act: Callable[..., object], *args: Any) -> None:
        """Act on rank 0, and raise on all ranks if that failed."""
        with together("export"):
            if first:
                try:
                    act(*args)
                except OSError as error:
                    raise CheckpointError(
                        f"{error.filename or path}: cannot be written ({error.strerror or error}); expected room and "
                        "leave to write there: nothing of this export was left behind, and an earlier one is as it was"
                    ) from error

    def begin() -> None:
        put_back(path)
        if path.exists() and not (path / "zero" / "optimizer_state.pt").exists():
            raise CheckpointError(
                f"{path}: is there, and no universal checkpoint, and would be replaced; expected another tag"
            )
        make_folder(path.parent)
        for left in (unfinished, path.parent / f".{_LATEST}{PREPARED}"):  # by an export that was killed
            shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
        (unfinished / "zero").mkdir(parents=True)

    def end() -> None:
        _write_rest(engine, unfinished, groups, named, others)
        state = _described(engine, named, others, lr_scheduler)
        state |= {"global_steps": steps, "skipped_steps": 0, **(counts or {}), **(client_state or {})}
        for name in ("mp_rank_00_model_states.pt", _OF_STAGE_3):
            write_with_torch(state, unfinished / name)
        for written in (unfinished / "zero", unfinished):
            names_to_disk(written)
        uninterrupted(partial(commit, unfinished, path.name, latest=_LATEST))

    with together("export"):
        groups += _groups(engine, named, path)
    try:
        on_first(begin)
        for param, name in named.items():
            states = optimizer.whole_states(param)
            on_first(_write_parameter, unfinished / "zero" / name, states, optimizer.state[param]["step"])
        given = {*named.values()}
        others |= {name: t for name, t in engine.named_weights(rank0_only=True) if name not in given}
        on_first(end)
    except BaseException:
        if first:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return path


def _groups(engine: Engine, named: Mapping[torch.Tensor, str], path: Path) -> list[dict[str, Any]]:
    """The hyperparameters of each group.

    Raises:
        CheckpointError: DeepSpeed has no place for what the engine has.
    """
    optimizer, found = engine.optimizer, []
    optimizer.steps.hypers(optimizer.param_groups)  # DeepSpeed saves the rate of the update to come
    for g, group in enumerate(optimizer.param_groups):
        rule = group.get("optimizer", optimizer.rule_name)
        if rule == "muon":
            raise CheckpointError(
                f"{path}: parameter group {g} is of optimizer='muon', and DeepSpeed's Muon has another arithmetic; "
                "expected export_safetensors(), which has the weights"
            )
        counts = {int(optimizer.state[param]["step"]) for param in group["params"] if param in named}
        if len(counts) > 1:
            raise CheckpointError(
                f"{path}: parameters of group {g} have had {sorted(counts)} updates, and DeepSpeed keeps one count for "
                "each group; expected parameters that train together in a group"
            )
        values = {name: group[name] for name in NAMES[rule]}
        found.append({n: v.item() if isinstance(v, torch.Tensor) else v for n, v in values.items()})
    return found


def _write_parameter(folder: Path, states: Mapping[str, torch.Tensor], step: Any) -> None:
    for state, values in states.items():
        write_with_torch({"param": values.contiguous()}, folder / f"{_THEIR_STATES.get(state, state)}.pt")
    write_with_torch(torch.tensor(float(step)), folder / "step.pt")
    names_to_disk(folder)


def _write_rest(
    engine: Engine,
    path: Path,
    groups: list[dict[str, Any]],
    named: Mapping[torch.Tensor, str],
    others: Mapping[str, torch.Tensor],
) -> None:
    """Write what DeepSpeed's optimizer loads beside the states: stages 1 and 2 read the first list of groups, stage 3
    the inner one."""
    shared = {name: v for name, v in groups[0].items() if all(group.get(name) == v for group in groups)}
    count = max((int(engine.optimizer.state[param]["step"]) for param in named), default=0)
    # Stage 3 gives this one object to each part of a group, and a tensor would be counted up by all of them.
    inner = {"state": {0: {"step": count}}, "param_groups": [{**shared, "params": []}]}
    whole = [{**group, "params": [g]} for g, group in enumerate(groups)]
    state = {"ds_version": VERSION, "overflow": False, "param_groups": whole, "optimizer_state_dict": inner}
    write_with_torch(state, path / "zero" / "optimizer_state.pt")


def _described(
    engine: Engine,
    named: Mapping[torch.Tensor, str],
    others: Mapping[str, torch.Tensor],
    lr_scheduler: Mapping[str, Any] | None,
) -> dict[str, Any]:
    optimizer = engine.optimizer
    if lr_scheduler is None and isinstance(engine.offload_config.lr, GroupSchedule):
        lr_scheduler = {"last_batch_iteration": optimizer.updates - 1}
    params = dict(engine.module.named_parameters())
    first = {tensor: name for name, tensor in reversed(named_tensors(engine.module).items())}
    return {
        "module": dict(others),
        "buffer_names": [name for name in others if name not in params],
        "param_shapes": [
            {named[param]: param.shape for param in group["params"] if param in named}
            for group in optimizer.param_groups
        ],
        "shared_params": {
            name: first[tensor] for name, tensor in named_tensors(engine.module).items() if first[tensor] != name
        },
        "lr_scheduler": None if lr_scheduler is None else dict(lr_scheduler),
        "dp_world_size": optimizer.core.world_size,
        "mp_world_size": 1,
        "ds_version": VERSION,
    }
