"""The JAX front end against eager optax, bit for bit, and against what a JAX user takes for granted."""

import copy
import functools
import gc
import math
import pickle
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from frontends.jax import OffloadConfig, ScaledGradients, wrap
from frontends.jax.devices.device import device_use
from offload_core.errors import GradientError, StateError
from offload_core.memory.report import DeviceUse
from offload_core.support.threads import Task
from tests.support.jax_meshes import leaves_of
from tests.support.jax_models import (
    HYPER,
    SHAPES,
    Eager,
    assert_same_tree,
    batch,
    loss_fn,
    on_the_cpu,  # noqa: F401 (a fixture)
    random_tree,
)
from tests.support.late_stores import over_all_stores
from tests.support.strategies import law


def to_float32(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


def assert_same_run(offloaded, eager):
    """Masters and moments are those of optax."""
    states = offloaded.to_pytree()
    assert_same_tree(states["master"], eager.params)
    assert_same_tree(states["exp_avg"], eager.adam.mu)
    assert_same_tree(states["exp_avg_sq"], eager.adam.nu)
    assert offloaded.count == int(eager.adam.count)


def generations(offloaded):
    """Parameter buffers in existence, whoever holds them."""
    return offloaded._placement.buffer_memory.n_bytes // offloaded._placement.buffers.generation_bytes


# --- the same bits as eager optax --------------------------------------------------------------------

LEARNING_RATES = {
    "float": 1e-2,
    "cosine": optax.warmup_cosine_decay_schedule(1e-4, 1e-2, 5, 40),
    "step": optax.piecewise_constant_schedule(1e-2, {1: 0.5, 10: 0.3}),
}


@pytest.mark.long("XLA compiles; the first of its file imports and starts JAX")
@pytest.mark.draws(1)
@pytest.mark.quick
@pytest.mark.parametrize("lr", LEARNING_RATES.values(), ids=LEARNING_RATES.keys())
def test_fifty_steps_of_a_model_have_the_bits_of_eager_adamw(lr):
    params = random_tree(0)
    offloaded, eager = wrap(params, lr=lr, weight_decay=0.1), Eager(optax.adamw(lr, weight_decay=0.1), params)
    grad = jax.jit(jax.grad(loss_fn))
    for i in range(50):
        grads = grad(eager.params, batch(i))
        eager.update(grads)
        assert_same_tree(offloaded.update(grads), eager.params)
    assert_same_run(offloaded, eager)
    assert_same_tree(offloaded.params, offloaded.to_pytree()["params"])


MASKS = {
    "tree": jax.tree.map(lambda s: len(s) > 1, SHAPES, is_leaf=lambda s: isinstance(s, tuple)),
    "function": functools.partial(jax.tree.map, lambda p: p.ndim > 1),
    "prefix": {"embed": False, "layers": [True, {"w": True, "b": False}]},
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_a_weight_decay_mask_is_that_of_optax(mask):
    params = random_tree(1)
    offloaded, eager = wrap(params, **HYPER, mask=mask), Eager(optax.adamw(1e-2, weight_decay=0.1, mask=mask), params)
    for i in range(5):
        offloaded.update(random_tree(10 + i))
        eager.update(random_tree(10 + i))
    assert_same_run(offloaded, eager)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.95)])
def test_adam_mode_adds_weight_decay_to_the_gradient(betas):
    params = random_tree(2)
    adam = optax.chain(
        optax.add_decayed_weights(0.1), optax.scale_by_adam(*betas, eps=1e-6, eps_root=1e-10), optax.scale(-1e-2)
    )
    offloaded = wrap(params, **HYPER, betas=betas, eps=1e-6, eps_root=1e-10, adam_mode="adam")
    eager = Eager(adam, params)
    for i in range(10):
        offloaded.update(random_tree(20 + i))
        eager.update(random_tree(20 + i))
    assert_same_run(offloaded, eager)


def test_on_a_tree_of_one_leaf_optax_differs_by_a_few_ulps_of_the_update():
    """XLA compiles optax's bias correction of a lone leaf to a product with the reciprocal; ours is the division."""
    zero = {"w": jnp.zeros((33, 17))}
    offloaded, tx = wrap(zero, lr=1e-2, weight_decay=0.0), optax.adamw(1e-2, weight_decay=0.0)
    state = tx.init(zero)
    for i in range(10):
        offloaded.load_pytree({**offloaded.to_pytree(), "master": zero})  # so that the new parameter is the update
        grads = {"w": random_tree(30 + i)["embed"]}
        ours = np.array(offloaded.update(grads)["w"])
        updates, state = tx.update(grads, state, zero)
        theirs = np.array(updates["w"])
        assert (np.abs(ours - theirs) <= 4 * np.spacing(np.abs(theirs))).all()
        states = offloaded.to_pytree()
        assert_same_tree(states["exp_avg"], state[0].mu)
        assert_same_tree(states["exp_avg_sq"], state[0].nu)


