"""Models of flax and equinox that are fitted to a regression."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(3, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.second = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.second(self.dropout(nnx.relu(self.first(x))))


def regression(model, x, y):
    return ((model(x) - y) ** 2).mean()


def regression_data():
    x = np.random.default_rng(0).standard_normal((32, 3)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(x.sum(1, keepdims=True))


class Perceptron(eqx.Module):
    first: eqx.nn.Linear
    second: eqx.nn.Linear
    activation: object
    name: str = eqx.field(static=True)

    def __call__(self, x):
        return jax.vmap(self.second)(self.activation(jax.vmap(self.first)(x)))
