"""Modules of flax and equinox as trees of parameters, and orbax."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as orbax
import pytest
import safetensors.numpy
from flax import nnx

from frontends.jax import wrap
from offload_core import ParameterError
from tests.support.jax_models import HYPER, Eager, assert_same_tree, random_tree
from tests.support.jax_modules import Net, Perceptron, regression, regression_data


def test_a_flax_nnx_model_trains():
    """Dropout's random keys and counters are the loop's: they go in as an argument, and come back as aux."""
    x, y = regression_data()
    graphdef, state, others = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)
    offloaded = wrap(state, lr=3e-2)

    def loss_of(params, others, x, y):
        model = nnx.merge(graphdef, params, others, copy=True)
        loss = regression(model, x, y)
        return loss, nnx.state(model, nnx.Not(nnx.Param))

    value_and_grad = offloaded.value_and_grad(loss_of, has_aux=True)
    losses = []
    for step in range(30):
        (loss, others), grads = value_and_grad(offloaded.params, others, x, y)
        assert int(others["dropout"]["rngs"]["count"].get_value()) == step + 1
        assert isinstance(offloaded.update(grads), nnx.State)
        losses.append(float(loss))
    assert losses[-1] < 0.3 * losses[0]
    trained = nnx.merge(graphdef, offloaded.params, others)
    trained.eval()
    assert regression(trained, x, y) < losses[0]
    resumed = wrap(state)
    resumed.load_pytree(offloaded.to_pytree())
    assert_same_tree(resumed.to_pytree(), offloaded.to_pytree())


def test_flax_nnx_parameters_have_the_bits_of_optax():
    x, y = regression_data()
    model = Net(nnx.Rngs(1))
    params = nnx.state(model, nnx.Param)
    offloaded, eager = wrap(params, **HYPER), Eager(optax.adamw(1e-2, weight_decay=0.1), params)
    gradients = nnx.jit(nnx.grad(regression))
    for _ in range(3):
        grads = gradients(model, x, y)
        eager.update(grads)
        nnx.update(model, offloaded.update(grads))
        assert_same_tree(nnx.state(model, nnx.Param), eager.params)


def test_an_equinox_module_trains_with_the_bits_of_optax():
    x, y = regression_data()
    keys = jax.random.split(jax.random.key(0))
    model = Perceptron(eqx.nn.Linear(3, 8, key=keys[0]), eqx.nn.Linear(8, 1, key=keys[1]), jnp.tanh, "mlp")
    only_weights = jax.tree.map(lambda leaf: eqx.is_array(leaf) and leaf.ndim > 1, model)
    offloaded = wrap(model, **HYPER, mask=only_weights)  # a module of booleans, which can be called, is a mask too
    decay = optax.adamw(1e-2, weight_decay=0.1, mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree))
    eager = Eager(decay, eqx.filter(model, eqx.is_inexact_array))
    filtered = eqx.filter_jit(eqx.filter_value_and_grad(regression))
    ours = offloaded.value_and_grad(regression)
    for i in range(4):
        loss, grads = (filtered if i % 2 else ours)(offloaded.params, x, y)
        eager.update(eqx.filter(grads, eqx.is_array))
        updated = offloaded.update(grads)
        assert isinstance(updated, Perceptron)
        assert (updated.activation, updated.name) == (jnp.tanh, "mlp")
        assert_same_tree(eqx.filter(updated, eqx.is_array), eager.params)
    assert loss < regression(model, x, y)


class Normed(nnx.Module):
    def __init__(self, *, dropout=False):
        self.linear, self.norm = nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.BatchNorm(4, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0)) if dropout else None


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (lambda: Normed(), "params is an nnx.Module (Normed)"),
        (lambda: {"gen": [nnx.Linear(3, 4, rngs=nnx.Rngs(0))]}, "params['gen'][0] is an nnx.Module (Linear)"),
        (lambda: nnx.state(Normed()), "params['norm']['mean'] is an nnx.BatchStat"),
        (lambda: nnx.state(Normed(dropout=True), nnx.Any(nnx.Param, nnx.RngState)), "is an nnx.RngCount"),
    ],
    ids=["module", "modules", "statistics", "random state"],
)
def test_what_an_nnx_model_changes_in_its_forward_is_refused(tree, words):
    with pytest.raises(ParameterError, match=re.escape(words)) as raised:
        wrap(tree())
    assert "nnx.state(model, nnx.Param)" in str(raised.value)


def test_the_parameters_of_an_nnx_model_are_taken_and_the_rest_where_trainable_says_so():
    model = Normed(dropout=True)
    of_param = jax.tree.map(
        lambda leaf: isinstance(leaf, nnx.Param), nnx.state(model), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
    )
    for offloaded in (wrap(nnx.state(model, nnx.Param)), wrap(nnx.state(model), trainable=of_param)):
        assert offloaded.memory_report().numel == 3 * 4 + 4 + 4 + 4


def test_an_export_has_the_names_of_a_modules_paths(tmp_path):
    model = nnx.state(nnx.Linear(3, 4, rngs=nnx.Rngs(0)))
    wrap(model).export_safetensors(tmp_path / "nnx")
    names = {
        jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree_util.tree_leaves_with_path(model)
    }
    assert safetensors.numpy.load_file(tmp_path / "nnx" / "model.safetensors").keys() == names
    wrap(eqx.nn.MLP(2, 3, 4, 1, key=jax.random.key(0))).export_safetensors(tmp_path / "eqx")
    assert "layers.0.weight" in safetensors.numpy.load_file(tmp_path / "eqx" / "model.safetensors")


@pytest.mark.parametrize("fields", [{}, {"param_dtype": "bfloat16"}, {"param_dtype": "float16"}])
def test_orbax_restores_what_to_pytree_gives(tmp_path, fields):
    def make(seed):
        return wrap({**random_tree(seed), "table": jnp.arange(3) + seed}, **HYPER, **fields)

    def gradients(offloaded, i):
        if offloaded._core.scaler is None:
            return {**random_tree(i, fields.get("param_dtype", "float32")), "table": None}
        loss = offloaded.value_and_grad(lambda p, x: sum((leaf * x).sum() for leaf in jax.tree.leaves(p["layers"])))
        return loss(offloaded.params, jnp.float16(i))[1]

    straight = make(0)
    for i in range(2):
        straight.update(gradients(straight, i))
    saved = straight.to_pytree()
    with orbax.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", saved)
        restored = checkpointer.restore(tmp_path / "saved")
    resumed = make(1)
    resumed.load_pytree(restored)
    assert_same_tree(resumed.to_pytree(), saved)
    for i in range(2, 4):
        assert_same_tree(resumed.update(gradients(resumed, i)), straight.update(gradients(straight, i)))
    assert_same_tree(resumed.to_pytree(), straight.to_pytree())
