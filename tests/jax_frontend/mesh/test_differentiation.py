"""Losses and gradients of ``value_and_grad``."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from frontends.jax import RankGradients, ScaledGradients, gather_params, gathered, wrap
from offload_core.errors import GradientError, ParameterError
from tests.support import jax_stage3 as stage3
from tests.support.jax_meshes import (
    HYPER,
    assert_same_replicas,
    assert_same_tree,
    averaged,
    batch_of,
    mesh_of,
    processes,
    refuses,
    slow,
    split,
)
from tests.support.jax_stage2 import loss_fn, tree_of
from tests.support.jax_stage3 import STAGE3, W


@pytest.mark.draws(1)
@processes(1, 2)
def test_each_rank_gives_the_gradients_of_its_own_part_of_the_batch():
    """Gradients of what all ranks share would come summed: each W times too large."""
    mesh = mesh_of(4)
    offloaded = wrap(tree_of(2), **HYPER, mesh=mesh)
    batch = batch_of(3)
    value, grads = offloaded.value_and_grad(loss_fn)(offloaded.params, split(batch, mesh))
    assert isinstance(grads, RankGradients)
    single = jax.jit(jax.value_and_grad(loss_fn))
    parts = [single(tree_of(2), part) for part in batch.reshape(4, -1, 33)]
    np.testing.assert_allclose(value, np.mean([float(v) for v, _ in parts]), rtol=1e-6)
    ranks = {d: r for r, d in enumerate(mesh.devices.flat)}
    for path, stacked in jax.tree_util.tree_leaves_with_path(grads.tree):
        expected = [dict(jax.tree_util.tree_leaves_with_path(g))[path] for _, g in parts]
        assert stacked.shape == (4, *expected[0].shape)
        for shard in stacked.addressable_shards:
            np.testing.assert_allclose(np.asarray(shard.data)[0], expected[ranks[shard.device]], rtol=1e-4, atol=1e-7)


def test_without_the_cast_to_varying_gradients_would_be_summed():
    """The cast relies on this behaviour of JAX. If this test fails, JAX has changed."""
    mesh = mesh_of(4)

    def gradient(cast):
        def each(w, x):
            if cast:
                w = lax.pcast(w, "dp", to="varying")
            return jnp.asarray(jax.grad(lambda w: (w * x).sum())(w)).reshape(1)

        return jax.shard_map(each, mesh=mesh, in_specs=(P(), P("dp")), out_specs=P("dp"), check_vma=True)

    w, x = jnp.float32(2.0), jnp.arange(4.0)
    assert jax.jit(gradient(True))(w, x).tolist() == [0, 1, 2, 3]
    assert jax.jit(gradient(False))(w, x).tolist() == [6, 6, 6, 6]


@pytest.mark.draws(1)
@processes(1, 2)
def test_training_on_a_mesh_is_training_on_the_whole_batch():
    mesh = mesh_of(jax.device_count())
    ours = wrap(tree_of(3), lr=1e-2, mesh=mesh)
    with jax.default_device(jax.local_devices()[0]):
        theirs = wrap(tree_of(3), lr=1e-2)
    by_ours, by_theirs = ours.value_and_grad(loss_fn, in_specs=P("dp")), theirs.value_and_grad(loss_fn)
    losses = []
    for seed in range(10):
        loss, grads = by_ours(ours.params, batch_of(seed % 2))  # NumPy: cut as in_specs says
        ours.update(grads)
        loss_of_one, grads = by_theirs(theirs.params, batch_of(seed % 2))
        theirs.update(grads)
        np.testing.assert_allclose(loss, loss_of_one, rtol=1e-4)
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 1e-3


@pytest.mark.draws(1)
@processes(1, 2)
def test_aux_is_averaged_where_it_is_floating_point_and_rank_0s_elsewhere():
    mesh = mesh_of(4)

    def fun(params, x, y, *, power, key):
        rank = lax.axis_index("dp")
        aux = {
            "mean": x.mean(),
            "rank": rank,
            "first": rank == 0,
            "n": power,
            "key": key,
            "half": x[0, 0].astype("bfloat16"),
        }
        return params["w"].sum() * x.sum() ** power + y["bias"].sum(), aux

    offloaded = wrap(
        {"w": np.ones(3, np.float32), "frozen": np.float32(1)}, mesh=mesh, trainable={"w": True, "frozen": False}
    )
    x = np.arange(8, dtype=np.float32).reshape(8, 1)
    (value, aux), grads = offloaded.value_and_grad(fun, has_aux=True)(
        offloaded.params, split(x, mesh), {"bias": np.ones(2, np.float32)}, power=2, key=jax.random.key(3)
    )
    sums = x.reshape(4, 2).sum(1)
    assert float(value) == np.mean([3 * s**2 + 2 for s in sums])
    assert (float(aux["mean"]), int(aux["rank"]), bool(aux["first"]), int(aux["n"])) == (x.mean(), 0, True, 2)
    assert (aux["half"].dtype, float(aux["half"])) == (jnp.bfloat16, 3.0)
    assert aux["key"] == jax.random.key(3)
    assert grads.tree["frozen"] is None
    for shard in grads.tree["w"].addressable_shards:
        rank = shard.index[0].start
        assert np.array_equal(shard.data, np.full((1, 3), sums[rank] ** 2))
    assert_same_replicas([value, aux["mean"], aux["rank"]], mesh)


def test_jax_may_look_for_nans_or_run_without_jit(drawn):
    """In stage 3 the values of ungathered parameters, which nobody may use, are not what it finds."""
    mesh = mesh_of(2)
    x = split(batch_of(5, 4)[:, :8], mesh)
    params = {"w": np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)}
    body = gathered(lambda w, x: x @ w)

    def squares(params, x):
        return (body(params["w"], x) ** 2).sum()

    def wrong(params, x):
        return jnp.log(-1 - squares(params, x))

    def trained():
        offloaded = wrap(params, **HYPER, **STAGE3, mesh=mesh)
        offloaded.update(offloaded.value_and_grad(squares)(offloaded.params, x)[1])
        return offloaded

    expected = trained()

    def nans():
        with jax.debug_nans(True):
            assert_same_tree(trained().to_pytree(), expected.to_pytree())
            with refuses(FloatingPointError, "nan"):
                expected.value_and_grad(wrong)(expected.params, x)

    def without_jit():
        with jax.disable_jit():
            slowly = trained().to_pytree()
        np.testing.assert_allclose(slowly["master"]["w"], expected.to_pytree()["master"]["w"], rtol=1e-6)
        assert slowly["count"] == 1

    for check in drawn((nans, without_jit), 1):
        check()


def test_loss_scaling_works_on_a_mesh():
    mesh = mesh_of(4)
    offloaded = wrap(tree_of(4, scale=0.1), mesh=mesh, param_dtype="float16", initial_loss_scale=1024.0)
    value_and_grad = offloaded.value_and_grad(loss_fn)
    value, grads = value_and_grad(offloaded.params, split(batch_of(0), mesh))
    assert isinstance(grads, ScaledGradients)
    assert grads.scale == 1024
    np.testing.assert_allclose(value, jax.jit(loss_fn)(tree_of(4, scale=0.1), batch_of(0)), rtol=1e-2)
    before = offloaded.to_pytree()
    poisoned = jax.tree.map(lambda g: g, grads)
    poisoned.tree.tree["embed"] = poisoned.tree.tree["embed"].at[2, 0, 0].set(jnp.inf)  # on one rank only
    offloaded.update(poisoned)
    assert offloaded.report.skipped == "overflow"
    assert_same_tree(offloaded.to_pytree()["master"], before["master"])
    with refuses(GradientError, "scaled by 1024, expected 512"):
        offloaded.update(grads)
    offloaded.update(value_and_grad(offloaded.params, split(batch_of(0), mesh))[1])
    assert offloaded.report.updated


def test_a_function_may_start_a_scan_from_zeros_without_the_check():
    mesh = mesh_of(2)

    def fun(params, x):
        carry, _ = lax.scan(lambda c, row: (jnp.tanh(c + row * params["w"]), None), jnp.zeros(3), x)
        return carry.sum()

    offloaded = wrap({"w": np.ones(3, np.float32)}, mesh=mesh)
    x = batch_of(0, 4)[:, :3]
    _, grads = offloaded.value_and_grad(fun, check_vma=False)(offloaded.params, split(x, mesh))
    for rank in range(2):
        expected = jax.grad(fun)({"w": jnp.ones(3)}, x[2 * rank : 2 * rank + 2])["w"]
        np.testing.assert_allclose(grads.tree["w"][rank], expected, rtol=1e-5)


def test_nothing_is_compiled_again():
    mesh = mesh_of(4)
    traces = []

    def fun(params, x):
        traces.append(x)
        return loss_fn(params, x)

    offloaded = wrap(tree_of(0), **HYPER, mesh=mesh, reduce_bucket_size=100)
    value_and_grad = offloaded.value_and_grad(fun)
    device = offloaded._core.device
    sizes = set()
    for seed in range(5):
        _, grads = value_and_grad(offloaded.params, split(batch_of(seed), mesh))
        offloaded.update(grads)
        programs = (device._reduce_unreduced, device._gather)
        sizes.add(tuple(program._cache_size() for program in programs))
    assert len(traces) == 1
    assert len(sizes) == 1
    n_buckets = len(offloaded._core._pipeline.buckets.all)
    assert all(0 < size <= n_buckets for size in sizes.pop())


# --- of stage 3 -------------------------------------------------------------------------------------------------------


@pytest.mark.draws(1)
@pytest.mark.parametrize(
    ("check_vma", "within"),
    [(True, "no jit"), (False, "jit"), slow(False, "no jit"), slow(True, "jit")],
)
def test_layers_may_be_looped_over_and_options_passed_on(check_vma, within):
    """A list of layers, static arguments, keyword arguments, aux, a caller's jit, no check of what varies."""
    mesh, rng = mesh_of(W), np.random.default_rng(0)
    layers = [{"w": rng.standard_normal((33, 33)).astype(np.float32) / 6, "v": np.ones((33, 8), np.float32)}] * 3

    def layer_fn(layer, x, power, *, shift):
        return jnp.tanh(x @ layer["w"]) ** power + shift + layer["v"].mean()

    def fun(params, x, *, shift):
        keep = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        for layer in params["layers"]:
            x = gathered(layer_fn, static_argnums=2, policy=keep)(layer, x, 2, shift=shift)
        return x.mean() * params["frozen"], {"n": x.shape[0]}

    params = {"layers": layers, "frozen": np.float32(2.0)}
    offloaded = wrap(params, **STAGE3, mesh=mesh, trainable={"layers": True, "frozen": False})
    call = offloaded.value_and_grad(fun, has_aux=True, in_specs=P("dp"), check_vma=check_vma)
    call = jax.jit(call) if within == "jit" else call
    (value, aux), grads = call(offloaded.params, batch_of(0), shift=0.5)
    assert int(aux["n"]) == 24 // W
    alone = jax.jit(jax.value_and_grad(lambda layers: fun({**params, "layers": layers}, batch_of(0), shift=0.5)[0]))
    expected_value, expected = alone(layers)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    for got, wanted in zip(grads.tree["layers"], expected, strict=True):
        assert got["w"].shape == (W, 33, 33)  # 33 divides by nothing here: whole
        np.testing.assert_allclose(np.asarray(got["w"]).mean(0), wanted["w"], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(got["v"], wanted["v"], rtol=1e-4, atol=1e-6)
    assert grads.tree["frozen"] is None


def test_axes_of_size_one_beside_the_axis_change_nothing_at_stage_3():
    devices = np.array(jax.devices()[:W]).reshape(1, W, 1)
    mesh = jax.sharding.Mesh(devices, ("replica", "dp", "tp"))
    losses = []
    for m, spec in ((mesh, P("dp", "tp")), (mesh_of(W), P("dp"))):
        offloaded = wrap({"w": stage3.tree_of(0)["embed"]}, **HYPER, **STAGE3, mesh=m, axis="dp")
        value_and_grad = offloaded.value_and_grad(lambda p, x: (x @ gather_params(p["w"])).var(), in_specs=spec)
        loss, grads = value_and_grad(offloaded.params, batch_of(0))
        offloaded.update(grads)
        losses.append([loss, *jax.tree.leaves(offloaded.params)])
    assert_same_tree(*losses)


def test_without_shards_the_helpers_change_nothing():
    tree = {"w": jnp.ones((3, 2)), "n": 3, "none": None}
    assert all(gather_params(tree)[name] is leaf for name, leaf in tree.items())
    layer = {**tree, "activation": jnp.tanh, "name": "a layer"}  # a module's leaves need not be arrays
    layer_fn = gathered(lambda p, x, times: sum(p["activation"](x @ p["w"]) for _ in range(times)), static_argnums=2)
    np.testing.assert_allclose(jax.jit(lambda x: layer_fn(layer, x, 3))(np.ones((1, 3))), 3 * np.tanh([[3.0, 3.0]]))
    offloaded = wrap(stage3.tree_of(0, scale=0.3), **HYPER, stage=3)
    loss, grads = offloaded.value_and_grad(stage3.loss_fn)(offloaded.params, batch_of(0))
    np.testing.assert_allclose(loss, stage3.loss_fn(stage3.tree_of(0, scale=0.3), batch_of(0)), rtol=1e-5)
    offloaded.update(grads)


def test_a_shard_that_was_not_gathered_says_what_to_do():
    mesh = mesh_of(W)
    offloaded = wrap(stage3.tree_of(0), **STAGE3, mesh=mesh)
    batch = split(batch_of(0), mesh)
    ways = (
        ("computed with", lambda p, x: (x @ p["embed"]).sum()),
        ("computed with", lambda p, x: (2 * p["embed"]).sum()),
        ("computed with", lambda p, x: (-p["embed"]).sum()),
        ("indexed", lambda p, x: p["embed"][0].sum() + x.sum()),
        (
            "has lost the dimension (-1)",
            lambda p, x: lax.scan(
                lambda c, row: (c + gathered(lambda r, c: r.sum() + c)(row, c), None),
                x.sum(),
                jax.tree.map(lambda leaf: leaf[:, 0], p["embed"]),
            )[0],
        ),
    )
    for words, fun in ways:
        with refuses(ParameterError, words, "gather"):
            offloaded.value_and_grad(fun)(offloaded.params, batch)
    with refuses(AttributeError, "'sum' of a parameter that is to be gathered", "gather_params(params)"):
        offloaded.value_and_grad(lambda p, x: p["embed"].sum())(offloaded.params, batch)


def test_what_is_computed_of_a_shards_leaves_is_right_or_nan(drawn):
    """A tree of shards has leaves: one rank's part of the parameter, and what the gradient is taken with respect to."""
    mesh = mesh_of(W)
    tree = {"w": stage3.tree_of(0, scale=0.3)["embed"]}
    ours, theirs = wrap(tree, **STAGE3, mesh=mesh), wrap(tree, mesh=mesh)

    def loss(params, x):
        return (x @ gather_params(params)["w"]).var()

    def by_tree_map(function):
        mapped = lambda params, x: loss(jax.tree.map(function, params), x)  # noqa: E731
        return [o.value_and_grad(mapped, in_specs=P("dp"))(o.params, batch_of(0)) for o in (ours, theirs)]

    def right(linear):
        (value, grads), (expected, of_ranks) = by_tree_map(linear)
        assert_same_tree([value, grads.tree["w"]], [expected, averaged(np.asarray(of_ranks.tree["w"]))])

    def squared():
        (_, grads), _ = by_tree_map(jnp.square)
        assert np.isnan(grads.tree["w"]).all()

    def decayed():
        decay = lambda p, x: loss(p, x) + sum((leaf**2).sum() for leaf in jax.tree.leaves(p))  # noqa: E731
        assert np.isnan(ours.value_and_grad(decay, in_specs=P("dp"))(ours.params, batch_of(0))[0])

    linear = (partial(right, lambda w: 2 * w), partial(right, lambda w: w.astype(jnp.bfloat16)))
    for check in (*drawn(linear, 1), *drawn((squared, decayed), 1)):
        check()
