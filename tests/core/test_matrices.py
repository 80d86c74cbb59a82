"""The choice of hidden matrices by names: a table of names from models and libraries, and what each of them is."""

import pytest

from offload_core import ConfigError, OffloadConfig
from offload_core.config.matrices import chosen, hidden_matrices, is_head, is_table, named

TABLES = """
    wte.weight  wpe.weight  transformer.wte.weight  ['wte']['w']  tok_emb  pos_emb  ['params']['pos_emb']  ['emb']['w']
    shared.weight  model.shared.weight  model.embed_tokens.weight  decoder.embed_positions.weight  gpt_neox.embed_in.w
    bert.embeddings.word_embeddings.weight  vit.embeddings.position_embeddings  patch_embed.proj.weight  position.weight
    ['params']['Embed_0']['embedding']  ['params']['PosEmbed']['pe']  .embedder.input_embedding_table  cls_token
    ['params']['posembed_input']['pos_embedding']  SelfAttention.relative_attention_bias.weight  unembed.W
    layers.0.attn.relative_position_bias_table  layers.0.mixer.A_log  experts.down_proj_bias
    ['layers']['b']  ['layers']['mlp']['bias']  ['layers']['ln_scale']  ['layers']['ln1']['g']  ['layers']['norm']['w']
    ['params']['layers']['LayerNorm_0']['scale']  ['layers']['input_layernorm']['weight']  ['layers']['beta']
"""
HEADS = """
    head.weight  lm_head.weight  model.lm_head.weight  ['params']['lm_head']['kernel']  heads.head.weight  output.weight
    classifier.weight  classifier.out_proj.weight  classification_head.out_proj.weight  score.weight  qa_outputs.weight
    cls.seq_relationship.weight  class_labels_classifier.weight  bbox_predictor.layers.0.weight  fc_out.weight
    to_logits.weight  ['params']['head_1']['kernel']  language_model.output_layer.weight  classifier.6.weight
"""
MATRICES = """
    positionwise.w_1.weight  layers.0.position_wise_ff.0.weight  normal_attention.in_proj_weight  normalizer.weight
    embedder_block.mlp.weight  token.mix.weight  blocks.0.token.mlp.weight  bert.encoder.layer.0.output.dense.weight
    layers.0.attention.head.weight  attention.head.weight  .layers[0].attention.output.weight  ffn.b.weight
    ['params']['layer']['output']['kernel']  ['params']['TransformerBlock_0']['Dense_0']['kernel']  lora_B
    h.0.mlp.fc_out.weight  ['layers']['w']  ['g']['w']  q_proj.weight  self_attn.out_proj.weight  hidden.out.weight
    layers.0.mlp.shared_expert.up_proj.weight  AdaNorm.linear.weight  classify.weight  ahead.weight
"""


def test_names_say_what_a_parameter_is():
    kinds = {"tables": TABLES.split(), "heads": HEADS.split(), "matrices": MATRICES.split()}
    found = {
        kind: [
            name for name in names if kind != ("tables" if is_table(name) else "heads" if is_head(name) else "matrices")
        ]
        for kind, names in kinds.items()
    }
    assert found == {"tables": [], "heads": [], "matrices": []}


def test_ends_of_names_are_compared_by_whole_parts():
    names = [
        "blk.attn.proj.weight",
        "blk.attn.q_proj.weight",
        "blk.reproj.weight",
        "['blk']['attn-1']['w']",
        "['1']['w']",
    ]
    assert named(names, ["proj.weight"]) == {"blk.attn.proj.weight"}
    assert named(names, ["1.w"]) == {"['1']['w']"}
    assert named(names, ["['attn-1']['w']", "q_proj.weight"]) == {"['blk']['attn-1']['w']", "blk.attn.q_proj.weight"}
    with pytest.raises(ConfigError, match="no parameter is named 'j.weight', or ends so"):
        named(names, ["j.weight"])


def test_a_model_has_its_hidden_matrices_chosen_or_an_error():
    shapes = {
        "embed.weight": (9, 4),
        "layers.b": (3, 4),
        "up.weight": (8, 4),
        "experts": (2, 4, 4),
        "head.weight": (9, 4),
    }
    config = OffloadConfig(optimizer="muon")
    assert chosen(config, shapes, stacks=True) == {"up.weight", "experts"}
    with pytest.raises(
        ConfigError, match=r"AdamW would update all of these: 'experts' \(2, 4, 4\); expected muon_params="
    ):
        chosen(config, shapes, stacks=False)
    with pytest.raises(ConfigError, match="the model has no matrix besides embeddings and heads"):
        chosen(config, {"head.weight": (9, 4)}, stacks=True)
    for empty in ([], ()):
        with pytest.raises(
            ConfigError, match="muon_params: got .*, expected a list of .* that is not empty, or None for"
        ):
            OffloadConfig(optimizer="muon", muon_params=empty)


