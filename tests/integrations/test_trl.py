"""TRL's trainers of preferences, rewards and generated texts on an engine: the runs of torch's fused AdamW."""

import collections
import copy
import os
import pickle

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback
from trl import BEMACallback
from trl.generation.vllm_generation import VLLMGeneration

from frontends.torch import gathered_parameters
from frontends.torch.integrations.trainer import OffloadTrainer
from tests.support import hugging_face, simulated
from tests.support.hugging_face import STAGES, alone, assert_same_run, norms, told
from tests.support.processes import forked, on_ranks
from tests.support.torch_models import assert_all_same, same_bits
from tests.support.trl_runs import (
    CLIP,
    KINDS,
    MODEL,
    SCORES,
    load,
    on_engine,
    plain,
    plain_mean,
    rows_on_disk,
    run,
    starts,
)

__all__ = ["alone"]  # a fixture
pytestmark = pytest.mark.filterwarnings(
    r"ignore:`(is_)?gradient_checkpointing\w*` is deprecated:FutureWarning",  # TRL's, PEFT's
    "ignore:You are importing from 'trl.experimental'",
)

LORA = {"peft_config": {"r": 4, "target_modules": ["q_proj", "v_proj"]}}
REWARDED = {"reward_model": True}
FOLLOWS = {"sync_ref_model": True, "ref_model_sync_steps": 1}
PRECOMPUTED = {"precompute_ref_log_probs": True}
CONTINUOUS = {  # a cache of 5% of the free memory: without the limit it takes half, 12 GB here
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"max_memory_percent": 0.05},
}
RUNS = {
    "GRPO": ("grpo", {}, {}),
    "GRPO, an adapter": ("grpo", {}, LORA),
    "GRPO, the reference follows": ("grpo", FOLLOWS, {}),
    "GRPO, two updates of one batch": ("grpo", {"num_iterations": 2}, {}),
    "GRPO, checkpointing": ("grpo", {"gradient_checkpointing": True}, {}),
    "GRPO, autocast": ("grpo", {"bf16": True}, {}),
    "GRPO, the head in fp32": ("grpo", {"cast_lm_head_to_fp32": True}, {}),
    "GRPO, a continuous batch": ("grpo", CONTINUOUS, {}),
    "GRPO, a reward model": ("grpo", {}, REWARDED),
    "RLOO": ("rloo", {}, {}),
    "RLOO, a reward model": ("rloo", {}, REWARDED),
    "RLOO, an adapter": ("rloo", {}, LORA),
    "RLOO, the reference follows": ("rloo", FOLLOWS, {}),
    "DPO": ("dpo", {}, {}),
    "DPO, an adapter": ("dpo", {}, LORA),
    "DPO, the reference follows": ("dpo", FOLLOWS, {}),
    "DPO, the reference comes first": ("dpo", PRECOMPUTED, {}),
    "DPO, the reference comes first, an adapter": ("dpo", PRECOMPUTED, LORA),
    "KTO": ("kto", {}, {}),
    "KTO, an adapter": ("kto", {}, LORA),
    "KTO, the reference follows": ("kto", FOLLOWS, {}),
    "KTO, the reference comes first": ("kto", PRECOMPUTED, {}),
    "a reward": ("reward", {}, {}),
    "a reward, an adapter": ("reward", {}, LORA),
    "a teacher": ("distillation", {}, {}),
    "a teacher that scores texts": ("GKD", {}, {}),
    "a teacher that writes texts": ("GKD", {"seq_kd": True, "lmbda": 0.0}, {}),
    **{name: (name, {}, {}) for name in ("CPO", "ORPO", "online DPO", "GMPO", "TPO")},
}
"""The trainer, its arguments, and what else it gets."""
LENGTHS = {"grpo": "max_completion_length", "rloo": "max_completion_length", "GKD": "max_new_tokens"}
QUICK = {"GRPO", "GRPO, an adapter", "RLOO", "DPO, an adapter", "DPO, the reference follows", "KTO", "a reward"}
QUICK |= {"DPO, the reference comes first"}
ON_RANKS = {"GRPO, an adapter", "DPO, the reference follows"}
ON_ONE_RANK = {"GRPO, autocast", "GRPO, checkpointing", "GRPO, the head in fp32"}  # ranks add nothing to these
ON_ONE_RANK |= {"GRPO, a continuous batch"}  # TRL's own run of it breaks off on several
ON_ONE_RANK |= {"CPO", "ORPO", "online DPO", "GMPO", "TPO"}


