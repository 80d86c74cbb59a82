"""The bits are those of one device on the averaged gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from frontends.jax import RankGradients, gather_params, gathered, wrap
from frontends.jax.devices.mesh import gather
from frontends.jax.devices.mesh.axis import MeshAxis
from frontends.jax.devices.mesh.device import JaxMeshDevice
from frontends.jax.devices.mesh.tensors import MeshGradient
from offload_core.dtypes import BFLOAT16, FLOAT32
from offload_core.errors import ConfigError
from offload_core.layout.partition import ParamSpec, build_buckets
from offload_core.memory.host_memory import HostMemory, StagingRing
from tests.support import jax_stage3 as stage3
from tests.support.jax_meshes import (
    HYPER,
    addresses,
    assert_same_replicas,
    assert_same_tree,
    averaged,
    batch_of,
    leaves_of,
    mesh_of,
    processes,
    published_bytes,
    replicated,
    slow,
    split,
)
from tests.support.jax_stage2 import assert_equals_one_device, loss_fn, tree_of
from tests.support.jax_stage3 import STAGE3, W, dim_of, gradients_of, names_of, whole
from tests.support.late_stores import states_on_disk_too

VARIETIES = {
    "float32": {"gradient_clipping": 0.5, "reduce_bucket_size": 300},
    "bfloat16": {"gradient_accumulation_steps": 2, "reduce_bucket_size": 300},
    "float16": {"initial_loss_scale": 64.0, "loss_scale_window": 2},
}
"""Fields of the configuration by element type; the parameters have 616 elements, "embed" 561 of them."""


def test_a_mesh_of_one_device_is_one_device():
    fields = {"reduce_bucket_size": 250, "gradient_accumulation_steps": 2}
    offloaded = assert_equals_one_device(mesh_of(1), "bfloat16", **fields)
    report = offloaded.memory_report()
    assert report.host_bytes == report.planned_host_bytes
    assert offloaded.sent_bytes == 0


@pytest.mark.draws(1)
@pytest.mark.quick
@states_on_disk_too
@pytest.mark.parametrize(
    ("world_size", "dtype"),  # 4: in two processes, and on Explicit axes
    [(3, "float32"), (8, "bfloat16"), (3, "float16"), slow(8, "float32"), slow(3, "bfloat16"), slow(8, "float16")],
)
def test_the_bits_are_those_of_one_device_on_the_averaged_gradients(world_size, dtype):
    assert_equals_one_device(mesh_of(world_size), dtype, **VARIETIES[dtype])


@pytest.mark.draws(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_with_strict_promotion_the_bits_are_the_same(dtype):
    with jax.numpy_dtype_promotion("strict"):
        mesh = mesh_of(2)
        assert_equals_one_device(mesh, dtype, steps=1)
        offloaded = wrap(tree_of(0), param_dtype=dtype, mesh=mesh)
        value = lambda params, x: x.sum().astype(dtype) + sum(p.sum() for p in jax.tree.leaves(params))  # noqa: E731
        (loss, grads) = offloaded.value_and_grad(value)(offloaded.params, split(batch_of(0), mesh))
        assert loss.dtype == dtype
        offloaded.update(grads)


@pytest.mark.draws(1)
@processes(1, 2)
def test_explicit_axes_are_taken_like_auto_ones():
    """``jax.make_mesh`` makes Explicit ones by default."""
    mesh = jax.make_mesh((4,), ("dp",), devices=jax.devices()[:4], axis_types=(AxisType.Explicit,))
    offloaded = assert_equals_one_device(mesh, "bfloat16", steps=1, reduce_bucket_size=300)
    offloaded.update(offloaded.value_and_grad(loss_fn)(offloaded.params, split(batch_of(0), mesh))[1])
    assert offloaded.report.updated


@pytest.mark.long("two processes, each of which compiles its programs with XLA")
@pytest.mark.draws(1)
@processes(1, 2)
def test_a_batch_is_shared_by_the_ranks_of_the_mesh():
    sizes = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2}
    assert wrap(tree_of(0), sizes, mesh=mesh_of(4)).config.gradient_accumulation_steps == 3
    with pytest.raises(ConfigError, match=r"\(2\) \* gradient_accumulation_steps \(6\) \* ranks \(4\) = 48"):
        wrap(tree_of(0), {**sizes, "gradient_accumulation_steps": 6}, mesh=mesh_of(4))


EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto


@pytest.mark.draws(1)
@pytest.mark.parametrize(("axis_type", "n"), [(EXPLICIT, 1), (AUTO, 2), slow(EXPLICIT, 2), slow(AUTO, 1)])
def test_arrays_of_an_equivalent_mesh_or_device_are_taken_without_a_copy(axis_type, n):
    """To Explicit axes P("dp") on a mesh of one device is another type than P(), and so are other meshes' names."""
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

    given = jax.tree.map(lambda a: jax.device_put(a, NamedSharding(other, P("batch"))), stacked)
    for grads in (given, jax.tree.map(jnp.asarray, stacked)):
        offloaded.update(RankGradients(grads))
        twin.update(RankGradients(split(stacked, mesh)))
    given = jax.tree.map(lambda a: jax.device_put(a[0], NamedSharding(other, P())), stacked)
    assert_same_tree(offloaded.update(given), twin.update(jax.tree.map(lambda a: a[0], stacked)))


