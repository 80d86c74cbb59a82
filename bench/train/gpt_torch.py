"""A GPT of any size as a torch module."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from offload_core.commands.model_shapes import GPTConfig

Rotation = tuple[Tensor, Tensor] | None


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        if rotation is not None:
            query, key = rotated(query, rotation), rotated(key, rotation)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh"))


class GPT(nn.Module):
    """Logits of the next byte, or the mean loss in nats where targets are given."""

    def __init__(self, config: GPTConfig, activation_checkpointing: bool = False):
        super().__init__()
        self.head_width = config.width // config.heads
        self.activation_checkpointing = activation_checkpointing
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.positions, config.width) if config.positions else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self._initialise(config.layers)

    @torch.no_grad()
    def _initialise(self, layers: int) -> None:
        """As GPT-2: 0.02, and less where a layer writes into the residual stream."""
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue
            into_residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
            parameter.normal_(std=0.02 / math.sqrt(2 * layers) if into_residual else 0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.bias.zero_()

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embedding(inputs)
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        rotation = None
        if self.position is not None:
            x = x + self.position(positions)
        else:
            rotation = rotation_at(positions, self.head_width, x.dtype)
        for block in self.blocks:
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, rotation, use_reentrant=False)
            else:
                x = block(x, rotation)
        logits = F.linear(self.norm(x), self.embedding.weight).float()
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def rotation_at(positions: Tensor, head_width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of RoFormer (Su et al. 2021), each (length, head_width / 2)."""
    half = torch.arange(head_width // 2, device=positions.device)
    angles = positions[:, None] * 10000.0 ** (-half / (head_width // 2))
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cosine, sine = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)
