"""OffloadTrainer: an engine inside Hugging Face's Trainer has the bits of torch's fused AdamW, at every stage."""

import gc
import json
import math
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import torch._dynamo.utils
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback

from frontends.torch import OffloadedAdamW, init
from frontends.torch.integrations.trainer import OffloadTrainer
from frontends.torch.integrations.transformers import FOLDER, OffloadCallback, offloaded_adamw
from frontends.torch.params.tensors import TakenGradient
from offload_core.config.options import OffloadConfig
from offload_core.errors import CheckpointError, ConfigError, StateError
from tests.support import simulated
from tests.support.hugging_face import (
    CLIP,
    DATA,
    EPOCH,
    LR,
    RANKS,
    STAGES,
    STEPS,
    TORCHS,
    ExactNorm,
    Generated,
    MeanOfRanks,
    alone,
    assert_same_run,
    llama,
    logged,
    norms,
    on_engine,
    states_of,
    told,
    trained,
    trainer_of,
)
from tests.support.processes import forked, on_ranks
from tests.support.torch_models import same_bits
from tests.support.torch_rank import bits

__all__ = ["alone"]  # a fixture

FOUR = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "activation_checkpointing": True}
EVALUATING = {"eval_strategy": "steps", "eval_steps": 3, "evaluated": DATA[:4]}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    generated = Generated()
    settings = {"kind": ExactNorm, "save_strategy": "no", "callbacks": [generated], **FOUR, **EVALUATING}
    return trained(tmp_path_factory.mktemp("torch"), TORCHS, **settings), generated


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Runs without interruption, by stage."""
    runs = {}

    def of(stage):
        if stage not in runs:
            generated = Generated()
            folder = tmp_path_factory.mktemp("engine")
            runs[stage] = on_engine(folder, stage, callbacks=[generated], **FOUR, **EVALUATING), generated
        return runs[stage]

    return of


@pytest.mark.draws(1)
@pytest.mark.parametrize("stage", STAGES)
def test_a_run_is_that_of_torchs_fused_adamw(reference, straight, stage):
    """Accumulating, clipping, checkpointing activations, evaluating and generating; gradients leave in backward."""
    (expected, theirs), (trainer, generated) = reference, straight(stage)
    assert_same_run(trainer, expected)
    assert norms(trainer) == pytest.approx(norms(expected), rel=1e-12)
    assert max(norms(trainer)) > CLIP
    assert generated.tokens == theirs.tokens
    assert (theirs.kinds, generated.kinds) == ({torch.Tensor}, {TakenGradient})
    assert trainer.engine.optimizer.updates == trainer.state.global_step


@pytest.mark.draws(1)
@pytest.mark.parametrize(("optim", "theirs"), [("sgd", torch.optim.SGD), ("adagrad", torch.optim.Adagrad)])
def test_another_optim_is_that_of_torch(optim, theirs, tmp_path):
    settings = {"save_strategy": "no", "weight_decay": 0.1, "max_grad_norm": 0.0}
    expected = trained(tmp_path, {"optimizer_cls_and_kwargs": (theirs, {"lr": LR, "fused": True})}, **settings)
    assert_same_run(on_engine(tmp_path, "3", optim=optim, **settings), expected)


def test_lion_has_the_settings_that_trainer_gives_to_it(tmp_path):
    settings = {"optim": "lion_32bit", "adam_beta2": 0.98, "weight_decay": 0.1, "save_strategy": "no", "max_steps": 1}
    optimizer = on_engine(tmp_path, "2", **settings).engine.optimizer
    assert optimizer.rule_name == "lion"
    assert {(group["betas"], group["weight_decay"]) for group in optimizer.param_groups} == {
        ((0.9, 0.98), 0.1),
        ((0.9, 0.98), 0.0),
    }


def test_clipping_agrees_with_torchs_own_norm(straight, tmp_path):
    """Its norm is summed in float32, so that the last bits differ."""
    theirs = trained(tmp_path, TORCHS, save_strategy="no", **FOUR, **EVALUATING)
    losses = [
        [entry["loss"] for entry in run.state.log_history if "loss" in entry] for run in (theirs, straight("3")[0])
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.draws(3)
@pytest.mark.parametrize("step", [2, EPOCH], ids=["in an epoch", "between epochs"])
@pytest.mark.parametrize(("stage", "later"), [("2", "3"), ("3", "3"), ("3", "1")])
def test_a_resumed_run_is_the_uninterrupted_one(straight, tmp_path, stage, later, step):
    expected, _ = straight(stage)
    folder = tmp_path / f"checkpoint-{step}"
    shutil.copytree(Path(expected.args.output_dir) / folder.name, folder)
    settings = {"callbacks": [Generated()], "save_strategy": "no", **FOUR, **EVALUATING}
    resumed = on_engine(tmp_path / "elsewhere", later, resume=str(folder), **settings)
    assert_same_run(resumed, expected)


@pytest.mark.draws(1)
@pytest.mark.parametrize("stage", ["2", "3"])
@pytest.mark.parametrize("lives_on", [True, False])
def test_a_second_trainer_over_one_model_trains_as_with_torchs_optimizer(stage, lives_on, tmp_path):
    """The first one was dropped, and its reference cycles are still there, or it lives on."""
    settings = {"max_steps": 2, "save_strategy": "no", "max_grad_norm": 0.0}
    theirs = llama()
    for _ in range(2):
        reference = trained(tmp_path, TORCHS, model=theirs, **settings)
    ours = llama()
    gc.disable()
    try:
        first = on_engine(tmp_path, stage, model=ours, **settings)
        if not lives_on:
            del first
        assert_same_run(on_engine(tmp_path, stage, model=ours, **settings), reference)
        if lives_on:
            with pytest.raises(StateError, match=r"this optimizer was closed, because a later one was made"):
                first.engine.step()
    finally:
        gc.enable()


@pytest.mark.parametrize("stage", ["2", "3"])
def test_a_run_with_torchs_adamw_goes_on_with_an_engine(tmp_path, stage):
    settings = {"max_grad_norm": 0.0, "save_steps": 3, "max_steps": 6}
    expected = trained(tmp_path, TORCHS, **settings)
    resumed = on_engine(tmp_path, stage, resume=str(tmp_path / "checkpoint-3"), **settings)
    assert_same_run(resumed, expected)


class Syncing(TrainerCallback):
    """Mixes the weights into a reference model, as TRL's ``sync_ref_model`` does, and may halve one of them."""

    def __init__(self, writes):
        self.reference, self._writes = llama(), writes

    def on_step_end(self, args, state, control, model, **kwargs):
        for target, param in zip(self.reference.parameters(), model.parameters(), strict=True):
            target.data.mul_(0.5).add_(param.data, alpha=0.5)
        if self._writes:
            model.model.norm.weight.data.mul_(0.5)
            with torch.no_grad():
                model.lm_head.weight.mul_(0.9)


