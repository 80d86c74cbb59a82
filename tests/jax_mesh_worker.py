"""Laws of the JAX front end on a mesh, checked by test_jax_mesh.py in processes with several CPU devices each.

jax_mesh_worker.py RESULTS DEVICES [ADDRESS PROCESS]
"""

import faulthandler
import functools
import json
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import frontends.jax.placement as placement
from frontends.jax import RankGradients, ScaledGradients, wrap
from frontends.jax.mesh import JaxMeshDevice, MeshAxis, MeshGradient, MeshParameter, _Run
from offload_core.device import Done
from offload_core.dtypes import BFLOAT16, FLOAT32
from offload_core.errors import CollectiveError, ConfigError, GradientError, ParameterError, StateError
from offload_core.host_memory import HostMemory, StagingRing
from offload_core.partition import ParamSpec, build_buckets

SHAPES = {"embed": (33, 17), "layers": [{"w": (17, 3), "b": (3,)}, {"w": (3, 1), "b": ()}], "empty": (0, 2)}
HYPER = {"lr": 1e-2, "weight_decay": 0.1}
ONE_PROCESS = []
"""Laws that hold on 8 devices of one process."""
TWO_PROCESSES = []
"""Laws that hold on 4 devices, two in each of two processes; all run in both."""


def one_process(check):
    ONE_PROCESS.append(check)
    return check


def two_processes(check):
    TWO_PROCESSES.append(check)
    return check


# --- models and references ---------------------------------------------------------------------------


def mesh_of(world_size, axis_type=AxisType.Auto):
    return jax.make_mesh((world_size,), ("dp",), axis_types=(axis_type,), devices=jax.devices()[:world_size])


def tree_of(seed, dtype=np.float32, stack=(), scale=1.0):
    """The model's arrays, or gradients; in NumPy."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: (scale * rng.standard_normal((*stack, *shape)).astype(np.float32)).astype(dtype),
        SHAPES,
        is_leaf=lambda shape: isinstance(shape, tuple),
    )


def split(tree, mesh):
    """A global array of each array of the tree, cut over the axis; every process has the whole."""
    sharding = NamedSharding(mesh, P("dp"))
    return jax.tree.map(lambda a: jax.make_array_from_callback(a.shape, sharding, lambda i: a[i]), tree)


def replicated(tree, mesh):
    return jax.tree.map(lambda a: jax.make_array_from_callback(a.shape, NamedSharding(mesh, P()), lambda i: a[i]), tree)


def averaged(stacked):
    """The mean over the first dimension, by NumPy: summed in order in fp32, divided once."""
    total = stacked[0].astype(np.float32)
    for part in stacked[1:]:
        total = total + part.astype(np.float32)
    return total / np.float32(len(stacked))


def leaves_of(tree):
    return [(jax.tree_util.keystr(path), np.array(leaf)) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def assert_same_tree(got, expected):
    """The same arrays, bit for bit, at the same paths."""
    got, expected = leaves_of(got), leaves_of(expected)
    assert [path for path, _ in got] == [path for path, _ in expected]
    for (path, x), (_, y) in zip(got, expected, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype), (path, x.shape, x.dtype, y.shape, y.dtype)
        assert x.tobytes() == y.tobytes(), f"{path}: {np.count_nonzero(x != y)} of {x.size} differ"


def assert_same_replicas(params, mesh):
    """Every device of the mesh holds all of every parameter, with the same bits."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, P()), leaf.ndim), path
        shards = [np.array(shard.data) for shard in leaf.addressable_shards]
        assert len(shards) == sum(d.process_index == jax.process_index() for d in mesh.devices.flat), path
        assert all(shard.shape == leaf.shape and shard.tobytes() == shards[0].tobytes() for shard in shards), path


@contextmanager
def refuses(error, *words):
    """The block raises ``error`` with all ``words``."""
    with pytest.raises(error) as raised:
        yield
    for word in words:
        assert word in str(raised.value), raised.value


def loss_fn(params, x):
    x = jnp.tanh(x @ params["embed"])
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return (x**2).mean() + 1


def batch_of(seed, n=24):
    return np.random.default_rng(seed).standard_normal((n, 33)).astype(np.float32)


# --- the same bits as one device ---------------------------------------------------------------------


def assert_equals_one_device(mesh, dtype, steps=4, **fields):
    """Several steps of random gradients, some missing, against one device and the averaged gradients."""
    world_size = mesh.devices.size
    micro_steps = fields.get("gradient_accumulation_steps", 1)
    start = tree_of(0)
    fields |= {"mask": functools.partial(jax.tree.map, lambda p: p.ndim > 1)}
    ours = wrap(start, **HYPER, mesh=mesh, param_dtype=dtype, **fields)
    with jax.default_device(jax.local_devices()[0]):
        theirs = wrap(start, **HYPER, param_dtype=dtype, **fields)
    scale = 1.0
    for step in range(steps):
        for micro_step in range(micro_steps):
            grads = tree_of(100 * step + micro_step, jnp.dtype(dtype), (world_size,), scale=3.0**-step)
            mean = jax.tree.map(averaged, grads)
            grads = split(grads, mesh)
            if step % 2:
                grads["layers"][1]["w"] = mean["layers"][1]["w"] = None
            if step == 2:
                grads["embed"] = mean["embed"] = None
            grads = RankGradients(grads)
            if ours._pipeline.scaler is not None:
                scale = ours._pipeline.loss_scale
                grads, mean = ScaledGradients(grads, scale), ScaledGradients(mean, scale)
            params = ours.update(grads)
            expected = theirs.update(mean)
            assert_same_tree(params, expected)
        assert ours.report == theirs.report
        assert ours.report.updated
    assert_same_replicas(params, mesh)
    assert_same_tree(ours.to_pytree(), theirs.to_pytree())
    return ours


def varieties():
    """Element types, and fields of the configuration; the parameters have 635 elements, "embed" 561 of them."""
    yield "float32", {"gradient_clipping": 0.5, "reduce_bucket_size": 300}
    yield "bfloat16", {"gradient_accumulation_steps": 2, "reduce_bucket_size": 300}
    yield "float16", {"initial_loss_scale": 64.0, "loss_scale_window": 2}


