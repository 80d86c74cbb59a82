"""Gradients that leave for host memory while backward runs, parameters that come from there, and parameters that are
written over.

CPU devices have ``pinned_host`` memory, too, and stand for devices with memory of their own.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from frontends.jax import gather_params, gathered, wrap
from frontends.jax.placement import functions, placement
from frontends.jax.training.differentiate import differentiated
from frontends.jax.tree import memory_kinds
from frontends.jax.tree.trees import Static
from offload_core.errors import ConfigError, ParameterError
from tests.support.jax_models import assert_same_tree

LAYERS, WIDTH = 3, 4
TOKENS = jnp.arange(8)


def stacked(seed=0):
    rng = np.random.default_rng(seed)
    of = {"emb": (16, WIDTH), "layers": {"w": (LAYERS, WIDTH, WIDTH), "b": (LAYERS, WIDTH)}}
    return jax.tree.map(lambda shape: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16), of, is_leaf=_is_shape)


def _is_shape(node):
    return isinstance(node, tuple)


def block(layer, x):
    return jnp.tanh(x @ layer["w"] + layer["b"])


def plain(params, tokens):
    x, _ = jax.lax.scan(lambda x, layer: (block(layer, x), None), params["emb"][tokens], params["layers"])
    return jnp.mean(x.astype(jnp.float32) ** 2)


def gathering(params, tokens):
    x = gather_params(params["emb"])[tokens]
    x, _ = jax.lax.scan(lambda x, layer: (gathered(block)(layer, x), None), x, params["layers"])
    return jnp.mean(x.astype(jnp.float32) ** 2)


@pytest.fixture
def on_accelerator(monkeypatch):
    monkeypatch.setattr(placement, "on_cpu", lambda array: False)


def kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


def trained(params, tokens, loss, of_grad, **fields):
    """Return the losses and parameters of two steps, and the memory kinds of gradients and parameters."""
    offloaded = wrap(params, lr=1e-2, gradient_clipping=1.0, reduce_bucket_size=64, **fields)
    grad_fn = offloaded.value_and_grad(loss, **of_grad)
    losses = []
    for _ in range(2):
        value, grads = grad_fn(offloaded.params, tokens)
        losses.append(value)
        where = kinds(grads), kinds(offloaded.params)
        offloaded.update(grads, donate=True)
    return losses, jax.tree.map(np.asarray, offloaded.params), where


WAYS = {
    "at the end of a scan": (plain, {}, {}, ({"pinned_host"}, {"device"})),
    "in the scan": (gathering, {"gathers": True}, {}, ({"pinned_host"}, {"device"})),
    "not": (plain, {"keep_gradients": True}, {}, ({"device"}, {"device"})),
    "parameters, too": (gathering, {}, {"offload_param": "cpu"}, ({"pinned_host"}, {"pinned_host"})),
}


@pytest.mark.draws(2)
@pytest.mark.parametrize(("loss", "of_grad", "fields", "where"), WAYS.values(), ids=WAYS)
def test_gradients_leave_and_the_bits_stay(loss, of_grad, fields, where, on_accelerator):
    expected = trained(stacked(), TOKENS, plain, {"keep_gradients": True})
    got = trained(stacked(), TOKENS, loss, of_grad, **fields)
    assert got[2] == where
    assert_same_tree(got[:2], expected[:2])


@pytest.mark.draws(1)
@pytest.mark.parametrize("fields", [{}, {"offload_param": "cpu"}], ids=["parameters on devices", "on the host"])
def test_shards_of_a_mesh_leave_from_each_device(fields, on_accelerator):
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    spec = PartitionSpec
    specs = {"emb": spec(("data", "tensor")), "layers": {"w": spec(None, "data", "tensor"), "b": spec()}}

    def place(array, spec):
        return jax.device_put(array, NamedSharding(mesh, spec))

    params, tokens = jax.tree.map(place, stacked(), specs), place(TOKENS, spec("data"))
    expected = trained(params, tokens, gathering, {"keep_gradients": True, "gathers": True})
    got = trained(params, tokens, gathering, {"gathers": True}, **fields)
    # A replica's gradient stays: else each device would copy its own.
    assert got[2] == (({"pinned_host"}, {"pinned_host"}) if fields else ({"pinned_host", "device"}, {"device"}))
    assert_same_tree(got[:2], expected[:2])


def test_a_scan_that_gathers_copies_each_layer_in_its_body(on_accelerator):
    """And each copy from the host waits for the layer before: else XLA brings all parameters at once."""
    offloaded = wrap(stacked(), lr=1e-2, offload_param="cpu")
    grad_fn = offloaded.value_and_grad(gathering)
    in_a_jit_of_the_users = jax.make_jaxpr(lambda params, x: grad_fn(params, x))(offloaded.params, TOKENS)
    assert "optimization_barrier" in str(in_a_jit_of_the_users)
    leaves, treedef = jax.tree.flatten(offloaded.params)
    static, arrays = Static.split(treedef, [None] * len(leaves))
    program = functions.gathering(differentiated(gathering, range(len(leaves)), has_aux=False), [True] * len(leaves))
    traced = jax.make_jaxpr(lambda leaves, x: program(leaves, arrays, static, None, (x,), {}))(leaves, TOKENS)
    copies = []

    def search(jaxpr, inside):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "device_put":
                copies.append((inside, str(equation.params["devices"][0])))
            for value in equation.params.values():
                for inner in jax.tree.leaves(value, is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")):
                    of = getattr(inner, "jaxpr", inner)
                    if hasattr(of, "eqns"):
                        search(of, inside or equation.primitive.name == "scan")

    search(traced.jaxpr, False)
    in_scans = [to for inside, to in copies if inside]
    assert in_scans.count("MemorySpace.Host") == 2  # the gradients of w and b
    assert in_scans.count("MemorySpace.Device") == 4  # w and b, forward and again in backward


def test_a_model_that_does_not_gather_gets_one_error(on_accelerator):
    offloaded = wrap(stacked(), lr=1e-2, offload_param="cpu")
    with pytest.raises(
        ConfigError, match="keep_gradients=True with offload_param='cpu'.* expected keep_gradients=False"
    ):
        offloaded.value_and_grad(gathering, keep_gradients=True)
    with pytest.raises(ParameterError, match=r"is to be gathered was indexed; expected it to be gathered first"):
        offloaded.value_and_grad(plain)(offloaded.params, TOKENS)


@pytest.mark.parametrize("fields", [{}, {"offload_param": "cpu"}], ids=["parameters on the device", "on the host"])
def test_a_loop_or_a_branch_that_takes_a_parameter_from_outside_gets_one_error(fields, on_accelerator):
    offloaded = wrap({"w": jnp.eye(WIDTH)}, lr=1e-2, **fields)
    product = gathered(lambda params, x: x @ params["w"])

    def looping(params, x):
        return jax.lax.map(lambda row: product(params, row), x).sum()

    def branching(params, x):
        return jax.lax.cond(x.sum() > 0, lambda x: product(params, x), lambda x: x, x).sum()

    for loss in (looping, branching):
        with pytest.raises(ParameterError, match=r"from outside.*expected gather_params\(params\) before that"):
            offloaded.value_and_grad(loss, gathers=True)(offloaded.params, jnp.ones((2, WIDTH)))

        def gathered_before(params, x, loss=loss):
            return loss(gather_params(params), x)

        grad_fn = offloaded.value_and_grad(gathered_before, gathers=True)
        assert grad_fn(offloaded.params, jnp.ones((2, WIDTH)))[0] == 2 * WIDTH


def test_devices_without_host_memory_are_refused_and_keep_gradients(on_accelerator, monkeypatch):
    monkeypatch.setattr(memory_kinds, "HOST_MEMORY", "far_host")
    with pytest.raises(
        ConfigError, match=r"offload_param='cpu': the cpu backend has the memory kinds .* no 'far_host'"
    ):
        wrap(stacked(), lr=1e-2, offload_param="cpu")
    _, _, where = trained(stacked(), TOKENS, plain, {})
    assert where == ({"device"}, {"device"})


@pytest.mark.draws(1)
@pytest.mark.parametrize("fields", [{}, {"offload_param": "cpu"}], ids=["parameters on the device", "on the host"])
def test_scaled_losses_aux_and_frozen_leaves_are_as_without(fields, on_accelerator):
    params = {**jax.tree.map(lambda leaf: leaf.astype(jnp.float16), stacked()), "frozen": jnp.ones(WIDTH)}

    def loss(params, tokens):
        return gathering(params, tokens) * params["frozen"].sum(), {"tokens": tokens.sum()}

    def run(of_grad, **fields):
        fields |= {"initial_loss_scale": 256.0, "trainable": {"emb": True, "layers": True, "frozen": False}}
        offloaded = wrap(params, lr=1e-2, **fields)
        (value, aux), grads = offloaded.value_and_grad(loss, has_aux=True, **of_grad)(offloaded.params, TOKENS)
        assert grads.scale == 256
        assert kinds(grads.tree) == ({"device"} if of_grad.get("keep_gradients") else {"pinned_host"})
        return value, aux, offloaded.update(grads)

    assert_same_tree(run({"gathers": True}, **fields), run({"keep_gradients": True, "gathers": True}))


def test_parameters_that_were_given_away_are_named(on_accelerator):
    offloaded = wrap(stacked(), lr=1e-2)
    before, grad_fn = offloaded.params, offloaded.value_and_grad(plain)
    _, grads = grad_fn(before, TOKENS)
    offloaded.update(grads, donate_params=True)
    with pytest.raises(
        ParameterError, match=r"params\['emb'\] was donated or deleted; expected offloaded.params, read"
    ):
        grad_fn(before, TOKENS)


# --- parameters that are written over ---------------------------------------------------------------------------


@pytest.mark.draws(1)
@pytest.mark.parametrize("where", ["host", "device", "mesh", "stage 3"])
def test_parameters_that_are_written_over_have_the_bits_of_new_ones(where, monkeypatch):
    fields = {"mesh": jax.make_mesh((2,), ("dp",))} if where in ("mesh", "stage 3") else {}
    fields |= {"stage": 3, "param_persistence_threshold": 0} if where == "stage 3" else {}
    if where == "device":
        monkeypatch.setattr(placement, "on_cpu", lambda array: False)
    offloaded, twin = (wrap(stacked(), lr=1e-2, reduce_bucket_size=32, skip_nonfinite=True, **fields) for _ in range(2))
    for i in range(3):
        before, grads = offloaded.params, stacked(i + 1)
        grads["layers"]["b"] = None
        if i == 1:
            grads["emb"] = grads["emb"].at[0, 0].set(jnp.inf)  # this update is skipped
        assert_same_tree(offloaded.update(grads, donate_params=True), twin.update(grads))
        deleted = [before["emb"].is_deleted(), before["layers"]["w"].is_deleted(), before["layers"]["b"].is_deleted()]
        assert deleted == [i != 1, i != 1, False]
    offloaded.params["emb"].delete()  # as an update that broke off may leave it
    assert_same_tree(offloaded.load_pytree(twin.to_pytree()), twin.params)


def test_a_deleted_parameter_is_never_zeros(on_accelerator, tmp_path):
    """Of an array on several devices an update that wrote nothing to it once left zeros."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    place = NamedSharding(mesh, PartitionSpec("x"))
    params = {name: jax.device_put(jnp.ones(8), place) for name in "ab"}
    offloaded = wrap(params, lr=1e-2)
    offloaded.save_checkpoint(tmp_path)
    params["a"].delete()
    offloaded.update({"a": None, "b": params["b"]})
    assert offloaded.params["a"].is_deleted()
    offloaded.load_checkpoint(tmp_path)
    assert_same_tree(offloaded.params, dict.fromkeys("ab", jnp.ones(8)))


