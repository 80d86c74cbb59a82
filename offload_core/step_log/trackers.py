"""Programs that show runs: TensorBoard, Weights & Biases, MLflow. Each is reached through its own package."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..support.optional import library
from .writer import Value, Writer

_SECONDS = 10
"""Seconds after which TensorBoard's files are flushed."""


class TensorBoard(Writer):
    """Event files that TensorBoard shows (``tensorboard --logdir FOLDER``), written by tensorboardX, in a thread of its
    own: a process that is killed loses the last seconds.

    Each run writes a file. That of a continued run states the step from which on records of earlier files do not count.

    Args:
        folder: the run's folder; it is made. With ``every_rank``, each rank writes to ``rank0`` and so on in it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._file: Any = None
        self._last: int | None = None

    def open(self, rank: int | None) -> None:
        self._new_file = library("tensorboardX", "log", "TensorBoard").SummaryWriter
        self.folder = self.folder if rank is None else self.folder / f"rank{rank}"
        self.folder.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, record: Mapping[str, Value]) -> None:
        if self._last is None or step < self._last:
            self.close()
            # tensorboardX's names have whole seconds, and TensorBoard reads files in the order of their names.
            own = f".{time.time_ns()}.{os.getpid()}"
            self._file = self._new_file(str(self.folder), purge_step=step, filename_suffix=own, flush_secs=_SECONDS)
        self._last = step
        for name, value in record.items():
            if isinstance(value, float | int):
                self._file.add_scalar(name, value, step)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class WandB(Writer):
    """A run of Weights & Biases (``pip install wandb``): ``WandB(project="a", id="run-1", resume="allow")``.

    Values are drawn over ``step``, the number of the update. W&B deletes nothing, so updates that are repeated after a
    checkpoint have two points there.

    Args:
        settings: arguments of ``wandb.init``. If the program has a run already, it takes that run and does not end it.
            With ``every_rank``, each rank has its own run, and their names end in ``-rank0`` and so on.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self._run: Any = None
        self._is_ours = False

    def open(self, rank: int | None) -> None:
        wandb = library("wandb", None, "WandB")
        self._is_ours = wandb.run is None
        self._run = wandb.init(**_named("name", self._settings, rank)) if self._is_ours else wandb.run
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, record: Mapping[str, Value]) -> None:
        values = {name: value for name, value in record.items() if value is not None}
        self._run.log({**values, "step": step})

    def close(self) -> None:
        if self._is_ours:
            self._run.finish()


class MLflow(Writer):
    """A run of MLflow (``pip install mlflow``), which gets all numbers of a record as metrics.

    If an update is repeated after a checkpoint, MLflow shows the later value.

    Args:
        settings: arguments of ``mlflow.start_run`` (``run_id`` continues a run). If the program has an active run
            already, it takes that run and does not end it. With ``every_rank``, each rank has its own run, and their
            names end in ``-rank0`` and so on.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self._run: Any = None
        self._is_ours = False

    def open(self, rank: int | None) -> None:
        self._mlflow = library("mlflow", None, "MLflow")
        active = self._mlflow.active_run()
        self._is_ours = active is None
        self._run = self._mlflow.start_run(**_named("run_name", self._settings, rank)) if self._is_ours else active

    def write(self, step: int, record: Mapping[str, Value]) -> None:
        numbers = {name: value for name, value in record.items() if isinstance(value, float | int)}
        self._mlflow.log_metrics(numbers, step=step, run_id=self._run.info.run_id)

    def close(self) -> None:
        if self._is_ours:
            self._mlflow.end_run()


def _named(key: str, settings: dict[str, Any], rank: int | None) -> dict[str, Any]:
    """Return the settings of a run, with the rank in its name if each rank has a run."""
    return settings if rank is None else {**settings, key: f"{settings.get(key, 'run')}-rank{rank}"}
