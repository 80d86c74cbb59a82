"""Reads the fp32 weights of DeepSpeed's ZeRO checkpoints without running code from them.

A checkpoint is a folder ``TAG`` beside a file ``latest`` that names it. In stages 1 and 2 each rank has an equal part
of the flattened fp32 weights of each parameter group. In stage 3 it has an equal, padded part of each parameter, one
after the other. Files are pickles: they are read with ``weights_only=True``, and DeepSpeed's own classes in them become
:class:`_Inert`.
"""

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload_core.errors import CheckpointError
from offload_core.support.checks import shown
from offload_core.support.files import open_regular, read_regular

from .engine import Engine
from .stage3.gathering import gathered_parameters
from .weights import named_tensors

_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_LONGEST_TAG = 4096
_REMEDY = (
    "expected a whole checkpoint of ZeRO stage 1, 2 or 3 alone: DeepSpeed's zero_to_fp32.py makes safetensors files of "
    "others, for load_state_dict()"
)


def load_deepspeed(model: nn.Module, folder: str | os.PathLike[str], *, tag: str | None = None) -> None:
    """Load the weights of a DeepSpeed checkpoint (ZeRO stage 1, 2 or 3, any number of ranks) into a model.

    An :class:`Engine`'s master weights become exactly the checkpoint's, and its parameters the rounded ones; a plain
    module's parameters take the values in their own element type. Buffers and frozen parameters are loaded, too;
    optimizer states are not. The files are mapped, and one parameter at a time is in memory. All ranks must call this,
    and each must be able to read the files.

    Args:
        folder: the folder that ``save_checkpoint`` was given.
        tag: the checkpoint's name in it; None: the checkpoint that the file ``latest`` names.

    Raises:
        CheckpointError: a file is missing, does not fit, or holds objects other than weights; nothing was changed.
    """
    if not isinstance(model, Engine):
        _load_each(_matched(model, Path(folder), tag), _load_device)
        return
    optimizer = model.optimizer
    model.flush()
    with optimizer.checkpoints.together("load"):
        matched = _matched(model.module, Path(folder), tag)

    def load_one(tensor: torch.Tensor, value: _Value) -> None:
        if optimizer.has_states(tensor):
            optimizer.load_master(tensor, value.read())
        else:
            _load_device(tensor, value)

    _load_each(matched, load_one)


def _load_each(
    matched: Sequence[tuple[torch.Tensor, "_Value"]], load_one: Callable[[torch.Tensor, "_Value"], None]
) -> None:
    for i, (tensor, value) in enumerate(matched):
        try:
            load_one(tensor, value)
        except Exception as error:
            raise CheckpointError(
                f"{value.file}: loading broke off ({error}): {i} of {len(matched)} tensors are the checkpoint's, the "
                "others are as they were; load again, or make the model anew"
            ) from error


def _load_device(tensor: torch.Tensor, value: "_Value") -> None:
    with gathered_parameters(tensor, modifier_rank=0), torch.no_grad():
        tensor.copy_(value.read())


@dataclass(frozen=True)
class _Value:
    """A tensor of the checkpoint."""

    shape: tuple[int, ...]
    file: Path
    """The file that holds it, or a part of it."""
    read: Callable[[], torch.Tensor]


def _matched(module: nn.Module, folder: Path, tag: str | None) -> list[tuple[torch.Tensor, _Value]]:
    """Each parameter and buffer with its value."""
    try:
        values = _read(folder, tag)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder}: {error.strerror or error}; {_REMEDY}") from error
    except Exception as error:  # anything may be where ZeRO writes something else
        raise CheckpointError(f"{folder}: not laid out as ZeRO lays out its files ({error!r}); {_REMEDY}") from error
    tensors = named_tensors(module)
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    matched = []
    for same in names.values():
        known = [name for name in same if name in values]
        if not known:
            raise CheckpointError(f"{folder}: has no {same[0]!r}; expected a checkpoint of this model: {_some(values)}")
        name = known[0]
        tensor, value = tensors[name], values[name]
        if tuple(tensor.shape) != value.shape:
            raise CheckpointError(
                f"{value.file}: {name!r} has shape {list(value.shape)}, expected {list(tensor.shape)}: the checkpoint "
                "is of another model"
            )
        matched.append((tensor, value))
    unknown = [name for name in values if name not in tensors]
    if unknown:
        raise CheckpointError(f"{folder}: has {_some(unknown)}, which the model has not; expected one of this model")
    return matched


def _some(names: Any) -> str:
    listed = list(names)
    return ", ".join(map(repr, listed[:5])) + ", …" * (len(listed) > 5)


