"""Master weights whose upper halves are the parameters on the host, against whole ones: every bit, whoever writes."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from frontends.torch import gathered_parameters, wrap
from offload_core.errors import StateError
from tests.support.format_runs import assert_equal, go_on, model, result, trained
from tests.support.strategies import law
from tests.support.torch_models import place

ON_HOST = {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 0}
SIZE = 37
TIE = 0x8000


everywhere = pytest.mark.usefixtures("device")


class Weight(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(SIZE, dtype=torch.bfloat16, device=place()))

    def forward(self, x):
        return self.weight @ x


halves = st.integers(0, 2**16 - 1)
special = st.sampled_from([0x0000, 0x8000, 0x0001, 0x7F7F, 0x7F80, 0xFF80, 0x7FC0, 0x3F80, 0x0080])
uppers = st.lists(halves | special, min_size=SIZE, max_size=SIZE)
lowers = st.lists(halves | st.sampled_from([0, TIE - 1, TIE, TIE + 1, 0xFFFF]), min_size=SIZE, max_size=SIZE)
gradients = st.lists(
    st.floats(width=32) | st.sampled_from([0.0, 1.0, float("inf"), float("nan"), 1e-40]), min_size=SIZE, max_size=SIZE
)
masks = st.lists(st.booleans(), min_size=SIZE, max_size=SIZE)
actions = st.one_of(
    st.tuples(st.just("step"), gradients),
    st.tuples(st.just("write"), uppers, masks),
    st.tuples(st.just("load states"), uppers, lowers),
    st.tuples(st.just("load master"), uppers, lowers),
    st.tuples(st.just("reset")),
)


def bfloat16(upper):
    return torch.from_numpy(np.array(upper, np.uint16).view(np.int16)).view(torch.bfloat16)


def float32(upper, lower):
    """NaNs have the bits that NaNs have here after any arithmetic."""
    bits = np.array(upper, np.uint32) << 16 | np.array(lower, np.uint32)
    values = torch.from_numpy(bits.view(np.int32)).view(torch.float32)
    return torch.where(values.isnan(), torch.tensor(float("nan")), values)


def act(engine, kind, *given):
    param, optimizer = engine.module.weight, engine.optimizer
    if kind == "step":
        engine.backward(engine(torch.tensor(*given, device=place())))
        engine.step()
    elif kind == "write":
        values, mask = bfloat16(given[0]).to(place()), torch.tensor(given[1], device=place())
        with gathered_parameters([param], modifier_rank=0), torch.no_grad():
            param.copy_(torch.where(mask, values, param))
    elif kind == "load states":
        saved = copy.deepcopy(optimizer.state_dict())
        saved["state"][0]["master"] = float32(*given)
        optimizer.load_state_dict(saved)
    elif kind == "load master":
        optimizer.load_master(param, float32(*given))
    else:
        del optimizer.state[param]


def bits(engine):
    found = {name: value.clone() for name, value in engine.optimizer.whole_states(engine.module.weight).items()}
    with gathered_parameters([engine.module.weight]):
        found["parameter"] = engine.module.weight.detach().cpu().clone()
    return {
        name: torch.where(v.isnan(), torch.nan, v).view(torch.int16 if v.dtype == torch.bfloat16 else torch.int32)
        for name, v in found.items()
    }


@pytest.mark.draws(1)
@everywhere
@law(30)
@given(uppers, lowers, st.lists(actions, min_size=1, max_size=6))
def test_whoever_writes_no_bit_is_another_than_with_whole_masters(upper, lower, history):
    split, whole = (wrap(Weight(), lr=0.1, param_dtype="bfloat16", **fields) for fields in (ON_HOST, {}))
    assert "master" in whole.optimizer.state[whole.module.weight]
    for action in [("load master", upper, lower), *history]:
        for engine in (split, whole):
            act(engine, *action)
        assert_equal(bits(split), bits(whole))


@pytest.mark.draws(2)
@pytest.mark.parametrize("moments", [{}, {"state_format": "bf16"}, {"state_format": "8bit"}], ids=str)
@pytest.mark.parametrize("schedule", ["serial", "overlap", "delayed"])
def test_every_schedule_and_format_has_the_bits_of_whole_masters(schedule, moments):
    fields = {**moments, "schedule": schedule}
    split, whole = trained(**fields, **ON_HOST), trained(**fields)
    for engine in (split, whole):
        engine.optimizer.flush()
    assert_equal(result(split), result(whole))


def test_a_checkpoint_of_split_masters_is_one_of_whole_masters(tmp_path):
    split = trained(**ON_HOST)
    split.save_checkpoint(tmp_path / "a")
    whole = trained(steps=1)
    whole.load_checkpoint(tmp_path / "a")
    again = trained(steps=2, **ON_HOST)
    again.load_checkpoint(tmp_path / "a")
    for engine in (split, whole, again):
        go_on(engine, range(5, 8))
    assert_equal(result(whole), result(split))
    assert_equal(result(again), result(split))


def test_unfrozen_parameters_join_their_masters():
    engines = []
    for fields in (ON_HOST, {}):
        module = model()
        module[0].requires_grad_(False)
        engine = wrap(module, lr=1e-2, **fields)
        go_on(engine, range(2))
        module[0].requires_grad_(True)
        go_on(engine, range(2, 5))
        engines.append(engine)
    assert_equal(*map(result, engines))


def test_a_split_master_is_read_as_a_copy_and_its_parameter_follows_an_assignment():
    engine = trained(**ON_HOST)
    param = engine.module[0].weight
    state = engine.optimizer.state[param]
    read = state["master"]
    assert read.dtype == torch.float32
    with pytest.raises(StateError, match="what was read is a copy"):
        read.mul_(2)
    state["master"] = values = read * 2 + 1e-4
    assert torch.equal(state["master"], values)
    with gathered_parameters([param]):
        assert torch.equal(param, values.bfloat16())


@pytest.mark.states_in_memory
@everywhere
def test_masters_parameters_and_gradients_take_14_bytes_and_an_eighth(device):
    numel = 1 << 20
    layer = torch.nn.Linear(1 << 10, 1 << 10, bias=False, device=place()).bfloat16()
    engine = wrap(layer, **ON_HOST, reduce_bucket_size=1 << 16)
    rows = {row.what: row for row in engine.memory_report().rows if row.where == "host"}
    assert rows["master"].planned == rows["master"].held == numel * 17 // 8
    kept = [row for name, row in rows.items() if name not in ("staging", "parameters", "gathered parameters")]
    assert sum(row.held for row in kept) == (12.125 if device == "cpu" else 14.125) * numel
    assert sum(row.planned for row in kept) == sum(row.held for row in kept)


def test_loaded_masters_of_other_weights_leave_the_parameter_as_it_is():
    engines = trained(**ON_HOST), trained()
    saved = trained(steps=2).optimizer.state_dict()
    for engine in engines:
        engine.optimizer.load_state_dict(copy.deepcopy(saved))
    before = [p.detach().clone() for p in engines[1].module.parameters()]
    with gathered_parameters(engines[0].module.parameters()):
        assert all(torch.equal(p, q) for p, q in zip(engines[0].module.parameters(), before, strict=True))
    for engine in engines:
        go_on(engine, range(2))
    assert_equal(*map(result, engines))
