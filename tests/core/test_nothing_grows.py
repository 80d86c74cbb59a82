"""2,000 steps leave memory, threads and file descriptors as the first ones did."""

import gc
import threading
import time

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn

from frontends.jax import wrap as wrap_pytree
from frontends.torch import wrap
from frontends.torch.ranks import device_ranks
from tests.support.held import growth_of
from tests.support.processes import on_ranks
from tests.support.slow_torch_device import SlowTorchDevice

pytestmark = pytest.mark.slow

SLACK = 2**20
"""Bytes that allocators may round up: half a KiB a step is as much."""


def assert_little(growth):
    memory, *others = growth
    assert memory < SLACK
    assert max(others) <= 0  # threads of earlier tests may end meanwhile


def assert_nothing_grows(step):
    assert_little(growth_of(step))


def engine_step(**options):
    engine = wrap(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), reduce_bucket_size=50, **options)
    x = torch.ones(2, 8, dtype=engine.module[0].weight.dtype)

    def step():
        engine.backward(engine(x).sum())
        engine.step()

    step.engine = engine
    return step


@pytest.mark.parametrize("options", [{}, {"param_dtype": "bfloat16", "gradient_clipping": 1.0}], ids=str)
def test_in_place(options):
    assert_nothing_grows(engine_step(**options))


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2, "gradient_clipping": 1.0}], ids=str)
def test_behind_the_callers_back(monkeypatch, options):
    monkeypatch.setattr(device_ranks, "memory_of", lambda device: SlowTorchDevice(0.0))
    assert_nothing_grows(engine_step(param_dtype="bfloat16", **options))


def test_threads_end_with_their_engines(monkeypatch):
    slow = SlowTorchDevice(0.0)
    monkeypatch.setattr(device_ranks, "memory_of", lambda device: slow)
    before = working()
    for closed in (True, False) * 10:
        step = engine_step(param_dtype="bfloat16")
        step()
        assert working() - before
        if closed:
            step.engine.close()
        del step
    deadline = time.monotonic() + 30
    while working() - before and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert not working() - before


def working():
    return {thread for thread in threading.enumerate() if thread.name.startswith("offload")}


def test_jax():
    params = {"w": jnp.ones((8, 8), jnp.bfloat16), "b": jnp.zeros(8, jnp.bfloat16)}
    with jax.default_device(jax.devices("cpu")[0]):
        offloaded = wrap_pytree(params, lr=1e-2, reduce_bucket_size=50, gradient_clipping=1.0)
        gradients = jax.tree.map(jnp.ones_like, params)

        def step():
            offloaded.update(gradients)

        assert_nothing_grows(step)


@pytest.mark.parametrize("wait", [True, False])
def test_saves_of_a_tree(wait, tmp_path):
    """Copies of the parameters that stay would be 52 MB, and JAX's traces of a key's form, which once stayed, 2 MB."""
    params = {"w": jnp.ones((512, 256), jnp.bfloat16), "table": jnp.arange(9), "key": jax.random.key(0), "rate": 0.5}
    with jax.default_device(jax.devices("cpu")[0]):
        offloaded = wrap_pytree(params, lr=1e-2)
        gradients = {"w": jnp.ones_like(params["w"]), "table": None, "key": None, "rate": None}

        def step():
            offloaded.update(gradients)
            offloaded.save_checkpoint(tmp_path, extras={"table": jnp.arange(9)}, keep=2, wait=wait)

        step()
        offloaded.wait_for_checkpoint()
        n_arrays = len(jax.live_arrays())
        growth = growth_of(step, 200, warm_up=20)
        offloaded.wait_for_checkpoint()
        assert len(jax.live_arrays()) <= n_arrays
        assert_little(growth)


def test_two_ranks():
    @on_ranks(2, alone=True)
    def _(rank):
        assert_little(growth_of(engine_step(param_dtype="bfloat16"), 600))
