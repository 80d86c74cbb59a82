"""A pytree's weights as Hugging Face's libraries read them."""

import os
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from offload_core.dtypes import BY_NAME, SAFETENSORS_NAMES
from offload_core.engine import Engine, Weight, export_weights
from offload_core.errors import ParameterError
from offload_core.support import checks

from ..tree.trees import is_array, is_key


class WholeLeaf(Protocol):
    def __call__(self, position: int, *, master: bool, wanted: bool) -> np.ndarray | None:
        """The leaf of this number, or with ``master`` its master weights if it has any; None where it is not wanted.

        All processes call this, also those that do not want the leaf.
        """


def export_safetensors(
    tree: Any,
    core: Engine,
    whole_leaf: WholeLeaf,
    folder: str | os.PathLike[str],
    *,
    max_shard_bytes: int,
    dtype: str | None,
) -> None:
    """As ``OffloadedParams.export_safetensors``."""
    if dtype is not None:
        checks.choice("dtype", dtype, BY_NAME)
    target = None if dtype is None else BY_NAME[dtype].numpy
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: leaf is None)[0]
    weights = [
        _weight(jax.tree_util.keystr(path, simple=True, separator="."), i, leaf, target, whole_leaf)
        for i, (path, leaf) in enumerate(flat)
        if is_array(leaf) and not is_key(leaf)
    ]
    export_weights(folder, weights, max_shard_bytes=max_shard_bytes, collectives=core.collectives)


def _weight(name: str, position: int, leaf: Any, target: np.dtype | None, whole_leaf: WholeLeaf) -> Weight:
    if not name:
        raise ParameterError("export_safetensors: the tree is one array and has no name; expected a dict of arrays")
    dtype = target if target is not None and jnp.issubdtype(leaf.dtype, jnp.floating) else np.dtype(leaf.dtype)
    if dtype not in SAFETENSORS_NAMES:
        known = ", ".join(known.name for known in SAFETENSORS_NAMES)
        raise ParameterError(f"export_safetensors: {name!r} has dtype {dtype}, expected one of {known}")

    def read(wanted: bool) -> np.ndarray | None:
        value = whole_leaf(position, master=target is not None, wanted=wanted)
        return None if value is None else np.ascontiguousarray(value.astype(dtype, copy=False))

    return Weight(name, dtype, leaf.shape, read)
