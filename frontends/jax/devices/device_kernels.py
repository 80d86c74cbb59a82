"""The parts of updates that a device computes from whole matrices, each in one program of XLA's."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from offload_core.device.events import Event, Waiting
from offload_core.device.protocols import Matrices
from offload_core.rules import DeviceKernel
from offload_core.rules.muon import NewtonSchulz

from ..tree.memory_kinds import start_to_host


def computed(matrices: Matrices, host: np.ndarray, device_of: Callable[[int], jax.Device]) -> Event:
    """Start to compute with matrices of a host array; the event puts the results in their place.

    Args:
        device_of: the device that computes with the matrices of an owner.
    """
    with jax.transfer_guard("allow"):
        made = [
            start_to_host(
                compute(jax.device_put(matrix.reshape(matrices.shape), device_of(row.owner)), matrices.kernel)
            )
            for matrix, row in zip(matrices.in_(host), matrices.rows, strict=True)
        ]

    def finish() -> None:
        for matrix, result in zip(matrices.in_(host), made, strict=True):
            np.copyto(matrix, np.asarray(result).reshape(-1))

    return Waiting(finish)


@partial(jax.jit, static_argnums=1)
def compute(matrix: jax.Array, kernel: DeviceKernel) -> jax.Array:
    """Compute with a matrix on its device. One program for all ways to it, so that all have the same bits."""
    assert isinstance(kernel, NewtonSchulz)
    return newton_schulz(matrix, kernel)


def newton_schulz(matrix: jax.Array, kernel: NewtonSchulz) -> jax.Array:
    """Orthogonalize a matrix in bfloat16, as :class:`NewtonSchulz` defines it; products are summed in float32."""
    a, b, c = kernel.coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = (matrix.T if is_tall else matrix).astype(jnp.float32)
    first = (wide / jnp.maximum(jnp.sqrt(jnp.sum(wide * wide)), kernel.eps)).astype(matrix.dtype)

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.matmul(x, y, preferred_element_type=jnp.float32)

    def step(_: int, x: jax.Array) -> jax.Array:
        gram = product(x, x.T).astype(x.dtype)
        polynomial = (b * gram.astype(jnp.float32) + c * product(gram, gram)).astype(x.dtype)
        return (a * x.astype(jnp.float32) + product(polynomial, x)).astype(x.dtype)

    last = lax.fori_loop(0, kernel.steps, step, first)
    return last.T if is_tall else last