@pytest.mark.draws(2)
@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("stage", ["2", "3"])
def test_callbacks_may_read_and_write_weights_between_steps(tmp_path, stage, writes):
    settings = {"max_steps": 4, "max_grad_norm": 0.0, "save_strategy": "no"}
    theirs, ours = Syncing(writes), Syncing(writes)
    expected = trained(tmp_path, TORCHS, callbacks=[theirs], **settings)
    found = on_engine(tmp_path, stage, callbacks=[ours], **settings)
    assert_same_run(found, expected)
    assert bits(ours.reference) == bits(theirs.reference)
    if stage == "3":
        assert found.engine.optimizer.sharding.live.numel == 0
        with pytest.raises(StateError, match=r"read outside the forward .* or stage=2 where that is code of others"):
            ours.on_step_end(None, None, None, found.model)


def test_callbacks_on_two_ranks_may_read_weights_in_stage_3_and_are_told_when_they_write(tmp_path):
    @on_ranks(2)
    def found(rank):
        settings = {"max_steps": 2, "save_strategy": "no", **RANKS}
        seen = []
        for stage in ("2", "3"):
            syncing = Syncing(False)
            on_engine(tmp_path, stage, callbacks=[syncing], **settings)
            seen.append(bits(syncing.reference))
        with pytest.raises(StateError, match="'model.norm.weight' was changed inside|'lm_head.weight' was changed ins"):
            on_engine(tmp_path, "3", callbacks=[Syncing(True)], **settings)
        return seen

    assert len({bits for seen in found for bits in seen}) == 1


@pytest.mark.draws(1)
@pytest.mark.parametrize("stage", ["2", "3"])
def test_a_plain_trainer_goes_on_from_an_engines_checkpoint_with_the_callback(tmp_path, stage):
    settings = {"max_grad_norm": 0.0, "save_steps": 3, "max_steps": 6}
    expected = on_engine(tmp_path, stage, **settings)
    resume = str(tmp_path / "checkpoint-3")
    with pytest.raises(StateError, match=r"not in the file but in shards, in offload/ .*callbacks=\[OffloadCallback"):
        trained(tmp_path, resume=resume, **settings)
    assert_same_run(trained(tmp_path, callbacks=[OffloadCallback()], resume=resume, **settings), expected)


