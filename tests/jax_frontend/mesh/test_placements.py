"""Parameters that stay as they were placed: sharded over any axes of any mesh."""

import itertools
from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from frontends.jax import gather_params, wrap
from frontends.jax.devices.mesh.places import Places
from frontends.jax.placement import as_placed, placement
from frontends.jax.placement.as_placed import AsPlaced
from frontends.jax.tree.memory_kinds import lies_as
from frontends.jax.tree.shard_layout import ShardLayout
from offload_core.errors import GradientError, ParameterError, StateError
from tests.support.jax_meshes import (
    HYPER,
    assert_holds,
    assert_same_tree,
    processes,
    refuses,
    slow,
)
from tests.support.strategies import law

SHAPES = {"w": (8, 12), "v": (12, 4), "b": (4,), "scale": (), "empty": (0, 4)}
MESHES = {
    "fsdp x tensor": ((2, 2), ("fsdp", "tensor"), {"w": P("fsdp", "tensor"), "v": P("tensor"), "b": P()}),
    "data x fsdp": ((2, 2), ("data", "fsdp"), {"w": P(None, "fsdp"), "v": P("fsdp"), "b": P("fsdp")}),
    "4 x 1": ((4, 1), ("fsdp", "tensor"), {"w": P("fsdp", "tensor"), "v": P(("fsdp", "tensor")), "b": P("fsdp")}),
    "1 x 4": ((1, 4), ("fsdp", "tensor"), {"w": P("fsdp", "tensor"), "v": P(None, "tensor"), "b": P()}),
}


def placed(value, sharding):
    """A global array of a value that every process has."""
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def tree_of(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return {name: (scale * rng.standard_normal(shape)).astype(np.float32) for name, shape in SHAPES.items()}


def mesh_of(shape, names, types=AxisType.Auto):
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, names, axis_types=(types,) * len(shape), devices=devices)


def on(mesh, specs, tree):
    return {name: placed(value, NamedSharding(mesh, specs.get(name, P()))) for name, value in tree.items()}


def whole(tree):
    """The value of global arrays, in every process."""
    (array, *_) = jax.tree.leaves(tree)
    everywhere = NamedSharding(array.sharding.mesh, P())
    return jax.tree.map(lambda a: np.asarray(jax.jit(jnp.copy, out_shardings=everywhere)(a).addressable_data(0)), tree)


def shards(tree):
    """Return the shards on the devices of this process."""
    return jax.tree.map(lambda array: [shard.data for shard in array.addressable_shards], tree)


def cases():
    for (shape, names, specs), types, context in itertools.product(
        MESHES.values(), (AxisType.Auto, AxisType.Explicit), (False, True)
    ):
        mesh = mesh_of(shape, names, types)
        yield mesh, specs, (partial(jax.set_mesh, mesh) if context else nullcontext)  # which sets it when it is called


def line():
    """Four devices in a row."""
    return Mesh(np.array(jax.devices()[:4]), ("x",))


def ways():
    """Return, by kind, how to make parameters of NumPy arrays, where a batch lies, and the options of ``wrap``."""
    (shape, names, specs), here, row = MESHES["data x fsdp"], jax.local_devices()[1], line()
    mesh, explicit = mesh_of(shape, names), mesh_of(shape, names, AxisType.Explicit)
    return {
        "numpy": (lambda tree: tree, None, {}),
        "one device": (lambda tree: jax.device_put(tree, here), jax.sharding.SingleDeviceSharding(here), {}),
        "sharded": (partial(on, mesh, specs), NamedSharding(mesh, P()), {}),
        "explicit": (partial(on, explicit, specs), NamedSharding(explicit, P()), {}),
        "stage 2": (lambda tree: tree, NamedSharding(row, P("x")), {"mesh": row, "stage": 2}),
        "stage 3": (
            lambda tree: tree,
            NamedSharding(row, P("x")),
            {"mesh": row, "stage": 3, "param_persistence_threshold": 0},
        ),
    }


