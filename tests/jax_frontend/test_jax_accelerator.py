"""One device with memory of its own: the bits of the direct way, the user's placement, and what overlaps.

CPU devices stand for it: they are taken for devices that are not host memory. Where there is a GPU it runs the same.
"""

import copy
import functools
import gc
import itertools
import pickle
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from frontends.jax import RankGradients, ScaledGradients, wrap
from frontends.jax.devices.mesh.axis import LoneDevice
from frontends.jax.devices.mesh.places import Places
from frontends.jax.placement import as_placed, placement
from frontends.jax.tree import memory_kinds
from offload_core.device.events import Waiting
from offload_core.errors import GradientError, StateError
from tests.support import jax_models
from tests.support.jax_models import HYPER, assert_same_tree, loss_fn
from tests.support.strategies import law

SHAPES = {"embed": (33, 17), "layers": [{"w": (17, 3), "b": (3,)}, {"w": (3, 1), "b": ()}], "empty": (0, 3)}
random_tree = functools.partial(jax_models.random_tree, shapes=SHAPES)
PLATFORMS = ["cpu", *(pytest.param("gpu", marks=pytest.mark.gpu) for _ in range(jax.default_backend() == "gpu"))]


@pytest.fixture(params=PLATFORMS)
def device(request):
    """Stands for an accelerator, or is one."""
    device = jax.devices(request.param)[0]
    with jax.default_device(device):
        yield device


def on_accelerator(tree, **fields):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "on_cpu", lambda array: False)
        offloaded = wrap(tree, **{**HYPER, **fields})
    assert isinstance(offloaded._core.device, Places)
    return offloaded


def direct(tree, **fields):
    with jax.default_device(jax.devices("cpu")[0]):
        offloaded = wrap(jax.tree.map(np.asarray, tree), **{**HYPER, **fields})
    assert offloaded._core.device.addressable
    return offloaded


# --- the same bits -------------------------------------------------------------------------------------

CASES = {
    "plain": {},
    "serial": {"schedule": "serial"},
    "small buckets": {"reduce_bucket_size": 100},
    "clipping": {"gradient_clipping": 0.5, "reduce_bucket_size": 200},
    "accumulation": {"gradient_accumulation_steps": 3, "reduce_bucket_size": 200},
    "both": {"gradient_accumulation_steps": 2, "gradient_clipping": 1.0},
    "adam": {"adam_mode": "adam"},
    "schedule": {"lr": optax.warmup_cosine_decay_schedule(1e-4, 1e-2, 2, 10)},
    "update_in_backward": {"update_in_backward": True, "reduce_bucket_size": 100},
}