def of(names, quick):
    return [pytest.param(name, marks=[] if name in quick else pytest.mark.slow) for name in names]


def evaluated(trainer):
    """The models beside the one that is trained."""
    models = [getattr(trainer, name, None) for name in ("teacher_model", "ref_model")]
    return [each for each in (*models, *getattr(trainer, "reward_funcs", ())) if isinstance(each, torch.nn.Module)]


@pytest.mark.draws(1)
@pytest.mark.parametrize("name", of(RUNS, QUICK))
def test_its_trainers_train_as_with_torchs_fused_adamw(tmp_path, name):
    """Accumulating and clipping, in stages 2 and 3."""
    kind, settings, fields = RUNS[name]
    expected = run(tmp_path / "torch", kind, plain, settings=settings, **fields)
    for stage in ("2", "3"):
        trainer = run(tmp_path / stage, kind, on_engine, settings=settings, offload=STAGES[stage], **fields)
        assert_same_run(trainer, expected)
        assert norms(trainer) == pytest.approx(norms(expected), rel=1e-12)
        assert trainer.engine.optimizer.updates == trainer.state.global_step
        assert [engine.module for engine in trainer.frozen_engines] == (evaluated(trainer) if stage == "3" else [])
    assert max(norms(expected)) > CLIP


@pytest.mark.draws(1)
@pytest.mark.parametrize("name", of([name for name in RUNS if name not in ON_ONE_RANK], ON_RANKS))
def test_two_ranks_train_as_torch_does_on_each_micro_steps_mean(tmp_path, name):
    """They generate up to 40 tokens, and end at different ones."""
    kind, settings, fields = RUNS[name]
    settings = {"ddp_backend": "gloo", **settings}
    if kind in LENGTHS:
        settings[LENGTHS[kind]] = 40
    bases = starts()
    rows = {which: rows_on_disk(kind, tmp_path / "rows" / which) for which in ("torch", "2", "3")}

    @on_ranks(2)
    def _(rank):
        trainer = run(
            tmp_path / "torch", kind, plain_mean, bases=bases, rows=rows["torch"], settings=settings, **fields
        )
        expected = told(trainer)
        for stage in ("2", "3"):
            trainer = run(
                tmp_path / stage, kind, on_engine, bases=bases, rows=rows[stage], settings=settings,
                offload=STAGES[stage], **fields,
            )  # fmt: skip
            assert told(trainer) == expected, stage


# --- generation -----------------------------------------------------------------------------------------


class CountsGathers(TrainerCallback):
    """Notes how often each parameter was gathered in each generation, and generates once more after an update."""

    def __init__(self):
        self.counts, self.live = [], None

    def on_train_begin(self, args, state, control, model, **kwargs):
        live, generate = self.live, model.generate

        def counting(*args, **kwargs):
            gathered = collections.Counter()
            gather = type(live)._gather

            def count(param):
                gathered[param.spec.name] += 1
                gather(live, param)

            live._gather = count
            try:
                return generate(*args, **kwargs)
            finally:
                del live._gather
                self.counts.append(gathered)

        model.generate = counting

    def on_step_end(self, args, state, control, model, **kwargs):
        model.generate(torch.tensor([[3, 1, 4]]), max_new_tokens=4, pad_token_id=0)


def counted(folder, **settings):
    counts = CountsGathers()

    class Counting(on_engine("grpo")):
        def create_optimizer(self, model=None):
            made = super().create_optimizer(model)
            counts.live = self.engine.optimizer.sharding.live
            return made

    fields = {**STAGES["3"], "max_live_parameters": 4000, "prefetch_bucket_size": 2500}
    trainer = run(
        folder, "grpo", lambda kind: Counting, settings={"max_completion_length": 32, **settings}, offload=fields,
        callbacks=[counts],
    )  # fmt: skip
    return trainer, counts.counts


