"""A small JAX model with its batches and its loss, optax run eagerly, and comparisons bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support import oracles
from tests.support.jax_meshes import arrays_of, leaves_of

SHAPES = {"embed": (33, 17), "layers": [{"w": (17, 3), "b": (3,)}, {"w": (3, 1), "b": ()}]}
HYPER = {"lr": 1e-2, "weight_decay": 0.1}


@pytest.fixture(autouse=True)
def on_the_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def random_tree(seed, dtype=jnp.float32, scale=1.0, shapes=SHAPES):
    return jax.tree.map(jnp.asarray, arrays_of(shapes, seed, jnp.dtype(dtype), scale=scale))


def loss_fn(params, x):
    """A model whose gradients are nowhere near the subnormals, which XLA flushes."""
    x = jnp.tanh(x @ params["embed"])
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return (x**2).sum() + 1


def batch(i):
    return jnp.asarray(np.random.default_rng(i).standard_normal((4, 33)), jnp.float32)


def assert_same_tree(got, expected):
    """The same arrays, bit for bit, at the same paths."""
    got, expected = leaves_of(got), leaves_of(expected)
    assert [path for path, _ in got] == [path for path, _ in expected]
    for (path, x), (_, y) in zip(got, expected, strict=True):
        assert x.shape == y.shape, path
        oracles.assert_same_bits(path, x.reshape(-1), y.reshape(-1))


class Eager:
    """The reference: an optax transformation on fp32 parameters, outside jit."""

    def __init__(self, tx, params):
        self.tx, self.params, self.state = tx, params, tx.init(params)

    def update(self, grads):
        updates, self.state = self.tx.update(grads, self.state, self.params)
        self.params = optax.apply_updates(self.params, updates)

    @property
    def adam(self):
        return next(s for s in self.state if isinstance(s, optax.ScaleByAdamState))


def replaced(tree, path, value):
    """A tree with another leaf at a path."""
    return jax.tree_util.tree_map_with_path(
        lambda at, leaf: value(leaf) if jax.tree_util.keystr(at) == path else leaf, tree
    )