@pytest.mark.draws(1)
@pytest.mark.parametrize("stage", ["2", "3"])
def test_bf16_autocast_is_trainers_own(tmp_path, stage):
    """The last update of the epoch, the sixth, has one micro-step."""
    settings = {"bf16": True, "max_steps": 7, "save_strategy": "no", **FOUR, "gradient_accumulation_steps": 3}
    settings |= EVALUATING
    expected = trained(tmp_path, TORCHS, kind=ExactNorm, **settings)
    assert_same_run(on_engine(tmp_path, stage, **settings), expected)


@pytest.mark.draws(1)
@pytest.mark.parametrize("stage", ["2", "3"])
def test_bfloat16_parameters_keep_their_master_weights_through_save_and_resume(tmp_path, stage):
    fields = {**STAGES[stage], "param_dtype": "bfloat16"}
    settings = {"save_steps": 3, "max_steps": 5, **FOUR}
    straight = on_engine(tmp_path, fields, **settings)
    resumed = on_engine(tmp_path, fields, resume=str(tmp_path / "checkpoint-3"), **settings)
    assert_same_run(resumed, straight)
    resumed.save_model(str(tmp_path / "saved"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert loaded.dtype is torch.bfloat16
    masters = states_of(straight)
    for name, param in loaded.named_parameters():
        assert same_bits(param, masters[name]["master"].bfloat16()), name


@pytest.mark.slow
def test_a_compiled_run_is_that_of_torchs_fused_adamw(tmp_path):
    """The engine compiles the model, and Accelerate does not compile it again around that."""
    settings = {"max_steps": 3, "save_strategy": "no", "torch_compile_backend": "aot_eager", **EVALUATING}
    runs, graphs = [], []
    for train in (partial(trained, tmp_path, TORCHS, kind=ExactNorm), *(partial(on_engine, tmp_path, s) for s in "23")):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        runs.append(train(**settings))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    for engines in runs[1:]:
        assert_same_run(engines, runs[0])
    assert graphs[1] == graphs[2] == graphs[0] + 1  # Trainer evaluates the model as it is


class Overflowing(torch.nn.Module):
    """The gradients of the second batch are infinite."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.calls = torch.nn.Linear(16, 16), 0

    def forward(self, x, labels=None):
        self.calls += 1
        assert x.dtype is self.layer.weight.dtype
        return {"loss": self.layer(x).float().square().mean() * (math.inf if self.calls == 2 else 1)}


def test_an_update_that_float16_overflows_is_skipped_and_the_schedule_waits(tmp_path):
    rows = [{"x": torch.randn(16, generator=torch.Generator().manual_seed(i))} for i in range(4)]
    args = trainer_of(tmp_path, TORCHS, max_steps=4, save_strategy="no", gradient_accumulation_steps=1).args
    args.lr_scheduler_type, args.warmup_steps, args.remove_unused_columns = "linear", 0, False
    fields = {"param_dtype": "float16", "initial_loss_scale": 1024.0}
    trainer = OffloadTrainer(Overflowing(), args, train_dataset=rows, offload=fields)
    trainer.train()
    history = trainer.state.log_history[:-1]
    assert [entry["loss_scale"] for entry in history] == [1024.0, 512.0, 512.0, 512.0]
    assert [entry["learning_rate"] / args.learning_rate for entry in history] == [1.0, 0.75, 0.75, 0.5]
    assert trainer.engine.optimizer.updates == 3


class Scaling(OffloadTrainer):
    """With the GradScaler that Accelerate makes for ``fp16=True`` on a GPU."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)


@pytest.mark.draws(1)
@pytest.mark.parametrize("stage", ["2", "3"])
def test_under_fp16_the_engine_scales_losses_in_the_place_of_grad_scaler(reference, tmp_path, stage):
    """Powers of two leave the bits as they are."""
    settings = {"save_strategy": "no", "callbacks": [Generated()], **FOUR, **EVALUATING}
    trainer = on_engine(tmp_path, stage, kind=Scaling, **settings)
    assert_same_run(trainer, reference[0])
    scales = [entry["loss_scale"] for entry in trainer.state.log_history if "loss_scale" in entry]
    assert scales == [1024.0, 1024.0, 2048.0, 2048.0, 2048.0, 4096.0, 4096.0, 4096.0]


@pytest.mark.draws(1)
@pytest.mark.parametrize("stage", ["2", "3"])
def test_the_best_model_is_loaded_at_the_end_with_its_states(tmp_path, stage):
    """The best is here the one of the highest loss, which is not the last."""
    settings = {"learning_rate": 0.5, "max_grad_norm": 0.0, "save_steps": 2, "max_steps": 6, "eval_steps": 2}
    settings = {**EVALUATING, **settings, "load_best_model_at_end": True, "greater_is_better": True}
    trainer = on_engine(tmp_path, {**STAGES[stage], "param_dtype": "bfloat16"}, **settings)
    best = Path(trainer.state.best_model_checkpoint)
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert trainer.state.best_metric == max(losses) != losses[-1]
    saved = load_file(best / "model.safetensors")
    masters = states_of(trainer)
    assert any(not same_bits(states["master"], states["master"].bfloat16()) for states in masters.values())
    for name, value in saved.items():
        assert same_bits(value, masters[name]["master"].bfloat16()), name
    assert trainer.evaluate()["eval_loss"] == trainer.state.best_metric
    shutil.rmtree(best / FOLDER)  # as with save_only_model=True
    trainer.engine.optimizer.load_master(trainer.model.lm_head.weight, torch.zeros(64, 32))
    trainer._load_best_model()
    assert trainer.evaluate()["eval_loss"] == trainer.state.best_metric


def half_frozen(fill):
    model = llama()
    model.model.requires_grad_(False)
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(fill)
    return model


@pytest.mark.draws(1)
@pytest.mark.parametrize("stage", ["2", "3"])
def test_frozen_weights_come_from_the_file_of_the_model(tmp_path, stage):
    settings = {"save_steps": 2, "max_steps": 4}
    straight = on_engine(tmp_path, stage, model=half_frozen(0.25), **settings)
    resumed = on_engine(tmp_path, stage, model=half_frozen(0.5), resume=str(tmp_path / "checkpoint-2"), **settings)
    assert logged(resumed) == logged(straight)
    index = {
        "weight_map": dict.fromkeys(load_file(tmp_path / "checkpoint-2" / "model.safetensors"), "part.safetensors")
    }
    other = shutil.copytree(tmp_path / "checkpoint-2", tmp_path / "several" / "checkpoint-2")
    (other / "model.safetensors").rename(other / "part.safetensors")
    (other / "model.safetensors.index.json").write_text(json.dumps(index))
    resumed = on_engine(tmp_path, stage, model=half_frozen(0.5), resume=str(other), **settings)
    assert logged(resumed) == logged(straight)
    index["weight_map"].pop("model.embed_tokens.weight")
    (other / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"checkpoint-2: 'model.embed_tokens.weight' is missing, expected shape"):
        on_engine(tmp_path, stage, model=half_frozen(0.5), resume=str(other), **settings)


def test_a_model_that_was_built_in_shards_trains_saves_and_resumes(straight, tmp_path):
    expected, _ = straight("3")
    with init(**STAGES["3"]):
        model = llama()
    settings = {"callbacks": [Generated()], **FOUR, **EVALUATING}
    trainer = on_engine(tmp_path, "3", model=model, **settings)
    assert_same_run(trainer, expected)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))  # the same Trainer
    assert_same_run(trainer, expected)
    trainer.save_model(str(tmp_path / "saved"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for name, param in loaded.named_parameters():
        assert same_bits(param, states_of(expected)[name]["master"]), name
    trainer.engine.export_safetensors(tmp_path / "exported")
    assert load_file(tmp_path / "exported" / "model.safetensors").keys() == loaded.state_dict().keys()


def test_losses_with_smoothed_labels_and_evaluation_before_training_are_trainers_own(tmp_path):
    settings = {
        "label_smoothing_factor": 0.1,
        "max_steps": 2,
        "save_strategy": "no",
        **EVALUATING,
        "eval_on_start": True,
    }
    theirs = trainer_of(tmp_path, TORCHS, kind=ExactNorm, **settings)
    ours = trainer_of(tmp_path, {"offload": STAGES["3"]}, kind=OffloadTrainer, learning_rate=LR, **settings)
    before = []
    for trainer in (theirs, ours):
        torch.manual_seed(0)
        before.append(trainer.evaluate()["eval_loss"])
        trainer.train()
    assert before[0] == before[1]
    assert_same_run(ours, theirs)


def test_a_new_model_of_model_init_gets_a_new_engine(tmp_path):
    settings = {"save_strategy": "no", "learning_rate": LR, "max_steps": 3}

    def made(kind, **more):
        args = trainer_of(tmp_path, TORCHS, **settings).args
        return kind(None, args, train_dataset=DATA, model_init=llama, **more)

    expected = made(ExactNorm, **TORCHS)
    expected.train()
    trainer = made(OffloadTrainer, offload=STAGES["3"])
    trainer.train()
    assert_same_run(trainer, expected)
    first = trainer.engine
    trainer.train()
    assert trainer.engine is not first
    assert_same_run(trainer, expected)


class TooLarge(TrainerCallback):
    """The third backward of two sequences fails in the middle, for lack of memory."""

    def __init__(self):
        self.backwards, self.left = 0, []

    def on_train_begin(self, args, state, control, model, optimizer, **kwargs):
        if not self.backwards:
            model.model.layers[0].self_attn.o_proj.register_full_backward_hook(self.refuse)
        offloaded = optimizer.optimizer
        if isinstance(offloaded, OffloadedAdamW):
            records = offloaded.sharding.parameters.records if offloaded.sharding.gathers else {}
            whole = sum(record.whole.untyped_storage().nbytes() for record in records.values())
            self.left.append((offloaded.core.gradients.are_waiting, offloaded.core.gradients.micro_steps, whole))

    def refuse(self, module, inputs, outputs):
        self.backwards += len(outputs[0]) > 1
        if len(outputs[0]) > 1 and self.backwards == 3:
            raise RuntimeError("CUDA out of memory.")


@pytest.mark.draws(1)
@pytest.mark.parametrize("stage", ["2, early", "3"])
def test_a_batch_that_does_not_fit_is_tried_smaller_and_leaves_nothing_behind(tmp_path, stage):
    settings = {"auto_find_batch_size": True, "gradient_accumulation_steps": 4, "max_grad_norm": 0.0}
    settings |= {"max_steps": 3, "save_strategy": "no"}
    theirs, ours = TooLarge(), TooLarge()
    expected = trained(tmp_path, TORCHS, callbacks=[theirs], **settings)
    trainer = on_engine(tmp_path, {**STAGES[stage], "gradient_clipping": None}, callbacks=[ours], **settings)
    assert ours.backwards == theirs.backwards == 3
    assert ours.left == 2 * [(False, 0, 0)]
    assert_same_run(trainer, expected)


def test_without_clipping_the_norm_is_logged_unless_it_is_not_wanted(tmp_path):
    settings = {"max_grad_norm": 0.0, "max_steps": 2, "save_strategy": "no"}
    theirs = trained(tmp_path, TORCHS, **settings)
    ours = on_engine(tmp_path, {}, **settings)
    assert ours.engine.offload_config.gradient_clipping == math.inf
    assert norms(ours) == pytest.approx(norms(theirs), rel=1e-6)
    assert_same_run(ours, theirs)
    assert not norms(on_engine(tmp_path, {"gradient_clipping": None}, **settings))


AUTO = {
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(["lr", "betas", "eps", "weight_decay"], "auto")},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": 100},
    **dict.fromkeys(["gradient_accumulation_steps", "gradient_clipping", "train_batch_size"], "auto"),
    "train_micro_batch_size_per_gpu": "auto",
}


def test_a_configuration_of_deepspeed_takes_what_the_arguments_say(straight, tmp_path):
    (tmp_path / "ds_config.json").write_text(json.dumps(AUTO))
    settings = {"callbacks": [Generated()], "save_strategy": "no", **FOUR, **EVALUATING}
    trainer = on_engine(tmp_path, tmp_path / "ds_config.json", **settings)
    assert_same_run(trainer, straight("3")[0])
    half = on_engine(tmp_path, AUTO, bf16=True, max_steps=1, save_strategy="no")
    assert half.engine.offload_config.param_dtype == "bfloat16"


def scheduled(**given):
    """With DeepSpeed's schedule that Hugging Face's documentation shows."""
    params = {
        **dict.fromkeys(["warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"], "auto"),
        **given,
    }
    return AUTO | {"scheduler": {"type": "WarmupDecayLR", "params": params}}


def test_a_schedule_of_deepspeed_is_that_of_the_run_and_of_the_resumed_one(tmp_path):
    """Against a plain Trainer with torch's AdamW, whose rates are written out."""
    rates = [0.0, 0.0, 1.0, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6]  # from 0 in 2 updates, at which the logarithm is a line

    class Written(ExactNorm):
        def create_scheduler(self, num_training_steps, optimizer=None):
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: rates[min(n, STEPS - 1)])
            return self.lr_scheduler

    expected = trained(tmp_path / "theirs", TORCHS, kind=Written, save_strategy="no", **FOUR)
    trainer = on_engine(tmp_path / "ours", scheduled(), save_steps=3, **FOUR)
    assert_same_run(trainer, expected)
    assert_same_run(
        on_engine(tmp_path / "again", scheduled(), resume=f"{tmp_path}/ours/checkpoint-3", **FOUR), expected
    )
    with pytest.raises(ConfigError, match="total_num_steps=9 in offload=, .* max_steps or num_train_epochs, .* 8; exp"):
        on_engine(tmp_path, scheduled(total_num_steps=9))