def _read(folder: Path, tag: str | None) -> dict[str, _Value]:
    """The checkpoint's tensors by name; tied weights are listed under each name."""
    latest = folder / "latest"
    if tag is None:
        try:
            tag = read_regular(latest, most_bytes=_LONGEST_TAG).decode().strip()
        except FileNotFoundError:
            raise CheckpointError(
                f"{latest}: no such file; expected the folder of a DeepSpeed checkpoint, or tag="
            ) from None
        if tag in ("", ".", "..") or Path(tag).name != tag or "\0" in tag:
            raise CheckpointError(f"{latest} names {shown(tag)}, expected the name of a folder beside it; or give tag=")
    folder = folder / tag
    models, optimizers = _files(folder)
    states = [_load(path) for path in optimizers]
    first = _entry(states[0], optimizers[0], "optimizer_state_dict", dict)
    stage_3 = "fp32_flat_groups" in first
    count = _entry(first, optimizers[0], "partition_count", (int, list))
    ranks = max(count) if isinstance(count, list) else count
    expected = [ranks if stage_3 else 1, ranks]
    for paths, n in zip((models, optimizers), expected, strict=True):
        if len(paths) != n:
            raise CheckpointError(
                f"{folder}: {len(paths)} files such as {paths[0].name}, expected {n}, one of each rank: {_REMEDY}"
            )
    described = [_load(path) for path in models]
    parts = [_entry(state, path, "optimizer_state_dict", dict) for state, path in zip(states, optimizers, strict=True)]
    read = _of_stage_3 if stage_3 else _of_stage_1_or_2
    values = read(described, models, parts, optimizers)
    for alias, name in (described[0].get("shared_params") or {}).items():
        if name in values:
            values[alias] = values[name]
    return values


def _files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Files of models and of optimizers, by rank."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; expected that of a DeepSpeed checkpoint's tag")
    found: tuple[dict[int, Path], dict[int, Path]] = ({}, {})
    for path in sorted(folder.glob("*_states.pt")):
        for pattern, files in zip((_MODEL, _OPTIMIZER), found, strict=True):
            match = pattern.fullmatch(path.name)
            if match is not None and int(match[2]) == 0:
                files[int(match[1] or 0)] = path
                break
        else:
            raise CheckpointError(f"{path}: is of a pipeline's, a tensor's or an expert's parallel ranks; {_REMEDY}")
    names = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    for files, name in zip(found, names, strict=True):
        missing = next(rank for rank in range(len(files) + 1) if rank not in files)
        if missing < max(len(files), 1):
            raise CheckpointError(f"{folder / name}: no such file of rank {missing}; {_REMEDY}")
    models, optimizers = ([files[rank] for rank in sorted(files)] for files in found)
    return models, optimizers


class _Inert(int):
    """A harmless substitute for DeepSpeed's classes while a file is read; it only keeps an integer argument."""

    def __new__(cls, *args: Any) -> "_Inert":
        return super().__new__(cls, args[0] if args and type(args[0]) is int else 0)

    def __setstate__(self, state: Any) -> None:
        pass


def _load(path: Path) -> dict[str, Any]:
    os.close(open_regular(path))  # torch opens it again, by its name
    try:
        named = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        foreign = [name for name in named if not name.startswith("deepspeed.")]
        if not foreign:
            with torch.serialization.safe_globals([(_Inert, name) for name in named]):
                state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise CheckpointError(f"{path}: cannot be read as weights alone ({error}); {_REMEDY}") from error
    if foreign:
        raise CheckpointError(
            f"{path}: has {_some(foreign)} in it, and reading that could run code; expected tensors, numbers and text "
            f"alone; {_REMEDY}"
        )
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds a {type(state).__name__}, expected a dict; {_REMEDY}")
    return state


def _entry(state: Mapping[str, Any], path: Path, name: str, kind: type | tuple[type, ...]) -> Any:
    if not isinstance(state.get(name), kind):
        raise CheckpointError(f"{path}: {name!r} is {_kind(state.get(name))}, expected what ZeRO writes; {_REMEDY}")
    return state[name]


def _kind(value: Any) -> str:
    return "missing" if value is None else f"a {type(value).__name__}"


def _shapes(described: Mapping[str, Any], path: Path) -> list[dict[str, tuple[int, ...]]]:
    """Names and shapes of each group's parameters, in the file's order."""
    groups = _entry(described, path, "param_shapes", list)
    return [{name: _integers(shape, path) for name, shape in group.items()} for group in groups]


def _integers(values: Any, path: Path) -> tuple[int, ...]:
    if not all(type(value) is int and value >= 0 for value in values):
        raise CheckpointError(f"{path}: {list(values)} is a shape or padding there, expected integers; {_REMEDY}")
    return tuple(values)