def test_a_generation_inside_a_step_gathers_each_parameter_once(tmp_path):
    """TRL's of 32 tokens, and those of a callback, in a model of more elements than may be live; else by layer."""
    trainer, counts = counted(tmp_path)
    in_shards = [name for name, p in trainer.model.named_parameters() if p in trainer.engine.optimizer.sharding]
    assert len(counts) == 6
    assert all(gathered == dict.fromkeys(in_shards, 1) for gathered in counts)
    other, counts = counted(tmp_path, ds3_gather_for_generation=False)
    assert_same_run(other, trainer)
    assert max(counts[0].values()) > 8


def test_ranks_that_generate_by_layer_go_on_until_all_have_ended(tmp_path):
    bases = starts()

    @on_ranks(2)
    def _(rank):
        settings = {"ddp_backend": "gloo", "max_completion_length": 40, "max_steps": 1}
        runs = [
            run(tmp_path / f"{whole}", "grpo", on_engine, bases=bases, offload=STAGES["3"],
                settings={**settings, "ds3_gather_for_generation": whole})
            for whole in (True, False)
        ]  # fmt: skip
        assert told(runs[0]) == told(runs[1])


def test_a_copy_of_the_model_generates_as_its_class_does(tmp_path):
    trainer = hugging_face.on_engine(tmp_path, "3", save_strategy="no")
    trainer.model.eval()
    prompt = {"input_ids": torch.tensor([[3, 1, 4]]), "max_new_tokens": 4, "do_sample": False}
    expected = trainer.model.generate(**prompt).tolist()
    trainer.engine.close()
    assert trainer.model.generate(**prompt).tolist() == expected
    copied = pickle.loads(pickle.dumps(copy.deepcopy(trainer.model)))
    with torch.no_grad():
        for param in trainer.model.parameters():
            param.zero_()
    assert copied.generate(**prompt).tolist() == expected


# --- what TRL asks of DeepSpeed's stage 3 -----------------------------------------------------------------


class Received:
    """Stands for the client of vLLM's server."""

    def __init__(self):
        self.weights = {}

    def update_named_params(self, metadata, named):
        self.weights = {name: weight.clone() for name, weight in named}
        assert [name for name, *_ in metadata] == [*self.weights]

    def reset_prefix_cache(self):
        pass


