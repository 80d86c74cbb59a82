"""Input that the JAX front end refuses. The error says what is wrong and where, and nothing has changed."""

import gc
import re
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from frontends.jax import ScaledGradients, wrap
from frontends.jax.files.checkpoint import TreeCheckpoints
from offload_core.errors import (
    ConfigError,
    ConfigWarning,
    DiskSpaceError,
    GradientError,
    HostMemoryError,
    ParameterError,
    StateError,
)
from offload_core.memory.host_memory import HostMemory
from offload_core.testing.late_store import LateStore
from tests.support import late_stores
from tests.support.oracles import assert_same_bits


@pytest.fixture(autouse=True)
def on_the_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def make_params(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return {"w": jnp.asarray(rng.standard_normal((3, 4)), dtype), "layers": [{"b": jnp.ones(5, dtype), "n": 3}]}


def make_grads(dtype=jnp.float32, seed=1):
    rng = np.random.default_rng(seed)
    w, b = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((3, 4), (5,)))
    return {"w": w, "layers": [{"b": b, "n": None}]}


def trained(dtype=jnp.float32, **fields):
    """Wrapped parameters after one update, so that no state is zero."""
    offloaded = wrap(make_params(dtype), lr=1e-2, **fields)
    offloaded.update(scaled(offloaded, make_grads(dtype)))
    assert offloaded.count == 1
    return offloaded


def scaled(offloaded, grads):
    scale = offloaded.report.loss_scale if offloaded.report else offloaded.config.initial_loss_scale
    return ScaledGradients(grads, scale) if offloaded.params["w"].dtype == jnp.float16 else grads


def assert_same_states(offloaded, expected):
    states = offloaded.to_pytree()
    assert jax.tree.structure(states) == jax.tree.structure(expected)
    for (path, got), wanted in zip(jax.tree_util.tree_leaves_with_path(states), jax.tree.leaves(expected), strict=True):
        assert_same_bits(jax.tree_util.keystr(path), np.atleast_1d(got), np.atleast_1d(wanted))


@contextmanager
def refused(offloaded, error, *words):
    """The block raises ``error`` with all ``words``, changes nothing, and does not spoil the next update."""
    before, params = offloaded.to_pytree(), offloaded.params
    with pytest.raises(error) as raised:
        yield
    for word in words:
        assert word in str(raised.value), raised.value
    assert_same_states(offloaded, before)
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (params, offloaded.params)), strict=True))
    dtype = offloaded.params["w"].dtype
    twin = wrap(make_params(dtype), offloaded.config)
    twin.load_pytree(before)
    for one in (offloaded, twin):
        one.update(scaled(offloaded, make_grads(dtype, seed=2)))
        assert one.report.updated
    assert_same_states(offloaded, twin.to_pytree())


# --- wrap --------------------------------------------------------------------------------------------


def test_a_store_of_states_is_closed_when_its_parameters_are_gone_or_wrap_has_failed(monkeypatch):
    def fail(*args):
        raise MemoryError("as asked")

    closed, close = [], LateStore.close
    monkeypatch.setattr(LateStore, "close", lambda store: (closed.append(store.place), close(store)))
    with late_stores.late():
        offloaded = trained()
        gc.collect()
        assert not closed
        del offloaded
        gc.collect()
        assert len(closed) == 1
        monkeypatch.setattr(TreeCheckpoints, "__init__", fail)
        with pytest.raises(MemoryError, match="as asked"):
            wrap(make_params())
        gc.collect()
        assert len(closed) == 2


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"a": [jnp.ones(2, jnp.complex64)]}, ["['a'][0]", "complex64", "expected float32, bfloat16 or float16"]),
        ({"a": np.ones(2)}, ["['a']", "float64"]),
        ({"a": jnp.ones(2, jnp.float8_e4m3fn)}, ["['a']", "float8_e4m3fn"]),
        ({"a": jnp.arange(3)}, ["no leaf is a trainable floating-point array", "got ['a']: int32[3]"]),
        ({"a": None, "b": "relu", "c": 0.5, "d": 1}, ["no leaf", "['b']: a str, ['c']: a float, …"]),
        ({}, ["no leaf", "got an empty tree"]),
        (None, ["no leaf", "got the whole tree: None"]),
    ],
    ids=["complex", "float64", "float8", "integers", "no arrays", "empty", "None"],
)
def test_a_tree_that_cannot_be_trained_is_refused(tree, words):
    with pytest.raises(ParameterError) as raised:
        wrap(tree)
    assert all(word in str(raised.value) for word in words), raised.value


