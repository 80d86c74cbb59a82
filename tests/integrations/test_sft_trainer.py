"""TRL's SFTTrainer on an engine: the bits of the same run with torch's fused AdamW."""

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM

from frontends.torch.integrations.transformers import FOLDER
from offload_core.checkpoint.reader import Checkpoint, Loaded
from tests.support.hugging_face import (
    CLIP,
    STAGES,
    Generated,
    MeanOfRanks,
    alone,
    assert_same_run,
    llama,
    norms,
    states_of,
    told,
)
from tests.support.processes import on_ranks
from tests.support.sft import ExactNormSFTTrainer, OffloadSFTTrainer, SFTTrainer, tuned
from tests.support.torch_models import same_bits
from tests.support.torch_rank import bits

__all__ = ["alone"]  # a fixture
pytestmark = pytest.mark.filterwarnings(
    "ignore:`(is_)?gradient_checkpointing` is deprecated:FutureWarning"
)  # TRL's, PEFT's


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    generated = Generated()
    return tuned(tmp_path_factory.mktemp("torch"), ExactNormSFTTrainer, generated=generated), generated


@pytest.mark.draws(1)
@pytest.mark.parametrize("stage", STAGES)
def test_a_run_of_sft_trainer_is_that_of_torchs_fused_adamw_and_resumes(reference, tmp_path, stage):
    """Its loss reads the head's weight itself, in the model's own forward."""
    expected, theirs = reference
    generated = Generated()
    trainer = tuned(tmp_path, OffloadSFTTrainer, generated=generated, offload=STAGES[stage])
    assert_same_run(trainer, expected)
    assert norms(trainer) == pytest.approx(norms(expected), rel=1e-12)
    assert max(norms(trainer)) > CLIP
    assert generated.tokens == theirs.tokens
    accuracies = [[e.get("mean_token_accuracy") for e in run.state.log_history] for run in (trainer, expected)]
    assert accuracies[0] == accuracies[1]
    folder = str(tmp_path / "checkpoint-2")
    resumed = tuned(tmp_path / "resumed", OffloadSFTTrainer, resume=folder, offload=STAGES[stage])
    assert_same_run(resumed, expected)
    resumed.save_model(str(tmp_path / "saved"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert loaded.dtype is torch.float32
    for name, param in loaded.named_parameters():
        assert same_bits(param, states_of(expected)[name]["master"]), name


@pytest.mark.draws(1)
@pytest.mark.parametrize("stage", ["2", "3"])
def test_an_adapter_trains_resumes_and_is_read_by_peft(tmp_path, stage):
    """With a module that is saved whole, which in stage 3 is in shards; the base is not in the checkpoints."""
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], use_dora=True)
    expected = tuned(tmp_path / "torch", ExactNormSFTTrainer, peft_config=adapter)
    trainer = tuned(tmp_path, OffloadSFTTrainer, offload=STAGES[stage], peft_config=adapter)
    assert_same_run(trainer, expected)
    folder = tmp_path / "checkpoint-2"
    saved = Loaded(Checkpoint(folder / FOLDER), None)
    assert all("lora" in name or "modules_to_save" in name for name in (*saved.parameters, *saved.others))
    resumed = tuned(
        tmp_path / "resumed", OffloadSFTTrainer, resume=str(folder), offload=STAGES[stage], peft_config=adapter
    )
    assert_same_run(resumed, expected)
    resumed.save_model(str(tmp_path / "saved"))
    loaded = dict(PeftModel.from_pretrained(llama(), tmp_path / "saved").named_parameters())
    for name, p in expected.model.named_parameters():
        assert not p.requires_grad or same_bits(p, loaded[name]), name


def test_two_ranks_fine_tune_as_torch_does_with_each_micro_steps_mean(tmp_path):
    """In stages 2 and 3, resumed, and with an adapter."""

    @on_ranks(2)
    def _(rank):
        class MeanOfRanksSFTTrainer(MeanOfRanks, SFTTrainer):
            pass

        def of(name, kind, **fields):
            generated = Generated()
            trainer = tuned(tmp_path / name, kind, generated=generated, settings={"ddp_backend": "gloo"}, **fields)
            return trainer, told(trainer, generated)

        adapter = {"peft_config": LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])}
        _, expected = of("theirs", MeanOfRanksSFTTrainer)
        assert of("2", OffloadSFTTrainer, offload=STAGES["2"])[1] == expected
        trainer, found = of("3", OffloadSFTTrainer, offload=STAGES["3"])
        assert found == expected
        trainer.save_model(str(tmp_path / "saved"))
        dist.barrier()
        assert bits(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")) == expected[0]
        path = str(tmp_path / "3" / "checkpoint-2")
        _, resumed = of("resumed", OffloadSFTTrainer, offload=STAGES["3"], resume=path)
        assert (*resumed[:2], expected[2][:2] + resumed[2]) == expected
        _, expected = of("adapter", MeanOfRanksSFTTrainer, **adapter)
        assert of("parts", OffloadSFTTrainer, offload=STAGES["3"], **adapter)[1] == expected
