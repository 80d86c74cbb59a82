"""A process of a way: one rank of one of its parts."""

import faulthandler
import importlib
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..native import kernels

LEFT_OUT = 3
"""The exit status of a process whose way cannot run here; ``said`` has the reason."""


class LeftOut(Exception):
    """This way cannot run here; the message says what it needs."""


@dataclass(frozen=True)
class Place:
    """What a program is given. A front end's program trains updates ``first`` to ``last`` - 1."""

    program: str
    settings: Mapping[str, Any]
    """Fields of ``OffloadConfig``, and the front end's own words."""
    first: int
    last: int
    micro_batches: int
    rank: int
    ranks: int
    instruction_set: str | None
    device: str
    """As ``torch.device`` takes it."""
    folder: Path
    """Of this part: for its checkpoint, its result, and what its processes said."""
    before: Path | None
    """The folder of the part before it, with the checkpoint to begin from."""
    shared: Path
    """Of all ways of this task."""

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def load(self, load: Any) -> None:
        """Call ``load(folder)`` if a part ran before this one."""
        if self.before is not None:
            load(self.before / "checkpoints")

    def gradients(self, step: int) -> Path:
        """The file with the gradients of an update, as ``definition`` has computed them."""
        return self.shared / f"gradients-{step}.npz"

    @property
    def made(self) -> Path:
        """The file with the arrays of this rank."""
        return self.folder / f"result-{self.rank}.npz"

    def said(self, rank: int) -> Path:
        """The file with the output of a rank."""
        return self.folder / f"said-{rank}"


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    np.savez(path, **arrays)


def run(module: str, place: Place) -> None:
    """Run a program of a front end's module in this process, and end it."""
    descriptor = os.open(place.said(place.rank), os.O_WRONLY | os.O_CREAT, 0o666)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    faulthandler.enable(file=2)
    os.chdir(place.folder)  # the folder of files on disk
    status = 1
    try:
        if place.instruction_set is not None:
            kernels.set_instruction_set(place.instruction_set)
        write_arrays(place.made, dict(getattr(importlib.import_module(module), place.program)(place)))
        status = 0
    except LeftOut as why:
        print(why, file=sys.stderr)
        status = LEFT_OUT
    except BaseException:
        traceback.print_exc()
    os._exit(status)
