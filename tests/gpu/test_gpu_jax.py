"""Tests of JAX on a GPU. No process has torch's CUDA and JAX's at once (bench/on_gpu.sh)."""

import jax
import numpy as np
import pytest

from frontends.jax import wrap

pytestmark = pytest.mark.gpu


def test_jax_parameters_on_the_device_get_the_bits_that_the_host_gets():
    if not any(d.platform == "gpu" for d in jax.devices()):
        pytest.skip("JAX sees no GPU")
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