def test_a_schedule_of_deepspeed_does_with_groups_own_rates_what_deepspeed_does(tmp_path):
    class Two(Trainer):
        def create_optimizer(self, model=None):
            optimizer = super().create_optimizer(model)
            optimizer.param_groups[1]["lr"] = LR / 10
            return optimizer

    class OffloadTwo(OffloadTrainer, Two):
        pass

    params = {"warmup_num_steps": "auto", "warmup_type": "linear"}
    for given, ratio in (({}, 10), ({"warmup_max_lr": "auto"}, 1)):
        scheduler = {"type": "WarmupLR", "params": {**params, **given}}
        trainer = on_engine(tmp_path, AUTO | {"scheduler": scheduler}, kind=OffloadTwo, save_strategy="no", max_steps=4)
        rates = [group["lr"] for group in trainer.optimizer.param_groups]
        assert rates == pytest.approx([LR, LR / ratio])


def test_a_total_that_is_a_float_counts_when_a_share_of_it_is_the_warm_up(tmp_path):
    config = scheduled(total_num_steps=float(STEPS))
    trainer = trainer_of(tmp_path, {"offload": config}, kind=OffloadTrainer, learning_rate=LR, warmup_steps=0.25)
    assert trainer.create_scheduler(STEPS).get_last_lr() == [0.0, 0.0]