@pytest.mark.draws(2)
@over_all_stores
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_low_precision_parameters_are_the_rounded_masters_of_an_fp32_run(dtype):
    params = random_tree(4, dtype)
    offloaded = wrap(params, **HYPER, loss_scale=1)
    eager = Eager(optax.adamw(1e-2, weight_decay=0.1), to_float32(params))
    for i in range(20):
        grads = random_tree(40 + i, dtype)
        updated = offloaded.update(grads)
        eager.update(to_float32(grads))
        assert_same_tree(updated, jax.tree.map(lambda x: np.array(x).astype(dtype), eager.params))
    assert_same_run(offloaded, eager)


def test_masters_start_from_the_unrounded_model():
    params = random_tree(5)
    offloaded = wrap(params, **HYPER, param_dtype="bfloat16")
    assert_same_tree(offloaded.params, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    eager = Eager(optax.adamw(1e-2, weight_decay=0.1), params)
    grads = random_tree(50)  # fp32 gradients of bf16 parameters are taken unrounded
    offloaded.update(grads)
    eager.update(grads)
    assert_same_run(offloaded, eager)


@law(8)
@given(st.sampled_from([1, 16, 17, 100, 1 << 20]), st.integers(1, 4), st.sampled_from(["bfloat16", "float32"]))
def test_bucket_size_and_thread_count_change_no_bits(bucket_size, threads, dtype):
    def run(**fields):
        offloaded = wrap(random_tree(6), **HYPER, param_dtype=dtype, gradient_clipping=1.0, **fields)
        for i in range(3):
            offloaded.update(random_tree(60 + i))
        return offloaded.to_pytree()

    assert_same_tree(run(reduce_bucket_size=bucket_size, num_threads=threads), run())


# --- accumulation, clipping, missing gradients ---------------------------------------------------------


@pytest.mark.draws(1)
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_micro_steps_equal_one_update_with_their_mean(n, dtype):
    params = random_tree(7, dtype)
    offloaded = wrap(params, **HYPER, gradient_accumulation_steps=n)
    eager = Eager(optax.adamw(1e-2, weight_decay=0.1), to_float32(params))
    for i in range(3):
        micro = [random_tree(100 * i + j, dtype) for j in range(n)]
        for j, grads in enumerate(micro):
            before = offloaded.params
            after = offloaded.update(grads)
            assert offloaded.report.updated == (j == n - 1)
            if j < n - 1:
                assert offloaded.report.skipped == "accumulating"
                assert_same_tree(after, before)
        sums = jax.tree.map(
            lambda *g: functools.reduce(lambda a, b: a + b, (np.array(x).astype(np.float32) for x in g)), *micro
        )
        eager.update(jax.tree.map(lambda s: jnp.asarray(s * np.float32(1 / n)), sums))
    assert_same_run(offloaded, eager)


def test_gradients_of_a_micro_step_may_be_donated():
    offloaded, twin = (wrap(random_tree(8), **HYPER, gradient_accumulation_steps=2) for _ in range(2))
    for donated in (True, False):
        grads = [{**random_tree(80), "embed": None} for _ in range(2)]  # the bucket waits for the rest
        offloaded.update(grads[0])
        twin.update(grads[1])
        if donated:
            for leaf in jax.tree.leaves(grads[0]):
                leaf.delete()
    assert_same_tree(offloaded.to_pytree(), twin.to_pytree())


@pytest.mark.quick
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_is_by_the_exact_norm(max_norm):
    params = random_tree(9)
    offloaded = wrap(params, **HYPER, gradient_clipping=max_norm)
    eager = Eager(optax.adamw(1e-2, weight_decay=0.1), params)
    for i in range(5):
        grads = random_tree(90 + i, scale=10.0**-i)
        offloaded.update(grads)
        squares = [float(x) ** 2 for _, leaf in leaves_of(grads) for x in leaf.reshape(-1)]  # exact in double
        norm = math.sqrt(math.fsum(squares))
        coefficient = min(1.0, max_norm / (norm + 1e-6))
        assert (offloaded.report.grad_norm, offloaded.report.clip_coefficient) == (norm, coefficient)
        eager.update(jax.tree.map(lambda g, c=coefficient: g * np.float32(c), grads))
    assert_same_run(offloaded, eager)


def test_a_none_gradient_leaves_its_parameter_and_states_alone():
    """Parameters updated every second time count their own updates: two optimizers would give the same."""
    params = random_tree(11)
    often, seldom = {"embed": params["embed"], "first": params["layers"][0]}, params["layers"][1]
    adamw = optax.adamw(1e-2, weight_decay=0.1)
    offloaded, every, second = wrap(params, **HYPER), Eager(adamw, often), Eager(adamw, seldom)
    for i in range(6):
        g = random_tree(110 + i)
        every.update({"embed": g["embed"], "first": g["layers"][0]})
        if i % 2:
            second.update(g["layers"][1])
        else:
            g["layers"][1] = {"w": None, "b": None}
        held = offloaded.params["layers"][1]
        updated = offloaded.update(g)["layers"][1]
        assert i % 2 or all(updated[k] is held[k] for k in held)
    states = offloaded.to_pytree()
    for name, of in (
        ("master", lambda e: e.params),
        ("exp_avg", lambda e: e.adam.mu),
        ("exp_avg_sq", lambda e: e.adam.nu),
    ):
        assert_same_tree(
            states[name],
            {"embed": of(every)["embed"], "layers": [of(every)["first"], of(second)]},
        )
    assert [float(t) for t in jax.tree.leaves(states["steps"])] == [6, 6, 6, 3, 3]


# --- fp16 and dynamic loss scaling ---------------------------------------------------------------------


def test_scaled_gradients_give_the_update_of_the_unscaled_ones():
    params = random_tree(12, jnp.float16, scale=0.1)
    offloaded = wrap(params, **HYPER, initial_loss_scale=2.0**12, loss_scale_window=3)
    eager = Eager(optax.adamw(1e-2, weight_decay=0.1), to_float32(params))
    value_and_grad = offloaded.value_and_grad(loss_fn)
    scales = []
    for i in range(8):
        loss, grads = value_and_grad(offloaded.params, batch(i))
        np.testing.assert_allclose(loss, loss_fn(to_float32(offloaded.params), batch(i)), rtol=1e-2)
        scales.append(grads.scale)
        offloaded.update(grads)
        assert (offloaded.report.updated, offloaded.report.loss_scale) == (True, grads.scale)
        eager.update(jax.tree.map(lambda g, s=grads.scale: g.astype(jnp.float32) * np.float32(1 / s), grads.tree))
    assert scales == [2.0**12] * 3 + [2.0**13] * 3 + [2.0**14] * 2  # doubled after the update, never before
    assert_same_run(offloaded, eager)


@pytest.mark.draws(1)
@pytest.mark.parametrize("poison", [np.inf, -np.inf, np.nan])
def test_an_overflow_skips_the_update_whole(poison):
    offloaded = wrap(random_tree(13, jnp.float16), **HYPER, initial_loss_scale=1024.0)
    value_and_grad = offloaded.value_and_grad(loss_fn)
    offloaded.update(value_and_grad(offloaded.params, batch(0))[1])
    before, held = offloaded.to_pytree(), offloaded.params
    _, grads = value_and_grad(offloaded.params, batch(1))
    spoilt = ScaledGradients({**grads.tree, "embed": grads.tree["embed"].at[-1, -1].set(poison)}, grads.scale)
    after = offloaded.update(spoilt)
    assert (offloaded.report.updated, offloaded.report.skipped) == (False, "overflow")
    assert all(x is y for x, y in zip(jax.tree.leaves(after), jax.tree.leaves(held), strict=True))
    assert before.pop("loss_scale") == {"scale": 1024.0, "good_steps": 1, "tolerated": 0}
    states = offloaded.to_pytree()
    assert states.pop("loss_scale") == {"scale": 512.0, "good_steps": 0, "tolerated": 0}
    assert_same_tree(states, before)
    assert offloaded.count == 1
    with pytest.raises(GradientError, match="scaled by 1024, expected 512.*compute them anew"):
        offloaded.update(grads)  # from before the scale was halved
    assert_same_tree({**offloaded.to_pytree(), "loss_scale": None}, before)
    offloaded.update(value_and_grad(offloaded.params, batch(1))[1])
    assert (offloaded.report.updated, offloaded.count) == (True, 2)


def test_the_default_loss_scale_suits_an_fp32_loss():
    """It is 65536, which is no float16."""
    params = {"w": jnp.ones(4, jnp.float16)}
    offloaded = wrap(params)
    loss, grads = offloaded.value_and_grad(lambda p: 2.0**-10 * p["w"].astype(jnp.float32).sum())(params)
    assert (loss, loss.dtype, grads.scale) == (2.0**-8, jnp.float32, 65536)
    assert_same_tree(grads.tree, {"w": np.full(4, 64, np.float16)})
    assert offloaded.update(grads)["w"].dtype == jnp.float16
    assert offloaded.report.updated


def test_a_function_that_the_user_has_compiled_reads_the_scale_anew():
    """Also inside another program's loop. Its scale is an array, and not to be donated before the update."""
    offloaded = wrap({"w": jnp.ones(4, jnp.float16)}, loss_scale="dynamic", initial_loss_scale=2.0**17)
    grad = offloaded.value_and_grad(lambda p: p["w"].astype(jnp.float32).sum())

    @jax.jit
    def step(params):
        return jax.lax.scan(lambda _, __: (grad(params)[1], None), grad(params)[1], length=2)[0]

    found = []
    for _ in range(4):
        grads = step(offloaded.params)
        offloaded.update(grads)
        found.append((float(grads.scale), offloaded.report.updated))
    assert found == [(2.0**17, False), (2.0**16, False), (2.0**15, True), (2.0**15, True)]
    before, grads = offloaded.to_pytree(), step(offloaded.params)
    grads.scale.delete()
    with pytest.raises(GradientError, match="loss scale was donated or deleted"):
        offloaded.update(grads)
    assert_same_tree(offloaded.to_pytree(), before)


@pytest.mark.draws(1)
@pytest.mark.parametrize("compiled", [True, False])
def test_scaled_gradients_may_be_added_and_averaged_as_trees(compiled):
    """The scale comes along, compiled or not, and one from before an overflow is still told apart."""
    params = {"w": jnp.ones(4, jnp.float16)}
    offloaded, twin = (wrap(params, **HYPER, initial_loss_scale=1536.0) for _ in range(2))
    grad = offloaded.value_and_grad(lambda p, x: (x * p["w"]).astype(jnp.float32).sum())
    grad = jax.jit(grad) if compiled else grad
    of = [grad(offloaded.params, jnp.full(4, k, jnp.float16))[1] for k in (1, 2, 3)]
    total = jax.tree.map(lambda *leaves: sum(leaves), *of)
    mean = jax.tree.map(lambda leaf: leaf / 3, total)
    for grads, expected in ((total, 6), (mean, 2)):
        offloaded.update(grads)
        twin.update(ScaledGradients({"w": jnp.full(4, expected * 1536, jnp.float16)}, 1536.0))
        assert_same_tree(offloaded.params, twin.params)
    offloaded.update(jax.tree.map(lambda leaf: leaf * jnp.inf if leaf.ndim else leaf, total))
    with pytest.raises(GradientError, match="scaled by 1536, expected 768"):
        offloaded.update(mean)


@pytest.mark.draws(1)
@pytest.mark.parametrize("inner", [lambda f: f, jax.jit], ids=["plain", "compiled"])
@pytest.mark.parametrize("outer", [lambda f: f, jax.jit], ids=["eager", "in jit"])
def test_the_loss_scale_inside_shard_map_is_refused_by_name(inner, outer):
    offloaded = wrap({"w": jnp.ones(4, jnp.float16)}, initial_loss_scale=2.0)
    grad = inner(offloaded.value_and_grad(lambda p: p["w"].astype(jnp.float32).sum()))
    mesh = jax.make_mesh((1,), ("dp",))
    each = jax.shard_map(
        lambda p: grad(p)[1].tree, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    with pytest.raises(StateError, match=r"value_and_grad of float16 parameters inside shard_map.*wrap\(params, mesh"):
        outer(each)(offloaded.params)
    offloaded.update(grad(offloaded.params)[1])
    assert offloaded.report.updated


def test_scaled_gradients_are_a_pytree():
    grads = ScaledGradients({"w": jnp.ones(3)}, 8.0)
    doubled = jax.jit(functools.partial(jax.tree.map, lambda g: 2 * g))(grads)
    assert doubled.scale == 8.0
    assert_same_tree(doubled.tree, {"w": np.full(3, 2, np.float32)})


# --- trees: what passes through and what is preserved ----------------------------------------------------


def a_tree_of_everything():
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices("cpu")[:1])
    return {
        "w": jnp.ones((4, 3)),
        "half": jnp.ones(5, jnp.bfloat16),
        "scalar": jnp.asarray(2.0),
        "empty": jnp.zeros((0, 3)),
        "numpy": np.ones(3, np.float32),
        "committed": jax.device_put(jnp.ones(3), jax.devices("cpu")[0]),
        "sharded": jax.device_put(jnp.ones((2, 2)), NamedSharding(mesh, PartitionSpec("x"))),
        "ids": jnp.arange(3),
        "table": np.arange(3),
        "key": jax.random.key(0),
        "none": None,
        "n": 3,
        "rate": 0.5,
        "name": "relu",
        "function": jnp.tanh,
    }


PASSED = ("ids", "table", "key", "none", "n", "rate", "name", "function")


def test_other_leaves_pass_through_and_the_rest_keep_type_and_place():
    tree = a_tree_of_everything()
    offloaded = wrap(tree, **HYPER)
    grads = {k: None if k in PASSED else jnp.ones(np.shape(x), x.dtype) for k, x in tree.items()}
    for _ in range(3):
        updated = offloaded.update(grads)
        assert jax.tree.structure(updated) == jax.tree.structure(tree)
        assert all(updated[k] is tree[k] for k in PASSED)
        for k in tree.keys() - set(PASSED):
            assert isinstance(updated[k], jax.Array), k
            assert (updated[k].shape, updated[k].dtype) == (tree[k].shape, tree[k].dtype), k
            assert updated[k].weak_type is False, k
            assert k == "empty" or (np.array(updated[k]) < np.array(tree[k])).all(), k
    assert updated["sharded"].sharding == tree["sharded"].sharding
    assert updated["committed"].sharding == SingleDeviceSharding(jax.devices("cpu")[0])
    assert [k for k in updated if k not in PASSED and updated[k].committed] == ["committed", "sharded"]


def test_the_wrapped_arrays_are_not_touched():
    room = np.ones(4096 + 16, np.float32)
    aligned = room[-room.ctypes.data % 64 // 4 :][:4096]  # JAX shares such memory if it may
    tree = {"numpy": aligned, "w": jnp.ones((4, 3))}
    offloaded = wrap(tree, **HYPER)
    offloaded.update(jax.tree.map(jnp.ones_like, tree))
    assert_same_tree(tree, {"numpy": np.ones(4096, np.float32), "w": np.ones((4, 3), np.float32)})
    start = wrap(tree, **HYPER)
    tree["numpy"][:] = 7
    assert_same_tree(start.params["numpy"], np.ones(4096, np.float32))


def test_parameters_that_are_not_trainable_stay():
    params = random_tree(14)
    trainable = {"embed": False, "layers": True}
    offloaded, eager = (
        wrap(params, **HYPER, trainable=trainable),
        Eager(optax.adamw(1e-2, weight_decay=0.1), params["layers"]),
    )
    value_and_grad = offloaded.value_and_grad(loss_fn)
    for i in range(5):
        _, grads = value_and_grad(offloaded.params, batch(i))
        assert grads["embed"] is None
        eager.update(grads["layers"])
        updated = offloaded.update({**grads, "embed": jnp.ones((33, 17))} if i % 2 else grads)
        assert updated["embed"] is params["embed"]
    states = offloaded.to_pytree()
    assert states["master"]["embed"] is None
    assert_same_tree(states["master"]["layers"], eager.params)
    assert_same_tree(states["exp_avg_sq"]["layers"], eager.adam.nu)


def test_gradient_trees_of_other_node_types_are_taken():
    params, grads = random_tree(15), random_tree(150)
    by_list, by_tuple = wrap(params, **HYPER), wrap(params, **HYPER)
    by_list.update(grads)
    by_tuple.update({**grads, "layers": tuple(grads["layers"])})
    assert_same_tree(by_tuple.to_pytree(), by_list.to_pytree())


def test_numpy_gradients_are_taken():
    params, grads = random_tree(16), random_tree(160)
    by_jax, by_numpy = wrap(params, **HYPER), wrap(params, **HYPER)
    by_jax.update(grads)
    by_numpy.update(jax.tree.map(np.array, grads))
    assert_same_tree(by_numpy.to_pytree(), by_jax.to_pytree())


def test_the_memory_order_of_an_array_does_not_matter():
    def by_columns(tree):
        w = tree["embed"]
        return {**tree, "embed": jax.device_put(w, Format(Layout(major_to_minor=(1, 0)), w.sharding))}

    params, grads = random_tree(17), random_tree(170)
    rows, columns = wrap(params, **HYPER), wrap(by_columns(params), **HYPER)
    rows.update(grads)
    columns.update(by_columns(grads))
    assert_same_tree(columns.to_pytree(), rows.to_pytree())


# --- memory: nothing is written while somebody reads it, and nothing grows -------------------------------


@pytest.mark.draws(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_that_a_user_keeps_are_never_rewritten(dtype):
    """``jax.device_put`` aliases NumPy memory: a buffer used again too early would rewrite them."""
    offloaded = wrap(random_tree(18), **HYPER, param_dtype=dtype)
    kept = []
    for i in range(25):
        params = offloaded.update(random_tree(180 + i))
        if i < 5:
            copies = jax.tree.map(lambda x: np.array(x, copy=True), params)
            readers = {
                "arrays": params,
                "views": jax.tree.map(np.asarray, params),
                "moved": jax.device_put(params, jax.devices("cpu")[0]),
                "reshaped": jax.tree.map(lambda x: x.reshape(-1), params),
                "foreign": jax.tree.map(jnp.from_dlpack, params),
            }
            kept.append((list(readers.values())[i], copies))  # only one of them keeps the memory
            del readers
        del params
        for reader, copies in kept:
            assert_same_tree(jax.tree.map(lambda x, like: x.reshape(like.shape), reader, copies), copies)
    del reader, kept
    for i in range(3):
        offloaded.update(random_tree(i))
    assert generations(offloaded) <= 2


def test_a_computation_under_way_reads_the_parameters_that_it_was_given():
    params = {"w": jnp.ones((400, 400)), "b": jnp.ones(3)}
    grads = jax.tree.map(jnp.ones_like, params)

    @jax.jit
    def slow(w):
        product, _ = jax.lax.scan(lambda x, _: (x @ w / 400, None), w, length=20)
        return product + w

    offloaded = wrap(params, lr=0.1)
    for _ in range(3):
        expected = slow(np.array(offloaded.params["w"])).block_until_ready()
        under_way = slow(offloaded.params["w"])
        for _ in range(3):
            offloaded.update(grads)
        assert_same_tree(under_way, expected)


def test_two_generations_of_parameters_alternate():
    offloaded = wrap({"w": jnp.ones((1000, 100)), "b": jnp.ones(100)}, lr=1e-3)
    value_and_grad = offloaded.value_and_grad(lambda p, x: (jnp.tanh(x @ p["w"]) + p["b"]).sum())
    x = jnp.ones((10, 1000))
    params, seen = offloaded.params, set()
    for _ in range(50):
        _, grads = value_and_grad(params, x)
        params = offloaded.update(grads)
        seen.add(params["w"].unsafe_buffer_pointer())
        assert generations(offloaded) <= 2
    assert len(seen) == 2


def test_an_update_waits_for_a_computation_that_lets_go_late(monkeypatch):
    """A computation's thread may hold parameters for a moment after its results are there."""
    offloaded, grads = wrap(random_tree(19), **HYPER), random_tree(190)
    for _ in range(10):
        late = [jax.tree.map(np.asarray, offloaded.update(grads))]
        monkeypatch.setattr("frontends.jax.devices.device.time.sleep", lambda _, late=late: late.clear())
        offloaded.update(grads)
        offloaded.update(grads)
        assert generations(offloaded) == 2


def test_parameters_updated_in_turns_need_no_more_than_two_generations():
    params = random_tree(19)
    offloaded = wrap(params, **HYPER)
    leaves, treedef = jax.tree.flatten(random_tree(190))
    for i in range(3 * len(leaves)):
        offloaded.update(treedef.unflatten([g if j == i % len(leaves) else None for j, g in enumerate(leaves)]))
        assert generations(offloaded) <= 2


def test_parameters_and_gradients_may_be_donated():
    @functools.partial(jax.jit, donate_argnums=0)
    def double(tree):
        return jax.tree.map(lambda x: 2 * x, tree)

    offloaded, twin = wrap(random_tree(20), **HYPER), wrap(random_tree(20), **HYPER)
    doubled = []
    for i in range(6):
        grads = random_tree(200 + i)
        offloaded.update(grads)
        expected = jax.tree.map(lambda x: 2 * np.array(x), twin.update(grads))
        gradients = double(grads)
        assert all(g.is_deleted() for g in jax.tree.leaves(grads))  # no view of them is left
        assert_same_tree(gradients, jax.tree.map(lambda x: 2 * np.array(x), random_tree(200 + i)))
        doubled.append((double(offloaded.params), expected))  # the next update needs none of them
    for got, expected in doubled:
        assert_same_tree(got, expected)
    offloaded.update(random_tree(206))
    twin.update(random_tree(206))
    assert_same_tree(offloaded.to_pytree(), twin.to_pytree())


def test_nothing_grows_with_the_number_of_updates():
    n_bytes = 2**20
    offloaded = wrap({"w": jnp.ones((512, 512)), "b": jnp.ones(512)}, lr=1e-3, gradient_clipping=1.0)
    value_and_grad = offloaded.value_and_grad(lambda p, x: (jnp.tanh(x @ p["w"]) + p["b"]).sum())
    x = jnp.ones((1, 512))

    def train(n):
        for _ in range(n):
            _, grads = value_and_grad(offloaded.params, x)
            offloaded.update(grads)
        del grads
        gc.collect()
        kept = (len(jax.live_arrays()), generations(offloaded), offloaded.memory_report())
        return psutil.Process().memory_info().rss, kept

    (rss, kept), (later_rss, later_kept) = train(20), train(200)
    assert later_rss - rss < 20 * n_bytes  # one array an update would be 200
    assert later_kept == kept
    assert kept[1] == 2


# --- value_and_grad ----------------------------------------------------------------------------------


def test_value_and_grad_is_that_of_jax():
    params, x = random_tree(21), batch(0)
    loss, grads = wrap(params).value_and_grad(loss_fn)(params, x)
    expected_loss, expected = jax.jit(jax.value_and_grad(loss_fn))(params, x)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), grads, expected)


@pytest.mark.draws(1)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16], ids=["float32", "float16"])
def test_value_and_grad_takes_aux_and_keywords(dtype):
    def fun(params, x, *, power):
        out = params["w"] * x
        return (out**power).sum(), {"out": out, "power": power}

    params = {"w": jnp.asarray([1.0, 2.0], dtype)}
    offloaded = wrap(params, initial_loss_scale=16.0)
    (value, aux), grads = offloaded.value_and_grad(fun, has_aux=True)(params, jnp.asarray([3.0, 4.0], dtype), power=2)
    assert (value.dtype, float(value), int(aux["power"])) == (dtype, 9 + 64, 2)
    assert_same_tree(aux["out"], np.asarray([3, 8], dtype))
    if dtype == jnp.float16:
        assert grads.scale == 16
        grads = jax.tree.map(lambda g: g / 16, grads.tree)
    assert_same_tree(grads, {"w": np.asarray([18, 64], dtype)})