@pytest.mark.long("XLA compiles the programs of each mesh and sharding")
@pytest.mark.draws(1)
@processes(1, 2)
def test_on_any_mesh_the_bits_are_those_of_eager_optax(drawn):
    transformation = optax.adamw(HYPER["lr"], weight_decay=HYPER["weight_decay"])
    with jax.default_device(jax.local_devices()[0]):
        params = jax.tree.map(jnp.asarray, tree_of(0))
        state = transformation.init(params)
        for step in range(5):
            gradients = jax.tree.map(jnp.asarray, tree_of(step + 1))
            changes, state = transformation.update(gradients, state, params)
            params = optax.apply_updates(params, changes)
    for mesh, specs, context in drawn(cases(), 2):
        with context():
            offloaded = wrap(on(mesh, specs, tree_of(0)), reduce_bucket_size=64, **HYPER)
            for step in range(5):
                got = offloaded.update(on(mesh, specs, tree_of(step + 1)))
            shardings = {name: NamedSharding(mesh, specs.get(name, P())) for name in SHAPES}
            assert {name: array.sharding for name, array in got.items()} == shardings
            assert_holds(got, params)
            assert offloaded.sent_bytes == 0


@pytest.mark.draws(3)
@pytest.mark.parametrize("spec", [P("a", "b"), P("b", "a"), P(("b", "a")), P(None, "b"), P("a"), P()], ids=str)
@pytest.mark.parametrize("memory", ["host's", "its own"])
def test_new_parameters_lie_on_the_devices_in_the_shardings_own_order(spec, memory, monkeypatch):
    """All values differ, and the mesh has another order of devices than their numbers."""
    if memory == "its own":
        monkeypatch.setattr(placement, "on_cpu", lambda array: False)
    devices = [jax.devices()[i] for i in (3, 1, 0, 2)]
    sharding = NamedSharding(Mesh(np.array(devices).reshape(2, 2), ("a", "b")), spec)
    start = np.arange(1, 33, dtype=np.float32).reshape(4, 8)
    offloaded = wrap({"w": placed(start, sharding)}, lr=1.0, weight_decay=0.0, eps=0.0)
    got = offloaded.update({"w": placed(np.ones_like(start), sharding)})["w"]
    assert got.sharding == sharding
    assert [shard.device for shard in got.addressable_shards] == list(sharding.addressable_devices_indices_map((4, 8)))
    masters = offloaded.to_pytree(sharded=True)["master"]["w"]
    for shard in (*got.addressable_shards, *masters.addressable_shards):
        assert shard.data.devices() == {shard.device}
        index = sharding.devices_indices_map((4, 8))[shard.device]
        np.testing.assert_allclose(shard.data, (start - 1)[index], atol=1e-4)


def test_an_update_puts_all_shards_of_a_parameter_in_one_call(monkeypatch):
    """A put for each of the devices takes most of the processor time of an update."""
    mesh = mesh_of((2, 2), ("fsdp", "tensor"))
    specs = MESHES["fsdp x tensor"][2]
    offloaded, gradients = wrap(on(mesh, specs, tree_of(0))), on(mesh, specs, tree_of(1))
    puts = []
    for name in ("device_put", "make_array_from_callback"):
        made = getattr(jax, name)
        monkeypatch.setattr(jax, name, lambda *args, made=made, **kwargs: puts.append(args) or made(*args, **kwargs))
    offloaded.update(gradients)
    puts = [args for args in puts if len(args) > 1]  # others are of scalars, beside the devices
    assert len(puts) == len(SHAPES)
    assert not any(isinstance(args[0], list) for args in puts)  # of an array for each device


