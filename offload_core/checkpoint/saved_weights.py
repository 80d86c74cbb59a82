"""The weights of a checkpoint on the disk, whole: without the model, the ranks and the device that trained it."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..dtypes import BY_NUMPY, FLOAT32, ElementType
from ..rules import MASTER
from .export import Weight
from .reader import Checkpoint, Loaded


class SavedWeights:
    """The weights of a checkpoint of ours. Each is read when it is asked for, and every block of it is checked.

    Args:
        path: a checkpoint, or a folder of them: then the latest one.
        dtype: the element type of the weights: in float32 they are the master weights.
        frozen: False leaves out what is not trained, buffers too.

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
        entries: dict[str, Any] = {**loaded.parameters}
        if frozen:
            kinds |= dict.fromkeys(loaded.others, "param")
            entries |= loaded.others
        self.weights: list[Weight] = []
        for name, kind in kinds.items():
            saved = checkpoint.dtype(name, kind)
            target = dtype.numpy if saved in BY_NUMPY else saved
            read = partial(_read, checkpoint, name, kind, target)
            self.weights.append(Weight(name, target, tuple(entries[name]["shape"]), read))


def _read(checkpoint: Checkpoint, name: str, kind: str, dtype: np.dtype, wanted: bool) -> np.ndarray | None:
    return checkpoint.array(name, kind).astype(dtype, copy=False) if wanted else None