def test_value_and_grad_sees_every_leaf_and_gives_none_for_what_is_not_trained():
    def fun(params):
        assert params["name"] == "relu"
        assert params["n"] == 3
        assert params["none"] is None
        noise = jax.random.normal(params["key"], (3,))
        return (params["function"](params["w"]).sum() + params["table"].sum() * params["rate"]) * params["n"] + (
            noise * params["numpy"]
        ).sum()

    tree = a_tree_of_everything()
    value, grads = wrap(tree).value_and_grad(fun)(tree)
    np.testing.assert_allclose(value, fun(tree), rtol=1e-6)
    assert [k for k in tree if grads[k] is None] == [k for k in tree if k in PASSED]
    np.testing.assert_allclose(grads["numpy"], jax.random.normal(tree["key"], (3,)), rtol=1e-6)


def test_value_and_grad_compiles_once():
    traces = []

    def fun(params, x):
        traces.append(params)
        return (params["w"] * x).sum() * params["n"]

    params = {"w": np.ones(3, np.float16), "n": 2, "weak": jnp.asarray(1.0)}
    offloaded = wrap(params, initial_loss_scale=4.0, loss_scale_window=1)
    value_and_grad = offloaded.value_and_grad(fun)
    for _ in range(4):  # the loss scale grows at every update
        _, grads = value_and_grad(offloaded.params, jnp.ones(3, jnp.float16))
        offloaded.update(grads)
    assert len(traces) == 1
    value_and_grad({**offloaded.params, "n": 3}, jnp.ones(3, jnp.float16))  # a leaf that is not traced has changed
    assert len(traces) == 2


