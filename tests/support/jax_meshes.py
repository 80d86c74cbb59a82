"""Helpers that laws of the JAX front end on a mesh share: meshes and comparisons."""

from contextlib import contextmanager

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

HYPER = {"lr": 1e-2, "weight_decay": 0.1}


def processes(*numbers):
    """A law for one process with eight devices, or for two processes with two devices each, or for either."""
    return pytest.mark.parametrize("processes", numbers, indirect=True, ids="{} processes".format)


def slow(*values, **where):
    """Parameters that the long layer alone checks a law with; ``processes=2``: of the law in two processes."""
    return pytest.param(*values, marks=pytest.mark.slow(**where))


def mesh_of(world_size, axis_type=AxisType.Auto):
    return jax.make_mesh((world_size,), ("dp",), axis_types=(axis_type,), devices=jax.devices()[:world_size])


def split(tree, mesh):
    """A global array of each array of the tree, cut over the axis; every process has the whole."""
    sharding = NamedSharding(mesh, P("dp"))
    return jax.tree.map(lambda a: jax.make_array_from_callback(a.shape, sharding, lambda i: a[i]), tree)


def replicated(tree, mesh):
    return jax.tree.map(lambda a: jax.make_array_from_callback(a.shape, NamedSharding(mesh, P()), lambda i: a[i]), tree)


def arrays_of(shapes, seed, dtype=np.float32, stack=(), scale=1.0):
    """Random arrays of these shapes, in NumPy."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: (scale * rng.standard_normal((*stack, *shape)).astype(np.float32)).astype(dtype),
        shapes,
        is_leaf=lambda shape: isinstance(shape, tuple),
    )


def averaged(stacked):
    """The mean over the first dimension, by NumPy: summed in order in fp32, divided once."""
    total = stacked[0].astype(np.float32)
    for part in stacked[1:]:
        total = total + part.astype(np.float32)
    return total / np.float32(len(stacked))


def leaves_of(tree):
    return [(jax.tree_util.keystr(path), np.array(leaf)) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def assert_same_tree(got, expected):
    """The same arrays, bit for bit, at the same paths."""
    got, expected = leaves_of(got), leaves_of(expected)
    assert [path for path, _ in got] == [path for path, _ in expected]
    for (path, x), (_, y) in zip(got, expected, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype), (path, x.shape, x.dtype, y.shape, y.dtype)
        assert x.tobytes() == y.tobytes(), f"{path}: {np.count_nonzero(x != y)} of {x.size} differ"


def assert_holds(tree, expected):
    """Every shard that this process has is its part of an array, bit for bit."""
    for (path, leaf), whole in zip(leaves_of(expected), jax.tree.leaves(tree), strict=True):
        for shard in whole.addressable_shards:
            assert_same_tree({path: shard.data}, {path: leaf[shard.index]})


def assert_same_replicas(params, mesh):
    """Every device of the mesh holds all of every parameter, with the same bits."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, P()), leaf.ndim), path
        shards = [np.array(shard.data) for shard in leaf.addressable_shards]
        assert len(shards) == sum(d.process_index == jax.process_index() for d in mesh.devices.flat), path
        assert all(shard.shape == leaf.shape and shard.tobytes() == shards[0].tobytes() for shard in shards), path


@contextmanager
def refuses(error, *words):
    """The block raises ``error`` with all ``words``."""
    with pytest.raises(error) as raised:
        yield
    for word in words:
        assert word in str(raised.value), raised.value


def batch_of(seed, n=24):
    return np.random.default_rng(seed).standard_normal((n, 33)).astype(np.float32)


def addresses(tree):
    return [
        s.data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree) if leaf.size for s in leaf.addressable_shards
    ]


def published_bytes(offloaded):
    """Return the bytes that this process's ranks send to publish all buckets once."""
    device = offloaded._core.device
    shards = [w.layout.shard_numel * w.layout.dtype.itemsize for w in offloaded._core._pipeline.buckets.all]
    return len(device.ranks) * (device.world_size - 1) * sum(shards)
