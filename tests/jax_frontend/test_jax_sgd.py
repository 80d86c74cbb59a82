"""wrap(params, optimizer="sgd") against eager optax.sgd, bit for bit."""

import jax
import numpy as np
import optax
import pytest

from frontends.jax import wrap
from offload_core.errors import ConfigError, StateError
from tests.support.jax_models import assert_same_tree, random_tree

KINDS = {
    "plain": ({}, lambda lr: optax.sgd(lr)),
    "momentum": ({"momentum": 0.9}, lambda lr: optax.sgd(lr, 0.9)),
    "nesterov": ({"momentum": 0.9, "nesterov": True}, lambda lr: optax.sgd(lr, 0.9, nesterov=True)),
    "decay": (
        {"momentum": 0.9, "weight_decay": 0.1},
        lambda lr: optax.chain(optax.add_decayed_weights(0.1), optax.sgd(lr, 0.9)),
    ),
}
RATES = {"number": 1e-2, "schedule": optax.linear_schedule(1e-2, 1e-3, 7)}


def run(offloaded, tx, params, n, first=0):
    state = tx.init(params)
    for i in range(n):
        grads = random_tree(first + i)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        assert_same_tree(offloaded.update(grads), params)
    return params, state


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("kind", KINDS)
def test_ten_updates_have_the_bits_of_eager_optax(kind, rate):
    params, (fields, tx) = random_tree(100), KINDS[kind]
    run(wrap(params, optimizer="sgd", lr=RATES[rate], **fields), tx(RATES[rate]), params, 10)


@pytest.mark.parametrize("kind", KINDS)
def test_states_go_to_optax_and_back(kind):
    params, (fields, tx) = random_tree(100), KINDS[kind]
    offloaded = wrap(params, optimizer="sgd", lr=1e-2, **fields)
    params, state = run(offloaded, tx(1e-2), params, 3)
    jax.tree.map(np.testing.assert_array_equal, offloaded.to_optax_state(), state)
    other = wrap(params, optimizer="sgd", lr=1e-2, **fields)
    other.load_optax_state(state)
    third = wrap(random_tree(5), optimizer="sgd", lr=1e-2, **fields)
    third.load_pytree(offloaded.to_pytree())
    for each in (offloaded, other, third):
        each.update(random_tree(9))
    assert_same_tree(offloaded.params, other.params)
    assert_same_tree(offloaded.params, third.params)
    assert offloaded.to_pytree().keys() == {"count", "params", "master", "steps", *(["momentum_buffer"] * bool(fields))}


def test_a_checkpoint_resumes_with_the_same_bits(tmp_path):
    offloaded, other = (wrap(random_tree(i), optimizer="sgd", momentum=0.9, lr=1e-2) for i in range(2))
    offloaded.update(random_tree(10))
    other.load_checkpoint(offloaded.save_checkpoint(tmp_path))
    assert_same_tree(offloaded.update(random_tree(11)), other.update(random_tree(11)))


def test_what_does_not_fit_is_refused():
    params = random_tree(0)
    with pytest.raises(ConfigError, match="dampening=0.5 has no place in op_order='optax'"):
        wrap(params, optimizer="sgd", momentum=0.9, dampening=0.5)
    offloaded = wrap(params, optimizer="sgd", momentum=0.9)
    with pytest.raises(StateError, match="0 TraceState in a .*, expected one: the state of optax.sgd with a momentum"):
        offloaded.load_optax_state(optax.adamw(1e-2).init(params))
    with pytest.raises(StateError, match="has 'exp_avg', 'exp_avg_sq', which optimizer='sgd'"):
        offloaded.load_pytree(wrap(params).to_pytree())
    plain = wrap(params, optimizer="sgd")
    for load, given in (
        (plain.load_pytree, offloaded.to_pytree()),
        (plain.load_optax_state, optax.adamw(1e-2).init(params)),
        (plain.load_optax_state, optax.sgd(1e-2, 0.9).init(params)),
    ):
        with pytest.raises(StateError, match="expected"):
            load(given)


def test_a_momentum_of_optax_is_kept_in_torchs_order_of_operations():
    params = random_tree(0)
    offloaded, other = (wrap(params, optimizer="sgd", momentum=0.9, lr=1e-2, op_order=o) for o in ("optax", "torch"))
    offloaded.update(random_tree(1))
    other.load_params(offloaded.params)
    other.load_optax_state(offloaded.to_optax_state())
    for each in (offloaded, other):
        each.update(random_tree(2))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), offloaded.params, other.params)