@pytest.mark.draws(1)
@processes(1, 2)
def test_clipping_is_that_of_one_device(drawn):
    """Replicas are counted once."""
    fields = {"gradient_clipping": 0.5, "gradient_accumulation_steps": 2, **HYPER}
    with jax.default_device(jax.local_devices()[0]):
        alone = wrap(tree_of(0), **fields)
    reports = []
    for step in range(4):
        alone.update(tree_of(step + 1))
        reports.append(alone.report)
        assert alone.report.skipped or alone.report.clip_coefficient < 1
    for mesh, specs, context in drawn(cases(), 2):
        with context():
            offloaded = wrap(on(mesh, specs, tree_of(0)), **fields)
            for step, report in enumerate(reports):
                offloaded.update(on(mesh, specs, tree_of(step + 1)))
                assert offloaded.report == report
            assert_holds(offloaded.params, alone.params)


@law(20, least=5)
@given(
    st.data(),
    st.sampled_from([(2, 2, 2), (4, 2, 1), (8, 1, 1), (2, 1, 1), (1, 1, 1)]),
    st.permutations(["a", "b", "c"]).map(tuple),
)
def test_any_mesh_sharding_and_shape(data, sizes, names):
    mesh = mesh_of(sizes, names)
    if data.draw(st.booleans()):
        mesh = Mesh(np.flip(mesh.devices), names)  # in another order
    used = [n for n, size in mesh.shape.items() if size > 1]

    def specs_of():
        found = {}
        for name, shape in SHAPES.items():
            free, entries = data.draw(st.permutations(used)), []
            for n in shape:
                entry = tuple(free[: data.draw(st.integers(0, len(free)))])
                if n % int(np.prod([mesh.shape[axis] for axis in entry])):
                    entry = ()
                free = free[len(entry) :]
                entries.append(entry or None)
            found[name] = P(*entries)
        return found

    fields = {
        "param_dtype": data.draw(st.sampled_from(["float32", "bfloat16"])),
        "reduce_bucket_size": data.draw(st.sampled_from([16, 100, 10**6])),
        "gradient_clipping": data.draw(st.sampled_from([None, 0.3])),
        "schedule": data.draw(st.sampled_from(["overlap", "serial", "delayed"])),
        **HYPER,
    }
    specs = specs_of()
    offloaded, alone = wrap(on(mesh, specs, tree_of(0)), **fields), wrap(tree_of(0), **fields)
    assert sum(spec.numel for spec in offloaded._core.params) == sum(map(np.size, tree_of(0).values()))
    for step in range(3):
        gradients = tree_of(step + 1)
        cut = on(mesh, data.draw(st.sampled_from([specs, specs_of()])), gradients)
        if data.draw(st.booleans()):
            cut["v"] = gradients["v"] = None
        offloaded.update(cut)
        alone.update(gradients)
    assert offloaded.report == alone.report
    assert_holds(offloaded.flush(), alone.flush())
    assert_same_tree(offloaded.to_pytree(), alone.to_pytree())


@pytest.mark.long("two processes, each of which compiles its programs with XLA")
@pytest.mark.draws(1)
@processes(1, 2)
def test_gradients_come_from_a_plain_jit_or_from_value_and_grad():
    def loss_fn(params, x):
        hidden = jnp.tanh(x @ params["w"])
        return jnp.mean((hidden @ params["v"] + params["b"]) ** 2) * params["scale"]

    shape, names, specs = MESHES["fsdp x tensor"]
    mesh = mesh_of(shape, names)
    for jitted in (True, False):
        offloaded = wrap(on(mesh, specs, tree_of(0)), **HYPER)
        step = jax.jit(jax.value_and_grad(loss_fn)) if jitted else offloaded.value_and_grad(loss_fn)
        with jax.default_device(jax.local_devices()[0]):
            alone = wrap(tree_of(0), **HYPER)
        for seed in range(3):
            x = placed(
                np.random.default_rng(seed).standard_normal((4, 8)).astype(np.float32), NamedSharding(mesh, P("fsdp"))
            )
            _, gradients = step(offloaded.params, x)
            alone.update(whole(gradients))
            offloaded.update(gradients)
        assert_holds(offloaded.params, alone.params)


