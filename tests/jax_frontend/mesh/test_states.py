"""States and parameters: saved, loaded, exported, and where they are placed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy

from frontends.jax import RankGradients, wrap
from offload_core.dtypes import BFLOAT16
from offload_core.errors import ConfigError, ParameterError, StateError
from tests.support import jax_stage3 as stage3
from tests.support.jax_meshes import (
    HYPER,
    addresses,
    assert_same_replicas,
    assert_same_tree,
    mesh_of,
    processes,
    refuses,
    slow,
    split,
)
from tests.support.jax_stage2 import tree_of
from tests.support.jax_stage3 import STAGE3, W, assert_placed, cut, whole


@pytest.mark.long("two processes, each of which compiles its programs with XLA")
@pytest.mark.parametrize("dtype", ["bfloat16", slow("float32")])
def test_another_number_of_ranks_resumes_with_the_same_bits(dtype, drawn):
    straight = wrap(tree_of(0), **HYPER, param_dtype=dtype)
    saved = straight.to_pytree()
    for i, mesh in enumerate(drawn([mesh_of(8), None, mesh_of(3), mesh_of(1)], 2)):
        resumed = wrap(tree_of(99), **HYPER, param_dtype=dtype, mesh=mesh, reduce_bucket_size=300)
        assert_same_tree(resumed.load_pytree(saved), saved["params"])
        for seed in (2 * i, 2 * i + 1):
            for offloaded in (straight, resumed):
                offloaded.update(tree_of(seed))
        saved = resumed.to_pytree()
        assert_same_tree(saved, straight.to_pytree())


@pytest.mark.long("two processes, each of which compiles its programs with XLA")
@processes(2)
def test_states_are_whole_in_every_process_and_load_in_every_process():
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


@processes(2)
def test_all_start_from_rank_0s_values():
    mesh = mesh_of(4)
    for dtype in (np.float32, jnp.bfloat16):
        start = tree_of(jax.process_index(), dtype)
        start["layers"][0]["b"][:] = np.array([-0.0, 1e-40, 1.0])
        params = wrap(start, mesh=mesh).params
        assert_same_replicas(params, mesh)
        expected = tree_of(0, dtype)
        expected["layers"][0]["b"][:] = np.array([-0.0, 1e-40, 1.0])
        assert_same_tree(params, expected)


@pytest.mark.draws(1)
@processes(1, 2)
def test_what_is_not_trained_passes_through_and_the_rest_may_come_from_anywhere():
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


@processes(2)
def test_another_model_in_another_process_is_named():
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


@pytest.mark.draws(1)
@pytest.mark.states_in_memory
@processes(1, 2)
def test_bits_of_the_memory_report_and_of_what_is_sent():
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


@pytest.mark.draws(1)
@processes(1, 2)
def test_as_optax_works_on_a_mesh():
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


@pytest.mark.draws(1)
@processes(1, 2)
def test_parameters_changed_on_purpose_are_gone_on_from_on_a_mesh():
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


def test_discarded_gradients_are_forgotten_on_a_mesh():
    mesh = mesh_of(4)
    offloaded, twin = (wrap(tree_of(0), **HYPER, mesh=mesh, gradient_accumulation_steps=2) for _ in range(2))
    offloaded.update(RankGradients(split(tree_of(7, stack=(4,)), mesh)))
    offloaded.discard_gradients()
    for seed in range(2):
        for one in (offloaded, twin):
            one.update(RankGradients(split(tree_of(seed, stack=(4,)), mesh)))
    assert_same_tree(offloaded.to_pytree(), twin.to_pytree())


# --- of stage 3 -------------------------------------------------------------------------------------------------------


def test_states_of_any_stage_and_number_of_ranks_are_loaded(drawn):
    straight, saved = wrap(stage3.tree_of(0), **HYPER), wrap(stage3.tree_of(0), **HYPER).to_pytree()
    places = [{"mesh": mesh_of(8), **STAGE3}, {"mesh": mesh_of(2), **STAGE3, "offload_param": "cpu"}, {}]
    for i, place in enumerate(drawn(places, 2)):
        resumed = wrap(stage3.tree_of(99), **HYPER, **place, reduce_bucket_size=300)
        assert_same_tree(resumed.load_pytree(saved), saved["params"])
        assert_same_tree(resumed.update(stage3.tree_of(i)), straight.update(stage3.tree_of(i)))
        saved = resumed.to_pytree()
        assert_same_tree(saved, straight.to_pytree())


@pytest.mark.long("two processes, each of which compiles its programs with XLA")
@processes(2)
def test_exports_are_whole_in_every_process(folder, drawn):
    optax_states = []
    on_mesh = drawn(({"mesh": mesh_of(W), **STAGE3}, {"mesh": mesh_of(W)}), 1)
    for place in (*on_mesh, {}):
        offloaded = wrap(stage3.tree_of(0), **HYPER, param_dtype="bfloat16", **place)
        for i in range(2):
            offloaded.update(stage3.tree_of(i, BFLOAT16.numpy))
        optax_states.append(offloaded.to_optax_state())
        assert_same_tree(optax_states[0], optax_states[-1])
        if place:
            for dtype in (None, "float32"):
                offloaded.export_safetensors(folder / f"{len(optax_states)} {dtype}", dtype=dtype, max_shard_bytes=9000)
    saved = offloaded.to_pytree()
    for dtype, tree in ((None, saved["params"]), ("float32", saved["master"])):
        flat = jax.tree_util.tree_leaves_with_path(tree)
        expected = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}
        for i in range(1, 1 + len(on_mesh)):
            files = (folder / f"{i} {dtype}").glob("*.safetensors")
            got = {name: array for file in files for name, array in safetensors.numpy.load_file(file).items()}
            assert {n: (a.dtype, a.shape, a.tobytes()) for n, a in got.items()} == {
                n: (a.dtype, a.shape, a.tobytes()) for n, a in expected.items()
            }
    resumed = wrap(stage3.tree_of(1), **HYPER, mesh=mesh_of(W), **STAGE3)
    resumed.load_optax_state(optax_states[0])
    assert_same_tree(resumed.to_optax_state(), optax_states[0])


@processes(2)
def test_sharded_parameters_start_from_the_first_process():
    """The first process's values replace those that each process has by itself. A global array keeps its values."""
    mesh, mine = mesh_of(W), stage3.tree_of(10 + jax.process_index())
    mine["layers"]["w"] = cut(stage3.tree_of(20)["layers"]["w"], mesh, 2)
    expected = stage3.tree_of(10)
    expected["layers"]["w"] = stage3.tree_of(20)["layers"]["w"]
    offloaded = wrap(mine, **STAGE3, mesh=mesh)
    assert_same_tree(whole(offloaded.params, offloaded), expected)
    assert_same_tree(offloaded.to_pytree()["master"], expected)