@one_process
def a_mesh_of_one_device_is_one_device():
    assert_equals_one_device(mesh_of(1), "bfloat16", reduce_bucket_size=250, gradient_accumulation_steps=2)
    offloaded = assert_equals_one_device(mesh_of(1), "bfloat16")
    report = offloaded.memory_report()
    assert report.host_bytes == report.planned_host_bytes
    assert offloaded.sent_bytes == 0


def _equals(world_size):
    def check():
        for dtype, fields in varieties():
            assert_equals_one_device(mesh_of(world_size), dtype, **fields)

    check.__name__ = f"on_{world_size}_devices_the_bits_are_those_of_one_device_on_the_averaged_gradients"
    return check


for _world_size in (3, 8):  # 4: in two processes, and on Explicit axes
    one_process(_equals(_world_size))


@one_process
@two_processes
def explicit_axes_are_taken_like_auto_ones():
    """``jax.make_mesh`` makes Explicit ones by default."""
    mesh = jax.make_mesh((4,), ("dp",), devices=jax.devices()[:4], axis_types=(AxisType.Explicit,))
    steps = 4 if jax.process_count() == 1 else 2
    offloaded = assert_equals_one_device(mesh, "bfloat16", steps, reduce_bucket_size=100)
    offloaded.update(offloaded.value_and_grad(loss_fn)(offloaded.params, split(batch_of(0), mesh))[1])
    assert offloaded.report.updated


@one_process
@two_processes
def a_batch_is_shared_by_the_ranks_of_the_mesh():
    sizes = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2}
    assert wrap(tree_of(0), sizes, mesh=mesh_of(4)).config.gradient_accumulation_steps == 3
    with pytest.raises(ConfigError, match=r"\(2\) \* gradient_accumulation_steps \(6\) \* ranks \(4\) = 48"):
        wrap(tree_of(0), {**sizes, "gradient_accumulation_steps": 6}, mesh=mesh_of(4))


@one_process
def arrays_of_an_equivalent_mesh_or_device_are_taken_without_a_copy():
    """To Explicit axes P("dp") on a mesh of one device is another type than P(), and so are other meshes' names."""
    for axis_type in (AxisType.Explicit, AxisType.Auto):
        for n in (1, 2):
            mesh = mesh_of(n, axis_type)
            other = jax.make_mesh((n,), ("batch",), axis_types=(axis_type,), devices=jax.devices()[:n])
            x, stacked = batch_of(0), tree_of(1, stack=(n,))
            offloaded, twin = (wrap(tree_of(0), mesh=mesh) for _ in range(2))
            value_and_grad = offloaded.value_and_grad(loss_fn, in_specs=P("dp"))
            expected = value_and_grad(offloaded.params, x)
            for batch in (jnp.asarray(x), split(x, mesh), replicated(x, mesh)):
                assert_same_tree(value_and_grad(offloaded.params, batch), expected)
            elsewhere = jax.device_put(x, NamedSharding(other, P("batch")))
            assert_same_tree(value_and_grad(offloaded.params, elsewhere), expected)
            key = jax.device_put(jax.random.key(3), NamedSharding(other, P()))
            assert MeshAxis(mesh, None).replicate(key) == jax.random.key(3)
            put = MeshAxis(mesh, None).put(elsewhere, P("dp"))
            assert put.sharding == NamedSharding(mesh, P("dp"))
            assert addresses([put]) == addresses([elsewhere])

            given = jax.tree.map(lambda a: jax.device_put(a, NamedSharding(other, P("batch"))), stacked)  # noqa: B023
            for grads in (given, jax.tree.map(jnp.asarray, stacked)):
                offloaded.update(RankGradients(grads))
                twin.update(RankGradients(split(stacked, mesh)))
            given = jax.tree.map(lambda a: jax.device_put(a[0], NamedSharding(other, P())), stacked)  # noqa: B023
            assert_same_tree(offloaded.update(given), twin.update(jax.tree.map(lambda a: a[0], stacked)))


@one_process
@two_processes
def value_and_grad_may_be_part_of_a_compiled_function():
    for axis_type in (AxisType.Explicit, AxisType.Auto):
        for n in (jax.device_count(), 1)[: 3 - jax.process_count()]:
            mesh = mesh_of(n, axis_type)
            offloaded = wrap(tree_of(0), mesh=mesh)
            value_and_grad = offloaded.value_and_grad(loss_fn, in_specs=P("dp"))
            expected = value_and_grad(offloaded.params, batch_of(0))
            for batch in (batch_of(0), split(batch_of(0), mesh)):
                value, grads = jax.jit(value_and_grad)(offloaded.params, batch)
                np.testing.assert_allclose(value, expected[0], rtol=1e-6)
                for got, wanted in zip(jax.tree.leaves(grads), jax.tree.leaves(expected[1]), strict=True):
                    for a, b in zip(got.addressable_shards, wanted.addressable_shards, strict=True):
                        np.testing.assert_allclose(a.data, b.data, rtol=1e-4, atol=1e-7)
                assert isinstance(grads, RankGradients)
            if axis_type == AxisType.Explicit:  # whose arrays say how they lie there, too
                value, grads = jax.jit(offloaded.value_and_grad(loss_fn))(offloaded.params, split(batch_of(0), mesh))
                np.testing.assert_allclose(value, expected[0], rtol=1e-6)
            offloaded.update(grads)
            assert offloaded.report.updated


@two_processes
def two_processes_have_the_bits_of_one_device_too():
    for dtype, fields in varieties():
        assert_equals_one_device(mesh_of(4), dtype, **fields)


