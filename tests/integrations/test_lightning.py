"""PyTorch Lightning: OffloadedAdamW from configure_optimizers, and OffloadStrategy, bit for bit as torch's AdamW."""

import os
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.callbacks import BaseFinetuning, EMAWeightAveraging, ModelPruning
from lightning.pytorch.plugins.precision import DoublePrecision, MixedPrecision
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from frontends.torch import wrap
from frontends.torch.integrations.lightning import TRAINER, OffloadStrategy
from frontends.torch.integrations.shards import FOLDER
from offload_core.checkpoint.reader import Checkpoint, Loaded
from offload_core.errors import CheckpointError, ConfigError, StateError
from tests.support.blocks import VOCABULARY, loss_of, made
from tests.support.lightning_models import (
    BATCHES,
    CLIP,
    DECAY,
    EPOCHS,
    LR,
    STAGES,
    TOKENS,
    Model,
    engines,
    fitted,
    ours,
    quiet,
    torchs,
    trainer_of,
    weights_of,
)
from tests.support.processes import on_ranks
from tests.support.torch_models import same_bits
from tests.support.torch_rank import bits


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Lightning's launcher gives torch all processors, unless it finds the variable."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with patch.dict(os.environ, OMP_NUM_THREADS="1"):
        yield
    torch.set_num_threads(n_threads)


@pytest.fixture(autouse=True)
def _no_group():
    """A strategy of several processes starts a group, of one rank too, and says so in the environment."""
    with patch.dict(os.environ):
        yield
    if dist.is_initialized():
        dist.destroy_process_group()


def states(model):
    [optimizer] = model.fitting.optimizers
    return {
        f"{name} {key}": value
        for name, param in model.named_parameters()
        for key, value in optimizer.state[param].items()
        if key != "step"
    } | {f"{name} step": torch.tensor(float(optimizer.state[p]["step"])) for name, p in model.named_parameters()}


def assert_same_run(one, other, *, since=0):
    assert one.seen == other.seen[since:]
    assert len(one.seen) > 1
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        assert same_bits(p, q), name
    mine, yours = states(one), states(other)
    assert mine.keys() == yours.keys()
    for name, value in mine.items():
        assert same_bits(value.cpu(), yours[name].cpu()), name


# --- OffloadedAdamW alone ------------------------------------------------------------------------------


@pytest.mark.draws(1)
@pytest.mark.parametrize("settings", [{}, {"precision": "bf16-mixed"}], ids=["fp32", "bf16-mixed"])
def test_a_run_is_that_of_torchs_fused_adamw(tmp_path, settings):
    """Accumulating (the last update of an epoch has one batch), clipping, with a schedule."""
    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": CLIP, **settings}
    one = fitted(tmp_path, Model(ours), **settings)
    other = fitted(tmp_path, Model(torchs), **settings)
    assert_same_run(one, other)
    assert one.fitting.global_step == EPOCHS * 3


class Norms(Model):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        def norm():
            return float(torch.stack([p.grad.double().norm() for p in self.parameters()]).norm())

        before = norm()
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        self.norms = [*getattr(self, "norms", ()), (before, norm())]


def test_gradients_are_clipped_to_the_asked_norm(tmp_path):
    model = fitted(tmp_path, Norms(ours), gradient_clip_val=CLIP, max_epochs=1)
    assert len(model.norms) == BATCHES
    for before, after in model.norms:
        assert before > CLIP
        assert after == pytest.approx(CLIP, rel=1e-5)


class Manual(Model):
    """Two backwards an update; Lightning's wrapper of the optimizer is what a user has."""

    clip = None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, tokens, batch_idx):
        optimizer = self.optimizers()
        assert type(optimizer).__name__.startswith("Lightning")
        optimizer.zero_grad()
        for half in tokens.chunk(2):
            self.manual_backward(super().training_step(half, batch_idx))
        if self.clip is not None:
            self.clip_gradients(optimizer, self.clip, "norm")
        optimizer.step()
        self.lr_schedulers().step()


def test_manual_optimization_is_that_of_torchs_fused_adamw(tmp_path):
    assert_same_run(*(fitted(tmp_path, Manual(new)) for new in (ours, torchs)))