# --- states ------------------------------------------------------------------------------------------


def test_states_are_loaded_in_another_thread_as_in_the_main_one():
    def train(offloaded, steps):
        value_and_grad = offloaded.value_and_grad(loss_fn)
        for i in steps:
            offloaded.update(value_and_grad(offloaded.params, batch(i))[1])
        return offloaded.to_pytree()

    def load_and_train():
        offloaded = wrap(random_tree(23), lr=1e-2)
        train(offloaded, range(1))
        offloaded.load_pytree(saved)
        changed = jax.tree.map(lambda leaf: leaf * 2, offloaded.params)
        offloaded.load_params(changed)
        return train(offloaded, range(4, 6))

    saved = train(wrap(random_tree(22, scale=0.1), lr=1e-2), range(4))
    task = Task(load_and_train)
    threading.Thread(target=task.run).start()
    assert_same_tree(task.result(), load_and_train())


def test_states_include_what_is_not_trained():
    tree = a_tree_of_everything()
    saved = wrap(tree).to_pytree()
    assert isinstance(saved["params"]["key"], np.ndarray)
    other = {**tree, "ids": jnp.zeros(3, jnp.int32), "key": jax.random.key(5), "table": np.zeros(3, int)}
    loaded = wrap(other).load_pytree(saved)
    assert_same_tree(loaded["ids"], tree["ids"])
    assert_same_tree(loaded["table"], tree["table"])
    assert loaded["key"] == tree["key"]
    assert loaded["function"] is jnp.tanh
    assert loaded["sharded"].sharding == tree["sharded"].sharding


