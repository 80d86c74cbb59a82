"""Checkpoints of JAX trees, in one process."""

import os
import random
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from frontends.jax import wrap
from frontends.jax.tree.trees import is_array, to_numpy
from offload_core.checkpoint.reader import Checkpoint
from offload_core.checkpoint.shard_writer import ShardWriter
from offload_core.errors import CheckpointError, CheckpointWarning, StateError
from tests.support.checkpoints import Loader, Slow
from tests.support.jax_models import (
    HYPER,
    batch,
    loss_fn,
    on_the_cpu,  # noqa: F401 (a fixture)
    random_tree,
)
from tests.support.late_stores import states_on_disk_too
from tests.support.subjects.of_jax import untrained


def new(seed=0, **fields):
    tree = {"model": random_tree(seed), "more": untrained(seed)}
    return wrap(tree, **HYPER, **fields, trainable={"model": True, "more": False})


def step(offloaded, i):
    value_and_grad = offloaded.value_and_grad(lambda params, x: loss_fn(params["model"], x))
    return offloaded.update(value_and_grad(offloaded.params, batch(i))[1])


def assert_same_tree(got, expected):
    """The same arrays, bit for bit, at the same paths, and of the same kinds."""
    got, expected = (
        {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (got, expected)
    )
    assert got.keys() == expected.keys()
    for path, x in got.items():
        y = expected[path]
        assert type(x) is type(y), path
        if is_array(x):
            assert (x.dtype, x.shape) == (y.dtype, y.shape), path
            assert to_numpy(x).tobytes() == to_numpy(y).tobytes(), path
        else:
            assert x == y, path


def assert_same(one, other):
    assert_same_tree(one.params, other.params)
    assert_same_tree(one.to_pytree(), other.to_pytree())
    assert one.count == other.count


def test_an_object_whose_state_is_read_of_the_tree_is_saved(tmp_path):
    """Its ``state_dict()`` runs before anything is locked."""

    class Averages:
        def state_dict(self):
            return offloaded.to_pytree()["exp_avg"]

        def load_state_dict(self, state):
            self.loaded = state

    offloaded, averages = new(), Averages()
    expected = averages.state_dict()
    offloaded.save_checkpoint(tmp_path, stateful={"averages": averages})
    offloaded.load_checkpoint(tmp_path, stateful={"averages": averages})
    assert_same_tree(averages.loaded, expected)


@pytest.mark.filterwarnings("ignore:.*its state of 'loader' is not loaded")
def test_extras_stateful_objects_and_random_generators_come_back(tmp_path):
    class Loader:
        def __init__(self, at):
            self.at = at

        def state_dict(self):
            return {"at": self.at, "order": jnp.arange(self.at)}

        def load_state_dict(self, state):
            self.at = state["at"]

    extras = {"loss": 1.5, "keys": [jax.random.key(3), jax.random.key(4, impl="rbg")], "ema": jnp.ones(3, jnp.bfloat16)}
    offloaded, loader = new(), Loader(7)
    random.seed(1)
    np.random.seed(1)
    offloaded.save_checkpoint(tmp_path, stateful={"loader": loader}, extras=extras)
    drawn = random.random(), np.random.random()
    loader.at = 0
    got = offloaded.load_checkpoint(tmp_path, stateful={"loader": loader})
    assert loader.at == 7
    assert (random.random(), np.random.random()) == drawn
    assert got["loss"] == 1.5
    assert isinstance(got["ema"], jax.Array)
    assert_same_tree({"ema": got["ema"]}, {"ema": extras["ema"]})
    for key, saved in zip(got["keys"], extras["keys"], strict=True):
        assert key.dtype == saved.dtype
        assert jax.random.bits(key) == jax.random.bits(saved)
    state = random.getstate()
    offloaded.load_checkpoint(tmp_path, random_state=False)
    assert random.getstate() == state
    with pytest.raises(CheckpointError, match=r"stateful\['other'\]: the checkpoint has no state of that name"):
        offloaded.load_checkpoint(tmp_path, stateful={"other": loader})
    with pytest.raises(CheckpointError, match=r"state\['extras'\]\['f'\] is a builtins.function"):
        offloaded.save_checkpoint(tmp_path, extras={"f": step})


def test_what_is_not_trained_is_loaded_array_by_array(tmp_path, monkeypatch):
    monkeypatch.setattr("offload_core.checkpoint.loading._TARGET_BYTES", 1)
    read, at_a_time = Checkpoint.read, []

    def counted(checkpoint, wants):
        at_a_time.append([want.name for want in wants])
        read(checkpoint, wants)

    one, other = new(), new(1)
    one.save_checkpoint(tmp_path)
    monkeypatch.setattr(Checkpoint, "read", counted)
    other.load_checkpoint(tmp_path)
    full = [[name for name in names if name.startswith("more.") and name != "more.empty"] for names in at_a_time]
    others = {"activation", "empty", "nothing"}
    assert sorted(names for names in full if names) == [
        [f"more.{name}"] for name in sorted(untrained(0).keys() - others)
    ]
    assert_same(one, other)


def test_what_is_trained_here_and_not_there_is_taken_over_and_the_other_way(tmp_path):
    tree = random_tree(0)
    some = {"embed": False, "layers": True}
    part, whole = wrap(tree, **HYPER, trainable=some), wrap(random_tree(1), **HYPER)
    part.update({**random_tree(2), "embed": None})
    part.save_checkpoint(tmp_path)
    whole.load_checkpoint(tmp_path)
    assert_same_tree(whole.params, part.params)
    states = whole.to_pytree()
    assert not states["exp_avg"]["embed"].any()
    assert (states["steps"]["embed"], states["steps"]["layers"][0]["w"]) == (0, 1)
    whole.update(random_tree(3))
    whole.save_checkpoint(tmp_path)
    part.load_checkpoint(tmp_path)
    assert_same_tree(part.params, whole.params)


@pytest.mark.parametrize("as_mapping", [True, False])
def test_names_are_translated(tmp_path, as_mapping):
    ours = {"net": random_tree(1)}
    mapping = {"net.embed": "embed", **{f"net.layers.{i}.{n}": f"layers.{i}.{n}" for i in (0, 1) for n in "wb"}}
    saved, offloaded = wrap(random_tree(0), **HYPER), wrap(ours, **HYPER)
    saved.save_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"it lacks 'net\.embed'.* this model lacks 'embed'.*names="):
        offloaded.load_checkpoint(tmp_path)
    offloaded.load_checkpoint(tmp_path, names=mapping if as_mapping else lambda name: name.removeprefix("net."))
    assert_same_tree(offloaded.params["net"], saved.params)
    with pytest.raises(
        CheckpointError, match=r"two arrays of the tree are named 'x': 'net.embed' and 'net.layers.0.b'"
    ):
        offloaded.load_checkpoint(tmp_path, names=lambda name: "x")


