"""Hugging Face's Accelerate: states in shards, which each rank saves and loads itself."""

from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from offload_core.errors import CheckpointError, ConfigError

from ..files.checkpoint import ModelCheckpoints
from ..optimizer import OffloadedAdamW
from .shards import FOLDER

_IN_SHARDS = "in_shards"
"""The key in Accelerate's file of an optimizer; its value is the name of the folder that has the states."""


def save_in_shards(accelerator: Accelerator, model: nn.Module, optimizer: Any, *, folder: str = FOLDER) -> None:
    """Have ``accelerator.save_state`` and ``load_state`` keep the states of an ``OffloadedAdamW`` in shards.

    Call it once, after ``prepare``, on all ranks. Each rank then writes its part of master weights and moments to
    ``offload/`` in the folder that ``save_state`` was given, and any number of ranks can load them; all ranks must
    share that folder. The rest is Accelerate's, as ever. Its file of the model has the frozen parameters, which the
    shards leave out.

    Args:
        model, optimizer: as ``prepare`` returned them. From now on ``optimizer.state_dict()`` holds no states, but only
            says where they are.
        folder: the name of the folder. A second optimizer needs another one.

    Raises:
        ConfigError: the optimizer is not an ``OffloadedAdamW`` that ``prepare`` returned.
        CheckpointError: in ``save_state``, if a shard cannot be written; in ``load_state``, if the shards are missing,
            damaged or of another model.
    """
    offloaded = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(optimizer, AcceleratedOptimizer) or not isinstance(offloaded, OffloadedAdamW):
        got = " of ".join(dict.fromkeys([type(optimizer).__name__, type(offloaded).__name__]))
        raise ConfigError(
            f"save_in_shards: the optimizer is {got}, expected an OffloadedAdamW as accelerator.prepare() returned it"
        )
    states = _States(accelerator.unwrap_model(model), optimizer, folder)
    vars(optimizer).update(state_dict=states.state_dict, load_state_dict=states.load_state_dict)
    accelerator.register_save_state_pre_hook(states.save)
    accelerator.register_load_state_pre_hook(states.load)


class _States:
    """Takes the place of an optimizer's ``state_dict`` and ``load_state_dict``: Accelerate calls these after hooks."""

    def __init__(self, model: nn.Module, optimizer: AcceleratedOptimizer, folder: str) -> None:
        self._checkpoints = ModelCheckpoints(model, optimizer.optimizer)
        self._load_whole = optimizer.load_state_dict
        self._folder = folder
        self._loaded = False

    def save(self, models: Any, weights: Any, output_dir: str) -> None:
        path = Path(output_dir) / self._folder
        self._checkpoints.save(path, stateful=None, extras=None, keep=1, wait=True, frozen=False)

    def load(self, models: Any, input_dir: str) -> None:
        path = Path(input_dir) / self._folder
        self._loaded = path.is_dir()
        if self._loaded:  # Accelerate restores the random generators
            self._checkpoints.load(path, stateful=None, names=None, random_state=False)

    def state_dict(self) -> dict[str, Any]:
        return {"state": {}, "param_groups": [], _IN_SHARDS: self._folder}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        if _IN_SHARDS not in states:  # saved before this was asked for
            self._load_whole(states)
        elif not self._loaded:
            raise CheckpointError(
                f"load_state: the states are in {states[_IN_SHARDS]}/, which is not there; expected the folder that "
                "save_state() wrote, whole, in accelerator.load_state()"
            )
        self._loaded = False