class Gan(pl.LightningModule):
    """Two optimizers, which take turns; each time the other's parameters are frozen."""

    def __init__(self, new):
        super().__init__()
        self.automatic_optimization = False
        self.new = new
        torch.manual_seed(0)
        self.generator, self.critic = torch.nn.Linear(12, 16), torch.nn.Linear(16, 1)
        self.seen = []

    def training_step(self, tokens, batch_idx):
        for optimizer, sign in zip(self.optimizers(), (1, -1), strict=True):
            with optimizer.toggle_model():
                loss = sign * self.critic(self.generator(tokens.float() / 64)).mean()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            self.seen.append(float(loss.detach()))

    def configure_optimizers(self):
        return [self.new(part) for part in (self.generator, self.critic)]


def test_two_optimizers_take_turns_as_torchs_do(tmp_path):
    """This is what the strategy, which has one optimizer, advises."""
    one, other = (fitted(tmp_path, Gan(new)) for new in (ours, torchs))
    assert one.seen == other.seen
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        assert same_bits(p, q), name


def test_lightnings_wrapper_shows_what_the_optimizer_has(tmp_path):
    model = fitted(tmp_path, Model(ours), max_epochs=1)
    wrapper, optimizer = model.optimizers(), model.fitting.optimizers[0]
    param = next(model.parameters())
    assert wrapper.core is optimizer.core
    assert same_bits(wrapper.state[param]["exp_avg"], optimizer.state[param]["exp_avg"])
    assert wrapper.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()
    assert wrapper.memory_report().host_bytes == optimizer.memory_report().host_bytes > 0


class Closure(Manual):
    def training_step(self, tokens, batch_idx):
        optimizer = self.optimizers()

        def closure():
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            loss = Model.training_step(self, tokens, batch_idx)
            self.manual_backward(loss)
            return loss

        with torch.no_grad():
            optimizer.step(closure)


def test_a_closure_is_run_first_and_under_grad(tmp_path):
    assert_same_run(*(fitted(tmp_path, Closure(new), max_epochs=1) for new in (ours, torchs)))


def layerwise(module):
    return module.trainer.strategy.wrap(
        lr=LR, weight_decay=DECAY, gradient_clipping=CLIP, gradient_accumulation_steps=4, layerwise=True
    ).optimizer


class Layerwise(Model):
    """The four micro-batches of a batch run together, or one after the other. Embedding and head are not tied."""

    def __init__(self, together, **settings):
        super().__init__(layerwise, **settings)
        self.automatic_optimization = False
        self.together = together

    def configure_model(self):
        if self.gpt is None:
            self.gpt = made()

    def loss(self, tokens):
        tokens = tokens % VOCABULARY
        return loss_of(self.gpt(tokens), tokens)

    def forward(self, tokens):
        return self.loss(tokens)

    def training_step(self, batch, batch_idx):
        optimizer, engine, batches = self.optimizers(), self.trainer.strategy.engine, batch.chunk(4)
        if self.together == "batches":
            losses = engine.accumulate(batches, lambda output, tokens: output)
        elif self.together == "functions":
            losses = engine.accumulate([partial(self.loss, tokens) for tokens in batches])
        else:
            losses = [self.loss(tokens) / 4 for tokens in batches]
            for loss in losses:
                self.manual_backward(loss)
        optimizer.step()
        self.lr_schedulers().step()
        self.seen.append([float(loss.detach()) * (1 if self.together else 4) for loss in losses])


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("stage", STAGES)
def test_micro_batches_run_together_in_manual_optimization(tmp_path, stage, precision):
    def run(together):
        strategy = OffloadStrategy(**STAGES[stage])
        model = Layerwise(together, late=stage == 3)
        return fitted(tmp_path, model, strategy, batch_size=4, precision=precision)

    loop = run(None)
    assert loop.fitting.global_step == EPOCHS * 3  # batches of 4, 4 and 2 samples
    assert loop.fitting.strategy.engine.optimizer.report.clip_coefficient < 1
    for together in ("batches", "functions"):
        model = run(together)
        assert model.seen == loop.seen
        assert model.fitting.strategy.engine.optimizer.updates == loop.fitting.strategy.engine.optimizer.updates
        assert_same_weights(model, weights_of(loop))


def test_layerwise_in_automatic_optimization_is_refused(tmp_path):
    strategy = OffloadStrategy(layerwise=True)
    with pytest.raises(
        ConfigError, match=r"layerwise=True in automatic optimization, .*automatic_optimization = False"
    ):
        fitted(tmp_path, Model(engines), strategy, accumulate_grad_batches=2)
    assert strategy.engine is None


