"""OffloadedAdamW in Hugging Face's Trainer: its own settings hold, bit for bit as with torch's AdamW."""

import json
import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback, get_scheduler
from transformers.trainer_utils import HPSearchBackend

from frontends.torch import OffloadedAdamW
from frontends.torch.integrations.trainer import OffloadTrainer
from frontends.torch.integrations.transformers import FOLDER, OffloadCallback
from offload_core.checkpoint.reader import Checkpoint, Loaded
from offload_core.errors import CheckpointError, ConfigError, ConfigWarning, StateError
from offload_core.step_log import StepLog
from tests.support.hugging_face import (
    ARGUMENTS,
    CLIP,
    LR,
    OFFLOADED,
    RANKS,
    STEPS,
    TORCHS,
    alone,
    llama,
    trained,
    trainer_of,
)
from tests.support.processes import on_ranks
from tests.support.torch_models import same_bits
from tests.support.torch_rank import bits

__all__ = ["alone"]  # a fixture


def logged(trainer, *keys):
    return [[entry[key] for key in keys] for entry in trainer.state.log_history if "loss" in entry]


def assert_same_run(one, other, *, states=False):
    assert logged(one, "step", "loss", "grad_norm", "learning_rate") == logged(
        other, "step", "loss", "grad_norm", "learning_rate"
    )
    for (name, p), q in zip(one.model.named_parameters(), other.model.parameters(), strict=True):
        assert same_bits(p, q), name
        for key in ("step", "exp_avg", "exp_avg_sq", *(["master"] if states and p.dtype != torch.float32 else [])):
            mine, yours = one.optimizer.state[p][key], other.optimizer.state[q][key]
            assert same_bits(torch.as_tensor(mine).float(), torch.as_tensor(yours).float()), (name, key)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("torch"), TORCHS, save_strategy="no")


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run without interruption."""
    return trained(tmp_path_factory.mktemp("offloaded"), callbacks=[OffloadCallback()])


@pytest.mark.draws(1)
def test_a_run_is_that_of_torchs_fused_adamw(reference, straight):
    assert_same_run(straight, reference)


def test_an_optimizer_and_a_schedule_of_ones_own_mean_the_same(reference, tmp_path):
    model = llama()
    decayed = {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1}
    plain = {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}
    optimizer = OffloadedAdamW([decayed, plain], lr=LR)
    schedule = get_scheduler("cosine", optimizer, 2, STEPS)
    trainer = trained(tmp_path, {"optimizers": (optimizer, schedule)}, model=model, save_strategy="no")
    assert_same_run(trainer, reference)


@pytest.mark.draws(1)
def test_a_second_trainer_over_one_model_trains_as_with_torchs_optimizer(tmp_path):
    """The first one is still there, and says so when it is used again."""
    runs = []
    for optimizer in (OFFLOADED, TORCHS):
        model = llama()
        first, second = (trained(tmp_path, optimizer, model=model, max_steps=2, save_strategy="no") for _ in range(2))
        runs.append((first, second))
    (first, second), (_, reference) = runs
    assert_same_run(second, reference)
    with pytest.raises(StateError, match="a later one was made of its parameters"):
        first.optimizer.step()


def test_bfloat16_parameters_resume_with_their_master_weights(tmp_path):
    """From the latest checkpoint; it is there once, in shards; save_model writes what the model computes with."""
    settings = {"save_only_model": True, "save_steps": 3, "max_steps": 5, "activation_checkpointing": True}

    def run(**more):
        model = llama(torch.bfloat16)
        return trained(tmp_path, model=model, callbacks=[OffloadCallback()], **settings, **more)

    straight = run()
    assert {path.name for path in (tmp_path / "checkpoint-3").iterdir()} & {"optimizer.pt", FOLDER} == {FOLDER}
    shutil.rmtree(tmp_path / "checkpoint-5")
    resumed = run(resume=True)
    assert_same_run(resumed, straight, states=True)
    resumed.save_model(str(tmp_path / "saved"))
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    for name, param in straight.model.named_parameters():
        assert name == "lm_head.weight" or same_bits(saved[name], param), name


def test_bf16_autocast_and_gradient_checkpointing_change_nothing_in_the_optimizer(tmp_path):
    settings = {"bf16": True, "activation_checkpointing": True, "max_steps": 3, "save_strategy": "no"}
    assert_same_run(trained(tmp_path, **settings), trained(tmp_path, TORCHS, **settings))


def test_the_learning_rate_betas_and_eps_of_the_arguments_hold(tmp_path):
    """As for Trainer's own optimizers."""
    settings = {"learning_rate": 3e-3, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-3, "max_steps": 3}
    settings |= {"save_strategy": "no", "lr_scheduler_type": "constant"}
    ours = trained(tmp_path, ARGUMENTS, callbacks=[OffloadCallback()], **settings)
    assert_same_run(ours, trained(tmp_path, {}, optim="adamw_torch_fused", **settings))
    assert logged(ours, "learning_rate")[-1] == [3e-3]


TRIALS = [{"learning_rate": 0.1}, {"learning_rate": 1e-3, "adam_beta1": 0.5}, {"adam_epsilon": 1e-2}]


