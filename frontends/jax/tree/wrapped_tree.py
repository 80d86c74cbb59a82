"""A pytree as it was wrapped: its structure, its present leaves, and the trained ones among them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from offload_core.errors import OffloadError, ParameterError, StateError
from offload_core.rules import Matrix

from .shard_layout import ShardLayout
from .shards import ArrayShard
from .trees import check_paths, flatten, form, is_unreduced, of_params


@dataclass(frozen=True)
class Leaf:
    """A parameter: its place among the tree's leaves, and the form of its array."""

    position: int
    path: str
    shape: tuple[int, ...]
    dtype: Any
    params: range
    """The numbers of the core's parameters that make up this parameter."""
    matrix: Matrix | None = None
    """The shape of the matrices that its rule needs whole; None: it needs none."""
    layout: ShardLayout | None = None
    """The cut over ranks (stage 3 on a mesh axis); None: it has none."""
    shards: tuple[ArrayShard, ...] = ()
    """Its parts in this process, one for each of ``params``, if it stays as it was placed."""


@dataclass(frozen=True)
class Absent:
    """The place of a parameter that is released: the form of the array that comes back."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: jax.sharding.Sharding
    committed: bool

    @classmethod
    def of(cls, array: jax.Array) -> "Absent":
        return cls(array.shape, array.dtype, array.sharding, array.committed)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def empty(self) -> jax.Array:
        """Return an array of zeros in this place."""
        return jnp.zeros(self.shape, self.dtype, device=self.sharding if self.committed else None)


class WrappedTree:
    """A pytree whose leaves are replaced as training goes on."""

    def __init__(self, tree: Any) -> None:
        """Flatten the tree. Raise :class:`ParameterError` if a leaf is unreduced."""
        flat, self.treedef = flatten(tree)
        self.paths = [path for path, _ in flat]
        self.leaves = [leaf for _, leaf in flat]
        self.trained: list[Leaf] = []
        for path, leaf in flat:
            if is_unreduced(leaf):
                raise ParameterError(
                    f"{of_params(path)} is {form(leaf)}; expected its sum: jax.sharding.reshard(array, "
                    "NamedSharding(mesh, PartitionSpec()))"
                )

    @property
    def positions(self) -> list[int]:
        """The places of the trained leaves."""
        return [leaf.position for leaf in self.trained]

    @property
    def lacks_some(self) -> bool:
        """True if parameters are released."""
        return any(isinstance(self.leaves[leaf.position], Absent) for leaf in self.trained)

    def now(self) -> Any:
        """Return the tree with its present leaves."""
        return jax.tree_util.tree_unflatten(self.treedef, self.leaves)

    def of(self, leaves: Mapping[int, Any]) -> Any:
        """Return a tree of this structure with these leaves, given by position, and None for the others."""
        return jax.tree_util.tree_unflatten(self.treedef, [leaves.get(i) for i in range(len(self.leaves))])

    def check_alive(self, what: str) -> None:
        """Raise :class:`StateError` if an array's memory was donated.

        In an optax loop arrays that are not trained are the loop's own, and it may donate them.
        """
        for path, leaf in zip(self.paths, self.leaves, strict=True):
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise StateError(
                    f"{what}: {of_params(path)} was donated or deleted; expected "
                    "offloaded.load_params(params) first, with the parameters that the loop has now"
                )

    def leaves_like(self, tree: Any, error: type[OffloadError], what: str) -> tuple[list[Any], Any]:
        """Return the leaves and the structure of a tree whose leaves have these paths. Its node types may differ.

        Raises:
            OffloadError: of type ``error``: the paths differ.
        """
        leaves, treedef = jax.tree_util.tree_flatten(tree, is_leaf=lambda leaf: leaf is None)
        if treedef != self.treedef:
            check_paths(self.paths, flatten(tree)[0], error, what)
        return leaves, treedef
