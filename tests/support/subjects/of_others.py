"""Subjects whose loop is another library's: Accelerate, Trainer, OffloadTrainer and Lightning."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from frontends.torch.integrations.shards import FOLDER
from tests.support.subjects import Call, Program, Script, nothing, plain
from tests.support.subjects.of_torch import GROUPS, READS, READS_OF_STATES, STATE_DICTS, STATES, Alone, TorchRun


class Accelerated(Alone):
    """A loop with Accelerate. ``in_shards`` has it save by ``save_in_shards``."""

    def __init__(self, seed: int, *, in_shards: bool = False, **fields: Any) -> None:
        from accelerate import Accelerator

        from frontends.torch.integrations.accelerate import save_in_shards

        super().__init__(seed, **fields)
        self.fields = {**self.fields, "in_shards": in_shards}
        self.accelerator = Accelerator(cpu=True)
        self.model, self.prepared = self.accelerator.prepare(self.model, self.optimizer)
        if in_shards:
            save_in_shards(self.accelerator, self.model, self.prepared)

    def differentiate(self, loss: torch.Tensor) -> None:
        self.accelerator.backward(loss)

    def step(self, number: int | None = None) -> None:
        self.backward(number)
        self.prepared.step()
        self.prepared.zero_grad()
        self.loader.at += 1

    @staticmethod
    def by_state(run: "Accelerated", begin: Any, folder: Path, go_on: Callable[[], None]) -> "Accelerated":
        run.accelerator.save_state(str(folder), safe_serialization=False)
        rest = run.rest()
        go_on()
        other = begin(1)
        other.accelerator.load_state(str(folder))
        other.take_rest(rest)
        return other


class Looped(Program, TorchRun):
    """A program of torch, with its optimizer and model."""

    engine: Any = None

    def everything(self) -> dict[str, Any]:
        found = self.values() | {"torch": plain(torch.get_rng_state())}
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        return found | {"groups": plain(groups)}

    def another(self, steps: int = 0) -> "Looped":
        return self  # its state dict is copied, and changed

    def forget(self) -> None:
        """Nothing is left of a call that was refused between two steps."""

    wrong: ClassVar = {**GROUPS, **STATES}
    calls: ClassVar = {"step": Call(nothing)}


class OfTrainer(Looped):
    """A Trainer of transformers, with OffloadedAdamW and the callback, or an OffloadTrainer.

    Args:
        offload: the fields of the engine; None: a Trainer with OffloadedAdamW.
        settings: TrainingArguments besides those of ``hugging_face.trainer_of``.
    """

    def __init__(self, script: Script, folder: Path, *, offload: dict[str, Any] | None = None, **settings: Any) -> None:
        from transformers import TrainerCallback

        from frontends.torch.integrations.trainer import OffloadTrainer
        from frontends.torch.integrations.transformers import OffloadCallback
        from tests.support import hugging_face

        super().__init__(script, folder)
        of_test = self

        class Asks(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if not of_test.begun:
                    of_test.start()

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if not of_test.wants_more():
                    control.should_training_stop = True
                control.should_save = state.global_step == 2

        self.begun = False
        callbacks = [*([OffloadCallback()] if offload is None else []), Asks()]
        optimizer = hugging_face.OFFLOADED if offload is None else {"offload": offload}
        kind = {} if offload is None else {"kind": OffloadTrainer, "learning_rate": hugging_face.LR}
        given = {"save_steps": 100, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, **settings}
        self.trainer = hugging_face.trainer_of(folder, optimizer, callbacks=callbacks, **kind, **given)
        self.model = self.trainer.model

    def start(self) -> None:
        self.begun = True
        self.engine = getattr(self.trainer, "engine", None)
        self.optimizer = self.trainer.optimizer if self.engine is None else self.engine.optimizer
        self.optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        assert self.wants_more()

    def train(self, since: Path | None) -> None:
        if since is None:
            self.trainer.train()
            return
        here = Path(self.trainer.args.output_dir) / since.name  # where the callback looks
        shutil.copytree(since, here)
        self.trainer.train(resume_from_checkpoint=str(here))

    @staticmethod
    def all_of(folder: Path) -> Path:
        return folder / "checkpoint-2"

    @staticmethod
    def without(folder: Path, names: tuple[str, ...]) -> Path:
        """The checkpoint, without some of its files: what ``save_only_model=True`` or no callback leaves out."""
        found = folder / "checkpoint-2"
        for name in names:
            shutil.rmtree(found / name) if (found / name).is_dir() else (found / name).unlink()
        return found


OfTrainer.resumes = {"a checkpoint": OfTrainer.all_of}
OfTrainer.reads = {name: READS[name] for name in ("states", "whole_states", "the optimizer's state_dict")}


class OfPlainTrainer(OfTrainer):
    """A Trainer that saves in its own file and in shards."""

    resumes: ClassVar = {
        "both": OfTrainer.all_of,
        "Trainer's file": partial(OfTrainer.without, names=(FOLDER,)),
        "shards": partial(OfTrainer.without, names=("optimizer.pt", "scheduler.pt", "rng_state.pth")),
    }
    reads: ClassVar = {**READS_OF_STATES}


class OfLightning(Looped):
    """A fit of Lightning, with OffloadedAdamW from ``configure_optimizers`` or with the strategy.

    Args:
        stage: of the strategy; None: the optimizer alone.
    """

    def __init__(self, script: Script, folder: Path, *, stage: int | None = None, **settings: Any) -> None:
        super().__init__(script, folder)
        self.folder, self.stage, self.settings, self.begun = folder, stage, settings, False

    def train(self, since: Path | None) -> None:
        import lightning.pytorch as pl

        from frontends.torch.integrations.lightning import OffloadStrategy
        from tests.support import lightning_models as models

        of_test = self

        class Asks(pl.Callback):
            def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
                if not of_test.begun:
                    of_test.start(module)

            def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
                if not of_test.wants_more():
                    trainer.should_stop = True

        new = models.ours if self.stage is None else models.engines
        dropout = 0.0 if self.stage is None else 0.1
        model = models.Model(new, dropout=dropout, late=self.stage == 3)
        strategy = "auto" if self.stage is None else OffloadStrategy(**models.STAGES[self.stage])
        settings = {"callbacks": [Asks()], "save_every": self.saved_at, **self.settings}
        models.fitted(self.folder, model, strategy, resume=None if since is None else str(since), **settings)

    def everything(self) -> dict[str, Any]:
        found = super().everything()
        if self.stage is None:
            del found["torch"]  # of generators Lightning itself saves nothing
        return found

    def start(self, module: Any) -> None:
        self.begun, self.model = True, module
        [self.optimizer] = module.trainer.optimizers
        self.engine = getattr(module.trainer.strategy, "engine", None)
        assert self.wants_more()

    saved_at: ClassVar = 5  # between epochs: its loader knows no place

    @staticmethod
    def saved(folder: Path) -> Path:
        return folder / f"step={OfLightning.saved_at}.ckpt"


OfLightning.resumes = {"a checkpoint": OfLightning.saved}
OfLightning.reads = {name: READS[name] for name in ("states", "whole_states", "the optimizer's state_dict")}

Accelerated.resumes = {**STATE_DICTS, "save_state": Accelerated.by_state}
Accelerated.calls = {
    "step": Call(lambda run, folder: run.step(2)),
    "save_state": Call(lambda run, folder: run.accelerator.save_state(str(folder / "saved"), safe_serialization=False)),
}
