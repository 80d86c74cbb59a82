"""Reads a checkpoint into a model's tensors and into the states of its parameters, once it is known to fit them."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..dtypes import SAFETENSORS_NAMES
from ..errors import CheckpointError
from ..states.arrays import StateRun
from .reader import Checkpoint, Loaded, Readable, Want
from .values import ArrayType

_KINDS = {str(dtype): {"V": "f", "u": "i"}.get(dtype.kind, dtype.kind) for dtype in SAFETENSORS_NAMES}
"""The kind of each element type. A tensor may be loaded from another type of the same kind."""
_TARGET_BYTES = 64 * 2**20
"""Bytes after which a group of tensors is read; the last tensor of a group may exceed them."""


@dataclass
class Target:
    """A tensor that is not trained, to be loaded."""

    name: str
    shape: tuple[int, ...]
    wants: Callable[[str], Iterable[Want]]
    """Returns the regions to read, of the kind that the checkpoint holds: ``"param"`` or ``"master"``."""
    loaded: Callable[[], None] = lambda: None
    """Called after the regions were read."""
    dtype: np.dtype | None = None
    """A saved tensor of another kind (integers, floats) is refused; None: any is taken."""


class Reading:
    """Reads states into the memory in which they are kept, or through a buffer where there is none of their values.

    Buffers are written to the store as soon as ``_TARGET_BYTES`` are filled, so that no more are needed.
    """

    def __init__(self, checkpoint: Readable, advance: Callable[[int], object]) -> None:
        """
        Args:
            advance: called with the number of bytes that were read since the last call.
        """
        self.checkpoint = checkpoint
        self._advance = advance
        self._wants: list[Want] = []
        self._copies: list[tuple[StateRun, np.ndarray]] = []
        self._n_bytes = 0

    def values_of(self, run: StateRun) -> np.ndarray:
        """Return an array to fill with the values of a run; the next :meth:`finish` stores them."""
        if (view := run.view) is not None:
            return view
        values = np.zeros(run.size, np.float32)
        self._copies.append((run, values))
        self._n_bytes += values.nbytes
        return values

    def want(self, want: Want) -> None:
        """Have the next :meth:`finish` read this region."""
        self._wants.append(want)

    def go_on(self) -> None:
        """Read what is wanted so far if the buffers are full. Call it when all of a run is wanted."""
        if self._n_bytes >= _TARGET_BYTES:
            self.finish()

    def finish(self) -> None:  # waits
        """Read all that is wanted."""
        self.checkpoint.read(self._wants)
        self._advance(sum(want.out.nbytes for want in self._wants))
        for run, values in self._copies:
            run.write(values)
        self._wants, self._copies, self._n_bytes = [], [], 0


def load_values(path: str | os.PathLike[str], targets: Sequence[Target], types: Sequence[ArrayType] = ()) -> Loaded:
    """Load the values of parameters and other tensors, but no optimizer states, in this process alone.

    Raises:
        CheckpointError: the checkpoint is damaged or of another model. If a value that is read is damaged, others may
            have been loaded; the message then says that loading broke off.
    """
    loaded = Loaded(Checkpoint(path), None, types)
    check_model(loaded, {}, targets)
    try:
        read_targets(loaded, targets, lambda n: None)
    except CheckpointError as error:
        raise CheckpointError(
            f"loading broke off ({error}): the model's tensors are partly the checkpoint's; load another one before "
            "they are used"
        ) from None
    return loaded


def read_targets(loaded: Loaded, targets: Sequence[Target], advance: Callable[[int], object]) -> None:
    """Read targets in groups of ``_TARGET_BYTES``: a front end may need memory for each until it is loaded.

    Those that the checkpoint leaves out keep their values.

    Args:
        advance: called with the number of bytes of each group.
    """
    targets = [target for target in targets if target.name not in loaded.left_out]
    read: list[Target] = []
    wants: list[Want] = []
    n_bytes = 0
    for target in targets:
        more = list(target.wants("param" if target.name in loaded.others else "master"))
        n_bytes += sum(want.out.nbytes for want in more)
        read.append(target)
        wants += more
        if n_bytes >= _TARGET_BYTES or target is targets[-1]:
            loaded.checkpoint.read(wants)
            advance(n_bytes)
            for each in read:
                each.loaded()
            read, wants, n_bytes = [], [], 0


def check_model(
    loaded: Loaded, trained: Mapping[str, tuple[int, ...]], targets: Sequence[Target], *, strict: bool = True
) -> tuple[set[str], list[Target]]:
    """Return the names of the tensors to load, and those of the targets that are to be loaded: all of them.

    Args:
        strict: False: those that the checkpoint has.

    Raises:
        CheckpointError: the checkpoint is of another model.
    """
    path, there = loaded.checkpoint.path, {**loaded.left_out, **loaded.others, **loaded.parameters}
    expected = {**trained, **{target.name: target.shape for target in targets}}
    missing, unknown = [n for n in expected if n not in there], [n for n in there if n not in expected]
    if not strict:
        trained = {name: shape for name, shape in trained.items() if name in there}
        targets = [target for target in targets if target.name in there]
        expected = {name: shape for name, shape in expected.items() if name in there}
    elif missing or unknown:
        raise CheckpointError(
            f"{path}: a checkpoint of another model; "
            + "; ".join(
                f"{words} {', '.join(map(repr, found[:5]))}{' …' if len(found) > 5 else ''}"
                for words, found in (("it lacks", missing), ("this model lacks", unknown))
                if found
            )
            + ". Expected the same names: `names=` translates this model's to those of the checkpoint"
        )
    for name, shape in expected.items():
        if tuple(there[name]["shape"]) != tuple(shape):
            raise CheckpointError(
                f"{path}: {name!r} has shape {there[name]['shape']} in it, expected {list(shape)}: is it the "
                "checkpoint of another model?"
            )
    without = [name for name in trained if name in loaded.left_out]
    if without:
        raise CheckpointError(
            f"{path}: was saved without {without[0]!r}, which was frozen and is trained now; expected it frozen here, "
            "too, while loading, or a checkpoint that was saved with frozen=True"
        )
    for target in targets:
        theirs = loaded.others.get(target.name, {}).get("dtype", "float32")
        kept = target.dtype is None or target.name in loaded.left_out
        if not kept and _KINDS.get(theirs) != _KINDS[str(target.dtype)]:
            raise CheckpointError(
                f"{path}: {target.name!r} is of {theirs} in it, expected {target.dtype}: is it the checkpoint of "
                "another model?"
            )
    return {*expected}, [*targets]