def test_the_states_stay_on_the_host_in_fp32(tmp_path):
    """Lightning moves all that an optimizer holds to the model's device; of one without values nothing comes back."""
    model = fitted(tmp_path, Model(ours), precision="bf16-true", max_epochs=1)
    before = {name: (value.data_ptr(), value.clone()) for name, value in states(model).items() if "step" not in name}
    _optimizers_to_device(model.fitting.optimizers, torch.device("meta"))
    for name, (address, value) in before.items():
        now = states(model)[name]
        assert now.data_ptr() == address
        assert now.dtype is torch.float32
        assert same_bits(now, value)
    assert any("master" in name for name in before)


class Overflowing(Model):
    """The third batch's gradients are infinite."""

    def training_step(self, tokens, batch_idx):
        loss = super().training_step(tokens, batch_idx)
        return loss * torch.inf if batch_idx == 2 else loss

    def on_train_batch_end(self, *args):
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        scale = self.trainer.strategy.engine.optimizer.core.loss_scale if scaler is None else scaler.get_scale()
        self.scales = [*getattr(self, "scales", ()), scale]


def scaling():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


def test_a_step_that_grad_scaler_skips_is_none(tmp_path):
    one, other = (fitted(tmp_path, Overflowing(new), gradient_clip_val=CLIP, **scaling()) for new in (ours, torchs))
    assert str(one.seen) == str(other.seen)
    assert one.scales == other.scales
    one.seen = other.seen = [0, 0]  # an infinite loss is equal to none
    assert_same_run(one, other)
    assert other.scales[:3] == [1024.0, 2048.0, 1024.0]
    assert {float(value) for name, value in states(one).items() if name.endswith("step")} == {EPOCHS * (BATCHES - 1.0)}


# --- OffloadStrategy, one rank -------------------------------------------------------------------------


class ExactNorm(Model):
    """Clips by the norm of the sum of squares in float64."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        norm = sum(p.grad.double().square().sum() for p in self.parameters()).sqrt()
        for p in self.parameters():
            p.grad.mul_((gradient_clip_val / (norm + 1e-6)).clamp(max=1.0).float())


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Torch's optimizer, and Lightning's strategy for one device."""
    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": CLIP}
    return fitted(tmp_path_factory.mktemp("reference"), ExactNorm(torchs), **settings), settings


def assert_same_weights(one, other):
    for name, weight in weights_of(one).items():
        assert same_bits(weight, other[name]), name


@pytest.mark.parametrize("stage", STAGES)
def test_under_the_strategy_a_run_is_that_of_torchs_fused_adamw(reference, tmp_path, stage):
    """In stage 3 the model is built in shards, by configure_model."""
    expected, settings = reference
    model = fitted(tmp_path, Model(engines, late=stage == 3), OffloadStrategy(**STAGES[stage]), **settings)
    assert model.seen == expected.seen
    assert_same_weights(model, dict(expected.named_parameters()))
    assert model.fitting.strategy.engine.optimizer.updates == model.fitting.global_step == EPOCHS * 3
    report = model.fitting.strategy.engine.optimizer.report
    assert report.grad_norm * report.clip_coefficient == pytest.approx(CLIP, rel=1e-5)


def late_in(stage):
    return Model(engines, late=stage == 3)


@pytest.mark.draws(1)
@pytest.mark.parametrize(("stage", "other"), [(2, 3), (3, 2)])
def test_the_strategy_resumes_bit_for_bit_in_any_stage(tmp_path, stage, other):
    """Between epochs, with dropout: random generators are saved too."""
    straight = fitted(tmp_path, late_in(stage), OffloadStrategy(**STAGES[stage]), save_every=BATCHES)
    folder = tmp_path / f"step={BATCHES}.ckpt"
    assert sorted(path.name for path in folder.iterdir()) == [FOLDER, TRAINER]
    saved = torch.load(folder / TRAINER, weights_only=True)
    assert saved["state_dict"] == {}
    assert "optimizer_states" not in saved
    torch.manual_seed(100)
    resumed = fitted(tmp_path, late_in(other), OffloadStrategy(**STAGES[other]), resume=str(folder))
    assert resumed.seen == straight.seen[BATCHES:]
    assert_same_weights(resumed, weights_of(straight))