@pytest.mark.long("two processes, each of which compiles its programs with XLA")
@pytest.mark.draws(1)
@processes(1, 2)
def test_what_is_saved_on_one_mesh_is_loaded_on_another_and_on_one_device(folder):
    trees = []
    for number, (shape, names, specs) in enumerate(MESHES.values()):
        mesh = mesh_of(shape, names)
        tree = on(mesh, specs, tree_of(0)) | on(mesh, {"frozen": P(names[0])}, {"frozen": tree_of(9)["w"]})
        trained = {name: name != "frozen" for name in tree}
        offloaded = wrap(tree, trainable=trained, **HYPER)
        if number:
            offloaded.load_checkpoint(folder / str(number - 1))
            offloaded.load_pytree(offloaded.to_pytree())
            assert offloaded.count == 2 * number
        gradients = [on(mesh, specs, tree_of(2 * number + step)) | {"frozen": None} for step in range(2)]
        for gradient in gradients:
            offloaded.update(gradient)
        offloaded.save_checkpoint(folder / str(number))
        assert offloaded.params["frozen"].sharding.spec == P(names[0])
        trees.append(offloaded.to_pytree())
    with jax.default_device(jax.local_devices()[0]):
        alone = wrap(tree_of(0) | {"frozen": tree_of(9)["w"]}, trainable=trained, **HYPER)
        for step in range(2 * len(MESHES)):
            alone.update(tree_of(step) | {"frozen": None})
    assert_same_tree(trees[-1], alone.to_pytree())
    if jax.process_count() == 1:
        alone.load_checkpoint(folder / "1")
        assert_same_tree(alone.to_pytree(), trees[1])


@pytest.mark.draws(1)
@processes(1, 2)
def test_with_a_mesh_argument_sharded_parameters_stay_as_they_are():
    for name, stage in (("4 x 1", 2), ("data x fsdp", 3), ("fsdp x tensor", 1)):
        shape, names, specs = MESHES[name]
        mesh = mesh_of(shape, names)
        offloaded = wrap(on(mesh, specs, tree_of(0)), mesh=mesh, stage=stage, **HYPER)
        new = offloaded.update(on(mesh, specs, tree_of(1)))
        assert new["w"].sharding == NamedSharding(mesh, specs["w"])


@pytest.mark.long("XLA compiles the programs of each mesh and sharding")
@pytest.mark.draws(1)
@processes(1, 2)
def test_what_does_not_fit_is_refused_and_loses_nothing():
    shape, names, specs = MESHES["fsdp x tensor"]
    mesh = mesh_of(shape, names)
    params = on(mesh, specs, tree_of(0))
    here = jax.local_devices()[0]
    for beside in (tree_of(0)["b"], jax.device_put(tree_of(0)["b"], here), jnp.ones(4)):
        with refuses(ParameterError, "['b']", "expected all on the same devices", "jax.device_put"):
            wrap({**params, "b": beside}, **HYPER)
    offloaded = wrap(params, **HYPER)
    before = offloaded.to_pytree()
    elsewhere = jax.device_put(tree_of(1)["w"], here)
    with refuses(GradientError, "['w']", "expected both on the same devices"):
        offloaded.update({**on(mesh, specs, tree_of(1)), "w": elsewhere})
    with refuses(GradientError, "['w']", "expected"):
        offloaded.update(
            {**on(mesh, specs, tree_of(1)), "w": placed(np.ones((2, 2), np.float32), NamedSharding(mesh, P()))}
        )
    assert_same_tree(offloaded.to_pytree(), before)
    gradients = on(mesh, specs, tree_of(1))
    gradients["w"].delete()
    with refuses(GradientError, "['w']", "donated or deleted"):
        offloaded.update(gradients)
    assert_same_tree(offloaded.to_pytree(), before)
    offloaded.update(on(mesh, specs, tree_of(1)))
    offloaded.params["w"].delete()
    with refuses(StateError, "was donated or deleted"):
        offloaded.to_pytree()


def test_parameters_on_two_meshes_are_refused():
    one, other = (Mesh(np.array(devices), ("x",)) for devices in (jax.devices()[:2], jax.devices()[2:6]))
    with refuses(ParameterError, "['w']", "expected all on the same devices"):
        wrap(on(one, {}, {"w": tree_of(0)["w"]}) | on(other, {}, {"v": tree_of(0)["v"]}), **HYPER)


