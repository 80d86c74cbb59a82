"""A script for DeepSpeed with its import changed, as a subject."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from frontends.torch import deepspeed
from offload_core.errors import CheckpointError
from tests.support.subjects import Call, Wrong, plain
from tests.support.subjects.models import images, mixed
from tests.support.subjects.of_torch import READS_OF_STATES, STEPS, TorchRun

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}},
}


class Face(TorchRun):
    """What ``deepspeed.initialize`` returns for a configuration of this stage; ``more``: further sections."""

    def __init__(self, seed: int, *, stage: int, **more: Any) -> None:
        super().__init__(seed, stage=stage, **more)
        self.model = mixed(seed)
        zero: dict[str, Any] = {"stage": stage}
        if stage == 3:
            zero |= {"stage3_param_persistence_threshold": 0, "offload_param": {"device": "cpu"}}
        config = {**CONFIG, "zero_optimization": zero, **more}
        self.engine, self.optimizer, _, self.schedule = deepspeed.initialize(model=self.model, config=config)

    @property
    def callable(self) -> Any:
        return self.engine

    def update(self, number: int | None = None) -> None:
        for micro_step in range(self.fields.get("gradient_accumulation_steps", 1)):
            x = images(None if number is None else 100 * number + micro_step)
            self.engine.backward(self.engine(x).float().pow(2).mean())
            self.engine.step()

    def step(self, number: int | None = None) -> None:
        self.update(number)
        self.loader.at += 1

    def values(self) -> dict[str, Any]:
        engine = self.engine
        counts = [engine.global_steps, engine.global_samples, engine.skipped_steps, engine.get_lr()]
        return super().values() | {"counts": counts, "schedule": plain(self.schedule.state_dict())}

    def forget(self) -> None:
        self.optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        state = {"rng": torch.arange(5), "half": torch.ones(2, dtype=torch.bfloat16), "words": ["a", {"b": None}]}
        self.engine.save_checkpoint(folder, client_state=state)

    def load(self, folder: Path) -> None:
        _, found = self.engine.load_checkpoint(folder)
        assert plain(found["rng"]) == plain(torch.arange(5))
        assert plain(found["half"]) == plain(torch.ones(2, dtype=torch.bfloat16))
        assert found["words"] == ["a", {"b": None}]

    def close(self) -> None:
        self.engine.destroy()

    @staticmethod
    def by_checkpoint(run: "Face", begin: Any, folder: Path, go_on: Callable[[], None]) -> "Face":
        run.save(folder)
        rest = run.rest()
        go_on()
        other = begin(1)
        other.load(folder)
        other.take_rest(rest)
        return other


def of_a_pipeline(kind: str) -> Callable[[Face, Path], None]:
    def prepare(run: Face, folder: Path) -> None:
        (folder / "global_step3").mkdir()
        (folder / "latest").write_text("global_step3")
        torch.save({"module": {}}, folder / "global_step3" / kind)
        states = {"module": {}, "dp_world_size": 1, "mp_world_size": 1}
        torch.save(states, folder / "global_step3" / "mp_rank_00_model_states.pt")

    return prepare


def saved_by_another(run: Face, folder: Path) -> None:
    run.another().save(folder / "given")


Face.resumes = {"a checkpoint": Face.by_checkpoint}
Face.wrong = {
    **STEPS,
    **{
        f"a checkpoint of {name}": Wrong(
            lambda run, folder: run.load(folder), CheckpointError, "pipeline|MoE|expert", of_a_pipeline(kind)
        )
        for name, kind in (
            ("a pipeline", "layer_00-model_00-model_states.pt"),
            ("experts", "layer_0_expert_0_mp_rank_00_model_states.pt"),
        )
    },
}
Face.reads = READS_OF_STATES
Face.calls = {
    "step": Call(lambda run, folder: run.update(2)),
    "save_checkpoint": Call(lambda run, folder: run.save(folder / "saved")),
    "load_checkpoint": Call(
        lambda run, folder: run.load(folder / "given"), saved_by_another, lambda run, folder: run.load(folder / "given")
    ),
}