def test_float64_arrays_are_refused():
    with jax.enable_x64(True):
        with pytest.raises(ParameterError, match=re.escape("['a'] has dtype float64")):
            wrap({"a": jnp.ones(2, jnp.float64)})
        offloaded = trained()
        with refused(offloaded, GradientError, "['w']", "float64[3, 4]", "expected float32[3, 4]"):
            offloaded.update({**make_grads(), "w": jnp.ones((3, 4), jnp.float64)})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lr": -1e-3}, "lr: got -0.001, expected a finite number >= 0"),
        ({"lr": float("nan")}, "lr: got nan"),
        ({"lr": "fast"}, "lr: got 'fast', expected a number"),
        ({"betas": (0.9, 1.0)}, "betas[1]: got 1.0"),
        ({"weight_decy": 0.1}, "unknown configuration field 'weight_decy'; did you mean 'weight_decay'?"),
        ({"param_dtype": "float64"}, "param_dtype: got 'float64'"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps: got 0"),
        (
            {"stage": 3, "offload_optimizer": "nvme", "nvme_path": "/a", "offload_param": "nvme"},
            "offload_param='nvme' in JAX, whose arrays lie in memory; expected offload_param='cpu' or None",
        ),
        ({"config": "ds_config.json"}, "config: 'ds_config.json' cannot be read"),
        ({"config": {"learning_rates": 1}}, "unknown configuration field 'learning_rates'"),
    ],
    ids=str,
)
def test_a_wrong_field_is_refused(fields, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        wrap(make_params(), **fields)


def test_a_launched_process_that_has_not_joined_the_others_is_warned(monkeypatch):
    mesh = jax.make_mesh((1,), ("dp",))
    wrap(make_params(), mesh=mesh)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for fields in ({}, {"mesh": mesh}):
        with pytest.warns(ConfigWarning, match=re.escape("started 2 processes, and each trains alone")):
            wrap(make_params(), **fields)


@pytest.mark.parametrize("name", ["mask", "trainable"])
def test_a_mask_of_another_structure_is_refused(name):
    for mask in ({"w": True}, {"w": True, "layers": [True, True]}, lambda params: [True]):
        with pytest.raises(ParameterError, match=f"{name}: its structure differs from the parameters'"):
            wrap(make_params(), **{name: mask})
    with pytest.raises(ParameterError, match="no leaf is a trainable.*trainable= excludes all"):
        wrap(make_params(), trainable=False)


@pytest.mark.parametrize("name", ["mask", "trainable"])
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"w": "decay", "layers": True}, "params['w'] has 'decay', expected True or False; compare labels first"),
        ("decay", "params['layers'][0]['b'] has 'decay'"),
        (lambda params: jax.tree.map(lambda leaf: 1, params), "has 1, expected True or False"),
        ({"w": True, "layers": None}, "params['layers'][0]['b'] has None"),
        ({"w": np.ones(2, bool), "layers": True}, "params['w'] has array([ True,  True])"),
    ],
    ids=["labels", "a label", "integers", "None", "several"],
)
def test_a_mask_of_something_else_than_booleans_is_refused(name, flags, words):
    with pytest.raises(ParameterError, match=re.escape(words)) as raised:
        wrap(make_params(), **{name: flags})
    assert str(raised.value).startswith(f"{name}: params")


def test_any_boolean_is_one_of_a_mask():
    for true in (True, np.True_, jnp.array(True)):
        flags = {"w": true, "layers": [{"b": not true, "n": True}]}
        assert wrap(make_params(), trainable=flags, mask=flags).memory_report()


