"""The state of optax's own optimizers, made from offloaded states and read for them."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from offload_core.config.options import OffloadConfig
from offload_core.errors import StateError
from offload_core.rules import Rule
from offload_core.support.checks import kind_of

from .rule_words import WORDS


def state_of(config: OffloadConfig, *, masked: bool, steps: int, count: int, states: Mapping[str, Any]) -> Any:
    """The state that optax's transformation with these settings would have.

    Args:
        masked: True if a mask says which parameters weight decay applies to.
        steps: updates that all parameters have had.
        count: updates that the schedule has seen.
        states: a tree of each state, by name, with None for a leaf that is not trained.
    """
    import optax

    words, values = WORDS[config.optimizer], config.values(0)
    lr = config.lr if callable(config.lr) else values["lr"]
    mask = (lambda params: jax.tree.map(lambda _: True, params)) if masked else None
    tx = words.transformation(config, values, lr, mask)
    node = getattr(optax, words.node)
    own = {words.fields[name]: tree for name, tree in states.items()}
    own |= {"count": np.asarray(steps, np.int32)} if "count" in node._fields else {}

    def fill(given: Any) -> Any:
        if isinstance(given, node):
            return node(**own)
        if isinstance(given, optax.ScaleByScheduleState):
            return optax.ScaleByScheduleState(np.asarray(count, np.int32))
        return given

    filled = (node, optax.ScaleByScheduleState)
    like: Any = next(iter(states.values()), {})
    return jax.tree.map(fill, jax.eval_shape(tx.init, like), is_leaf=lambda given: isinstance(given, filled))


def states_of(state: Any, rule: Rule) -> tuple[dict[str, Any], int, int]:
    """``(states, steps, count)`` of the state of any transformation with one optimizer of this rule: trees by the
    states' names, with None for missing ones, and numbers of updates.

    Raises:
        StateError: it has no such optimizer, or several.
    """
    import optax

    def found(kind: Any) -> list[Any]:
        leaves = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kind))
        return [leaf for leaf in leaves if isinstance(leaf, kind)]

    words = WORDS[rule.name]
    nodes, schedules = found(getattr(optax, words.node)), found(optax.ScaleByScheduleState)
    if not rule.states:
        nodes = [node for others in WORDS.values() for node in found(getattr(optax, others.node))]
    if len(nodes) != bool(rule.states):
        what = words.node if rule.states else "optimizers with states"
        raise StateError(
            f"load_optax_state: {len(nodes)} {what} in {kind_of(state)}, expected "
            + (f"one: the state of {words.whose}, or of a chain that has it" if rule.states else "none, as here")
        )

    def bare(tree: Any) -> Any:
        empty = (optax.MaskedNode, type(None))
        return jax.tree.map(
            lambda leaf: None if isinstance(leaf, empty) else leaf, tree, is_leaf=lambda leaf: isinstance(leaf, empty)
        )

    states = {each.name: bare(getattr(nodes[0], words.fields[each.name])) for each in rule.states}
    counts = {int(schedule.count) for schedule in schedules}
    if nodes and "count" in nodes[0]._fields:
        steps = count = int(nodes[0].count)
    else:  # optax counts no updates of such a rule, of which at most a parameter's first one differs from others
        steps, count = max(counts, default=len(nodes)), 0
    return states, steps, max(counts, default=count)
