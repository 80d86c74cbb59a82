"""The sizes of model that the training program knows, and how each is trained unless told otherwise."""

from dataclasses import dataclass
from typing import Any

from offload_core.commands.model_shapes import GPTS, GPTConfig

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
_ADAMW: dict[str, Any] = {"betas": BETAS, "weight_decay": WEIGHT_DECAY}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": _ADAMW,
    "sgd": {"momentum": 0.9},
    "lion": {"weight_decay": 0.3},
    "adagrad": {},
    "muon": {"weight_decay": WEIGHT_DECAY, "adjust_lr_fn": "match_rms_adamw", "adamw": _ADAMW},
}
"""The fields of ``OffloadConfig`` for each ``optimizer``, beside the learning rate. Muon's rate is AdamW's, too."""


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
    compare: int
    """Steps that plain AdamW takes beside it, unless told otherwise: 0 where both may not fit."""


PRESETS = {
    "tiny": Preset(
        GPTS["tiny"],
        context=128, steps=600, micro_batch=8, lr=3e-3, warmup=20,
        param_dtype="float32", activation_checkpointing=False, eval_batches=64, compare=20,
    ),
    "gpt2-124m": Preset(
        GPTS["gpt2-124m"],
        context=1024, steps=200, micro_batch=8, lr=6e-4, warmup=20,
        param_dtype="bfloat16", activation_checkpointing=False, eval_batches=8, compare=5,
    ),
    "gpt2-1.5b": Preset(
        GPTS["gpt2-1.5b"],
        context=1024, steps=100, micro_batch=8, lr=2e-4, warmup=10,
        param_dtype="bfloat16", activation_checkpointing=True, eval_batches=4, compare=0,
    ),
    "gpt2-10b": Preset(
        GPTS["gpt2-10b"],
        context=1024, steps=50, micro_batch=8, lr=1e-4, warmup=5,
        param_dtype="bfloat16", activation_checkpointing=True, eval_batches=2, compare=0,
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
