"""A pytree as it was wrapped: its structure, its leaves as they are now, and which of them are trained."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from offload_core.errors import OffloadError

from .shard_layout import ShardLayout
from .trees import check_paths, flatten


@dataclass(frozen=True)
class Leaf:
    """A parameter: where it is among the tree's leaves, and what its array must be."""

    position: int
    path: str
    shape: tuple[int, ...]
    dtype: Any
    layout: ShardLayout | None
    """How it is cut over ranks (stage 3)."""


class WrappedTree:
    """A pytree whose leaves are replaced as training goes on."""

    def __init__(self, tree: Any) -> None:
        flat, self.treedef = flatten(tree)
        self.paths = [path for path, _ in flat]
        self.leaves = [leaf for _, leaf in flat]
        self.trained: list[Leaf] = []

    def now(self) -> Any:
        """The tree with its present leaves."""
        return jax.tree_util.tree_unflatten(self.treedef, self.leaves)

    def of(self, leaves: Mapping[int, Any]) -> Any:
        """A tree of this structure with these leaves, by position, and None for the others."""
        return jax.tree_util.tree_unflatten(self.treedef, [leaves.get(i) for i in range(len(self.leaves))])

    def leaves_like(self, tree: Any, error: type[OffloadError], what: str) -> tuple[list[Any], Any]:
        """The leaves of a tree of this structure, and its own, which may be of other node types; else raise."""
        flat, treedef = flatten(tree)
        if treedef != self.treedef:
            check_paths(self.paths, flat, error, what)
        return [leaf for _, leaf in flat], treedef
