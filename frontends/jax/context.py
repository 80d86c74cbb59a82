"""The context that a caller's code runs in: the mesh set with ``jax.set_mesh``, which is not for ours; tracing."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, get_abstract_mesh

P = ParamSpec("P")
T = TypeVar("T")

_NO_MESH = Mesh(np.empty((), object), ())


def without_context_mesh(function: Callable[P, T]) -> Callable[P, T]:
    """The function, called as if no mesh were set: JAX refuses arrays of other devices where one is."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if get_abstract_mesh().empty:
            return function(*args, **kwargs)
        try:
            context = jax.set_mesh(_NO_MESH)
        except ValueError:  # under jit, where the mesh cannot be changed
            return function(*args, **kwargs)
        with context:
            return function(*args, **kwargs)

    return call


def is_traced() -> bool:
    """True while JAX traces the caller (``jit``, ``scan``). The compiled program does not repeat Python's actions."""
    with jax.transfer_guard("allow"):
        return isinstance(jnp.zeros(()), jax.core.Tracer)


def is_manual() -> bool:
    """True inside ``shard_map``, where programs see one device's part of arrays."""
    return bool(get_abstract_mesh().manual_axes)
