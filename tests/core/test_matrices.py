"""The choice of hidden matrices by names: a table of names from models and libraries, and what each of them is."""

import pytest

from offload_core import ConfigError, OffloadConfig
from offload_core.config.matrices import chosen, is_head, is_table, named

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
    assert chosen(config, shapes, stacks=False) == {"up.weight"}
    with pytest.raises(ConfigError, match="the model has no matrix besides embeddings and heads"):
        chosen(config, {"head.weight": (9, 4)}, stacks=True)
    for empty in ([], ()):
        with pytest.raises(
            ConfigError, match="muon_params: got .*, expected a list of .* that is not empty, or None for"
        ):
            OffloadConfig(optimizer="muon", muon_params=empty)
