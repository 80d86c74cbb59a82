"""Checkpoints of a tree: its arrays and settings beside the states that the core's ``checkpoints.py`` saves."""

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from offload_core.dtypes import SAFETENSORS_NAMES
from offload_core.engine import (
    ArrayType,
    Contents,
    Engine,
    Names,
    RandomState,
    Source,
    Target,
    TrainingRun,
    Want,
    translation,
)
from offload_core.errors import CheckpointError
from offload_core.layout.regions import Region

from ..devices.device import read
from ..placement.placement import Placement
from ..tree.shards import local_shards, on_devices
from ..tree.trees import dotted_names, from_numpy, is_array, is_key, numpy_form
from ..tree.wrapped_tree import Absent, WrappedTree


def _is_key_of(kind: str, value: Any) -> bool:
    return is_key(value) and jax.random.key_impl(value) == kind


def _to_numpy(array: jax.Array) -> np.ndarray:
    if not (array.is_fully_addressable or array.is_fully_replicated):
        raise CheckpointError(
            f"an array of {array.dtype}{list(array.shape)} that lies in several processes; expected an array that each "
            "process has whole"
        )
    return np.asarray(array)


def _key(kind: str, data: np.ndarray) -> jax.Array:
    return jax.random.wrap_key_data(jnp.asarray(data), impl=kind)


ARRAYS = [
    ArrayType("jax", lambda value: isinstance(value, jax.Array) and not is_key(value), _to_numpy, jnp.asarray),
    *(
        ArrayType(
            f"jax key {kind}",
            partial(_is_key_of, kind),
            lambda key: _to_numpy(jax.random.key_data(key)),
            partial(_key, kind),
        )
        for kind in ("threefry2x32", "rbg", "unsafe_rbg")
    ),
]


class TreeCheckpoints:
    """The checkpoints of a wrapped tree; loading puts new leaves in it."""

    def __init__(self, core: Engine, placement: Placement, tree: WrappedTree) -> None:
        self._core, self._checkpoints, self._parameters = core, core.checkpoints, core.parameters
        self.wait, self.has_none = self._checkpoints.wait, self._checkpoints.has_none
        self._placement = placement
        self._paths = dotted_names(tree.now())
        self._tree = tree
        self._leaves = tree.leaves
        self._trained = [leaf.position for leaf in tree.trained]

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        stateful: Mapping[str, Any] | None,
        extras: Any,
        keep: int | None,
        wait: bool,
    ) -> Path:
        """Save the tree, and return the checkpoint's folder."""
        updates = self._core.update_count
        with self._checkpoints.together("save"):
            self._tree.check_alive("save_checkpoint")
            names = self._names(None)
            untrained = {names[i]: i for i in self._untrained()}
            shapes = {name: _form(name, self._leaves[i]) for name, i in untrained.items()}
            first = self._core.rank == 0
            sources = [s for name, i in untrained.items() for s in _sources(name, self._leaves[i], first=first)]
        run, state = TrainingRun(stateful, extras, RandomState()), {"groups": None}
        trained = self._of_each(names)
        contents = Contents(trained, sources, shapes, run, state, types=ARRAYS, front_end="jax", parts=True)
        return self._checkpoints.save(folder, contents, self._tensors(), step=updates, keep=keep, wait=wait)

    def load(
        self,
        path: str | os.PathLike[str],
        publish: Callable[[], None],
        *,
        stateful: Mapping[str, Any] | None,
        names: Names,
        random_state: bool,
    ) -> Any:
        """Load a checkpoint that has states of these objects, and return its extras.

        Args:
            publish: brings master weights to the trained leaves.
        """
        with self._checkpoints.together("load"):
            theirs = self._names(names)
            targets = [self._target(theirs[i], i) for i in self._untrained()]
        run = TrainingRun(stateful, random=RandomState() if random_state else None)
        trained, tensors = self._of_each(theirs), self._tensors()
        return self._checkpoints.load(path, trained, targets, tensors, publish, ARRAYS, run=run).state["extras"]

    # --- the tree's arrays ---------------------------------------------------------------------------

    def _names(self, names: Names) -> dict[int, str]:
        """Return the name in a checkpoint of each array, by its number."""
        translated: dict[int, str] = {}
        seen: dict[str, str] = {}
        for i in sorted([*self._trained, *self._untrained()]):
            path = self._paths[i]
            translated[i] = name = translation(names)(path)
            if name in seen:
                raise CheckpointError(
                    f"two arrays of the tree are named {name!r}: {seen[name]!r} and {path!r}, their paths' keys joined "
                    "by dots; expected different names"
                )
            seen[name] = path
        return translated

    def _untrained(self) -> list[int]:
        trained = set(self._trained)
        return [i for i, leaf in enumerate(self._leaves) if i not in trained and is_array(leaf)]

    def _of_each(self, names: Mapping[int, str]) -> list[str]:
        """Return the name of each of the core's parameters."""
        return [names[leaf.position] for leaf in self._tree.trained for _ in leaf.params]

    def _tensors(self) -> list[Any]:
        found: list[Any] = []
        for leaf in self._tree.trained:
            array = self._leaves[leaf.position]
            if self._parameters.released or isinstance(array, Absent) or array.is_deleted():
                found += [None for _ in leaf.params]  # master weights are read and written
            else:
                found += self._placement.start([leaf], [array])
        return found

    def _target(self, name: str, i: int) -> Target:
        shape, dtype = _form(name, self._leaves[i])
        staged: list[np.ndarray] = []

        def wants(kind: str) -> Iterable[Want]:
            array = np.empty(shape, dtype)
            staged.append(array)
            return [Want(name, kind, Region(shape, 0, array.size), array.reshape(-1))]

        def loaded() -> None:
            self._leaves[i] = self._placement.pass_through(from_numpy(staged.pop(), self._leaves[i]))

        return Target(name, shape, wants, loaded, dtype)


def _form(name: str, leaf: Any) -> tuple[tuple[int, ...], np.dtype]:
    shape, dtype = numpy_form(leaf)
    if dtype not in SAFETENSORS_NAMES:
        raise CheckpointError(
            f"{name!r} is an array of {dtype}; expected one of {', '.join(map(str, SAFETENSORS_NAMES))}: a checkpoint "
            "cannot hold it"
        )
    return shape, dtype


def _sources(name: str, leaf: Any, *, first: bool) -> list[Source]:
    """Return the parts of an untrained array that this process saves. The first process saves every array that it holds
    whole."""
    shape, dtype = _form(name, leaf)
    if not isinstance(leaf, jax.Array):
        region = Region(shape, 0, int(np.prod(shape, dtype=np.int64)))
        return [Source.of(name, "param", region, np.ascontiguousarray(leaf))] if first else []
    if leaf.is_fully_replicated:
        if not first:
            return []
        leaf = leaf.addressable_data(0)
    array = jax.random.key_data(leaf) if is_key(leaf) else leaf
    if array.is_fully_addressable:
        return [Source(name, "param", Region(shape, 0, array.size), dtype, partial(_read, array))] if first else []
    on = on_devices(array)
    return [
        Source(name, "param", region, dtype, partial(_read, on[shard.primary]))
        for shard in local_shards(array.sharding, array.shape, 0)
        if shard.counted
        for _, region in shard.regions(0, shard.numel)
    ]


def _read(array: jax.Array, start: int, out: np.ndarray) -> None:
    out[...] = read(array, start, start + out.size)