@one_process
@two_processes
def delayed_parameters_are_those_of_a_step_before_from_the_warm_up_on():
    mesh, fields = mesh_of(4), {"param_dtype": "bfloat16", "gradient_clipping": 0.5, "reduce_bucket_size": 300}
    ours = wrap(tree_of(0), **HYPER, **fields, mesh=mesh, schedule="delayed", delay_warmup_steps=2)
    with jax.default_device(jax.local_devices()[0]):
        theirs = wrap(tree_of(0), **HYPER, **fields)
    for step in range(5):
        grads = tree_of(step, jnp.bfloat16, (4,))
        before = theirs.params
        after = theirs.update(jax.tree.map(averaged, grads))
        params = ours.update(RankGradients(split(grads, mesh)))
        assert_same_tree(params, before if step >= 2 else after)
        assert_same_replicas(params, mesh)
    assert_same_tree(ours.to_pytree(), theirs.to_pytree())
    assert_same_replicas(ours.params, mesh)
    resumed = wrap(tree_of(99), **HYPER, **fields, mesh=mesh, schedule="delayed", delay_warmup_steps=2)
    resumed.load_pytree(theirs.to_pytree())
    for seed in range(5, 8):
        assert_same_tree(resumed.update(tree_of(seed)), ours.update(tree_of(seed)))


@one_process
def axes_of_size_one_beside_the_axis_change_nothing():
    devices = np.array(jax.devices()[:4]).reshape(1, 4, 1)
    mesh = Mesh(devices, ("replica", "dp", "tp"))
    ours, theirs = wrap(tree_of(0), **HYPER, mesh=mesh, axis="dp"), wrap(tree_of(0), **HYPER, mesh=mesh_of(4))
    for seed in range(3):
        grads = []
        for offloaded, spec in ((ours, P("dp", "tp")), (theirs, P("dp"))):
            batch = jax.device_put(batch_of(seed), NamedSharding(offloaded._placement._axis.mesh, spec))
            value, rank_grads = offloaded.value_and_grad(loss_fn)(offloaded.params, batch)
            grads.append((value, rank_grads.tree))
            offloaded.update(rank_grads)
        assert_same_tree(*grads)
    assert_same_tree(ours.to_pytree(), theirs.to_pytree())


@one_process
def the_mean_has_one_definition_for_every_number_of_ranks():
    """XLA would multiply by the reciprocal of the divisor, which differs where that is no power of two."""
    for world_size in (3, 6, 7):
        for wire in (FLOAT32, BFLOAT16):
            device = JaxMeshDevice(MeshAxis(mesh_of(world_size), "dp"))
            sizes = (1000, 7, 300)
            specs = [ParamSpec(str(i), n, wire) for i, n in enumerate(sizes)]
            ring = StagingRing(HostMemory(1), slots=1, n_bytes=1 << 16, pinned=False)
            rng = np.random.default_rng(world_size)
            stacks = [rng.standard_normal((world_size, n)).astype(np.float32).astype(wire.numpy) for n in sizes]
            mean = [averaged(stack) for stack in stacks]
            assert any((m != s.astype(np.float32).sum(0)).any() for m, s in zip(mean, stacks, strict=True))
            for bucket in build_buckets(specs, world_size=world_size, bucket_numel=500):
                given = {p.param for p in bucket.pieces} - {1}
                gradients = {i: MeshGradient(split(stacks[i], device.axis.mesh), True, sizes[i], wire) for i in given}
                out = np.full(bucket.padded_numel, 7, np.float32)
                device.reduce(bucket, wire, gradients, out, ring).wait()
                expected = np.zeros(bucket.padded_numel, np.float32)
                for p in bucket.pieces:
                    if p.param in given:
                        expected[p.offset : p.offset + p.numel] = mean[p.param][p.start : p.start + p.numel]
                assert out.tobytes() == expected.tobytes(), (world_size, wire, np.count_nonzero(out != expected))


@one_process
@two_processes
def plain_gradients_are_the_average_already():
    """As jit gives them, whose arrays may lie anywhere on the mesh. Summing W equal values may change bits."""
    world_size = 7 if jax.process_count() == 1 else 4
    mesh = mesh_of(world_size)
    for dtype in ("float32", "bfloat16"):
        ours = wrap(tree_of(1), **HYPER, mesh=mesh, param_dtype=dtype, reduce_bucket_size=300, gradient_clipping=1.0)
        with jax.default_device(jax.local_devices()[0]):
            theirs = wrap(tree_of(1), **HYPER, param_dtype=dtype, gradient_clipping=1.0)
        for seed in range(3):
            grads = tree_of(seed, jnp.dtype(dtype) if seed else np.float32)  # fp32 ones of bf16 parameters, too
            placed = replicated(grads, mesh)
            if seed == 1:
                placed["embed"] = jax.jit(lambda g: g, out_shardings=NamedSharding(mesh, P()))(placed["embed"])
                placed["layers"][0]["w"] = jax.device_put(placed["layers"][0]["w"], NamedSharding(mesh, P(None)))
            assert_same_tree(ours.update(placed if seed != 2 else grads), theirs.update(grads))
        assert_same_tree(ours.to_pytree(), theirs.to_pytree())
        sent = ours.sent_bytes
        assert sent == 3 * published_bytes(ours)  # gradients were not sent


@one_process
def plain_gradients_may_be_sharded():
    mesh = mesh_of(4)
    ours, theirs = wrap({"w": np.ones((8, 3), np.float32)}, mesh=mesh), wrap({"w": np.ones((8, 3), np.float32)})
    g = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)
    assert_same_tree(ours.update({"w": jax.device_put(g, NamedSharding(mesh, P("dp")))}), theirs.update({"w": g}))


