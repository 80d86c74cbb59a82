"""``init()``: arrays are made where ``wrap`` keeps them, computed or read from files, with one whole leaf at a time."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from frontends.jax import construction, init, wrap
from offload_core.errors import CheckpointError, ConfigError, ParameterError, StateError
from tests.support.jax_meshes import addresses, assert_holds, mesh_of, processes, refuses
from tests.support.jax_stage3 import STAGE3, assert_placed, cut

EMBED = (96, 32)


def numbers(key, shape):
    """Numbers in [0, 1) that depend on the key, without the seconds that XLA takes to compile JAX's generators."""
    number = jax.random.key_data(key)[-1]
    bits = jnp.arange(np.prod(shape), dtype=jnp.uint32).reshape(shape) * jnp.uint32(2654435761) ^ number
    return (bits >> 8).astype(jnp.float32) * 2**-24


def model(key, numbers=numbers):
    """A tree with drawn, stacked and constant arrays, arrays that are not trained, and leaves that are none.

    XLA rounds a sum of products as it fuses them, so there is none.
    """
    embed = numbers(key, EMBED)
    return {
        "embed": embed,
        "layers": {"w": jnp.stack([embed.T * 2**i for i in range(3)]), "b": jnp.ones((3, 96), jnp.bfloat16)},
        "head": embed.T.astype(jnp.float16),
        "odd": jnp.ones((5, 7)),
        "table": jnp.arange(8),
        "key": jax.random.fold_in(key, 1),
        "rate": 0.5,
        "activation": jax.nn.relu,
        "none": None,
    }


def arrays_of(tree):
    """Return the arrays of a tree, those of keys as numbers."""
    leaves = {k: v for k, v in tree.items() if k not in ("rate", "activation", "none")}
    return {**leaves, "key": jax.random.key_data(leaves["key"])} if "key" in leaves else leaves


def computed(model=model):
    return jax.jit(lambda key: arrays_of(model(key)))(jax.random.key(3))


def assert_made(tree, model=model):
    assert (tree["rate"], tree["activation"], tree["none"]) == (0.5, jax.nn.relu, None)
    assert_holds(arrays_of(tree), computed(model))


@pytest.mark.draws(1)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@processes(1, 2)
def test_arrays_are_those_of_one_program_and_lie_where_wrap_keeps_them(axis_type, drawn):
    mesh = mesh_of(4, axis_type)
    trainable = {**dict.fromkeys(model(jax.random.key(0)), True), "head": False}
    for fields in drawn([STAGE3, {**STAGE3, "offload_param": "cpu"}, {"stage": 2}], 1):
        params = init(model, jax.random.key(3), mesh=mesh, trainable=trainable, **fields)
        assert_made(params)
        offloaded = wrap(params, mesh=mesh, trainable=trainable, **fields)
        assert_made(offloaded.params)
        if fields["stage"] == 3:  # wrap gives what is replicated the values of rank 0
            of_sharded = [addresses([tree["embed"], tree["layers"]["w"]]) for tree in (params, offloaded.params)]
            assert of_sharded[0] == of_sharded[1]
        sharded = params["layers"]["w"].sharding
        assert sharded.is_fully_replicated == (fields["stage"] == 2)
        assert (sharded.memory_kind == "pinned_host") == ("offload_param" in fields)
        assert params["head"].sharding.is_fully_replicated
    assert not init(lambda: jnp.ones((4, 10**5)), mesh=mesh).sharding.is_fully_replicated  # stage 3 unless told


