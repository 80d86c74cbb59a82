"""Updates that nobody waits for, and gradients that are given away."""

import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from frontends.jax import wrap
from frontends.jax.devices.context import LaterUpdate
from frontends.jax.devices.device import JaxDevice
from frontends.jax.devices.mesh.device import JaxMeshDevice
from frontends.jax.placement import placement
from frontends.jax.tree import memory_kinds
from offload_core.errors import GradientError
from offload_core.step.pipeline import Pipeline

SHAPES = {"w": (40, 30), "v": (30, 7), "b": (7,)}


@pytest.fixture(params=["host", "memory of its own"])
def make(request, monkeypatch):
    """Wraps a tree whose device's memory is the host's, or is taken for another."""
    if request.param != "host":
        monkeypatch.setattr(placement, "on_cpu", lambda array: False)
    return lambda tree, **fields: wrap(tree, **{"lr": 1e-2, "reduce_bucket_size": 200, **fields})


def tree_of(seed):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in SHAPES.items()}


def assert_same(got, expected):
    for name, value in expected.items():
        assert np.asarray(got[name]).tobytes() == np.asarray(value).tobytes(), name


@pytest.fixture
def arrived(monkeypatch):
    """Gradients can be read when it is set: a device that is late."""
    event = threading.Event()
    event.set()
    for device, method in ((JaxDevice, JaxDevice.host_array), (JaxMeshDevice, JaxMeshDevice._receive)):
        monkeypatch.setattr(device, method.__name__, lambda *args, of=method: event.wait() and of(*args))
    return event


@pytest.mark.draws(1)
def test_update_returns_before_there_are_gradients(make, arrived):
    offloaded, twin = make(tree_of(0)), make(tree_of(0))
    for step in range(4):
        arrived.clear()
        assert offloaded.update(tree_of(step + 1), wait=False) is None
        assert not offloaded._later._task.done()
        arrived.set()
        expected = twin.update(tree_of(step + 1))
        assert_same(offloaded.params, expected)
        assert (offloaded.count, offloaded.report) == (twin.count, twin.report)


@pytest.mark.draws(6)
@pytest.mark.parametrize(
    "use",
    [
        lambda offloaded, tmp_path: offloaded.params,
        lambda offloaded, tmp_path: offloaded.count,
        lambda offloaded, tmp_path: offloaded.report.step,
        lambda offloaded, tmp_path: offloaded.flush(),
        lambda offloaded, tmp_path: offloaded.to_pytree(),
        lambda offloaded, tmp_path: offloaded.to_optax_state(),
        lambda offloaded, tmp_path: offloaded.load_params(tree_of(3)),
        lambda offloaded, tmp_path: offloaded.memory_report(),
        lambda offloaded, tmp_path: offloaded.discard_gradients(),
        lambda offloaded, tmp_path: offloaded.save_checkpoint(tmp_path),
        lambda offloaded, tmp_path: offloaded.export_safetensors(tmp_path),
        lambda offloaded, tmp_path: offloaded.update(tree_of(2)),
        lambda offloaded, tmp_path: offloaded.update(tree_of(2), wait=False),
    ],
)
def test_whatever_follows_sees_the_update_made(use, make, arrived, tmp_path, monkeypatch):
    offloaded, twin = make(tree_of(0)), make(tree_of(0))
    arrived.clear()
    offloaded.update(tree_of(1), wait=False)
    wait = LaterUpdate.wait
    monkeypatch.setattr(LaterUpdate, "wait", lambda self: arrived.set() or wait(self))  # not before
    got = use(offloaded, tmp_path / "first")
    twin.update(tree_of(1))
    assert not isinstance(got, int) or got == 1
    use(twin, tmp_path / "second")
    assert_same(offloaded.params, twin.params)


def test_an_interrupt_before_the_thread_is_asked_loses_no_update(make, monkeypatch):
    offloaded, twin = make(tree_of(0)), make(tree_of(0))

    def interrupted(thread, act):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("frontends.jax.devices.context.TaskThread.submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            offloaded.update(tree_of(1), wait=False)
    assert_same(offloaded.params, twin.update(tree_of(1)))
    assert offloaded.count == 1


def test_errors_of_the_gradients_are_raised_at_once(make):
    offloaded = make(tree_of(0))
    with pytest.raises(GradientError, match=r"\['b'\]"):
        offloaded.update({**tree_of(1), "b": jnp.ones(3)}, wait=False)
    assert offloaded.count == 0
    assert_same(offloaded.params, tree_of(0))


def test_what_goes_wrong_later_is_raised_by_the_next_use_and_once(make, monkeypatch):
    offloaded, twin = make(tree_of(0)), make(tree_of(0))
    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "step", lambda *args, **kwargs: 1 / 0)
        offloaded.update(tree_of(1), wait=False)
        with pytest.raises(ZeroDivisionError):
            _ = offloaded.params
    assert offloaded.count == 0
    assert_same(offloaded.params, tree_of(0))
    assert_same(offloaded.update(tree_of(2)), twin.update(tree_of(2)))