@one_process
def the_backends_own_reduction_is_near_the_ordered_one():
    mesh = mesh_of(4)
    grads = RankGradients(split(tree_of(5, stack=(4,)), mesh))
    ordered, native = (wrap(tree_of(0), **HYPER, mesh=mesh, reduction=how) for how in ("ordered", "native"))
    for offloaded in (ordered, native):
        offloaded.update(grads)
    for (_, x), (_, y) in zip(*(leaves_of(o.to_pytree()["exp_avg"]) for o in (ordered, native)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-8)


# --- value_and_grad ----------------------------------------------------------------------------------


@one_process
@two_processes
def each_rank_gives_the_gradients_of_its_own_part_of_the_batch():
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
            np.testing.assert_allclose(shard.data[0], expected[ranks[shard.device]], rtol=1e-4, atol=1e-7)


@one_process
def without_the_cast_to_varying_gradients_would_be_summed():
    """What jax does, on which the cast relies: if this fails, jax has changed."""
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


@one_process
@two_processes
def training_on_a_mesh_is_training_on_the_whole_batch():
    mesh = mesh_of(jax.device_count())
    ours = wrap(tree_of(3), lr=1e-2, mesh=mesh)
    with jax.default_device(jax.local_devices()[0]):
        theirs = wrap(tree_of(3), lr=1e-2)
    by_ours, by_theirs = ours.value_and_grad(loss_fn, in_specs=P("dp")), theirs.value_and_grad(loss_fn)
    losses = []
    for seed in range(20):
        loss, grads = by_ours(ours.params, batch_of(seed % 2))  # NumPy: cut as in_specs says
        ours.update(grads)
        loss_of_one, grads = by_theirs(theirs.params, batch_of(seed % 2))
        theirs.update(grads)
        np.testing.assert_allclose(loss, loss_of_one, rtol=1e-4)
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 1e-3


@one_process
@two_processes
def aux_is_averaged_where_it_is_floating_point_and_rank_0s_elsewhere():
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


@one_process
def loss_scaling_works_on_a_mesh():
    mesh = mesh_of(4)
    offloaded = wrap(tree_of(4, scale=0.1), mesh=mesh, param_dtype="float16", initial_loss_scale=1024.0)
    value_and_grad = offloaded.value_and_grad(loss_fn)
    value, grads = value_and_grad(offloaded.params, split(batch_of(0), mesh))
    assert isinstance(grads, ScaledGradients)
    assert grads.scale == 1024
    np.testing.assert_allclose(value, loss_fn(tree_of(4, scale=0.1), batch_of(0)), rtol=1e-2)
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


@one_process
def a_function_may_start_a_scan_from_zeros_without_the_check():
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


@one_process
def nothing_is_compiled_again():
    mesh = mesh_of(4)
    traces = []

    def fun(params, x):
        traces.append(x)
        return loss_fn(params, x)

    offloaded = wrap(tree_of(0), **HYPER, mesh=mesh, reduce_bucket_size=100)
    value_and_grad = offloaded.value_and_grad(fun)
    device = offloaded._pipeline.device
    sizes = set()
    for seed in range(5):
        _, grads = value_and_grad(offloaded.params, split(batch_of(seed), mesh))
        offloaded.update(grads)
        programs = (device._reduce_unreduced, device._gather)
        sizes.add(tuple(program._cache_size() for program in programs))
    assert len(traces) == 1
    assert len(sizes) == 1
    n_buckets = len(offloaded._pipeline._buckets.all)
    assert all(0 < size <= n_buckets for size in sizes.pop())


# --- states ------------------------------------------------------------------------------------------


@one_process
def another_number_of_ranks_resumes_with_the_same_bits():
    def train(offloaded, seeds):
        for seed in seeds:
            offloaded.update(tree_of(seed))

    meshes = [mesh_of(8), None, mesh_of(3), mesh_of(1)]
    for dtype in ("float32", "bfloat16"):
        straight = wrap(tree_of(0), **HYPER, param_dtype=dtype)
        saved = straight.to_pytree()
        for i, mesh in enumerate(meshes):
            resumed = wrap(tree_of(99), **HYPER, param_dtype=dtype, mesh=mesh, reduce_bucket_size=300)
            assert_same_tree(resumed.load_pytree(saved), saved["params"])
            for offloaded in (straight, resumed):
                train(offloaded, [2 * i, 2 * i + 1])
            saved = resumed.to_pytree()
            assert_same_tree(saved, straight.to_pytree())


@two_processes
def states_are_whole_in_every_process_and_load_in_every_process():
    mesh = mesh_of(4)
    straight = wrap(tree_of(0), **HYPER, mesh=mesh, param_dtype="bfloat16", reduce_bucket_size=300)
    grads = [RankGradients(split(tree_of(s, jnp.bfloat16, (4,)), mesh)) for s in range(4)]
    for g in grads[:2]:
        straight.update(g)
    saved = straight.to_pytree()
    resumed = wrap(tree_of(9), **HYPER, mesh=mesh, param_dtype="bfloat16")
    resumed.load_pytree(saved)
    for g in grads[2:]:
        straight.update(g)
        resumed.update(g)
    assert_same_tree(resumed.to_pytree(), straight.to_pytree())
    assert_same_replicas(resumed.params, mesh)


@two_processes
def all_start_from_rank_0s_values():
    mesh = mesh_of(4)
    for dtype in (np.float32, jnp.bfloat16):
        start = tree_of(jax.process_index(), dtype)
        start["layers"][0]["b"][:] = np.array([-0.0, 1e-40, 1.0])
        params = wrap(start, mesh=mesh).params
        assert_same_replicas(params, mesh)
        expected = tree_of(0, dtype)
        expected["layers"][0]["b"][:] = np.array([-0.0, 1e-40, 1.0])
        assert_same_tree(params, expected)


@one_process
@two_processes
def what_is_not_trained_passes_through_and_the_rest_may_come_from_anywhere():
    mesh = mesh_of(4)
    local = jax.local_devices()[-1]
    tree = {
        "cut": split(np.arange(8, dtype=np.float32), mesh),
        "one": jax.device_put(np.ones(3, np.float32), local),
        "numpy": np.ones((), np.float32),
        "ids": jax.device_put(np.arange(3), local),
        "key": jax.device_put(jax.random.key(1), local),
        "table": np.arange(3),
        "none": None,
        "name": "relu",
    }
    offloaded = wrap(tree, mesh=mesh)
    params = offloaded.params
    assert_same_replicas([params[k] for k in ("cut", "one", "numpy", "ids")], mesh)
    assert_same_tree(params["cut"], np.arange(8, dtype=np.float32))
    assert all(params[k] is tree[k] for k in ("table", "none", "name"))

    def fun(params, x):
        assert params["name"] == "relu"
        noise = jax.random.normal(params["key"], (3,))
        return (params["cut"].sum() + (noise * params["one"]).sum() * params["numpy"] * params["table"].sum()) * x.sum()

    _, grads = offloaded.value_and_grad(fun)(params, split(np.ones(4, np.float32), mesh))
    updated = offloaded.update(grads)
    assert jax.tree.structure(updated) == jax.tree.structure(params)
    assert all(updated[k] is params[k] for k in ("ids", "key", "table", "none", "name"))
    assert_same_replicas([updated[k] for k in ("cut", "one", "numpy", "ids")], mesh)
    assert jax.random.key_data(updated["key"]).tolist() == jax.random.key_data(jax.random.key(1)).tolist()
    saved = offloaded.to_pytree()
    assert_same_tree(wrap(tree, mesh=mesh).load_pytree(saved)["cut"], saved["params"]["cut"])


@two_processes
def another_model_in_another_process_is_named():
    mesh = mesh_of(4)
    params = tree_of(0)
    params["layers"][0]["w"] = np.ones((17, 3 + jax.process_index()), np.float32)
    mine = 51 + 17 * jax.process_index()
    if jax.process_index():
        with refuses(ParameterError, "['layers'][0]['w']", f"{mine} elements", "differs from rank 0's"):
            wrap(params, mesh=mesh)
    else:
        with refuses(ParameterError, "another rank's parameters differ from rank 0's"):
            wrap(params, mesh=mesh)


@one_process
@two_processes
def bits_of_the_memory_report_and_of_what_is_sent():
    world_size = 8 if jax.process_count() == 1 else 4
    mesh = mesh_of(world_size)
    numel = 200 * 500 + 3
    offloaded = wrap(
        {"w": np.ones((200, 500), np.float32), "b": np.ones(3, np.float32)}, mesh=mesh, param_dtype="bfloat16"
    )
    report = offloaded.memory_report()
    here = len(mesh.local_devices)
    states = sum(report.host[name] for name in ("master", "exp_avg", "exp_avg_sq"))
    assert abs(states / (12 * numel * here / world_size) - 1) < 0.02
    assert report.host_bytes == report.planned_host_bytes
    assert report.host_bytes < 1.02 * 24 * numel * here / world_size  # gradients 4, staging of two buckets 8
    assert report.device_bytes == 2 * numel * here
    grads = {"w": np.ones((world_size, 200, 500), jnp.bfloat16), "b": np.ones((world_size, 3), jnp.bfloat16)}
    for _ in range(3):
        offloaded.update(RankGradients(split(grads, mesh)))
    theory = 3 * 2 * 2 * numel * here * (world_size - 1) / world_size  # gradients and parameters, 2 bytes each
    assert abs(offloaded.sent_bytes / theory - 1) < 0.01


def published_bytes(offloaded):
    """What this process's ranks send to publish all buckets once."""
    device = offloaded._pipeline.device
    shards = [w.bucket.shard_numel * w.bucket.dtype.itemsize for w in offloaded._pipeline._buckets.all]
    return len(device.ranks) * (device.world_size - 1) * sum(shards)


@one_process
@two_processes
def as_optax_works_on_a_mesh():
    mesh = mesh_of(4)
    params = tree_of(0)
    offloaded, twin = (wrap(params, **HYPER, mesh=mesh) for _ in range(2))
    tx = offloaded.as_optax()
    params = offloaded.params
    state = tx.init(params)
    for seed in range(3):
        grads = RankGradients(split(tree_of(seed, stack=(4,)), mesh))
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        assert_same_tree(params, twin.update(grads))
    with refuses(StateError, "params['embed'] is not what the last update made of it"):
        tx.update(grads, state, {**params, "embed": params["embed"] + 1})


@one_process
@two_processes
def parameters_changed_on_purpose_are_gone_on_from_on_a_mesh():
    mesh = mesh_of(4)
    for fields in ({}, {"stage": 3, "param_persistence_threshold": 20}):
        offloaded = wrap(tree_of(0), **HYPER, mesh=mesh, **fields, param_dtype="bfloat16")
        offloaded.update(tree_of(1))
        masters = offloaded.to_pytree()["master"]
        shardings = jax.tree.map(lambda p: p.sharding, offloaded.params)
        doubled = {**offloaded.params, "embed": jax.jit(lambda p: 2 * p)(offloaded.params["embed"])}
        for given in (doubled, {**doubled, "embed": np.full((33, 17), 3, BFLOAT16.numpy)}):
            after = offloaded.load_params(given)
            assert jax.tree.map(lambda p: p.sharding, after) == shardings
            saved = offloaded.to_pytree()
            embed = saved["params"]["embed"].astype(np.float32)
            assert_same_tree(saved["master"], {**masters, "embed": embed})
        assert (embed == 3).all()


@one_process
def discarded_gradients_are_forgotten_on_a_mesh():
    mesh = mesh_of(4)
    offloaded, twin = (wrap(tree_of(0), **HYPER, mesh=mesh, gradient_accumulation_steps=2) for _ in range(2))
    offloaded.update(RankGradients(split(tree_of(7, stack=(4,)), mesh)))
    offloaded.discard_gradients()
    for seed in range(2):
        for one in (offloaded, twin):
            one.update(RankGradients(split(tree_of(seed, stack=(4,)), mesh)))
    assert_same_tree(offloaded.to_pytree(), twin.to_pytree())


# --- what bites --------------------------------------------------------------------------------------


@one_process
def device_put_aliases_and_publishing_does_not():
    """Staging is used again for the next bucket while the parameters made from it live on."""
    memory = HostMemory(1).allocate("staging", 64, np.dtype(np.float32))
    put = jax.device_put(memory, jax.devices()[1], may_alias=False)
    memory[:] = 5
    assert np.array(put)[0] == 5, "jax no longer aliases"
    device = JaxMeshDevice(MeshAxis(mesh_of(1), None))
    ring = StagingRing(HostMemory(1), slots=1, n_bytes=1 << 16, pinned=False)
    (bucket,) = build_buckets([ParamSpec("w", 64, FLOAT32)], world_size=1, bucket_numel=64)
    target = MeshParameter(jax.device_put(jnp.zeros(64), NamedSharding(device.axis.mesh, P())))
    memory[:] = np.arange(64)
    device.publish(bucket, memory, [target], {0}, ring.lease(), Done()).wait()
    memory[:] = -1
    assert np.array_equal(target.array, np.arange(64))


@one_process
def parameters_that_a_user_keeps_are_never_rewritten_on_a_mesh():
    mesh = mesh_of(4)
    offloaded = wrap(tree_of(0), **HYPER, mesh=mesh, reduce_bucket_size=100)
    kept = []
    for seed in range(6):
        params = offloaded.update(RankGradients(split(tree_of(seed, stack=(4,)), mesh)))
        kept.append((params, jax.tree.map(lambda a: np.array(a, copy=True), params)))
    for params, copies in kept:
        assert_same_tree(params, copies)
        assert_same_replicas(params, mesh)


@one_process
def the_programs_hold_the_collectives_they_should():
    """A sharding constraint on gradients would compile to an all-reduce and a slice."""
    mesh = mesh_of(4)
    offloaded = wrap(tree_of(0), **HYPER, mesh=mesh)
    device = offloaded._pipeline.device
    grads = [split(np.ones((4, 100), np.float32), mesh)]
    reduce = device._reduce_unreduced.lower(grads, (_Run(0, 100, 0),), 32, np.dtype(np.float32)).compile().as_text()
    assert "all-to-all" in reduce
    assert "all-reduce" not in reduce
    assert "all-gather" not in reduce

    constrain = NamedSharding(mesh, P("dp"))
    text = (
        jax.jit(
            lambda w, x: lax.with_sharding_constraint(jax.grad(lambda w: ((x @ w) ** 2).mean())(w), constrain),
        )
        .lower(replicated(np.ones((32, 4), np.float32), mesh), split(np.ones((8, 32), np.float32), mesh))
        .compile()
        .as_text()
    )
    assert "all-reduce" in text, "jax now scatters: explicit collectives may no longer be needed"


def addresses(tree):
    return [
        s.data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree) if leaf.size for s in leaf.addressable_shards
    ]


