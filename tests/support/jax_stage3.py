"""A model whose parameters are cut over the devices, and its run against one device."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from frontends.jax import RankGradients, ScaledGradients, gather_params, gathered, wrap
from tests.support.jax_meshes import HYPER, arrays_of, assert_same_tree, averaged, split

W = 4
"""Ranks, where a law does not say another number."""
SHAPES = {
    "embed": (33, 24),
    "layers": {"w": (3, 24, 24), "b": (3, 24)},
    "odd": (5, 7),  # nothing of it divides: it stays whole
    "small": (8,),
    "empty": (0, 24),
}
tree_of = functools.partial(arrays_of, SHAPES)
STAGE3 = {"stage": 3, "param_persistence_threshold": 20}
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter", "collective-permute", "collective-broadcast")


def dim_of(name, world_size):
    """The dimension that a parameter is cut along, or None, as ``wrap`` says."""
    divided = {"embed": 24, "w": 24, "b": 24, "odd": 7}.get(name)
    return None if divided is None or divided % world_size else 1


def names_of(tree):
    return [path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def map_named(function, tree):
    return jax.tree_util.tree_map_with_path(lambda path, leaf: function(path[-1].key, leaf), tree)


def cut(array, mesh, dim):
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, P(*[None] * dim, "dp")), lambda i: array[i])


def gradients_of(stacked, mesh):
    """Return the result of ``value_and_grad`` for these gradients of all ranks."""

    def one(name, g):
        dim = dim_of(name, mesh.devices.size)
        return split(g, mesh) if dim is None else cut(averaged(g), mesh, dim)

    return RankGradients(map_named(one, stacked))


def assert_placed(params, mesh, memory_kind="device"):
    """Each device has its slice of what is cut, and all of the rest."""
    for name, leaf in zip(names_of(params), jax.tree.leaves(params), strict=True):
        dim = dim_of(name, mesh.devices.size)
        spec = P() if dim is None else P(*[None] * dim, "dp")
        kind = "device" if dim is None else memory_kind
        assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, spec, memory_kind=kind), leaf.ndim), name
        ranks = {device: rank for rank, device in enumerate(mesh.devices.flat)}
        for shard in leaf.addressable_shards:
            if dim is not None and len(ranks) > 1:
                n = leaf.shape[dim] // mesh.devices.size
                assert shard.index[dim] == slice(ranks[shard.device] * n, (ranks[shard.device] + 1) * n), name


def whole(tree, offloaded):
    """In NumPy, what other processes hold included; ``tree`` is or was ``offloaded.params``."""
    leaves = jax.tree.unflatten(jax.tree.structure(tree), offloaded._tree.trained)
    return jax.tree.map(offloaded._placement.to_numpy, leaves, tree)


def loss_fn(params, x):
    """Stacked layers, and one parameter that is used twice."""
    embed = gather_params(params["embed"])
    body = gathered(lambda layer, x: jnp.tanh(x @ layer["w"] + layer["b"]))
    x, _ = lax.scan(lambda x, layer: (body(layer, x), None), jnp.tanh(x @ embed), params["layers"])
    return (x**2).mean() + ((x @ embed.T) ** 2).mean() + (params["odd"] ** 2).mean() + params["small"].sum() * x.sum()


def assert_equals_one_device(mesh, dtype, steps=3, **fields):
    """Several steps of random gradients, some missing, against one device and the averaged gradients."""
    world_size = mesh.devices.size
    micro_steps = fields.get("gradient_accumulation_steps", 1)
    fields |= {"mask": functools.partial(jax.tree.map, lambda p: p.ndim > 1)}
    ours = wrap(tree_of(0), **HYPER, **STAGE3, mesh=mesh, param_dtype=dtype, **fields)
    memory_kind = "device" if fields.pop("offload_param", None) is None else "pinned_host"
    with jax.default_device(jax.local_devices()[0]):
        theirs = wrap(tree_of(0), **HYPER, param_dtype=dtype, **fields)
    assert_placed(ours.params, mesh, memory_kind)
    for step in range(steps):
        for micro_step in range(micro_steps):
            stacked = tree_of(100 * step + micro_step, jnp.dtype(dtype), (world_size,), scale=3.0**-step)
            grads, mean = gradients_of(stacked, mesh), jax.tree.map(averaged, stacked)
            if step % 2:
                grads.tree["layers"]["w"] = mean["layers"]["w"] = None
            if step == 2:
                grads.tree["embed"] = mean["embed"] = None
            if ours._core.scaler is not None:
                scale = ours._core.loss_scale
                grads, mean = ScaledGradients(grads, scale), ScaledGradients(mean, scale)
            assert_same_tree(whole(ours.update(grads), ours), theirs.update(mean))
        assert repr(ours.report) == repr(theirs.report)
        assert ours.report.updated
    assert_placed(ours.params, mesh, memory_kind)
    assert {leaf.dtype for leaf in jax.tree.leaves(ours.params)} == {jnp.dtype(dtype)}
    assert_same_tree(ours.to_pytree(), theirs.to_pytree())
    return ours
