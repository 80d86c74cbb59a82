"""The laws of every update rule in JAX: wrap(params, optimizer=...) against eager optax, bit for bit."""

import os
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest

from frontends.jax import wrap
from offload_core.errors import ConfigError, StateError
from tests.support.jax_models import assert_same_tree, random_tree
from tests.support.processes import ROOT
from tests.support.rules import LR, OPTAXS_KINDS, REFERENCES, settings_of

pytestmark = pytest.mark.usefixtures("exact_rsqrt")
of_each_rule = pytest.mark.parametrize("name", REFERENCES)
RATES = {"number": LR, "schedule": optax.linear_schedule(LR, LR / 10, 7)}


def wrapped(params, name, kind="most", **fields):
    return wrap(params, **{**settings_of(name, kind), **fields})


def run(offloaded, tx, params, n, first=0):
    state = tx.init(params)
    for i in range(n):
        updates, state = tx.update(random_tree(first + i), state, params)
        params = optax.apply_updates(params, updates)
        assert_same_tree(offloaded.update(random_tree(first + i)), params)
    return params, state


@pytest.mark.draws(3)
@pytest.mark.parametrize(
    ("name", "kind", "rate"),
    [*((*each, "number") for each in OPTAXS_KINDS), *((name, "most", "schedule") for name in REFERENCES)],
)
def test_updates_have_the_bits_of_eager_optax(name, kind, rate):
    tx = REFERENCES[name].of_optax(RATES[rate], REFERENCES[name].kinds[kind])
    run(wrapped(random_tree(100), name, kind, lr=RATES[rate]), tx, random_tree(100), 8)


PLAIN_OPTAX = """
import optax
from frontends.jax import wrap
from tests.support.jax_models import assert_same_tree, random_tree

offloaded, tx, params = wrap(random_tree(0), optimizer="adagrad"), optax.adagrad(1e-2, 0.0, 1e-10), random_tree(0)
state = tx.init(params)
for i in range(3):
    updates, state = tx.update(random_tree(i), state, params)
    params = optax.apply_updates(params, updates)
    assert_same_tree(offloaded.update(random_tree(i)), params)
"""


@pytest.mark.slow
def test_without_platform_dependent_math_adagrad_is_that_of_optax_as_it_is():
    flags = {"XLA_FLAGS": "--xla_cpu_enable_platform_dependent_math=false", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, "-c", PLAIN_OPTAX], env=os.environ | flags, capture_output=True, text=True)
    if "Unknown flag" in ran.stderr:
        pytest.skip("this jaxlib has no such flag")
    assert ran.returncode == 0, ran.stderr


@pytest.mark.draws(3)
@pytest.mark.parametrize(("name", "kind"), OPTAXS_KINDS)
def test_states_go_to_optax_and_back(name, kind):
    tx = REFERENCES[name].of_optax(LR, REFERENCES[name].kinds[kind])
    offloaded = wrapped(random_tree(100), name, kind)
    params, state = run(offloaded, tx, random_tree(100), 3)
    jax.tree.map(np.testing.assert_array_equal, offloaded.to_optax_state(), state)
    other = wrapped(params, name, kind)
    other.load_optax_state(state)
    third = wrapped(random_tree(5), name, kind)
    third.load_pytree(offloaded.to_pytree())
    for each in (offloaded, other, third):
        each.update(random_tree(9))
    assert_same_tree(offloaded.params, other.params)
    assert_same_tree(offloaded.params, third.params)
    states = {state.name for state in offloaded.config.rule().states}
    assert offloaded.to_pytree().keys() == {"count", "params", "master", "steps", *states}


@of_each_rule
def test_a_mask_keeps_parameters_from_decay(name):
    params = random_tree(100)
    decayed, plain = wrapped(params, name), wrapped(params, name, weight_decay=0.0)
    none = wrap(params, mask=lambda tree: jax.tree.map(lambda _: False, tree), **settings_of(name))
    for each in (decayed, plain, none):
        each.update(random_tree(0))
    assert_same_tree(none.params, plain.params)
    with pytest.raises(AssertionError):
        assert_same_tree(none.params, decayed.params)


@of_each_rule
def test_states_of_optax_are_kept_in_torchs_order_of_operations(name):
    params = random_tree(0)
    offloaded, other = (wrapped(params, name, op_order=order) for order in ("optax", "torch"))
    offloaded.update(random_tree(1))
    other.load_params(offloaded.params)
    other.load_optax_state(offloaded.to_optax_state())
    for each in (offloaded, other):
        each.update(random_tree(2))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), offloaded.params, other.params)


@pytest.mark.draws(1)
@of_each_rule
def test_states_of_another_rule_are_refused(name):
    params = random_tree(0)
    offloaded = wrapped(params, name)
    before = offloaded.to_pytree()
    for other in REFERENCES:
        if other != name:
            with pytest.raises(StateError, match="load_optax_state: 0 .* expected one: the state of optax"):
                offloaded.load_optax_state(REFERENCES[other].of_optax(LR, REFERENCES[other].kinds["most"]).init(params))
            with pytest.raises(StateError, match="load_pytree: "):
                offloaded.load_pytree(wrapped(params, other).to_pytree())
    jax.tree.map(np.testing.assert_array_equal, offloaded.to_pytree(), before)


@pytest.mark.parametrize(
    ("name", "setting"), [(name, each) for name in REFERENCES for each in REFERENCES[name].torchs_alone]
)
def test_settings_that_optax_lacks_are_refused(name, setting):
    with pytest.raises(ConfigError, match=f"{setting}=0.5 has no place in op_order='optax'"):
        wrapped(random_tree(0), name, **{setting: 0.5})


def test_an_optimizer_without_states_takes_none():
    params = random_tree(0)
    plain = wrap(params, optimizer="sgd")
    for load, given in (
        (plain.load_pytree, wrapped(params, "sgd").to_pytree()),
        (plain.load_optax_state, optax.adamw(1e-2).init(params)),
        (plain.load_optax_state, optax.sgd(1e-2, 0.9).init(params)),
    ):
        with pytest.raises(StateError, match="expected"):
            load(given)


@pytest.mark.parametrize(("given", "betas"), [({"b2": 0.5}, (0.9, 0.5)), ({}, (0.9, 0.99))])
def test_optaxs_words_have_the_rules_own_defaults(given, betas):
    assert wrap(random_tree(0), optimizer="lion", **given).config.betas == betas
    assert wrap(random_tree(0), {"optimizer": "lion", **given}).config.betas == betas
