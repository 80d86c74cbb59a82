"""Trees whose parameters are released and restored, and weights for an inference engine."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from frontends.jax import wrap
from frontends.jax.devices.context import LaterUpdate
from frontends.jax.devices.mesh.device import JaxMeshDevice
from frontends.jax.placement import placement
from frontends.jax.tree.wrapped_tree import Absent
from offload_core.errors import ConfigError, DeviceMemoryError, ParameterError, StateError
from offload_core.support.threads import Task
from tests.support.jax_models import assert_same_tree

SHAPES = {"a": (16, 8), "b": (10,), "c": (7, 3), "n": (5,)}


def tree_of(seed):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for name, shape in SHAPES.items()}


def grads_of(seed):
    return {**tree_of(seed), "n": None, "frozen": None}


PLACES = ["host", "device", "sharded", "mesh", "stage 3", "in host memory"]


@pytest.fixture(params=PLACES)
def make(request, monkeypatch):
    where = request.param
    monkeypatch.setattr(placement, "on_cpu", lambda array: where == "host")
    return lambda **fields: _wrap(where, **fields)


@pytest.fixture
def make_on_device(monkeypatch):
    monkeypatch.setattr(placement, "on_cpu", lambda array: False)
    return lambda **fields: _wrap("device", **fields)


def _wrap(where, **fields):
    params = {**tree_of(0), "frozen": jnp.arange(3.0)}
    if where == "sharded":
        mesh = jax.make_mesh((2, 2), ("d", "t"), axis_types=(AxisType.Auto,) * 2)
        cuts = {"a": PartitionSpec("d", "t")}
        places = {name: NamedSharding(mesh, cuts.get(name, PartitionSpec())) for name in params}
        params = {name: jax.device_put(array, places[name]) for name, array in params.items()}
    if where in ("mesh", "stage 3"):
        fields["mesh"] = jax.make_mesh((2,), ("dp",))
    if where == "stage 3":
        fields |= {"stage": 3, "param_persistence_threshold": 0}
    if where == "in host memory":
        fields["offload_param"] = "cpu"
    fields["trainable"] = {name: name != "frozen" for name in params}
    return wrap(params, lr=1e-2, reduce_bucket_size=32, **fields)


@pytest.mark.draws(2)
def test_what_comes_back_has_the_bits_of_before(make, tmp_path):
    offloaded, twin = make(), make()
    for i in range(2):
        assert_same_tree(offloaded.update(grads_of(i)), twin.update(grads_of(i)))
        with offloaded.released(donate=bool(i)):
            assert offloaded.is_released
            assert_same_tree(offloaded.to_pytree(), twin.to_pytree())
            assert_same_tree(dict(offloaded.named_weights()), twin.params)
            offloaded.save_checkpoint(tmp_path)
        assert_same_tree(offloaded.params, twin.params)
    assert_same_tree(offloaded.update(grads_of(3)), twin.update(grads_of(3)))
    assert_same_tree(offloaded.to_pytree(), twin.to_pytree())
    twin.load_checkpoint(tmp_path)
    offloaded.load_checkpoint(tmp_path)
    assert_same_tree(offloaded.params, twin.params)


def test_the_arrays_that_the_program_holds_stay_its_own(make_on_device):
    offloaded = make_on_device()
    held = offloaded.params
    offloaded.release()
    assert not held["a"].is_deleted()
    gone = id(held["a"])
    del held
    gc.collect()
    assert gone not in {id(array) for array in jax.live_arrays()}
    offloaded.restore()
    held = offloaded.params
    assert offloaded.release(donate=True) == 2 * sum(int(np.prod(shape)) for shape in SHAPES.values())
    assert [held[name].is_deleted() for name in (*SHAPES, "frozen")] == [True] * 4 + [False]
    assert offloaded.release() == 0  # already


@pytest.mark.draws(1)
def test_what_needs_the_parameters_is_refused_meanwhile(make, tmp_path):
    offloaded, twin = make(), make()
    grads, saved = grads_of(1), twin.to_pytree()
    offloaded.save_checkpoint(tmp_path)
    tx = offloaded.as_optax() if offloaded.config.offload_param is None else None
    offloaded.release()
    refused = [
        lambda: offloaded.params,
        lambda: offloaded.update(grads),
        offloaded.flush,
        lambda: offloaded.load_params(twin.params),
        lambda: offloaded.load_pytree(saved),
        lambda: offloaded.load_optax_state(twin.to_optax_state()),
        lambda: offloaded.load_checkpoint(tmp_path),
        *([lambda: tx.init(twin.params)] if tx else []),
    ]
    for attempt in refused:
        with pytest.raises(StateError, match=r"released.*expected offloaded\.restore\(\) before params"):
            attempt()
    assert_same_tree(offloaded.restore(), twin.params)
    assert_same_tree(offloaded.update(grads), twin.update(grads))


def test_a_release_with_gradients_that_wait_is_refused(make_on_device):
    offloaded = make_on_device(gradient_accumulation_steps=2)
    offloaded.update(grads_of(1))
    with pytest.raises(StateError, match=r"release\(\) while gradients wait for an update"):
        offloaded.release()
    assert not offloaded.is_released
    offloaded.update(grads_of(2))
    offloaded.release()


def test_parameters_that_have_no_room_stay_released(make_on_device, monkeypatch):
    offloaded, twin = make_on_device(), make_on_device()
    offloaded.release(donate=True)
    empty, given = Absent.empty, []

    def full(self):
        given.append(self)
        if len(given) == 3:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return empty(self)

    monkeypatch.setattr(Absent, "empty", full)
    with pytest.raises(DeviceMemoryError, match=r"restore\(\): .* of parameters have no room .*RESOURCE_EXHAUSTED"):
        offloaded.restore()
    assert offloaded.is_released
    assert_same_tree(offloaded.restore(), twin.params)


@pytest.mark.parametrize("where", ["device", "sharded"])
def test_a_restore_that_breaks_off_leaves_no_zeros_and_goes_on(where, monkeypatch):
    monkeypatch.setattr(placement, "on_cpu", lambda array: False)
    offloaded, twin = _wrap(where), _wrap(where)
    offloaded.release(donate=True)
    for of, name, at, error in [(Absent, "empty", 3, KeyboardInterrupt), (JaxMeshDevice, "_publish", 2, RuntimeError)]:
        act, calls = getattr(of, name), []

        def breaks_off(*given, act=act, calls=calls, at=at, error=error):
            calls.append(given)
            if len(calls) == at:
                raise error
            return act(*given)

        with monkeypatch.context() as patch:
            patch.setattr(of, name, breaks_off)
            with pytest.raises(error):
                offloaded.restore()
        assert offloaded.is_released == (error is KeyboardInterrupt)
        with pytest.raises(StateError, match=r"are released|restore\(\) broke off, and some parameters have no"):
            _ = offloaded.params
        if offloaded.is_released:
            assert_same_tree(offloaded.to_pytree(), twin.to_pytree())
            assert_same_tree(dict(offloaded.named_weights()), dict(twin.named_weights()))
    with pytest.raises(StateError, match=r"restore\(\) broke off, and some parameters have no"):
        offloaded.update(grads_of(1))
    assert_same_tree(offloaded.restore(), twin.params)
    assert_same_tree(offloaded.update(grads_of(1)), twin.update(grads_of(1)))


def test_a_delay_ends_with_a_release(make_on_device):
    fields = {"schedule": "delayed", "delay_warmup_steps": 0}
    offloaded, twin = make_on_device(**fields), make_on_device(**fields)
    for i in range(2):
        offloaded.update(grads_of(i))
        twin.update(grads_of(i))
    offloaded.release()
    assert_same_tree(offloaded.restore(), twin.flush())


# --- weights for an inference engine ----------------------------------------------------------------------------


@pytest.mark.draws(1)
def test_weights_are_the_masters_in_the_type_that_is_asked_for(make):
    offloaded = make()
    offloaded.update(grads_of(1))
    masters = offloaded.to_pytree()["master"]
    weights = dict(offloaded.named_weights(dtype="float32"))
    assert_same_tree({**masters, "frozen": offloaded.params["frozen"]}, weights)
    into = {name: np.empty(array.shape, np.float32) for name, array in weights.items()}
    assert offloaded.named_weights(dtype=jnp.float32, into=into) == len(into)
    assert_same_tree(into, weights)
    taken = {}
    assert offloaded.named_weights(into=taken.__setitem__) == len(into)
    assert torch.from_dlpack(taken["a"]).dtype == torch.bfloat16
    assert_same_tree(taken, offloaded.params)


def test_one_weight_is_in_memory_at_a_time(make_on_device):
    offloaded = make_on_device()
    alive = []
    gc.collect()  # errors of other tests hold arrays
    for _, array in offloaded.named_weights(dtype="float32"):
        alive.append(sum(other.is_deleted() is False and other is array for other in jax.live_arrays()))
        before = len(jax.live_arrays())
        del array
        gc.collect()
        assert len(jax.live_arrays()) == before - 1
    assert alive == [1] * 5


def test_no_weight_is_read_while_a_thread_updates(make_on_device, monkeypatch):
    offloaded = make_on_device()
    weights = offloaded.named_weights(dtype="float32")
    next(weights)
    # Its thread has not begun it yet.
    monkeypatch.setattr(LaterUpdate, "ask", lambda self, act: setattr(self, "_task", Task(act)))
    offloaded.update(grads_of(1), wait=False)
    with pytest.raises(StateError, match=r"named_weights\(\): the parameters have changed since it began"):
        next(weights)


def test_weights_since_a_report_are_those_that_changed(make_on_device):
    offloaded, other = make_on_device(), make_on_device()
    offloaded.update(grads_of(1))
    report = offloaded.report
    assert dict(offloaded.named_weights(since=report)) == {}
    offloaded.update({**grads_of(2), "b": None})
    assert list(dict(offloaded.named_weights(since=report))) == ["a", "c"]
    params = offloaded.params
    offloaded.load_params({**params, "frozen": params["frozen"] + 1})
    assert "frozen" in dict(offloaded.named_weights(since=report))
    other.update(grads_of(1))
    with pytest.raises(ConfigError, match="since: got the report of another tree"):
        offloaded.named_weights(since=other.report)
    with pytest.raises(ConfigError, match="since: got an int, expected offloaded.report"):
        offloaded.named_weights(since=3)


def test_wrong_receivers_get_one_error_and_nothing_is_written(make_on_device):
    offloaded = make_on_device()
    into = {name: np.zeros(array.shape, np.float32) for name, array in offloaded.params.items()}
    wrong = {**into, "a": np.zeros((8, 16), np.float32), "x": np.zeros(1)}
    del wrong["b"]
    with pytest.raises(
        ParameterError, match=r"1 missing: 'b'; 1 unknown: 'x'; 'a' is float32\[8, 16\], expected a writable"
    ):
        offloaded.named_weights(into=wrong)
    assert not any(array.any() for array in wrong.values())
    with pytest.raises(ConfigError, match="into: got an int, expected a function"):
        offloaded.named_weights(into=3)
    with pytest.raises(ConfigError, match="dtype"):
        offloaded.named_weights(dtype="int8")


def test_an_update_before_all_weights_were_taken_ends_them(make_on_device):
    offloaded = make_on_device()
    weights = iter(offloaded.named_weights())
    next(weights)
    offloaded.update(grads_of(1))
    with pytest.raises(StateError, match="have changed since it began"):
        next(weights)