def test_sizes_that_are_auto_follow_the_models_width_as_trainer_tells_deepspeed(tmp_path):
    names = ["reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"]
    section = {**AUTO["zero_optimization"], **dict.fromkeys(names, "auto")}
    for stage, expected in ((3, (1024, 921, 320)), (2, (1024, OffloadConfig.prefetch_bucket_size, 100_000))):
        config = {**AUTO, "zero_optimization": {**section, "stage": stage}}
        if stage == 2:
            del config["zero_optimization"]["offload_param"]
        found = trainer_of(tmp_path, {"offload": config}, kind=OffloadTrainer, learning_rate=LR).engine.offload_config
        assert (found.reduce_bucket_size, found.prefetch_bucket_size, found.param_persistence_threshold) == expected


@pytest.mark.parametrize(
    ("fields", "settings", "said"),
    [
        ({"gradient_clipping": 1.0}, {}, r"gradient_clipping=1.0 in offload=, and .* have max_grad_norm=0.5"),
        ({"gradient_clipping": 1.0}, {"max_grad_norm": 0.0}, "gradient_clipping=1.0 .* max_grad_norm=0.0; expected"),
        ({"gradient_clipping": None}, {}, "gradient_clipping=None in offload=, and TrainingArguments have max_grad"),
        ({"lr": 1.0}, {}, r"lr=1.0 in offload=, and TrainingArguments have learning_rate=0.01"),
        ({"gradient_accumulation_steps": 8}, {}, "=8 in offload=, and .* have gradient_accumulation_steps=2"),
        ({"optimizer": {"params": {"betas": [0.8, 0.9]}}}, {}, r"betas=\(0.8, 0.9\) in .* adam_beta1, adam_beta2="),
        (AUTO | {"gradient_accumulation_steps": 8}, {}, "=8 in offload=, and .* have gradient_accumulation_steps=2"),
        (AUTO | {"train_batch_size": 16}, {}, "train_batch_size=16 in .*_accumulation_steps=2 on 1 ranks = 4;"),
        (AUTO | {"train_micro_batch_size_per_gpu": 4}, {}, "_gpu=4 in offload=, .* per_device_train_batch_size=2;"),
        ({"lr": lambda updates: 1e-3}, {}, "lr=.* in offload="),
        (AUTO | {"scheduler": {"type": "Warm"}}, {}, "scheduler.type: got 'Warm'; did you mean"),
        (scheduled(warmup_max_lr=1.0), {}, r"warmup_max_lr=1.0 in offload=, and .* have learning_rate, .* 0.01; exp"),
        (scheduled(warmup_type="auto"), {}, 'warmup_type="auto" in offload=, and TrainingArguments have no value'),
        ({"optimizer": "lion"}, {}, "'lion' in offload=, .* optim='adamw_torch.*'; expected optim='lion_32bit'"),
        ({"optimizer": "muon"}, {}, "'muon' in offload=, which no optim= of .* names; expected one of adamw_torch"),
        ({}, {"optim": "sgd", "optim_args": "momentum=0.9"}, "optim_args='momentum=0.9'; expected its settings in off"),
        ({"betas": (0.9, 0.99)}, {"optim": "adagrad"}, "betas=.* has no place in optimizer='adagrad'"),
        ({}, {"optim": "adafactor"}, "optim='adafactor' besides the engine's optimizer; expected no optimizers="),
        ({}, {"optimizers": (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1), None)}, "an optimizer besides"),
        ({}, {"optimizer_cls_and_kwargs": (torch.optim.SGD, {})}, "an optimizer besides the engine's optimizer"),
        ({"param_dtype": "float16", "loss_scale": 1.0}, {}, r"loss_scale=1.0 in offload= with float16 parameters"),
        ({"loss_scale": 1}, {"fp16": True}, r"loss_scale=1 in offload= with fp16=True, whose gradients underflow"),
        ({}, {"fsdp": True}, "FSDP and offload= at the same time, which both partition the model and average"),
        ({}, {"bf16_full_eval": True}, "bf16_full_eval=True would cast the parameters that the engine trains; expec"),
    ],
)  # fmt: skip
def test_arguments_that_contradict_the_engine_are_refused(tmp_path, fields, settings, said):
    beside = {name: settings.pop(name) for name in [*settings] if name.startswith("optimizer")}
    settings = {"learning_rate": LR, "save_strategy": "no", **settings}
    with pytest.raises(ConfigError, match=said):
        trainer_of(tmp_path, {"offload": fields, **beside}, kind=OffloadTrainer, **settings)


