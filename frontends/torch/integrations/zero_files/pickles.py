"""Reads DeepSpeed's files, which are pickles, without running code from them."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from offload_core.errors import CheckpointError, CheckpointWarning
from offload_core.support import checks
from offload_core.support.user_line import UserLine

from ...params.tensors import NUMPY_DTYPES
from .archive import Inert, parts_of, read_archive

REMEDY = (
    "expected a whole checkpoint of DeepSpeed with ZeRO stage 0, 1, 2 or 3 alone: DeepSpeed's zero_to_fp32.py makes "
    "safetensors files of others, for load_state_dict()"
)
_OWN_KEYS = {
    *("module", "optimizer", "lr_scheduler", "data_sampler", "random_ltd", "ds_config", "ds_version"),
    *("buffer_names", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments"),
    *("skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "num_experts"),
    *("checkpoint_parallel_dimensions", "universal_checkpoint_info", "sparse_tensor_module_names"),
}
"""The keys that DeepSpeed itself writes to the file of a model; a script's ``client_state`` lies beside them."""
_MAY_HOLD_OTHERS = {"ds_config", "lr_scheduler", "data_sampler", "random_ltd", "universal_checkpoint_info"}
"""Those whose values nothing here depends on, so that objects of a user's in them may be left out."""


@contextmanager
def as_zero_lays_out(folder: Path) -> Iterator[None]:
    """Raise :class:`CheckpointError` for any error inside: anything may be where ZeRO writes something else."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder}: {error.strerror or error}; {REMEDY}") from error
    except Exception as error:
        raise CheckpointError(f"{folder}: not laid out as ZeRO lays out its files ({error!r}); {REMEDY}") from error


def load(path: Path) -> dict[str, Any]:
    state = load_any(path)
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds {kind_of(state)}, expected a dict; {REMEDY}")
    theirs = {key: value for key, value in state.items() if "module" not in state or key in _OWN_KEYS}
    foreign = {name for key, value in theirs.items() if key not in _MAY_HOLD_OTHERS for name in _foreign(value)}
    if foreign:
        raise _refused(path, foreign)
    return state


def load_any(path: Path) -> Any:
    try:
        return read_archive(path)
    except OSError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path}: cannot be read as weights alone ({error!r:.300}); {REMEDY}") from error


def _refused(path: Path, names: Iterable[str]) -> CheckpointError:
    return CheckpointError(
        f"{path}: has {some(names)} in it, and reading that could run code; expected tensors, numbers and text alone; "
        f"{REMEDY}"
    )


def _foreign(value: Any) -> list[str]:
    """The names of classes in a tree of values that are not DeepSpeed's."""
    return [name for name in _objects(value) if not name.startswith("deepspeed.")]


def plain_client_state(described: dict[str, Any], path: Path) -> dict[str, Any]:
    """The values of the script's own, without those that are no plain values; a warning names them."""
    client_state = {key: value for key, value in described.items() if key not in _OWN_KEYS}
    left_out = {}
    for holder in (client_state, described):
        for key in [key for key in holder if key == "lr_scheduler" or key not in _OWN_KEYS]:
            if names := [*dict.fromkeys(_objects(holder[key]))]:
                left_out[key] = names
                del holder[key]
    if left_out:
        listed = ", ".join(f"{key!r} ({some(names)})" for key, names in left_out.items())
        UserLine.now("torch").warn(
            CheckpointWarning(
                f"{path}: leaves out {listed}: objects, and reading them could run code; expected plain values: save "
                "what they are made of"
            )
        )
    return client_state


def _objects(value: Any) -> Iterator[str]:
    """The names of all classes in a tree of values, which the archive has bounded."""
    if isinstance(value, Inert):
        yield value.path
    elif callable(value):
        yield getattr(value, "path", type(value).__name__)
    for part in parts_of(value):
        yield from _objects(part)


# --- values ------------------------------------------------------------------------------------------


def entry_of(state: Mapping[str, Any], path: Path, name: str, kind: type | tuple[type, ...]) -> Any:
    if not isinstance(state.get(name), kind):
        raise CheckpointError(f"{path}: {name!r} is {kind_of(state.get(name))}, expected what ZeRO writes; {REMEDY}")
    return state[name]


def kind_of(value: Any) -> str:
    return "missing" if value is None else checks.kind_of(value)


def some(names: Any) -> str:
    """At most five of these names, for errors."""
    listed = list(names)
    return ", ".join(map(repr, listed[:5])) + ", …" * (len(listed) > 5)


def integers(values: Any, path: Path) -> tuple[int, ...]:
    if not all(type(value) is int and value >= 0 for value in values):
        raise CheckpointError(f"{path}: {list(values)} is a shape or padding there, expected integers; {REMEDY}")
    return tuple(values)


def has_values(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta


def is_float(tensor: torch.Tensor) -> bool:
    """True if the tensor is of a floating-point type that a run may have."""
    return tensor.is_floating_point() and tensor.dtype in NUMPY_DTYPES


def named(names: Iterable[Any], path: Path) -> list[str]:
    """These names of tensors.

    Raises:
        CheckpointError: one is no text, or is there twice.
    """
    found = list(names)
    wrong = [name for name in found if not isinstance(name, str) or "\0" in name]
    if wrong or len({*found}) < len(found):
        raise CheckpointError(f"{path}: has {some(wrong) or 'a name twice'}, expected the names of tensors; {REMEDY}")
    return found


def flat_tensors(tensors: Any, path: Path, what: str = "the fp32 weights") -> list[torch.Tensor]:
    flat = list(tensors) if isinstance(tensors, list | tuple) else [tensors]
    if not all(has_values(t) and t.dim() == 1 and is_float(t) and t.is_contiguous() for t in flat):
        raise CheckpointError(f"{path}: {what} are {kind_of(tensors)}, expected flat tensors; {REMEDY}")
    return flat
