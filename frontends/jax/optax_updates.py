"""What :meth:`OffloadedParams.as_optax` gives: updates that, when added, give exactly the new parameters."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .trees import is_array, is_key


class OffloadState(NamedTuple):
    """The state of :meth:`OffloadedParams.as_optax`: the number of updates it stands for, an int32 scalar."""

    step: jax.Array


def exact_update(before: Any, after: Any) -> Any:
    """An fp32 ``u`` such that ``before + u``, rounded to the parameters' dtype, has the bits of ``after``."""
    p, q = np.asarray(before), np.asarray(after)
    with np.errstate(all="ignore"):
        p32, q32 = p.astype(np.float32), q.astype(np.float32)
        u = np.where(q32 == p32, np.copysign(np.float32(0), q32), q32 - p32)  # -0 + 0 would be 0
        for _ in range(2):  # the rounded difference is at most a unit off
            u = np.where((p32 + u).astype(q.dtype) < q, np.nextafter(u, np.float32(np.inf)), u)
            u = np.where((p32 + u).astype(q.dtype) > q, np.nextafter(u, np.float32(-np.inf)), u)
    return jnp.array(u)


def exact_update_of_shards(before: Any, after: jax.Array) -> jax.Array:
    """As :func:`exact_update`, each device of its own part."""
    before = jax.device_put(before, after.sharding)
    parts = [
        jax.device_put(exact_update(b.data, a.data), a.data.sharding)
        for b, a in zip(before.addressable_shards, after.addressable_shards, strict=True)
    ]
    return jax.make_array_from_single_device_arrays(after.shape, after.sharding, parts)


def no_update(leaf: Any) -> Any:
    """What changes no bit of an array when it is added, of any shape; None for other leaves."""
    return jnp.asarray(-0.0).astype(leaf.dtype) if is_array(leaf) and not is_key(leaf) else None
