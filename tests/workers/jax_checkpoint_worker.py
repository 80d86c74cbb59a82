"""Trains in JAX, saves, or goes on from what was saved: a process of test_jax_checkpoint.py.

jax_checkpoint_worker.py FOLDER CASES RESULTS [ADDRESS PROCESS]

Gradients are small multiples of 1/8, whose sums are exact in every element type and order: the same four micro-batches
give the same bits on any number of devices.
"""

import hashlib
import json
import os
import random
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from frontends.jax import RankGradients, ScaledGradients, wrap
from frontends.jax.placement.on_mesh import OnMesh
from offload_core.checkpoint.reader import Checkpoint
from offload_core.checkpoint.shard_writer import ShardWriter
from offload_core.errors import CheckpointError, CollectiveError, StateError

STEPS, SAVED_AT, MICRO_BATCHES = 30, 10, 4
SHAPES = {"h": [{"w": (6, 8)}, {"w": (8, 24), "b": (24,)}], "embed": (33, 24), "odd": (5, 7), "empty": (0, 2)}
HYPER = {"lr": lambda count: 1e-2 / (1 + count), "weight_decay": 0.1, "gradient_clipping": 1.0}


def tree_of(seed):
    rng = np.random.default_rng(seed)
    tree = jax.tree.map(
        lambda shape: rng.standard_normal(shape).astype(np.float32), SHAPES, is_leaf=lambda x: isinstance(x, tuple)
    )
    frozen = {
        "frozen": jnp.asarray(rng.standard_normal((3, 8)), jnp.bfloat16),
        "ids": jnp.asarray(rng.integers(0, 99, (7,)), jnp.int32),
        "flags": np.asarray(rng.integers(0, 2, (5,)), bool),
        "key": jax.random.key(seed),
        "name": "a static leaf",
    }
    return tree | frozen


def gradients_of(offloaded, xs):
    """What ``value_and_grad`` would give for these micro-batches, one a rank."""
    dtype = np.dtype(offloaded._tree.trained[0].dtype)
    scale = offloaded._pipeline.loss_scale
    tree = [None] * len(offloaded._tree.leaves)
    for leaf in offloaded._tree.trained:
        param = offloaded._placement.to_numpy(leaf, offloaded._tree.leaves[leaf.position]).astype(np.float32)
        slope = np.round(np.clip(param, -1, 1) * 4) / 4
        with np.errstate(over="ignore"):
            each = np.stack([((slope + x) * np.float32(scale)).astype(dtype) for x in xs])
        alone = leaf.layout is not None or not isinstance(offloaded._placement, OnMesh)
        tree[leaf.position] = each.astype(np.float32).mean(axis=0) if alone else each
    grads = jax.tree_util.tree_unflatten(offloaded._tree.treedef, tree)
    grads = RankGradients(grads) if isinstance(offloaded._placement, OnMesh) else grads
    return grads if offloaded._pipeline.scaler is None else ScaledGradients(grads, scale)


class Loader:
    """Draws from its own generator and from Python's and NumPy's of the process."""

    def __init__(self):
        self.rng = np.random.default_rng(5)

    def state_dict(self):
        return {"rng": self.rng.bit_generator.state}

    def load_state_dict(self, state):
        self.rng.bit_generator.state = state["rng"]

    def micro_batch(self):
        drawn = self.rng.integers(-3, 4) + random.randrange(4) + np.random.randint(3)
        return np.float32(drawn / 8)


def new(case, devices, *, seed=0):
    """The tree, wrapped for so many devices; None: without a mesh."""
    fields = {"reduce_bucket_size": 500, "param_persistence_threshold": 20, **case["fields"]}
    mesh = None if devices is None else jax.make_mesh((devices,), ("dp",), devices=jax.devices()[:devices])
    if fields.get("param_dtype") == "float16":
        fields |= {"initial_loss_scale": 2.0**15, "loss_scale_window": 7}
    trainable = {name: name in SHAPES for name in tree_of(0)}
    steps = MICRO_BATCHES // (devices or 1)
    with jax.default_device(jax.local_devices()[0]):
        return wrap(tree_of(seed), **HYPER, mesh=mesh, trainable=trainable, gradient_accumulation_steps=steps, **fields)