@pytest.mark.draws(1)
@pytest.mark.parametrize("kind", [Trainer, OffloadTrainer])
def test_each_trial_of_a_search_trains_with_its_own_settings(kind, tmp_path, monkeypatch):
    """As a backend of ``hyperparameter_search`` gives them to a Trainer; the callback warns of nothing."""
    monkeypatch.setattr("transformers.integrations.hp_params", lambda trial: trial.params)  # no backend is there
    ours = ARGUMENTS if kind is Trainer else {"offload": {"stage": 2}}
    found = []
    for optimizer, given in ((ours, {"kind": kind}), ({}, {"optim": "adamw_torch_fused"})):
        settings = {"max_steps": 2, "max_grad_norm": 0.0, "save_strategy": "no", "warmup_steps": 0, **given}
        callbacks = [OffloadCallback()] if optimizer else []
        trainer = trainer_of(tmp_path, optimizer, callbacks=callbacks, model_init=lambda: llama(), **settings)
        trainer.hp_search_backend, trainer.hp_space = HPSearchBackend.OPTUNA, lambda trial: trial.params
        trials = [SimpleNamespace(number=number, params=params) for number, params in enumerate(TRIALS)]
        found.append([(trainer.train(trial=trial).training_loss, bits(trainer.model)) for trial in trials])
    assert found[0] == found[1]
    assert len({*found[0]}) == len(TRIALS)


class OneCycle(Trainer):
    def create_scheduler(self, num_training_steps, optimizer=None):
        self.lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=self.args.learning_rate, total_steps=num_training_steps
        )
        return self.lr_scheduler


class OneCycleOnEngine(OneCycle, OffloadTrainer):
    pass


@pytest.mark.parametrize("kind", [OneCycle, OneCycleOnEngine])
def test_a_schedule_that_sets_rates_itself_is_not_warned_of(kind, tmp_path):
    optimizer = ARGUMENTS if kind is OneCycle else {"offload": {"stage": 2}}
    trained(tmp_path, optimizer, kind=kind, callbacks=[OffloadCallback()], max_steps=2, save_strategy="no",
            learning_rate=3e-3)  # fmt: skip


def with_rate(**lr):
    return {"optimizer_cls_and_kwargs": (OffloadedAdamW, lr)}


def given(**lr):
    model = llama()
    return {"model": model, "optimizer": {"optimizers": (OffloadedAdamW(model.parameters(), **lr), None)}}


@pytest.mark.parametrize(
    ("made", "arguments", "said"),
    [
        ({"optimizer": with_rate()}, {}, r"rate is 0.001, and TrainingArguments\(learning_rate=5e-05\) has no effect"),
        (given(), {}, r"rate is 0.001, and TrainingArguments\(learning_rate=5e-05\) has no effect"),
        (given(lr=1e-2), {"learning_rate": 2e-4}, r"rate is 0.01, and TrainingArguments\(learning_rate=0.0002\)"),
        (given(lr=1e-2), {}, None),
        ({"optimizer": with_rate(lr=1e-3)}, {"learning_rate": 1e-3}, None),
        ({"optimizer": ARGUMENTS}, {}, None),
    ],
)
def test_a_learning_rate_that_is_not_that_of_the_arguments_is_warned_of(tmp_path, made, arguments, said):
    settings = {"max_steps": 1, "save_strategy": "no", "warmup_steps": 0, **arguments}
    with pytest.warns(ConfigWarning, match=said) if said else nullcontext():
        trained(tmp_path, callbacks=[OffloadCallback()], **made, **settings)


class Norms(TrainerCallback):
    """Of the gradients that the optimizer finds."""

    def __init__(self):
        self.seen = []

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        grads = [p.grad for p in model.parameters()]
        self.seen.append(float(torch.linalg.vector_norm(torch.stack([g.double().norm() for g in grads]))))


def test_gradients_are_clipped_to_the_asked_norm_and_the_log_has_both(tmp_path):
    checking = {"optimizer_cls_and_kwargs": (OffloadedAdamW, {"lr": LR, "skip_nonfinite": True})}
    norms = Norms()
    trainer = trained(tmp_path, checking, callbacks=[OffloadCallback(), norms], max_steps=3, save_strategy="no")
    for (before, after), found in zip(logged(trainer, "grad_norm", "offload_grad_norm"), norms.seen, strict=True):
        assert before > CLIP
        assert after == pytest.approx(found, rel=1e-7)
        assert after == pytest.approx(CLIP, rel=1e-5)


