"""Whether all ranks were given the same model and configuration."""

import hashlib
from collections.abc import Sequence

import numpy as np

from .collectives import Collectives
from .config import OffloadConfig
from .errors import ParameterError
from .partition import ParamSpec

_EXPECTED = "expected the same model and configuration on every rank"
_SHARED_FIELDS = (
    "reduce_bucket_size",
    "communication_dtype",
    "reduction",
    "op_order",
    "adam_mode",
    "gradient_clipping",
    "gradient_accumulation_steps",
    "skip_nonfinite",
    "lr",
    "betas",
    "eps",
    "eps_root",
    "weight_decay",
    "loss_scale",
    "initial_loss_scale",
    "loss_scale_window",
    "min_loss_scale",
    "loss_scale_hysteresis",
    "loss_scale_consecutive_hysteresis",
    "offload_param",
    "max_live_parameters",
    "prefetch_bucket_size",
    "max_reuse_distance",
)
"""Schedules and the like, which have no value to compare, are compared at every step (``fingerprint``)."""


def agree(collectives: Collectives, config: OffloadConfig, specs: Sequence[ParamSpec], given: Sequence[str]) -> None:
    """Compare fingerprints of what all processes are about to add.

    Args:
        given: the element type in which each parameter's start value is given.

    Raises:
        ParameterError: on every process, naming where its own layout first differs from process 0's.
    """
    if collectives.world_size == 1:
        return
    values = [getattr(config, name) for name in _SHARED_FIELDS]
    lines = [f"{name}={'a function' if callable(v) else v!r}" for name, v in zip(_SHARED_FIELDS, values, strict=True)]
    lines += [
        f"{s.name} {s.numel} {s.dtype} {s.group} {s.elements} {s.partitioned} {d}"
        for s, d in zip(specs, given, strict=True)
    ]
    mine = np.array([fingerprint(line) for line in lines], np.int64)
    length = np.array([mine.size], np.int64)
    collectives.broadcast(length, "layout")
    theirs = np.zeros(int(length[0]), np.int64)
    theirs[: mine.size] = mine[: theirs.size]
    collectives.broadcast(theirs, "layout")
    differing = np.array([0 if np.array_equal(mine, theirs) else 1], np.int64)
    collectives.sum_integers(differing, "layout")
    if differing[0]:
        raise ParameterError(_difference(mine, theirs, config, specs))


def fingerprint(line: str) -> int:
    """40 bits of a hash: as many ranks' as there are can be summed."""
    return int.from_bytes(hashlib.sha256(line.encode()).digest()[:5])


def _difference(mine: np.ndarray, theirs: np.ndarray, config: OffloadConfig, specs: Sequence[ParamSpec]) -> str:
    n = len(_SHARED_FIELDS)
    for i, name in enumerate(_SHARED_FIELDS):
        if mine[i] != theirs[i]:
            return f"{name} is {getattr(config, name)!r} here and differs from rank 0's; {_EXPECTED}"
    for i, spec in enumerate(specs):
        if n + i >= theirs.size or mine[n + i] != theirs[n + i]:
            shape = f"{spec.elements}, " if spec.elements else ""
            what = f"parameter {spec.name!r} ({shape}{spec.numel} elements, {spec.dtype}, group {spec.group})"
            return f"{what} differs from rank 0's; {_EXPECTED}"
    if mine.size != theirs.size:
        return f"{len(specs)} parameters here and {theirs.size - n} on rank 0; {_EXPECTED}"
    return f"another rank's parameters differ from rank 0's; {_EXPECTED}"
