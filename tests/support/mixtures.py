"""Small mixtures of experts of transformers, whose experts lie in one tensor for each projection."""

import torch
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

N_EXPERTS = 8
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "num_experts_per_tok": 2, "output_router_logits": True,
}  # fmt: skip
KINDS = {"mixtral": "MixtralSparseMoeBlock", "qwen3": "Qwen3MoeSparseMoeBlock"}
"""The class of their blocks of experts."""


def mixture(kind):
    torch.manual_seed(0)
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=N_EXPERTS))
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, num_experts=N_EXPERTS, moe_intermediate_size=24, head_dim=8))


def batch(seed):
    """Three tokens, of which each goes to two experts."""
    x = torch.randint(64, (1, 3), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": x, "labels": x}


def routed(output):
    """The experts that had tokens, by block."""
    return [logits.topk(2).indices.unique().tolist() for logits in output.router_logits]