def test_two_arrays_of_one_dotted_name_cannot_be_saved(tmp_path):
    tree = {"a": {"b": jnp.ones(3)}, "a.b": jnp.ones(2)}
    with pytest.raises(CheckpointError, match=r"two arrays of the tree are named 'a\.b'.*expected different names"):
        wrap(tree, **HYPER).save_checkpoint(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_tree_that_is_one_array_has_checkpoints_too(tmp_path):
    one, other = wrap(jnp.arange(5.0), **HYPER), wrap(jnp.ones(5), **HYPER)
    one.save_checkpoint(tmp_path)
    other.load_checkpoint(tmp_path)
    assert_same(one, other)


def test_another_trees_checkpoint_is_refused_and_changes_nothing(tmp_path):
    new().save_checkpoint(tmp_path)
    other = random_tree(1) | {"embed": jnp.ones((17, 33))}
    offloaded, twin = (wrap({"model": other, "more": untrained(1)}, **HYPER, trainable={"model": True, "more": False})
                       for _ in range(2))  # fmt: skip
    with pytest.raises(CheckpointError, match=r"'model.embed' has shape \[33, 17\] in it, expected \[17, 33\]"):
        offloaded.load_checkpoint(tmp_path)
    assert_same(offloaded, twin)
    kinds = new(1)
    kinds._tree.leaves[kinds._checkpoints._paths.index("more.ids")] = jnp.ones((2, 3))
    with pytest.raises(CheckpointError, match=r"'more.ids' is of int32 in it, expected float32"):
        kinds.load_checkpoint(tmp_path)
    step(kinds, 0)
    assert kinds.report.updated


def test_an_array_that_no_file_can_hold_is_refused(tmp_path):
    offloaded = wrap({"w": jnp.ones(3), "tiny": jnp.ones(3, jnp.int4)}, **HYPER)
    with pytest.raises(CheckpointError, match=r"'tiny' is an array of int4; expected one of"):
        offloaded.save_checkpoint(tmp_path)


def test_a_corrupt_file_is_named_and_another_checkpoint_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "offload_core.checkpoint.shard_writer.BLOCK_BYTES", 1024
    )  # so that it is found when states are read
    offloaded, twin = new(), new()
    step(offloaded, 0)
    good = offloaded.save_checkpoint(tmp_path)
    step(twin, 0)
    step(offloaded, 1)
    bad = offloaded.save_checkpoint(tmp_path)
    assert Checkpoint(tmp_path).path == bad
    [shard] = bad.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{shard.name}: bytes .* are not those that were written"):
        offloaded.load_checkpoint(tmp_path)
    with pytest.raises(StateError, match="loading a checkpoint broke off"):
        step(offloaded, 2)
    offloaded.load_checkpoint(good)
    assert_same(offloaded, twin)
    assert_same_tree(step(offloaded, 3), step(twin, 3))