def test_frozen_parameters_are_in_trainers_file_alone(tmp_path):
    """As Trainer's own checkpoints of an adapter leave the base out."""

    def half_frozen(fill=None):
        model = llama()
        model.model.requires_grad_(False)
        if fill is not None:
            model.model.norm.weight.fill_(fill)
        return model

    settings = {"save_steps": 2, "max_steps": 4}
    straight = trained(tmp_path, model=half_frozen(2.0), callbacks=[OffloadCallback()], **settings)
    folder = tmp_path / "checkpoint-2"
    loaded = Loaded(Checkpoint(folder / FOLDER), None)
    assert [*loaded.parameters] == ["lm_head.weight"]
    assert {"model.norm.weight", "model.embed_tokens.weight"} < loaded.left_out.keys()
    assert not loaded.others
    (folder / "optimizer.pt").unlink()
    settings |= {"save_strategy": "no", "callbacks": [OffloadCallback()]}
    resumed = trained(tmp_path, model=half_frozen(), resume=str(folder), **settings)
    assert logged(resumed, "step", "loss") == logged(straight, "step", "loss")
    for (name, p), q in zip(resumed.model.named_parameters(), straight.model.parameters(), strict=True):
        assert same_bits(p, q), name


class Later(TrainerCallback):
    def on_log(self, args, state, control, logs, **kwargs):
        self.keys = getattr(self, "keys", set()) | set(logs)


def test_the_log_says_what_is_held_where(tmp_path):
    later = Later()
    with StepLog(tmp_path / "steps.jsonl") as log:
        trainer = trained(tmp_path, callbacks=[OffloadCallback(log=log), later], max_steps=1, save_strategy="no")
    n_params = sum(p.numel() for p in trainer.model.parameters())
    buffers = sum(b.nbytes for b in trainer.model.buffers())
    [[host, device]] = logged(trainer, "offload_host_bytes", "offload_device_bytes")
    assert device == 4 * n_params + buffers
    assert 8 * n_params <= host < 8 * n_params + 2**16  # moments; on the CPU a parameter is its own master weight
    assert {"offload_host_bytes", "offload_device_bytes"} <= later.keys
    line, _ = map(json.loads, (tmp_path / "steps.jsonl").read_text().splitlines())  # and one when training ends
    entry, _ = trainer.state.log_history
    assert line == entry


class Searching(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        state.is_hyper_param_search = True


def test_what_the_callback_cannot_do_is_said_when_training_begins(straight, tmp_path):
    with pytest.raises(ConfigError, match="checkpoints in a search of hyper-parameters"):
        trained(tmp_path, callbacks=[Searching(), OffloadCallback()])
    with pytest.raises(ConfigError, match=r"the optimizer is AdamW, expected OffloadedAdamW: .*optimizer_cls_and_kw"):
        trained(tmp_path, TORCHS, callbacks=[OffloadCallback()])
    saved = Path(straight.args.output_dir)
    folder = tmp_path / "checkpoint-2"
    shutil.copytree(saved / "checkpoint-2", folder)
    (folder / "optimizer.pt").unlink()
    with pytest.raises(CheckpointError, match=r"the states of step 4, and Trainer resumes at step 2.*resume_from"):
        trained(tmp_path, callbacks=[OffloadCallback(saved / "checkpoint-4")], resume=str(folder))
    other = shutil.copytree(saved / "checkpoint-2", tmp_path / "other" / "checkpoint-2")
    trained_with = json.loads((other / "trainer_state.json").read_text())
    trained_with["log_history"][0]["loss"] += 1
    (other / "trainer_state.json").write_text(json.dumps(trained_with))
    with pytest.raises(CheckpointError, match=r"checkpoint-2: the checkpoint of another run than the one that Train"):
        trained(tmp_path, callbacks=[OffloadCallback()], resume=str(other))
    shutil.rmtree(folder / FOLDER)
    with pytest.raises(CheckpointError, match=r"resumes at step 2, and neither offload/ nor optimizer.pt is there"):
        trained(tmp_path, callbacks=[OffloadCallback()], resume=str(folder))


def test_two_ranks_train_as_ddp_does_and_resume_their_shards(tmp_path):
    """Fused AdamW finds the gradients that DistributedDataParallel has averaged, and so does ours."""

    @on_ranks(2)
    def found(rank):
        settings = {"learning_rate": LR, "max_steps": 5, "save_steps": 2, **RANKS}
        saving = {**settings, "save_only_model": True}
        theirs = trained(tmp_path / "theirs", TORCHS, **settings, save_strategy="no")
        run = partial(trained, tmp_path / "ours", ARGUMENTS, callbacks=[OffloadCallback()], **saving)
        ours = run()
        dist.barrier()
        resumed = run(resume=str(tmp_path / "ours" / "checkpoint-2"))
        held = sum(state["exp_avg"].numel() for state in resumed.optimizer.state.values())
        assert held / sum(p.numel() for p in resumed.model.parameters()) == pytest.approx(0.5, abs=0.01)
        with pytest.raises(ConfigError, match="save_only_model=False on 2 ranks"):
            trained(tmp_path / "refused", ARGUMENTS, callbacks=[OffloadCallback()], **settings)
        whole = trainer_of(tmp_path / "whole", callbacks=[OffloadCallback()], **saving)
        said = "checkpoints of 2 processes, and the optimizer's states are partitioned over 1"
        with pytest.raises(ConfigError, match=said):  # ranks would write the same files at the first save
            whole.train()
        assert whole.state.global_step == 0
        return [bits(run.model) for run in (theirs, ours, resumed)]

    assert len({*found[0], *found[1]}) == 1, found
