"""``init()`` makes a model's arrays where ``wrap`` keeps them, so that the model may be larger than one memory.

The function that makes the model is traced once. Then each program computes a few leaves, with no more bytes than the
largest leaf has. XLA leaves out what other leaves need, and shards the rest as these leaves are sharded.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import Mesh, Sharding

from offload_core.config.options import ConfigLike
from offload_core.engine import FLOATING, Names, WeightFiles, translation
from offload_core.errors import ConfigError, ParameterError
from offload_core.ranks.collectives import Collectives, SingleRank
from offload_core.ranks.consistency import combine, fingerprint, heard_by_all
from offload_core.support.checks import kind_of, some_of
from offload_core.support.progress import progress

from .devices.context import refuse_jit, without_context_mesh
from .optax_bridge.words import JaxSettings, resolved
from .placement.as_placed import processes_of
from .placement.placement import placement_for
from .tree.memory_kinds import in_device_memory
from .tree.shards import Box, local_shards, of_parts
from .tree.trees import Mask, dotted_names, flatten, form, is_array, mask_leaves, of_params, to_numpy

Form = jax.ShapeDtypeStruct


def init(
    fun: Any,
    *args: Any,
    weights: str | os.PathLike[str] | None = None,
    names: Names = None,
    config: ConfigLike = None,
    mesh: Mesh | None = None,
    axis: str | None = None,
    shardings: Any = None,
    trainable: Mask | None = None,
    **overrides: Unpack[JaxSettings],
) -> Any:
    """Make a model's arrays where ``wrap`` keeps them: ``wrap(init(init_fn, key, mesh=mesh), mesh=mesh, stage=3)``.

    ``init_fn(key)`` is not computed as one program. Beside the shards there is at most one unsharded leaf at a time,
    or several that together have no more bytes than the largest leaf. The values are those of
    ``jax.jit(init_fn)(key)``; where XLA fuses sums of products otherwise, their last bits may differ. Arrays keep the
    element type of ``init_fn``. (``param_dtype`` is for ``wrap``, whose master weights start from the arrays as they
    are made.) All processes call this with the same arguments.

    Args:
        fun: a function that returns a pytree. It is traced once; leaves that are no arrays are returned as they are.
            With ``weights`` it may be a tree of forms, as ``jax.eval_shape`` returns it.
        args: the function's arguments, as for ``jax.jit(fun)``. Bind others with ``functools.partial``.
        weights: a folder of ``.safetensors`` files that have the arrays, as ``export_safetensors`` and Hugging Face's
            libraries write it. Each process reads only its own part of each array. Real numbers are cast to the element
            type of the tree. Keys of random generators are computed, because such files have none.
        names: from the dotted paths of the tree (``h.0.w``) to the names in ``weights``: a function, or a mapping of
            the paths whose names differ.
        config: the configuration for ``wrap``, which says where arrays lie on ``mesh``; None: that of ``stage=3``.
        mesh, axis: as in ``wrap``. Arrays lie on the mesh as ``wrap`` would put them, and ``wrap`` moves no shard.
        shardings: in place of ``mesh``: shardings, as ``out_shardings`` of ``jax.jit``, in the structure of the tree or
            a prefix of it; or a function from the tree of forms to them. ``wrap`` takes arrays as they lie; for its
            ``offload_param="cpu"`` give ``sharding.with_memory_kind("pinned_host")``. With neither, arrays lie on JAX's
            default device.
        trainable: as in ``wrap``. Leaves that are not trained are replicated on ``mesh``.
        overrides: fields of ``OffloadConfig``.

    Raises:
        ConfigError: ``shardings`` beside ``mesh``; or as in ``wrap``.
        ParameterError: ``fun`` is no function; in all processes: their arguments differ, or ``weights`` lacks an array,
            or has another shape or element type.
        CheckpointError: in all processes: a file of ``weights`` is missing, damaged or cannot be read.
        StateError: under jit.
    """
    refuse_jit("init()", "it puts arrays into memory")
    if _is_function(fun):
        leaves, structure, program = _traced(fun, args)
    else:
        if weights is None or args:
            raise ParameterError(
                f"init: got {kind_of(fun)}, expected a function that returns the parameters: init(init_fn, key); or "
                "their forms, as jax.eval_shape(init_fn, key) returns them, and a folder of weights="
            )
        (leaves, structure), program = jax.tree_util.tree_flatten(fun, is_leaf=lambda leaf: leaf is None), None
        leaves = [Form(leaf.shape, leaf.dtype) if is_array(leaf) else leaf for leaf in leaves]
    tree = jax.tree_util.tree_unflatten(structure, leaves)
    if shardings is None:
        places = _as_wrapped(tree, config, overrides, mesh, axis, trainable)
    elif overrides or any(given is not None for given in (mesh, axis, trainable, config)):
        raise ConfigError(
            "init: shardings= beside mesh=, axis=, trainable= or a configuration, which say where arrays lie, too; "
            "expected shardings= alone, or none"
        )
    else:
        places = _as_given(shardings, tree)
    forms = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Form)}
    given = [place for place in places if place is not None]
    processes = processes_of(max(given, key=lambda place: len(place.device_set))) if given else SingleRank()
    _check_alike(args, processes)
    sizes = {i: form.size * form.dtype.itemsize for i, form in forms.items()}
    with progress("building the model", sum(sizes.values()), rank=processes.rank) as advance:
        if weights is not None:
            with heard_by_all(processes, "init() from files"):
                files = WeightFiles(weights)
                for i, name in _found(tree, forms, files, names, computes_keys=program is not None).items():
                    leaves[i] = _read(files, name, forms[i], places[i])
                    advance(sizes[i])
        if program is not None:
            left = [i for i in forms if isinstance(leaves[i], Form)]
            for group in _groups(left, sizes, places):
                outputs = [[*forms].index(i) for i in group]
                for i, array in zip(group, _computed(program, args, outputs, [places[i] for i in group]), strict=True):
                    leaves[i] = array
                    advance(sizes[i])
    return jax.tree_util.tree_unflatten(structure, leaves)


def _is_function(fun: Any) -> bool:
    return callable(fun) and jax.tree_util.all_leaves([fun])  # a module of forms is callable, too


def _traced(fun: Any, args: Sequence[Any]) -> tuple[list[Any], Any, ClosedJaxpr]:
    """Return the function's leaves, with a form in place of each array, their structure, and the program that computes
    the arrays."""
    returned: list[Any] = []

    def arrays(*args: Any) -> list[Any]:
        returned[:] = jax.tree_util.tree_flatten(fun(*args), is_leaf=lambda leaf: leaf is None)
        return [leaf for leaf in returned[0] if is_array(leaf)]

    program, forms = jax.make_jaxpr(arrays, return_shape=True)(*args)
    leaves, structure = returned
    each = iter(forms)
    return [next(each) if is_array(leaf) else leaf for leaf in leaves], structure, program


def _check_alike(args: Sequence[Any], processes: Collectives) -> None:
    """Raise :class:`ParameterError` in all processes if their arguments differ: each would compute parts of another
    model."""
    if processes.world_size == 1:
        return
    values = [to_numpy(value) for value in jax.tree.leaves(args) if getattr(value, "is_fully_addressable", True)]
    words = [fingerprint(f"{np.shape(value)} {np.asarray(value).tobytes().hex()}") for value in values]
    if not combine(processes, "the arguments of init()", same=[fingerprint(str(words))]).alike.all():
        raise ParameterError(
            "init: the arguments are not the same in all processes; expected the same, such as one key: they compute "
            "one model together"
        )


# --- where arrays lie ----------------------------------------------------------------------------------


@without_context_mesh
def _as_wrapped(
    tree: Any, config: ConfigLike, overrides: Any, mesh: Mesh | None, axis: str | None, trainable: Mask | None
) -> list[Sharding | None]:
    """Return the sharding that ``wrap`` would give each leaf; None: JAX's default device."""
    if config is None and mesh is not None:
        overrides = {"stage": 3, **overrides}
    settings = resolved(config, overrides, world_size=mesh.size if isinstance(mesh, Mesh) else 1)
    trained = mask_leaves(trainable, tree, "trainable")
    flat = flatten(tree)[0]
    placement = placement_for(settings, mesh, axis, [leaf for _, leaf in flat])
    return [
        placement.sharding(leaf, trained=trains and jnp.issubdtype(leaf.dtype, jnp.inexact))
        if isinstance(leaf, Form)
        else None
        for (_, leaf), trains in zip(flat, trained, strict=True)
    ]


