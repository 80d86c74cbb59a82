"""The transformation of :meth:`OffloadedParams.as_optax`: its updates, when added, give exactly the new parameters."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from offload_core.errors import ParameterError, StateError

from ..devices.context import refuse_jit
from ..placement.placement import Placement
from ..tree.trees import check_form, is_array, is_key, of_params
from ..tree.wrapped_tree import WrappedTree

_UNDER_JIT = (
    "the states are in host memory. jax.jit the loss and its gradients only; optax.MultiSteps, "
    "optax.apply_if_finite and optax.conditionally_transform trace what they wrap: wrap(..., "
    "gradient_accumulation_steps=N) and wrap(..., skip_nonfinite=True) do what the first two do"
)
_MASKED = (
    "as_optax(): params: there is an optax.MaskedNode at {path}: optax.masked and optax.multi_transform hide what "
    "others train; expected it in the wrapped tree, too: "
    "wrap(jax.tree.map(lambda mine, p: p if mine else optax.MaskedNode(), mask, params))"
)
_NONE_OF_THEM = (
    "as_optax(): params: optax.MaskedNode is in place of every parameter: the label in optax.multi_transform, or the "
    "mask, chooses none for offload-core; expected at least one, or as_optax() left out"
)
_WIDENED = "; optax.apply_updates keeps dtypes, where equinox.apply_updates widens: go on from offloaded.params there"
_NONE = (
    "as_optax().update without params; expected update(grads, state, params), as optax.adamw has it: the updates are "
    "for these parameters alone"
)
_STRICT = (
    "as_optax().update with jax_numpy_dtype_promotion='strict': {path} is {dtype}, and its exact update is "
    "float32, so that optax.apply_updates could not add the two; expected both calls inside "
    "`with jax.numpy_dtype_promotion('standard'):`, or offloaded.update(grads) in the loop"
)
_OTHERS = (
    "as_optax().update: {path} is not what the last update made of it: an update takes the parameters to their "
    "new values, exactly. Expected params = optax.apply_updates(params, updates), with nothing after as_optax() in an "
    "optax.chain (what scales gradients comes before it; the learning rate is lr= of wrap(), or "
    "as_optax(learning_rate=)), and nothing around it that moves parameters itself, as optax.lookahead, "
    "optax.contrib.schedule_free, sam and mechanize do. Where they were changed on purpose: "
    "offloaded.load_params(params) first"
)


class OffloadState(NamedTuple):
    """The state of :meth:`OffloadedParams.as_optax`: the number of updates it stands for, an int32 scalar."""

    step: jax.Array


def transformation(
    tree: WrappedTree, placement: Placement, count: Callable[[], int], update_all: Callable[[Any], Any]
) -> Any:
    """As ``OffloadedParams.as_optax``.

    Args:
        count: returns the number of updates made so far, and brings the tree up to them.
        update_all: takes gradients, and puts the new parameters in the tree.
    """
    import optax

    def leaves_of(params: Any) -> tuple[list[Any], Any]:
        try:
            leaves, treedef = tree.leaves_like(params, ParameterError, "as_optax(): params")
        except ParameterError:
            nodes = jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda node: isinstance(node, optax.MaskedNode))
            if nodes and all(isinstance(node, optax.MaskedNode) for _, node in nodes):
                raise ParameterError(_NONE_OF_THEM) from None
            for path, node in nodes:
                if isinstance(node, optax.MaskedNode):
                    raise ParameterError(_MASKED.format(path=jax.tree_util.keystr(path))) from None
            raise
        for leaf in tree.trained:
            check_form("as_optax()", leaf.path, leaves[leaf.position], tree.leaves[leaf.position], _WIDENED)
        return leaves, treedef

    def init(params: Any) -> OffloadState:
        if not _stands_for_params(params):
            leaves_of(params)
        return OffloadState(jnp.asarray(count(), jnp.int32))

    def update(grads: Any, state: OffloadState, params: Any = None) -> tuple[Any, OffloadState]:
        refuse_jit("as_optax().update", _UNDER_JIT)
        if int(state.step) != count():
            raise StateError(
                f"as_optax().update with the state of update {int(state.step)}, expected that of update {count()}, "
                "where the states in host memory are: the state that the last update returned, or tx.init(params) "
                "anew (optax.contrib.sam goes back to the first state, and cannot be around as_optax()); "
                "load_pytree() and load_checkpoint() take the states back to the update of a saved optax state"
            )
        if params is None:
            raise ParameterError(_NONE)
        before, treedef = leaves_of(params)
        _check_promotion(tree)
        _check_own(tree, before)
        update_all(grads)
        updates = [placement.pass_through(no_update(leaf)) for leaf in before]
        trained = {leaf.position for leaf in tree.trained}
        for i, (old, new) in enumerate(zip(before, tree.leaves, strict=True)):
            if i in trained:
                updates[i] = exact_update(_beside(old, new), new)
            elif is_array(old) and is_array(new) and old is not new:  # for checkpoints, which are to have the loop's
                tree.leaves[i] = placement.pass_through(old)
        return jax.tree_util.tree_unflatten(treedef, updates), OffloadState(jnp.asarray(count(), jnp.int32))

    return optax.with_extra_args_support(optax.GradientTransformation(init, update))


def _stands_for_params(params: Any) -> bool:
    """True for the object that ``optax.tree_map_params`` gives to ``init`` in place of parameters."""
    import optax

    kinds: list[type] = []  # optax does not export the type, but shows such an object to any function
    optax.tree_map_params(lambda placeholder: kinds.append(type(placeholder)), lambda leaf: leaf, None)
    return type(params) in kinds


def _check_promotion(tree: WrappedTree) -> None:
    """Raise :class:`StateError` if JAX may not add an update to its parameter."""
    if jax.config.jax_numpy_dtype_promotion == "strict":  # type: ignore[attr-defined]
        for leaf in tree.trained:
            if leaf.dtype != np.float32:
                raise StateError(_STRICT.format(path=of_params(leaf.path), dtype=np.dtype(leaf.dtype).name))


def _check_own(tree: WrappedTree, given: Sequence[Any]) -> None:
    """Raise :class:`StateError` unless the parameters are those of the tree: an update is made only for these."""
    pairs = [(leaf.path, given[leaf.position], tree.leaves[leaf.position]) for leaf in tree.trained]
    others = [(path, _same(_beside(old, own), own)) for path, old, own in pairs if old is not own]
    for path, same in others:  # by now all comparisons have been started
        if not same:
            raise StateError(_OTHERS.format(path=of_params(path)))


def _beside(value: Any, like: jax.Array) -> Any:
    """A value on the devices of an array, so that both can be used in one computation."""
    return jax.device_put(value, like.sharding) if like.committed else value


@jax.jit
def _same(a: jax.Array, b: jax.Array) -> jax.Array:
    """True if all elements are the same numbers, or NaN in both."""
    return jnp.all((a == b) | (jnp.isnan(a) & jnp.isnan(b)))


@jax.jit
def exact_update(before: jax.Array, after: jax.Array) -> jax.Array:
    """An fp32 ``u`` such that ``before + u``, rounded to the parameters' dtype, has the bits of ``after``."""
    p, q = before.astype(jnp.float32), after.astype(jnp.float32)

    def sum_of(u: jax.Array) -> jax.Array:
        # XLA removes rounding to a narrower type and back, unless there is something between the two.
        return lax.optimization_barrier((p + u).astype(after.dtype)).astype(jnp.float32)

    u = jnp.where(q == p, jnp.copysign(jnp.float32(0), q), q - p)  # -0 + 0 would be 0
    for _ in range(2):  # the rounded difference is at most a unit off
        u = jnp.where(sum_of(u) < q, jnp.nextafter(u, jnp.inf), u)
        u = jnp.where(sum_of(u) > q, jnp.nextafter(u, -jnp.inf), u)
    return u


def no_update(leaf: Any) -> Any:
    """A scalar that changes no bit of an array when it is added to it; None for other leaves."""
    return jnp.asarray(-0.0).astype(leaf.dtype) if is_array(leaf) and not is_key(leaf) else None
