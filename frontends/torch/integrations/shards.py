"""The states in shards, in a checkpoint folder that another library writes and resumes from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ..files.checkpoint import ModelCheckpoints, random_states, set_random_states
from ..optimizer import OffloadedAdamW

FOLDER = "offload"
"""The name of the shards' folder in the library's own."""


class Shards:
    """Saves and loads what an engine's checkpoint holds. All ranks make the same calls."""

    def __init__(self) -> None:
        self._random: Mapping[str, Any] | None = None

    def save(
        self,
        folder: Path,
        model: nn.Module,
        optimizer: OffloadedAdamW,
        *,
        step: int,
        stateful: Mapping[str, Any] | None = None,
        keep: int | None,
    ) -> Path:
        """Save to ``folder/offload/step-…``, and return that.

        Args:
            step: the library's own count, which :meth:`load` gives back.
            stateful, keep: as for ``Engine.save_checkpoint``.
        """
        return ModelCheckpoints(model, optimizer).save(
            folder / FOLDER, stateful=stateful, extras={"global_step": step}, keep=keep, wait=True
        )

    def load(
        self,
        path: Path,
        model: nn.Module,
        optimizer: OffloadedAdamW,
        *,
        stateful: Mapping[str, Any] | None = None,
    ) -> int:
        """Load ``folder/offload``, or the one checkpoint in it, and return the library's step."""
        checkpoints = ModelCheckpoints(model, optimizer)
        extras = checkpoints.load(path, stateful=stateful, names=None, random_state=True)
        self._random = random_states()
        return extras["global_step"]

    def resume_random(self) -> None:
        """Have the random generators go on from where they were saved, once: when the library's loop has drawn from
        them, to begin a loader anew."""
        if self._random is not None:
            set_random_states(self._random)
            self._random = None

    def forget_random(self) -> None:
        """Nothing has been drawn that the interrupted run had not drawn, too."""
        self._random = None