@one_process
def donating_parameters_and_gradients_works_because_no_view_is_left():
    """With a live view the donated memory is silently not used again."""
    mesh = mesh_of(4)
    double = jax.jit(functools.partial(jax.tree.map, lambda x: 2 * x), donate_argnums=0)
    computed = jax.jit(functools.partial(jax.tree.map, lambda x: x + 0))  # NumPy's own memory cannot be donated
    viewed = computed(split(np.ones((4, 100), np.float32), mesh))
    views, before = [np.asarray(shard.data) for shard in viewed.addressable_shards], addresses(viewed)
    assert not set(addresses(double(viewed))) & set(before), "jax now reuses what is viewed"
    del views

    offloaded, twin = (wrap(tree_of(0), **HYPER, mesh=mesh) for _ in range(2))
    for seed in range(3):
        grads = [computed(RankGradients(split(tree_of(seed, stack=(4,)), mesh))) for _ in range(2)]
        tree = [grads[0], offloaded.update(grads[0])]
        expected = jax.tree.map(lambda x: 2 * np.array(x), [grads[1], twin.update(grads[1])])
        before = addresses(tree)
        doubled = double(tree)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(tree))
        assert set(addresses(doubled)) == set(before)
        assert_same_tree(doubled, expected)
        del tree, doubled
    for one in (offloaded, twin):
        one.update(grads[1])  # the next update needs none of the old parameters
    assert_same_tree(offloaded.to_pytree(), twin.to_pytree())