def _as_given(shardings: Any, tree: Any) -> list[Sharding | None]:
    if callable(shardings):
        shardings = shardings(tree)
    try:
        full = jax.tree.broadcast(shardings, tree, is_leaf=lambda leaf: leaf is None)
    except ValueError as error:
        raise ParameterError(
            f"init: the structure of shardings differs from the parameters'; expected one for every leaf\n{error}"
        ) from None
    found = flatten(full)[0]
    for (path, leaf), (_, place) in zip(flatten(tree)[0], found, strict=True):
        if isinstance(leaf, Form) and not (place is None or isinstance(place, Sharding)):
            raise ParameterError(
                f"init: shardings: {of_params(path)} has {kind_of(place)}, expected a jax.sharding.Sharding, such as "
                "NamedSharding(mesh, PartitionSpec('x')), or None"
            )
    return [place for _, place in found]


# --- computing -----------------------------------------------------------------------------------------


def _groups(
    left: Sequence[int], sizes: Mapping[int, int], places: Sequence[Sharding | None]
) -> Iterator[tuple[int, ...]]:
    """Yield groups of leaves, by position. One program computes a group. The leaves of a group lie on the same devices,
    and together take no more bytes than the largest leaf of the tree."""
    most = max((sizes[i] for i in left), default=0)
    for _, on_these in groupby(left, lambda i: None if (place := places[i]) is None else place.device_set):
        group: list[int] = []
        for i in on_these:
            if group and sum(sizes[j] for j in group) + sizes[i] > most:
                yield tuple(group)
                group = []
            group.append(i)
        yield tuple(group)


