"""Failures of a device, lasting or not: one clear error, and states and parameters of one step."""

import gc
from contextlib import contextmanager

import pytest
import torch

from frontends.torch import wrap
from offload_core import ParameterError
from tests.support import simulated
from tests.support.phases import drained
from tests.support.torch_models import assert_all_same, everything, loss_of, make, step

pytestmark = pytest.mark.parametrize("device", ["simulated, delays 0"], indirect=True)

STREAMED = {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 0}
SETTINGS = [
    {},
    {"param_dtype": "bfloat16", "reduce_bucket_size": 500},
    {"gradient_clipping": 0.05, "reduce_bucket_size": 500},
    {"schedule": "serial", "param_dtype": "bfloat16", "reduce_bucket_size": 500},
    {**STREAMED, "reduce_bucket_size": 500},
]


def run(seeds, fields):
    engine = wrap(make(), lr=1e-2, **fields)
    for seed in seeds:
        step(engine, seed)
    return engine


def full(spare):
    """A device that has so many bytes left."""
    torch.accelerator.synchronize()
    gc.collect()
    torch.accelerator.empty_cache()
    return simulated.capacity(torch.accelerator.memory_reserved() + spare)


def assert_goes_on_from(before, engine, fields):
    """The third step is as if the one that failed had not been."""
    engine.zero_grad()
    assert_all_same(everything(engine), before)
    step(engine, 2)
    assert_all_same(everything(engine), everything(run(range(3), fields)))


@pytest.mark.draws(2)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("fields", SETTINGS, ids=str)
def test_a_device_without_memory_for_a_forward_or_backward_leaves_the_step_before(where, fields, device):
    engine = run(range(2), fields)
    before = everything(engine)
    parts = [lambda loss: loss_of(engine, 7), engine.backward]
    loss = parts.pop(0)(None) if where == "backward" else None
    with full(2048), pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        parts[0](loss)
    del loss
    assert_goes_on_from(before, engine, fields)


@pytest.mark.states_on_host
@pytest.mark.draws(1)
@pytest.mark.parametrize("fields", SETTINGS, ids=str)
def test_a_copy_to_the_host_that_fails_is_an_error_of_the_step_and_of_no_other(fields, device):
    engine = run(range(2), fields)
    before = everything(engine)
    loss = loss_of(engine, 7)
    torch.accelerator.synchronize()
    simulated.fail_copy(1)

    def end_step():
        engine.backward(loss)
        engine.step()

    with pytest.raises(RuntimeError, match="the copy failed, as asked"):
        end_step()
    drained()
    assert_goes_on_from(before, engine, fields)


@contextmanager
def a_copy_that_fails():
    simulated.fail_copy(1)
    with pytest.raises(RuntimeError, match="the copy failed, as asked"):
        yield
    drained()


@contextmanager
def no_memory():
    with full(0), pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        yield


@pytest.mark.states_on_host
@pytest.mark.draws(2)
@pytest.mark.parametrize("failure", [a_copy_that_fails, no_memory])
@pytest.mark.parametrize("fields", SETTINGS[:4], ids=str)
def test_parameters_that_do_not_come_back_are_those_of_the_step_once_they_can(fields, failure, device):
    engine = run(range(2), fields)
    engine.flush()
    engine.backward(loss_of(engine, 2))
    engine.optimizer.core._pipeline.buckets.run(lambda: None)  # the gradients have left
    with failure():
        engine.step()
        engine.flush()
    engine.zero_grad()  # and the next forward reads what the step has made
    step(engine, 3)
    assert_all_same(everything(engine), everything(run(range(4), fields)))


def test_parameters_that_are_gathered_from_the_host_in_a_copy_that_fails_are_used_by_no_update(device):
    engine = run(range(2), STREAMED)
    before = everything(engine)
    torch.accelerator.synchronize()
    simulated.fail_copy(2)  # the batch is the first
    with pytest.raises(RuntimeError, match="the copy failed, as asked"):
        step(engine, 7)
    drained()
    assert_goes_on_from(before, engine, STREAMED)


def test_an_engine_has_one_device_and_a_process_may_have_several(device):
    model = make()
    model[2].to(f"{device}:1")
    before = [p.detach().cpu().clone() for p in model.parameters()]
    with pytest.raises(ParameterError, match=r"'2.weight' is on simulated:1, others are on simulated:0; expected one"):
        wrap(model, param_dtype="bfloat16")
    assert_all_same([p.detach().cpu() for p in model.parameters()], before)
    engines = [wrap(make(device=f"{device}:{n}"), lr=1e-2, reduce_bucket_size=500) for n in range(2)]
    for seed in range(4):
        for engine in engines:
            step(engine, seed)
    assert_all_same(*map(everything, engines))


def test_an_accelerator_without_streams_is_refused_by_name(device, monkeypatch):
    model = make()

    def none(*arguments, **options):
        raise NotImplementedError("Backend doesn't support create stream")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "Stream", none)
        with pytest.raises(ParameterError, match=r"on simulated:0, where torch could make no stream \(Backend doesn't"):
            wrap(model, param_dtype="bfloat16")
    assert model[0].weight.dtype == torch.float32
    assert step(wrap(model), 0).updated
