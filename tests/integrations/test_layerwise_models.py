"""Models of Hugging Face, adapters and quantised bases in ``engine.accumulate()``: the bits of the loop."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("bitsandbytes")
pytest.importorskip("torchao")

import transformers

from frontends.torch import gathered_parameters, wrap
from offload_core.errors import ParameterError, StateError
from tests.support.adapters import adapted
from tests.support.hugging_face import alone
from tests.support.quantised import KINDS
from tests.support.quantised import model as quantised
from tests.support.torch_models import same_bits

__all__ = ["alone"]  # a fixture
pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT's
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning"),
]
VOCABULARY = 128
SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "head_dim": 16, "tie_word_embeddings": False,
}  # fmt: skip
GPT2 = {
    "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 64, "resid_pdrop": 0,
    "embd_pdrop": 0, "attn_pdrop": 0, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
VIT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8, "num_labels": 10, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0,
}  # fmt: skip
T5 = {
    "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 3, "num_heads": 4, "vocab_size": VOCABULARY,
    "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
MODELS = {
    "GPT": (transformers.GPT2LMHeadModel, transformers.GPT2Config, GPT2),
    "ViT": (transformers.ViTForImageClassification, transformers.ViTConfig, VIT),
    "Llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, SMALL),
    "Qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config, SMALL),
    "Gemma": (transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig, SMALL),
    "Mixtral": (transformers.MixtralForCausalLM, transformers.MixtralConfig, {**SMALL, "num_local_experts": 4}),
    "T5": (transformers.T5ForConditionalGeneration, transformers.T5Config, T5),
}
STAGE_3 = {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 0, "param_dtype": "bfloat16"}


def model_of(name):
    kind, config, fields = MODELS[name]
    torch.manual_seed(0)
    return kind(config(**fields))


def batch_of(name, seed, length=9):
    generator = torch.Generator().manual_seed(seed)
    if name == "ViT":
        pixels = torch.randn(length // 3, 3, 32, 32, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(10, (length // 3,), generator=generator)}
    ids = torch.randint(1, VOCABULARY, (2, length), generator=generator)
    labels = torch.randint(1, VOCABULARY, (2, length - 4), generator=generator) if name == "T5" else ids
    return {"input_ids": ids, "labels": labels, "use_cache": False}


def batches_of(name, n, step):
    return [batch_of(name, 100 * step + i, 9 + 3 * (i % 3)) for i in range(n)]


def loop(engine, data):
    losses = []
    for batch in data:
        loss = engine(**batch).loss
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


def differ(one, other):
    """The names of the weights that differ."""
    theirs = dict(other.named_weights())
    return {name for name, value in one.named_weights() if not same_bits(value, theirs[name])}


@pytest.mark.draws(5)
@pytest.mark.parametrize("clipped", [{}, {"gradient_clipping": 0.5}], ids=["all", "clipped"])
@pytest.mark.parametrize("fields", [{}, STAGE_3], ids=["fp32", "bf16 in shards"])
@pytest.mark.parametrize("name", MODELS)
def test_models_train_20_steps_with_the_bits_of_the_loop(name, fields, clipped, drawn):
    for n in drawn([1, 3, 8], 1):
        settings = {"lr": 1e-3, "gradient_accumulation_steps": n, **fields, **clipped}
        one, other = wrap(model_of(name), **settings), wrap(model_of(name), layerwise=n > 1, **settings)
        shared = name == "T5" and (n > 1 or fields)  # its two embeddings are one tensor, whose sums are in fp32
        for step in range(1 if shared else 20):
            data = batches_of(name, n, step)
            assert loop(one, data) == [loss.item() for loss in other.accumulate(data)]
            assert other.step().updated
        assert not differ(one, other) or (shared and (clipped or differ(one, other) <= {"shared.weight"}))


def test_a_cache_and_routers_logits_are_refused():
    engine = wrap(model_of("Llama"), gradient_accumulation_steps=2)
    data = [{**batch, "use_cache": True} for batch in batches_of("Llama", 2, 0)]
    with pytest.raises(ParameterError, match="DynamicCache, which it writes to.*use_cache=False"):
        engine.accumulate(data)
    engine = wrap(model_of("Mixtral"), gradient_accumulation_steps=2)
    data = [{**batch, "output_router_logits": True} for batch in batches_of("Mixtral", 2, 0)]
    with pytest.raises(StateError, match="used outside of it.*output_router_logits"):
        engine.accumulate(data)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_adapters_of_peft_over_a_frozen_base(checkpoints):
    engines = []
    for layerwise in (False, True):
        model = adapted()
        model.config.use_cache = False
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        engines.append(wrap(model, lr=1e-2, gradient_accumulation_steps=3, layerwise=layerwise, **STAGE_3))
    one, other = engines
    vocabulary = model.get_input_embeddings().num_embeddings
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        data = [torch.randint(vocabulary, (2, 5 + i), generator=generator) for i in range(3)]
        given = [{"input_ids": ids, "labels": ids} for ids in data]
        assert loop(one, given) == [loss.item() for loss in other.accumulate(given)]
        other.step()
    with gathered_parameters([*one.module.parameters(), *other.module.parameters()]):
        for (name, param), theirs in zip(one.module.named_parameters(), other.module.parameters(), strict=True):
            assert same_bits(param, theirs), name


@pytest.mark.draws(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "stage", [{"stage": 2}, {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 0}]
)
def test_quantised_bases(kind, stage):
    one, other = (
        wrap(quantised(kind), lr=0.01, gradient_accumulation_steps=3, layerwise=each, **stage) for each in (False, True)
    )
    for step in range(3):
        data = [torch.randn(4 + i, 256, generator=torch.Generator().manual_seed(9 * step + i)) for i in range(3)]
        for x in data:
            one.backward(one(x).pow(2).mean())
            one.step()
        other.accumulate(data, lambda output, _: output.pow(2).mean())
        other.step()
    one.close()
    other.close()
    for (name, param), theirs in zip(one.module.named_parameters(), other.module.parameters(), strict=True):
        assert not param.requires_grad or same_bits(param, theirs), name
