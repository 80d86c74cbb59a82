"""Laws of stage 3 in JAX, which jax_mesh_worker.py runs with its own."""

import functools
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_mesh_worker import (
    HYPER,
    addresses,
    assert_same_tree,
    averaged,
    batch_of,
    mesh_of,
    one_process,
    refuses,
    replicated,
    run,  # noqa: F401 (what a worker calls)
    split,
    two_processes,
)

import frontends.jax.sharded as sharded
from frontends.jax import RankGradients, ScaledGradients, gather_params, gathered, wrap
from frontends.jax.gather import Gathering, reduce_scatter
from offload_core.dtypes import BFLOAT16
from offload_core.errors import ConfigError, GradientError, ParameterError

W = 4
"""Ranks, where a law does not say another number."""
SHAPES = {
    "embed": (33, 24),
    "layers": {"w": (3, 24, 24), "b": (3, 24)},
    "odd": (5, 7),  # nothing of it divides: it stays whole
    "small": (8,),
    "empty": (0, 24),
}
STAGE3 = {"stage": 3, "param_persistence_threshold": 20}
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter", "collective-permute", "collective-broadcast")


def tree_of(seed, dtype=np.float32, stack=(), scale=1.0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: (scale * rng.standard_normal((*stack, *shape)).astype(np.float32)).astype(dtype),
        SHAPES,
        is_leaf=lambda shape: isinstance(shape, tuple),
    )


def dim_of(name, world_size):
    """The dimension that a parameter is cut along, or None, as ``wrap`` says."""
    divided = {"embed": 24, "w": 24, "b": 24, "odd": 7}.get(name)
    return None if divided is None or divided % world_size else 1


def names_of(tree):
    return [path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def map_named(function, tree):
    return jax.tree_util.tree_map_with_path(lambda path, leaf: function(path[-1].key, leaf), tree)


def cut(array, mesh, dim):
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, P(*[None] * dim, "dp")), lambda i: array[i])


def gradients_of(stacked, mesh):
    """What ``value_and_grad`` gives for these gradients of all ranks."""

    def one(name, g):
        dim = dim_of(name, mesh.devices.size)
        return split(g, mesh) if dim is None else cut(averaged(g), mesh, dim)

    return RankGradients(map_named(one, stacked))


def assert_placed(params, mesh, memory_kind="device"):
    """Each device has its slice of what is cut, and all of the rest."""
    for name, leaf in zip(names_of(params), jax.tree.leaves(params), strict=True):
        dim = dim_of(name, mesh.devices.size)
        spec = P() if dim is None else P(*[None] * dim, "dp")
        kind = "device" if dim is None else memory_kind
        assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, spec, memory_kind=kind), leaf.ndim), name
        ranks = {device: rank for rank, device in enumerate(mesh.devices.flat)}
        for shard in leaf.addressable_shards:
            if dim is not None and len(ranks) > 1:
                n = leaf.shape[dim] // mesh.devices.size
                assert shard.index[dim] == slice(ranks[shard.device] * n, (ranks[shard.device] + 1) * n), name


def whole(tree, offloaded):
    """In NumPy, what other processes hold included; ``tree`` is or was ``offloaded.params``."""
    layouts = jax.tree.unflatten(jax.tree.structure(tree), [leaf.layout for leaf in offloaded._tree.trained])
    return jax.tree.map(offloaded._placement.to_numpy, tree, layouts)


def loss_fn(params, x):
    """Stacked layers, and one parameter that is used twice."""
    embed = gather_params(params["embed"])
    body = gathered(lambda layer, x: jnp.tanh(x @ layer["w"] + layer["b"]))
    x, _ = lax.scan(lambda x, layer: (body(layer, x), None), jnp.tanh(x @ embed), params["layers"])
    return (x**2).mean() + ((x @ embed.T) ** 2).mean() + (params["odd"] ** 2).mean() + params["small"].sum() * x.sum()


# --- the same bits -----------------------------------------------------------------------------------