def test_loading_forgets_gradients_that_wait_for_their_update():
    offloaded, twin = (wrap(random_tree(24), **HYPER, gradient_accumulation_steps=2) for _ in range(2))
    offloaded.update(random_tree(240))
    offloaded.load_pytree(twin.to_pytree())
    for i in range(2):
        offloaded.update(random_tree(241 + i))
        twin.update(random_tree(241 + i))
    assert offloaded.report.updated
    assert_same_tree(offloaded.to_pytree(), twin.to_pytree())


@pytest.mark.states_in_memory
def test_the_memory_report_agrees_with_the_plan():
    params = random_tree(25)
    numel = sum(x.size for x in jax.tree.leaves(params))
    report = wrap(params, param_dtype="bfloat16", gradient_accumulation_steps=2).memory_report()
    assert report.host_bytes == report.planned_host_bytes
    assert 16 * numel <= report.host_bytes <= 16 * (numel + 16)
    assert (report.numel, report.device_bytes) == (numel, 2 * numel)


def test_the_memory_report_counts_what_is_not_trained():
    params = {"w": jnp.ones((8, 4)), "base": jnp.ones((64, 4)), "ids": jnp.arange(6), "key": jax.random.key(0)}
    offloaded = wrap(params, trainable={"w": True, "base": False, "ids": False, "key": False})
    report = offloaded.memory_report()
    assert report.numel == 32
    assert report.device_bytes == report.planned_device_bytes == 4 * (32 + 64 * 4 + 6 + 2)


