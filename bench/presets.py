"""The sizes of model that the training program knows, and how each is trained unless told otherwise."""

from dataclasses import dataclass
from typing import Any

GPT2_VOCABULARY = 50304  # 50257 padded to a multiple of 64; bytes use the first 256
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT: pre-norm, biases, the embedding tied to the output layer."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    positions: int | None
    """Rows of GPT-2's learned position table; None: rotary positions, which a short run learns to use sooner."""

    @property
    def numel(self) -> int:
        """Parameters, the tied embedding counted once."""
        width = self.width
        block = 12 * width * width + 13 * width
        return (self.vocabulary + (self.positions or 0)) * width + self.layers * block + 2 * width


@dataclass(frozen=True)
class Preset:
    gpt: GPTConfig
    context: int
    steps: int
    micro_batch: int
    lr: float
    warmup: int
    param_dtype: str
    activation_checkpointing: bool
    eval_batches: int


PRESETS = {
    "tiny": Preset(
        GPTConfig(layers=2, width=128, heads=4, vocabulary=256, positions=None),
        context=128, steps=600, micro_batch=8, lr=3e-3, warmup=20,
        param_dtype="float32", activation_checkpointing=False, eval_batches=64,
    ),
    "gpt2-124m": Preset(
        GPTConfig(layers=12, width=768, heads=12, vocabulary=GPT2_VOCABULARY, positions=1024),
        context=1024, steps=200, micro_batch=8, lr=6e-4, warmup=20,
        param_dtype="bfloat16", activation_checkpointing=False, eval_batches=8,
    ),
    "gpt2-1.5b": Preset(
        GPTConfig(layers=48, width=1600, heads=25, vocabulary=GPT2_VOCABULARY, positions=1024),
        context=1024, steps=100, micro_batch=8, lr=2e-4, warmup=10,
        param_dtype="bfloat16", activation_checkpointing=True, eval_batches=4,
    ),
    "gpt2-10b": Preset(
        GPTConfig(layers=50, width=4096, heads=32, vocabulary=GPT2_VOCABULARY, positions=1024),
        context=1024, steps=50, micro_batch=8, lr=1e-4, warmup=5,
        param_dtype="bfloat16", activation_checkpointing=True, eval_batches=2,
    ),
}  # fmt: skip


def learning_rate(step: Any, peak: float, warmup: int, steps: int, xp: Any) -> Any:
    """Linear warm-up to `peak`, then a cosine down to a tenth of it; `xp` is numpy or jax.numpy.

    `step` counts updates from 0; the first update already moves.
    """
    rising = (step + 1) / max(warmup, 1)
    progress = xp.clip((step - warmup) / max(steps - warmup, 1), 0.0, 1.0)
    falling = 0.55 + 0.45 * xp.cos(xp.pi * progress)
    return peak * xp.minimum(rising, falling)