def assert_equals_one_device(mesh, dtype, steps=3, **fields):
    """Several steps of random gradients, some missing, against one device and the averaged gradients."""
    world_size = mesh.devices.size
    micro_steps = fields.get("gradient_accumulation_steps", 1)
    fields |= {"mask": functools.partial(jax.tree.map, lambda p: p.ndim > 1)}
    ours = wrap(tree_of(0), **HYPER, **STAGE3, mesh=mesh, param_dtype=dtype, **fields)
    memory_kind = "device" if fields.pop("offload_param", None) is None else "pinned_host"
    with jax.default_device(jax.local_devices()[0]):
        theirs = wrap(tree_of(0), **HYPER, param_dtype=dtype, **fields)
    assert_placed(ours.params, mesh, memory_kind)
    for step in range(steps):
        for micro_step in range(micro_steps):
            stacked = tree_of(100 * step + micro_step, jnp.dtype(dtype), (world_size,), scale=3.0**-step)
            grads, mean = gradients_of(stacked, mesh), jax.tree.map(averaged, stacked)
            if step % 2:
                grads.tree["layers"]["w"] = mean["layers"]["w"] = None
            if step == 2:
                grads.tree["embed"] = mean["embed"] = None
            if ours._pipeline.scaler is not None:
                scale = ours._pipeline.loss_scale
                grads, mean = ScaledGradients(grads, scale), ScaledGradients(mean, scale)
            assert_same_tree(whole(ours.update(grads), ours), theirs.update(mean))
        assert ours.report == theirs.report
        assert ours.report.updated
    assert_placed(ours.params, mesh, memory_kind)
    assert {leaf.dtype for leaf in jax.tree.leaves(ours.params)} == {jnp.dtype(dtype)}
    assert_same_tree(ours.to_pytree(), theirs.to_pytree())
    return ours


@one_process
def sharded_parameters_have_the_bits_of_one_device_on_the_averaged_gradients():
    assert_equals_one_device(mesh_of(1), "bfloat16", gradient_accumulation_steps=2)
    assert_equals_one_device(mesh_of(3), "float32", gradient_clipping=0.5, reduce_bucket_size=300, schedule="serial")
    assert_equals_one_device(mesh_of(8), "float16", initial_loss_scale=64.0, loss_scale_window=2)
    assert_equals_one_device(mesh_of(W, AxisType.Explicit), "bfloat16", reduce_bucket_size=1000)


@one_process
def parameters_in_host_memory_have_the_same_bits():
    offloaded = assert_equals_one_device(mesh_of(W), "bfloat16", offload_param="cpu", reduce_bucket_size=500)
    in_host = [leaf for leaf in jax.tree.leaves(offloaded.params) if leaf.sharding.memory_kind == "pinned_host"]
    report = offloaded.memory_report()
    assert len(in_host) == 3
    shards = sum(s.data.nbytes for leaf in in_host for s in leaf.addressable_shards)
    assert report.host["shards of parameters"] == shards
    assert report.host_bytes == report.planned_host_bytes
    [room] = [row for row in report.rows if row.what == "next shards of parameters"]
    assert (room.where, room.planned, room.held, room.brief) == ("host", shards, 0, True)


@two_processes
def sharded_parameters_of_two_processes_have_the_bits_of_one_device():
    fields = {"gradient_clipping": 0.5, "reduce_bucket_size": 500, "offload_param": "cpu"}
    assert_equals_one_device(mesh_of(W), "bfloat16", **fields)