@pytest.mark.draws(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fields", CASES.values(), ids=CASES.keys())
def test_the_bits_are_those_of_the_direct_way(fields, dtype, device):
    params = random_tree(0)
    there, here = on_accelerator(params, param_dtype=dtype, **fields), direct(params, param_dtype=dtype, **fields)
    for i in range(4):
        grads = random_tree(10 + i, dtype)
        assert_same_tree(there.update(grads), here.update(jax.tree.map(np.asarray, grads)))
        assert repr(there.report) == repr(here.report)
    assert_same_tree(there.to_pytree(), here.to_pytree())


@pytest.mark.long("XLA compiles; the first of its file imports and starts JAX")
@law(5, least=2)
@given(
    st.sampled_from([64, 300, 1 << 20]),
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.lists(st.tuples(st.integers(0, 63), st.booleans()), min_size=2, max_size=5),
    st.sampled_from([1, 2]),
    st.sampled_from([None, 0.1]),
)
def test_gradients_may_be_missing_or_unrounded(bucket_size, dtype, updates, micro_steps, clipping):
    """Any may be None, and fp32 ones are not rounded to their parameter's dtype."""
    fields = {"reduce_bucket_size": bucket_size, "param_dtype": dtype, "gradient_clipping": clipping}
    fields |= {"gradient_accumulation_steps": micro_steps, "loss_scale": 1}
    params = random_tree(1)
    there, here = on_accelerator(params, **fields), direct(params, **fields)
    for i, (given_ones, in_fp32) in enumerate(updates):
        leaves, treedef = jax.tree.flatten(random_tree(20 + i, "float32" if in_fp32 else dtype))
        leaves = [leaf if given_ones >> j & 1 or not j else None for j, leaf in enumerate(leaves)]
        grads = treedef.unflatten(leaves)
        held = there.params
        after = there.update(grads)
        assert_same_tree(after, here.update(grads))
        for leaf, old, new in zip(leaves, jax.tree.leaves(held), jax.tree.leaves(after), strict=True):
            assert micro_steps > 1 or (leaf is not None) or new is old
    assert_same_tree(there.to_pytree(), here.to_pytree())


def test_gradients_that_differ_in_dtype_share_a_bucket(device):
    params = random_tree(2)
    there, here = on_accelerator(params, param_dtype="bfloat16"), direct(params, param_dtype="bfloat16")
    for i in range(3):
        grads = {**random_tree(30 + i, jnp.bfloat16), "embed": random_tree(30 + i)["embed"]}
        assert_same_tree(there.update(grads), here.update(jax.tree.map(np.asarray, grads)))
    assert_same_tree(there.to_pytree(), here.to_pytree())


def test_copies_to_pinned_host_memory_have_the_same_bits(monkeypatch):
    """As a GPU's arrays are copied: the CPU has this kind of memory, too."""
    monkeypatch.setattr(memory_kinds, "on_cpu", lambda array: False)
    fields = {"param_dtype": "bfloat16", "reduce_bucket_size": 100, "gradient_clipping": 0.5}
    kinds, start = [], jax.device_put

    def device_put(array, to=None, **options):
        kinds.append(getattr(to, "memory_kind", None))
        return start(array, to, **options)

    params = random_tree(4)
    there, here = on_accelerator(params, **fields), direct(params, **fields)
    monkeypatch.setattr(jax, "device_put", device_put)
    for i in range(3):
        grads = random_tree(40 + i, jnp.bfloat16)
        assert_same_tree(there.update(grads), here.update(jax.tree.map(np.asarray, grads)))
    assert "pinned_host" in kinds
    assert_same_tree(there.to_pytree(), here.to_pytree())


def test_kernels_read_gradients_in_their_own_dtype(device):
    offloaded = on_accelerator(random_tree(3), param_dtype="bfloat16")
    places, read = offloaded._core.device, []
    host_array = places.host_array
    places.host_array = lambda gradient: read.append(host_array(gradient)) or read[-1]
    offloaded.update(random_tree(30, jnp.bfloat16))
    offloaded.update(random_tree(31))
    assert list(dict.fromkeys(array.dtype.name for array in read)) == ["bfloat16", "float32"]


class Delayed:
    """The definition of the delayed update, of one that is not: from the warm-up on its parameters of a step before.

    The warm-up ends with the parameter that has had most updates.
    """

    def __init__(self, twin, warmup):
        self.twin, self.warmup = twin, warmup
        self.params = twin.params

    def update(self, grads):
        before, done = self.twin.params, max(jax.tree.leaves(self.twin.to_pytree()["steps"]))
        after = self.twin.update(grads)
        if self.twin.report.skipped == "accumulating":
            return self.params
        self.params = before if self.twin.report.updated and done >= self.warmup else after
        return self.params


@pytest.mark.draws(1)
@law(8, least=2)
@example(on_accelerator, "float32", 2, 1, None, [(1, False), (4, False), (1, False), (1, False)])
@given(
    st.sampled_from([on_accelerator, direct]),
    st.sampled_from(["float32", "bfloat16"]),
    st.integers(0, 3),
    st.sampled_from([1, 2]),
    st.sampled_from([None, 0.1]),
    st.lists(st.tuples(st.integers(1, 63), st.booleans()), min_size=4, max_size=6),
)
def test_the_delayed_schedule_is_what_its_definition_says(place, dtype, warmup, micro_steps, clipping, updates):
    fields = {"param_dtype": dtype, "gradient_accumulation_steps": micro_steps, "gradient_clipping": clipping}
    fields |= {"reduce_bucket_size": 300}
    params = random_tree(0)
    offloaded = place(params, **fields, schedule="delayed", delay_warmup_steps=warmup)
    definition = Delayed(direct(params, **fields), warmup)
    for i, (given_ones, overflows) in enumerate(updates):
        leaves, treedef = jax.tree.flatten(random_tree(10 + i, dtype))
        if overflows and clipping:
            leaves = [leaf * jnp.inf for leaf in leaves]
        grads = treedef.unflatten([leaf if given_ones >> j & 1 else None for j, leaf in enumerate(leaves)])
        kept, copies = offloaded.params, jax.tree.map(lambda x: np.array(x, copy=True), offloaded.params)
        assert_same_tree(offloaded.update(grads), definition.update(jax.tree.map(np.asarray, grads)))
        assert_same_tree(kept, copies)
        assert repr(offloaded.report) == repr(definition.twin.report)
    assert_same_tree(offloaded.to_pytree(), definition.twin.to_pytree())
    assert_same_tree(offloaded.params, definition.twin.params)
    assert_same_tree(offloaded.flush(), definition.twin.params)


@pytest.mark.draws(1)
@pytest.mark.parametrize("place", [on_accelerator, direct])
def test_states_of_the_delayed_schedule_are_loaded_over_what_it_holds_back(place, device):
    params, fields = random_tree(0), {"schedule": "delayed", "delay_warmup_steps": 1, "param_dtype": "bfloat16"}
    saving, loading = place(params, **fields), place(params, **fields)
    for i in range(3):
        saving.update(random_tree(20 + i))
        loading.update(random_tree(30 + i))
    assert_same_tree(loading.load_pytree(saving.to_pytree()), saving.params)
    for i in range(3):
        assert_same_tree(loading.update(random_tree(40 + i)), saving.update(random_tree(40 + i)))
    assert_same_tree(loading.to_pytree(), saving.to_pytree())


def test_a_delayed_update_goes_on_after_update_has_returned(device):
    offloaded, returned = on_accelerator(random_tree(0), schedule="delayed", delay_warmup_steps=0), threading.Event()
    run_adam = offloaded._core._pipeline.updates._run

    def after_it_returned(*args):
        assert returned.wait(60)
        run_adam(*args)

    offloaded._core._pipeline.updates._run = after_it_returned
    offloaded.update(random_tree(1))
    assert not offloaded._core._pipeline.updates.finished
    returned.set()
    offloaded.flush()
    assert offloaded._core._pipeline.updates.finished


def test_float16_with_loss_scaling(device):
    params = random_tree(4, jnp.float16, scale=0.1)
    fields = {"initial_loss_scale": 1024.0, "loss_scale_window": 2, "reduce_bucket_size": 200}
    there, here = on_accelerator(params, **fields), direct(params, **fields)
    for i in range(6):
        scale = there._core.loss_scale
        tree = jax.tree.map(lambda g, s=scale: g * jnp.float16(s), random_tree(40 + i, jnp.float16, scale=1e-3))
        if i == 3:
            tree["embed"] = tree["embed"].at[-1, -1].set(jnp.inf)
        assert_same_tree(there.update(ScaledGradients(tree, scale)), here.update(ScaledGradients(tree, scale)))
        assert repr(there.report) == repr(here.report)
        assert there.report.skipped == ("overflow" if i == 3 else None)
    assert_same_tree(there.to_pytree(), here.to_pytree())


def test_states_go_from_one_way_to_the_other(device):
    params, fields = random_tree(5), {"param_dtype": "bfloat16", "reduce_bucket_size": 100}
    there, here = on_accelerator(params, **fields), direct(params, **fields)
    for i in range(2):
        there.update(random_tree(50 + i))
    assert_same_tree(here.load_pytree(there.to_pytree()), there.params)
    here.update(random_tree(52))
    there.load_pytree(here.to_pytree())
    for i in range(3, 6):
        assert_same_tree(there.update(random_tree(50 + i)), here.update(random_tree(50 + i)))
    assert_same_tree(there.to_pytree(), here.to_pytree())


def test_as_optax_in_a_loop(device):
    params = random_tree(6)
    there, here = on_accelerator(params), direct(params)
    tx = there.as_optax()
    state = tx.init(params)
    for i in range(4):
        updates, state = tx.update(random_tree(60 + i), state, params)
        params = optax.apply_updates(params, updates)
        assert_same_tree(params, here.update(random_tree(60 + i)))
    assert_same_tree(params, there.params)


# --- to the user it is any device ------------------------------------------------------------------------


def test_value_and_grad_is_plain_jit(device):
    """Gradients are plain arrays, and nothing is asked of the batch."""
    params = random_tree(7)
    offloaded, x = on_accelerator(params), jnp.ones((3, 33))
    loss, grads = offloaded.value_and_grad(loss_fn)(offloaded.params, x)
    expected = direct(params).value_and_grad(loss_fn) if device.platform == "cpu" else jax.value_and_grad(loss_fn)
    expected_loss, expected_grads = expected(params, x)
    if device.platform == "cpu":
        assert_same_tree([loss, grads], [expected_loss, expected_grads])
    assert {leaf.sharding for leaf in jax.tree.leaves(grads)} == {
        SingleDeviceSharding(device, memory_kind="pinned_host")
    }
    offloaded.update(grads)
    _, kept = offloaded.value_and_grad(loss_fn, keep_gradients=True)(params, x)
    assert {leaf.sharding for leaf in jax.tree.leaves(kept)} == {SingleDeviceSharding(device)}
    assert_same_tree(kept, grads)
    with pytest.raises(GradientError, match="RankGradients without a mesh"):
        offloaded.update(RankGradients(jax.tree.map(lambda g: g[None], grads)))


def test_parameters_stay_where_the_user_has_them_and_are_not_copied(device):
    mesh = jax.make_mesh((1,), ("x",), devices=[device])
    place = functools.partial(jax.device_put, jnp.ones((4, 8)))
    tree = {
        "free": jnp.ones((4, 8)),
        "whole bucket": jnp.ones(128),
        "numpy": np.ones((4, 8), np.float32),
        "committed": place(device),
        "explicit": place(NamedSharding(mesh, PartitionSpec("x"))),
        "of a mesh": place(NamedSharding(mesh, PartitionSpec())),
        "empty": jnp.ones((0, 3)),
        "empty and committed": jax.device_put(jnp.ones((0, 3)), device),
    }
    offloaded = on_accelerator(tree, reduce_bucket_size=128)
    written, copied = offloaded._placement.written, []

    def watched(leaf, targets, like):
        new, [target] = written(leaf, targets, like), targets
        copied.append(like.size and new.unsafe_buffer_pointer() != target.array.unsafe_buffer_pointer())
        return new

    offloaded._placement.written = watched
    twin = direct(tree)
    value_and_grad = offloaded.value_and_grad(lambda p: sum((leaf**2).sum() for leaf in jax.tree.leaves(p)))
    for i in range(3):
        if i == 1:  # gradients of the meshes that their parameters lie on
            _, grads = value_and_grad(offloaded.params)
            assert isinstance(grads["explicit"].sharding, NamedSharding)
        else:
            grads = jax.tree.map(lambda leaf: np.full(leaf.shape, 0.5, leaf.dtype), tree)
        updated = offloaded.update(grads)
        assert_same_tree(updated, twin.update(jax.tree.map(np.asarray, grads)))
        for name, old in tree.items():
            old, new = jnp.asarray(old), updated[name]
            assert (new.sharding, new.committed, new.weak_type) == (old.sharding, old.committed, False), name
            assert new.devices() == {device}
    assert copied
    assert not any(copied)


def test_parameters_and_gradients_may_be_donated(device):
    double = jax.jit(functools.partial(jax.tree.map, lambda x: 2 * x), donate_argnums=0)
    computed = jax.jit(functools.partial(jax.tree.map, lambda x: x + 0))
    params = random_tree(8)
    there, here = on_accelerator(params, reduce_bucket_size=100), direct(params)
    for i in range(5):
        grads = computed(random_tree(80 + i))
        expected = here.update(jax.tree.map(np.array, grads))
        if i == 4:  # it needed none of the old parameters
            break
        updated = there.update(grads)
        assert_same_tree(updated, expected)
        tree = [grads, updated]
        nonempty = [leaf for leaf in jax.tree.leaves(tree) if leaf.size]
        before = {leaf.unsafe_buffer_pointer() for leaf in nonempty}
        doubled = double(tree)
        assert all(leaf.is_deleted() for leaf in nonempty)
        assert {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(doubled) if leaf.size} == before
        del tree, updated, nonempty, doubled
    assert_same_tree(there.update(grads), expected)
    assert_same_tree(there.to_pytree(), here.to_pytree())


def test_kept_parameters_are_never_rewritten(device):
    offloaded, kept = on_accelerator(random_tree(9), reduce_bucket_size=561), []
    for i in range(6):
        params = offloaded.update(random_tree(90 + i))
        kept.append((params, jax.tree.map(lambda x: np.array(x, copy=True), params)))
    for params, copies in kept:
        assert_same_tree(params, copies)


def test_nothing_grows_and_programs_are_compiled_once(device):
    traced, kept = [], []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("own_slice", "gather"):
            method = getattr(LoneDevice, name)
            patch.setattr(LoneDevice, name, lambda *args, f=method: traced.append(f) or f(*args))
        offloaded = on_accelerator(random_tree(10), gradient_clipping=1.0, reduce_bucket_size=100)
        for i in range(6):
            offloaded.update(random_tree(100 + i))
            if i in (1, 5):
                gc.collect()
                kept.append((len(jax.live_arrays()), offloaded.memory_report(), len(traced)))
    assert kept[0] == kept[1]
    assert 0 < len(traced) <= 2 * len(offloaded._core._pipeline.buckets.all)  # one program a bucket each way


def test_the_host_holds_states_and_staging_beside_gradients(device):
    numel = 300 * 1000
    params = {"w": jnp.ones((300, 1000), jnp.bfloat16)}
    offloaded = on_accelerator(params, reduce_bucket_size=30_000)
    for i in range(2):
        offloaded.update({"w": jnp.full((300, 1000), i, jnp.bfloat16)})
    report = offloaded.memory_report()
    assert set(report.host) == {"master", "exp_avg", "exp_avg_sq", "staging"}
    assert report.host_bytes == report.planned_host_bytes
    assert report.host_bytes - report.host["staging"] <= 1.01 * 12 * numel
    assert report.host["staging"] <= 1.01 * 2 * 2 * 30_000
    assert report.device_bytes == 2 * numel


def test_copies_of_it_are_refused(device):
    offloaded = on_accelerator(random_tree(11))
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(StateError, match=r"to_pytree\(\) and load_pytree\(\) in JAX"):
            attempt(offloaded)


# --- what overlaps -----------------------------------------------------------------------------------------


def many_buckets():
    return {f"{i}": jnp.full(100, float(i)) for i in range(6)}


class Recorder:
    """A record of the requests to the device, in the order in which they happen. The gradients are those of
    :func:`many_buckets`, each in a bucket of its own."""

    def __init__(self, offloaded, patch):
        self.events = []
        self.device = offloaded._core.device
        self._publish, self._host_array = self.device.publish, self.device.host_array
        self.device.publish, self.device.host_array = self.publish, self.host_array
        start = as_placed.start_to_host
        patch.setattr(
            as_placed, "start_to_host", lambda array: self.events.append(("copy", _index(array))) or start(array)
        )

    def host_array(self, gradient):
        index = _index(gradient.array)
        self.before_wait("arrived", index)
        self.events.append(("arrived", index))
        return self._host_array(gradient)

    def publish(self, bucket, *args):
        self.events.append(("publish", bucket.index))
        return self.recorded("published", bucket.index, self._publish(bucket, *args))

    def recorded(self, what, index, event):
        def wait():
            self.before_wait(what, index)
            event.wait()
            self.events.append((what, index))

        return Waiting(wait)

    def before_wait(self, what, index):
        pass

    def of(self, *kinds):
        return [event for event in self.events if event[0] in kinds]


def _index(array):
    return int(np.array(array)[0])


@pytest.mark.draws(1)
@pytest.mark.parametrize("fields", [{}, {"gradient_clipping": 1.0}], ids=["unclipped", "clipped"])
def test_every_copy_is_started_before_the_first_gradient_is_read(fields, device, monkeypatch):
    offloaded = on_accelerator(many_buckets(), reduce_bucket_size=100, **fields)
    recorder = Recorder(offloaded, monkeypatch)
    offloaded.update(many_buckets())
    events = recorder.of("copy", "arrived")
    assert events[:6] == [("copy", i) for i in range(6)]
    assert set(events[6:]) == {("arrived", i) for i in range(6)}  # some for each bucket that has a part


def test_while_one_buckets_parameters_travel_the_next_is_updated(device, monkeypatch):
    """Nobody waits for a publication before the next bucket was updated and is on its way too."""
    offloaded = on_accelerator(many_buckets(), reduce_bucket_size=100)
    recorder = Recorder(offloaded, monkeypatch)
    offloaded.update(many_buckets())
    events = recorder.of("publish", "published")
    order = [index for what, index in events if what == "publish"]
    expected = [("publish", order[0])]
    for before, index in itertools.pairwise(order):
        expected += [("publish", index), ("published", before)]
    assert events == [*expected, ("published", order[-1])]


def test_a_copy_that_fails_changes_nothing(device, monkeypatch):
    offloaded, twin = (on_accelerator(many_buckets(), reduce_bucket_size=100) for _ in range(2))
    recorder = Recorder(offloaded, monkeypatch)

    def before_wait(what, index):
        if what == "arrived" and index == 3:
            raise RuntimeError("out of device memory")

    recorder.before_wait = before_wait
    before = offloaded.to_pytree()
    with pytest.raises(RuntimeError, match="out of device memory"):
        offloaded.update(many_buckets())
    assert_same_tree(offloaded.to_pytree(), before)
    recorder.before_wait = lambda what, index: None
    assert_same_tree(offloaded.update(many_buckets()), twin.update(many_buckets()))
    assert_same_tree(offloaded.to_pytree(), twin.to_pytree())


@pytest.mark.draws(1)
@pytest.mark.parametrize("schedule", ["overlap", "delayed"])
def test_checkpoints_are_those_of_the_direct_way(tmp_path, device, schedule, monkeypatch):
    monkeypatch.setattr("frontends.jax.devices.device.on_cpu", lambda array: False)  # arrays are cut on the device
    fields = {"param_dtype": "bfloat16", "schedule": schedule, "delay_warmup_steps": 1}
    fields["trainable"] = {"model": True, "frozen": False, "key": False}

    def tree_of(seed):
        return {"model": random_tree(seed), "frozen": seed + jnp.arange(7.0), "key": jax.random.key(seed)}

    def update(offloaded, seed):
        offloaded.update({"model": random_tree(seed), "frozen": None, "key": None})

    straight, resumed = (on_accelerator(tree_of(seed), **fields) for seed in (0, 1))
    elsewhere = wrap(jax.device_put(tree_of(1), jax.devices("cpu")[0]), **HYPER, **fields)
    assert elsewhere._core.device.addressable
    for seed in range(3):
        update(straight, seed)
    straight.save_checkpoint(tmp_path, wait=False)
    straight.wait_for_checkpoint()
    for one in (resumed, elsewhere):
        one.load_checkpoint(tmp_path)
        assert one.params["key"] == jax.random.key(0)
        assert_same_tree(one.params["frozen"], np.arange(7, dtype=np.float32))
        assert_same_tree(one.params["model"], straight.params["model"])
    for one in (straight, resumed, elsewhere):
        update(one, 9)
    for one in (resumed, elsewhere):
        assert_same_tree(one.params["model"], straight.params["model"])
    for one in (resumed, elsewhere):
        assert_same_tree(one.to_pytree()["master"], straight.to_pytree()["master"])
    assert {d for leaf in jax.tree.leaves(resumed.params) for d in leaf.devices()} == {device}


def test_threads_work_near_the_devices_of_the_parameters(monkeypatch):
    asked = []
    monkeypatch.setattr(placement, "bind_threads_near", lambda config, ordinals, drivers: asked.append(list(ordinals)))
    kinds = [
        SimpleNamespace(platform=kind, local_hardware_id=i, process_index=process)
        for i, (kind, process) in enumerate((("gpu", 0), ("cpu", 0), ("gpu", 0), ("gpu", 1)))
    ]
    monkeypatch.setattr(
        placement, "_bind_threads_near", lambda config, _, real=placement._bind_threads_near: real(config, kinds)
    )
    wrap({"w": jnp.ones(3)}, **HYPER)
    for stage in (2, 3):
        wrap({"w": jnp.ones(3)}, mesh=jax.make_mesh((1,), ("dp",)), stage=stage, **HYPER)
    assert asked == [[0, 2]] * 3
