"""Finds the parameters and their states in the files of a DeepSpeed checkpoint.

A checkpoint is a folder ``TAG`` beside a file ``latest`` that names it. In stages 1 and 2 each rank has an equal part
of the flattened fp32 weights of each parameter group, and of each state. In stage 3 it has an equal, padded part of
each parameter, one after the other. Without ZeRO there is one file, in which an optimizer's states are numbered, not
named. A universal checkpoint has a folder for each parameter.
"""

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from offload_core.errors import CheckpointError
from offload_core.support.checkpoint_folder import MANIFEST, checked_tag, put_back
from offload_core.support.files import read_regular

from .contents import SavedTensor, Unnamed, ZeroContents, add_groups, add_states, groups_in, states_in, whole
from .pickles import (
    REMEDY,
    as_zero_lays_out,
    entry_of,
    flat_tensors,
    has_values,
    integers,
    is_float,
    kind_of,
    load,
    load_any,
    named,
    plain_client_state,
    some,
)

_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_LONGEST_TAG = 4096


def read_contents(folder: Path, tag: str | None) -> ZeroContents:
    """Read what is in a checkpoint; tensors are mapped, and stay on the disk.

    Args:
        folder: the folder that ``save_checkpoint`` was given.
        tag: the checkpoint's name in it; None: the checkpoint that ``latest`` names, or else ``latest_universal``.

    Raises:
        CheckpointError: a file is missing, does not fit, or is of another kind of checkpoint.
    """
    with as_zero_lays_out(folder):
        return _read(folder, tag)