@one_process
@two_processes
def training_at_stage_3_is_training_at_stage_2():
    """Forward and backward too, and the norm: the transpose of gathering is the core's reduction."""
    dtype, offload_param = ("bfloat16", "cpu") if jax.process_count() == 1 else ("float32", None)
    mesh = mesh_of(W)
    fields = {**HYPER, "mesh": mesh, "param_dtype": dtype, "gradient_clipping": 0.1}
    ours = wrap(tree_of(0, scale=0.3), **fields, **STAGE3, offload_param=offload_param)
    theirs = wrap(tree_of(0, scale=0.3), **fields)
    by_ours, by_theirs = ours.value_and_grad(loss_fn), theirs.value_and_grad(loss_fn)
    for seed in range(3):
        batch = split(batch_of(seed).astype(dtype), mesh)
        loss, grads = by_ours(ours.params, batch)
        expected_loss, expected_grads = by_theirs(theirs.params, batch)
        assert_same_tree([loss], [expected_loss])
        for name, leaf in zip(names_of(grads.tree), jax.tree.leaves(grads.tree), strict=True):
            cut_leaf = dim_of(name, W) is not None
            assert leaf.dtype == ("float32" if cut_leaf else dtype)
        ours.update(grads)
        theirs.update(expected_grads)
        assert ours.report == theirs.report
        assert_same_tree(whole(ours.params, ours), theirs.params)
    assert_same_tree(ours.to_pytree(), theirs.to_pytree())


@one_process
def gathering_is_transposed_to_the_ordered_mean():
    for world_size in (2, 3, 7):
        for wire in (jnp.float32, jnp.bfloat16):
            mesh = mesh_of(world_size)
            shape = (3, 2 * world_size, 5)
            stacked = np.random.default_rng(world_size).standard_normal((world_size, *shape)).astype(wire)
            how = Gathering("dp", world_size, -2, wire, False)
            each = jax.shard_map(
                lambda g, how=how: reduce_scatter(how, g[0]),
                mesh=mesh,
                in_specs=P("dp"),
                out_specs=P(None, "dp"),
            )
            assert_same_tree([jax.jit(each)(split(stacked, mesh))], [averaged(stacked)])
            native = jax.shard_map(
                lambda g, how=how: reduce_scatter(how._replace(native=True), g[0]),
                mesh=mesh,
                in_specs=P("dp"),
                out_specs=P(None, "dp"),
            )
            tolerance = 1e-6 if wire == jnp.float32 else 5e-2
            np.testing.assert_allclose(jax.jit(native)(split(stacked, mesh)), averaged(stacked), tolerance, tolerance)


@one_process
def gradients_travel_in_the_communication_dtype():
    mesh = mesh_of(W)
    w = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)
    x = np.random.default_rng(1).standard_normal((W, 6)).astype(np.float32)
    offloaded = wrap({"w": w}, mesh=mesh, **STAGE3, communication_dtype="bfloat16")
    _, grads = offloaded.value_and_grad(lambda p, x: (x @ gather_params(p)["w"]).sum())(
        offloaded.params, split(x, mesh)
    )
    of_ranks = np.stack([np.repeat(row[:, None], 8, axis=1) for row in x])
    assert_same_tree(grads.tree, {"w": averaged(of_ranks.astype(jnp.bfloat16))})


@one_process
def delayed_parameters_are_those_of_a_step_before_also_at_stage_3():
    mesh = mesh_of(W)
    fields = {**HYPER, "param_dtype": "bfloat16", "reduce_bucket_size": 300}
    ours = wrap(tree_of(0), **fields, **STAGE3, mesh=mesh, schedule="delayed", delay_warmup_steps=1)
    with jax.default_device(jax.local_devices()[0]):
        theirs = wrap(tree_of(0), **fields)
    for seed in range(4):
        stacked = tree_of(seed, jnp.bfloat16, (W,))
        before, after = theirs.params, theirs.update(jax.tree.map(averaged, stacked))
        assert_same_tree(whole(ours.update(gradients_of(stacked, mesh)), ours), before if seed else after)
    assert_same_tree(ours.to_pytree(), theirs.to_pytree())
    assert_same_tree(whole(ours.params, ours), theirs.params)


