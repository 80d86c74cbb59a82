"""Models that use parameters in the ways that stage 3 must notice, and their losses."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bench.train.gpt_torch import GPT
from frontends.torch import register_external_parameter
from offload_core.commands.model_shapes import GPTConfig
from tests.support.torch_models import place


def ids(length, seed):
    """Two texts of so many tokens."""
    return torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(seed)).to(place())


def gpt(activation_checkpointing=False):
    """Its head is its embedding's weight, used by the parent (tied)."""
    torch.manual_seed(0)
    with place():
        return GPT(GPTConfig(vocabulary=64, width=32, heads=2, layers=3, positions=16), activation_checkpointing)


def gpt_loss(model, seed):
    x = ids(17, seed)
    return model(x[:, :-1], x[:, 1:])


class ReturnsBias(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight), self.bias


class AddsBiases(nn.Module):
    """Uses biases that its children return, one of them as a view."""

    def __init__(self, width):
        super().__init__()
        self.first = ReturnsBias(width, 2 * width)
        self.second = ReturnsBias(2 * width, width)

    def forward(self, x):
        y, bias = self.first(x)
        y, bias = self.second(F.gelu(y + bias))
        return y, bias.view(1, -1)


class External(nn.Module):
    """A parent's use of a child's weight, biases returned from forward, and a registered parameter."""

    def __init__(self, width=32, vocabulary=64):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(AddsBiases(width) for _ in range(2))
        self.scale = nn.Linear(width, width, bias=False)
        register_external_parameter(self, self.scale.weight)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            y, bias = block(x)
            x = x + y + bias
        x = x + x @ self.scale.weight
        return F.linear(x, self.embedding.weight)


def external():
    with place():
        return External()


def external_loss(model, seed):
    x = ids(17, seed)
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1).float(), x[:, 1:].flatten())


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    with place():
        return LlamaForCausalLM(config)


def llama_loss(model, seed):
    x = ids(16, seed)
    return model(input_ids=x, labels=x).loss


OF_TRANSFORMERS = pytest.param("llama", marks=pytest.mark.integration)
MODELS = {"gpt": (gpt, gpt_loss), "external": (external, external_loss), "llama": (llama, llama_loss)}