@pytest.mark.parametrize("shape", [(2, 4), (8, 1)])
def test_arrays_lie_as_shardings_say_or_on_the_default_device(shape):
    mesh = jax.make_mesh(shape, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def shardings(forms):
        assert forms["embed"] == jax.ShapeDtypeStruct(EMBED, jnp.float32)
        over = NamedSharding(mesh, P(None, ("data", "tensor")))
        return {name: over if name in ("embed", "head") else NamedSharding(mesh, P()) for name in forms}

    params = init(model, jax.random.key(3), shardings=shardings)
    assert_made(params)
    assert params["embed"].addressable_data(0).shape == (96, 4)
    assert wrap(params).params["head"].sharding == params["head"].sharding
    host = NamedSharding(mesh, P("data"), memory_kind="pinned_host")
    params = {"w": init(lambda: jnp.ones((8, 4)), shardings=host)}
    offloaded = wrap(params, offload_param="cpu")
    assert addresses(offloaded.params) == addresses(params)
    assert offloaded.params["w"].sharding == host
    on_one = init(model, jax.random.key(3), shardings=None)
    assert_made(on_one)
    assert not on_one["embed"].committed
    in_host_memory = init(model, jax.random.key(3), stage=3, offload_param="cpu")
    assert_made(in_host_memory)
    offloaded = wrap(in_host_memory, stage=3, offload_param="cpu")
    for params in (in_host_memory, offloaded.params):
        assert (params["embed"].sharding.memory_kind, params["table"].sharding.memory_kind) == ("pinned_host", "device")


@processes(1, 2)
def test_each_process_reads_its_own_part_of_the_files(folder, monkeypatch, drawn):
    mesh = mesh_of(4)
    dtype = drawn([None, "float32", "bfloat16"], 1)[0]
    saved = wrap({"wte": jnp.ones(3), **computed()}, mesh=mesh)
    saved.export_safetensors(folder / "model", max_shard_bytes=drawn([9000, 10**9], 1)[0], dtype=dtype)
    expected = computed()
    if dtype is not None:
        expected = jax.tree.map(
            lambda a: a.astype(dtype).astype(a.dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a, expected
        )
    n_bytes, read = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: n_bytes.append(read(*args)) or n_bytes[-1])
    fields = {**STAGE3, **drawn([{}, {"offload_param": "cpu"}], 1)[0]}
    names = {"head": "wte"}  # read from elsewhere below

    def other(key):
        return {**model(key), "embed": jnp.zeros(EMBED), "head": jnp.zeros(3)}

    params = init(other, jax.random.key(3), weights=folder / "model", names=names, mesh=mesh, **fields)
    head = params.pop("head")
    assert (np.asarray(head) == 1).all()
    expected.pop("head")
    assert_holds(arrays_of(params), expected)
    assert_placed({"w": params["layers"]["w"]}, mesh, "pinned_host" if "offload_param" in fields else "device")
    stored = {name: tensor for file in (folder / "model").glob("*.safetensors") for name, tensor in sizes(file).items()}
    whole = sum(stored[name] for name in ("odd", "table", "wte"))
    assert sum(n_bytes) == whole + (
        sum(stored[name] for name in ("embed", "layers.w", "layers.b")) * len(mesh.local_devices) // 4
    )


def sizes(file):
    return {name: array.nbytes for name, array in safetensors.numpy.load_file(file).items()}


@pytest.mark.slow
@processes(2)
def test_two_processes_never_have_more_than_their_half_and_a_leaf():
    """The generator draws whole arrays on each device, so a program of all leaves would hold the whole model."""
    mesh, n, shape = mesh_of(4), 8, (2048, 2048)

    def draw(key):
        return [jax.random.bits(key, shape) + jnp.uint32(i) for i, key in enumerate(jax.random.split(key, n))]

    def made(n):
        key = jax.random.key(0, impl="rbg")
        return init(lambda: draw(key)[:n], shardings=NamedSharding(mesh, P(None, "dp")))

    made(1)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = status("VmRSS:")
    arrays = made(n)
    leaf = arrays[0].nbytes
    assert sum(a.addressable_data(0).nbytes for a in arrays) * 2 == n * leaf // 2
    assert status("VmHWM:") - before < 0.75 * n * leaf  # 2.4 times the model in one program


def status(field):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_generators_draw_in_shards_what_they_draw_as_one(impl):
    def drawn_model(key):
        return model(jax.random.wrap_key_data(jnp.arange(2 + 2 * (impl == "rbg"), dtype=jnp.uint32), impl=impl), normal)

    def normal(key, shape):
        return jax.nn.initializers.normal(0.02)(key, shape)

    assert_made(init(drawn_model, jax.random.key(3), mesh=mesh_of(8), param_persistence_threshold=1), drawn_model)


@processes(2)
def test_what_is_wrong_in_one_process_is_an_error_in_both(folder):
    mesh = mesh_of(4)
    weights = folder / f"weights {jax.process_index()}"
    weights.mkdir()
    if jax.process_index() == 0:
        safetensors.numpy.save_file({"w": np.ones((4, 8), np.float32)}, weights / "model.safetensors")
    with refuses(CheckpointError, "weights 1", "holds neither"):
        init(lambda: {"w": jnp.ones((4, 8))}, weights=weights, mesh=mesh)
    for fields in ({"mesh": mesh}, {"shardings": NamedSharding(mesh, P())}):
        with refuses(ParameterError, "the arguments are not the same in all processes", "one key"):
            init(model, jax.random.key(jax.process_index()), **fields)


def test_leaves_are_computed_together_up_to_the_bytes_of_the_largest():
    sizes = dict(enumerate((12, 40, 16, 24, 4, 8)))
    here, there = (NamedSharding(mesh_of(n), P()) for n in (2, 4))
    assert [*construction._groups([*sizes], sizes, [here] * 6)] == [(0,), (1,), (2, 3), (4, 5)]
    assert [*construction._groups([0, 2, 4], sizes, [here, here, here, here, there, here])] == [(0,), (2,), (4,)]
    assert [*construction._groups([], {}, [])] == []


def test_an_error_names_the_leaf_and_the_way_on(tmp_path):
    key, mesh = jax.random.key(0), mesh_of(2)
    weights = {"w": np.ones((3, 4), np.float32), "n": np.arange(3)}
    safetensors.numpy.save_file(weights, tmp_path / "model.safetensors")

    def form(shape, dtype=jnp.float32):
        return {"w": jax.ShapeDtypeStruct(shape, dtype)}

    with refuses(ParameterError, "params['w']", "'weight'", str(tmp_path), "'n'"):
        init(form((3, 4)), weights=tmp_path, names={"w": "weight"})
    with refuses(ParameterError, "'w'", "float32[3, 4]", "expected float32[4, 3]", "params['w']"):
        init(form((4, 3)), weights=tmp_path)
    with refuses(ParameterError, "float32[3, 4]", "expected int32[3, 4]"):
        init(form((3, 4), jnp.int32), weights=tmp_path)
    with refuses(CheckpointError, str(tmp_path / "none"), "model.safetensors.index.json"):
        init(form((3, 4)), weights=tmp_path / "none")
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-8])
    with refuses(CheckpointError, "model.safetensors", "cut off"):
        init(form((3, 4)), weights=tmp_path)
    with refuses(ParameterError, "init: got a dict", "jax.eval_shape"):
        init(form((3, 4)))
    with refuses(ConfigError, "shardings= beside mesh="):
        init(model, key, mesh=mesh, shardings=NamedSharding(mesh, P()))
    with refuses(ParameterError, "shardings: params['embed'] has a P", "NamedSharding"):
        init(model, key, shardings=P())
    with refuses(ParameterError, "structure of shardings differs"):
        init(model, key, shardings={"w": NamedSharding(mesh, P())})
    with pytest.raises(StateError, match=r"init\(\) under jit"):
        jax.jit(lambda: init(lambda: jnp.ones(3)))()