def _flat(tensors: Any, path: Path) -> list[torch.Tensor]:
    flat = list(tensors) if isinstance(tensors, list | tuple) else [tensors]
    if not all(_has_values(t) and t.dim() == 1 and t.is_floating_point() for t in flat):
        raise CheckpointError(f"{path}: the fp32 weights are {_kind(tensors)}, expected flat tensors; {_REMEDY}")
    return flat


def _has_values(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta


def _run(tensors: Sequence[torch.Tensor], start: int, numel: int) -> torch.Tensor:
    """A run of ``numel`` elements of these tensors joined end to end."""
    parts, at = [], 0
    for tensor in tensors:
        low, high = max(start - at, 0), min(start + numel - at, tensor.numel())
        if low < high:
            parts.append(tensor[low:high])
        at += tensor.numel()
    return torch.cat(parts) if parts else torch.empty(0, device="cpu")


def _check_numel(path: Path, got: int, least: int, most: int) -> None:
    if not least <= got <= most:
        bounds = f"{least}" if least == most else f"{least} to {most}"
        raise CheckpointError(f"{path}: {got} elements of weights lie end to end, expected {bounds}; {_REMEDY}")


def _of_stage_1_or_2(
    described: list[dict[str, Any]], models: list[Path], parts: list[dict[str, Any]], optimizers: list[Path]
) -> dict[str, _Value]:
    [path], [module] = models, [_entry(described[0], models[0], "module", dict)]
    # Frozen parameters and buffers are there whole.
    values = {
        name: _Value(tuple(tensor.shape), path, tensor.detach) for name, tensor in module.items() if _has_values(tensor)
    }
    shapes = _shapes(described[0], path)
    groups = [
        _flat(_entry(part, file, "single_partition_of_fp32_groups", list), file)
        for part, file in zip(parts, optimizers, strict=True)
    ]
    paddings = [
        _integers(group, optimizers[0])
        for group in parts[0].get("param_alignment_paddings") or [[0] * len(group) for group in shapes]
    ]
    if {len(shapes)} != {len(rank) for rank in groups} or list(map(len, shapes)) != list(map(len, paddings)):
        raise CheckpointError(f"{optimizers[0]}: its parameter groups are not those of {path.name}; {_REMEDY}")
    for g, group in enumerate(shapes):
        flat, start, end = [rank[g] for rank in groups], 0, 0
        for (name, shape), padding in zip(group.items(), paddings[g], strict=True):
            values[name] = _trained(shape, optimizers[0], [(flat, start)], math.prod(shape))
            end = start + math.prod(shape)
            start = end + padding
        align = 2 * len(parts)  # the last parameter may be padded to a multiple of this
        _check_numel(optimizers[0], sum(part.numel() for part in flat), end, -(-start // align) * align)
    return values


def _of_stage_3(
    described: list[dict[str, Any]], models: list[Path], parts: list[dict[str, Any]], optimizers: list[Path]
) -> dict[str, _Value]:
    module = _entry(described[0], models[0], "module", dict)
    buffers = _entry(described[0], models[0], "buffer_names", list)
    values = {
        name: _Value(tuple(module[name].shape), models[0], module[name].detach)
        for name in buffers
        if _has_values(module.get(name))
    }
    for name, shape in (described[0].get("frozen_param_shapes") or {}).items():
        fragments = [
            _flat(_entry(_entry(state, path, "frozen_param_fragments", dict), path, name, torch.Tensor), path)
            for state, path in zip(described, models, strict=True)
        ]
        part = -(-math.prod(shape) // len(models))
        for [fragment], path in zip(fragments, models, strict=True):
            _check_numel(path, fragment.numel(), part, part)
        values[name] = _trained(_integers(shape, models[0]), models[0], [(fragment, 0) for fragment in fragments], part)
    flat = [_flat(part.get("fp32_flat_groups"), path) for part, path in zip(parts, optimizers, strict=True)]
    start = 0
    for group in _shapes(described[0], models[0]):
        for name, shape in group.items():
            part = -(-math.prod(shape) // len(flat))
            values[name] = _trained(shape, optimizers[0], [(rank, start) for rank in flat], part)
            start += part
    for rank, path in zip(flat, optimizers, strict=True):
        _check_numel(path, sum(tensor.numel() for tensor in rank), start, start)
    return values


def _trained(
    shape: tuple[int, ...], file: Path, places: Sequence[tuple[list[torch.Tensor], int]], numel: int
) -> _Value:
    """A parameter made of ``numel`` elements from each place."""

    def read() -> torch.Tensor:
        whole = torch.cat([_run(flat, start, numel) for flat, start in places])
        return whole[: math.prod(shape)].view(shape)

    return _Value(shape, file, read)