class WithVLLM:
    """Sends weights to an inference engine, as TRL does before it generates there."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        made = self.vllm_generation = object.__new__(VLLMGeneration)
        vars(made).update(model=self.model, accelerator=self.accelerator, mode="server", _weight_metadata=None,
                          vllm_client=Received(), _dist=self._dist)  # fmt: skip


@pytest.mark.draws(1)
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fields", [{}, LORA], ids=["full", "adapter"])
def test_an_inference_engine_gets_whole_weights_with_adapters_merged(tmp_path, fields, world_size):
    bases = starts()

    def sent(folder, trainer, **offload):
        kind = type("Sends", (*trainer, WithVLLM, KINDS["grpo"].trainer), {})
        settings = {"ddp_backend": "gloo"} if world_size > 1 else {}
        made = run(folder, "grpo", lambda name: kind, bases=bases, settings=settings, **offload, **fields)
        made.vllm_generation.sync_weights()
        weights = made.vllm_generation.vllm_client.weights
        made.train()  # what was merged is not any more
        return weights, told(made)

    @on_ranks(world_size)
    def _(rank):
        whole, then = sent(tmp_path / "2", [OffloadTrainer], offload=STAGES["2"])
        parts, after = sent(tmp_path / "3", [OffloadTrainer], offload=STAGES["3"])
        assert len(whole) == (0 if rank else 21)
        assert whole.keys() == parts.keys()
        for name, weight in parts.items():
            assert same_bits(weight, whole[name]), name
        assert after == then
        if world_size > 1:
            dist.barrier()


@pytest.mark.draws(1)
@pytest.mark.parametrize("stage", ["2", "3"])
def test_log_probabilities_and_advantages_keep_their_type_beside_bfloat16_parameters(tmp_path, stage):
    types = {}

    class Notes:
        def compute_loss(self, model, inputs, *args, **kwargs):
            types.update({name: t.dtype for name, t in inputs.items() if getattr(t, "is_floating_point", bool)()})
            return super().compute_loss(model, inputs, *args, **kwargs)

    fields = {**STAGES[stage], "param_dtype": "bfloat16"}
    for kind, settings in (("grpo", {"num_iterations": 2}), ("dpo", PRECOMPUTED)):
        noting = type("Noting", (OffloadTrainer, Notes, KINDS[kind].trainer), {})
        run(tmp_path, kind, lambda name, noting=noting: noting, settings=settings, offload=fields)
    assert {*types} == {
        "advantages", "old_per_token_logps", "ref_per_token_logps", "ref_chosen_logps", "ref_rejected_logps"
    }  # fmt: skip
    assert {*types.values()} == {torch.float32}


@pytest.mark.draws(1)
@pytest.mark.parametrize("stage", ["2", "3"])
def test_a_running_average_of_the_weights_is_that_of_a_plain_run(tmp_path, stage):
    """It reads them when training begins."""

    def averaged(name, of, **fields):
        average = BEMACallback(update_freq=1)
        run(tmp_path / name, "dpo", of, callbacks=[average], **fields)
        return average.running_model

    expected = averaged("torch", plain)
    found = averaged(stage, on_engine, offload=STAGES[stage])
    assert not same_bits(next(expected.parameters()), next(load().parameters()))
    assert_all_same(found.parameters(), expected.parameters())


def test_callbacks_see_the_weights_that_were_loaded_when_training_begins(tmp_path):
    class Notes(TrainerCallback):
        def on_train_begin(self, args, state, control, model, **kwargs):
            self.seen = [p.detach().clone() for p in model.parameters()]

    for stage in ("2", "3"):
        notes, settings = Notes(), {"save_strategy": "steps", "save_steps": 2}
        trainer = run(tmp_path / stage, "dpo", on_engine, settings=settings, offload=STAGES[stage], callbacks=[notes])
        checkpoint = LlamaForCausalLM.from_pretrained(tmp_path / stage / "checkpoint-2")
        trainer.train(resume_from_checkpoint=str(tmp_path / stage / "checkpoint-2"))
        assert_all_same(notes.seen, checkpoint.parameters())


# --- models that are evaluated beside it ------------------------------------------------------------------


@pytest.mark.draws(1)
@pytest.mark.parametrize(
    ("world_size", "fields"),
    [pytest.param(2, {**STAGES["3"], "offload_param": None}, marks=pytest.mark.quick), (1, STAGES["3"])],
    ids=["ranks", "streamed"],
)
def test_a_reference_and_a_reward_model_lie_in_shards(tmp_path, world_size, fields):
    bases = starts()

    @on_ranks(world_size)
    def found(rank):
        settings = {"max_steps": 1, **({"ddp_backend": "gloo"} if world_size > 1 else {})}
        of = lambda stage: {"bases": bases, "settings": settings, "offload": stage, "reward_model": True}  # noqa: E731
        trainer = run(tmp_path / "3", "grpo", on_engine, **of(fields))
        reports = [engine.memory_report() for engine in (*trainer.frozen_engines, trainer.engine)]
        weights = []
        for model in evaluated(trainer):
            with gathered_parameters(model.parameters()):
                weights.append([p.clone() for p in model.parameters()])
        prompt = {"inputs": torch.tensor([[3, 1, 4]]), "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        prompt["max_new_tokens"] = 9 if rank else 2  # which needs no more gathers of one rank than of the other
        texts = trainer.ref_model.generate(**prompt)
        whole = run(tmp_path / "2", "grpo", on_engine, **of(STAGES["2"]))
        for model, mine in zip(evaluated(whole), weights, strict=True):
            assert_all_same(model.parameters(), mine)
        assert texts.tolist() == whole.ref_model.generate(**prompt).tolist()
        assert told(trainer) == told(whole)
        return [report.device_bytes for report in reports], [{*report.host} for report in reports[:2]]

    for on_device, on_host in found:
        for which, n_bytes in zip((MODEL, SCORES), on_device, strict=False):
            sizes = [p.nbytes for p in load(which).parameters()]
            persistent = sum(size for size in sizes if size < 4 * 100)
            shards = 0 if fields["offload_param"] else (sum(sizes) - persistent) // 2
            assert persistent + shards <= n_bytes <= persistent + shards + 64 * len(sizes)
        assert set.union(*on_host) <= {"parameters on the host"}


def large():
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 8}
    config = LlamaConfig(vocab_size=64, num_attention_heads=2, num_key_value_heads=2, pad_token_id=0, **sizes)
    config._attn_implementation = "eager"  # the device has no other
    return LlamaForCausalLM(config)


class Large(OffloadTrainer, KINDS["dpo"].trainer):
    def __init__(self, model, **kwargs):
        super().__init__(model=large(), ref_model=large(), **kwargs)


@pytest.mark.slow
@pytest.mark.skipif(simulated.why_not() is not None, reason=str(simulated.why_not()))
def test_an_accelerator_never_holds_a_whole_reference(tmp_path):
    """In fp32, a parameter of one model: in stage 2 it holds two models and gradients, in stage 3 what is live."""

    def most(stage):
        buckets = {"reduce_bucket_size": 70_000}
        live = (
            {"max_live_parameters": 300_000, "prefetch_bucket_size": 70_000} if stage == "3" else {}
        )  # of 2.1 million

        @forked
        def found():
            simulated.prepare()
            with simulated.available():
                os.environ["ACCELERATE_TORCH_DEVICE"] = f"{simulated.NAME}:0"
                settings = {"use_cpu": False, "max_steps": 2, "per_device_train_batch_size": 1}
                fields = STAGES[stage] | buckets | live
                trainer = run(tmp_path / stage, "dpo", lambda kind: Large, settings=settings, offload=fields)
                torch.accelerator.synchronize()
                held = torch.accelerator.max_memory_allocated()
                assert trainer.args.device.type == simulated.NAME
                return held / sum(p.numel() for p in trainer.model.parameters()), told(trainer)

        return found

    (both, expected), (live, found) = most("2"), most("3")
    assert found == expected
    assert 8 < both < 10
    assert live < 2.5


def test_a_teachers_head_is_whole_until_the_micro_step_ends(tmp_path):
    """Its loss reads the head outside the teacher's forward, also in evaluations."""
    whole = []

    class Noting(on_engine("distillation")):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            whole.append(self.frozen_engines[0].optimizer.sharding.live.numel)
            return loss

        def prediction_step(self, *args, **kwargs):
            step = super().prediction_step(*args, **kwargs)
            whole.append(self.frozen_engines[0].optimizer.sharding.live.numel)
            return step

    run(tmp_path, "distillation", lambda kind: Noting, offload=STAGES["3"])
    assert whole == 8 * [0]  # 6 micro-steps, and an evaluation after the second update and one at the end