class Stateful(DataLoader):
    """A loader that goes on in mid-epoch, and draws random numbers when it begins."""

    begin = taken = 0

    def __iter__(self):
        torch.rand(7)
        begin, self.begin = self.begin, 0
        for i, batch in enumerate(super().__iter__()):
            if i >= begin:
                self.taken = i + 1
                yield batch

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.begin = state["taken"]


def test_dropout_goes_on_in_mid_epoch(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.support.lightning_models.DataLoader", Stateful)
    straight = fitted(tmp_path, Model(engines), OffloadStrategy(), save_every=2)
    resumed = fitted(tmp_path, Model(engines), OffloadStrategy(), resume=tmp_path / "step=2.ckpt")
    assert resumed.seen == straight.seen[2:]
    assert_same_weights(resumed, weights_of(straight))


@pytest.mark.filterwarnings("ignore:.*the run goes on with its hyperparameters")
def test_averaged_weights_are_saved_and_go_on(tmp_path):
    """Lightning's callback puts them in the weights' place: in checkpoints, and in the module at the end."""

    def run(**settings):
        average = EMAWeightAveraging(decay=0.5)
        return fitted(
            tmp_path, Model(engines), OffloadStrategy(), callbacks=[average], precision="bf16-true", **settings
        )

    def loaded(path):
        model = Model(engines)
        trainer = trainer_of(tmp_path, OffloadStrategy(), precision="bf16-true", limit_val_batches=1.0)
        with quiet():
            trainer.validate(model, DataLoader(TOKENS, 5), ckpt_path=path, verbose=False)
        return dict(model.named_parameters())

    straight = run(save_every=BATCHES)
    path = tmp_path / f"step={BATCHES}.ckpt"
    resumed = run(resume=path)
    assert resumed.seen == straight.seen[BATCHES:]
    assert_same_weights(resumed, weights_of(straight))
    averages = torch.load(path / TRAINER, weights_only=True)["state_dict"]
    for name, param in loaded(path).items():
        assert same_bits(param, averages[name].bfloat16()), name
    engine = wrap(Model(engines), lr=LR, param_dtype="bfloat16")
    engine.load_checkpoint(straight.fitting.strategy.engine.save_checkpoint(tmp_path / "last"))
    assert_same_weights(straight, dict(engine.module.named_parameters()))


class Without(Model):
    """A hook that leaves out a part of the weights, and adds something."""

    def on_save_checkpoint(self, checkpoint):
        weights = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: value for name, value in weights.items() if "blocks.0" not in name}
        checkpoint["state_dict"]["own"] = torch.ones(1)

    def on_load_checkpoint(self, checkpoint):
        self.own = checkpoint["state_dict"].pop("own")


def test_what_a_hook_adds_to_the_weights_is_saved_and_what_it_leaves_out_is_in_the_shards(tmp_path):
    straight = fitted(tmp_path, Without(engines), OffloadStrategy(), save_every=BATCHES)
    path = tmp_path / f"step={BATCHES}.ckpt"
    resumed = fitted(tmp_path, Without(engines), OffloadStrategy(), resume=path)
    assert_same_weights(resumed, weights_of(straight))
    assert resumed.own == 1
    straight.fitting.save_checkpoint(tmp_path / "weights", weights_only=True)
    names = torch.load(tmp_path / "weights", weights_only=True)["state_dict"].keys()
    assert dict(straight.named_parameters()).keys() - names == {n for n in weights_of(straight) if "blocks.0" in n}


class Adapted(Model):
    """A block is frozen."""

    def configure_model(self):
        super().configure_model()
        self.gpt.blocks[0].requires_grad_(False)


def test_checkpoints_leave_out_frozen_parameters_if_asked(tmp_path):
    straight = fitted(tmp_path, Adapted(engines), OffloadStrategy(frozen=False), save_every=BATCHES)
    path = tmp_path / f"step={BATCHES}.ckpt"
    [shards] = (folder for folder in (path / FOLDER).iterdir() if folder.is_dir())
    left_out = Loaded(Checkpoint(shards), None).left_out
    assert [*left_out] == [name for name, p in straight.named_parameters() if not p.requires_grad]
    resumed = fitted(tmp_path, Adapted(engines), OffloadStrategy(), resume=path)
    assert_same_weights(resumed, dict(straight.named_parameters()))