CONTEXTS = {
    "none": nullcontext,
    "two devices": lambda: jax.set_mesh(Mesh(np.array(jax.local_devices()[:2]), ("x",))),
    "Explicit": lambda: jax.set_mesh(mesh_of(*MESHES["data x fsdp"][:2], AxisType.Explicit)),
}
SOME = [("none", "none"), ("two devices", "Explicit"), ("Explicit", "two devices")]


MEANWHILE = {
    "nothing": lambda offloaded, folder: None,
    "a save": lambda offloaded, folder: offloaded.save_checkpoint(folder),
    "an export": lambda offloaded, folder: offloaded.export_safetensors(folder),
    "a read": lambda offloaded, folder: (offloaded.flush(), offloaded.to_pytree()),
}


@pytest.mark.long("XLA compiles the programs of each mesh and sharding")
@pytest.mark.draws(4)
@processes(1, 2)
@pytest.mark.parametrize(
    ("kind", "fields", "meanwhile"),
    [
        *((kind, {}, "nothing") for kind in ("numpy", "one device", "sharded", "stage 2", "stage 3")),
        ("sharded", {}, "a save"),
        ("sharded", {"state_format": "bf16"}, "an export"),
        ("stage 3", {"state_format": "8bit"}, "a read"),
    ],
)
def test_weights_that_are_put_back_have_their_master_weights(kind, fields, meanwhile, folder):
    """As where an average of weights is evaluated between two updates: all are halved, and get their values back."""
    place, _, mesh = ways()[kind]
    narrow = {**mesh, **fields, "lr": 1e-5, "param_dtype": "bfloat16"}
    offloaded, undisturbed = (wrap(place(tree_of(0)), **narrow) for _ in range(2))
    half = jax.jit(partial(jax.tree.map, lambda p: p / 2))
    for step in range(2):
        gradients = place(tree_of(step + 1))
        kept = offloaded.update(gradients)
        undisturbed.update(gradients)
        offloaded.load_params(half(kept))
        MEANWHILE[meanwhile](offloaded, folder)
        offloaded.load_params(half(offloaded.params))
        offloaded.load_params(kept)
        assert_same_tree(offloaded.to_pytree(), undisturbed.to_pytree())


@pytest.mark.draws(1)
@processes(1, 2)
@pytest.mark.parametrize("kind", ["numpy", "one device", "sharded", slow("stage 2", processes=2), "stage 3"])
@pytest.mark.parametrize("contexts", [SOME, slow([*itertools.product(CONTEXTS, CONTEXTS)])], ids=["some", "all"])
def test_a_mesh_that_the_caller_has_set_changes_nothing(kind, contexts, folder, processes):
    """``jax.set_mesh``, with any mesh, around each call or around some."""
    make, batches, arguments = ways()[kind]
    saved, expected = kind != "numpy" and (processes == 1 or kind != "one device"), None
    for wrapping, using in contexts:
        with CONTEXTS[wrapping]():
            offloaded = wrap(make(tree_of(0)), **arguments, **HYPER)
        with CONTEXTS[using]():
            for step in range(2):
                offloaded.update(make(tree_of(step + 1)))
            if "mesh" in arguments:
                step = offloaded.value_and_grad(lambda p, x: (x @ gather_params(p)["b"]).sum())
                offloaded.update(step(offloaded.params, placed(tree_of(3)["v"], batches))[1])
            if saved:
                offloaded.save_checkpoint(folder)
        with CONTEXTS[wrapping]():
            if saved:
                offloaded.load_checkpoint(folder)
            found = offloaded.to_pytree()
        expected = found if expected is None else expected
        assert_same_tree(found, expected)


SCALED, SCHEDULED = {"param_dtype": "float16", "loss_scale": 8.0}, {"lr": optax.cosine_decay_schedule(1e-2, 9)}


