"""A user of the JAX front end, for type checkers alone; see typed_core.py. Pytrees are Any, as in JAX itself."""

from pathlib import Path
from typing import Any, assert_type

import jax
import jax.numpy as jnp

from frontends.jax import OffloadConfig, OffloadedParams, StepReport, gathered, init, wrap


def loss_of(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jnp.square(x @ params["w"]).sum()


def train(params: dict[str, jax.Array], batches: list[jax.Array], folder: Path) -> None:
    offloaded = wrap(params, OffloadConfig(), lr=lambda count: 1e-3 / (1 + count))
    assert_type(offloaded, OffloadedParams)
    wrap(params, axis=3)  # type: ignore[arg-type]
    wrap(params, gradient_acumulation=2)  # type: ignore[call-arg]
    wrap(params, learning_rate=1e-3, b1=0.8, param_dtype=jnp.bfloat16)

    compute = offloaded.value_and_grad(loss_of)
    offloaded.value_and_grad("loss")  # type: ignore[arg-type]
    for x in batches:
        result = compute(offloaded.params, x)
        assert_type(result, tuple[Any, Any])
        offloaded.update(result[1])
        offloaded.update(result[1], None, params)  # type: ignore[arg-type]
        assert_type(offloaded.report, StepReport | None)
        assert_type(offloaded.count, int)
    if offloaded.report is not None:
        assert_type(offloaded.report.grad_norm, float | None)

    assert_type(offloaded.sent_bytes, int)
    assert_type(offloaded.memory_report().host_bytes, int)
    assert_type(offloaded.to_pytree(), dict[str, Any])
    gathered(loss_of)(params, batches[0])
    init(loss_of, params, batches[0], weights=folder, names={"w": "v"}, stage=3)
    init(loss_of, params, axis=3)  # type: ignore[arg-type]
    offloaded.save_checkpoint(folder, wait=False)
    offloaded.save_checkpoint(3)  # type: ignore[arg-type]