@pytest.mark.draws(1)
def test_updates_of_two_threads_come_one_after_the_other(make):
    offloaded, twin = make(tree_of(0)), make(tree_of(0))

    def bucket():
        for _ in range(10):
            offloaded.update(tree_of(1), wait=False)

    threads = [threading.Thread(target=bucket) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(20):
        twin.update(tree_of(1))
    assert offloaded.count == 20
    assert_same(offloaded.params, twin.params)


def test_one_that_is_dropped_in_the_middle_ends_its_update(make, arrived):
    offloaded = make(tree_of(0))
    arrived.clear()
    offloaded.update(tree_of(1), wait=False)
    gone, thread = weakref.ref(offloaded), offloaded._later._thread._thread
    del offloaded
    arrived.set()
    thread.join(60)
    assert not thread.is_alive()
    gc.collect()
    assert gone() is None


@pytest.mark.draws(1)
@pytest.mark.parametrize("wait", [True, False])
def test_gradients_that_are_given_away_are_gone_and_the_bits_stay(wait, make):
    offloaded, twin = make(tree_of(0)), make(tree_of(0))
    for step in range(3):
        gradients = tree_of(step + 1)
        offloaded.update({**gradients, "b": np.asarray(gradients["b"])}, donate=True, wait=wait)
        expected = twin.update(tree_of(step + 1))
        assert_same(offloaded.params, expected)
        assert [gradients[name].is_deleted() for name in ("w", "v")] == [True, True]
    with pytest.raises(GradientError, match="donated or deleted"):
        offloaded.update(gradients)


@pytest.mark.long("XLA compiles for a hundred buckets")
def test_device_memory_is_parameters_and_gradients_and_then_parameters_and_two_buckets(monkeypatch):
    """On a device with memory of its own, where gradients lie until the update copies them."""
    monkeypatch.setattr(placement, "on_cpu", lambda array: False)
    monkeypatch.setattr(memory_kinds, "on_cpu", lambda array: False)
    params = {str(i): jnp.ones(50_000, jnp.bfloat16) for i in range(10)}
    numel, before = 10 * 50_000, _live_bytes()
    offloaded = wrap(params, lr=1e-2, reduce_bucket_size=12_500)
    before -= 2 * numel
    del params
    seen, publish = [], JaxMeshDevice._publish
    monkeypatch.setattr(
        JaxMeshDevice, "_publish", lambda *args: [seen.append(_live_bytes() - before), publish(*args)][1]
    )
    for _ in range(2):
        gradients = jax.tree.map(lambda leaf: leaf * 2, offloaded.params)
        offloaded.update(gradients, donate=True, donate_params=True)
        del gradients
    assert len(seen) == 2 * numel // 12_500
    assert max(seen) <= 2.2 * numel


def test_buckets_of_a_large_array_share_their_programs(monkeypatch):
    monkeypatch.setattr(placement, "on_cpu", lambda array: False)
    params = {"stacked": np.ones((256, 320), np.float32)}
    offloaded, compiled = wrap(params, lr=1e-2, reduce_bucket_size=320), []
    assert len(offloaded._core._pipeline.buckets.all) == 256
    gradients = {"stacked": jnp.full((256, 320), 0.5)}
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name))
    try:
        offloaded.update(gradients)
    finally:
        jax.monitoring.clear_event_listeners()
    assert 0 < sum("backend_compile" in name for name in compiled) <= 4


def _live_bytes():
    """Of all arrays of JAX on devices, memory that several share counted once."""
    arrays = [array for array in jax.live_arrays() if not array.is_deleted() and array.sharding.memory_kind == "device"]
    return sum({array.unsafe_buffer_pointer(): array.nbytes for array in arrays}.values())


@pytest.mark.parametrize(
    "fields",
    [{"gradient_accumulation_steps": 3}, {"schedule": "delayed", "delay_warmup_steps": 0}],
    ids=["sums", "one step late"],
)
def test_gradients_that_are_read_later_are_deleted_later(fields, make):
    offloaded, twin = make(tree_of(0), **fields), make(tree_of(0), **fields)
    given = []
    for step in range(6):
        gradients = tree_of(step + 1)
        given.append(gradients)
        if step == 4:
            gradients = {**gradients, "v": None}  # the one before may not have been read
        offloaded.update(gradients, donate=True)
        expected = twin.update(_copy(step, gradients))
        assert_same(offloaded.params, expected)
    offloaded.flush()
    assert all(array.is_deleted() for gradients in given for array in gradients.values() if array is not given[4]["v"])
    assert_same(offloaded.params, twin.flush())


def _copy(step, gradients):
    return {name: None if gradients[name] is None else array for name, array in tree_of(step + 1).items()}
