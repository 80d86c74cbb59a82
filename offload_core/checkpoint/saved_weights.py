"""The weights of a checkpoint on the disk, whole: without the model, the ranks and the device that trained it."""

import math
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..dtypes import FLOAT32, SAFETENSORS_DTYPES, ElementType
from ..rules import MASTER
from .export import Weight
from .reader import Checkpoint, Loaded
from .safetensors import FLOATING

_BY_NAME = {dtype.name: dtype for dtype in SAFETENSORS_DTYPES.values()}


class SavedWeights:
    """The weights of a checkpoint of ours. Each is read when it is asked for, and every block of it is checked.

    Args:
        path: a checkpoint, or a folder of them: then the latest one.
        dtype: the element type of floating-point tensors: in float32 they are the master weights.
        frozen: False leaves out parameters that are not trained; and buffers, too, if the checkpoint is of a time when
            it did not say which they are.

    Raises:
        CheckpointError: there is none, or its manifest or a file is damaged.
    """

    def __init__(self, path: str | os.PathLike[str], dtype: ElementType = FLOAT32, *, frozen: bool = True) -> None:
        checkpoint = Checkpoint(path)
        loaded = Loaded(checkpoint, None)
        self.path: Path = checkpoint.path
        self.step = loaded.step
        self.left_out = [*loaded.left_out]
        """The names of frozen tensors that were not saved."""
        kinds = {name: MASTER if checkpoint.has(name, MASTER) else "param" for name in loaded.parameters}
        kinds |= dict.fromkeys(loaded.others if frozen else loaded.buffers, "param")
        entries: dict[str, dict[str, Any]] = {**loaded.others, **loaded.parameters}
        self.weights: list[Weight] = []
        for name, kind in kinds.items():
            entry = entries[name]
            shape = tuple(entry["shape"])
            saved = checkpoint.dtype(name, kind) if math.prod(shape) else _BY_NAME.get(entry["dtype"], FLOAT32.numpy)
            target = dtype.numpy if saved in FLOATING else saved
            self.weights.append(Weight(name, target, shape, partial(_read, checkpoint, name, kind, shape, target)))
        self.tied = {name: other for name, other in loaded.tied.items() if other in kinds}
        """Further names of tied weights, each with the name of the weight."""


def _read(
    checkpoint: Checkpoint, name: str, kind: str, shape: tuple[int, ...], dtype: np.dtype, wanted: bool
) -> np.ndarray | None:
    if not wanted:
        return None
    if not math.prod(shape):  # nothing of it is in a file
        return np.empty(shape, dtype)
    with np.errstate(all="ignore"):  # what is too large becomes an inf, and a NaN stays one
        return checkpoint.array(name, kind).astype(dtype, copy=False)
