"""An engine's checkpoint inside the checkpoint folder of another library."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from offload_core.engine import Checkpoint, Loaded
from offload_core.errors import CheckpointError
from offload_core.support.checks import shown

from ..internals.compiled import uncompiled
from ..optim.optimizer import OffloadedOptimizer
from ..training.groups import groups_of_params
from ..weights.checkpoint import RANDOM, TENSORS, ModelCheckpoints

FOLDER = "offload"
"""The name of the engine's folder in the library's."""


class Shards:
    """Saves and loads an engine's checkpoint. All ranks make the same calls."""

    def __init__(self) -> None:
        self._random: Mapping[str, Any] | None = None

    def save(
        self,
        folder: Path,
        model: nn.Module,
        optimizer: OffloadedOptimizer,
        *,
        step: int,
        stateful: Mapping[str, Any] | None = None,
        keep: int | None,
        frozen: bool = True,
    ) -> Path:
        """Save to ``folder/offload/step-…``, and return that path.

        Args:
            step: the library's own count, which :meth:`load` shows.
            stateful, keep, frozen: as for ``Engine.save_checkpoint``.
        """
        return ModelCheckpoints(model, optimizer).save(
            folder / FOLDER, stateful=stateful, extras={"global_step": step}, keep=keep, wait=True, frozen=frozen
        )

    def load(
        self,
        path: Path,
        model: nn.Module,
        optimizer: OffloadedOptimizer,
        *,
        stateful: Mapping[str, Any] | None = None,
        accept: Callable[[int], None] = lambda step: None,
    ) -> None:
        """Load ``folder/offload``, or the one checkpoint in it. Parameters of the optimizer that were trained and are
        frozen now get their states, too: a library's callback may unfreeze them again.

        Args:
            accept: is given the library's step, and may raise :class:`CheckpointError` before anything changes.
        """

        def accept_extras(extras: Any) -> None:
            step = extras.get("global_step") if isinstance(extras, dict) else None
            if type(step) is not int:
                raise CheckpointError(
                    f"{path}: its extras are {shown(extras)}, expected the number of steps that is saved with a "
                    "library's checkpoint; is it an engine's own?"
                )
            accept(step)

        with optimizer.checkpoints.together("load"):
            named = {uncompiled(name): param for name, param in model.named_parameters()}
            saved, groups = Loaded(Checkpoint(path), None, [TENSORS]).parameters, optimizer.param_groups
            members = groups_of_params(groups)
            optimizer.components.register_all([named[name] for name in saved if named.get(name) in members], groups)
        checkpoints = ModelCheckpoints(model, optimizer)
        checkpoints.load(path, stateful=stateful, names=None, random_state=True, accept_extras=accept_extras)
        self._random = RANDOM.get()

    def resume_random(self) -> None:
        """Restore the loaded random generators, once: the library's loop draws from them to restart a loader."""
        if self._random is not None:
            RANDOM.set(self._random)
            self._random = None

    def forget_random(self) -> None:
        """Do not restore the random generators: the loop has drawn the same numbers as the saved run."""
        self._random = None
