"""``OffloadedParams.named_weights``: whole weights one after the other, in bounded memory, for an inference engine."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from offload_core.dtypes import BY_NAME, BY_NUMPY
from offload_core.engine import Engine, StepReport
from offload_core.errors import ConfigError, ParameterError, StateError
from offload_core.support import checks
from offload_core.support.checks import kind_of, some_of

from ..devices.numbers import cpu_device
from ..tree.trees import dotted_names, is_array, is_key, numpy_form
from ..tree.wrapped_tree import WrappedTree
from .export import WholeLeaf

Named = tuple[str, Any]
BetweenUpdates = Callable[[Callable[[], Named]], Named]


@dataclass(frozen=True)
class WeightRequest:
    """The arguments of one call, as ``OffloadedParams.named_weights`` describes them."""

    dtype: Any = None
    into: Callable[[str, Any], object] | Mapping[str, np.ndarray] | None = None
    since: StepReport | None = None
    device: Any = None


class NamedWeights:
    """Hands out the weights of a tree, and knows which of them have changed since a report."""

    def __init__(self, core: Engine, tree: WrappedTree, whole_leaf: WholeLeaf) -> None:
        self._changes, self._tree, self._whole_leaf = core.changes, tree, whole_leaf
        self._names = dotted_names(tree.now())
        self._params = {leaf.position: list(leaf.params) for leaf in tree.trained}
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}
        """The arrays that are not trained as they were last looked at, and the count of changes at which each one was
        seen to be new."""
        self._look(-1)

    def give(self, asked: WeightRequest, between_updates: BetweenUpdates) -> Iterator[Named]:
        """Check the arguments, and return the weights. With several processes all must take all of them.

        Args:
            between_updates: calls a function after the update that was asked for and not waited for. It is not kept:
                it belongs to the object that owns this one.
        """
        leaves = self._tree.leaves
        dtype, number = _element_type(asked.dtype), self._number_of(asked.since)
        self._look(self._changes.number)
        positions = [i for i, leaf in enumerate(leaves) if i in self._params or (is_array(leaf) and not is_key(leaf))]
        targets = _targets(asked.into, [self._names[i] for i in positions], [leaves[i].shape for i in positions])
        if number is not None:
            trained = self._changes.since(number)
            positions = [i for i in positions if self._changed(i, trained, number)]
        device = cpu_device() if asked.device is None else asked.device
        return self._read(positions, dtype, targets, device, between_updates)

    def _read(
        self,
        positions: list[int],
        dtype: np.dtype | None,
        targets: Mapping[str, np.ndarray] | None,
        device: Any,
        between_updates: BetweenUpdates,
    ) -> Iterator[Named]:
        began = self._changes.number

        def weight(i: int) -> Named:
            if self._changes.number != began:
                raise StateError(
                    "named_weights(): the parameters have changed since it began; expected all weights to be taken "
                    "before the next update or load: call it again"
                )
            return self._weight(i, dtype, targets, device)

        for i in positions:
            # It is not held here: the next one comes when it may be gone.
            yield between_updates(partial(weight, i))

    def _weight(
        self, position: int, dtype: np.dtype | None, targets: Mapping[str, np.ndarray] | None, device: Any
    ) -> Named:
        name = self._names[position]
        is_cast = dtype is not None and jnp.issubdtype(self._tree.leaves[position].dtype, jnp.floating)
        value = self._whole_leaf(position, master=is_cast, wanted=True)
        assert value is not None
        if is_cast:
            value = value.astype(dtype, copy=False)
        if targets is None:
            return name, jax.device_put(value, device)
        np.copyto(targets[name], value, casting="unsafe")
        return name, targets[name]

    def _number_of(self, since: StepReport | None) -> int | None:
        if since is None:
            return None
        if not isinstance(since, StepReport):
            raise ConfigError(f"since: got {kind_of(since)}, expected offloaded.report, as it was after an update")
        number = self._changes.number_of(since.changes)
        if number is None:
            raise ConfigError(
                "since: got the report of another tree, or of another process; expected offloaded.report of this one: "
                "call named_weights() without since= first, which gives all weights"
            )
        return number

    def _changed(self, position: int, trained: np.ndarray, number: int) -> bool:
        if position in self._params:
            return bool(trained[self._params[position]].any())
        return position not in self._known or self._known[position][1] >= number

    def _look(self, number: int) -> None:
        """Note which arrays that are not trained are other ones than at the last look.

        Args:
            number: the count of changes so far; -1: they count as unchanged.
        """
        for i, leaf in enumerate(self._tree.leaves):
            if i not in self._params and isinstance(leaf, jax.Array):
                before = self._known.get(i)
                if before is None or before[0]() is not leaf:
                    self._known[i] = (weakref.ref(leaf), number)


def _element_type(dtype: Any) -> np.dtype | None:
    if dtype is None:
        return None
    if not isinstance(dtype, str):
        known = BY_NUMPY.get(np.dtype(dtype))
        dtype = str(np.dtype(dtype)) if known is None else known.name
    checks.choice("dtype", dtype, BY_NAME)
    return BY_NAME[dtype].numpy


def _targets(into: Any, names: list[str], shapes: list[tuple[int, ...]]) -> Mapping[str, np.ndarray] | None:
    if into is None or (callable(into) and not isinstance(into, Mapping)):
        return None
    if not isinstance(into, Mapping):
        raise ConfigError(
            f"into: got {kind_of(into)}, expected a function of a name and an array, or a mapping from all names to "
            "NumPy arrays"
        )
    missing, unknown = [name for name in names if name not in into], [name for name in into if name not in names]
    wrong = [
        f"{name!r} is {_form(into[name])}, expected a writable NumPy array of shape {list(shape)}"
        for name, shape in zip(names, shapes, strict=True)
        if name in into and not _fits(into[name], shape)
    ]
    if missing or unknown or wrong:
        said = [f"{len(missing)} missing: {some_of(missing)}"] * bool(missing)
        said += [f"{len(unknown)} unknown: {some_of(unknown)}"] * bool(unknown)
        raise ParameterError(
            f"into: {'; '.join(said + wrong[:3])}; expected an array for each of the tree's {len(names)} weights, and "
            "no other: nothing was written"
        )
    return into


def _fits(target: Any, shape: tuple[int, ...]) -> bool:
    return isinstance(target, np.ndarray) and target.shape == shape and target.flags.writeable


def _form(target: Any) -> str:
    if not isinstance(target, np.ndarray):
        return kind_of(target)
    shape, dtype = numpy_form(target)
    return f"{dtype}{list(shape)}" + " that cannot be written" * (not target.flags.writeable)
