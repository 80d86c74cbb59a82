"""Hugging Face's Accelerate: states in shards, which each rank saves and loads itself; an engine's optimizer."""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from offload_core.errors import CheckpointError, ConfigError

from ..engine import Engine
from ..optim.optimizer import OffloadedOptimizer
from ..optim.state_dicts import IN_SHARDS, stub
from ..weights.checkpoint import ModelCheckpoints
from .shards import FOLDER


def save_in_shards(accelerator: Accelerator, model: nn.Module, optimizer: Any, *, folder: str = FOLDER) -> None:
    """Have ``accelerator.save_state`` and ``load_state`` keep the states of an ``OffloadedAdamW`` in shards.

    Call it once, after ``prepare``, on all ranks. Each rank then writes its part of master weights and moments to
    ``offload/`` in the folder that ``save_state`` was given, and any number of ranks can load them; all ranks must
    share that folder. The rest is Accelerate's, as without this call. Its file of the model has the frozen parameters,
    which the shards leave out.

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
    if not isinstance(optimizer, AcceleratedOptimizer) or not isinstance(offloaded, OffloadedOptimizer):
        got = " of ".join(dict.fromkeys([type(optimizer).__name__, type(offloaded).__name__]))
        raise ConfigError(
            f"save_in_shards: the optimizer is {got}, expected an OffloadedAdamW as accelerator.prepare() returned it"
        )
    states = _AccelerateStates(accelerator.unwrap_model(model), optimizer, folder)
    vars(optimizer).update(state_dict=states.state_dict, load_state_dict=states.load_state_dict)
    accelerator.register_save_state_pre_hook(states.save)
    accelerator.register_load_state_pre_hook(states.load)


class _AccelerateStates:
    """Replaces an optimizer's ``state_dict`` and ``load_state_dict``, which Accelerate calls after its hooks."""

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
        return stub(self._folder)

    def load_state_dict(self, states: dict[str, Any]) -> None:
        if IN_SHARDS not in states:  # saved before this was asked for
            self._load_whole(states)
        elif not self._loaded:
            raise CheckpointError(
                f"load_state: the states are in {states[IN_SHARDS]}/, which is not there; expected the folder that "
                "save_state() wrote, with all its files, in accelerator.load_state()"
            )
        self._loaded = False


class EngineOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """An engine's optimizer as Trainer calls it: ``step()`` is the engine's, and the states are in shards."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.optimizer, device_placement=False)
        self._engine = engine
        self.norm: torch.Tensor | None = None
        """The gradients' norm, which the next step sets."""
        self._is_accelerate_prepared = True  # Accelerate's own mark: it wraps an optimizer once

    def step(self, closure: Any = None) -> None:
        report = self._engine.step(boundary=True)
        if self.norm is not None and report.grad_norm is not None:
            self.norm.fill_(report.grad_norm)
        self.norm = None

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        self._engine.zero_grad()

    @property
    def step_was_skipped(self) -> bool:
        report = self.optimizer.report
        return report is not None and not report.updated

    def state_dict(self) -> dict[str, Any]:
        return stub(FOLDER)