@pytest.mark.parametrize("name", ["DeepSpeed", "FSDP"])
def test_a_plugin_of_accelerate_launch_is_refused(tmp_path, name):
    """DeepSpeed's needs DeepSpeed, and Accelerate knows FSDP's on accelerators only."""

    class Planned(Trainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            setattr(self, f"is_{name.lower()}_enabled", True)

    class OffloadPlanned(OffloadTrainer, Planned):
        pass

    with pytest.raises(ConfigError, match=f"{name} and offload= at the same time, which both partition the model"):
        trainer_of(tmp_path, {"offload": {}}, kind=OffloadPlanned, learning_rate=LR)


def test_accumulation_that_accelerate_is_told_of_is_the_engines_and_twice_is_transformers_own_error(tmp_path):
    """The error of transformers names both settings. The engine's error would come later."""
    settings = {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 4}}, "save_strategy": "no"}
    make = partial(trainer_of, tmp_path, {"offload": {}}, kind=OffloadTrainer, learning_rate=LR, **settings)
    assert make(gradient_accumulation_steps=1).engine.offload_config.gradient_accumulation_steps == 4
    with pytest.raises(ValueError, match="`num_steps` is set but `gradient_accumulation_steps` is greater than 1"):
        make(gradient_accumulation_steps=2)


