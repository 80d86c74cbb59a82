"""Engines with states or parameters on disk leave no descriptor, no thread and no space behind when they are gone."""

import errno
import gc
import threading
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn

from frontends.jax import wrap as wrap_pytree
from frontends.torch import init, wrap
from offload_core.disk import scratch
from offload_core.errors import DiskError
from tests.support.held import await_end_on_disk, on_disk
from tests.support.late_stores import PARAMETERS_ON_DISK, STATES_ON_DISK

n_engines = pytest.mark.parametrize("n", [3, pytest.param(200, marks=pytest.mark.slow)])


def model():
    made = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    made[0].requires_grad_(False)
    return made


def trained(module, **fields):
    engine = wrap(module, **fields)
    engine.backward(engine(torch.ones(2, 8)).sum())
    engine.step()
    return engine


def built():
    with init(**PARAMETERS_ON_DISK):
        return model()


def interrupted():
    """An engine after a forward whose backward never comes."""
    engine = trained(model(), **PARAMETERS_ON_DISK)
    engine(torch.ones(2, 8)).sum()
    return engine


def pytree():
    params = {"w": jnp.ones((8, 8)), "b": jnp.zeros(8)}
    offloaded = wrap_pytree(params, lr=1e-2, **STATES_ON_DISK)
    offloaded.update(jax.tree.map(jnp.ones_like, params))
    return offloaded


MAKES = {
    "states": lambda: trained(model(), **STATES_ON_DISK),
    "parameters": lambda: trained(model(), **PARAMETERS_ON_DISK),
    "closed": lambda: trained(model(), **PARAMETERS_ON_DISK).close(),
    "built and not wrapped": built,
    "built and trained": lambda: trained(built(), **PARAMETERS_ON_DISK),
    "interrupted": interrupted,
    "jax": pytree,
}


@pytest.mark.draws(3)
@n_engines
@pytest.mark.parametrize("kind", MAKES)
def test_engines_that_are_gone_leave_no_descriptor_no_thread_and_no_space(kind, n):
    before = on_disk()
    for _ in range(n):
        made = MAKES[kind]()
        assert on_disk() - before or made is None
        del made
    await_end_on_disk(before)


def test_an_engine_in_a_cycle_that_another_thread_collects_is_closed_too():
    before = on_disk()
    cycle = [trained(model(), **PARAMETERS_ON_DISK)]
    cycle.append(cycle)
    del cycle
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()
    await_end_on_disk(before)


FILES = {"states": 1, "parameters": 3, "built and not wrapped": 4, "jax": 1}
"""How often each asks for space."""


@pytest.mark.draws(3)
@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("failing", range(3))
def test_an_engine_that_a_full_disk_refuses_leaves_nothing(kind, failing, monkeypatch):
    """``failing``: the request for space that is refused."""
    before, calls = on_disk(), []

    def full(descriptor, n_bytes):
        calls.append(n_bytes)
        if len(calls) > failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(descriptor, n_bytes)

    reserve = scratch.reserve
    monkeypatch.setattr(scratch, "reserve", full)
    with pytest.raises(DiskError, match="no room for") if failing < FILES[kind] else nullcontext():
        MAKES[kind]()
    assert min(failing + 1, FILES[kind]) <= len(calls) <= FILES[kind]
    await_end_on_disk(before)
