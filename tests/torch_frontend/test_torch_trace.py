"""Traces of torch engines: forward, backward and step beside what the buckets do."""

import pytest
import torch
from torch import nn

from frontends.torch import wrap
from offload_core.device.trace import COMPUTE, TO_DEVICE, TO_HOST, UPDATE
from tests.support.torch_models import place
from tests.support.traces import ends, read


def nested(spans, inner, outer):
    return all(
        any(o["ts"] <= i["ts"] and i["ts"] + i["dur"] <= o["ts"] + o["dur"] + 1e-2 for o in outer) for i in inner
    )


@pytest.mark.states_on_host
@pytest.mark.parametrize("device", ["late", "simulated, delays 0"], indirect=True)
def test_an_engine_shows_forward_backward_and_step(device, tmp_path):
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3))).to(place())
    engine = wrap(model, param_dtype="bfloat16", reduce_bucket_size=64, gradient_clipping=1.0)

    def step():
        engine.backward(engine(torch.ones(2, 8, device=place())).sum())
        engine.step()

    step()
    with engine.trace(str(tmp_path / "step.json")):
        step()
        step()
    step()
    spans = read(tmp_path / "step.json")
    compute = [s for s in spans if s["cat"] == COMPUTE]
    calls = [s for s in compute if s["name"] in ("forward", "backward", "step")]
    assert [s["name"] for s in calls] == ["forward", "backward", "step"] * 2
    waits = [s for s in compute if s["name"].endswith("wait")]
    in_forward = [s for s in waits if nested(spans, [s], [c for c in calls if c["name"] == "forward"])]
    # the second forward reads one layer after the other
    assert list(dict.fromkeys(s["args"]["bucket"] for s in in_forward)) == [2, 1, 0]
    moved = [s for s in spans if s["cat"] in (TO_HOST, TO_DEVICE)]
    assert [s["args"]["bytes"] for s in moved] == [2 * 64] * (2 * 2 * 3)
    assert not engine._forward_hooks
    assert not engine._forward_pre_hooks


@pytest.mark.states_in_memory
@pytest.mark.parametrize("device", ["simulated, delays 0"], indirect=True)
def test_parameters_that_stream_from_the_host_show_their_gradients_and_updates(device, tmp_path):
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3))).to(place())
    options = {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 0, "prefetch_bucket_size": 0}
    engine = wrap(model, reduce_bucket_size=64, max_live_parameters=64, **options)
    with engine.trace(tmp_path / "step.json"):
        engine.backward(engine(torch.ones(2, 8, device=place())).sum())
        engine.step()
    spans = read(tmp_path / "step.json")
    for bucket in range(3):
        assert ends(spans, bucket) == [(TO_HOST, ""), (UPDATE, "")]  # the device alone waits for what is gathered


def test_a_forward_that_fails_is_in_the_trace_and_leaves_no_hook(tmp_path):
    engine = wrap(torch.nn.Linear(4, 4))
    with engine.trace(tmp_path / "step.json"):
        with pytest.raises(RuntimeError):
            engine(torch.ones(3, 5))
        engine.backward(engine(torch.ones(3, 4)).sum())
        engine.step()
    assert [s["name"] for s in read(tmp_path / "step.json") if s["cat"] == COMPUTE] == [
        "forward", "forward", "backward", "step",
    ]  # fmt: skip
    assert not engine._forward_hooks


def test_a_compiled_engine_can_be_traced(tmp_path):
    torch._dynamo.reset()
    engine = wrap(torch.nn.Linear(4, 4))
    forward = torch.compile(engine, backend="eager")
    for _ in range(2):
        with engine.trace(tmp_path / "step.json"):
            engine.backward(forward(torch.ones(3, 4)).sum())
            engine.step()
        names = [s["name"] for s in read(tmp_path / "step.json") if s["cat"] == COMPUTE]
        assert names[-2:] == ["backward", "step"]
    engine.backward(forward(torch.ones(3, 4)).sum())
    assert engine.step().updated