BLOCK = {"ln.scale": (6, 32), "qkv.kernel": (6, 32, 96), "qkv.bias": (6, 96), "fc.kernel": (6, 32, 128)}
SCANNED = {f"layers.{name}": shape for name, shape in BLOCK.items()}
HEADS_OF_ATTENTION = {"attn.query.kernel": (32, 4, 8), "attn.query.bias": (4, 8), "conv.kernel": (3, 32, 32)}
NNX = {
    "['blocks'][0]['attn']['query']['kernel'].value": (32, 4, 8),
    "['blocks'][0]['attn']['query']['bias'].value": (4, 8),
    "['blocks'][0]['fc']['kernel'].value": (32, 128),
    "['blocks'][0]['fc']['bias'].value": (128,),
}
CLEAR = {
    "a scanned stack": ({"embed": (300, 32), **SCANNED}, ["layers.fc.kernel", "layers.qkv.kernel"]),
    "one layer in it": (
        {"embed": (300, 32), **{name: (1, *shape[1:]) for name, shape in SCANNED.items()}},
        ["layers.fc.kernel", "layers.qkv.kernel"],
    ),
    "a width as large as the vocabulary": (
        {"embed": (128, 32), "mlp.up.kernel": (32, 128), "mlp.down.kernel": (128, 32), "lm_head.kernel": (32, 128)},
        ["mlp.down.kernel", "mlp.up.kernel"],
    ),
    "kernels of several axes": (
        {**HEADS_OF_ATTENTION, "conv.bias": (32,), "mlp.kernel": (32, 64), "mlp.bias": (64,)},
        ["mlp.kernel"],
    ),
    "layers by number": ({"wte": (300, 100), "h.0.qkv.w": (300, 100), "h.0.o.w": (100, 100)}, ["h.0.o.w", "h.0.qkv.w"]),
    "large inputs": (
        {"fc_0.w": (784, 128), "fc_0.b": (128,), "fc_1.w": (128, 64), "fc_1.b": (64,), "head.w": (64, 10)},
        ["fc_0.w", "fc_1.w"],
    ),
    "nnx, with attention by heads": (
        {"['wte']['embedding'].value": (65, 32), "['lm_head']['kernel'].value": (32, 65), **NNX},
        ["['blocks'][0]['fc']['kernel'].value"],
    ),
    "nnx, scanned": (
        {
            "['wte']['embedding'].value": (65, 32),
            "['conv']['kernel'].value": (3, 32, 32),
            **{name.replace("[0]", ""): (6, *shape) for name, shape in NNX.items()},
        },
        ["['blocks']['fc']['kernel'].value"],
    ),
    "equinox, tied": (
        {".emb.weight": (65, 384), ".blocks[0].mlp.up.weight": (384, 65), ".blocks[0].attn.q.weight": (384, 384)},
        [".blocks[0].attn.q.weight", ".blocks[0].mlp.up.weight"],
    ),
}
UNCLEAR = {
    "an untied head": ({"embed": (300, 32), **SCANNED, "logits_dense": (32, 300)}, ["logits_dense"]),
    "a padded one": ({"wte": (300, 32), **SCANNED, "decode.kernel": (32, 320)}, ["decode.kernel"]),
    "both ends of no name": (
        {"lookup": (5000, 32), **SCANNED, "unlookup": (32, 5120)},
        ["lookup", "unlookup"],
    ),
    "a stack alone": ({"embed": (300, 32), "layers.w": (6, 32, 32)}, ["layers.w"]),
    "experts": ({"embed": (300, 32), "up": (8, 32, 64), "router": (32, 8), "down": (8, 64, 32)}, ["up", "down"]),
    "experts beside a stack": ({"embed": (300, 32), **SCANNED, "moe.up": (8, 32, 64)}, ["moe.up"]),
    "experts in a stack": ({"embed": (300, 32), **SCANNED, "layers.moe.up": (6, 8, 32, 64)}, ["layers.moe.up"]),
    "attention by heads without biases": (
        {"embed": (300, 32), **SCANNED, "layers.attn.query.kernel": (6, 32, 4, 8)},
        ["layers.attn.query.kernel"],
    ),
    "a head of a small vocabulary": ({".emb.weight": (65, 384), **SCANNED, ".out.weight": (65, 384)}, [".out.weight"]),
    "ends of no name": ({"fc_0.w": (784, 128), "fc_1.w": (128, 64), "fc_2.w": (64, 10)}, ["fc_0.w", "fc_2.w"]),
    "an end with a bias": (
        {
            ".layers[0].weight": (64, 784),
            ".layers[0].bias": (64,),
            ".layers[1].weight": (9, 64),
            ".layers[1].bias": (9,),
        },
        [".layers[1].weight"],
    ),
}


@pytest.mark.parametrize(("shapes", "expected"), CLEAR.values(), ids=CLEAR)
@pytest.mark.parametrize("prefix", ["", "params."])
def test_a_clear_choice_takes_layers_that_are_stacked_and_no_vector_of_theirs(shapes, expected, prefix):
    found = hidden_matrices({prefix + name: shape for name, shape in shapes.items()}, stacks=False)
    assert sorted(found) == [prefix + name for name in expected]


@pytest.mark.parametrize(("shapes", "doubtful"), UNCLEAR.values(), ids=UNCLEAR)
@pytest.mark.parametrize("prefix", ["", "params."])
def test_an_unclear_choice_is_an_error_that_names_what_is_unclear(shapes, doubtful, prefix):
    with pytest.raises(ConfigError) as error:
        hidden_matrices({prefix + name: shape for name, shape in shapes.items()}, stacks=False)
    said = str(error.value).split("expected")[0]
    assert [name for name in shapes if f"'{prefix}{name}' " in said] == doubtful
    assert "expected muon_params=[...]" in str(error.value)