@one_process
def plain_gradients_of_sharded_parameters_are_the_average_already():
    """As ``jax.grad`` under ``jax.jit`` gives them: gathering is XLA's then, and the helpers are identities."""
    mesh = mesh_of(W)
    ours = wrap(tree_of(0, scale=0.3), **HYPER, **STAGE3, mesh=mesh)
    with jax.default_device(jax.local_devices()[0]):
        theirs = wrap(tree_of(0, scale=0.3), **HYPER)
    for seed in range(2):
        grads = tree_of(seed)
        given = replicated(grads, mesh) if seed else grads
        assert_same_tree(whole(ours.update(given), ours), theirs.update(grads))
    grads = jax.jit(jax.grad(loss_fn))(ours.params, split(batch_of(0), mesh))
    expected = jax.jit(jax.grad(loss_fn))(theirs.params, batch_of(0))
    for got, wanted in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        for shard in got.addressable_shards:
            np.testing.assert_allclose(shard.data, wanted[shard.index], rtol=1e-4, atol=1e-6)
    ours.update(grads)
    assert ours.report.updated


# --- states and placement ----------------------------------------------------------------------------


@one_process
def states_of_any_stage_and_number_of_ranks_are_loaded():
    straight, saved = wrap(tree_of(0), **HYPER), wrap(tree_of(0), **HYPER).to_pytree()
    places = [{"mesh": mesh_of(8), **STAGE3}, {"mesh": mesh_of(2), **STAGE3, "offload_param": "cpu"}, {}]
    for i, place in enumerate(places):
        resumed = wrap(tree_of(99), **HYPER, **place, reduce_bucket_size=300)
        assert_same_tree(resumed.load_pytree(saved), saved["params"])
        assert_same_tree(resumed.update(tree_of(i)), straight.update(tree_of(i)))
        saved = resumed.to_pytree()
        assert_same_tree(saved, straight.to_pytree())


@two_processes
def exports_are_whole_in_every_process():
    folder, optax_states = Path(sys.argv[1]).parent, []
    for place in ({"mesh": mesh_of(W), **STAGE3}, {"mesh": mesh_of(W)}, {}):
        offloaded = wrap(tree_of(0), **HYPER, param_dtype="bfloat16", **place)
        for i in range(2):
            offloaded.update(tree_of(i, BFLOAT16.numpy))
        optax_states.append(offloaded.to_optax_state())
        assert_same_tree(optax_states[0], optax_states[-1])
        if place:
            for dtype in (None, "float32"):
                offloaded.export_safetensors(folder / f"{len(optax_states)} {dtype}", dtype=dtype, max_shard_bytes=9000)
    saved = offloaded.to_pytree()
    for dtype, tree in ((None, saved["params"]), ("float32", saved["master"])):
        flat = jax.tree_util.tree_leaves_with_path(tree)
        expected = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}
        for i in (1, 2):
            files = (folder / f"{i} {dtype}").glob("*.safetensors")
            got = {name: array for file in files for name, array in safetensors.numpy.load_file(file).items()}
            assert {n: (a.dtype, a.shape, a.tobytes()) for n, a in got.items()} == {
                n: (a.dtype, a.shape, a.tobytes()) for n, a in expected.items()
            }
    resumed = wrap(tree_of(1), **HYPER, mesh=mesh_of(W), **STAGE3)
    resumed.load_optax_state(optax_states[0])
    assert_same_tree(resumed.to_optax_state(), optax_states[0])


@two_processes
def sharded_parameters_start_from_the_first_process():
    """What each process has by itself; a global array is taken as it lies."""
    mesh, mine = mesh_of(W), tree_of(10 + jax.process_index())
    mine["layers"]["w"] = cut(tree_of(20)["layers"]["w"], mesh, 2)
    expected = tree_of(10)
    expected["layers"]["w"] = tree_of(20)["layers"]["w"]
    offloaded = wrap(mine, **STAGE3, mesh=mesh)
    assert_same_tree(whole(offloaded.params, offloaded), expected)
    assert_same_tree(offloaded.to_pytree()["master"], expected)