@pytest.mark.long("two processes, each of which compiles its programs with XLA")
@pytest.mark.draws(1)
@processes(1, 2)
@pytest.mark.parametrize("kind", ["one device", "sharded", slow("stage 2", processes=2), "stage 3"])
@pytest.mark.parametrize(
    "fields",
    [SCALED | SCHEDULED, slow({}), slow(SCALED), slow(SCHEDULED)],
    ids=["scaled and scheduled", "plain", "scaled", "scheduled"],
)
def test_no_transfer_is_implicit(kind, fields):
    """Under ``jax.transfer_guard("disallow")``, where the user has placed parameters, batches and the mesh."""
    make, batches, arguments = ways()[kind]
    make = partial(on, line(), {}) if "mesh" in arguments else make
    params, batch, expected = make(tree_of(0)), placed(tree_of(3)["v"], batches), None
    for guard in ("allow", "disallow"):
        with jax.transfer_guard(guard):
            offloaded = wrap(params, **arguments, **{**HYPER, "gradient_clipping": 1.0, **fields})
            step = offloaded.value_and_grad(lambda p, x: (x @ gather_params(p)["b"].astype(x.dtype)).sum())
            for _ in range(2):
                offloaded.update(step(offloaded.params, batch)[1])
        found = offloaded.to_pytree()
        expected = found if expected is None else expected
        assert_same_tree(found, expected)


OPTIONS = {
    "small buckets": {"reduce_bucket_size": 40},
    "clipped": {"gradient_clipping": 0.5, "gradient_accumulation_steps": 2, "param_dtype": "bfloat16"},
    "delayed": {"schedule": "delayed", "delay_warmup_steps": 1},
}
FEW = [("fsdp x tensor", "small buckets"), ("data x fsdp", "clipped"), ("1 x 4", "delayed")]


@pytest.mark.draws(1)
@processes(1, 2)
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        FEW[0],
        *(slow(*case, processes=2) for case in FEW[1:]),
        *(slow(*case) for case in itertools.product(MESHES, OPTIONS) if case not in FEW),
    ],
)
def test_devices_with_memory_of_their_own_give_the_same_bits(mesh, options):
    """CPU devices stand for them: their memory is taken for another than the host's."""
    (shape, names, specs), fields = MESHES[mesh], OPTIONS[options]
    mesh = mesh_of(shape, names)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "on_cpu", lambda array: False)
        there = wrap(on(mesh, specs, tree_of(0)), **HYPER, **fields)
    assert isinstance(there._core.device, Places)
    here = wrap(on(mesh, specs, tree_of(0)), **HYPER, **fields)
    with jax.set_mesh(mesh):
        for step in range(4):
            gradients = on(mesh, specs, tree_of(step + 1))
            assert there.update(gradients)["w"].sharding == NamedSharding(mesh, specs["w"])
            here.update(gradients)
            assert there.report == here.report
        there.flush(), here.flush()
    assert_same_tree(there.to_pytree(), here.to_pytree())
    assert_same_tree(shards(there.params), shards(here.params))


@pytest.mark.draws(1)
@processes(1, 2)
@pytest.mark.parametrize(
    "kind", ["one device", "stage 3", slow("explicit", processes=2), slow("sharded"), slow("stage 2")]
)
def test_a_function_that_the_user_has_compiled_follows_the_loss_scale(kind):
    """It falls while gradients overflow, and rises again."""
    fields = {"param_dtype": "float16", "initial_loss_scale": 2.0**16, "loss_scale_window": 2, **HYPER}
    make, batches, arguments = ways()[kind]
    batch = placed(np.full((4, 4), 0.5, np.float32), batches)
    specs_of_batch = {"in_specs": P("x")} if "mesh" in arguments else {}
    ours, theirs = (wrap(make(tree_of(0)), **arguments, **fields) for _ in range(2))

    def loss_fn(params, x):
        return (x @ gather_params(params)["b"].astype(x.dtype)).sum()

    compiled = jax.jit(ours.value_and_grad(loss_fn, **specs_of_batch))
    plain = theirs.value_and_grad(loss_fn, **specs_of_batch)
    scales = []
    for _ in range(7):
        ours.update(compiled(ours.params, batch)[1])
        theirs.update(plain(theirs.params, batch)[1])
        assert ours.report == theirs.report
        scales.append(ours.report.loss_scale)
    assert sorted(set(scales)) != scales
    assert ours.count > 2
    assert_same_tree(ours.to_pytree(), theirs.to_pytree())
    before = compiled(ours.params, batch)[1]
    ours.load_pytree({**ours.to_pytree(), "loss_scale": {"scale": 2.0, "good_steps": 0, "tolerated": 0}})
    with refuses(GradientError, "expected 2: they are from before"):
        ours.update(before)
    ours.update(compiled(ours.params, batch)[1])
    assert ours.report.loss_scale == 2