def test_a_file_that_was_cut_off_since_it_was_opened_is_named(tmp_path, monkeypatch):
    safetensors.numpy.save_file({"w": np.ones(8, np.float32)}, tmp_path / "model.safetensors")
    monkeypatch.setattr(os, "preadv", lambda *args: 0)
    with refuses(CheckpointError, "model.safetensors", "'w'", "0 of 32 bytes"):
        init(lambda: {"w": jnp.ones(8)}, weights=tmp_path)


def test_a_module_of_forms_that_can_be_called_is_a_tree(tmp_path):
    @jax.tree_util.register_pytree_with_keys_class
    class Module:
        def __init__(self, w):
            self.w = w

        def tree_flatten_with_keys(self):
            return [(jax.tree_util.GetAttrKey("w"), self.w)], None

        tree_unflatten = classmethod(lambda cls, _, leaves: cls(*leaves))

        def __call__(self):
            raise AssertionError

    safetensors.numpy.save_file({"w": np.arange(6.0).reshape(2, 3)}, tmp_path / "model.safetensors")
    made = init(Module(jax.ShapeDtypeStruct((2, 3), jnp.float32)), weights=tmp_path)
    assert_holds({"w": made.w}, {"w": np.arange(6, dtype=np.float32).reshape(2, 3)})


def test_part_of_a_tree_that_is_cut_by_hand_lies_as_before():
    mesh = mesh_of(4)
    w = np.arange(32, dtype=np.float32).reshape(4, 8)
    made = init(lambda: jnp.arange(32, dtype=jnp.float32).reshape(4, 8), mesh=mesh, param_persistence_threshold=0)
    assert made.sharding == cut(w, mesh, 1).sharding
