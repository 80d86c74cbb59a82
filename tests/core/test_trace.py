"""Traces: what is in the file, in which order, and nothing where nobody asked."""

from itertools import pairwise

import numpy as np
import pytest

from offload_core.config.options import OffloadConfig
from offload_core.device.host import HostDevice
from offload_core.device.host_ranks import HostRanks
from offload_core.device.trace import COMPUTE, GATHER, LANES, MATRICES, REDUCTION, TO_DEVICE, TO_HOST, UPDATE, Trace
from offload_core.dtypes import BFLOAT16
from offload_core.errors import StateError
from offload_core.layout.partition import ParamSpec
from offload_core.rules.adam import AdamHyper
from offload_core.step.decision import StepArguments
from offload_core.step.state_access import StateAccess
from offload_core.testing.fake_device import FakeDevice, FakeTensor
from offload_core.testing.thread_ranks import run_ranks
from tests.support.locking_pipeline import LockingEngine
from tests.support.traces import ends, read

N_BUCKETS, NUMEL = 3, 64


class Model:
    """A parameter a bucket."""

    def __init__(self, device, collectives=None, **fields):
        config = OffloadConfig(reduce_bucket_size=NUMEL, op_order="torch", **fields)
        self.put = FakeTensor if isinstance(device, FakeDevice) else np.copy
        self.engine = LockingEngine(config, HostRanks(device, collectives), None)
        self.pipeline = self.engine.pipeline
        ones = np.ones(NUMEL, BFLOAT16.numpy)
        self.tensors = [self.put(ones) for _ in range(N_BUCKETS)]
        self.gradients = [self.put(ones) for _ in range(N_BUCKETS)]
        self.pipeline.add_parameters([ParamSpec(f"p{i}", NUMEL, BFLOAT16) for i in range(N_BUCKETS)], self.tensors)

    def step(self):
        for param in range(N_BUCKETS):
            self.pipeline.parameters.await_param(param)
        for param in reversed(range(N_BUCKETS)):
            self.pipeline.gradients.add({param: self.gradients[param]})
        self.pipeline.gradients.end_micro_step()
        assert self.pipeline.step(StepArguments([AdamHyper(1e-2)], self.tensors)).updated


@pytest.mark.states_on_host
@pytest.mark.parametrize("schedule", ["overlap", "serial"])
def test_a_bucket_goes_its_way_through_the_lanes(tmp_path, schedule):
    device = FakeDevice(max_delay=1e-3)
    model = Model(device, schedule=schedule, gradient_clipping=1.0)
    model.step()
    with model.engine.trace(tmp_path / "step.json"):
        model.step()
    spans = read(tmp_path / "step.json")
    for bucket in range(N_BUCKETS):
        assert ends(spans, bucket) == [(TO_HOST, ""), (REDUCTION, "norm"), (UPDATE, ""), (TO_DEVICE, "")]
    assert {s["args"]["bytes"] for s in spans if s["cat"] in (TO_HOST, TO_DEVICE)} == {2 * NUMEL}
    last_norm = max(s["ts"] + s["dur"] for s in spans if s["cat"] == REDUCTION)
    assert all(s["ts"] >= last_norm for s in spans if s["cat"] == UPDATE)  # clipping: nothing before the boundary
    device.close()


@pytest.mark.states_on_host
@pytest.mark.parametrize("schedule", ["overlap", "serial"])
def test_a_lane_does_one_thing_at_a_time(tmp_path, schedule):
    device = FakeDevice(max_delay=1e-3)
    model = Model(device, schedule=schedule, gradient_clipping=1.0)
    with model.engine.trace(tmp_path / "steps.json"):
        for _ in range(3):
            model.step()
    spans = read(tmp_path / "steps.json")
    for lane in set(LANES) - {COMPUTE, MATRICES}:
        in_lane = sorted((s for s in spans if s["cat"] == lane), key=lambda s: s["ts"])
        assert len(in_lane) == (0 if lane == GATHER else 3 * N_BUCKETS)
        for one, other in pairwise(in_lane):
            assert one["ts"] + one["dur"] <= other["ts"] + 1e-2  # microseconds, as floats
    device.close()


def test_the_caller_is_seen_to_wait(tmp_path):
    device = FakeDevice(max_delay=1e-3)
    model = Model(device, gradient_clipping=1.0)
    model.step()
    with model.engine.trace(tmp_path / "step.json"):
        model.step()
        model.pipeline.parameters.await_param(0)
    names = [s["name"] for s in read(tmp_path / "step.json") if s["cat"] == COMPUTE]
    assert "bucket 2: wait" in names
    device.close()