def test_a_config_object_and_a_dict_mean_the_same():
    params, grads = random_tree(26), random_tree(260)
    runs = [wrap(params, OffloadConfig(**HYPER)), wrap(params, HYPER), wrap(params, {"lr": 1.0}, **HYPER)]
    for offloaded in runs:
        offloaded.update(grads)
    for offloaded in runs[1:]:
        assert_same_tree(offloaded.to_pytree(), runs[0].to_pytree())


# --- optax -------------------------------------------------------------------------------------------


@pytest.mark.long("XLA compiles; the first of its file imports and starts JAX")
@law(12, least=3)
@given(
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.sampled_from([0.0, 1e-30, 1e-8, 1e-3, 1.0, 1e4]),
    st.sampled_from([0.0, 1e-12, 1e-3, 1.0]),
    st.integers(0, 2**16),
)
def test_apply_updates_gives_exactly_the_offloaded_parameters(dtype, scale, lr, seed):
    """Whatever their size, beside that of the update: parameters at zero, and such as the update cancels."""
    params = random_tree(seed, dtype, scale)
    params["layers"][0]["w"] = jnp.full((17, 3), -0.0, dtype)
    params["layers"][0]["b"] = jnp.full(3, lr, dtype)  # the first update of Adam is about lr
    offloaded = wrap(params, lr=lr, loss_scale=1)
    tx = offloaded.as_optax()
    state = tx.init(params)
    for i in range(3):
        grads = random_tree(seed + i, dtype)
        grads["layers"][0] = {"w": jnp.zeros((17, 3), dtype), "b": jnp.ones(3, dtype)}
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        if dtype == "float16":  # where a tiny negative master rounds to a zero whose sign no sum can give
            assert_same_tree(*(jax.tree.map(lambda x: x + jnp.float16(0), tree) for tree in (params, offloaded.params)))
        else:
            assert_same_tree(params, offloaded.params)
        assert int(state.step) == offloaded.count == i + 1