@one_process
def a_lone_accelerator_need_not_be_the_default_device():
    """What is committed to it stays so, and what is not comes back there all the same."""
    chosen, twin = jax.devices()[3], wrap(tree_of(0), **HYPER)
    with pytest.MonkeyPatch.context() as patch, jax.default_device(chosen):
        patch.setattr(placement, "on_cpu", lambda array: False)
        params = jax.tree.map(jnp.asarray, tree_of(0))
        params["embed"] = jax.device_put(params["embed"], chosen)
        offloaded = wrap(params, **HYPER, reduce_bucket_size=100)
    assert isinstance(offloaded._pipeline.device, JaxMeshDevice)
    for seed in range(3):
        updated = offloaded.update(tree_of(seed))  # NumPy's, which JAX puts elsewhere now
        assert_same_tree(updated, twin.update(tree_of(seed)))
        assert all(leaf.devices() == {chosen} for leaf in jax.tree.leaves(updated))
        committed = [path for path, leaf in jax.tree_util.tree_leaves_with_path(updated) if leaf.committed]
        assert [jax.tree_util.keystr(path) for path in committed] == ["['embed']"]
    assert_same_tree(offloaded.to_pytree(), twin.to_pytree())


@one_process
def parameters_on_a_device_each_are_taken_and_stay_there():
    twin = wrap(tree_of(0), **HYPER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "on_cpu", lambda array: False)
        devices = iter(jax.devices())
        places = jax.tree.map(lambda _: next(devices), tree_of(0))
        offloaded = wrap(jax.tree.map(jax.device_put, tree_of(0), places), **HYPER)
        for seed in range(2):
            updated = offloaded.update(jax.tree.map(jax.device_put, tree_of(seed), places))
            assert_same_tree(updated, twin.update(tree_of(seed)))
            assert jax.tree.map(lambda leaf: next(iter(leaf.devices())), updated) == places


@one_process
def host_callbacks_run_on_one_device_unless_in_shard_map():
    """Which is why no part of an update is one."""
    mesh = mesh_of(4)
    calls = []

    def call(x):
        return io_callback(lambda x: (calls.append(np.shape(x)), np.asarray(x))[1], x, x)

    x = split(np.arange(8, dtype=np.float32), mesh)
    jax.block_until_ready(jax.jit(call)(x))
    assert calls == [(8,)]
    calls.clear()
    each = jax.shard_map(call, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))
    jax.block_until_ready(jax.jit(each)(x))
    assert calls == [(2,)] * 4