@pytest.mark.parametrize("where", ["device", "in host memory", "mesh", "no host memory"])
def test_an_array_that_is_several_leaves_may_be_given_away(where, on_accelerator, monkeypatch):
    fields = {"mesh": {"mesh": jax.make_mesh((2,), ("dp",))}, "in host memory": {"offload_param": "cpu"}}.get(where, {})
    if where == "no host memory":
        monkeypatch.setattr(memory_kinds, "HOST_MEMORY", "far_host")
    monkeypatch.setattr(memory_kinds, "on_cpu", lambda array: False)
    array, chosen = jnp.ones((8, 8)), {"a": True, "b": True, "c": True, "frozen": False}
    offloaded = wrap(dict.fromkeys(chosen, array), lr=1e-2, trainable=chosen, reduce_bucket_size=32, **fields)
    twin = wrap(dict.fromkeys(chosen, jnp.ones((8, 8))), lr=1e-2, trainable=chosen, reduce_bucket_size=32, **fields)
    for seed in range(2):
        gradient = jax.random.normal(jax.random.key(seed), (8, 8))
        grads = {"a": gradient, "b": gradient, "c": None, "frozen": None}
        expected = twin.update(grads)
        assert_same_tree(offloaded.update(grads, donate=True, donate_params=True), expected)
        assert gradient.is_deleted()
    offloaded.release(donate=True)
    assert_same_tree(offloaded.restore(), expected)
