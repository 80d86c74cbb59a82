"""Runs of elements of flat arrays of any size, at places that a program is given as arguments.

So all buckets of a large array share one program. JAX's indices have 32 bits. A place therefore travels in two parts,
and programs of arrays that need 64 bits put it together.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_PART = 2**30


def split_places(places: Iterable[int]) -> np.ndarray:
    """The places as programs take them, int32 ``[n, 2]``."""
    return np.array([divmod(place, _PART) for place in places], np.int32).reshape(-1, 2)


def cut_run(flat: jax.Array, place: jax.Array, numel: int) -> jax.Array:
    """Return ``numel`` elements from a place on, which is a row of :func:`split_places`."""
    with jax.enable_x64(_is_large(flat)):
        return lax.dynamic_slice(flat, [_index(place, flat)], [numel])


def write_run(flat: jax.Array, place: jax.Array, run: jax.Array) -> jax.Array:
    """The array with this run at a place, which is a row of :func:`split_places`."""
    with jax.enable_x64(_is_large(flat)):
        return lax.dynamic_update_slice(flat, run, [_index(place, flat)])


def _is_large(flat: jax.Array) -> bool:
    return flat.size >= 2**31


def _index(place: jax.Array, flat: jax.Array) -> jax.Array:
    dtype = jnp.int64 if _is_large(flat) else jnp.int32
    return place[0].astype(dtype) * _PART + place[1].astype(dtype)