@one_process
def straddling_parameters_are_put_together_in_place():
    """Each piece is written to the memory of the pieces before it, which is given up for it."""
    mesh = mesh_of(2)
    device = JaxMeshDevice(MeshAxis(mesh, None))
    ring = StagingRing(HostMemory(1), slots=1, n_bytes=1 << 20, pinned=False)
    buckets = build_buckets([ParamSpec("w", 1000, FLOAT32)], world_size=2, bucket_numel=320)
    assert len(buckets) == 4
    target = MeshParameter(jax.device_put(jnp.zeros((10, 100)), NamedSharding(device.axis.mesh, P())))
    value = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    places = []
    for bucket in buckets:
        before = target.partial
        (piece,) = bucket.pieces
        shards = np.zeros(bucket.padded_numel, np.float32)
        shards[: piece.numel] = value[piece.start : piece.stop]
        device.publish(bucket, shards, [target], {0}, ring.lease(), Done()).wait()
        assert before is None or before.is_deleted()
        now = target.array if target.partial is None else target.partial
        places.append([s.data.unsafe_buffer_pointer() for s in now.addressable_shards])
    assert all(place == places[0] for place in places)
    assert target.partial is None
    assert np.array_equal(target.array, value.reshape(10, 100))


@one_process
def uneven_dimensions_are_refused_by_shardings_and_padded_here():
    mesh = mesh_of(3)
    with pytest.raises(ValueError, match="should evenly divide"):
        jax.device_put(np.ones(100, np.float32), NamedSharding(mesh, P("dp")))
    for numel in (1, 47, 48, 49, 100):
        ours = wrap({"w": np.ones(numel, np.float32)}, mesh=mesh)
        assert all(work.bucket.padded_numel % 48 == 0 for work in ours._pipeline._buckets.all)
        ours.update(RankGradients({"w": split(np.ones((3, numel), np.float32), mesh)}))
        theirs = wrap({"w": np.ones(numel, np.float32)})
        theirs.update({"w": np.ones(numel, np.float32)})
        assert_same_tree(ours.to_pytree(), theirs.to_pytree())


@one_process
@two_processes
def ranks_are_places_in_the_mesh_not_device_ids():
    """In two processes the ids are 0, 1, 2048, 2049; and a mesh may have its devices in any order."""
    order = [2, 0, 3, 1]
    devices = np.array(jax.devices()[:4])[order]
    mesh = Mesh(devices, ("dp",))
    axis = MeshAxis(mesh, "dp")
    if jax.process_count() == 2:
        assert [d.id for d in jax.devices()] == [0, 1, 2048, 2049]
        assert axis.ranks == ((1, 3) if jax.process_index() == 0 else (0, 2))
    else:
        assert axis.ranks == (0, 1, 2, 3)
    assert_equals_one_device(mesh, "float32", reduce_bucket_size=100, gradient_clipping=0.5)
    offloaded = wrap({"w": np.zeros(1, np.float32)}, mesh=mesh)
    x = np.arange(4, dtype=np.float32)
    _, grads = offloaded.value_and_grad(lambda p, x: (p["w"] * x).sum())(offloaded.params, split(x, mesh))
    for shard in grads.tree["w"].addressable_shards:
        assert float(shard.data[0, 0]) == list(devices).index(shard.device)


@two_processes
def arrays_of_several_processes_are_read_shard_by_shard():
    mesh = mesh_of(4)
    stacked = split(np.arange(8, dtype=np.float32), mesh)
    with pytest.raises(RuntimeError, match="non-addressable"):
        np.asarray(stacked)
    first = 2 * jax.process_index()
    parts = MeshAxis(mesh, None).parts(stacked)
    assert [np.array(p).tolist() for p in parts] == [[2.0 * r, 2.0 * r + 1] for r in (first, first + 1)]


@two_processes
def integers_of_64_bits_are_summed_and_sent_exactly():
    collectives = JaxMeshDevice(MeshAxis(mesh_of(4), None)).collectives
    rng = np.random.default_rng(0)
    arrays = rng.integers(-(2**62), 2**62, (2, 37))
    arrays[:, 0] = -1
    mine = arrays[jax.process_index()].copy()
    collectives.sum_integers(mine, "test")
    assert np.array_equal(mine, arrays.sum(0))
    mine = arrays[jax.process_index()].astype(np.uint8)[:13]
    collectives.broadcast(mine, "test")
    assert np.array_equal(mine, arrays[0].astype(np.uint8)[:13])


@one_process
def host_copies_are_no_copies_on_the_cpu():
    """``copy_to_host_async`` does nothing there; what is read is what was computed all the same."""
    array = jax.device_put(jnp.arange(1000.0), jax.devices()[3])
    array.copy_to_host_async()
    assert np.asarray(array).ctypes.data == array.unsafe_buffer_pointer()


# --- wrong input -------------------------------------------------------------------------------------


@one_process
def wrong_meshes_and_axes_are_refused():
    params = {"w": np.ones(4, np.float32)}
    two = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    for arguments, words in (
        ({"mesh": mesh_of(4), "axis": "data"}, ["axis: got 'data'", "'dp'"]),
        ({"mesh": two}, ["axis: got None", "'dp', 'tp'"]),
        ({"mesh": two, "axis": "dp"}, ["'tp' of size 4", "expected size 1"]),
        ({"mesh": two.abstract_mesh, "axis": "dp"}, ["AbstractMesh", "expected a jax.sharding.Mesh"]),
        ({"axis": "dp"}, ["no mesh"]),
    ):
        with refuses(ConfigError, *words):
            wrap(params, **arguments)


@one_process
def a_batch_that_is_not_split_is_refused():
    mesh = mesh_of(4)
    offloaded = wrap(tree_of(0), mesh=mesh)
    value_and_grad = offloaded.value_and_grad(loss_fn)
    words = [
        "no argument is split over the mesh axis 'dp'",
        "float32[24, 33]",
        "jax.device_put(batch",
        "in_specs=P('dp')",
    ]
    for batch in (batch_of(0), jnp.asarray(batch_of(0)), replicated(batch_of(0), mesh)):
        with refuses(ParameterError, *words):
            value_and_grad(offloaded.params, batch)
    unknown = "value_and_grad under jit", "'dp' is not known", "outside jit", "already compiled", "in_specs=P('dp')"
    for batch in (batch_of(0), split(batch_of(0), mesh)):
        with refuses(StateError, *unknown):
            jax.jit(value_and_grad)(offloaded.params, batch)
    with refuses(ConfigError, "in_specs", "1 arguments after the parameters"):
        offloaded.value_and_grad(loss_fn, in_specs=(P("dp"), P()))(offloaded.params, batch_of(0))
    with refuses(ConfigError, "in_specs without a mesh"):
        wrap(tree_of(0)).value_and_grad(loss_fn, in_specs=P("dp"))


