"""The state of optax's own optimizers, made from offloaded states and read for them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from offload_core.config.options import OffloadConfig
from offload_core.errors import StateError
from offload_core.rules import Rule
from offload_core.support.checks import kind_of

from .rule_words import WORDS


class RuleStates(NamedTuple):
    """The states of the leaves of one rule."""

    steps: int
    """Updates that all of these leaves have had."""
    trees: Mapping[str, Any]
    """A tree of each state, by name, with None for a leaf that is not trained."""


def state_of(
    config: OffloadConfig, *, masked: bool, count: int, states: Mapping[str, RuleStates], matrices: Any, like: Any
) -> Any:
    """The state that optax's transformation with these settings would have.

    Args:
        masked: True if a mask says which parameters weight decay applies to.
        count: updates that the schedule has seen.
        states: by the name of the rule. With several rules a leaf of another rule is an ``optax.MaskedNode``.
        matrices: of Muon, a tree of booleans: True for the leaves that it updates.
        like: a tree of the shapes of the trained leaves.
    """
    import optax

    words, values = WORDS[config.optimizer], config.values(0)
    lr = config.lr if callable(config.lr) else values["lr"]
    mask = (lambda params: jax.tree.map(lambda _: True, params)) if masked else None
    tx = words.transformation(config, values, lr, mask, *([matrices] if len(states) > 1 else []))
    nodes = {}
    for name, (steps, trees) in states.items():
        node = WORDS[name].node
        nodes[node] = {WORDS[name].fields[state]: tree for state, tree in trees.items()}
        nodes[node] |= {"count": np.asarray(steps, np.int32)} if "count" in node._fields else {}
        nodes[node] |= {"ns_coeffs": _coefficients(values)} if "ns_coeffs" in node._fields else {}

    def fill(given: Any) -> Any:
        if type(given) in nodes:
            return type(given)(**nodes[type(given)])
        if isinstance(given, optax.ScaleByScheduleState):
            return optax.ScaleByScheduleState(np.asarray(count, np.int32))
        return given

    filled = (*nodes, optax.ScaleByScheduleState)
    return jax.tree.map(fill, jax.eval_shape(tx.init, like), is_leaf=lambda given: isinstance(given, filled))


def _coefficients(values: Mapping[str, Any]) -> np.ndarray:
    return np.asarray(values["ns_coefficients"], np.float32)


def states_of(state: Any, rules: Sequence[Rule], config: OffloadConfig) -> tuple[dict[str, RuleStates], int]:
    """``(states, count)`` of the state of any transformation with one optimizer of each of these rules: by the rules'
    names, with None for missing leaves, and the number of updates.

    Raises:
        StateError: it has no such optimizer, or several, or Muon's iteration is another.
    """
    import optax

    schedules = _found(state, optax.ScaleByScheduleState)
    counts = {int(schedule.count) for schedule in schedules}
    found, numbers = {}, []
    for rule in rules:
        words = WORDS[rule.name]
        nodes = _found(state, words.node)
        if not rule.states:
            nodes = [node for others in WORDS.values() for node in _found(state, others.node)]
        if len(nodes) != bool(rule.states):
            what = words.node_name if rule.states else "optimizers with states"
            whose = WORDS["muon"].whose if len(rules) > 1 else words.whose
            raise StateError(
                f"load_optax_state: {len(nodes)} {what} in {kind_of(state)}, expected "
                + (f"one: the state of {whose}, or of a chain that has it" if rule.states else "none, as here")
            )
        if nodes and "count" in nodes[0]._fields:
            steps = count = int(nodes[0].count)
        else:  # optax counts no updates of such a rule, of which at most a parameter's first one differs from others
            steps, count = max(counts, default=len(nodes)), 0
        if nodes and "ns_coeffs" in nodes[0]._fields:
            _check_coefficients(nodes[0].ns_coeffs, _coefficients(config.values(0)))
        numbers.append(count)
        trees = {each.name: _bare(getattr(nodes[0], words.fields[each.name])) for each in rule.states}
        found[rule.name] = RuleStates(steps, trees)
    return found, max(counts, default=max(numbers))


def _found(state: Any, kind: Any) -> list[Any]:
    leaves = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kind))
    return [leaf for leaf in leaves if isinstance(leaf, kind)]


def _bare(tree: Any) -> Any:
    """Return a tree with None in place of what optax masks."""
    import optax

    empty = (optax.MaskedNode, type(None))
    return jax.tree.map(
        lambda leaf: None if isinstance(leaf, empty) else leaf, tree, is_leaf=lambda leaf: isinstance(leaf, empty)
    )


def _check_coefficients(given: Any, own: np.ndarray) -> None:
    """Raise :class:`StateError` unless Muon's state is of an iteration with these coefficients in each step."""
    given = np.asarray(given, np.float32)
    if not np.array_equal(np.broadcast_to(own, given.shape), given):
        raise StateError(
            f"load_optax_state: the state's ns_coeffs are {given.tolist()}, expected {own.tolist()}: "
            "wrap(..., ns_coefficients=...) takes one set for all steps"
        )