def test_apply_updates_is_exact_where_the_new_parameter_is_a_power_of_two():
    """Below a power of two floats are twice as dense: the rounded difference may give the one below."""
    near = np.float32(1 - 1.1).view(np.int32) + np.arange(-2048, 2048, dtype=np.int32)
    params = {"w": jnp.asarray(near.view(np.float32)), "b": jnp.zeros(2)}
    offloaded = wrap(params, lr=1.1, weight_decay=0.0)
    tx = offloaded.as_optax()
    updates, _ = tx.update(jax.tree.map(lambda p: -jnp.ones_like(p), params), tx.init(params), params)
    assert all(isinstance(u, jax.Array) for u in jax.tree.leaves(updates))
    assert (np.array(offloaded.params["w"]) == 1).any()
    assert_same_tree(optax.apply_updates(params, updates), offloaded.params)


def test_as_optax_adds_nothing_where_nothing_is_updated():
    params = {**random_tree(28), "ids": jnp.arange(3), "frozen": jnp.asarray([1.0, -0.0])}
    trainable = {**jax.tree.map(lambda _: True, params), "frozen": False}
    offloaded = wrap(params, **HYPER, trainable=trainable, gradient_accumulation_steps=2)
    tx = offloaded.as_optax()
    state = tx.init(params)
    for i in range(4):
        grads = {**random_tree(280 + i), "ids": None, "frozen": None}
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        assert int(state.step) == (i + 1) // 2
        assert_same_tree(params, offloaded.params)
        assert_same_tree(params["frozen"], np.asarray([1.0, -0.0], np.float32))