def test_between_micro_steps_nothing_is_saved_and_loading_forgets_them(tmp_path):
    offloaded, twin = (new(gradient_accumulation_steps=2) for _ in range(2))
    offloaded.save_checkpoint(tmp_path)
    step(offloaded, 0)
    with pytest.raises(StateError, match="between micro-steps"):
        offloaded.save_checkpoint(tmp_path)
    offloaded.load_checkpoint(tmp_path)
    for one in (offloaded, twin):
        for i in (1, 2):
            step(one, i)
    assert_same(offloaded, twin)


@pytest.mark.draws(1)
@states_on_disk_too
@pytest.mark.parametrize("change", ["update", "load_pytree"])
def test_what_is_saved_while_states_change_is_of_the_moment_of_the_call(tmp_path, monkeypatch, change):
    monkeypatch.setattr("offload_core.checkpoint.shard_writer.BLOCK_BYTES", 1024)
    offloaded, twin, restored, other = (wrap(random_tree(seed), **HYPER) for seed in (0, 0, 1, 2))
    twin.update(random_tree(3))
    offloaded.update(random_tree(3))
    states = other.to_pytree()
    slow, waits, await_claim = Slow(monkeypatch), threading.Event(), ShardWriter._await_claim
    monkeypatch.setattr(ShardWriter, "_await_claim", lambda *arguments: waits.set() or await_claim(*arguments))
    offloaded.save_checkpoint(tmp_path, wait=False)
    act = {"update": lambda: offloaded.update(random_tree(4)), "load_pytree": lambda: offloaded.load_pytree(states)}
    changed = threading.Thread(target=act[change])
    changed.start()
    assert waits.wait(60)  # for the disk: there are more blocks than buffers
    slow.go_on()
    changed.join()
    offloaded.wait_for_checkpoint()
    restored.load_checkpoint(tmp_path)
    assert_same(restored, twin)


def test_old_parameters_stay_what_they_were_and_buffers_do_not_grow(tmp_path):
    offloaded = new()
    offloaded.save_checkpoint(tmp_path)
    before = offloaded.params
    values = jax.tree.map(jnp.array, before["model"])
    step(offloaded, 0)
    offloaded.load_checkpoint(tmp_path)
    assert_same_tree(before["model"], values)
    assert_same_tree(offloaded.params["model"], values)


# --- loading that fails ------------------------------------------------------------------------------


def test_a_state_that_no_object_takes_is_named(tmp_path):
    offloaded, loader = new(), Loader(7)
    offloaded.save_checkpoint(tmp_path, stateful={"loader": loader})
    with pytest.warns(CheckpointWarning, match="its state of 'loader' is not loaded, because no object was given"):
        offloaded.load_checkpoint(tmp_path)
    offloaded.load_checkpoint(tmp_path, stateful={"loader": None})


@pytest.mark.draws(1)
@pytest.mark.filterwarnings("ignore:.*its state of 'loader' is not loaded")
def test_code_of_others_runs_last_and_its_failure_says_what_is_loaded(tmp_path):
    offloaded, twin, loader = new(1), new(), Loader(7)
    step(twin, 0)
    twin.save_checkpoint(tmp_path, stateful={"loader": loader})
    loader.refuses = True
    with pytest.raises(
        CheckpointError,
        match=r"broke off in load_state_dict\(\) of stateful\['loader'\].*loaded are weights, optimizer states, the "
        "count of updates, and not .*the random generators",
    ):
        offloaded.load_checkpoint(tmp_path, stateful={"loader": loader})
    with pytest.raises(StateError, match="loading a checkpoint broke off"):
        step(offloaded, 1)
    offloaded.load_checkpoint(tmp_path)
    assert_same(offloaded, twin)


def test_a_signal_is_noted_and_saved_for_after_the_next_update(tmp_path):
    offloaded = new()
    with offloaded.save_on_signal(tmp_path, [signal.SIGUSR1], keep=1) as saver:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert saver.save() is None
        step(offloaded, 1)
        path = saver.save({"seed": 2})
        assert path == tmp_path / "step-00000001"
        step(offloaded, 2)
        assert saver.save() is None
    assert new(1).load_checkpoint(path) == {"seed": 2}
