"""Pytrees as users give them: leaves are parameters, other arrays or neither, and have a form in NumPy."""

import functools
import sys
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from offload_core.dtypes import BY_NUMPY
from offload_core.errors import OffloadError, ParameterError
from offload_core.support.checks import kind_of

from .memory_kinds import start_to_host

Mask = Any
"""A pytree of booleans with the parameters' structure or a prefix of it, or a function from the parameters to one."""

ROOT = "the whole tree"
"""The path of a tree that is a single leaf."""


def of_params(path: str, name: str = "params") -> str:
    """Return the name of a leaf in an error: ``params['w']``, or ``params`` if the tree is a single leaf."""
    return name if path == ROOT else name + path


ARRAY = jax.Array | np.ndarray | np.generic
"""The types of leaves that are arrays."""

_TRACED = object()


class Static:
    """The leaves of a tree that jit must not trace, as a hashable argument; arrays are traced."""

    def __init__(self, treedef: Any, leaves: tuple[Any, ...]) -> None:
        self.treedef = treedef
        self._leaves = leaves

    @classmethod
    def split(cls, treedef: Any, leaves: Sequence[Any]) -> tuple["Static", list[Any]]:
        marked = tuple(_TRACED if isinstance(leaf, ARRAY) else leaf for leaf in leaves)
        return cls(treedef, marked), [leaf for leaf, mark in zip(leaves, marked, strict=True) if mark is _TRACED]

    def merge(self, traced: Sequence[Any]) -> list[Any]:
        arrays = iter(traced)
        return [next(arrays) if leaf is _TRACED else leaf for leaf in self._leaves]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self.treedef == other.treedef and self._leaves == other._leaves

    def __hash__(self) -> int:
        return hash((self.treedef, self._leaves))


def is_array(leaf: Any) -> bool:
    return isinstance(leaf, ARRAY)


def flatten(tree: Any) -> tuple[list[tuple[str, Any]], Any]:
    """Return leaves with their paths. None is a leaf here: gradients have it for a leaf that is not trained."""
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: leaf is None)
    return [(jax.tree_util.keystr(path) or ROOT, leaf) for path, leaf in flat], treedef


def dotted_names(tree: Any) -> list[str]:
    """Return the names of the leaves that :func:`flatten` gives, as torch would name them: ``h.0.w``."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: leaf is None)
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in flat]


def check_paths(expected: Sequence[str], flat: Sequence[tuple[str, Any]], error: type[OffloadError], what: str) -> None:
    """Raise ``error`` for the first leaf whose path differs. Trees of other node types pass if their paths are equal.

    One of the trees may have a leaf in a box, as in a flax.nnx Variable: ``['w']`` is the same as ``['w'].value``.
    """
    for e, g in zip_longest(expected, [path for path, _ in flat], fillvalue="nothing"):
        if g not in (e, f"{e}.value") and e != f"{g}.value":
            got, expected = ("a single leaf" if path == ROOT else path for path in (g, e))
            raise error(f"{what}: the tree has {got} where {expected} was expected; expected the wrapped structure")


def form(value: Any) -> str:
    """Return the words for a leaf in an error: dtype and shape, or its type."""
    if not hasattr(value, "dtype"):
        return kind_of(value)
    return f"{value.dtype}{list(value.shape)}" + " that JAX has marked unreduced" * is_unreduced(value)


def check_form(what: str, path: str, value: Any, like: Any, hint: str = "") -> None:
    """Raise :class:`ParameterError` unless a value has the shape and dtype of the parameter that it stands for."""
    got, expected = form(value), form(like)
    if got != expected:
        raise ParameterError(f"{what}: {of_params(path)} is {got}, expected {expected}, as in offloaded.params{hint}")


def is_parameter(path: str, leaf: Any) -> bool:
    if not is_array(leaf) or not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return False
    if isinstance(leaf, jax.core.Tracer):
        raise ParameterError(f"{path}: wrap() inside jit, grad or vmap; expected concrete arrays: call it outside")
    if leaf.dtype not in BY_NUMPY:
        raise ParameterError(
            f"{path} has dtype {leaf.dtype}, expected float32, bfloat16 or float16: convert it (.astype(jnp.float32))"
        )
    return True


def parameter_positions(paths: Sequence[str], leaves: Sequence[Any], trained: Sequence[bool]) -> list[int]:
    """Return the numbers of the leaves that are parameters and to be trained.

    Raises:
        ParameterError: there is none, or one cannot be trained.
    """
    positions = [i for i, leaf in enumerate(leaves) if trained[i] and is_parameter(paths[i], leaf)]
    if not positions:
        some = [f"{path}: {form(leaf)}" for path, leaf in zip(paths[:3], leaves, strict=False)]
        raise ParameterError(
            "params: no leaf is a trainable floating-point array; expected at least one; got "
            f"{', '.join(some) or 'an empty tree'}{', …' if len(leaves) > 3 else ''}"
            f"{', and trainable= excludes all' if trained and not any(trained) else ''}"
        )
    return positions


def check_nnx(params: Any, *, chosen: bool) -> None:
    """Raise :class:`ParameterError` if a tree holds values that a flax.nnx model changes in its forward.

    The tree that comes back from an update has those values as they were wrapped: dropout would draw the same mask in
    each step, and statistics would be trained and decayed like weights.

    Args:
        chosen: True if the user says which leaves are trained; only whole modules are refused then.
    """
    nnx = sys.modules.get("flax.nnx")  # else the tree has nothing of it
    if nnx is None:
        return
    flat = jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda node: isinstance(node, nnx.Module | nnx.Variable))
    for path, node in flat:
        where = "params" + jax.tree_util.keystr(path)
        if isinstance(node, nnx.Module):
            raise ParameterError(
                f"{where} is an nnx.Module ({type(node).__name__}), which holds more than parameters and may hold one "
                "twice; expected its parameters: nnx.state(model, nnx.Param), or the second part of "
                "nnx.split(model, nnx.Param, ...)"
            )
        if not chosen and isinstance(node, nnx.Variable) and not isinstance(node, nnx.Param):
            raise ParameterError(
                f"{where} is an nnx.{type(node).__name__}, which the model's forward changes and wrap() would hold; "
                "expected nnx.Param alone: wrap nnx.state(model, nnx.Param) and keep the rest, or say which leaves to "
                "train with trainable="
            )


def mask_leaves(mask: Mask | None, params: Any, name: str) -> list[bool]:
    if mask is None:
        mask = True
    elif callable(mask) and jax.tree_util.all_leaves([mask]):  # a module of booleans is callable, too
        mask = mask(params)
    try:
        full = jax.tree.broadcast(mask, params, is_leaf=lambda leaf: leaf is None)
    except ValueError as error:
        raise ParameterError(
            f"{name}: its structure differs from the parameters'; expected a boolean for every leaf\n{error}"
        ) from None
    flags = [leaf for _, leaf in flatten(full)[0]]
    for (path, leaf), flag in zip(flatten(params)[0], flags, strict=True):
        if not (_is_boolean(flag) or leaf is None):
            hint = "; compare labels first: jax.tree.map(lambda label: label == ..., labels)" * isinstance(flag, str)
            raise ParameterError(f"{name}: {of_params(path)} has {flag!r}, expected True or False{hint}")
    return [bool(flag) for flag in flags]


def _is_boolean(flag: Any) -> bool:
    return isinstance(flag, bool) or (is_array(flag) and flag.dtype == bool and flag.size == 1)


def is_key(leaf: Any) -> bool:
    """True if the leaf is an array of ``jax.random.key`` (flax.nnx state has them). NumPy cannot hold it."""
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def is_unreduced(leaf: Any) -> bool:
    """True if an array stands for the sum of its devices' parts, which JAX has not made yet."""
    spec = getattr(getattr(leaf, "sharding", None), "spec", None)
    return bool(getattr(spec, "unreduced", None))


