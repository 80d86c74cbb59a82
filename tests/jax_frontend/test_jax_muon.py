"""Muon in JAX: the bits of its definition on any mesh, and states that files carry."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from frontends.jax import wrap
from frontends.jax.devices.device_kernels import newton_schulz
from offload_core import ConfigError, ParameterError, StateError
from offload_core.dtypes import BFLOAT16
from offload_core.rules.muon import Muon
from tests.support.jax_models import assert_same_tree
from tests.support.oracles import Muon as Second
from tests.support.oracles import MuonDirection as First

SETTINGS = {"optimizer": "muon", "lr": 0.02}
SHAPES = {
    "embed": {"table": (20, 24)},
    "layer": {"kernel": (24, 48), "bias": (48,)},
    "second": {"kernel": (48, 16)},
    "head": {"kernel": (16, 8)},
}


def tree(seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.standard_normal(shape, np.float32) * 0.1),
        SHAPES,
        is_leaf=lambda leaf: isinstance(leaf, tuple),
    )


def test_the_choice_is_told_once_and_has_stacks_of_layers(capsys):
    shapes = {"embed": (9, 8), "layers": {"w": (3, 8, 8), "b": (3, 8), "ln_scale": (3, 8)}, "out": {"w": (8, 8)}}
    params = jax.tree.map(jnp.ones, shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    both = "\"['layers']['w']\", \"['out']['w']\""
    for fields, expected in (({}, both), ({"muon_params": ["layers.w"]}, "\"['layers']['w']\"")):
        wrap(params, **SETTINGS, **fields).update(params)
        assert capsys.readouterr().err.count(f"Muon updates {expected}; AdamW updates \"['embed']\", ") == 1
    wrap(params).update(params)
    assert "updates" not in capsys.readouterr().err


def test_a_head_beside_stacks_is_an_error_that_says_how_to_name_the_matrices():
    shapes = {"embed": (90, 8), "layers": {"w": (3, 8, 8), "b": (3, 8)}, "logits_dense": {"kernel": (8, 90)}}
    params = jax.tree.map(jnp.ones, shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    with pytest.raises(ConfigError, match=r"logits_dense.*\(8, 90\); expected muon_params=.*update: .*layers"):
        wrap(params, **SETTINGS)
    wrap(params, muon_params=["layers.w"], **SETTINGS)


def trained(offloaded, n, first=0):
    for i in range(n):
        offloaded.update(tree(first + i))
    return offloaded.params


def iterated(direction, shape):
    part = Muon.of({"op_order": "torch", "ns_coefficients": (3.4445, -4.775, 2.0315), "eps": 1e-7, "ns_steps": 5})
    made = jax.jit(newton_schulz, static_argnums=1)(jnp.asarray(direction.reshape(shape)), part.iteration)
    return np.asarray(made).reshape(-1).astype(np.float32)


def by_definition(param, gradients, *, decay=0.1):
    """A matrix after these gradients, by the definition: in NumPy, but for the iteration."""
    shape = param.shape
    master, momentum = np.asarray(param).reshape(-1), np.zeros(param.size, np.float32)
    for gradient in gradients:
        adjustment = max(1, shape[0] / shape[1]) ** 0.5
        settings = {"lr": 0.02, "weight_decay": decay, "adjustment": adjustment, "adds": True}
        given = np.asarray(gradient).reshape(-1), master, (momentum, np.zeros_like(master))
        direction, _ = First(**settings).arrays(*given, "muon")
        made = iterated(direction.astype(BFLOAT16.numpy), shape)
        master, (momentum, _) = Second(**settings).arrays(*given[:2], (momentum, made), "")
    return master.reshape(shape)


def test_matrices_have_the_bits_of_the_definition_and_others_those_of_adamw():
    before, gradients = tree(100), [tree(i) for i in range(5)]
    found = trained(wrap(before, **SETTINGS), 5)
    for layer in ("layer", "second"):
        expected = by_definition(before[layer]["kernel"], [each[layer]["kernel"] for each in gradients])
        np.testing.assert_array_equal(np.asarray(found[layer]["kernel"]), expected)
    rest = trained(wrap(before, lr=1e-3), 5)
    for layer, name in (("embed", "table"), ("layer", "bias"), ("head", "kernel")):
        np.testing.assert_array_equal(np.asarray(found[layer][name]), np.asarray(rest[layer][name]))


@pytest.mark.draws(1)
@pytest.mark.quick
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize(
    "fields", [{"reduce_bucket_size": 100}, {"schedule": "serial"}, {"param_dtype": "bfloat16"}], ids=str
)
def test_a_mesh_changes_no_bits(n, fields):
    mesh = jax.make_mesh((n,), ("dp",), devices=jax.devices()[:n])
    alone = {name: value for name, value in fields.items() if name == "param_dtype"}
    assert_same_tree(
        trained(wrap(tree(100), mesh=mesh, **SETTINGS, **fields), 4), trained(wrap(tree(100), **SETTINGS, **alone), 4)
    )


def test_a_mask_and_a_schedule_hold_for_both_rules():
    params, rate = tree(100), optax.linear_schedule(0.02, 0.02, 5)
    mask = jax.tree.map(lambda leaf: False, params)
    found = trained(wrap(params, mask=mask, **{**SETTINGS, "lr": rate}), 3)
    expected = by_definition(params["second"]["kernel"], [tree(i)["second"]["kernel"] for i in range(3)], decay=0.0)
    np.testing.assert_array_equal(np.asarray(found["second"]["kernel"]), expected)
    rest = trained(wrap(params, lr=0.02, weight_decay=0.0), 3)
    np.testing.assert_array_equal(np.asarray(found["head"]["kernel"]), np.asarray(rest["head"]["kernel"]))


def test_states_go_through_a_tree_and_a_checkpoint(tmp_path):
    first = wrap(tree(100), **SETTINGS)
    trained(first, 2)
    saved = first.to_pytree()
    assert saved["exp_avg"]["layer"]["kernel"] is None
    assert saved["momentum_buffer"]["head"]["kernel"] is None
    assert saved["momentum_buffer"]["layer"]["kernel"].shape == (24, 48)
    second = wrap(tree(5), **SETTINGS)
    second.load_pytree(saved)
    mesh = jax.make_mesh((2,), ("dp",), devices=jax.devices()[:2])
    third = wrap(tree(5), mesh=mesh, **SETTINGS)
    third.load_checkpoint(first.save_checkpoint(tmp_path))
    expected = trained(first, 2, 10)
    for each in (second, third):
        assert_same_tree(trained(each, 2, 10), expected)


@pytest.mark.draws(1)
@pytest.mark.parametrize("fields", [{}, {"lr": 5.0, "weight_decay": 0.3}, {"param_dtype": "bfloat16"}], ids=str)
def test_an_optax_loop_has_the_bits_of_update(fields):
    """Large steps bring many elements close to zero, where not every number is a sum of two others."""
    fields = {**SETTINGS, **fields}
    expected, offloaded = wrap(tree(100), **fields), wrap(tree(100), **fields)
    tx, params = offloaded.as_optax(), offloaded.params
    state = tx.init(params)
    for i in range(6):
        updates, state = tx.update(tree(i), state, params)
        params = optax.apply_updates(params, updates)
        assert_same_tree(params, expected.update(tree(i)))


def test_torchs_order_has_no_updates_for_optax():
    with pytest.raises(ConfigError, match=r"as_optax\(\) with op_order='torch': .*table.* expected op_order='optax'"):
        wrap(tree(100), **SETTINGS, op_order="torch").as_optax()


def test_a_rate_of_an_optax_loop_is_muons():
    """AdamW has a rate of its own. With one rate for both, both follow."""
    for fields in ({}, {"adjust_lr_fn": "match_rms_adamw"}, {"adamw": {"lr": 3e-4}}):
        given, expected = wrap(tree(100), **{**SETTINGS, **fields, "lr": 1e-3}), wrap(tree(100), **SETTINGS, **fields)
        tx = given.as_optax(0.02)
        tx.update(tree(0), tx.init(given.params), given.params)
        expected.update(tree(0))
        assert_same_tree(given.params, expected.params)


@pytest.mark.draws(1)
@pytest.mark.parametrize("rate", [0.02, optax.linear_schedule(0.02, 0.01, 9)], ids=["a number", "a schedule"])
def test_states_go_to_optax_and_come_back(rate):
    fields = {**SETTINGS, "lr": rate}
    offloaded = wrap(tree(100), **fields)
    trained(offloaded, 2)
    state, own = offloaded.to_optax_state(), offloaded.to_pytree()
    muon, adam = (state.inner_states[name].inner_state[0] for name in ("muon", "adam"))
    assert int(muon.count) == int(adam.count) == 2
    np.testing.assert_array_equal(muon.mu["layer"]["kernel"], own["momentum_buffer"]["layer"]["kernel"])
    np.testing.assert_array_equal(adam.nu["head"]["kernel"], own["exp_avg_sq"]["head"]["kernel"])
    loaded = wrap(offloaded.params, **fields)
    loaded.load_optax_state(state)
    assert loaded.count == 2
    assert_same_tree(trained(loaded, 2, 10), trained(offloaded, 2, 10))
    of_adam = None if callable(rate) else 1e-3
    tx = optax.contrib.muon(rate, muon_weight_dimension_numbers=dimensions(own), adam_learning_rate=of_adam)
    assert jax.tree.structure(tx.init(tree(100))) == jax.tree.structure(state)  # docs/optimizers.md goes on in optax


def dimensions(own):
    """Which leaves Muon updates, as optax takes it."""
    numbers = optax.contrib.MuonDimensionNumbers(-2, -1)
    momenta = own["momentum_buffer"]
    return jax.tree.map(lambda leaf: None if leaf is None else numbers, momenta, is_leaf=lambda leaf: leaf is None)


def test_states_of_another_muon_are_refused():
    offloaded, numbers = wrap(tree(100), **SETTINGS), optax.contrib.MuonDimensionNumbers()
    with pytest.raises(StateError, match=r"in optax Muon updates \['embed'\]\['table'\], and here AdamW; .*'head'"):
        offloaded.load_optax_state(optax.contrib.muon(0.02).init(tree(100)))
    own = {**dimensions(offloaded.to_pytree()), "second": {"kernel": None}}
    with pytest.raises(StateError, match=r"in optax AdamW updates \['second'\]\['kernel'\], and here Muon"):
        offloaded.load_optax_state(optax.contrib.muon(0.02, muon_weight_dimension_numbers=own).init(tree(100)))
    own["second"]["kernel"] = numbers
    other = optax.contrib.muon(0.02, (3.0, -4.0, 2.0), muon_weight_dimension_numbers=own)
    with pytest.raises(StateError, match=r"ns_coeffs are \[3.0, -4.0, 2.0\], expected \[3.44"):
        offloaded.load_optax_state(other.init(tree(100)))
    with pytest.raises(StateError, match=r"0 MuonState in .* expected one: the state of optax.contrib.muon"):
        offloaded.load_optax_state(optax.adamw(1e-3).init(tree(100)))


def test_what_is_no_matrix_is_refused_by_its_path():
    with pytest.raises(ParameterError, match=r"\['layer'\]\['bias'\]. of shape \(48,\) is no matrix"):
        wrap(tree(100), muon_params=["layer.bias"], **SETTINGS)
    with pytest.raises(ConfigError, match="the model has no matrix besides embeddings and heads"):
        wrap({"bias": jnp.zeros(3)}, **SETTINGS)


@pytest.mark.draws(2)
@pytest.mark.states_in_memory
def test_memory_is_planned():
    offloaded = wrap(tree(100), **SETTINGS)
    trained(offloaded, 1)
    rows = {row.what: row for row in offloaded.memory_report().rows if row.where == "host"}
    assert all(row.planned == row.held for row in rows.values())
    assert rows["momentum_buffer"].held == 4 * (24 * 48 + 48 * 16)