@pytest.mark.long("two processes, each of which compiles its programs with XLA")
@pytest.mark.draws(1)
@processes(1, 2)
@pytest.mark.parametrize("axis_type", [EXPLICIT, slow(AUTO, processes=2)])
@pytest.mark.parametrize("n", [4, slow(1)])
def test_value_and_grad_may_be_part_of_a_compiled_function(axis_type, n, processes):
    mesh = mesh_of(4 if processes == 2 else n, axis_type)
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
    if axis_type == EXPLICIT:  # whose arrays say how they lie there, too
        value, grads = jax.jit(offloaded.value_and_grad(loss_fn))(offloaded.params, split(batch_of(0), mesh))
        np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    offloaded.update(grads)
    assert offloaded.report.updated


@pytest.mark.long("two processes, each of which compiles its programs with XLA")
@pytest.mark.draws(1)
@processes(2)
@states_on_disk_too
@pytest.mark.parametrize("dtype", ["float32", "float16", slow("bfloat16")])
def test_two_processes_have_the_bits_of_one_device_too(dtype):
    assert_equals_one_device(mesh_of(4), dtype, **VARIETIES[dtype])


@pytest.mark.draws(1)
@processes(1, 2)
def test_delayed_parameters_are_those_of_a_step_before_from_the_warm_up_on():
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


def test_axes_of_size_one_beside_the_axis_change_nothing():
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


@pytest.mark.draws(1)
@pytest.mark.parametrize(
    ("world_size", "comm_dtype"),
    [(3, FLOAT32), (7, BFLOAT16), slow(3, BFLOAT16), slow(6, FLOAT32), slow(6, BFLOAT16), slow(7, FLOAT32)],
)
def test_the_mean_has_one_definition_for_every_number_of_ranks(world_size, comm_dtype):
    """XLA would multiply by the reciprocal of the divisor, which differs where that is no power of two."""
    device = JaxMeshDevice(MeshAxis(mesh_of(world_size), "dp"))
    sizes = (1000, 7, 300)
    specs = [ParamSpec(str(i), n, comm_dtype) for i, n in enumerate(sizes)]
    ring = StagingRing(HostMemory(1), slots=1, n_bytes=1 << 16, pinned=False)
    rng = np.random.default_rng(world_size)
    stacks = [rng.standard_normal((world_size, n)).astype(np.float32).astype(comm_dtype.numpy) for n in sizes]
    mean = [averaged(stack) for stack in stacks]
    assert any((m != s.astype(np.float32).sum(0)).any() for m, s in zip(mean, stacks, strict=True))
    for bucket in build_buckets(specs, world_size=world_size, bucket_numel=500):
        given = {p.param for p in bucket.pieces} - {1}
        gradients = {i: MeshGradient(split(stacks[i], device.axis.mesh), True, sizes[i], comm_dtype) for i in given}
        out = np.full(bucket.padded_numel, 7, np.float32)
        device.reduce(bucket, comm_dtype, gradients, out, ring).wait()
        expected = np.zeros(bucket.padded_numel, np.float32)
        for p in bucket.pieces:
            if p.param in given:
                expected[p.offset : p.offset + p.numel] = mean[p.param][p.start : p.start + p.numel]
        assert out.tobytes() == expected.tobytes(), np.count_nonzero(out != expected)


@pytest.mark.draws(1)
@processes(1, 2)
def test_plain_gradients_are_the_average_already():
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


def test_plain_gradients_may_be_sharded():
    mesh = mesh_of(4)
    ours, theirs = wrap({"w": np.ones((8, 3), np.float32)}, mesh=mesh), wrap({"w": np.ones((8, 3), np.float32)})
    g = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)
    assert_same_tree(ours.update({"w": jax.device_put(g, NamedSharding(mesh, P("dp")))}), theirs.update({"w": g}))


