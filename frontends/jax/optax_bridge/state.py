"""The state of ``optax.adamw``, made from offloaded states and read for them."""

from typing import Any

import jax
import numpy as np

from offload_core.config.options import OffloadConfig
from offload_core.errors import StateError


def state_of(config: OffloadConfig, *, masked: bool, steps: int, count: int, mu: Any, nu: Any) -> Any:
    """The state that optax's transformation with these settings would have.

    Args:
        masked: True if a mask says which parameters weight decay applies to.
        steps: updates that all parameters have had.
        count: updates that the schedule has seen.
        mu, nu: trees of the moments, with None for a leaf that is not trained.
    """
    import optax

    first_lr, (b1, b2) = config.hyperparameters(0)
    lr = config.lr if callable(config.lr) else first_lr
    mask = (lambda params: jax.tree.map(lambda _: True, params)) if masked else None
    terms = {"b1": b1, "b2": b2, "eps": config.eps, "eps_root": config.eps_root}
    if config.adam_mode == "adamw":
        tx = optax.adamw(lr, **terms, weight_decay=config.weight_decay, mask=mask)
    else:
        tx = optax.chain(optax.add_decayed_weights(config.weight_decay, mask), optax.adam(lr, **terms))

    def fill(node: Any) -> Any:
        if isinstance(node, optax.ScaleByAdamState):
            return optax.ScaleByAdamState(np.asarray(steps, np.int32), mu, nu)
        if isinstance(node, optax.ScaleByScheduleState):
            return optax.ScaleByScheduleState(np.asarray(count, np.int32))
        return node

    filled = (optax.ScaleByAdamState, optax.ScaleByScheduleState)
    return jax.tree.map(fill, jax.eval_shape(tx.init, mu), is_leaf=lambda node: isinstance(node, filled))


def adam_of(state: Any) -> tuple[Any, Any, int, int]:
    """``(mu, nu, steps, count)`` of the state of any transformation with one Adam; None stands for missing moments.

    Raises:
        StateError: it has no Adam, or several.
    """
    import optax

    def found(kind: Any) -> list[Any]:
        leaves = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kind))
        return [leaf for leaf in leaves if isinstance(leaf, kind)]

    adams, schedules = found(optax.ScaleByAdamState), found(optax.ScaleByScheduleState)
    if len(adams) != 1:
        raise StateError(
            f"load_optax_state: {len(adams)} ScaleByAdamState in a {type(state).__name__}, expected one: the state of "
            "optax.adamw, or of a chain that has it"
        )
    [adam] = adams

    def bare(tree: Any) -> Any:
        empty = (optax.MaskedNode, type(None))
        return jax.tree.map(
            lambda leaf: None if isinstance(leaf, empty) else leaf, tree, is_leaf=lambda leaf: isinstance(leaf, empty)
        )

    counts = {int(schedule.count) for schedule in schedules}
    return bare(adam.mu), bare(adam.nu), int(adam.count), max(counts, default=int(adam.count))
