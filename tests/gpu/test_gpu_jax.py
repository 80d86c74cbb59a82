"""Tests of JAX on a GPU. No process has torch's CUDA and JAX's at once (bench/on_gpu.sh)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from frontends.jax import gather_params, gathered, wrap

pytestmark = pytest.mark.gpu


def test_jax_parameters_on_the_device_get_the_bits_that_the_host_gets():
    the_gpu()
    rng = np.random.default_rng(0)
    params = {"w": rng.standard_normal((64, 64)).astype(np.float32), "b": np.zeros(64, np.float32)}
    homes = [jax.devices("gpu")[0], jax.devices("cpu")[0]]
    both = [wrap(jax.device_put(params, d), lr=1e-2, gradient_clipping=0.5, param_dtype="bfloat16") for d in homes]
    for _ in range(10):
        grads = {k: (rng.standard_normal(v.shape) * 0.1).astype("bfloat16") for k, v in params.items()}
        for offloaded, device in zip(both, homes, strict=True):
            offloaded.update(jax.device_put(grads, device))
    for key in params:
        assert np.asarray(both[0].params[key]).tobytes() == np.asarray(both[1].params[key]).tobytes()
        assert both[0].params[key].devices() == {homes[0]}


LAYERS, WIDTH = 8, 1024


def stacked():
    rng = np.random.default_rng(0)
    draw = functools.partial(rng.standard_normal, dtype=np.float32)
    layers = {"up": 0.02 * draw((LAYERS, WIDTH, 4 * WIDTH)), "down": 0.02 * draw((LAYERS, 4 * WIDTH, WIDTH))}
    return {"embedding": 0.02 * draw((1024, WIDTH)), "layers": layers}


def apply_layer(layer, x):
    return x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]


def loss_of(params, tokens):
    run, embedding = gathered(apply_layer), gather_params(params["embedding"])
    x, _ = jax.lax.scan(lambda x, layer: (run(layer, x), None), embedding[tokens], params["layers"])
    logits = jax.nn.log_softmax((x @ embedding.T).astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], -1))


def peak_of_training(**fields):
    """Train three steps. Return the parameters, and the peak of the device's memory in bytes a parameter."""
    device = the_gpu()
    params = jax.device_put(stacked(), jax.devices("cpu")[0] if "offload_param" in fields else device)
    numel = sum(leaf.size for leaf in jax.tree.leaves(params))
    gathers = fields.pop("gathers", False)
    keep = fields.pop("keep_gradients", False)
    if "offload_param" in fields:
        host = SingleDeviceSharding(device, memory_kind="pinned_host")
        params = jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf), host), params)
    offloaded = wrap(params, lr=1e-3, param_dtype="bfloat16", gradient_clipping=1.0, **fields)
    del params
    grad_fn = offloaded.value_and_grad(loss_of, gathers=gathers, keep_gradients=keep)
    tokens = jax.device_put(np.random.default_rng(1).integers(1024, size=(1, 64), dtype=np.int32), device)
    before = device.memory_stats()["peak_bytes_in_use"]
    for _ in range(3):
        _, grads = grad_fn(offloaded.params, tokens)
        offloaded.update(grads, donate=True, donate_params=True)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(grads)}
    print(fields, kinds, "peak, bytes a parameter:", device.memory_stats()["peak_bytes_in_use"] / numel, before / numel)
    return offloaded, jax.tree.map(np.asarray, offloaded.params), kinds


def the_gpu():
    if not any(d.platform == "gpu" for d in jax.devices()):
        pytest.skip("JAX sees no GPU")
    return jax.devices("gpu")[0]


def test_gradients_and_parameters_in_host_memory_train_as_those_of_the_device():
    """The smallest peak first, because XLA's peak is that of the process. Read it with pytest -s. XLA may fuse each
    program in its own way, so that the bits of gradients may differ."""
    _, streamed, kinds = peak_of_training(offload_param="cpu")
    assert kinds == {"pinned_host"}
    _, layer_by_layer, kinds = peak_of_training(gathers=True)
    assert kinds == {"pinned_host"}
    _, leaving, _ = peak_of_training()
    _, stay, kinds = peak_of_training(keep_gradients=True, gathers=True)
    assert kinds == {"device"}
    for other in (streamed, layer_by_layer, leaving):
        for path, expected in jax.tree_util.tree_leaves_with_path(stay):
            got = functools.reduce(lambda tree, key: tree[key.key], path, other)
            np.testing.assert_allclose(
                got.astype(np.float32), expected.astype(np.float32), atol=1e-3, err_msg=str(path)
            )


def test_released_parameters_leave_the_device_and_come_back():
    offloaded, before, _ = peak_of_training()
    device = the_gpu()
    held = device.memory_stats()["bytes_in_use"]
    released = offloaded.release(donate=True)
    assert held - device.memory_stats()["bytes_in_use"] >= released > 0
    weights = dict(offloaded.named_weights())
    after = jax.tree.map(np.asarray, offloaded.restore())
    assert weights["embedding"].tobytes() == after["embedding"].tobytes() == before["embedding"].tobytes()