def _computed(
    program: ClosedJaxpr, args: Sequence[Any], outputs: Sequence[int], places: Sequence[Sharding | None]
) -> list[jax.Array]:
    """Return some of a program's outputs, each in its place. They are there when this returns."""

    def some(*values: Any) -> list[Any]:
        found = jaxpr_as_fun(program)(*values)
        return [found[i] for i in outputs]

    on_devices = [None if place is None else in_device_memory(place) for place in places]
    arrays = jax.jit(some, out_shardings=None if None in on_devices else on_devices)(*jax.tree.leaves(args))
    placed = [a if place is None else jax.device_put(a, place) for a, place in zip(arrays, places, strict=True)]
    return jax.block_until_ready(placed)  # the next program needs the memory


# --- reading -------------------------------------------------------------------------------------------


def _found(
    tree: Any, forms: Mapping[int, Form], files: WeightFiles, names: Names, *, computes_keys: bool
) -> dict[int, str]:
    """Return the name in the files of each array that is read from them."""
    flat, dotted, name_of = flatten(tree)[0], dotted_names(tree), translation(names)
    found = {}
    for i, wanted in forms.items():
        if computes_keys and jnp.issubdtype(wanted.dtype, jax.dtypes.prng_key):
            continue
        path, name = of_params(flat[i][0]), name_of(dotted[i])
        if name not in files.tensors:
            others = some_of([other for other in files.tensors if other not in dotted] or [*files.tensors])
            raise ParameterError(
                f"init: {path} is {name!r} in weights, and {files.folder} has no such tensor; expected one of its "
                f"names from names=: {others}"
            )
        stored = files.tensors[name]
        castable = stored.dtype in FLOATING and jnp.issubdtype(wanted.dtype, jnp.floating)
        if stored.shape != wanted.shape or not (stored.dtype == wanted.dtype or castable):
            raise ParameterError(
                f"init: {name!r} in {files.folder} is {form(stored)}, expected {form(wanted)} for {path}"
            )
        found[i] = name
    return found


def _read(files: WeightFiles, name: str, wanted: Form, place: Sharding | None) -> jax.Array:
    """Return an array of this form in its place, made of this process's parts. It is there when this returns."""

    def part(box: Box) -> np.ndarray:
        with np.errstate(all="ignore"):  # a number that is too large becomes an inf
            return files.read(name, box).astype(wanted.dtype, copy=False)

    if place is None:
        array = jnp.asarray(part(tuple((0, n) for n in wanted.shape)))
    else:
        parts = {shard.box: part(shard.box) for shard in local_shards(place, wanted.shape, 0)}
        array = of_parts(wanted.shape, place, parts)
    return array.block_until_ready()  # the next array needs the host's memory