@pytest.mark.parametrize("make_device", [HostDevice, FakeDevice])
def test_nothing_is_recorded_while_nobody_asks(tmp_path, monkeypatch, make_device):
    def unasked(self, span):
        raise AssertionError(span)

    model = Model(make_device(), gradient_clipping=1.0)
    trace = model.pipeline.device.trace
    with monkeypatch.context() as patch:
        patch.setattr(Trace, "record", unasked)
        model.step()
        model.pipeline.last_step.finish()
    assert trace.span(UPDATE) is trace.span(TO_HOST)  # nothing is made either
    with model.engine.trace(tmp_path / "step.json"):
        model.step()
    recorded = (tmp_path / "step.json").read_text()
    with monkeypatch.context() as patch:
        patch.setattr(Trace, "record", unasked)
        model.step()
        model.pipeline.last_step.finish()
    assert (tmp_path / "step.json").read_text() == recorded
    assert list(tmp_path.iterdir()) == [tmp_path / "step.json"]


@pytest.mark.states_on_host
@pytest.mark.draws(1)
@pytest.mark.parametrize("make_device", [HostDevice, FakeDevice])
@pytest.mark.parametrize("schedule", ["overlap", "serial"])
def test_each_rank_writes_a_file_of_its_own(tmp_path, schedule, make_device):
    def body(rank):
        model = Model(make_device(), rank, schedule=schedule, gradient_clipping=1.0)
        model.step()
        with model.engine.trace(tmp_path / "step.json"):
            model.step()

    run_ranks(4, body)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step.rank{r}.json" for r in range(4)]
    way = [(TO_HOST, ""), (REDUCTION, "exchange"), (REDUCTION, "sum"), (REDUCTION, "norm"),
           (UPDATE, ""), (GATHER, ""), (TO_DEVICE, "")]  # fmt: skip
    for rank in range(4):
        spans = read(tmp_path / f"step.rank{rank}.json")
        assert {s["pid"] for s in spans} == {rank}
        for bucket in range(N_BUCKETS):
            assert ends(spans, bucket) == way
        assert "norm of all ranks" in [s["name"] for s in spans]


def test_the_bits_are_those_of_an_unseen_run(tmp_path):
    models = [Model(FakeDevice(), gradient_clipping=1.0) for _ in range(2)]
    for _ in range(3):
        models[0].step()
        with models[1].engine.trace(tmp_path / "step.json"):
            models[1].step()
    for i in range(N_BUCKETS):
        (_, one), (_, other) = (StateAccess(model.pipeline).states(i)[0] for model in models)
        assert all(one[name].tobytes() == other[name].tobytes() for name in one)


@pytest.mark.states_on_host
def test_a_step_that_fails_leaves_its_trace_and_the_next_may_begin(tmp_path):
    device = FakeDevice(fail_at=frozenset({N_BUCKETS + 1}))  # masters are loaded by copies, too
    model = Model(device)
    with pytest.raises(OSError, match="failed as asked"), model.engine.trace(tmp_path / "failed.json"):
        model.step()
    assert (TO_HOST, "") in ends(read(tmp_path / "failed.json"), 0)
    model.pipeline.gradients.drop()
    with model.engine.trace(tmp_path / "step.json"):
        model.step()
    assert len([s for s in read(tmp_path / "step.json") if s["cat"] == UPDATE]) == N_BUCKETS
    device.close()


def test_one_trace_at_a_time_and_where_it_can_be_written(tmp_path):
    model = Model(HostDevice())
    with model.engine.trace(tmp_path / "one.json"):
        with pytest.raises(StateError, match="trace\\(\\) inside trace\\(\\)"), model.engine.trace(tmp_path / "two"):
            pass
        model.step()
    assert read(tmp_path / "one.json")
    with pytest.raises(FileNotFoundError), model.engine.trace(tmp_path / "no such folder" / "step.json"):
        pass
    assert not model.pipeline.device.trace.on


# --- front ends ----------------------------------------------------------------------------------------


def test_jax_parameters_show_their_calls(tmp_path):
    pytest.importorskip("jax")
    import jax.numpy as jnp

    from frontends.jax import wrap

    offloaded = wrap({"w": jnp.ones(4)}, gradient_clipping=1.0)
    grad_fn = offloaded.value_and_grad(lambda p, x: (p["w"] * x).sum())
    with offloaded.trace(tmp_path / "step.json"):
        for _ in range(2):
            offloaded.update(grad_fn(offloaded.params, jnp.ones(4))[1])
    spans = read(tmp_path / "step.json")
    assert [s["name"] for s in spans if s["cat"] == COMPUTE] == ["value_and_grad", "update"] * 2
    assert len([s for s in spans if s["cat"] == UPDATE]) == 2


def test_a_jax_mesh_shows_both_directions(tmp_path):
    pytest.importorskip("jax")
    import jax
    import jax.numpy as jnp

    from frontends.jax import wrap

    mesh = jax.make_mesh((1,), ("dp",))
    offloaded = wrap({"w": jnp.ones(4)}, gradient_clipping=1.0, mesh=mesh)
    with offloaded.trace(tmp_path / "step.json"):
        offloaded.update({"w": jnp.ones(4)})
    spans = read(tmp_path / "step.json")
    assert ends(spans, 0) == [(TO_HOST, ""), (REDUCTION, "norm"), (UPDATE, ""), (TO_DEVICE, "")]