def _read(folder: Path, tag: str | None) -> ZeroContents:
    path = folder / (_latest(folder) if tag is None else checked_tag(str(tag), "tag"))
    put_back(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder; expected that of a DeepSpeed checkpoint's tag")
    if os.path.exists(path / MANIFEST):
        raise CheckpointError(f"{path}: is a checkpoint of ours, not DeepSpeed's; expected engine.load_checkpoint()")
    if (path / "offloaded_tensors").exists():
        raise CheckpointError(
            f"{path / 'offloaded_tensors'}: the run had its states on disks, in files that only it can read; expected "
            "a checkpoint of a run with offload_optimizer 'cpu' or none: load it there, and save again"
        )
    models, optimizers = _files(path)
    described = [load(file) for file in models]
    contents = ZeroContents(path, described[0])
    contents.client_state = plain_client_state(described[0], models[0])
    if (path / "zero").is_dir() and not optimizers:
        _read_universal(contents, models[0])
    elif not optimizers:
        _read_alone(contents, described, models)
    else:
        _read_zero(contents, described, models, optimizers)
    shared = contents.described.get("shared_params") or {}
    contents.aliases = {
        alias: name
        for alias, name in zip(named(shared, models[0]), shared.values(), strict=True)
        if name in contents.trained or name in contents.others
    }
    contents.count("global_samples")
    contents.updates  # noqa: B018  # checks the counts
    return contents


def _latest(folder: Path) -> str:
    for name in ("latest", "latest_universal"):
        try:
            return checked_tag(read_regular(folder / name, most_bytes=_LONGEST_TAG).decode().strip(), folder / name)
        except FileNotFoundError:
            continue
    raise CheckpointError(f"{folder / 'latest'}: no such file; expected the folder of a DeepSpeed checkpoint, or tag=")


def _files(path: Path) -> tuple[list[Path], list[Path]]:
    """Files of models and of optimizers, by rank."""
    found: tuple[dict[int, Path], dict[int, Path]] = ({}, {})
    for file in sorted(path.glob("*_states.pt")):
        for pattern, files in zip((_MODEL, _OPTIMIZER), found, strict=True):
            match = pattern.fullmatch(file.name)
            if match is not None and int(match[2]) == 0:
                files[int(match[1] or 0)] = file
                break
        else:
            raise CheckpointError(f"{file}: is of a pipeline's, a tensor's or an expert's parallel ranks; {REMEDY}")
    names = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    for files, name in zip(found, names, strict=True):
        missing = next(rank for rank in range(len(files) + 1) if rank not in files)
        if missing < max(len(files), 1) and (files or name.startswith("mp_")):
            raise CheckpointError(f"{path / name}: no such file of rank {missing}; {REMEDY}")
    models, optimizers = ([files[rank] for rank in sorted(files)] for files in found)
    return models, optimizers


# --- layouts -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _FlatRange:
    """The place of a parameter in flat tensors: of a group in stages 1 and 2, of a part of a group in stage 3."""

    name: str
    shape: tuple[int, ...]
    start: int
    part: int | None
    """The elements that each rank has, from ``start`` on in its own tensor. None: the ranks' tensors are joined end to
    end, and the parameter is there in one piece."""

    def saved(self, ranks: Sequence[torch.Tensor], file: Path) -> SavedTensor:
        """The parameter, or a state of it, in the ranks' flat tensors."""
        return SavedTensor(self.shape, file, partial(self._parts, ranks))

    def _parts(self, ranks: Sequence[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
        numel, found, at = math.prod(self.shape), [], 0
        for rank, flat in enumerate(ranks):
            if self.part is not None:
                first, n = rank * self.part, min(self.part, numel - rank * self.part)
                if n > 0:
                    found.append((first, flat[self.start : self.start + n]))
                continue
            low, high = max(self.start - at, 0), min(self.start + numel - at, flat.numel())
            if low < high:
                found.append((at + low - self.start, flat[low:high]))
            at += flat.numel()
        return found


@dataclass(frozen=True)
class _Flat:
    """A flat tensor's parameters, the number of their group, and how many elements it may have."""

    places: list[_FlatRange]
    group: int
    least: int
    most: int
    each: bool
    """True if each rank has so many; False: all together."""

    def check(self, what: str, ranks: Sequence[torch.Tensor], paths: Sequence[Path]) -> None:
        """Raise :class:`CheckpointError` unless the ranks' tensors have the elements of the parameters."""
        sizes = [flat.numel() for flat in ranks]
        for got, path in zip(sizes, paths, strict=True) if self.each else [(sum(sizes), paths[0])]:
            _check_numel(path, what, got, self.least, self.most)


def _check_numel(path: Path, what: str, got: int, least: int, most: int) -> None:
    if not least <= got <= most:
        bounds = f"{least}" if least == most else f"{least} to {most}"
        raise CheckpointError(f"{path}: {got} elements of {what} lie end to end, expected {bounds}; {REMEDY}")


def _joined(shapes: Mapping[str, tuple[int, ...]], paddings: Sequence[int], ranks: int, group: int) -> _Flat:
    """A group of stage 1 or 2."""
    places, start, end = [], 0, 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        places.append(_FlatRange(name, shape, start, None))
        end = start + math.prod(shape)
        start = end + padding
    align = 2 * ranks  # the last parameter may be padded to a multiple of this
    return _Flat(places, group, end, -(-start // align) * align, each=False)


def _sharded(shapes: Mapping[str, tuple[int, ...]], ranks: int, group: int) -> _Flat:
    """A part of a group in stage 3."""
    places, start = [], 0
    for name, shape in shapes.items():
        part = -(-math.prod(shape) // ranks)
        places.append(_FlatRange(name, shape, start, part))
        start += part
    return _Flat(places, group, start, start, each=True)


def _shapes(described: Mapping[str, Any], path: Path) -> list[dict[str, tuple[int, ...]]]:
    """Names and shapes of each group's parameters, in the file's order."""
    groups = entry_of(described, path, "param_shapes", list)
    named((name for group in groups for name in group), path)
    return [{name: integers(shape, path) for name, shape in group.items()} for group in groups]


def _others(module: Mapping[str, Any], path: Path, names: Iterable[str] | None = None) -> dict[str, SavedTensor]:
    """The tensors that a file has whole."""
    listed = named(module if names is None else names, path)
    return {name: whole(module[name], path) for name in listed if has_values(module.get(name))}


def _read_zero(
    contents: ZeroContents, described: list[dict[str, Any]], models: list[Path], optimizers: list[Path]
) -> None:
    """Read a checkpoint of stage 1, 2 or 3."""
    loaded = [load(path) for path in optimizers]
    parts = [
        entry_of(state, path, "optimizer_state_dict", dict) for state, path in zip(loaded, optimizers, strict=True)
    ]
    path, first = models[0], optimizers[0]
    stage_3 = "fp32_flat_groups" in parts[0]
    count = entry_of(parts[0], first, "partition_count", (int, list))
    ranks = max(count) if isinstance(count, list) else count
    for paths, n in zip((models, optimizers), [ranks if stage_3 else 1, ranks], strict=True):
        if len(paths) != n:
            raise CheckpointError(
                f"{contents.path}: {len(paths)} files such as {paths[0].name}, expected {n}, one of each rank: {REMEDY}"
            )
    key = "fp32_flat_groups" if stage_3 else "single_partition_of_fp32_groups"
    masters = [flat_tensors(part.get(key), file) for part, file in zip(parts, optimizers, strict=True)]
    shapes = _shapes(described[0], path)
    paddings = parts[0].get("param_alignment_paddings") or [[0] * len(group) for group in shapes]
    paddings = [integers(group, first) for group in paddings]
    same = not stage_3 and list(map(len, shapes)) != list(map(len, paddings))
    if same or {len(shapes)} != {len(rank) for rank in masters}:
        raise CheckpointError(f"{first}: its parameter groups are not those of {path.name}; {REMEDY}")
    contents.others = (_others_of_stage_3 if stage_3 else _others_of_stage_1_or_2)(described, models)
    group_of = _groups_of_parts(parts[0], first, len(shapes)) if stage_3 else [*range(len(shapes))]
    flats = []
    for i, (group, g) in enumerate(zip(shapes, group_of, strict=True)):
        flats.append(_sharded(group, ranks, g) if stage_3 else _joined(group, paddings[i], ranks, g))
        of_ranks = [rank[i] for rank in masters]
        flats[-1].check("weights", of_ranks, optimizers)
        for place in flats[-1].places:
            contents.trained[place.name] = place.saved(of_ranks, first)
            contents.others.pop(place.name, None)
    contents.loss_scale = _scaler_values(parts[0].get("loss_scaler"))
    contents.read_states = partial(_read_states, contents, flats, parts, optimizers, stage_3=stage_3)


def _scaler_values(scaler: Any) -> dict[str, Any] | None:
    """The plain numbers of a pickled loss scaler; None: it does not scale."""
    values = getattr(scaler, "values", None)
    if values is None or (not values.get("dynamic") and values.get("cur_scale", 1) == 1):
        return None
    return {key: value for key, value in values.items() if type(value) in (bool, int, float)}


def _others_of_stage_1_or_2(described: list[dict[str, Any]], models: list[Path]) -> dict[str, SavedTensor]:
    return _others(entry_of(described[0], models[0], "module", dict), models[0])


def _others_of_stage_3(described: list[dict[str, Any]], models: list[Path]) -> dict[str, SavedTensor]:
    path = models[0]
    found = _others(
        entry_of(described[0], path, "module", dict), path, entry_of(described[0], path, "buffer_names", list)
    )
    frozen = described[0].get("frozen_param_shapes") or {}
    for name, shape in zip(named(frozen, path), frozen.values(), strict=True):
        flat = _sharded({name: integers(shape, path)}, len(models), 0)
        fragments = [
            entry_of(state, file, "frozen_param_fragments", dict) for state, file in zip(described, models, strict=True)
        ]
        ranks = [
            flat_tensors(entry_of(each, file, name, torch.Tensor), file)[0]
            for each, file in zip(fragments, models, strict=True)
        ]
        flat.check("weights", ranks, models)
        found[name] = flat.places[0].saved(ranks, path)
    return found


def _groups_of_parts(part: Mapping[str, Any], path: Path, n: int) -> list[int]:
    """The number of the group of each of ``n`` parts in stage 3: a large group is cut into several."""
    states = part.get("optimizer_state_dict")
    listed = states.get("param_groups") if isinstance(states, dict) else None
    if not isinstance(listed, list):
        return [0] * n
    found = [g for g, group in enumerate(listed) for _ in entry_of(group, path, "params", list)]
    if len(found) != n:
        raise CheckpointError(f"{path}: its parameter groups have {len(found)} parts, expected {n}; {REMEDY}")
    return found


def _read_states(
    contents: ZeroContents, flats: list[_Flat], parts: list[dict[str, Any]], optimizers: list[Path], *, stage_3: bool
) -> None:
    """Read the states of stage 1, 2 or 3: the optimizer has one flat parameter for each entry of ``flats``."""
    groups: list[dict[str, Any]] = []
    entries: list[list[Any]] = [[] for _ in flats]
    for part, path in zip(parts, optimizers, strict=True):
        held = entry_of(part, path, "optimizer_state_dict" if stage_3 else "base_optimizer_state", (dict, list))
        if isinstance(held, dict):
            listed = groups_in(held, path)
            groups = groups or listed
            held = [held["state"].get(number, {}) for group in listed for number in group["params"]]
        if len(held) != len(flats):
            raise CheckpointError(f"{path}: {len(held)} groups of states, expected {len(flats)}; {REMEDY}")
        for of_ranks, entry in zip(entries, held, strict=True):
            of_ranks.append(entry)
    # "elastic_checkpoint" keeps states alone, and one count of steps
    groups = groups or [{} for _ in range(1 + max((flat.group for flat in flats), default=0))]
    for flat, of_ranks in zip(flats, entries, strict=True):
        found = [states_in(entry, path) for entry, path in zip(of_ranks, optimizers, strict=True)]
        for states, path in zip(found, optimizers, strict=True):
            if states.keys() != found[0].keys():
                raise CheckpointError(
                    f"{path}: has states {some(states) or 'none'}, and {optimizers[0].name} "
                    f"{some(found[0]) or 'none'}; {REMEDY}"
                )
        of_states = {
            state: [flat_tensors(states[state], path, state)[0] for states, path in zip(found, optimizers, strict=True)]
            for state in found[0]
        }
        for state, ranks in of_states.items():
            flat.check(state, ranks, optimizers)
        for place in flat.places:
            contents.group_of[place.name] = flat.group
            saved = {state: place.saved(ranks, optimizers[0]) for state, ranks in of_states.items()}
            step = parts[0].get("base_optimizer_state_step")
            add_states(contents, place.name, of_ranks[0], groups[flat.group], saved, step)
    add_groups(contents, groups)


def _read_alone(contents: ZeroContents, described: list[dict[str, Any]], models: list[Path]) -> None:
    """Read a checkpoint of a run without ZeRO."""
    [path] = models
    contents.others = _others_of_stage_1_or_2(described, models)
    state = described[0].get("optimizer")
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: there are no optimizer's states in it or beside it; {REMEDY}")
    optimizer = state.get("optimizer_state_dict", state)
    masters: list[list[torch.Tensor]] | list[torch.Tensor] | None = None
    if "fp32_groups_flat" in state:
        masters = flat_tensors(state["fp32_groups_flat"], path)
    elif "fp32_groups" in state:
        masters = [[t for t in group if has_values(t)] for group in entry_of(state, path, "fp32_groups", list)]
    groups = groups_in(optimizer, path)
    if masters is not None and len(masters) != len(groups):
        raise CheckpointError(f"{path}: {len(masters)} groups of fp32 weights, expected {len(groups)}; {REMEDY}")
    contents.unnamed = Unnamed(path, optimizer, masters)
    dynamic, scale = bool(state.get("dynamic_loss_scale")), state.get("cur_scale", 1)
    keys = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_window")
    if dynamic or scale != 1:
        numbers = {key: state[key] for key in keys if type(state.get(key)) in (int, float)}
        contents.loss_scale = {**numbers, "dynamic": dynamic}


def _read_universal(contents: ZeroContents, path: Path) -> None:
    """Read a universal checkpoint, which has a folder for each parameter."""
    zero = contents.path / "zero"
    file = zero / "optimizer_state.pt"
    state = load(file)
    shapes = _shapes(contents.described, path)
    contents.others = _others(contents.described.get("module") or {}, path)
    contents.loss_scale = _scaler_values(state.get("loss_scaler"))
    for name, shape in (pair for group in shapes for pair in group.items()):
        checked_tag(name, path)  # it is the name of a folder here, and must not lead out of the checkpoint
        contents.trained[name] = whole(_of_file(zero / name / "fp32.pt", shape), zero / name / "fp32.pt")
        contents.others.pop(name, None)
    contents.read_states = partial(_read_universal_states, contents, state, shapes, file)


def _read_universal_states(
    contents: ZeroContents, state: Mapping[str, Any], shapes: list[dict[str, tuple[int, ...]]], file: Path
) -> None:
    inner = state.get("optimizer_state_dict")
    groups = state.get("param_groups") or (inner.get("param_groups") if isinstance(inner, dict) else None)
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise CheckpointError(f"{file}: 'param_groups' is {kind_of(groups)}, expected what ZeRO writes; {REMEDY}")
    # Stages 1 and 2 have one list of shapes for each group, stage 3 one for each part of a group.
    of_parts = [g for g, group in enumerate(groups) for _ in group.get("params", ())]
    for i, group in enumerate(shapes):
        g = of_parts[i] if len(of_parts) == len(shapes) else min(i, len(groups) - 1)
        for name, shape in group.items():
            files = {path.stem: path for path in sorted((file.parent / name).glob("*.pt")) if path.stem != "fp32"}
            step = load_any(files.pop("step")) if "step" in files else contents.updates
            held = states_in({stem: _of_file(path, shape) for stem, path in files.items()}, file)
            contents.group_of[name] = g
            add_states(contents, name, {}, {}, {s: whole(tensor, file) for s, tensor in held.items()}, step)
    add_groups(contents, groups)


def _of_file(path: Path, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor in a file of a universal checkpoint."""
    held = load_any(path)
    tensor: Any = held.get("param") if isinstance(held, dict) else held
    if not has_values(tensor) or tensor.numel() != math.prod(shape) or not is_float(tensor):
        raise CheckpointError(f"{path}: holds {kind_of(tensor)}, expected a tensor of {list(shape)}; {REMEDY}")
    return tensor.reshape(shape)