def test_a_reference_keeps_the_type_in_which_it_was_loaded(tmp_path):
    fields = {**STAGES["3"], "param_dtype": "bfloat16"}
    trainer = run(tmp_path, "dpo", on_engine, offload=fields)
    with gathered_parameters(trainer.ref_model.parameters()):
        assert_all_same(trainer.ref_model.parameters(), load().parameters())
    assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}


def test_a_model_that_shares_weights_with_the_trained_one_is_left_alone(tmp_path):
    class Shares(on_engine("grpo")):
        def __init__(self, model, **kwargs):
            reward = load(SCORES)
            reward.model = model.model
            super().__init__(model=model, **{**kwargs, "reward_funcs": reward})

    trainer = run(tmp_path, "grpo", lambda kind: Shares, settings={"beta": 0.0}, offload=STAGES["3"])
    assert trainer.frozen_engines == []
    assert all(p.requires_grad for p in trainer.model.parameters())


def test_the_reference_follows_with_one_weight_whole_at_a_time(tmp_path):
    most = []

    class Notes(TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            for live in lives:
                live.peak_numel = 0

        def on_log(self, args, state, control, **kwargs):
            most.append([live.peak_numel for live in lives])

    class Noting(on_engine("dpo")):
        def create_optimizer(self, model=None):
            made = super().create_optimizer(model)
            lives[:] = [engine.optimizer.sharding.live for engine in (self.engine, *self.frozen_engines)]
            return made

    lives = []
    fields = {**STAGES["3"], "max_live_parameters": 1, "prefetch_bucket_size": 0}
    trainer = run(tmp_path, "dpo", lambda kind: Noting, settings=FOLLOWS, offload=fields, callbacks=[Notes()])
    assert most[:3] == 3 * [2 * [max(p.numel() for p in trainer.model.parameters())]]