def test_the_backends_own_reduction_is_near_the_ordered_one():
    mesh = mesh_of(4)
    grads = RankGradients(split(tree_of(5, stack=(4,)), mesh))
    ordered, native = (wrap(tree_of(0), **HYPER, mesh=mesh, reduction=how) for how in ("ordered", "native"))
    for offloaded in (ordered, native):
        offloaded.update(grads)
    for (_, x), (_, y) in zip(*(leaves_of(o.to_pytree()["exp_avg"]) for o in (ordered, native)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-8)


# --- of stage 3 -------------------------------------------------------------------------------------------------------


@pytest.mark.draws(1)
@pytest.mark.parametrize(
    ("mesh", "dtype", "fields"),
    [
        ((3, AUTO), "float16", {"initial_loss_scale": 64.0, "loss_scale_window": 2, "gradient_clipping": 0.5}),
        ((W, EXPLICIT), "bfloat16", {"reduce_bucket_size": 300, "schedule": "serial"}),
        slow((1, AUTO), "bfloat16", {"gradient_accumulation_steps": 2}),
        slow((3, AUTO), "float32", {"gradient_clipping": 0.5, "reduce_bucket_size": 300, "schedule": "serial"}),
        slow((8, AUTO), "float16", {"initial_loss_scale": 64.0, "loss_scale_window": 2}),
        slow((W, EXPLICIT), "bfloat16", {"reduce_bucket_size": 1000}),
    ],
)
def test_sharded_parameters_have_the_bits_of_one_device_on_the_averaged_gradients(mesh, dtype, fields):
    stage3.assert_equals_one_device(mesh_of(*mesh), dtype, **fields)


def test_parameters_in_host_memory_have_the_same_bits():
    offloaded = stage3.assert_equals_one_device(mesh_of(W), "bfloat16", offload_param="cpu", reduce_bucket_size=500)
    in_host = [leaf for leaf in jax.tree.leaves(offloaded.params) if leaf.sharding.memory_kind == "pinned_host"]
    report = offloaded.memory_report()
    assert len(in_host) == 3
    shards = sum(s.data.nbytes for leaf in in_host for s in leaf.addressable_shards)
    assert report.host["shards of parameters"] == shards
    assert report.host_bytes == report.planned_host_bytes
    [room] = [row for row in report.rows if row.what == "next shards of parameters"]
    assert (room.where, room.planned, room.held, room.brief) == ("host", shards, 0, True)


@pytest.mark.long("two processes, each of which compiles its programs with XLA")
@processes(2)
def test_sharded_parameters_of_two_processes_have_the_bits_of_one_device():
    fields = {"gradient_clipping": 0.5, "reduce_bucket_size": 500, "offload_param": "cpu"}
    stage3.assert_equals_one_device(mesh_of(W), "bfloat16", **fields)


@pytest.mark.long("XLA compiles the programs of each mesh and sharding")
@pytest.mark.draws(1)
@processes(1, 2)
def test_training_at_stage_3_is_training_at_stage_2():
    """Forward and backward too, and the norm, where both stages are given the same function: see docs/numerics.md."""
    dtype, offload_param = ("bfloat16", "cpu") if jax.process_count() == 1 else ("float32", None)
    mesh = mesh_of(W)
    fields = {**HYPER, "mesh": mesh, "param_dtype": dtype, "gradient_clipping": 0.1}
    ours = wrap(stage3.tree_of(0, scale=0.3), **fields, **STAGE3, offload_param=offload_param)
    theirs = wrap(stage3.tree_of(0, scale=0.3), **fields)
    by_ours, by_theirs = ours.value_and_grad(stage3.loss_fn), theirs.value_and_grad(stage3.loss_fn)
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
        assert repr(ours.report) == repr(theirs.report)
        assert_same_tree(whole(ours.params, ours), theirs.params)
    assert_same_tree(ours.to_pytree(), theirs.to_pytree())


@pytest.mark.long("XLA compiles the programs of each mesh and sharding")
@pytest.mark.parametrize("dtype", ["bfloat16", slow("float32")])
def test_gradients_that_xla_cannot_round_give_stages_2_and_3_the_same_bits(dtype):
    """The gradients of a sum of products are the other factors, however it is compiled. Stage 3 recomputes the sum."""
    mesh = mesh_of(W)

    def loss_fn(params, factors):
        products = jax.tree.map(lambda p, f: (p * f).sum(), gather_params(params), factors)
        return sum(jax.tree.leaves(products))

    fields = {**HYPER, "mesh": mesh, "param_dtype": dtype, "gradient_clipping": 0.1}
    ours, theirs = wrap(stage3.tree_of(0), **fields, **STAGE3), wrap(stage3.tree_of(0), **fields)
    by_ours, by_theirs = ours.value_and_grad(gathered(loss_fn)), theirs.value_and_grad(loss_fn)
    for seed in range(2):
        factors = stage3.tree_of(seed, jnp.dtype(dtype), (W,))
        _, grads = by_ours(ours.params, split(factors, mesh))
        _, expected = by_theirs(theirs.params, split(factors, mesh))
        assert_same_tree(expected.tree, factors)
        assert_same_tree(grads.tree, gradients_of(factors, mesh).tree)
        ours.update(grads)
        theirs.update(expected)
        assert repr(ours.report) == repr(theirs.report)
        assert_same_tree(whole(ours.params, ours), theirs.params)
    assert_same_tree(ours.to_pytree(), theirs.to_pytree())


@pytest.mark.draws(1)
@pytest.mark.parametrize(
    ("world_size", "comm_dtype"),
    [(3, "float32"), (7, "bfloat16"), *(slow(n, w) for n, w in ((2, "float32"), (2, "bfloat16"), (3, "bfloat16")))],
)
def test_gathering_is_transposed_to_the_ordered_mean(world_size, comm_dtype):
    mesh = mesh_of(world_size)
    shape = (3, 2 * world_size, 5)
    stacked = np.random.default_rng(world_size).standard_normal((world_size, *shape)).astype(jnp.dtype(comm_dtype))

    def mean(how):
        def each(g):
            return gather._backward(how, None, g[0])[1]

        mapped = jax.shard_map(each, mesh=mesh, in_specs=P("dp"), out_specs=P(None, "dp"))
        return jax.jit(mapped)(split(stacked, mesh))

    how = gather.GatherSpec("dp", world_size, -2, jnp.dtype(comm_dtype), False)
    assert_same_tree([mean(how)], [averaged(stacked)])
    tolerance = 1e-6 if comm_dtype == "float32" else 5e-2
    np.testing.assert_allclose(mean(how._replace(native=True)), averaged(stacked), tolerance, tolerance)


def test_gradients_travel_in_the_communication_dtype():
    mesh = mesh_of(W)
    w = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)
    x = np.random.default_rng(1).standard_normal((W, 6)).astype(np.float32)
    offloaded = wrap({"w": w}, mesh=mesh, **STAGE3, communication_dtype="bfloat16")
    _, grads = offloaded.value_and_grad(lambda p, x: (x @ gather_params(p)["w"]).sum())(
        offloaded.params, split(x, mesh)
    )
    of_ranks = np.stack([np.repeat(row[:, None], 8, axis=1) for row in x])
    assert_same_tree(grads.tree, {"w": averaged(of_ranks.astype(jnp.bfloat16))})


