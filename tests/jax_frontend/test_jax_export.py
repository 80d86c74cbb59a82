"""Exports of ``OffloadedParams`` to other programs: safetensors, optax's own states."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
import torch

from frontends.jax import wrap
from offload_core.__main__ import main
from offload_core.errors import ConfigError, ParameterError, StateError
from tests.support.exports import load
from tests.support.jax_models import (
    HYPER,
    Eager,
    assert_same_tree,
    on_the_cpu,  # noqa: F401 (a fixture)
    random_tree,
)

MASK = {"embed": False, "layers": [True, {"w": True, "b": False}]}
NAMES = {"embed", "layers.0.w", "layers.0.b", "layers.1.w", "layers.1.b"}


def named(tree):
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in flat}


def assert_file_holds(folder, arrays):
    tensors = load(folder)[0]
    assert tensors.keys() == arrays.keys()
    for name, array in arrays.items():
        assert str(tensors[name].dtype).removeprefix("torch.") == array.dtype.name
        assert tuple(tensors[name].shape) == array.shape
        assert tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes() == array.tobytes()


# --- weights -----------------------------------------------------------------------------------------


@pytest.mark.draws(1)
@pytest.mark.parametrize("fields", [{}, {"param_dtype": "bfloat16"}, {"schedule": "delayed", "delay_warmup_steps": 1}])
def test_what_is_written_are_the_parameters_or_the_master_weights(tmp_path, fields):
    params = {**random_tree(0), "table": jnp.arange(3), "late": jnp.ones(4, jnp.float16), "rate": 0.5, "none": None,
              "key": jax.random.key(0)}  # fmt: skip
    trained = {**jax.tree.map(lambda _: True, params), "late": False}
    offloaded = wrap(params, **HYPER, **fields, trainable=trained)
    held_back = None
    for i in range(3):
        held_back = offloaded.update({**random_tree(10 + i), **dict.fromkeys(set(params) - {"embed", "layers"})})
    offloaded.export_safetensors(tmp_path / "model", max_shard_bytes=1000)
    offloaded.export_safetensors(tmp_path / "fp32", dtype="float32")
    offloaded.export_safetensors(tmp_path / "fp16", dtype="float16")
    saved = offloaded.to_pytree()
    arrays = {n: a for n, a in named(saved["params"]).items() if n not in ("rate", "key")}
    assert NAMES | {"table", "late"} == arrays.keys()
    assert_file_holds(tmp_path / "model", arrays)
    masters = {**arrays, **named(saved["master"]), "late": arrays["late"].astype(np.float32)}
    assert_file_holds(tmp_path / "fp32", masters)
    offloaded.save_checkpoint(tmp_path / "saved")
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "from the checkpoint")]) == 0
    key = np.asarray(jax.random.key_data(params["key"]))  # the command does not know that it is no weight
    assert_file_holds(tmp_path / "from the checkpoint", masters | {"key": key})
    assert_file_holds(
        tmp_path / "fp16", {n: a.astype(np.float16) if a.dtype == np.float32 else a for n, a in masters.items()}
    )
    assert np.array_equal(masters["embed"], held_back["embed"]) == (not fields)


def test_names_are_dotted_paths_and_no_two_alike(tmp_path):
    wrap({"layers": [{"weight": jnp.ones(3)}]}).export_safetensors(tmp_path / "tree")
    assert safetensors.numpy.load_file(tmp_path / "tree" / "model.safetensors").keys() == {"layers.0.weight"}
    with pytest.raises(ParameterError, match=r"'a\.b': two tensors have this name"):
        wrap({"a": {"b": jnp.ones(3)}, "a.b": jnp.ones(3)}).export_safetensors(tmp_path / "twice")
    with pytest.raises(ParameterError, match="is one array and has no name"):
        wrap(jnp.ones(3)).export_safetensors(tmp_path / "twice")
    with pytest.raises(ConfigError, match="dtype: got 'int8'"):
        wrap({"a": jnp.ones(3)}).export_safetensors(tmp_path / "twice", dtype="int8")
    assert not (tmp_path / "twice").exists()


# --- optax -------------------------------------------------------------------------------------------


def schedule(count):
    return 1e-2 / (1 + count)


def adam(lr, mask, **terms):
    decay = terms.pop("weight_decay")
    return optax.chain(optax.add_decayed_weights(decay, mask), optax.adam(lr, **terms))


def adamw(lr, mask, **terms):
    return optax.adamw(lr, **terms, mask=mask)


TERMS = {"weight_decay": 0.1, "b1": 0.8, "b2": 0.95, "eps": 1e-6, "eps_root": 1e-10}
FIELDS = {"weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-6, "eps_root": 1e-10}


@pytest.mark.draws(2)
@pytest.mark.parametrize("mode", [adamw, adam])
@pytest.mark.parametrize("lr", [1e-2, schedule], ids=["float", "schedule"])
@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "masked"])
def test_optax_goes_on_from_the_export_with_the_same_bits_and_back(mode, lr, mask):
    offloaded = wrap(random_tree(0), lr=lr, **FIELDS, mask=mask, adam_mode=mode.__name__)
    for i in range(3):
        offloaded.update(random_tree(10 + i))
    state, params = offloaded.to_optax_state(), offloaded.to_pytree()["master"]
    eager = Eager(mode(lr, mask, **TERMS), random_tree(0))
    assert jax.tree.structure(state) == jax.tree.structure(eager.state)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(state)] == [
        (x.shape, x.dtype) for x in jax.tree.leaves(eager.state)
    ]
    eager.params, eager.state = jax.tree.map(jnp.array, params), state
    for i in range(3, 6):
        offloaded.update(random_tree(10 + i))  # what was exported is a copy
        eager.update(random_tree(10 + i))
    assert_same_tree(offloaded.to_pytree()["master"], eager.params)
    assert_same_tree(offloaded.to_optax_state(), eager.state)
    back = wrap(eager.params, lr=lr, **FIELDS, mask=mask, adam_mode=mode.__name__)
    back.load_optax_state(eager.state)
    for i in range(6, 9):
        back.update(random_tree(10 + i))
        eager.update(random_tree(10 + i))
    assert_same_tree(back.to_pytree()["master"], eager.params)
    assert_same_tree(back.to_optax_state(), eager.state)


def test_what_is_not_trained_has_no_moments():
    params = {**random_tree(0), "table": jnp.arange(3), "frozen": jnp.ones(4)}
    trained = {**jax.tree.map(lambda _: True, params), "frozen": False}
    offloaded = wrap(params, **HYPER, trainable=trained)
    kept = {**params, "table": None, "frozen": None}
    masked = optax.masked(optax.adamw(1e-2, weight_decay=0.1), {**trained, "table": False})
    grads = [{**random_tree(10 + i), "table": None, "frozen": None} for i in range(4)]
    for g in grads[:2]:
        offloaded.update(g)
    state = offloaded.to_optax_state()
    assert jax.tree.structure(state) == jax.tree.structure(optax.adamw(1e-2, weight_decay=0.1).init(kept))
    # optax.masked has a MaskedNode there
    eager = Eager(masked, params)
    frozen = {name: params[name] for name in ("table", "frozen")}
    for g in grads[:2]:
        updates, eager.state = masked.update(
            {**g, "table": jnp.zeros(3), "frozen": jnp.zeros(4)}, eager.state, eager.params
        )
        none = {"table": None, "frozen": None}
        eager.params = {**eager.params, **optax.apply_updates({**eager.params, **none}, {**updates, **none}), **frozen}
    other = wrap(eager.params, **HYPER, trainable=trained)
    other.load_optax_state(eager.state)
    assert_same_tree(other.to_optax_state(), state)
    for g in grads[2:]:
        assert_same_tree(other.update(g)["layers"], offloaded.update(g)["layers"])


def test_a_chain_with_one_adam_is_found_and_anything_else_refused():
    offloaded = wrap(random_tree(0), **HYPER)
    offloaded.update(random_tree(1))
    state, before = offloaded.to_optax_state(), offloaded.to_pytree()
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)).init(random_tree(0))
    half = optax.adamw(1e-2, mu_dtype=jnp.bfloat16).init(random_tree(0))
    for found, count in ((clipped, 0), (half, 0), (state, 1)):
        offloaded.load_optax_state(found)
        assert offloaded.count == count
    assert_same_tree(offloaded.to_pytree(), before)
    two = (state[0], state[0])
    for wrong, said in ((optax.sgd(1.0).init(random_tree(0)), "0 ScaleByAdamState"), (two, "2 ScaleByAdamState")):
        with pytest.raises(StateError, match=said):
            offloaded.load_optax_state(wrong)
    short = optax.adamw(1.0).init({**random_tree(0), "embed": jnp.ones(3)})
    with pytest.raises(StateError, match=r"load_optax_state: exp_avg\['embed'\] is \[3\], expected shape \[33, 17\]"):
        offloaded.load_optax_state(short)
    with pytest.raises(StateError, match="load_optax_state: exp_avg: the tree has"):
        offloaded.load_optax_state(optax.adamw(1.0).init({"embed": jnp.ones((33, 17))}))
    assert_same_tree(offloaded.to_pytree(), before)


def test_counts_that_differ_have_no_place_in_optax():
    offloaded = wrap(random_tree(0), **HYPER)
    offloaded.update(random_tree(1))
    offloaded.update({**random_tree(2), "embed": None})
    with pytest.raises(StateError, match=r"\['embed'\] has had 1 updates and \['layers'\]\[0\]\['b'\] 2"):
        offloaded.to_optax_state()
