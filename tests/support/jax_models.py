"""A small JAX model with its batches and its loss, optax run eagerly, and comparisons bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support import oracles

SHAPES = {"embed": (33, 17), "layers": [{"w": (17, 3), "b": (3,)}, {"w": (3, 1), "b": ()}]}
HYPER = {"lr": 1e-2, "weight_decay": 0.1}


@pytest.fixture(autouse=True)
def on_the_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def random_tree(seed, dtype=jnp.float32, scale=1.0):
    rng = np.random.default_rng(seed)
    shapes = functools.partial(jax.tree.map, is_leaf=lambda s: isinstance(s, tuple))
    return shapes(lambda s: jnp.asarray((scale * rng.standard_normal(s)).astype(np.float32)).astype(dtype), SHAPES)


def loss_fn(params, x):
    """A model whose gradients are nowhere near the subnormals, which XLA flushes."""
    x = jnp.tanh(x @ params["embed"])
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return (x**2).sum() + 1


def batch(i):
    return jnp.asarray(np.random.default_rng(i).standard_normal((4, 33)), jnp.float32)


def flat_arrays(tree):
    return [(jax.tree_util.keystr(path), np.array(leaf)) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def assert_same_tree(got, expected):
    """The same arrays, bit for bit, at the same paths."""
    got, expected = flat_arrays(got), flat_arrays(expected)
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