@one_process
def gradients_that_do_not_fit_change_nothing():
    mesh = mesh_of(4)
    offloaded, twin = (
        wrap(tree_of(0), **HYPER, mesh=mesh, param_dtype="bfloat16", gradient_accumulation_steps=2) for _ in range(2)
    )
    good = RankGradients(split(tree_of(1, jnp.bfloat16, (4,)), mesh))
    for one in (offloaded, twin):
        one.update(good)
    wrong = {
        "expected bfloat16[4, 33, 17]": RankGradients(split(tree_of(1, jnp.bfloat16, (8,)), mesh_of(8))),
        "expected bfloat16[33, 17]": good.tree,
        "float32, expected bfloat16": RankGradients(split(tree_of(1, np.float32, (4,)), mesh)),
        "the tree has": RankGradients({"w": good.tree["embed"]}),
        "every gradient is None": RankGradients(jax.tree.map(lambda _: None, tree_of(0))),
    }
    for words, grads in wrong.items():
        with refuses(GradientError, words):
            offloaded.update(grads)
    with refuses(GradientError, "RankGradients without a mesh"):
        one = wrap({"w": np.ones(3, np.float32)})
        one.update(RankGradients({"w": np.ones((1, 3), np.float32)}))
    for one in (offloaded, twin):
        one.update(good)
    assert offloaded.report.updated
    assert_same_tree(offloaded.to_pytree(), twin.to_pytree())


@two_processes
def gradients_of_processes_that_differ_are_refused_in_all():
    """Their programs would be different ones, and wait for each other for ever."""
    mesh = mesh_of(4)
    first = jax.process_index() == 0
    offloaded, twin = (
        wrap(tree_of(0), **HYPER, mesh=mesh, param_dtype="bfloat16", gradient_accumulation_steps=2) for _ in range(2)
    )
    good = RankGradients(split(tree_of(1, jnp.bfloat16, (4,)), mesh))
    plain = tree_of(2, jnp.bfloat16)

    def but(tree, leaf, value):
        return {**tree, "layers": [{**tree["layers"][0], leaf: value}, tree["layers"][1]]}

    wide = plain["layers"][0]["w"].astype(np.float32)
    cases = (
        (
            but(good.tree, "b", None),
            ["['layers'][0]['b']: 1 of 2 processes gave", "zeros", "gave one" if first else "gave none"],
        ),
        (jax.tree.map(lambda _: None, good.tree), ["['embed']: 1 of 2 processes gave"]),
        (but(good.tree, "b", "x"), ["1 of 2 processes raised" if first else "gradient is a str"]),
        ({"w": 1}, ["1 of 2 processes raised" if first else "the tree has"]),
    )
    for one in (offloaded, twin):
        one.update(good)
    for tree, words in cases:
        with refuses(GradientError, *words):
            offloaded.update(good if first else RankGradients(tree))
    with refuses(GradientError, "1 of 2 processes gave RankGradients"):
        offloaded.update(good if first else plain)
    with refuses(GradientError, "['layers'][0]['w']: 1 of 2", "not bfloat16", "float32" if first else "bfloat16"):
        offloaded.update(but(plain, "w", wide) if first else plain)
    for one in (offloaded, twin):
        one.update(good)
    assert offloaded.report.updated
    assert_same_tree(offloaded.to_pytree(), twin.to_pytree())


@one_process
def a_rank_lost_in_mid_update_is_an_error_whatever_the_pipeline_refuses_then():
    offloaded = wrap(tree_of(0), **HYPER, mesh=mesh_of(4), reduce_bucket_size=100)
    pipeline = offloaded._pipeline
    device, before = pipeline.device, offloaded.params
    gather, calls = device._gather, []

    def lost(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise ValueError("connection closed by peer")
        return gather(*arguments)

    def refuse(params=None):
        raise StateError("a rank was lost")

    device._gather, pipeline.drop_gradients = lost, refuse
    with refuses(CollectiveError, "gathering of parameters", "connection closed by peer"):
        offloaded.update(RankGradients(split(tree_of(1, stack=(4,)), mesh_of(4))))
    assert (offloaded.count, len(calls)) == (0, 3)
    assert all(a is b for a, b in zip(jax.tree.leaves(offloaded.params), jax.tree.leaves(before), strict=True))

    pipeline.finish = refuse  # as a pipeline that goes on no more
    for use in (lambda: offloaded.update(tree_of(1)), offloaded.discard_gradients, offloaded.to_pytree):
        with refuses(StateError, "a rank was lost"):
            use()


@one_process
def a_state_that_does_not_fit_is_refused():
    offloaded = wrap(tree_of(0), mesh=mesh_of(4))
    saved = offloaded.to_pytree()
    saved["exp_avg"]["embed"] = saved["exp_avg"]["embed"][:-1]
    with refuses(StateError, "exp_avg['embed'] is [32, 17], expected shape [33, 17]"):
        offloaded.load_pytree(saved)


def run():
    """Check the laws of this module's lists, and write what became of each."""
    results, n_devices, *peers = sys.argv[1:]
    faulthandler.enable()
    jax.config.update("jax_num_cpu_devices", int(n_devices))
    jax.config.update("jax_platforms", "cpu")
    checks = ONE_PROCESS
    if peers:
        jax.distributed.initialize(peers[0], 2, int(peers[1]))
        checks = TWO_PROCESSES
    outcome = {}
    for check in checks:
        try:
            check()
        except Exception:
            outcome[check.__name__] = traceback.format_exc()
        else:
            outcome[check.__name__] = "passed"
    Path(results).write_text(json.dumps(outcome))


if __name__ == "__main__":
    import jax_stage3_laws  # which adds its laws to those of jax_mesh_worker, another module than __main__

    jax_stage3_laws.run()