def test_a_plan_that_does_not_fit_is_refused_before_anything_is_allocated(monkeypatch):
    allocated = []
    allocate = HostMemory.allocate
    monkeypatch.setattr(HostMemory, "allocate", lambda *args, **kw: allocated.append(args) or allocate(*args, **kw))
    monkeypatch.setattr("offload_core.engine.available_bytes", lambda: 12 * 10**6)
    with pytest.raises(HostMemoryError) as raised:
        wrap({"w": jnp.ones(10**6, jnp.bfloat16)})
    assert not allocated
    for words in ("17.2 MiB of host memory for 1,000,000 parameters", "11.4 MiB is available", "nothing was allocated"):
        assert words in str(raised.value), raised.value
    for row in ("host +master", "host +exp_avg ", "host +exp_avg_sq", "device +next parameters", "device +gradients"):
        assert re.search(rf"{row}.* MiB", str(raised.value)), raised.value
    wrap({"w": jnp.ones(10**5, jnp.bfloat16)})
    assert allocated
    monkeypatch.setattr(LateStore, "free", 10**6)
    with late_stores.late(), pytest.raises(DiskSpaceError, match=r"needs 1.1 MiB of late store space"):
        wrap({"w": jnp.ones(10**5, jnp.bfloat16)})


# --- update ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.jacrev], ids=lambda f: f.__name__)
def test_update_inside_a_transformation_is_refused(transform):
    offloaded, grads = trained(), make_grads()
    grads_or_batch = jax.tree.map(lambda g: g[None], grads) if transform is jax.vmap else grads
    with refused(offloaded, (StateError, GradientError), "update()", "expected", "outside"):
        transform(offloaded.update)(grads_or_batch)


def test_a_read_of_the_parameters_under_jit_is_refused():
    """The program would keep their values. Outside jit, also while others are differentiated, it is a plain read."""
    offloaded = wrap({"w": jnp.ones(3)})
    for traced in (
        lambda: jax.jit(lambda x: offloaded.params["w"] * x)(2.0),
        lambda: jax.lax.map(lambda x: offloaded.params["w"] * x, jnp.ones(2)),
        lambda: offloaded.value_and_grad(lambda p: (p["w"] * offloaded.params["w"]).sum())(offloaded.params),
        lambda: jax.jit(lambda x: offloaded.flush()["w"] * x)(2.0),
    ):
        with pytest.raises(StateError, match="under jit.*expected"):
            traced()
    with pytest.raises(StateError, match=re.escape("parameters as an argument: jax.jit(lambda params, x: ...)")):
        jax.jit(lambda: offloaded.params)()
    assert jax.jit(lambda params, x: params["w"] * x)(offloaded.params, 2.0).tolist() == [2, 2, 2]
    assert jax.grad(lambda x: (offloaded.params["w"] * x).sum())(1.0) == 3
    assert jax.vmap(lambda x: offloaded.params["w"] * x)(jnp.ones(2)).shape == (2, 3)
    tree = offloaded.to_pytree()
    with pytest.raises(StateError, match=re.escape("load_pytree() under jit")):
        jax.jit(lambda x: offloaded.load_pytree(tree)["w"] * x)(2.0)


@pytest.mark.parametrize("transform", [jax.jit, jax.grad], ids=lambda f: f.__name__)
def test_wrap_inside_a_transformation_is_refused(transform):
    with pytest.raises((StateError, ParameterError), match=r"wrap\(\) .*expected .*outside"):
        transform(lambda w: wrap({"w": w}).params["w"].sum())(jnp.ones(3))


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (-1e-3, ConfigError, ["lr: got -0.001"]),
        (jnp.nan, ConfigError, ["lr: got nan"]),
        (ZeroDivisionError("of the schedule"), ZeroDivisionError, ["of the schedule"]),
    ],
    ids=["negative", "NaN", "raises"],
)
def test_a_schedule_that_fails_is_refused(value, error, words):
    failing = [False]

    def schedule(count):
        if failing[0]:
            if isinstance(value, Exception):
                raise value
            return value
        return 1e-2

    offloaded = wrap(make_params(), lr=schedule)
    offloaded.update(make_grads())
    before = offloaded.to_pytree()
    failing[0] = True
    with pytest.raises(error) as raised:
        offloaded.update(make_grads(seed=3))
    assert all(word in str(raised.value) for word in words), raised.value
    assert_same_states(offloaded, before)
    failing[0] = False
    twin = trained()
    for one in (offloaded, twin):
        one.update(make_grads(seed=2))
    assert_same_states(offloaded, twin.to_pytree())