@one_process
def the_users_dimension_is_kept_and_nothing_is_copied():
    mesh = mesh_of(W)
    tree = {"first": cut(np.ones((8, 3), np.float32), mesh, 0), "last": cut(np.ones((3, 4, 8), np.float32), mesh, 2)}
    offloaded = wrap(tree, **HYPER, **STAGE3, mesh=mesh)
    assert addresses(offloaded.params) == addresses(tree)
    for _ in range(2):
        params = offloaded.update(jax.tree.map(lambda a: np.ones(a.shape, a.dtype), tree))
        for name, leaf in tree.items():
            assert params[name].sharding.is_equivalent_to(leaf.sharding, leaf.ndim)
    empty = cut(np.ones((0, 8), np.float32), mesh, 1)  # it is in no bucket
    offloaded = wrap({**tree, "empty": empty}, **STAGE3, mesh=mesh)
    assert offloaded.load_pytree(offloaded.to_pytree())["empty"].shape == (0, 8)


@one_process
def kept_parameters_of_stage_3_are_never_rewritten():
    for offload_param in (None, "cpu"):
        offloaded = wrap(tree_of(0), **HYPER, **STAGE3, mesh=mesh_of(W), offload_param=offload_param)
        kept = []
        for seed in range(4):
            params = offloaded.update(tree_of(seed))
            kept.append((params, jax.tree.map(lambda x: np.array(x, copy=True), params)))
        for params, copies in kept:
            assert_same_tree(params, copies)


@one_process
def as_optax_at_stage_3():
    mesh = mesh_of(W)
    ours, theirs = wrap(tree_of(0), **HYPER, **STAGE3, mesh=mesh), wrap(tree_of(0), **HYPER)
    tx, params = ours.as_optax(), ours.params
    state = tx.init(params)
    for seed in range(3):
        updates, state = tx.update(tree_of(seed), state, params)
        params = optax.apply_updates(params, updates)
        assert_placed(params, mesh)
        assert_same_tree(params, theirs.update(tree_of(seed)))
    with refuses(ConfigError, "as_optax() with offload_param='cpu'", "offloaded.update"):
        wrap(tree_of(0), **STAGE3, mesh=mesh, offload_param="cpu").as_optax()


# --- value_and_grad ----------------------------------------------------------------------------------


@one_process
def layers_may_be_looped_over_and_options_passed_on():
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

    def alone(params, x):
        return fun(params, x, shift=0.5)[0]

    params = {"layers": layers, "frozen": np.float32(2.0)}
    offloaded = wrap(params, **STAGE3, mesh=mesh, trainable={"layers": True, "frozen": False})
    for check_vma in (True, False):
        value_and_grad = offloaded.value_and_grad(fun, has_aux=True, in_specs=P("dp"), check_vma=check_vma)
        for call in (value_and_grad, jax.jit(value_and_grad)):
            (value, aux), grads = call(offloaded.params, batch_of(0), shift=0.5)
            assert int(aux["n"]) == 24 // W
            np.testing.assert_allclose(value, alone(params, batch_of(0)), rtol=1e-5)
            expected = jax.grad(lambda p: alone({**params, "layers": p}, batch_of(0)))(layers)
            for got, wanted in zip(grads.tree["layers"], expected, strict=True):
                assert got["w"].shape == (W, 33, 33)  # 33 divides by nothing here: whole
                np.testing.assert_allclose(np.asarray(got["w"]).mean(0), wanted["w"], rtol=1e-4, atol=1e-6)
                np.testing.assert_allclose(got["v"], wanted["v"], rtol=1e-4, atol=1e-6)
            assert grads.tree["frozen"] is None


@one_process
def axes_of_size_one_beside_the_axis_change_nothing_at_stage_3():
    devices = np.array(jax.devices()[:W]).reshape(1, W, 1)
    mesh = jax.sharding.Mesh(devices, ("replica", "dp", "tp"))
    losses = []
    for m, spec in ((mesh, P("dp", "tp")), (mesh_of(W), P("dp"))):
        offloaded = wrap({"w": tree_of(0)["embed"]}, **HYPER, **STAGE3, mesh=m, axis="dp")
        value_and_grad = offloaded.value_and_grad(lambda p, x: (x @ gather_params(p["w"])).var(), in_specs=spec)
        loss, grads = value_and_grad(offloaded.params, batch_of(0))
        offloaded.update(grads)
        losses.append([loss, *jax.tree.leaves(offloaded.params)])
    assert_same_tree(*losses)