def test_a_bound_that_changes_after_the_trainer_is_made_is_refused(tmp_path):
    trainer = trainer_of(tmp_path, {"offload": {}}, kind=OffloadTrainer, learning_rate=LR, save_strategy="no")
    trainer.args.max_grad_norm = 2.0
    with pytest.raises(ConfigError, match=r"of at most 2.0, and the engine, .* clips to the L2 norm of 0.5; expected"):
        trainer.train()


def test_checkpoints_without_states_say_so(tmp_path):
    trainer = on_engine(tmp_path, "3", save_only_model=True, max_steps=2)
    assert {path.name for path in (tmp_path / "checkpoint-2").iterdir()} & {FOLDER, "optimizer.pt"} == set()
    with pytest.raises(CheckpointError, match=r"checkpoint-2: .* neither offload/ nor optimizer.pt is there; expected"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    on_engine(tmp_path / "whole", "3", max_steps=2)
    folder = tmp_path / "whole" / "checkpoint-2"
    shutil.rmtree(folder / FOLDER)
    with pytest.raises(CheckpointError, match=r"checkpoint-2: .* neither offload/ nor optimizer.pt"):
        on_engine(tmp_path, "3", resume=str(folder))


def test_a_callback_of_ones_own_is_the_only_one(tmp_path):
    mine = OffloadCallback()
    trainer = on_engine(tmp_path, "2", callbacks=[mine], max_steps=1, save_strategy="no")
    assert [each for each in trainer.callback_handler.callbacks if isinstance(each, OffloadCallback)] == [mine]
    assert trainer.state.log_history[0]["offload_host_bytes"] > 0


def large():
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 8}
    config = LlamaConfig(vocab_size=64, num_attention_heads=2, num_key_value_heads=2, **sizes)
    config._attn_implementation = "eager"  # the device has no other
    return LlamaForCausalLM(config)


