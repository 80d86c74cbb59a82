"""Gradients as users give them, and the checks that they fit the parameters and are alike in all processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from offload_core.engine import LossScaler
from offload_core.errors import GradientError
from offload_core.ranks.collectives import Collectives
from offload_core.ranks.consistency import combine
from offload_core.support.checks import kind_of

from ..tree.trees import ARRAY
from ..tree.wrapped_tree import WrappedTree
from .loss_scale import check_scale


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class RankGradients:
    """Each rank's own gradients on a mesh axis, not yet averaged.

    ``tree`` has the parameters' structure. A leaf is ``[world_size, *shape]``, with its first dimension split over the
    axis. The gradient of a parameter that is sharded itself (stage 3) is the mean, in fp32, sharded as the parameter.
    """

    tree: Any

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        return (self.tree,), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: tuple[Any]) -> "RankGradients":
        return cls(children[0])


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class ScaledGradients:
    """Gradients of a loss that was multiplied by ``scale`` (float16 parameters).

    ``tree`` has the parameters' structure. ``scale`` is a number; from a function that the user has compiled it comes
    as an array, and is a leaf, too. ``unit`` is then a leaf as well: a one, which sums and means of several such trees
    change as they change the scale, so that ``scale / unit`` stays the scale.
    """

    tree: Any
    scale: Any
    unit: Any = 1.0

    def tree_flatten(self) -> tuple[tuple[Any, ...], float | None]:
        if isinstance(self.scale, int | float):
            return (self.tree,), self.scale
        return (self.tree, self.scale, self.unit), None

    @classmethod
    def tree_unflatten(cls, scale: float | None, children: tuple[Any, ...]) -> "ScaledGradients":
        return cls(*children) if scale is None else cls(children[0], scale)


def given_gradients(
    grads: Any, tree: WrappedTree, scaler: LossScaler | None, world_size: int
) -> tuple[list[jax.Array | None], bool]:
    """Return the gradient of each parameter, or None, and True if these are each rank's own.

    Raises:
        GradientError: they do not fit the tree's parameters, or were computed with another loss scale.
    """
    if isinstance(grads, ScaledGradients):
        check_scale(grads.scale, grads.unit, scaler)
        grads = grads.tree
    elif scaler is not None:
        raise GradientError(
            "plain gradients under loss scaling, expected those of offloaded.value_and_grad(loss_fn): float16 "
            "gradients of an unscaled loss underflow (or set loss_scale=1)"
        )
    unreduced = isinstance(grads, RankGradients)
    stack = [world_size] if unreduced else []
    given, _ = tree.leaves_like(grads.tree if unreduced else grads, GradientError, "update: gradients")
    gradients = []
    for leaf in tree.trained:
        path, gradient = leaf.path, given[leaf.position]
        if isinstance(gradient, jax.core.Tracer):
            raise GradientError(f"{path}: update() inside jit, grad or vmap; expected concrete arrays: call it outside")
        if gradient is not None:
            if not isinstance(gradient, ARRAY):
                raise GradientError(f"{path}: gradient is {kind_of(gradient)}, expected an array or None")
            expected = list(leaf.shape) if leaf.layout is not None else [*stack, *leaf.shape]
            if list(gradient.shape) != expected or gradient.dtype not in (leaf.dtype, jnp.float32):
                either = "" if leaf.dtype == jnp.float32 else " (or float32)"
                ranks = ", one a rank" if unreduced else ""
                raise GradientError(
                    f"{path}: gradient is {gradient.dtype}{list(gradient.shape)}, expected "
                    f"{leaf.dtype}{expected}{either}{ranks}"
                )
            if isinstance(gradient, np.generic):
                gradient = np.asarray(gradient)
            if isinstance(gradient, jax.Array) and gradient.is_deleted():
                raise GradientError(f"{path}: gradient was donated or deleted; expected one that is alive")
        gradients.append(gradient)
    return gradients, unreduced


def check_alike(
    collectives: Collectives, parameters: Sequence[tuple[str, Any]], arrays: Sequence[Any] | None, *, unreduced: bool
) -> None:
    """Raise :class:`GradientError` in every process unless all gave the same kinds of gradients.

    Args:
        parameters: path and dtype of each.
        arrays: this process's gradient of each, or None for it; None: this process has found an error in its own.
        unreduced: True if they came as :class:`RankGradients`.
    """
    n = collectives.world_size
    if n == 1:
        return
    flags = np.zeros(2 + 2 * len(parameters), np.int64)  # 1 for yes; all must answer alike
    flags[:2] = arrays is None, unreduced
    given, of_other_dtype = flags[2::2], flags[3::2]
    if arrays is not None:
        given[:] = [array is not None for array in arrays]
        pairs = zip(arrays, parameters, strict=True)
        of_other_dtype[:] = [array is not None and array.dtype != dtype for array, (_, dtype) in pairs]
    flags = combine(collectives, "what gradients there are", sums=flags).sums
    given, of_other_dtype = flags[2::2], flags[3::2]
    if arrays is None:
        return
    if flags[0]:
        raise GradientError(f"update: {flags[0]} of {n} processes raised an error; expected none: their output has it")
    if flags[1] % n:
        raise GradientError(
            f"update: {flags[1]} of {n} processes gave RankGradients, the others plain ones; expected one of these"
        )
    for (path, dtype), gradient, of_all, other_of_all in zip(parameters, arrays, given, of_other_dtype, strict=True):
        if of_all % n:
            got = "none" if gradient is None else "one"
            raise GradientError(
                f"{path}: {of_all} of {n} processes gave a gradient, the others None (this one gave {got}); "
                "expected it of all or of none: give zeros where there is none"
            )
        if other_of_all % n:
            raise GradientError(
                f"{path}: {other_of_all} of {n} processes gave a gradient that is not {dtype} (this one is "
                f"{gradient.dtype}), the others one that is; expected one dtype"
            )