@one_process
def without_shards_the_helpers_change_nothing():
    tree = {"w": jnp.ones((3, 2)), "n": 3, "none": None}
    assert all(gather_params(tree)[name] is leaf for name, leaf in tree.items())
    layer = {**tree, "activation": jnp.tanh, "name": "a layer"}  # a module's leaves need not be arrays
    layer_fn = gathered(lambda p, x, times: sum(p["activation"](x @ p["w"]) for _ in range(times)), static_argnums=2)
    np.testing.assert_allclose(jax.jit(lambda x: layer_fn(layer, x, 3))(np.ones((1, 3))), 3 * np.tanh([[3.0, 3.0]]))
    offloaded = wrap(tree_of(0, scale=0.3), **HYPER, stage=3)
    loss, grads = offloaded.value_and_grad(loss_fn)(offloaded.params, batch_of(0))
    np.testing.assert_allclose(loss, loss_fn(tree_of(0, scale=0.3), batch_of(0)), rtol=1e-5)
    offloaded.update(grads)


@one_process
def a_shard_that_was_not_gathered_says_what_to_do():
    mesh = mesh_of(W)
    offloaded = wrap(tree_of(0), **STAGE3, mesh=mesh)
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
    with refuses(AttributeError, "'sum' of a parameter that is sharded", "gather_params(params)"):
        offloaded.value_and_grad(lambda p, x: p["embed"].sum())(offloaded.params, batch)


@one_process
def what_is_computed_of_a_shards_leaves_is_right_or_nan():
    """A tree of shards has leaves: one rank's part of the parameter, and what the gradient is taken with respect to."""
    mesh = mesh_of(W)
    tree = {"w": tree_of(0, scale=0.3)["embed"]}
    ours, theirs = wrap(tree, **STAGE3, mesh=mesh), wrap(tree, mesh=mesh)

    def loss(params, x):
        return (x @ gather_params(params)["w"]).var()

    def by_tree_map(function):
        mapped = lambda params, x: loss(jax.tree.map(function, params), x)  # noqa: E731
        return [o.value_and_grad(mapped, in_specs=P("dp"))(o.params, batch_of(0)) for o in (ours, theirs)]

    for linear in (lambda w: 2 * w, lambda w: w.astype(jnp.bfloat16)):
        (value, grads), (expected, of_ranks) = by_tree_map(linear)
        assert_same_tree([value, grads.tree["w"]], [expected, averaged(np.asarray(of_ranks.tree["w"]))])
    (_, grads), _ = by_tree_map(jnp.square)
    assert np.isnan(grads.tree["w"]).all()
    decayed = lambda p, x: loss(p, x) + sum((leaf**2).sum() for leaf in jax.tree.leaves(p))  # noqa: E731
    assert np.isnan(ours.value_and_grad(decayed, in_specs=P("dp"))(ours.params, batch_of(0))[0])


# --- what it is for ----------------------------------------------------------------------------------


def deep(n_layers, width=64, **fields):
    offloaded = wrap(
        {"w": np.full((n_layers, width, width), 1e-2, np.float32)},
        mesh=mesh_of(W),
        param_persistence_threshold=0,
        **fields,
    )
    return offloaded, width * width * 4


def compiled(offloaded, fun, width=64):
    call = jax.jit(offloaded.value_and_grad(fun, in_specs=P("dp")))
    return call.lower(offloaded.params, np.ones((W, width), np.float32)).compile()


def by_scan(params, x):
    layer_fn = gathered(lambda w, x: jnp.tanh(x @ w))
    return lax.scan(lambda x, w: (layer_fn(w, x), None), x, params["w"])[0].sum()


