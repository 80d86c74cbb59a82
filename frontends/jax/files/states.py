"""The states of a wrapped tree's parameters, as trees of its structure."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from offload_core.config.options import OffloadConfig
from offload_core.dtypes import BY_NUMPY
from offload_core.engine import Engine, LossScaler
from offload_core.errors import ParameterError, StateError
from offload_core.rules import MASTER, STATE_NAMES, Rule
from offload_core.support.checks import checked_count, some_of
from offload_core.support.threads import uninterrupted

from ..optax_bridge.state import RuleStates, state_of, states_of
from ..placement.placement import Placement
from ..tree.memory_kinds import in_host_memory, lies_as
from ..tree.trees import check_form, from_numpy, is_array, is_key, numpy_shape, of_params, to_numpy
from ..tree.wrapped_tree import Absent, Leaf, WrappedTree


class TreeStates:
    """Reads and replaces master weights, moments and step counts.

    The argument ``flush`` brings parameters to the values of their master weights. The caller of a method that only
    reads has done so before.
    """

    def __init__(self, core: Engine, placement: Placement, tree: WrappedTree) -> None:
        self._core, self._gradients, self._parameters = core, core.gradients, core.parameters
        self._scaler = core.scaler
        self._states = core.states
        self._config = core.config
        self._placement = placement
        self._tree = tree
        self._trained = {leaf.position: leaf for leaf in tree.trained}
        self._shapes = {leaf.position: leaf.shape for leaf in tree.trained}

    def _states_of(self, leaf: Leaf) -> tuple[str, ...]:
        """The names of a leaf's states."""
        return self._states.rule(leaf.params[0]).state_names

    @property
    def _names(self) -> list[str]:
        """The names of the states of all leaves."""
        return list(dict.fromkeys(name for leaf in self._tree.trained for name in self._states_of(leaf)))

    def _shapes_with(self, name: str) -> dict[int, tuple[int, ...]]:
        """The shapes of the leaves that have this state, by position."""
        return {leaf.position: leaf.shape for leaf in self._tree.trained if name in self._states_of(leaf)}

    def _rule_of(self, leaf: Leaf) -> Rule:
        return self._states.rule(leaf.params[0])

    @property
    def _rules(self) -> list[Rule]:
        """The rules of all leaves, Muon's before AdamW's."""
        rules = dict.fromkeys(map(self._rule_of, self._tree.trained))
        return sorted(rules, key=lambda rule: rule.device_kernel is None)

    # --- read ----------------------------------------------------------------------------------------

    def to_pytree(self, count: int, *, sharded: bool) -> dict[str, Any]:
        """As ``OffloadedParams.to_pytree``, after so many updates."""
        steps = {position: self._states.step_count(leaf.params[0]).copy() for position, leaf in self._trained.items()}
        scaler = self._scaler
        return {
            "count": count,
            "params": self._tree.of(
                {
                    i: leaf if sharded and _is_numbers(leaf) else self._as_numpy(i, leaf)
                    for i, leaf in enumerate(self._tree.leaves)
                }
            ),
            **self._trees(self._names, self._spread_states if sharded else self._whole_states),
            "steps": self._tree.of(steps),
            **({} if scaler is None else {"loss_scale": scaler.state_dict()}),
        }

    def to_optax(self, config: OffloadConfig, *, masked: bool, count: int) -> Any:
        """As ``OffloadedParams.to_optax_state``."""
        rules, trained = self._rules, self._tree.trained
        states = {}
        for rule in rules:
            own = [leaf for leaf in trained if self._rule_of(leaf) == rule]
            steps = self._common_steps(own)
            trees = self._trees([state.name for state in rule.states], self._whole_states)
            states[rule.name] = RuleStates(steps, trees if len(rules) == 1 else self._masked(trees, own))
        matrices = self._tree.of({leaf.position: leaf.matrix is not None for leaf in trained})
        like = self._tree.of({leaf.position: jax.ShapeDtypeStruct(leaf.shape, np.float32) for leaf in trained})
        return state_of(config, masked=masked, count=count, states=states, matrices=matrices, like=like)

    def _common_steps(self, leaves: Sequence[Leaf]) -> int:
        """Return the number of updates that each of these leaves has had.

        Raises:
            StateError: it is not the same.
        """
        steps = [int(self._states.step_count(leaf.params[0])) for leaf in leaves]
        other = next((i for i, step in enumerate(steps) if step != steps[0]), None)
        if other is not None:
            names = [leaves[i].path for i in (0, other)]
            raise StateError(
                f"to_optax_state: {names[0]} has had {steps[0]} updates and {names[1]} {steps[other]}; expected the "
                "same of all parameters, as optax counts them together: a gradient was None; use to_pytree()"
            )
        return steps[0]

    def _masked(self, trees: Mapping[str, Any], own: Sequence[Leaf]) -> dict[str, Any]:
        """Return trees of states with ``optax.MaskedNode`` in place of the trained leaves that are not these."""
        import optax

        others = {leaf.position for leaf in self._tree.trained} - {leaf.position for leaf in own}
        found = {}
        for name, tree in trees.items():
            leaves = dict(enumerate(jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None)))
            found[name] = self._tree.of({i: optax.MaskedNode() if i in others else leaves[i] for i in leaves})
        return found

    def whole_leaf(self, position: int, *, master: bool, wanted: bool) -> np.ndarray | None:
        """A leaf, or with ``master`` its master weights if it has any; None where this process does not want it.

        With several processes all must call this.
        """
        leaf, value = self._trained.get(position), self._tree.leaves[position]
        if leaf is not None and (master or isinstance(value, Absent)):
            return self._of_master(leaf, np.dtype(np.float32) if master else leaf.dtype)
        of_all = isinstance(value, jax.Array) and not (value.is_fully_addressable or value.is_fully_replicated)
        return self._as_numpy(position, value) if wanted or of_all else None

    def _as_numpy(self, position: int, value: Any) -> Any:
        """The value of a leaf, or another value that lies as it does."""
        if isinstance(value, Absent):
            return self._of_master(self._trained[position], value.dtype)
        if not _is_numbers(value):
            return to_numpy(value)
        return self._placement.to_numpy(self._trained.get(position), value)

    def _of_master(self, leaf: Leaf, dtype: np.dtype) -> np.ndarray:
        """The master weights of a leaf, rounded: a parameter that was flushed has these bits."""
        return self._whole_states(leaf, [MASTER])[MASTER].astype(dtype, copy=False)

    def _trees(
        self, names: Collection[str], states_of: Callable[[Leaf, Collection[str]], Mapping[str, Any]]
    ) -> dict[str, Any]:
        """States of all parameters, each name's as a tree."""
        states: dict[str, dict[int, Any]] = {name: {} for name in names}
        for position, leaf in self._trained.items():
            for name, state in states_of(leaf, [name for name in names if name in self._states_of(leaf)]).items():
                states[name][position] = state
        return {name: self._tree.of(leaves) for name, leaves in states.items()}

    def _spread_states(self, leaf: Leaf, names: Collection[str]) -> dict[str, jax.Array]:
        """The states of a parameter as arrays that lie as it does; each process gives the parts that it holds."""
        like = self._tree.leaves[leaf.position]
        if leaf.layout is None:
            of_each = [self._states.whole_states(i, names) for i in leaf.params]
            parts = {name: [states[name] for states in of_each] for name in names}
        else:
            [param] = leaf.params
            runs = self._states.states(param)
            slices = {name: leaf.layout.slices((start, views[name]) for start, views in runs) for name in names}
            parts = {name: [of_name[rank] for rank in sorted(of_name)] for name, of_name in slices.items()}
        return {name: self._placement.spread(leaf, parts[name], like) for name in names}

    def _whole_states(self, leaf: Leaf, names: Collection[str]) -> dict[str, np.ndarray]:
        """The states of a parameter, in its shape; other processes send the parts that they hold."""
        parts = [self._states.whole_states(i, names) for i in leaf.params]
        return {name: self._placement.joined(leaf, [part[name] for part in parts], name) for name in names}

    # --- replaced ------------------------------------------------------------------------------------

    def load_pytree(self, tree: Mapping[str, Any], flush: Callable[[], Any]) -> None:
        """As ``OffloadedParams.load_pytree``."""
        if "count" not in tree:
            raise _missing("count", tree)
        others = [name for name in STATE_NAMES if name in tree and name not in self._names]
        if others:
            raise StateError(
                f"load_pytree: has {', '.join(map(repr, others))}, which optimizer={self._config.optimizer!r} with "
                "these settings does not keep; expected what to_pytree() gave with the same ones"
            )
        arrays = {i: numpy_shape(leaf) for i, leaf in enumerate(self._tree.leaves) if is_array(leaf)}
        params = self._leaves_of(tree, "params", arrays)
        states = {name: self._leaves_of(tree, name, self._shapes_with(name)) for name in self._names}
        steps = self._leaves_of(tree, "steps", dict.fromkeys(self._shapes, ()))
        count = self._checked("load_pytree", states, [tree["count"], *steps.values()])[0]
        scale = tree.get("loss_scale")
        try:
            if self._scaler is not None and scale is not None:
                LossScaler.checked(scale)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise StateError(f"load_pytree: loss_scale ({error!r}); expected what to_pytree() gave") from None
        placed = {position: self._placed(position, value) for position, value in params.items()}
        self._gradients.drop()
        flush()  # else parameters that schedule="delayed" holds back would follow

        def take_over() -> None:
            self._restore(states, steps)
            for position, leaf in placed.items():
                self._tree.leaves[position] = leaf
            if self._scaler is not None and scale is not None:
                self._scaler.load_state_dict(scale)
            self._core.update_count = count

        self._replace(take_over)

    def load_optax(self, state: Any, flush: Callable[[], Any]) -> None:
        """As ``OffloadedParams.load_optax_state``."""
        rules = self._rules
        given, count = states_of(state, rules, self._config)
        if len(rules) > 1:
            self._check_choice(given["muon"].trees)
        states = {
            name: self._leaves_of(of_rule.trees, name, self._shapes_with(name), "load_optax_state")
            for of_rule in given.values()
            for name in of_rule.trees
        }
        self._checked("load_optax_state", states, [count, *(of_rule.steps for of_rule in given.values())])
        steps = {i: given[self._rule_of(leaf).name].steps for i, leaf in self._trained.items()}
        self._core.check_readable()  # the master weights stay
        self._gradients.drop()
        flush()

        def take_over() -> None:
            self._restore(states, steps)
            self._core.update_count = count

        self._replace(take_over)

    def _check_choice(self, trees: Mapping[str, Any]) -> None:
        """Raise :class:`StateError` unless Muon updates the same leaves in optax as here."""
        [tree] = trees.values()
        leaves, _ = self._tree.leaves_like(tree, StateError, "load_optax_state: mu")
        others = [leaf for leaf in self._tree.trained if (leaves[leaf.position] is None) != (leaf.matrix is None)]
        if others:
            names = some_of([leaf.path for leaf in others])
            there, here = ("AdamW", "Muon") if others[0].matrix else ("Muon", "AdamW")
            raise StateError(
                f"load_optax_state: in optax {there} updates {others[0].path}, and here {here}; expected the same "
                f"choice in both, by wrap(..., muon_params=[...]) or muon_weight_dimension_numbers, of {names}"
            )

    def load_params(self, params: Any) -> None:
        """As ``OffloadedParams.load_params``."""
        values, _ = self._tree.leaves_like(params, ParameterError, "load_params")
        for path, value, leaf in zip(self._tree.paths, values, self._tree.leaves, strict=True):
            if is_array(leaf):
                check_form("load_params", path, value, leaf)
        self._core.check_readable()  # the moments stay
        self._core.finish()
        if self._parameters.stale:
            raise StateError(
                "load_params: schedule='delayed' holds back the last update, which would be lost; expected "
                "params = offloaded.flush(), then the change, then load_params(params)"
            )
        leaves = [
            self._placed(position, self._as_numpy(position, value)) if is_array(leaf) and value is not leaf else leaf
            for position, (leaf, value) in enumerate(zip(self._tree.leaves, values, strict=True))
        ]
        trained = self._tree.trained
        tensors = self._placement.start(trained, [leaves[leaf.position] for leaf in trained])

        def take_over() -> None:
            self._tree.leaves[:] = leaves
            for i, tensor in enumerate(tensors):
                self._states.adopt(i, tensor)

        self._replace(take_over, masters=False)

    def _replace(self, take_over: Callable[[], None], *, masters: bool = True) -> None:
        """As ``Engine.replacing_states``, and no signal can interrupt it."""

        def section() -> None:
            with self._core.replacing_states(masters=masters):
                take_over()

        uninterrupted(section)

    def _placed(self, position: int, value: Any) -> Any:
        """A NumPy value in the type and place of the leaf that it replaces."""
        like, leaf = self._tree.leaves[position], self._trained.get(position)
        if _is_numbers(value) and lies_as(value, like):
            moved = jax.device_put(value, like.sharding).astype(like.dtype)
            shared = in_host_memory(value) == in_host_memory(like) and not in_host_memory(like)
            return jnp.copy(moved) if shared else moved  # the caller may donate its own
        if leaf is None:
            return self._placement.pass_through(from_numpy(value, like))
        return self._placement.restored(leaf, np.asarray(value), like)

    def _restore(self, states: Mapping[str, Mapping[int, Any]], steps: Mapping[int, Any]) -> None:
        """Take over states and update counts, given by position and checked before."""
        for leaf in self._tree.trained:
            own = {name: values for name, values in states.items() if leaf.position in values}
            parts = {name: self._cut(leaf, values[leaf.position]) for name, values in own.items()}
            for place, i in enumerate(leaf.params):
                self._states.set_states(i, {name: of_each[place] for name, of_each in parts.items()})
                self._states.step_count(i)[...] = steps[leaf.position]

    def _cut(self, leaf: Leaf, value: Any) -> list[np.ndarray]:
        """Return the states of each of a leaf's parameters. If the array lies as the leaf does, they are only this
        process's parts."""
        if not lies_as(value, self._tree.leaves[leaf.position]):
            return self._placement.cut(leaf, np.asarray(value))
        parts = [np.asarray(part) for part in self._placement.parts(leaf, value)]
        if leaf.layout is None:
            return [part.reshape(-1) for part in parts]
        return [leaf.layout.of_slices(dict(zip(self._placement.device.ranks, parts, strict=True)))]

    def _checked(self, what: str, states: Mapping[str, Mapping[int, Any]], counts: Iterable[Any]) -> list[int]:
        """Check states and numbers of updates before anything changes, and return the numbers."""
        for name, leaves in states.items():
            for position, value in leaves.items():
                dtype = np.dtype(getattr(value, "dtype", np.float32))
                if dtype not in BY_NUMPY:
                    raise StateError(
                        f"{what}: {of_params(self._tree.paths[position], name)} is of {dtype}, and would be "
                        "rounded; expected float32: convert it, if that is what you want"
                    )
        try:
            return [checked_count(value) for value in counts]
        except (TypeError, ValueError, OverflowError) as error:
            raise StateError(f"{what}: count or steps: {error}") from None

    def _leaves_of(
        self, tree: Mapping[str, Any], name: str, shapes: Mapping[int, tuple[int, ...]], what: str = "load_pytree"
    ) -> dict[int, Any]:
        """The leaves of ``tree[name]`` at the positions of ``shapes``, after a check of their shapes."""
        if name not in tree:
            raise _missing(name, tree)
        leaves, _ = self._tree.leaves_like(tree[name], StateError, f"{what}: {name}")
        for position, shape in shapes.items():
            value = leaves[position]
            if value is None or np.shape(value) != shape:
                got = "None" if value is None else list(np.shape(value))
                raise StateError(
                    f"{what}: {of_params(self._tree.paths[position], name)} is {got}, expected shape {list(shape)}"
                )
            here = not isinstance(value, jax.Array) or value.is_fully_addressable or value.is_fully_replicated
            if not here and not lies_as(value, self._tree.leaves[position]):
                raise StateError(
                    f"{what}: {of_params(self._tree.paths[position], name)} is cut over several processes, and "
                    "not as its parameter; expected the sharding of the parameter, as to_pytree(sharded=True) has it"
                )
        return {position: leaves[position] for position in shapes}


def _is_numbers(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not is_key(leaf)


def _missing(name: str, tree: Mapping[str, Any]) -> StateError:
    return StateError(f"load_pytree: no {name!r}, expected what to_pytree() gave; got {', '.join(map(str, tree))}")