def values(seed):
    return {name: value for name, value in tree_of(seed).items() if value.size}  # orbax saves no empty arrays


@pytest.mark.draws(1)
@pytest.mark.integration
@processes(1, 2)
@pytest.mark.parametrize("kind", ["placed", "offload_param", slow("bfloat16"), slow("stage 3"), slow("stage 2")])
def test_a_sharded_tree_of_states_is_saved_by_orbax_and_nobody_has_it_whole(kind, folder, processes):
    from orbax import checkpoint as orbax

    def refuse(*_, **__):
        raise AssertionError("a whole array")

    (shape, names, specs), row = MESHES["fsdp x tensor"], line()
    stage3 = {"mesh": row, "stage": 3, "param_persistence_threshold": 40, "reduce_bucket_size": 64}
    fields = {
        "placed": {},
        "bfloat16": {"param_dtype": "bfloat16"},
        "stage 3": stage3,
        "offload_param": {**stage3, "offload_param": "cpu"},
        "stage 2": {"mesh": row, "stage": 2},
    }[kind]
    make = partial(on, row, {}) if "mesh" in fields else partial(on, mesh_of(shape, names), specs)
    ours, other = wrap(make(values(0)), **fields, **HYPER), wrap(make(values(9)), **fields, **HYPER)
    for step in range(2):
        ours.update(make(values(step + 1)))
    other.update(make(values(5)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(as_placed, "merged", refuse)
        patch.setattr(AsPlaced, "cut", refuse)
        patch.setattr(ShardLayout, "from_core", refuse)
        patch.setattr(ShardLayout, "to_core", refuse)
        tree = ours.to_pytree(sharded=True)
        for name in ("params", "master", "exp_avg", "exp_avg_sq"):
            for path, array in tree[name].items():
                like = ours.params[path]
                assert lies_as(array, like), (name, path)
                shards = zip(array.addressable_shards, like.addressable_shards, strict=True)
                assert all(a.data.shape == b.data.shape for a, b in shards)
                assert name == "params" or array.sharding.memory_kind == "pinned_host"
        with orbax.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / "saved", tree, force=True)
        target = other.to_pytree(sharded=True)
        with orbax.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(folder / "saved", target)
        other.load_pytree(restored)
    assert_same_tree(other.to_pytree(), ours.to_pytree())
    jax.tree.map(lambda leaf: isinstance(leaf, jax.Array) and leaf.delete(), restored)
    for offloaded in (ours, other):
        offloaded.update(make(values(7)))
    assert_same_tree(other.to_pytree(), ours.to_pytree())
    if kind == "placed" and processes == 2:
        back = wrap(on(row, {"w": P("x")}, values(0)), **HYPER)
        with refuses(StateError, "is cut over several processes, and not as its parameter"):
            back.load_pytree(ours.to_pytree(sharded=True))
    elif processes == 1:
        back = wrap(values(0), **({"param_dtype": "bfloat16"} if kind == "bfloat16" else {}), **HYPER)
        back.load_pytree(ours.to_pytree(sharded=True))
        assert_same_tree(back.to_pytree(), ours.to_pytree())