def test_an_update_without_memory_for_it_is_refused(monkeypatch):
    """The user keeps all old parameters, so that there is no buffer for new ones."""
    offloaded = trained()
    kept = [offloaded.update(make_grads()) for _ in range(2)]

    def allocate(*_, **__):
        raise HostMemoryError("parameter buffers: the system refused")

    with monkeypatch.context() as patch:
        patch.setattr(offloaded._placement.buffer_memory, "allocate", allocate)
        before = offloaded.to_pytree()
        with pytest.raises(HostMemoryError, match="parameter buffers"):
            offloaded.update(make_grads(seed=3))
    assert_same_states(offloaded, before)
    del kept
    with refused(offloaded, GradientError):
        offloaded.update(None)


@pytest.mark.parametrize("spec", [PartitionSpec("dp"), PartitionSpec()])
def test_arrays_on_several_devices_are_refused(spec):
    mesh = jax.make_mesh((2,), ("dp",), devices=jax.devices("cpu")[:2])
    spread = jax.device_put(jnp.ones(4), NamedSharding(mesh, spec))
    with pytest.raises(ParameterError, match=re.escape("['one'] lies on cpu:0, and other parameters on cpu:0, cpu:1")):
        wrap({"one": jnp.ones(3), "w": spread})
    offloaded, twin = (wrap({"one": jnp.ones(3), "w": jnp.ones(4)}) for _ in range(2))
    with pytest.raises(
        GradientError, match=re.escape("['w']: gradient lies on cpu:0, cpu:1 and its parameter on cpu:0;")
    ):
        offloaded.update({"one": jnp.ones(3), "w": spread})
    assert offloaded.count == 0
    for one in (offloaded, twin):
        one.update({"one": jnp.full(3, 2.0), "w": jnp.full(4, -3.0)})
    assert_same_states(offloaded, twin.to_pytree())


# --- value_and_grad, states, optax ---------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2])
def test_an_update_in_optax_form_names_the_adapter(n):
    offloaded = trained()
    with refused(offloaded, GradientError, f"got {n} arguments after the gradients", "offloaded.as_optax().update"):
        offloaded.update(make_grads(), *[None, offloaded.params][:n])


def test_the_optax_adapter_refuses_jit_and_other_parameters():
    offloaded = trained()
    tx, params, grads = offloaded.as_optax(), offloaded.params, make_grads()
    params["layers"][0]["n"] = grads["layers"][0]["n"] = None  # jit takes no other leaves
    state = tx.init(params)
    for under_jit in (
        lambda: jax.jit(tx.update)(grads, state, params),
        lambda: jax.jit(lambda g: tx.update(g, state, params))(grads),
        lambda: jax.jit(lambda s: tx.update(grads, s, params))(state),
        lambda: jax.jit(lambda x: tx.update(grads, state, params)[1].step + x)(1),
        lambda: optax.MultiSteps(tx, 2).update(grads, optax.MultiSteps(tx, 2).init(params), params),
    ):
        with pytest.raises(StateError, match="as_optax.*update under jit; expected a call outside"):
            under_jit()
        assert offloaded.count == 1
    with refused(offloaded, ParameterError, "as_optax(): params", "has nothing where ['w'] was expected"):
        tx.init({"layers": params["layers"]})
    state = tx.init(params)
    with refused(offloaded, ParameterError, "as_optax(): params"):
        tx.update(grads, state, {"w": params["w"]})


@pytest.mark.draws(1)
@pytest.mark.parametrize("where", ["alone", "mesh", "stage 3"])
def test_gradients_that_jax_has_not_summed_yet_are_summed(where):
    mesh = jax.make_mesh((2,), ("dp",), devices=jax.devices()[:2])
    whole, rows = NamedSharding(mesh, PartitionSpec(None, None)), NamedSharding(mesh, PartitionSpec("dp", None))
    to_come = NamedSharding(mesh, PartitionSpec(None, None, unreduced={"dp"}))
    x, w = jax.device_put(jnp.arange(32.0).reshape(8, 4), rows), jax.device_put(jnp.ones((4, 4)), whole)
    gradient = jax.jit(lambda x: jax.lax.dot_general(x, x, (((0,), (0,)), ((), ())), out_sharding=to_come))(x)
    assert gradient.sharding.spec.unreduced
    fields = {"alone": {}, "mesh": {"mesh": mesh}, "stage 3": {"mesh": mesh, "stage": 3}}[where]
    found = wrap({"w": w}, optimizer="sgd", lr=0.5, **fields).update({"w": gradient})
    rows_of = np.arange(32, dtype=np.float32).reshape(8, 4)
    np.testing.assert_array_equal(np.asarray(found["w"]), 1 - 0.5 * (rows_of.T @ rows_of))
    with pytest.raises(ParameterError, match=r"params\['w'\] is .* unreduced; expected its sum: jax.sharding.reshard"):
        wrap({"w": gradient})
    with pytest.raises(ParameterError, match=r"params\['w'\] is .* unreduced, expected float32\[4, 4\]"):
        wrap({"w": w}).load_params({"w": gradient})