def test_a_stale_optax_state_is_refused():
    params = random_tree(29)
    offloaded = wrap(params, **HYPER)
    tx = offloaded.as_optax()
    first = tx.init(params)
    updates, second = tx.update(random_tree(290), first, params)
    params = optax.apply_updates(params, updates)
    before = offloaded.to_pytree()
    with pytest.raises(StateError, match="state of update 0, expected that of update 1.*load_pytree"):
        tx.update(random_tree(291), first, params)
    assert_same_tree(offloaded.to_pytree(), before)
    tx.update(random_tree(291), second, params)
    assert offloaded.count == 2


def test_discarded_gradients_are_forgotten():
    offloaded, twin = (wrap(random_tree(8), **HYPER, gradient_accumulation_steps=2) for _ in range(2))
    offloaded.update(random_tree(70))
    offloaded.discard_gradients()
    for offloaded_or_twin in (offloaded, twin):
        for seed in (80, 81):
            offloaded_or_twin.update(random_tree(seed))
    assert_same_tree(offloaded.to_pytree(), twin.to_pytree())


def test_an_interrupted_update_leaves_parameters_that_go_on(monkeypatch):
    offloaded = wrap(random_tree(8), **HYPER)
    with monkeypatch.context() as patch:
        patch.setattr(
            type(offloaded._core._pipeline.updates), "start", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt())
        )
        with pytest.raises(KeyboardInterrupt):
            offloaded.update(random_tree(80))
    offloaded.update(random_tree(81))
    assert offloaded.report.updated


def test_copies_share_no_memory_because_there_are_none():
    offloaded = wrap(random_tree(8), **HYPER)
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(StateError, match=r"to_pytree\(\) and load_pytree\(\) in JAX"):
            attempt(offloaded)


def test_numpy_scalars_are_parameters():
    offloaded = wrap({"a": np.float32(2.0), "b": np.ones(3, np.float32)}, **HYPER)
    offloaded.update({"a": np.float32(1.0), "b": np.ones(3, np.float32)})
    assert offloaded.params["a"] != 2.0


def test_betas_of_a_schedule_may_be_arrays():
    constant, scheduled = (
        wrap({"w": jnp.ones(3)}, lr=1e-2, betas=betas)
        for betas in ((0.5, 0.75), lambda count: (jnp.float32(0.5), np.array(0.75)))
    )
    for _ in range(2):
        assert_same_tree(scheduled.update({"w": jnp.ones(3)}), constant.update({"w": jnp.ones(3)}))


class Counted:
    """In place of a device whose allocator counts."""

    device_kind = "NVIDIA H200"

    def memory_stats(self):
        return {"bytes_in_use": 7, "peak_bytes_in_use": 9, "num_allocs": 3}


def test_memory_in_use_is_that_of_all_devices_and_unknown_where_jax_counts_none():
    offloaded = wrap({"w": jnp.ones(4)}, lr=1e-2)
    assert offloaded.device_use() is None  # in host memory
    assert device_use([Counted(), Counted()]) == DeviceUse("NVIDIA H200", 14, 18, 2)
    assert device_use([Counted(), *jax.devices("cpu")]) is None
    assert device_use([]) is None