def test_delayed_parameters_are_those_of_a_step_before_also_at_stage_3():
    mesh = mesh_of(W)
    fields = {**HYPER, "param_dtype": "bfloat16", "reduce_bucket_size": 300}
    ours = wrap(stage3.tree_of(0), **fields, **STAGE3, mesh=mesh, schedule="delayed", delay_warmup_steps=1)
    with jax.default_device(jax.local_devices()[0]):
        theirs = wrap(stage3.tree_of(0), **fields)
    for seed in range(4):
        stacked = stage3.tree_of(seed, jnp.bfloat16, (W,))
        before, after = theirs.params, theirs.update(jax.tree.map(averaged, stacked))
        assert_same_tree(whole(ours.update(gradients_of(stacked, mesh)), ours), before if seed else after)
    assert_same_tree(ours.to_pytree(), theirs.to_pytree())
    assert_same_tree(whole(ours.params, ours), theirs.params)


@pytest.mark.long("XLA compiles the programs of each mesh and sharding")
def test_plain_gradients_of_sharded_parameters_are_the_average_already():
    """As ``jax.grad`` under ``jax.jit`` gives them: gathering is XLA's then, and the helpers are identities."""
    mesh = mesh_of(W)
    ours = wrap(stage3.tree_of(0, scale=0.3), **HYPER, **STAGE3, mesh=mesh)
    with jax.default_device(jax.local_devices()[0]):
        theirs = wrap(stage3.tree_of(0, scale=0.3), **HYPER)
    for seed in range(2):
        grads = stage3.tree_of(seed)
        given = replicated(grads, mesh) if seed else grads
        assert_same_tree(whole(ours.update(given), ours), theirs.update(grads))
    grads = jax.jit(jax.grad(stage3.loss_fn))(ours.params, split(batch_of(0), mesh))
    expected = jax.jit(jax.grad(stage3.loss_fn))(theirs.params, batch_of(0))
    for got, wanted in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        for shard in got.addressable_shards:
            np.testing.assert_allclose(shard.data, wanted[shard.index], rtol=1e-4, atol=1e-6)
    ours.update(grads)
    assert ours.report.updated
