"""OffloadTrainer(layerwise=True): the micro-batches of an update run in one accumulate(), with the bits of the loop."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from frontends.torch import Engine
from frontends.torch.integrations.trainer import OffloadTrainer
from offload_core.config.options import OffloadConfig
from offload_core.errors import ConfigError, ParameterError, StateError
from tests.support import trl_runs
from tests.support.hugging_face import (
    CLIP,
    DATA,
    LR,
    RANKS,
    STAGES,
    Generated,
    alone,
    assert_same_run,
    logged,
    norms,
    states_of,
    trained,
    trainer_of,
)
from tests.support.processes import on_ranks
from tests.support.sft import OffloadSFTTrainer, tuned
from tests.support.torch_models import same_bits

__all__ = ["alone"]  # a fixture
pytestmark = pytest.mark.filterwarnings(
    r"ignore:`(is_)?gradient_checkpointing\w*` is deprecated:FutureWarning"
)  # TRL's

SETTINGS = {
    "per_device_train_batch_size": 1, "gradient_accumulation_steps": 3, "max_steps": 7, "save_strategy": "no",
    "learning_rate": LR, "kind": OffloadTrainer,
}  # fmt: skip
"""An epoch has 16 micro-batches: its sixth update has one."""


def untied():
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=False)  # fmt: skip
    return LlamaForCausalLM(config)


@pytest.fixture
def sizes(monkeypatch):
    """The number of micro-batches of each call of accumulate."""
    found, accumulate = [], Engine.accumulate

    def counting(engine, batches, *args, **kwargs):
        found.append(len(batches))
        return accumulate(engine, batches, *args, **kwargs)

    monkeypatch.setattr(Engine, "accumulate", counting)
    return found


def both(folder, fields=STAGES["2"], **settings):
    """A run of the loop, and a layerwise one."""
    for layerwise in (False, True):
        given = {"offload": fields, "layerwise": layerwise}
        yield trained(folder / str(layerwise), given, **{"model": untied(), **SETTINGS, **settings})


@pytest.mark.parametrize("param_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_layerwise_run_has_the_bits_of_the_loop(tmp_path, sizes, stage, param_dtype):
    """Accumulating, clipping and evaluating; the last update of an epoch has one micro-batch."""
    settings = {"eval_strategy": "steps", "eval_steps": 3, "evaluated": DATA[:4]}
    one, other = both(tmp_path, {**STAGES[stage], "param_dtype": param_dtype}, **settings)
    assert_same_run(one, other)
    assert norms(one) == norms(other)
    assert max(norms(one)) > CLIP
    assert sizes == [3, 3, 3, 3, 3, 1, 3]


class Weighted(OffloadTrainer):
    """A loss of its own, which Trainer divides by the micro-batches; it is no number for some of them."""

    loss_is_scaled_for_ga = False
    nan_at = ()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"])
        self.count = getattr(self, "count", 0) + 1
        weights = torch.linspace(0.5, 1.5, outputs.logits[:, :-1, 0].numel())
        logits, labels = outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
        loss = (torch.nn.functional.cross_entropy(logits, labels, reduction="none") * weights).mean()
        loss = loss * math.nan if self.count in self.nan_at else loss
        return (loss, outputs) if return_outputs else loss


class SometimesNan(Weighted):
    nan_at = (5, 6)


class Stepping(OffloadTrainer):
    """Changes each micro-batch in place, and the loss that is logged."""

    def training_step(self, model, inputs, *args, **kwargs):
        inputs["input_ids"] = inputs["input_ids"].flip(1)
        return 2 * super().training_step(model, inputs, *args, **kwargs)


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": Stepping},
        {"kind": Weighted},
        {"kind": SometimesNan},
        {"kind": SometimesNan, "logging_nan_inf_filter": False, "logging_steps": 7},
        {"label_smoothing_factor": 0.1},
        {"bf16": True},
        {"average_tokens_across_devices": False},
        {"gradient_accumulation_steps": 1},
        {"activation_checkpointing": True},
        {"neftune_noise_alpha": 5.0},
        {"torch_empty_cache_steps": 1},
    ],
    ids=lambda settings: ", ".join(map(str, settings)),
)
def test_losses_are_those_of_the_loop(tmp_path, sizes, settings):
    one, other = both(tmp_path, STAGES["3"], **settings)
    assert str(logged(one)) == str(logged(other))  # NaN is equal to no number
    if "logging_nan_inf_filter" not in settings:
        assert_same_run(one, other)
    assert len(sizes) == 7


def test_losses_of_a_function_are_those_of_the_loop(tmp_path, sizes):
    """It is given the number of tokens of the whole update."""
    numbers = []

    def loss(outputs, labels, num_items_in_batch):
        numbers.append(int(num_items_in_batch))
        logits = outputs.logits[:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch

    runs = []
    for layerwise in (False, True):
        trainer = trainer_of(
            tmp_path, {"offload": {}, "layerwise": layerwise, "compute_loss_func": loss}, model=untied(), **SETTINGS
        )
        trainer.train()
        runs.append((trainer, numbers[:]))
        numbers.clear()
    assert_same_run(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]
    assert len({*runs[1][1]}) == 2  # of three micro-batches, and of one
    assert len(sizes) == 7


class Noting(TrainerCallback):
    """Notes the events, and the loss and updates so far."""

    def __init__(self):
        self.seen = []

    def note(self, event, state, **kwargs):
        self.seen.append((event, state.global_step, state.epoch))

    def __getattribute__(self, name):
        if name.startswith("on_"):
            return lambda args, state, control, **kwargs: self.note(name, state)
        return super().__getattribute__(name)


def test_callbacks_are_called_as_by_the_loop(tmp_path, sizes):
    notes = [Noting(), Noting()]
    for noting, layerwise in zip(notes, (False, True), strict=True):
        given = {"offload": {}, "layerwise": layerwise}
        trained(tmp_path, given, callbacks=[noting], model=untied(), **SETTINGS)
    assert notes[0].seen == notes[1].seen
    events = [event for event, *_ in notes[1].seen]
    assert events.count("on_substep_end") == 2 * 6
    assert events.count("on_pre_optimizer_step") == len(sizes) == 7


def test_a_run_that_is_resumed_in_an_epoch_is_the_loops(tmp_path, sizes):
    settings = {"save_strategy": "steps", "save_steps": 2}
    loop, _ = both(tmp_path, **settings)
    folder = str(Path(loop.args.output_dir).parent / "True" / "checkpoint-4")
    sizes.clear()
    given = {"offload": STAGES["3"], "layerwise": True}
    resumed = trained(tmp_path / "resumed", given, resume=folder, **{**SETTINGS, **settings, "model": untied()})
    assert_same_run(resumed, loop)
    assert sizes == [3, 1, 3]


class StopsOnce(TrainerCallback):
    """Stops the first epoch in the middle of the first accumulation."""

    stopped = False

    def on_substep_end(self, args, state, control, **kwargs):
        control.should_epoch_stop, self.stopped = not self.stopped, True


def test_gradients_of_an_accumulation_that_a_callback_breaks_off_are_discarded(tmp_path, sizes):
    settings = {"max_steps": -1, "lr_scheduler_type": "constant", "warmup_steps": 0, "model": None}
    settings = {**SETTINGS, **settings, "train_sampling_strategy": "sequential"}
    stopping = trained(
        tmp_path,
        {"offload": {}, "layerwise": True},
        **{**settings, "callbacks": [StopsOnce()], "model": untied(), "num_train_epochs": 2},
    )
    straight = trained(tmp_path, {"offload": {}}, **{**settings, "model": untied(), "num_train_epochs": 1})
    assert sizes == [3, 3, 3, 3, 3, 3, 1]
    found, expected = states_of(stopping), states_of(straight)
    for name, states in expected.items():
        assert same_bits(found[name]["master"], states["master"]), name


def test_two_ranks_lose_as_in_the_loop(tmp_path):
    """Sums over micro-batches and ranks are in another order, so the last bits differ."""

    @on_ranks(2)
    def _(rank):
        for stage in ("2", "3"):
            settings = {**SETTINGS, **RANKS, "max_steps": 4}
            one, other = (
                trained(
                    tmp_path / f"{stage} {layerwise}",
                    {"offload": STAGES[stage], "layerwise": layerwise},
                    model=untied(),
                    **settings,
                )
                for layerwise in (False, True)
            )
            losses = [[entry["loss"] for entry in run.state.log_history if "loss" in entry] for run in (one, other)]
            assert len(losses[0]) == 4
            assert losses[0] == pytest.approx(losses[1], rel=1e-5)


# --- settings, and what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize("offload", [{"layerwise": True}, OffloadConfig(layerwise=True)], ids=["dict", "OffloadConfig"])
def test_the_field_is_as_good_as_the_argument(tmp_path, sizes, offload):
    trainer = trained(tmp_path, {"offload": offload}, model=untied(), **{**SETTINGS, "max_steps": 1})
    assert trainer.engine.offload_config.layerwise
    assert sizes == [3]


class Prepares(OffloadTrainer):
    def _prepare_inputs(self, inputs):
        return super()._prepare_inputs(inputs)


REENTRANT = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"kind": Prepares},
            r"Prepares has a _prepare_inputs\(\) of its own, .*expected inputs from the data collator",
        ),
        (REENTRANT, r"layerwise=True with reentrant checkpointing, .*expected .*\"use_reentrant\": False"),
        ({"torch_compile": True}, r"layerwise=True with torch_compile=True, .*expected each block compiled"),
        ({"use_cache": True}, r"layerwise=True with use_cache=True: .*expected use_cache=False"),
    ],
    ids=["inputs", "reentrant", "compiled", "cache"],
)
def test_settings_that_cannot_be_layerwise_are_refused(tmp_path, settings, said):
    with pytest.raises(ConfigError, match=said):
        trainer_of(tmp_path, {"offload": {"layerwise": True}}, model=untied(), **{**SETTINGS, **settings})


def test_a_contradiction_and_a_model_without_blocks_are_refused(tmp_path):
    make = partial(trainer_of, tmp_path, **SETTINGS)
    with pytest.raises(ConfigError, match=r"layerwise=False in offload=, and layerwise=True; expected one of them"):
        make({"offload": {"layerwise": False}, "layerwise": True}, model=untied())
    with pytest.raises(ParameterError, match="Linear has no blocks that could be found"):
        make({"offload": {}, "layerwise": True}, model=torch.nn.Linear(4, 4))


class Copies(OffloadTrainer):
    def get_batch_samples(self, *args, **kwargs):
        batches, n_items = super().get_batch_samples(*args, **kwargs)
        return [dict(batch) for batch in batches], n_items


class Never(OffloadTrainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        return self.compute_loss(model, inputs)


class Twice(OffloadTrainer):
    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        self.accelerator.backward(loss, retain_graph=True)
        return loss


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Copies, r"training_step\(\) got another batch than get_batch_samples\(\) returned"),
        (Never, r"training_step\(\) has not called accelerator.backward\(\)"),
        (Twice, r"accelerator.backward\(\) twice in one micro-batch"),
    ],
)
def test_code_that_would_train_otherwise_is_told_at_the_first_update(tmp_path, kind, said):
    trainer = trainer_of(tmp_path, {"offload": {}, "layerwise": True}, model=untied(), **{**SETTINGS, "kind": kind})
    with pytest.raises(StateError, match=said):
        trainer.train()
    assert trainer.engine.optimizer.updates == 0


def test_a_training_step_by_itself_runs_its_micro_batch(tmp_path, sizes):
    """As code does that has a loop of its own; two steps and an update have the bits of the same without layerwise."""
    found = []
    for layerwise in (False, True):
        trainer = trainer_of(tmp_path, {"offload": {}, "layerwise": layerwise}, model=untied(), **SETTINGS)
        trainer.current_gradient_accumulation_steps = 2
        losses = [trainer.training_step(trainer.model, {k: v[None] for k, v in row.items()}) for row in DATA[:2]]
        trainer.optimizer.step()
        found.append((trainer, [float(loss) for loss in losses]))
    assert sizes == [1, 1]
    assert found[0][1] == found[1][1]
    assert_same_run(found[0][0], found[1][0])


# --- TRL --------------------------------------------------------------------------------------------------


def told(trainer):
    """All that is logged, but for times and the bytes of sums on the host, which a layerwise run need not have."""
    others = ("runtime", "per_second", "host_bytes")
    return [{k: v for k, v in entry.items() if not k.endswith(others)} for entry in trainer.state.log_history]


@pytest.mark.parametrize("kind", ["dpo", "reward", "CPO", "ORPO", "TPO"])
def test_trls_trainers_have_the_bits_of_the_loop(tmp_path, sizes, kind):
    """DPO has a reference in shards beside the model; all have metrics of their own."""
    settings = {"activation_checkpointing": False}
    one, other = (
        trl_runs.run(tmp_path, kind, trl_runs.on_engine, settings=settings, offload=STAGES["3"], layerwise=layerwise)
        for layerwise in (False, True)
    )
    assert sizes == [2] * trl_runs.STEPS
    assert_same_run(one, other)
    assert told(one) == told(other)
    assert other.state.log_history[0]["offload_host_bytes"] < one.state.log_history[0]["offload_host_bytes"]


def test_trls_sft_has_the_bits_of_the_loop(tmp_path, monkeypatch, sizes):
    """Checkpointing activations, evaluating, generating in a callback and saving."""
    monkeypatch.setattr("tests.support.sft.llama", untied)
    generated = [Generated(), Generated()]
    one, other = (
        tuned(tmp_path, OffloadSFTTrainer, generated=each, offload=STAGES["3"], layerwise=layerwise)
        for each, layerwise in zip(generated, (False, True), strict=True)
    )
    assert sizes == [4] * 4
    assert_same_run(one, other)
    assert told(one) == told(other)
    assert generated[0].tokens == generated[1].tokens
    with pytest.raises(ConfigError, match=r"layerwise=True with activation_offloading=True, .*host_activation_memory"):
        tuned(
            tmp_path,
            OffloadSFTTrainer,
            settings={"activation_offloading": True, "activation_checkpointing": False},
            offload={"layerwise": True},
        )


@pytest.mark.parametrize("kind", ["grpo", "rloo", "GMPO", "distillation"])
def test_trls_trainers_that_generate_texts_are_refused(tmp_path, kind):
    with pytest.raises(ConfigError, match=r"layerwise=True, and \w+Trainer has a _prepare_inputs\(\) of its own, as"):
        trl_runs.run(tmp_path, kind, trl_runs.on_engine, offload={}, layerwise=True)


@pytest.mark.parametrize("kind", ["kto", "online DPO", "GKD"])
def test_trls_trainers_that_run_the_model_without_a_graph_are_told_at_the_first_update(tmp_path, kind):
    with pytest.raises((StateError, ParameterError), match=r"accumulate: block 'model.layers.0' (runs without|gets a)"):
        trl_runs.run(tmp_path, kind, trl_runs.on_engine, offload={}, layerwise=True)