def test_a_model_is_fitted_again_by_another_trainer(tmp_path):
    """As in a notebook: the first one, which is gone, has left cycles of references."""
    runs = []
    for new, strategy in ((torchs, "auto"), (ours, "auto"), (engines, OffloadStrategy)):
        model = Model(new)
        for _ in range(2):
            fitted(tmp_path, model, strategy if strategy == "auto" else strategy(), max_epochs=1)
        runs.append(model)
    for model in runs[1:]:
        assert model.seen == runs[0].seen
        for (name, p), q in zip(model.named_parameters(), runs[0].parameters(), strict=True):
            assert same_bits(p, q), name


class Unfreezing(BaseFinetuning):
    """Trains a block from the second epoch on, and after a resume, which freezes it, from the fourth on."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.gpt.blocks[0])

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.gpt.blocks[0], optimizer, lr=1e-3)
        elif epoch == 3:
            self.make_trainable(pl_module.gpt.blocks[0])


def trainable(module):
    return [p for p in module.parameters() if p.requires_grad]


class Constant(Model):
    """Without a schedule: Lightning's callback adds a group that one does not know."""

    def configure_optimizers(self):
        return self.new(self)


def test_finetuning_resumes_with_its_groups_and_states_as_with_torchs_adamw(tmp_path):
    theirs = lambda m: torch.optim.AdamW(trainable(m), lr=LR, weight_decay=DECAY, fused=True)  # noqa: E731
    mine = lambda m: m.trainer.strategy.wrap(trainable(m), lr=LR, weight_decay=DECAY).optimizer  # noqa: E731
    seen = {}
    for name, new, strategy in (("torch", theirs, lambda: "auto"), ("engine", mine, OffloadStrategy)):
        run = lambda **more: fitted(tmp_path / name, Constant(new, dropout=0.0), strategy(), weights_only=False,  # noqa: B023, E731
                                    callbacks=[Unfreezing()], max_epochs=5, **more)  # fmt: skip
        straight = run(save_every=2 * BATCHES)
        resumed = run(resume=tmp_path / name / f"step={2 * BATCHES}.ckpt")
        assert len(resumed.fitting.optimizers[0].param_groups) == 2
        seen[name] = straight.seen, resumed.seen
    assert seen["engine"] == seen["torch"]


def test_pruning_under_the_strategy_is_as_with_torchs_adamw(tmp_path):
    def seen(new, strategy):
        model = Model(new, dropout=0.0)
        pruned = [(model.gpt.blocks[0].mlp_in, "weight")]
        fitted(tmp_path, model, strategy, callbacks=[ModelPruning("l1_unstructured", pruned, amount=0.5)])
        return model.seen, (model.gpt.blocks[0].mlp_in.weight == 0).sum()

    assert seen(engines, OffloadStrategy(stage=2)) == seen(torchs, "auto")


def test_a_learning_rate_is_found_before_the_fit_as_with_torchs_adamw(tmp_path):
    """The tuner's own fit has an optimizer, too."""

    def seen(new, strategy="auto"):
        model, loader = Constant(new, dropout=0.0), DataLoader(TOKENS, batch_size=2)
        with quiet():
            trainer = trainer_of(tmp_path, strategy)
            found = Tuner(trainer).lr_find(model, loader, num_training=5, attr_name="rate", update_attr=False)
            trainer.fit(model, loader)
        return model.seen, found.results["loss"]

    assert seen(ours) == seen(engines, OffloadStrategy()) == seen(torchs)


def test_a_checkpoint_of_another_strategy_goes_on_under_this_one(tmp_path):
    straight = fitted(tmp_path, Model(torchs, dropout=0.0), save_every=BATCHES)
    for stage, fields in STAGES.items():
        model = Model(engines, dropout=0.0, late=stage == 3)
        fitted(tmp_path, model, OffloadStrategy(**fields), resume=tmp_path / f"step={BATCHES}.ckpt", weights_only=True)
        assert model.seen == straight.seen[BATCHES:]
        assert_same_weights(model, dict(straight.named_parameters()))