def train(offloaded, loader, steps):
    device = offloaded._pipeline.device
    for _ in range(steps * (MICRO_BATCHES // device.world_size)):
        xs = np.array([loader.micro_batch() for _ in range(device.world_size)])
        device.collectives.broadcast(xs, "micro-batches")  # a process may have started with other generators
        offloaded.update(gradients_of(offloaded, xs))


def outcome(offloaded, loader):
    """Everything that training goes on from, by name."""
    tree = offloaded._tree
    params = [
        offloaded._placement.to_numpy(leaf, tree.leaves[leaf.position]) for leaf in tree.trained
    ]  # before to_pytree() brings them level
    saved = offloaded.to_pytree()
    found = {f"param {i}": param.tobytes() for i, param in enumerate(params)}
    for path, leaf in jax.tree_util.tree_leaves_with_path(saved):
        found[jax.tree_util.keystr(path)] = leaf.tobytes() if isinstance(leaf, np.ndarray) else repr(leaf).encode()
    found["loader"] = repr(loader.rng.bit_generator.state).encode()
    found["random"] = repr([random.getstate(), np.random.get_state()]).encode()
    return {name: hashlib.sha256(data).hexdigest() for name, data in found.items()}


def begin(case, seed=0):
    random.seed(1 + seed)
    np.random.seed(1 + seed)
    return new(case, case["devices"], seed=seed), Loader()


def straight(folder, case):
    """30 steps at a stretch."""
    offloaded, loader = begin(case)
    train(offloaded, loader, STEPS)
    return outcome(offloaded, loader)


def save(folder, case):
    """Saving after 10 steps does not disturb them."""
    offloaded, loader = begin(case)
    train(offloaded, loader, SAVED_AT)
    if case["fields"].get("param_dtype") == "float16":
        assert offloaded.count < SAVED_AT, "no update was skipped"
    offloaded.save_checkpoint(folder / case["name"], stateful={"loader": loader}, extras=case["name"], wait=False)
    train(offloaded, loader, STEPS - SAVED_AT)
    offloaded.wait_for_checkpoint()
    return outcome(offloaded, loader)


def resume(folder, case):
    """The other 20 steps, after those that were saved."""
    offloaded, loader = begin(case, seed=1)
    loader.rng = np.random.default_rng(9)
    extras = offloaded.load_checkpoint(folder / case["saved_as"], stateful={"loader": loader})
    assert extras == case["saved_as"]
    train(offloaded, loader, STEPS - SAVED_AT)
    return outcome(offloaded, loader)


def fail(folder, case):
    """One process fails, and all say so; what was there before is there after."""
    offloaded, folder, second = new(case, case["devices"]), folder / case["name"], jax.process_index() == 1
    train(offloaded, Loader(), 1)
    good = offloaded.save_checkpoint(folder)
    train(offloaded, Loader(), 1)
    before = outcome(offloaded, Loader())
    here = "it says there why|failed in another process"

    with pytest.raises(CheckpointError, match="expected an object with state_dict" if second else here):
        offloaded.save_checkpoint(folder, stateful={"loader": None if second else Loader()})

    def no_space(*arguments):
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if second:
            patch.setattr("offload_core.checkpoint.shard_writer.ShardWriter._put", no_space)
        with pytest.raises(CheckpointError, match="No space left on device" if second else here):
            offloaded.save_checkpoint(folder)
    assert outcome(offloaded, Loader()) == before
    assert {path.name for path in folder.iterdir()} == {"latest", good.name}

    read, calls = Checkpoint._read_block, []

    def flipped(checkpoint, i, block, *arguments):
        calls.append(block)
        if second and len(calls) > 1:  # not in what is read before anything changes
            raise CheckpointError("bytes are not those that were written")
        return read(checkpoint, i, block, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "_read_block", flipped)
        with pytest.raises(CheckpointError, match="bytes are not those" if second else here):
            offloaded.load_checkpoint(folder)
    with pytest.raises(StateError, match="loading a checkpoint broke off"):
        train(offloaded, Loader(), 1)
    offloaded.load_checkpoint(folder)
    train(offloaded, Loader(), 1)
    assert outcome(offloaded, Loader()) == before
    return "passed"


def lose(folder, case):
    """The second process is killed while it writes its part of a second checkpoint."""
    offloaded, loader = begin(case)
    train(offloaded, loader, SAVED_AT)
    offloaded.save_checkpoint(folder / case["name"], stateful={"loader": loader}, extras=case["name"])
    train(offloaded, loader, 1)
    if jax.process_index() == 1:
        ShardWriter._put = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CollectiveError, match="resume from the last checkpoint"):
        offloaded.save_checkpoint(folder / case["name"])
    return "passed"


def main():
    folder, cases, results, *peers = sys.argv[1:]
    folder = Path(folder)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))  # by whichever process comes first
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_num_cpu_devices", 2 if peers else 4)
    if peers:
        jax.distributed.initialize(peers[0], 2, int(peers[1]))
    acts = {act.__name__: act for act in (straight, save, resume, fail, lose)}
    found = {}
    for case in json.loads(Path(cases).read_text()):
        found[case["name"]] = acts[case["what"]](folder, case)
        Path(results).write_text(json.dumps(found))
    if case["what"] == "lose":
        os._exit(0)  # JAX would wait for the other


if __name__ == "__main__":
    main()