NOTHING = {
    "multi_transform": lambda adam: optax.multi_transform({"a": adam, "z": optax.sgd(1.0)}, {"w": "z", "b": "z"}),
    "partition": lambda adam: optax.partition(
        {"a": adam, "z": optax.sgd(1.0)}, lambda p: jax.tree.map(lambda _: "z", p)
    ),
    "masked": lambda adam: optax.masked(adam, {"w": False, "b": False}),
    "selective": lambda adam: optax.selective_transform(adam, freeze_mask={"w": True, "b": True}),
}


@pytest.mark.parametrize("around", NOTHING.values(), ids=NOTHING)
def test_a_label_of_no_parameter_is_an_error_that_says_so(around):
    params = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}
    with pytest.raises(ParameterError, match=r"in place of every parameter: the label .* expected at least one, or"):
        around(wrap(params).as_optax()).init(params)


AROUND = {
    "schedule_free": (lambda adam: optax.contrib.schedule_free(adam, 1e-2, b1=0.9), "schedule_free"),
    "lookahead": (lambda adam: optax.lookahead(adam, 2, 0.5), "optax.lookahead"),
    "mechanize": (optax.contrib.mechanize, "mechanize"),
    "sam": (lambda adam: optax.contrib.sam(adam, optax.sgd(0.1)), "sam goes back to the first state"),
    "conditionally_transform": (
        lambda adam: optax.conditionally_transform(adam, lambda step, **_: step % 2 == 0),
        "conditionally_transform trace",
    ),
}


@pytest.mark.draws(1)
@pytest.mark.parametrize("name", AROUND)
def test_what_moves_parameters_around_an_exact_update_is_refused_by_name(name):
    around, said = AROUND[name]
    params = {"w": jnp.ones((2, 2))}
    tx = around(wrap(params).as_optax())
    given = optax.LookaheadParams.init_synced(params) if name == "lookahead" else params

    def train(given):
        state = tx.init(given)
        for _ in range(3):
            updates, state = tx.update({"w": jnp.ones((2, 2))}, state, given)
            given = optax.apply_updates(given, updates)

    with pytest.raises(StateError, match=re.escape(said)):
        train(given)


def test_a_tree_that_is_one_array_is_called_params():
    offloaded = wrap(jnp.ones((2, 2)))
    wrong = jnp.ones((3, 2))
    calls = {
        "load_params: params is float32": lambda: offloaded.load_params(wrong),
        "as_optax(): params is float32": lambda: offloaded.as_optax().init(wrong),
        "mask: params has 'x', expected": lambda: wrap(wrong, mask="x"),
        "load_pytree: params is [3], expected": lambda: offloaded.load_pytree(
            {**offloaded.to_pytree(), "params": jnp.ones(3)}
        ),
    }
    for said, call in calls.items():
        with pytest.raises((ParameterError, StateError), match=re.escape(said)):
            call()


@pytest.mark.parametrize(
    "given", [optax.adamw(0.1), optax.adamw, optax.chain(optax.sgd(0.1))], ids=["made", "fn", "chain"]
)
def test_an_optimizer_of_optax_is_told_that_wrap_makes_its_own(given):
    with pytest.raises(
        ConfigError, match=r"optimizer: got .*expected a word; wrap\(\) makes the optimizer.*lr=1e-3"
    ) as error:
        wrap({"w": jnp.ones(2)}, optimizer=given)
    assert " at 0x" not in str(error.value)
