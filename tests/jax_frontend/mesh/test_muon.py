"""Muon on matrices that are cut over devices and processes: the bits of whole matrices on one device."""

from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from frontends.jax import wrap
from frontends.jax.placement import placement
from offload_core.errors import ConfigError
from tests.support.jax_meshes import arrays_of, assert_holds, assert_same_tree, processes, slow

SETTINGS = {"optimizer": "muon", "lr": 0.02, "reduce_bucket_size": 300, "gradient_clipping": 0.5}
SHAPES = {"embed": (20, 24), "up": (24, 48), "layers": {"w": (4, 16, 8), "bias": (4, 8)}, "head": (16, 8)}
tree_of = partial(arrays_of, SHAPES, scale=0.1)
CUTS = {
    "columns": {"up": P(None, "tp"), "w": P(None, None, "dp"), "embed": P("tp")},
    "rows and columns": {"up": P("dp", "tp"), "w": P(None, "tp", "dp")},
    "stacks": {"w": P("dp"), "up": P(("tp", "dp"))},
    "stacks and rows": {"w": P("dp", "tp")},
    "one part a process": {"up": P("dp"), "w": P(None, "dp")},
}
HOSTS, OWN = "the host's", "its own"


def placed(tree, mesh, specs):
    def put(path, value):
        sharding = NamedSharding(mesh, specs.get(path[-1].key, P()))
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    return jax.tree_util.tree_map_with_path(put, tree)


def trained(offloaded, n=2):
    for i in range(n):
        offloaded.update(tree_of(i))
    return offloaded.params


def on_one_device():
    with jax.default_device(jax.local_devices()[0]):
        return trained(wrap(tree_of(100), **SETTINGS))


@pytest.mark.long("XLA compiles the programs of each mesh and sharding")
@pytest.mark.draws(1)
@processes(1, 2)
@pytest.mark.parametrize(
    ("memory", "types", "specs"),
    [
        (HOSTS, AxisType.Auto, "rows and columns"),
        (HOSTS, AxisType.Explicit, "one part a process"),
        (OWN, AxisType.Auto, "columns"),
        (OWN, AxisType.Explicit, "stacks and rows"),
        slow(HOSTS, AxisType.Auto, "stacks"),
        slow(HOSTS, AxisType.Explicit, "columns"),
        slow(OWN, AxisType.Auto, "rows and columns"),
        slow(OWN, AxisType.Explicit, "one part a process"),
    ],
)
def test_matrices_that_are_cut_as_they_were_placed(memory, types, specs, monkeypatch):
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(types, types), devices=jax.devices()[:4])
    if memory == OWN:
        monkeypatch.setattr(placement, "on_cpu", lambda array: False)
    offloaded = wrap(placed(tree_of(100), mesh, CUTS[specs]), **SETTINGS)
    assert_holds(trained(offloaded), on_one_device())
    assert offloaded.sent_bytes > 0


@pytest.mark.long("XLA compiles the programs of each mesh and sharding")
@pytest.mark.draws(1)
@processes(1, 2)
@pytest.mark.parametrize(
    ("stage", "specs"), [(2, {}), (3, {}), (3, {"w": P("dp"), "up": P("dp")}), slow(3, {"w": P(None, "dp")})], ids=str
)
def test_matrices_on_a_mesh_axis_in_any_stage(stage, specs):
    mesh = jax.make_mesh((4,), ("dp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    fields = {"stage": stage, "param_persistence_threshold": 0} if stage == 3 else {"stage": stage}
    params = placed(tree_of(100), mesh, specs) if stage == 3 else tree_of(100)
    assert_holds(trained(wrap(params, mesh=mesh, **SETTINGS, **fields)), on_one_device())


@pytest.mark.long("XLA compiles the programs of a mesh and of one device")
@pytest.mark.draws(1)
@pytest.mark.parametrize("way", ["as placed", "stage 3"])
def test_states_of_cut_matrices_go_everywhere(way, tmp_path):
    """Through checkpoints, trees and optax, to one device and back."""
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), devices=jax.devices()[:4])
    line = jax.make_mesh((4,), ("dp",), devices=jax.devices()[:4])

    def cut(params):
        if way == "stage 3":
            return wrap(params, mesh=line, stage=3, param_persistence_threshold=0, **SETTINGS)
        return wrap(placed(params, mesh, CUTS["rows and columns"]), **SETTINGS)

    first = wrap(tree_of(100), **SETTINGS)
    trained(first, 2)
    resumed, from_optax = cut(tree_of(5)), cut(jax.tree.map(np.asarray, first.params))
    resumed.load_checkpoint(first.save_checkpoint(tmp_path / "one"))
    from_optax.load_optax_state(resumed.to_optax_state())
    back, loaded = wrap(tree_of(6), **SETTINGS), cut(tree_of(7))
    back.load_checkpoint(resumed.save_checkpoint(tmp_path / "cut"))
    loaded.load_pytree(resumed.to_pytree(sharded=True))
    expected = trained(first, 2)
    for each in (resumed, from_optax, back, loaded):
        assert_same_tree(trained(each, 2), expected)


def test_an_exchange_in_another_thread_is_refused():
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), devices=jax.devices()[:4])
    line = jax.make_mesh((4,), ("dp",), devices=jax.devices()[:4])
    for params, fields in (
        (placed(tree_of(100), mesh, {"up": P("dp")}), {}),
        (tree_of(100), {"mesh": line, "stage": 3, "param_persistence_threshold": 0}),
    ):
        with pytest.raises(ConfigError, match=r"'delayed' with optimizer='muon'.* expected schedule='overlap'"):
            wrap(params, **SETTINGS, **fields, schedule="delayed")
