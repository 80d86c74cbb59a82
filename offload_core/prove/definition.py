"""The update by its definition in docs/numerics.md, in NumPy. No line of it is a line of the kernels."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

Moments = list[np.ndarray]


def fma(a: Any, b: Any, c: Any) -> np.ndarray:
    """``a * b + c`` in float32, rounded once.

    The product is exact in float64. Its sum with c is rounded to odd there (to the neighbour with an odd last bit where
    inexact), which a second rounding to no more than 51 bits cannot see: S. Boldo and G. Melquiond, "Emulation of FMA
    and correctly rounded sums: proved algorithms using rounding to odd", section 3.
    """
    with np.errstate(all="ignore"):
        a, b, c = (np.asarray(each, np.float64) for each in (a, b, c))
        product = a * b
        total = np.asarray(product + c)
        back = total - product
        error = (product - (total - back)) + (c - back)
        to_odd = np.isfinite(total) & (error != 0) & (total.view(np.int64) % 2 == 0)
        return np.where(to_odd, np.nextafter(total, np.copysign(np.inf, error)), total).astype(np.float32)


def clip_scale(gradients: Iterable[np.ndarray], n: int, max_norm: float | None) -> np.float32:
    """What sums of ``n`` gradients are multiplied by. A square of a float32 is exact in float64, and ``fsum`` rounds
    once."""
    if max_norm is None:
        return np.float32(1 / n)
    norm = math.sqrt(math.fsum(x for g in gradients for x in np.square(g, dtype=np.float64).ravel())) / n
    return np.float32(1 / n * min(1.0, max_norm / (norm + 1e-6)))


def adamw(p: np.ndarray, g: np.ndarray, moments: Moments, step: int, s: dict[str, Any]) -> None:
    """AdamW with ``op_order="torch"``, in place. ``s`` has the hyperparameters, ``g`` is scaled."""
    b1, b2 = s["betas"]
    m, v = moments
    m[...] = fma(np.float32(1 - b1), g - m, m)
    v[...] = fma(np.float32(1 - b2) * g, g, v * np.float32(b2))
    d = np.sqrt(v) / np.float32(math.sqrt(1 - b2**step)) + np.float32(s["eps"])
    p[...] = p * np.float32(1 - s["lr"] * s["weight_decay"]) + (np.float32(-s["lr"] / (1 - b1**step)) * m) / d


def optax_adamw(p: np.ndarray, g: np.ndarray, moments: Moments, s: dict[str, Any], c: Sequence[np.float32]) -> None:
    """AdamW with ``op_order="optax"``, in place. ``c`` are the corrections 1 - b^step, in XLA's own arithmetic."""
    (b1, b2), f = s["betas"], np.float32
    m, v = moments
    m[...] = f(1 - b1) * g + f(b1) * m
    v[...] = f(1 - b2) * (g * g) + f(b2) * v
    u = (m / c[0]) / (np.sqrt(v / c[1]) + f(s["eps"])) + f(s["weight_decay"]) * p
    p[...] = p + u * f(-s["lr"])


def sgd(p: np.ndarray, g: np.ndarray, moments: Moments, step: int, s: dict[str, Any]) -> None:
    """SGD with momentum and ``op_order="torch"``, in place."""
    [m] = moments
    if s["weight_decay"]:
        g = fma(p, np.float32(s["weight_decay"]), g)
    m[...] = g if step == 1 else fma(g, np.float32(1), m * np.float32(s["momentum"]))
    p[...] = fma(m, np.float32(-s["lr"]), p)
