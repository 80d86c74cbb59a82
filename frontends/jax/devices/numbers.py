"""Numbers that are computed beside the accelerator: schedules and bias corrections."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np


@contextmanager
def beside_the_accelerator(cpu: jax.Device | None) -> Iterator[Callable[[int], jax.Array]]:
    """Compute on the CPU if JAX has one here, also if the user forbids transfers and promotions: only numbers are
    computed, and optax's own schedules promote.

    Args:
        cpu: :func:`cpu_device`.

    Yields:
        A function that makes an int32 scalar of a number.
    """
    with jax.default_device(cpu), jax.transfer_guard("allow"), jax.numpy_dtype_promotion("standard"):
        yield lambda number: jax.device_put(np.int32(number))


def cpu_device() -> jax.Device | None:
    """Return JAX's CPU; None if JAX has none, as with ``JAX_PLATFORMS=cuda``."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


@jax.jit
def _bias_correction(beta: Any, t: Any) -> Any:
    return 1 - beta**t


def bias_corrections(betas: Sequence[float], t: int) -> list[float]:
    """1 - beta^t of each beta in XLA's float32 arithmetic on the CPU, as optax computes it there.

    Where JAX has no CPU the power is rounded once, from float64: XLA's differs from that in the last bit for about one
    ``t`` of a thousand.
    """
    in_float32 = [np.float32(beta) for beta in betas]  # a Python float is float64 with jax_enable_x64
    if (cpu := cpu_device()) is None:
        return [float(np.float32(1) - np.float32(float(beta) ** t)) for beta in in_float32]
    with beside_the_accelerator(cpu) as number:
        count = number(t)
        return [float(_bias_correction(beta, count)) for beta in in_float32]