def bytes_a_parameter(kind, folder):
    """The most that the accelerator holds, and the bits and losses of the run."""
    settings = {
        "use_cpu": False, "max_steps": 2, "save_strategy": "no", "gradient_accumulation_steps": 1, "warmup_steps": 0,
        "per_device_train_batch_size": 1, "eval_strategy": "epoch", "evaluated": DATA[:2], "learning_rate": 1e-2,
        "max_grad_norm": 0.0,
    }  # fmt: skip
    buckets = {"reduce_bucket_size": 70_000}
    live = {"max_live_parameters": 600_000, "prefetch_bucket_size": 200_000}  # of 2.1 million

    @forked
    def found():
        simulated.prepare()
        with simulated.available():
            os.environ["ACCELERATE_TORCH_DEVICE"] = f"{simulated.NAME}:0"
            model = large()
            if kind in STAGES:
                fields = STAGES[kind] | buckets | (live if kind == "3" else {})
                trainer = on_engine(folder, fields, model=model, **settings)
            else:
                alone = lambda args: {"optimizer_cls_and_kwargs": offloaded_adamw(args, **buckets)}  # noqa: E731
                trainer = trained(folder, TORCHS if kind == "torch" else alone, model=model, **settings)
            torch.accelerator.synchronize()
            held = torch.accelerator.max_memory_allocated()
            assert trainer.args.device.type == simulated.NAME
            return held / sum(p.numel() for p in model.parameters()), told(trainer)

    return found


@pytest.mark.skipif(simulated.why_not() is not None, reason=str(simulated.why_not()))
def test_on_an_accelerator_gradients_and_parameters_leave_its_memory(tmp_path):
    """In fp32, a parameter: torch holds parameter, gradient and moments, the optimizer alone parameter and gradient."""
    found = {kind: bytes_a_parameter(kind, tmp_path / kind) for kind in ("torch", "optimizer alone", "2", "3")}
    assert len({str(run) for _, run in found.values()}) == 1
    assert 16 < found["torch"][0] < 16.5
    assert 8 < found["optimizer alone"][0] < 8.5
    assert 4 < found["2"][0] < 5.5
    assert found["3"][0] < 2.5


def test_two_ranks_train_as_torch_does_with_each_micro_steps_mean(tmp_path):
    """Accumulating four micro-steps and clipping; also as DDP does, and resumed in another stage."""

    @on_ranks(2)
    def _(rank):
        settings = {"learning_rate": LR, "max_steps": 4, **RANKS, "gradient_accumulation_steps": 4, "eval_steps": 2}
        settings |= {"activation_checkpointing": True, "eval_strategy": "steps", "evaluated": DATA[:4], "save_steps": 2}
        unsaved, theirs, ours = {**settings, "save_strategy": "no"}, Generated(), {}
        trainer = trained(tmp_path / "theirs", TORCHS, kind=MeanOfRanks, callbacks=[theirs], **unsaved)
        expected = told(trainer, theirs)
        for stage in STAGES:
            ours[stage] = Generated()
            trainer = on_engine(tmp_path / stage, stage, callbacks=[ours[stage]], **settings)
            assert told(trainer, ours[stage]) == expected, stage
        trainer.save_model(str(tmp_path / "saved"))
        dist.barrier()
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        assert bits(loaded) == expected[0]
        held = sum(state["exp_avg"].numel() for state in trainer.engine.optimizer.state.values())
        assert held / loaded.num_parameters() == pytest.approx(0.5, abs=0.01)
        generated, path = Generated(), str(tmp_path / "3" / "checkpoint-2")
        resumed = told(on_engine(tmp_path / "resumed", "2", resume=path, callbacks=[generated], **settings), generated)
        assert (*resumed[:2], theirs.tokens[:2] + resumed[2]) == expected
        once = {**unsaved, "gradient_accumulation_steps": 1}
        ddp = trained(tmp_path / "ddp", TORCHS, kind=ExactNorm, **once)
        assert told(on_engine(tmp_path / "once", "3", **once)) == told(ddp)