def test_the_users_dimension_is_kept_and_nothing_is_copied():
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


def test_kept_parameters_of_stage_3_are_never_rewritten():
    for offload_param in (None, "cpu"):
        offloaded = wrap(stage3.tree_of(0), **HYPER, **STAGE3, mesh=mesh_of(W), offload_param=offload_param)
        kept = []
        for seed in range(4):
            params = offloaded.update(stage3.tree_of(seed))
            kept.append((params, jax.tree.map(lambda x: np.array(x, copy=True), params)))
        for params, copies in kept:
            assert_same_tree(params, copies)


def test_as_optax_at_stage_3():
    mesh = mesh_of(W)
    ours, theirs = wrap(stage3.tree_of(0), **HYPER, **STAGE3, mesh=mesh), wrap(stage3.tree_of(0), **HYPER)
    tx, params = ours.as_optax(), ours.params
    state = tx.init(params)
    for seed in range(3):
        updates, state = tx.update(stage3.tree_of(seed), state, params)
        params = optax.apply_updates(params, updates)
        assert_placed(params, mesh)
        assert_same_tree(params, theirs.update(stage3.tree_of(seed)))
    with refuses(ConfigError, "as_optax() with offload_param='cpu'", "offloaded.update"):
        wrap(stage3.tree_of(0), **STAGE3, mesh=mesh, offload_param="cpu").as_optax()
