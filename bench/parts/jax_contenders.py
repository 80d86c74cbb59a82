"""The contenders of ``bench.parts.jax_step`` and ``bench.gpu``, each started with NAME SETTINGS.

They train on JAX's default device.
"""

import importlib
import json
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import SingleDeviceSharding

from bench.harness.worker import Step, become_rank, serve
from bench.train.gpt_jax import init_params, loss_of
from bench.train.presets import BETAS, WEIGHT_DECAY
from offload_core.commands.model_shapes import GPTConfig

OURS = "offload-core"
LATE = "offload-core, one step late"
IN_MEMORY = "optax.adamw, in memory"
PINNED = "optax.adamw, states in pinned_host"
LEARNING_RATE, CLIPPING, TOKENS = 3e-4, 1.0, 256

Settings = dict[str, Any]
Train = Callable[[np.ndarray], tuple[Any, dict[str, float]]]
"""A function of windows that returns the loss and the ms of its phases."""


def main() -> None:
    (name, words), *streams = become_rank()
    settings = json.loads(words)
    jax.devices()
    if name in (OURS, LATE):
        importlib.import_module("frontends.jax")
    context = settings["context"]

    def make_step() -> Step:
        if settings.get("accelerator") and jax.default_backend() == "cpu":
            raise RuntimeError("JAX sees no accelerator here; expected jax with the plugin of one")
        train = CONTENDERS[name](settings)
        draw = np.random.default_rng(0)

        def step(micro_batch: int) -> dict[str, float]:
            windows = draw.integers(TOKENS, size=(micro_batch, context + 1), dtype=np.int32)
            start = time.perf_counter()
            loss, parts = train(windows)
            return {**parts, "total": 1e3 * (time.perf_counter() - start), "loss": float(loss)}

        return step

    def device_peak() -> int | None:
        return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")

    versions = {package: metadata.version(package) for package in ("jax", "jaxlib", "optax")}
    serve(*streams, settings["micro_batch"], make_step, device_peak, versions=versions)


def loss_and_params(settings: Settings) -> tuple[Callable[[Any, Any], Any], Any]:
    """The loss, and parameters: fp32, or the settings' ``init_dtype`` where fp32 would be the peak of the memory."""
    gpt = GPTConfig(**settings["gpt"])
    checkpointing = settings.get("activation_checkpointing", False)
    loss_fn = partial(loss_of, config=gpt, activation_checkpointing=checkpointing)
    return loss_fn, init_params(jax.random.key(0), gpt, jnp.dtype(settings.get("init_dtype", "float32")))


def offload_core(settings: Settings, **fields: Any) -> Train:
    from frontends.jax import wrap

    loss_fn, params = loss_and_params(settings)
    offloaded = wrap(
        params, lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY,
        gradient_clipping=CLIPPING, param_dtype="bfloat16", **fields,
    )  # fmt: skip
    del params
    value_and_grad = offloaded.value_and_grad(loss_fn)

    def train(windows: np.ndarray) -> tuple[Any, dict[str, float]]:
        start = time.perf_counter()
        loss, grads = jax.block_until_ready(value_and_grad(offloaded.params, windows))
        after_grads = time.perf_counter()
        jax.block_until_ready(offloaded.update(grads, donate=True, donate_params=True))
        parts = {"forward and backward": after_grads - start, "step": time.perf_counter() - after_grads}
        return loss, {phase: 1e3 * seconds for phase, seconds in parts.items()}

    return train


def in_optax(settings: Settings, memory_kind: str | None = None) -> Train:
    """One compiled step of fp32 masters that are cast for the loss; with a memory kind, masters and moments rest there
    and are moved to the device and back within the step."""
    loss_fn, params = loss_and_params(settings)
    optimizer = optax.chain(
        optax.clip_by_global_norm(CLIPPING), optax.adamw(LEARNING_RATE, *BETAS, weight_decay=WEIGHT_DECAY)
    )
    device = jax.devices()[0]
    working = SingleDeviceSharding(device, memory_kind="device")
    resting = SingleDeviceSharding(device, memory_kind=memory_kind or "device")
    masters = jax.tree.map(lambda p: jax.device_put(p.astype(jnp.float32), resting), params)
    moments = jax.eval_shape(optimizer.init, masters)  # of AdamW all are zeros: on the device they would be the peak
    states = masters, jax.tree.map(lambda like: jax.device_put(np.zeros(like.shape, like.dtype), resting), moments)
    params = jax.device_put(jax.tree.map(lambda p: p.astype(jnp.bfloat16), params), working)
    del masters

    @partial(jax.jit, donate_argnums=(0, 1), out_shardings=(None, working, resting))
    def step(params: Any, states: Any, windows: Any) -> tuple[Any, Any, Any]:
        loss, grads = jax.value_and_grad(loss_fn)(params, windows)
        masters, state = states if memory_kind is None else jax.device_put(states, working)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, state = optimizer.update(grads, state, masters)
        masters = optax.apply_updates(masters, updates)
        states = masters, state
        if memory_kind is not None:
            states = jax.device_put(states, resting)
        return loss, jax.tree.map(lambda p: p.astype(jnp.bfloat16), masters), states

    def train(windows: np.ndarray) -> tuple[Any, dict[str, float]]:
        nonlocal params, states
        loss, params, states = jax.block_until_ready(step(params, states, windows))
        return loss, {}

    return train


CONTENDERS: dict[str, Callable[[Settings], Train]] = {
    OURS: offload_core,
    LATE: partial(offload_core, schedule="delayed", delay_warmup_steps=1),
    IN_MEMORY: in_optax,
    PINNED: partial(in_optax, memory_kind="pinned_host"),
}


if __name__ == "__main__":
    main()
