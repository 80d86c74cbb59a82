"""A model whose parameters every device holds, and its run against one device."""

import functools

import jax
import jax.numpy as jnp

from frontends.jax import RankGradients, ScaledGradients, wrap
from tests.support.jax_meshes import HYPER, arrays_of, assert_same_replicas, assert_same_tree, averaged, split

SHAPES = {"embed": (33, 17), "layers": [{"w": (17, 3), "b": (3,)}], "scale": (), "empty": (0, 2)}
tree_of = functools.partial(arrays_of, SHAPES)
"""The model's arrays, or gradients; in NumPy."""


def loss_fn(params, x):
    x = jnp.tanh(x @ params["embed"])
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return (x**2).mean() + params["scale"] ** 2 + 1


def assert_equals_one_device(mesh, dtype, steps=3, **fields):
    """Several steps of random gradients, some missing, against one device and the averaged gradients."""
    world_size = mesh.devices.size
    micro_steps = fields.get("gradient_accumulation_steps", 1)
    start = tree_of(0)
    fields |= {"mask": functools.partial(jax.tree.map, lambda p: p.ndim > 1)}
    ours = wrap(start, **HYPER, mesh=mesh, param_dtype=dtype, **fields)
    with jax.default_device(jax.local_devices()[0]):
        theirs = wrap(start, **HYPER, param_dtype=dtype, **fields)
    scale = 1.0
    for step in range(steps):
        for micro_step in range(micro_steps):
            grads = tree_of(100 * step + micro_step, jnp.dtype(dtype), (world_size,), scale=3.0**-step)
            mean = jax.tree.map(averaged, grads)
            grads = split(grads, mesh)
            if step % 2:
                grads["layers"][0]["w"] = mean["layers"][0]["w"] = None
            if step == 2:
                grads["embed"] = mean["embed"] = None
            grads = RankGradients(grads)
            if ours._core.scaler is not None:
                scale = ours._core.loss_scale
                grads, mean = ScaledGradients(grads, scale), ScaledGradients(mean, scale)
            params = ours.update(grads)
            expected = theirs.update(mean)
            assert_same_tree(params, expected)
        assert repr(ours.report) == repr(theirs.report)
        assert ours.report.updated
    assert_same_replicas(params, mesh)
    assert_same_tree(ours.to_pytree(), theirs.to_pytree())
    return ours
