"""Runs in JAX that are saved and resumed, and everything that they go on from.

Gradients are small multiples of 1/8, whose sums are exact in every element type and order: the same four micro-batches
give the same bits on any number of devices.
"""

import functools
import hashlib
import random

import jax
import jax.numpy as jnp
import numpy as np

from frontends.jax import RankGradients, ScaledGradients, wrap
from frontends.jax.placement.on_mesh import OnMesh

STEPS, SAVED_AT, MICRO_BATCHES = 6, 3, 4
SHAPES = {"h": [{"w": (6, 8)}, {"w": (8, 24), "b": (24,)}], "embed": (33, 24), "odd": (5, 7), "empty": (0, 2)}
HYPER = {"lr": lambda count: 1e-2 / (1 + count), "weight_decay": 0.1, "gradient_clipping": 1.0}
BF16 = {"param_dtype": "bfloat16"}
KINDS = {
    "fp32": {},
    "bf16": BF16,
    "fp16": {"param_dtype": "float16", "initial_loss_scale": 2.0**16, "loss_scale_window": 3},
    "late": {**BF16, "schedule": "delayed", "delay_warmup_steps": 2},
}
"""Fields of the configuration that the bits depend on."""


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
    """Return the gradients that ``value_and_grad`` would give for these micro-batches, one a rank."""
    dtype = np.dtype(offloaded._tree.trained[0].dtype)
    scale = offloaded._core.loss_scale
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
    return grads if offloaded._core.scaler is None else ScaledGradients(grads, scale)


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


def begin(kind, devices=None, *, seed=0, **fields):
    """The tree, wrapped for so many devices (None: without a mesh), and a loader."""
    random.seed(1 + seed)
    np.random.seed(1 + seed)
    mesh = None if devices is None else jax.make_mesh((devices,), ("dp",), devices=jax.devices()[:devices])
    fields = {"reduce_bucket_size": 500, "param_persistence_threshold": 20, **KINDS[kind], **fields}
    trainable = {name: name in SHAPES for name in tree_of(0)}
    steps = MICRO_BATCHES // (devices or 1)
    with jax.default_device(jax.local_devices()[0]):
        offloaded = wrap(
            tree_of(seed), **HYPER, mesh=mesh, trainable=trainable, gradient_accumulation_steps=steps, **fields
        )
    return offloaded, Loader()


def train(offloaded, loader, steps):
    device = offloaded._core.device
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


@functools.cache
def straight(kind):
    """Return the outcome of all steps without a break, on one device."""
    offloaded, loader = begin(kind)
    train(offloaded, loader, STEPS)
    return outcome(offloaded, loader)


def save(folder, kind, *place, **fields):
    """Save in the middle of the steps; return what becomes of them."""
    offloaded, loader = begin(kind, *place, **fields)
    train(offloaded, loader, SAVED_AT)
    if kind == "fp16":
        assert offloaded.count < SAVED_AT, "no update was skipped"
    offloaded.save_checkpoint(folder, stateful={"loader": loader}, extras=kind, wait=False)
    train(offloaded, loader, STEPS - SAVED_AT)
    offloaded.wait_for_checkpoint()
    return outcome(offloaded, loader)


def resume(folder, kind, *place, **fields):
    """Go on from what was saved; return what becomes of the other steps."""
    offloaded, loader = begin(kind, *place, seed=1, **fields)
    loader.rng = np.random.default_rng(9)
    assert offloaded.load_checkpoint(folder, stateful={"loader": loader}) == kind
    train(offloaded, loader, STEPS - SAVED_AT)
    return outcome(offloaded, loader)


def differences(found, kind):
    """Return the names of outcomes that differ from the run of this kind that was neither saved nor stopped."""
    expected = straight(kind)
    assert found.keys() == expected.keys()
    return [name for name in expected if found[name] != expected[name]]