def summed(array: Any) -> Any:
    """Return an array that is unreduced as the sum of its devices' parts; others as they are."""
    if not is_unreduced(array):
        return array
    mesh, kind = array.sharding.mesh, array.sharding.memory_kind
    with jax.set_mesh(mesh):
        whole = NamedSharding(mesh, PartitionSpec(*array.sharding.spec.partitions), memory_kind=kind)
        return jax.sharding.reshard(array, whole)


def to_numpy(leaf: Any) -> Any:
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array):
        leaf = start_to_host(leaf)  # an array would keep the host copy that NumPy makes of it
    return np.array(leaf) if is_array(leaf) else leaf


def numpy_shape(leaf: Any) -> tuple[int, ...]:
    """Return the shape of ``to_numpy(leaf)``."""
    return numpy_form(leaf)[0]


def numpy_form(leaf: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Return the shape and element type of ``to_numpy(leaf)``."""
    of = _key_data(leaf.shape, leaf.dtype) if is_key(leaf) else leaf
    return of.shape, np.dtype(of.dtype)


@functools.cache
def _key_data(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Return the form of the data of such keys. JAX would trace it anew for each call, and keep each trace."""
    return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))


def from_numpy(value: Any, like: Any) -> Any:
    """Make a new array of a value of ``to_numpy``, with the type of ``like``.

    It lies where ``like`` lies, if this process has all of that array.
    """
    if isinstance(like, np.ndarray):
        return np.array(value, like.dtype)
    if isinstance(like, np.generic):
        return np.asarray(value, like.dtype)[()]
    if is_key(like):
        array = jax.random.wrap_key_data(jnp.array(value), impl=jax.random.key_impl(like))
    else:
        array = np.array(value, like.dtype)
    return put(array, like.sharding) if like.committed else jnp.asarray(array)


def put(value: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """Place a value that this process has whole. All processes must have the same value."""
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    places = sharding.addressable_devices_indices_map(value.shape)
    kind = sharding.memory_kind
    local = jax.device_put(
        [value[index] for index in places.values()],
        [SingleDeviceSharding(device, memory_kind=kind) for device in places],
    )
    return jax.make_array_from_single_device_arrays(value.shape, sharding, local)
