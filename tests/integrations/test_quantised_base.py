"""A quantised base as Hugging Face's pages load it (``quantization_config=``), with a LoRA adapter, in a Trainer."""

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.support.adapters import LORA
from tests.support.hugging_face import TORCHS, ExactNorm, alone, assert_same_run, llama, on_engine, trained

__all__ = ["alone"]  # a fixture
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT's
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning"),
]

BASES = {
    "4 bits": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "8 bits": {"load_in_8bit": True},
}


def adapted(folder, bits):
    base = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=BitsAndBytesConfig(**BASES[bits]), device_map={"": "cpu"}
    )
    model = prepare_model_for_kbit_training(base, gradient_checkpointing_kwargs={"use_reentrant": False})
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(**LORA, task_type="CAUSAL_LM"))


@pytest.mark.draws(1)
@pytest.mark.parametrize(("bits", "stage"), [("4 bits", "2"), ("4 bits", "3"), ("8 bits", "3")])
def test_an_adapter_on_a_base_that_is_loaded_quantised_gets_the_bits_of_torchs_optimizer(bits, stage, tmp_path):
    base, saved = tmp_path / "base", tmp_path / "ours"
    llama().save_pretrained(base)
    theirs = trained(tmp_path / "theirs", TORCHS, kind=ExactNorm, model=adapted(base, bits))
    assert_same_run(on_engine(saved, stage, model=adapted(base, bits)), theirs)
    if stage == "3":
        resumed = on_engine(saved, stage, model=adapted(base, bits), resume=str(saved / "checkpoint-6"))
        assert_same_run(resumed, theirs)
