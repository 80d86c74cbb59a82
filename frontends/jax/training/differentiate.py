"""``value_and_grad``: the user's function of a wrapped tree, compiled with its gradients of the trained leaves."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from offload_core.device.trace import COMPUTE
from offload_core.errors import ParameterError

from ..placement.functions import Asked, Compute
from ..placement.placement import Placement
from ..tree.trees import Static, of_params
from ..tree.wrapped_tree import WrappedTree
from .gradients import RankGradients, ScaledGradients
from .loss_scale import DeviceScale


def value_and_grad(
    fun: Callable[..., Any],
    tree: WrappedTree,
    placement: Placement,
    loss_scale: DeviceScale | None,
    asked: Asked,
    *,
    has_aux: bool,
) -> Callable[..., tuple[Any, Any]]:
    """Compile a function with its gradients, as ``OffloadedParams.value_and_grad`` does.

    Args:
        loss_scale: multiplies the loss; None: the loss is not scaled.
    """
    positions = [leaf.position for leaf in tree.trained]
    is_trained = frozenset(positions)
    compute = differentiated(fun, positions, has_aux=has_aux)
    compiled = placement.compile(compute, tree.trained, asked)

    def call(params: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        leaves, treedef = tree.leaves_like(params, ParameterError, "value_and_grad: params")
        trained = [leaves[i] for i in positions]
        for leaf, array in zip(tree.trained, trained, strict=True):
            if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer) and array.is_deleted():
                raise ParameterError(
                    f"value_and_grad: {of_params(leaf.path)} was donated or deleted; expected offloaded.params, read "
                    "after the last update (update(donate_params=True) deletes the arrays of before)"
                )
        static, traced = Static.split(treedef, [None if i in is_trained else leaf for i, leaf in enumerate(leaves)])
        scale = loss_scale.read() if loss_scale else None
        factor = np.float32(scale) if isinstance(scale, float) else scale
        with placement.device.trace.span(COMPUTE, "value_and_grad"):
            out, gradients = compiled(trained, traced, static, factor, args, kwargs)
        found = dict(zip(positions, gradients, strict=True))
        grads = jax.tree_util.tree_unflatten(treedef, [found.get(i) for i in range(len(leaves))])
        if placement.per_rank:
            grads = RankGradients(grads)
        if scale is None:
            return out, grads
        return out, ScaledGradients(grads, scale, 1.0 if isinstance(scale, float) else jnp.ones_like(scale))

    return call


def differentiated(fun: Callable[..., Any], positions: Sequence[int], *, has_aux: bool) -> Compute:
    """Return the computation of the function's value, and of the gradients of the leaves at these positions."""

    def compute(
        trained: list[Any],
        traced: list[Any],
        static: Static,
        scale: Any,
        args: tuple,
        kwargs: dict[str, Any],
        *,
        seen: Callable[[list[Any]], list[Any]] = list,
    ) -> Any:
        def scaled(trained: list[Any]) -> Any:
            leaves = static.merge(traced)
            for i, leaf in zip(positions, seen(trained), strict=True):
                leaves[i] = leaf
            out = fun(jax.tree_util.tree_unflatten(static.treedef, leaves), *args, **kwargs)
            value = out[0] if has_aux else out
            return value.astype(jnp.float32) * scale if scale is not None else value, out

        (_, out), gradients = jax.value_and_grad(scaled, has_aux=True)(trained)
        return out, gradients

    return compute
