"""Compiled programs, transfers, copies, donated and kept arrays, and the behaviour of JAX and XLA behind them."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from frontends.jax import RankGradients, gather_params, gathered, wrap
from frontends.jax.devices.mesh.axis import MeshAxis
from frontends.jax.devices.mesh.device import JaxMeshDevice
from frontends.jax.devices.mesh.places import Places
from frontends.jax.devices.mesh.programs import BucketRange
from frontends.jax.devices.mesh.tensors import MeshParameter
from frontends.jax.placement import placement
from offload_core.device.events import Done
from offload_core.dtypes import FLOAT32
from offload_core.layout.partition import ParamSpec, build_buckets
from offload_core.memory.host_memory import HostMemory, Lease, StagingRing
from tests.support.jax_meshes import (
    HYPER,
    addresses,
    assert_same_replicas,
    assert_same_tree,
    mesh_of,
    processes,
    replicated,
    slow,
    split,
)
from tests.support.jax_stage2 import assert_equals_one_device, tree_of
from tests.support.jax_stage3 import COLLECTIVES, W


def test_device_put_aliases_and_publishing_does_not():
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
    device.publish(bucket, memory, [target], {0}, Lease(ring), Done()).wait()
    memory[:] = -1
    assert np.array_equal(target.array, np.arange(64))


def test_parameters_that_a_user_keeps_are_never_rewritten_on_a_mesh():
    mesh = mesh_of(4)
    offloaded = wrap(tree_of(0), **HYPER, mesh=mesh, reduce_bucket_size=100)
    kept = []
    for seed in range(6):
        params = offloaded.update(RankGradients(split(tree_of(seed, stack=(4,)), mesh)))
        kept.append((params, jax.tree.map(lambda a: np.array(a, copy=True), params)))
    for params, copies in kept:
        assert_same_tree(params, copies)
        assert_same_replicas(params, mesh)


def test_the_programs_hold_the_collectives_they_should():
    """A sharding constraint on gradients would compile to an all-reduce and a slice."""
    mesh = mesh_of(4)
    offloaded = wrap(tree_of(0), **HYPER, mesh=mesh)
    device = offloaded._core.device
    grads = [split(np.ones((4, 100), np.float32), mesh)]
    starts, runs = device.axis.replicate(np.zeros((1, 2), np.int32)), (BucketRange(100, 0),)
    reduce = device._reduce_unreduced.lower(grads, starts, runs, 32, np.dtype(np.float32)).compile().as_text()
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


def test_donating_parameters_and_gradients_works_because_no_view_is_left():
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


def test_a_lone_accelerator_need_not_be_the_default_device():
    """Committed parameters stay committed to the accelerator. The others come back there, too, uncommitted."""
    chosen, twin = jax.devices()[3], wrap(tree_of(0), **HYPER)
    with pytest.MonkeyPatch.context() as patch, jax.default_device(chosen):
        patch.setattr(placement, "on_cpu", lambda array: False)
        params = jax.tree.map(jnp.asarray, tree_of(0))
        params["embed"] = jax.device_put(params["embed"], chosen)
        offloaded = wrap(params, **HYPER, reduce_bucket_size=100)
    assert isinstance(offloaded._core.device, Places)
    for seed in range(3):
        updated = offloaded.update(tree_of(seed))  # NumPy's, which JAX puts elsewhere now
        assert_same_tree(updated, twin.update(tree_of(seed)))
        assert all(leaf.devices() == {chosen} for leaf in jax.tree.leaves(updated))
        committed = [path for path, leaf in jax.tree_util.tree_leaves_with_path(updated) if leaf.committed]
        assert [jax.tree_util.keystr(path) for path in committed] == ["['embed']"]
    assert_same_tree(offloaded.to_pytree(), twin.to_pytree())


def test_parameters_on_a_device_each_are_taken_and_stay_there():
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


def test_host_callbacks_run_on_one_device_unless_in_shard_map():
    """No part of an update is a host callback, for this reason."""
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


def test_straddling_parameters_are_put_together_in_place():
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
        device.publish(bucket, shards, [target], {0}, Lease(ring), Done()).wait()
        assert before is None or before.is_deleted()
        now = target.array if target.partial is None else target.partial
        places.append([s.data.unsafe_buffer_pointer() for s in now.addressable_shards])
    assert all(place == places[0] for place in places)
    assert target.partial is None
    assert np.array_equal(target.array, value.reshape(10, 100))


@pytest.mark.draws(1)
@pytest.mark.parametrize("numel", [1, 48, 49, slow(47), slow(100)])
def test_uneven_dimensions_are_refused_by_shardings_and_padded_here(numel):
    mesh = mesh_of(3)
    with pytest.raises(ValueError, match="should evenly divide"):
        jax.device_put(np.ones(100, np.float32), NamedSharding(mesh, P("dp")))
    ours = wrap({"w": np.ones(numel, np.float32)}, mesh=mesh)
    assert all(bucket.layout.padded_numel % 48 == 0 for bucket in ours._core._pipeline.buckets.all)
    ours.update(RankGradients({"w": split(np.ones((3, numel), np.float32), mesh)}))
    theirs = wrap({"w": np.ones(numel, np.float32)})
    theirs.update({"w": np.ones(numel, np.float32)})
    assert_same_tree(ours.to_pytree(), theirs.to_pytree())


@pytest.mark.long("two processes, each of which compiles its programs with XLA")
@pytest.mark.draws(1)
@processes(1, 2)
def test_ranks_are_places_in_the_mesh_not_device_ids():
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
    assert_equals_one_device(mesh, "float32", steps=1, reduce_bucket_size=300, gradient_clipping=0.5)
    offloaded = wrap({"w": np.zeros(1, np.float32)}, mesh=mesh)
    x = np.arange(4, dtype=np.float32)
    _, grads = offloaded.value_and_grad(lambda p, x: (p["w"] * x).sum())(offloaded.params, split(x, mesh))
    for shard in grads.tree["w"].addressable_shards:
        assert np.asarray(shard.data) == list(devices).index(shard.device)


@pytest.mark.long("XLA compiles the programs of each mesh and sharding")
@pytest.mark.draws(1)
@processes(2)
def test_a_second_tree_on_a_mesh_starts_without_compiling():
    compiled = []
    wrap(tree_of(0), mesh=mesh_of(4))
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name))
    try:
        wrap(tree_of(1), mesh=mesh_of(4))
    finally:
        jax.monitoring.clear_event_listeners()
    assert not [name for name in compiled if "backend_compile" in name]


@processes(2)
def test_arrays_of_several_processes_are_read_shard_by_shard():
    mesh = mesh_of(4)
    stacked = split(np.arange(8, dtype=np.float32), mesh)
    with pytest.raises(RuntimeError, match="non-addressable"):
        np.asarray(stacked)
    first = 2 * jax.process_index()
    parts = MeshAxis(mesh, None).parts(stacked)
    assert [np.array(p).tolist() for p in parts] == [[2.0 * r, 2.0 * r + 1] for r in (first, first + 1)]


@processes(2)
def test_integers_of_64_bits_are_summed_and_sent_exactly():
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


def test_host_copies_are_no_copies_on_the_cpu():
    """``copy_to_host_async`` does nothing there; what is read is what was computed all the same."""
    array = jax.device_put(jnp.arange(1000.0), jax.devices()[3])
    array.copy_to_host_async()
    assert np.asarray(array).ctypes.data == array.unsafe_buffer_pointer()


# --- of stage 3 -------------------------------------------------------------------------------------------------------


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


@pytest.mark.long("XLA compiles the programs of each mesh and sharding")
@pytest.mark.parametrize("fields", [{}, slow({"offload_param": "cpu"})])
def test_a_scanned_models_memory_holds_a_layer_not_the_model(fields):
    """Past the gradients, which are output, XLA plans for a few layers and each layer's activations."""

    def all_at_once(params, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, gather_params(params["w"]))[0].sum()

    layers = []
    for fun in (by_scan, all_at_once):
        offloaded, layer_bytes = deep(32, stage=3, **fields)
        memory = compiled(offloaded, fun).memory_analysis()
        assert memory.output_size_in_bytes < 1.1 * 32 * layer_bytes / W  # shards in fp32
        layers.append(memory.temp_size_in_bytes / layer_bytes)
    assert layers[0] < 5
    assert layers[1] > 32


def test_backward_of_a_scan_gathers_again():
    offloaded, _ = deep(32, stage=3)
    text = compiled(offloaded, by_scan).as_text()
    assert len(re.findall(r"f32\[64,64\]\S* all-gather\(", text)) == 2  # a layer, in the loop forwards and in the other
    assert len(re.findall(r" while\(", text)) == 2


def test_an_update_sends_nothing():
    offloaded, _ = deep(3, stage=3, reduce_bucket_size=5000)
    device, ran = offloaded._core.device, []

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


def test_nothing_is_compiled_again_at_stage_3():
    offloaded, _ = deep(3, stage=3, reduce_bucket_size=1024)
    device, sizes = offloaded._core.device, []
    value_and_grad = offloaded.value_and_grad(by_scan, in_specs=P("dp"))
    for seed in range(4):
        x = np.random.default_rng(seed).standard_normal((W, 64)).astype(np.float32)
        offloaded.update(value_and_grad(offloaded.params, x)[1])
        sizes.append((device._cut._cache_size(), device._write._cache_size()))
    assert len(offloaded._core._pipeline.buckets.all) == 12
    assert sizes[0] == sizes[-1]
    assert max(sizes[-1]) <= 3  # not one a bucket