@pytest.mark.draws(1)
@pytest.mark.parametrize("stage", STAGES)
def test_evaluation_after_fit_and_from_a_checkpoint_alone(tmp_path, stage):
    model, loader = fitted(tmp_path, late_in(stage), OffloadStrategy(**STAGES[stage])), DataLoader(TOKENS, 5)
    path, weights = tmp_path / "last", tmp_path / "weights.ckpt"
    with quiet():
        model.fitting.save_checkpoint(path)
        model.fitting.save_checkpoint(weights, weights_only=True)
        model.fitting.limit_val_batches = 1.0
        expected = model.fitting.validate(model, loader, verbose=False)
        trainer = trainer_of(tmp_path, OffloadStrategy(**STAGES[stage]), limit_val_batches=1.0)
        assert trainer.validate(Model(engines), loader, ckpt_path=path, verbose=False) == expected
        alone = trainer_of(tmp_path, limit_val_batches=1.0)
        loaded = Model.load_from_checkpoint(weights, weights_only=True)
        assert alone.validate(loaded, loader, verbose=False) == expected
    assert model.fitting.strategy.engine.optimizer.updates == EPOCHS * BATCHES


def test_a_checkpoint_that_is_written_again_is_whole_at_any_moment(tmp_path, monkeypatch):
    """Until Lightning's file names the new shards, those that it names are there."""
    model = fitted(tmp_path, Model(engines), OffloadStrategy(), max_epochs=1)
    folder, save = tmp_path / "last", type(model.fitting.strategy.checkpoint_io).save_checkpoint
    model.fitting.save_checkpoint(folder)
    [first] = (path for path in (folder / FOLDER).iterdir() if path.is_dir())

    def broken(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(type(model.fitting.strategy.checkpoint_io), "save_checkpoint", broken)
    with pytest.raises(OSError, match="disk full"):
        model.fitting.save_checkpoint(folder)
    assert torch.load(folder / TRAINER, weights_only=True)[FOLDER] == first.name
    fitted(tmp_path, Model(engines), OffloadStrategy(), resume=folder)
    monkeypatch.setattr(type(model.fitting.strategy.checkpoint_io), "save_checkpoint", save)
    model.fitting.save_checkpoint(folder)
    [now] = (path for path in (folder / FOLDER).iterdir() if path.is_dir())
    assert now != first


@pytest.mark.draws(1)
@pytest.mark.parametrize("stage", STAGES)
def test_manual_optimization_under_the_strategy(tmp_path, stage):
    """Clipping has the engine's bound, or is refused."""

    def clipping(module):
        return module.trainer.strategy.wrap(lr=LR, weight_decay=DECAY, gradient_clipping=CLIP).optimizer

    class Reference(Manual, ExactNorm):
        def clip_gradients(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
            self.configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)

    Manual.clip = CLIP
    try:
        expected = fitted(tmp_path, Reference(torchs))
        model = fitted(tmp_path, Manual(clipping, late=stage == 3), OffloadStrategy(**STAGES[stage]))
        assert model.seen == expected.seen
        assert_same_weights(model, dict(expected.named_parameters()))
        with pytest.raises(ConfigError, match=r"clipping by norm to 0.25, and the engine.*clips to the norm of None"):
            fitted(tmp_path, Manual(engines), OffloadStrategy())
    finally:
        Manual.clip = None


def test_half_precision_starts_from_the_values_that_the_module_was_built_with(tmp_path):
    """Lightning alone would round them first. The engine scales losses."""
    model = fitted(tmp_path, Model(engines), OffloadStrategy(), precision="bf16-true", max_epochs=1)
    engine = wrap(Model(engines), lr=lambda update: LR / (1 + update), weight_decay=DECAY, param_dtype="bfloat16")
    torch.manual_seed(2)
    for tokens in DataLoader(TOKENS, 2):
        engine.backward(engine.module.loss(tokens))
        engine.step()
    for (name, p), q in zip(model.named_parameters(), engine.module.parameters(), strict=True):
        assert p.dtype is torch.bfloat16
        assert same_bits(p, q), name


def test_losses_are_scaled_by_the_engine(tmp_path):
    one = fitted(tmp_path, Overflowing(engines), OffloadStrategy(), **scaling())
    other = fitted(tmp_path, Overflowing(torchs), **scaling())
    assert str(one.seen) == str(other.seen)
    assert one.scales == other.scales
    assert one.scales[:3] == [1024.0, 2048.0, 1024.0]
    assert_same_weights(one, dict(other.named_parameters()))


class Sometimes(Model):
    """Some batches have no loss."""

    def training_step(self, tokens, batch_idx):
        loss = super().training_step(tokens, batch_idx)
        return None if batch_idx in self.none else loss


@pytest.mark.parametrize("none", [{3}, {2, 3}], ids=["the last of an update", "all of an update"])
def test_batches_without_a_loss_take_no_part(tmp_path, none):
    runs = []
    for new, strategy in ((torchs, "auto"), (engines, OffloadStrategy())):
        model = Sometimes(new)
        model.none = none
        runs.append(fitted(tmp_path, model, strategy, accumulate_grad_batches=2, max_epochs=1))
    assert runs[0].seen == runs[1].seen
    assert_same_weights(runs[1], dict(runs[0].named_parameters()))


class Engines(Gan):
    def configure_optimizers(self):
        return [self.trainer.strategy.wrap(params=part.parameters()) for part in (self.generator, self.critic)]


class OwnBackward(Model):
    def backward(self, loss):
        loss.backward()


@pytest.mark.parametrize(
    ("model", "fields", "settings", "said"),
    [
        (lambda: Model(ours), {}, {}, r"configure_optimizers gave OffloadedAdamW .*engine's: .*strategy.wrap"),
        (lambda: Engines(None), {}, {},
         r"Engines: a second OffloadStrategy.wrap\(\) in one fit.*one optimizer.*an OffloadedAdamW each, and"),
        (lambda: OwnBackward(engines), {}, {}, r"OwnBackward.backward is overridden"),
        (lambda: Model(engines), {}, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
         r"clipping by value to 1.0"),
        (lambda: Model(engines), {"gradient_clipping": 2.0}, {"gradient_clip_val": 1.0},
         r"clipping by norm to 1.0, and the engine.*norm of 2.0"),
        (lambda: Model(engines), {"gradient_accumulation_steps": 4}, {"accumulate_grad_batches": 2},
         r"gradient_accumulation_steps=4, and the Trainer has accumulate_grad_batches=2"),
        (lambda: Model(engines), {"stag": 3}, {}, r"unknown configuration field 'stag'"),
        (lambda: Model(engines), STAGES[3], {"callbacks": [EMAWeightAveraging()]}, r"EMAWeightAveraging in stage 3"),
        (lambda: Model(engines), STAGES[3], {"callbacks": [Unfreezing()]}, r"Unfreezing in stage 3: it reads weights"),
        (lambda: Model(engines), STAGES[3], {"callbacks": [ModelPruning("l1_unstructured", amount=0.5)]},
         r"ModelPruning in stage 3: it reads weights between steps, where none is whole; expected Off"),
        (lambda: Model(engines), {}, {"plugins": [DoublePrecision()]}, r"precision is DoublePrecision, expected '32-"),
    ],
)  # fmt: skip
def test_what_the_strategy_cannot_do_is_said(tmp_path, model, fields, settings, said):
    with pytest.raises(ConfigError, match=said):
        fitted(tmp_path, model(), OffloadStrategy(**fields), **settings)


def test_checkpoints_that_cannot_be_are_refused(tmp_path):
    model = fitted(tmp_path, Model(engines), OffloadStrategy(), max_epochs=1)
    with pytest.raises(CheckpointError, match=r"memory://x: shards are written to a file system"):
        model.fitting.save_checkpoint("memory://x")
    model.fitting.save_checkpoint(tmp_path / "last")
    trainers = tmp_path / "last" / TRAINER
    sound = torch.load(trainers, weights_only=False)
    for name in ("../../elsewhere", 7):
        torch.save({**sound, "offload": name}, trainers)
        with pytest.raises(CheckpointError, match=r"its shards are .*expected the name of a folder in offload/"):
            fitted(tmp_path, Model(engines), OffloadStrategy(), resume=tmp_path / "last")
    trainers.unlink()
    with pytest.raises(CheckpointError, match=r"trainer.ckpt is missing beside offload/"):
        fitted(tmp_path, Model(engines), OffloadStrategy(), resume=tmp_path / "last")


# --- several ranks -------------------------------------------------------------------------------------


RANKS = {"devices": 2, "batch_size": 1, "use_distributed_sampler": True}


def bits_of(tensors):
    return bits(SimpleNamespace(parameters=lambda: tensors))


def test_two_ranks_train_as_ddp_does_and_resume_their_shards(tmp_path):
    """Stage 3 is built in shards, and resumed in stage 2."""

    @on_ranks(2)
    def found(rank):
        theirs = fitted(tmp_path / "theirs", Model(torchs), "ddp", **RANKS)
        expected = bits(theirs)
        for stage, fields in STAGES.items():
            model = Model(engines, late=stage == 3)
            fitted(tmp_path / f"{stage}", model, OffloadStrategy(**fields), save_every=BATCHES, **RANKS)
            assert (bits_of(list(weights_of(model).values())), model.seen) == (expected, theirs.seen)
            held = sum(state["exp_avg"].numel() for state in model.fitting.optimizers[0].state.values())
            if stage == 2:
                assert held / sum(p.numel() for p in model.parameters()) == pytest.approx(0.5, abs=0.01)
            path = tmp_path / f"{stage}.ckpt"
            model.fitting.save_checkpoint(path, weights_only=True)
            loaded = Model()
            loaded.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
            assert bits(loaded) == expected
        path = tmp_path / "3" / f"step={BATCHES}.ckpt"
        resumed = fitted(tmp_path / "resumed", Model(engines), OffloadStrategy(stage=2), resume=path, **RANKS)
        assert (bits(resumed), resumed.seen) == (expected, theirs.seen[BATCHES:])
        return theirs.seen

    assert found[0] != found[1]  # of different batches


def test_in_stage_1_gradients_are_summed_on_each_rank_before_they_are_reduced_as_under_ddp(tmp_path):
    @on_ranks(2)
    def _(rank):
        settings = {**RANKS, "accumulate_grad_batches": 2}
        theirs = fitted(tmp_path / "theirs", Model(torchs), "ddp", **settings)
        model = fitted(tmp_path / "1", Model(engines), OffloadStrategy(stage=1), **settings)
        assert (bits(model), model.seen) == (bits(theirs), theirs.seen)


class Uneven(pl.LightningModule):
    """Each micro-step one rank uses other parameters than the other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))

    def loss(self, batch_idx, rank):
        used = self.layers if rank == 0 else self.layers[batch_idx % 2 : batch_idx % 2 + 1]
        return sum(layer(torch.full((1, 16), batch_idx + rank + 1.0)).square().mean() for layer in used)

    def training_step(self, batch, batch_idx):
        return self.loss(batch_idx, self.global_rank)

    def configure_optimizers(self):
        return engines(self)


def test_ranks_that_use_other_parameters_add_each_micro_steps_mean(tmp_path):
    """The last update of the epoch has one micro-step. By hand: each micro-step's mean over the ranks, summed."""

    @on_ranks(2)
    def _(rank):
        settings = {**RANKS, "accumulate_grad_batches": 2, "max_epochs": 1}
        model, plain = fitted(tmp_path, Uneven(), OffloadStrategy(), **settings), Uneven()
        optimizer = torchs(plain)
        for batch_idx in range(BATCHES):
            losses = [plain.loss(batch_idx, rank) / 2 for rank in range(2)]
            grads = [torch.autograd.grad(loss, [*plain.parameters()], materialize_grads=True) for loss in losses]
            for p, first, second in zip(plain.parameters(), *grads, strict=True):
                mean = (first + second) / 2
                p.grad = mean if p.grad is None else p.grad + mean
            if batch_idx % 2 or batch_idx == BATCHES - 1:
                optimizer.step()
                optimizer.zero_grad()
        assert bits(model) == bits(plain)


def test_lightnings_own_file_of_one_ranks_part_is_refused(tmp_path):
    """Rank 0 alone writes it; OffloadedAdamW over the ranks trains behind Lightning's DDP as torch's optimizer does."""

    @on_ranks(2)
    def _(rank):
        theirs = fitted(tmp_path / "theirs", Model(torchs), "ddp", **RANKS)
        new = partial(ours, process_group=dist.group.WORLD)
        model = fitted(tmp_path / "ours", Model(new), "ddp", **RANKS)
        assert bits(model) == bits(theirs)
        if rank == 0:
            states = model.fitting.strategy.optimizer_state(model.fitting.optimizers[0])
            with pytest.raises(StateError, match="a file for all ranks would lack the others' parts"):
                torch.save(states, tmp_path / "states.pt")