@one_process
def a_scanned_models_memory_holds_a_layer_not_the_model():
    """Past the gradients, which are output, what XLA plans for grows by a layer's activations for every layer."""

    def all_at_once(params, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, gather_params(params["w"]))[0].sum()

    def growth(fun, **fields):
        """Bytes that a layer more takes beside its gradients, and bytes of a layer."""
        temporary = []
        for n_layers in (4, 16):
            offloaded, layer_bytes = deep(n_layers, stage=3, **fields)
            memory = compiled(offloaded, fun).memory_analysis()
            assert memory.output_size_in_bytes < 1.1 * n_layers * layer_bytes / W  # shards in fp32
            temporary.append(memory.temp_size_in_bytes)
        return (temporary[1] - temporary[0]) / 12, layer_bytes

    for fields in ({}, {"offload_param": "cpu"}):
        n_bytes, layer_bytes = growth(by_scan, **fields)
        assert n_bytes < layer_bytes / 16
    n_bytes, layer_bytes = growth(all_at_once)
    assert n_bytes > 0.9 * layer_bytes


@one_process
def backward_of_a_scan_gathers_again():
    offloaded, _ = deep(8, stage=3)
    text = compiled(offloaded, by_scan).as_text()
    assert len(re.findall(r"f32\[64,64\]\S* all-gather\(", text)) == 2  # a layer, in the loop forwards and in the other
    assert len(re.findall(r" while\(", text)) == 2


@one_process
def an_update_sends_nothing():
    offloaded, _ = deep(3, stage=3, reduce_bucket_size=5000)
    device, ran = offloaded._pipeline.device, []

    def watched(name):
        program = getattr(device, name)

        def call(*args):
            ran.append((name, program.lower(*args).compile().as_text()))
            return program(*args)

        return call

    for name in ("_cut", "_write", "_reduce_unreduced", "_reduce_mean", "_gather"):
        setattr(device, name, watched(name))
    _, grads = offloaded.value_and_grad(by_scan, in_specs=P("dp"))(offloaded.params, np.ones((W, 64), np.float32))
    offloaded.update(grads)
    assert {name for name, _ in ran} == {"_cut", "_write"}
    assert not [kind for _, text in ran for kind in COLLECTIVES if kind in text]
    assert offloaded.sent_bytes == 0


@one_process
def nothing_is_compiled_again_at_stage_3():
    offloaded, _ = deep(3, stage=3, reduce_bucket_size=1024)
    device, sizes = offloaded._pipeline.device, []
    value_and_grad = offloaded.value_and_grad(by_scan, in_specs=P("dp"))
    for seed in range(4):
        x = np.random.default_rng(seed).standard_normal((W, 64)).astype(np.float32)
        offloaded.update(value_and_grad(offloaded.params, x)[1])
        sizes.append((device._cut._cache_size(), device._write._cache_size()))
    assert len(offloaded._pipeline._buckets.all) == 12
    assert sizes[0] == sizes[-1]
    assert max(sizes[-1]) <= 3  # not one a bucket


# --- what is refused ---------------------------------------------------------------------------------


@one_process
def what_stage_3_cannot_do_is_refused():
    with refuses(ConfigError, "offload_param='cpu' without a mesh", "jax.make_mesh((1,), ('dp',))"):
        wrap(tree_of(0), stage=3, offload_param="cpu")
    with refuses(ConfigError, "offload_param='cpu' with stage=2"):
        wrap(tree_of(0), mesh=mesh_of(W), offload_param="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded, "HOST_MEMORY", "far_host")
        with refuses(ConfigError, "the cpu backend has the memory kinds 'device'", "no 'far_host'"):
            wrap(tree_of(0), **STAGE3, mesh=mesh_of(W), offload_param="cpu")
    offloaded = wrap(tree_of(0), **STAGE3, mesh=mesh_of(W))
    grads = gradients_of(tree_of(1, stack=(W,)), mesh_of(W))
    grads.tree["embed"] = split(tree_of(1, stack=(W,))["embed"], mesh_of(W))
    with refuses(GradientError, "['embed']: gradient is float32[4, 33, 24], expected float32[33, 24]"):
        offloaded.update(grads)
