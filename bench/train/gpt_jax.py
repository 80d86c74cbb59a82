"""The same GPT for JAX: a dict of arrays, and pure functions of it."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from frontends.jax import gather_params, gathered
from offload_core.commands.model_shapes import GPTConfig

Params = dict[str, Any]


def init_params(key: Array, config: GPTConfig, dtype: Any) -> Params:
    """As GPT-2; the arrays of all layers are stacked on a leading axis, for `lax.scan`."""
    layers, width = config.layers, config.width
    keys = iter(jax.random.split(key, 6))

    def normal(*shape: int, std: float = 0.02) -> Array:
        return std * jax.random.normal(next(keys), shape, dtype)

    def norm(*shape: int) -> Params:
        return {"gain": jnp.ones(shape, dtype), "bias": jnp.zeros(shape, dtype)}

    def linear(inputs: int, outputs: int, std: float = 0.02) -> Params:
        return {
            "weight": normal(layers, inputs, outputs, std=std),
            "bias": jnp.zeros((layers, outputs), dtype),
        }

    # Less where a layer writes into the residual stream.
    residual = 0.02 / math.sqrt(2 * layers)
    params = {
        "embedding": normal(config.vocabulary, width),
        "blocks": {
            "attention_norm": norm(layers, width),
            "qkv": linear(width, 3 * width),
            "attention_out": linear(width, width, residual),
            "mlp_norm": norm(layers, width),
            "mlp_in": linear(width, 4 * width),
            "mlp_out": linear(4 * width, width, residual),
        },
        "norm": norm(width),
    }
    if config.positions:
        params["position"] = normal(config.positions, width)
    return params


def logits_of(params: Params, inputs: Array, config: GPTConfig, activation_checkpointing: bool) -> Array:
    """fp32 logits of the next byte, (batch, length, vocabulary), for int32 inputs of (batch, length).

    Parameters may be shards where activations are checkpointed.
    """
    length = inputs.shape[1]
    outside = gather_params({name: leaf for name, leaf in params.items() if name != "blocks"})
    x = outside["embedding"][inputs]
    rotation = None
    if config.positions:
        x = x + outside["position"][:length]
    else:
        rotation = rotation_at(jnp.arange(length), config.width // config.heads, x.dtype)

    def block_fn(block: Params, x: Array) -> Array:
        return apply_block(block, x, config.heads, rotation)

    if activation_checkpointing:
        block_fn = gathered(block_fn)
    x, _ = jax.lax.scan(lambda x, block: (block_fn(block, x), None), x, params["blocks"])
    x = apply_norm(outside["norm"], x)
    return jnp.einsum("btd,vd->btv", x, outside["embedding"], preferred_element_type=jnp.float32)


def loss_of(params: Params, batch: Array, config: GPTConfig, activation_checkpointing: bool) -> Array:
    """Mean loss in nats over a batch of windows, int32 of (batch, context + 1)."""
    logits = logits_of(params, batch[:, :-1], config, activation_checkpointing)
    wanted = jnp.take_along_axis(logits, batch[:, 1:, None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - wanted)


def apply_block(block: Params, x: Array, heads: int, rotation: tuple[Array, Array] | None) -> Array:
    batch, length, width = x.shape
    qkv = apply_linear(block["qkv"], apply_norm(block["attention_norm"], x))
    query, key, value = jnp.split(qkv.reshape(batch, length, 3 * heads, width // heads), 3, axis=2)
    if rotation is not None:
        query, key = rotated(query, rotation), rotated(key, rotation)
    mixed = causal_attention(query, key, value)
    x = x + apply_linear(block["attention_out"], mixed.reshape(batch, length, width))
    hidden = jax.nn.gelu(apply_linear(block["mlp_in"], apply_norm(block["mlp_norm"], x)))
    return x + apply_linear(block["mlp_out"], hidden)


def causal_attention(query: Array, key: Array, value: Array) -> Array:
    """`jax.nn.dot_product_attention(is_causal=True)`, which has no float16 on the CPU; softmax in fp32."""
    length, head_width = query.shape[1], query.shape[3]
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
    seen = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(seen, scores / math.sqrt(head_width), -jnp.inf))
    return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(value.dtype), value)


def apply_linear(linear: Params, x: Array) -> Array:
    return x @ linear["weight"] + linear["bias"]


def apply_norm(norm: Params, x: Array) -> Array:
    """Normalise in fp32, also with narrower parameters: a variance has no precision to spare."""
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)
    return (wide * norm["gain"] + norm["bias"]).astype(x.dtype)


def rotation_at(positions: Array, head_width: int, dtype: Any) -> tuple[Array, Array]:
    """Cosines and sines of RoFormer (Su et al. 2021), each (length, 1, head_width / 2)."""
    half = jnp.arange(head_width // 2)
    angles = positions[:, None, None] * 10000.0 ** (-half / (head_width // 2))
    return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)


def rotated(x: Array, rotation: tuple[Array, Array]) -> Array:
    cosine, sine = rotation
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate((first * cosine - second * sine, first * sine + second * cosine), axis=-1)
