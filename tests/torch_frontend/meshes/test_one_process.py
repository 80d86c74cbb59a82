"""DTensors on a mesh of one process: their gradients, writes from outside, readers and states."""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from frontends.torch import OffloadedAdamW, OffloadedSGD, wrap
from frontends.torch.params import pending
from frontends.torch.params.dtensor import is_dtensor, local_of
from offload_core.errors import ConfigError, GradientError, ParameterError, StateError
from tests.support import one_process_group


@pytest.fixture(autouse=True)
def mesh():
    with one_process_group.alone():
        yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))


def make(mesh, dtype=torch.float32, sharded=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).to(dtype)
    if sharded:
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def rows(seed, dtype=torch.float32):
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_bits(a, b):
    return torch.equal(local_of(a).detach().view(torch.uint8), local_of(b).detach().view(torch.uint8))


# --- gradients -----------------------------------------------------------------------------------------


def test_clipping_from_outside_keeps_its_meaning_where_gradients_stay(mesh):
    sharded, plain = make(mesh), make(mesh, sharded=False)
    optimizers = [OffloadedAdamW(model.parameters(), lr=1e-2) for model in (sharded, plain)]
    for model, optimizer in zip((sharded, plain), optimizers, strict=True):
        model(rows(0)).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    for p, q in zip(sharded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(local_of(p), q, rtol=1e-5, atol=0)


def test_clipping_from_outside_is_an_error_where_gradients_have_left(mesh):
    engine = wrap(make(mesh), lr=1e-2)
    engine.backward(engine(rows(0)).square().sum())
    with pytest.raises(GradientError, match=r"'0\.weight'.* on a gradient that has already left for the host"):
        nn.utils.clip_grad_norm_(engine.parameters(), 0.1)
    assert engine.step().updated


@pytest.mark.draws(1)
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("switch", ["set_requires_gradient_sync", "set_requires_all_reduce"])
def test_gradients_that_fsdp2_keeps_count_as_a_micro_step_and_join_the_next(mesh, switch, plain):
    if switch == "set_requires_all_reduce":
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("copies", "shards"))

    def backward(engine, seed):
        loss = engine(rows(seed)).square().sum()
        loss.backward() if plain else engine.backward(loss)

    kept, expected = (wrap(make(mesh), lr=1e-2, gradient_accumulation_steps=3) for _ in range(2))
    for seed in range(3):
        if seed < 2:
            getattr(kept.module, switch)(seed == 1)
        backward(kept, seed)
        assert kept.step().updated == (seed == 2)
        backward(expected, seed)
        expected.step()
        if seed == 0:
            with pytest.raises(StateError, match=r"step\(\) without backward\(\)"):
                kept.step()
    for p, q in zip(kept.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(local_of(p), local_of(q), rtol=1e-6, atol=0)


@pytest.mark.parametrize("early", [False, True])
def test_a_partial_gradient_is_summed_first(mesh, early):
    """As sequence parallelism leaves the gradients of norms."""
    param = nn.Parameter(distribute_tensor(torch.ones(16), mesh, [Replicate()]))
    optimizer = OffloadedSGD([param], lr=1.0, early_copy=early)
    x = DTensor.from_local(torch.arange(16.0).expand(4, 16).contiguous(), mesh, [Shard(0)])
    (x * param).sum().backward()
    if not early:
        assert param.grad.placements[0].is_partial()
    optimizer.step()
    assert local_of(param).tolist() == (1 - 4 * torch.arange(16.0)).tolist()


@pytest.mark.parametrize("early", [False, True])
def test_several_backwards_add_up(mesh, early):
    sharded, plain = make(mesh), make(mesh, sharded=False)
    for model in (sharded, plain):
        optimizer = OffloadedAdamW(model.parameters(), lr=1e-2, early_copy=early)
        for seed in range(3):
            model(rows(seed)).square().sum().backward()
        optimizer.step()
    for p, q in zip(sharded.parameters(), plain.parameters(), strict=True):
        assert same_bits(p, q)


def test_micro_steps_whose_gradients_fsdp2_keeps_count(mesh):
    kept, given = make(mesh), make(mesh)
    for model in (kept, given):
        engine, reports = wrap(model, lr=1e-2, gradient_accumulation_steps=2), []
        for seed in range(4):
            with engine.no_sync() if model is kept and seed % 2 == 0 else nullcontext():
                engine.backward(engine(rows(seed)).square().sum())
                reports.append(engine.step().skipped)
        assert reports == ["accumulating", None] * 2
        with pytest.raises(StateError, match=r"step\(\) without backward\(\)"), engine.no_sync():
            engine.step()
        engine.flush()
    for p, q in zip(kept.parameters(), given.parameters(), strict=True):
        assert same_bits(p, q)


def test_a_gradient_that_is_set_to_none_is_dropped(mesh):
    model = make(mesh)
    before = copy.deepcopy([local_of(p) for p in model.parameters()])
    optimizer = OffloadedAdamW(model.parameters(), lr=1e-2, early_copy=True)
    model(rows(0)).square().sum().backward()
    for param in model.parameters():
        assert is_dtensor(param.grad)
        param.grad = None
    optimizer.step()
    assert all(torch.equal(local_of(p), q) for p, q in zip(model.parameters(), before, strict=True))


# --- writes from outside -------------------------------------------------------------------------------

WRITES = {
    "the parameter": lambda p: p.copy_(torch.full_like(p, 0.5)),
    "its data": lambda p: p.data.copy_(torch.full_like(p, 0.5)),
    "its local tensor": lambda p: p._local_tensor.fill_(0.5),
    "to_local()": lambda p: p.to_local().fill_(0.5),
}


@pytest.mark.draws(1)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_a_write_from_outside_is_in_the_next_update(mesh, write):
    """In bf16 each parameter has a master weight, which the write must reach."""
    model = make(mesh, torch.bfloat16)
    optimizer = OffloadedAdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for seed in range(2):
        model(rows(seed, torch.bfloat16)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for param in model.parameters():
                write(param)
    model(rows(2, torch.bfloat16)).square().sum().backward()
    optimizer.step()
    for param in model.parameters():
        assert (local_of(param) == 0.5).all()
        assert (local_of(optimizer.state[param]["master"]) == 0.5).all()


def test_a_state_dict_that_is_loaded_into_the_model_is_in_the_next_update(mesh):
    model, other = make(mesh, torch.bfloat16), make(mesh, torch.bfloat16)
    optimizer = OffloadedAdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(3)
    model.load_state_dict(other.state_dict())
    model(rows(0, torch.bfloat16)).square().sum().backward()
    optimizer.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert same_bits(p, q)


# --- readers -------------------------------------------------------------------------------------------


def test_a_placed_parameter_can_wait_and_its_first_read_waits(mesh):
    param, waited = nn.Parameter(distribute_tensor(torch.ones(16), mesh, [Shard(0)])), []
    assert pending.can_wait(param)
    pending.update(param, lambda _: waited.append(1))
    assert is_dtensor(param)
    assert isinstance(param, nn.Parameter)
    assert (param.shape, param.dtype, param.grad) == ((16,), torch.float32, None)
    assert not waited
    param.add(1)
    assert waited == [1]
    assert type(param) is DTensor
    param.add(1)
    assert waited == [1]


READS = {
    "to_local()": lambda p: p.to_local(),
    "full_tensor()": lambda p: p.full_tensor(),
    "redistribute()": lambda p: p.redistribute(placements=[Replicate()]),
    "its local tensor": lambda p: p._local_tensor,
    "its data": lambda p: p.data + 0,
    "a function": lambda p: torch.sum(p),
    "a state dict": lambda p: nn.ParameterList([p]).state_dict()["0"] + 0,
}


@pytest.mark.draws(3)
@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_each_way_to_read_a_placed_parameter_waits(mesh, read, in_graph):
    param, waited = nn.Parameter(distribute_tensor(torch.ones(16), mesh, [Shard(0)])), []
    pending.update(param, lambda _: waited.append(1))
    with torch.set_grad_enabled(in_graph):
        read(param)
    assert waited == [1]
    pending.update(param, lambda _: waited.append(2))
    param._local_tensor = torch.zeros(16)
    assert (waited, local_of(param).sum()) == ([1, 2], 0)


@pytest.mark.parametrize("how", ["forward", "unshard", "prefetch"])
def test_fsdps_gathering_waits_for_each_of_its_parameters(mesh, how):
    model = make(mesh)
    engine, waited = wrap(model, lr=1e-2), []
    if how == "prefetch":
        model(rows(0))  # sets up the streams
        model.set_modules_to_forward_prefetch([model[0], model[2]])
    for name, param in model.named_parameters():
        pending.update(param, lambda _, name=name: waited.append(name))
    if how == "unshard":
        model[2].unshard()
        assert sorted(waited) == ["2.bias", "2.weight"]
    engine(rows(0))
    assert sorted(waited) == sorted({*waited}) == ["0.bias", "0.weight", "2.bias", "2.weight"]


# --- states and settings -------------------------------------------------------------------------------


def test_states_are_dtensors_of_the_parameters_placement_in_host_memory(mesh):
    model = make(mesh, torch.bfloat16)
    optimizer = OffloadedAdamW(model.parameters(), lr=1e-2)
    model(rows(0, torch.bfloat16)).square().sum().backward()
    optimizer.step()
    for param in model.parameters():
        for name in ("master", "exp_avg", "exp_avg_sq"):
            state = optimizer.state[param][name]
            assert (state.placements, state.device_mesh, state.shape) == (param.placements, mesh, param.shape)
            assert (state.dtype, local_of(state).device.type) == (torch.float32, "cpu")
        assert torch.equal(optimizer.whole_states(param)["exp_avg"], local_of(optimizer.state[param]["exp_avg"]))
    first = next(model.parameters())
    optimizer.state[first]["exp_avg"] = torch.full_like(first, 2.0, dtype=torch.float32)
    assert (local_of(optimizer.state[first]["exp_avg"]) == 2).all()
    with pytest.raises(StateError, match=r"a tensor of shape \(3,\), expected \(32, 16\)"):
        optimizer.state[first]["exp_avg"] = torch.ones(3)
    twin = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(twin)
    assert (local_of(optimizer.state[first]["exp_avg"]) == 2).all()


WRITES_TO_STATES = {
    "in place": lambda state: state.mul_(2),
    "an item": lambda state: state.__setitem__(0, 5.0),
    "its data": lambda state: state.data.zero_(),
    "detached": lambda state: state.detach().zero_(),
    "to_local()": lambda state: state.to_local().zero_(),
    "of several": lambda state: torch._foreach_mul_([state], 2),
    "out": lambda state: torch.add(state, 1, out=state),
}


@pytest.mark.draws(2)
@pytest.mark.parametrize("write", WRITES_TO_STATES.values(), ids=WRITES_TO_STATES.keys())
def test_a_write_to_a_copy_of_a_state_is_an_error(mesh, write):
    """States of 8 bits are decoded when they are read."""
    param = nn.Parameter(distribute_tensor(torch.ones(64, 16), mesh, [Shard(0)]))
    optimizer = OffloadedAdamW([param], state_format="8bit")
    param.grad = torch.ones_like(param)
    optimizer.step()
    state = optimizer.state[param]["exp_avg"]
    with pytest.raises(StateError, match="what was read is a copy"), torch.no_grad():
        write(state)
    for copied in (copy.deepcopy(state), pickle.loads(pickle.dumps(state)), state + 0):
        assert type(copied) is DTensor
        assert same_bits(copied, state)
        copied.mul_(2)


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"stage": 3}, ConfigError, "stage=3 of a model whose parameters are DTensors"),
        ({"param_dtype": "bfloat16"}, ParameterError, r"is a DTensor of torch.float32, and param_dtype asks for bf"),
    ],
)
def test_settings_that_would_shard_or_cast_anew_are_refused_and_nothing_has_changed(mesh, fields, error, match):
    model = make(mesh)
    before = copy.deepcopy([local_of(p) for p in model.parameters()])
    with pytest.raises(error, match=match):
        wrap(model, **fields)
    with pytest.raises(ConfigError, match="process_group with DTensor parameters"):
        wrap(model, process_group=dist.group.WORLD)
    assert all(torch.equal(local_of(p), q) for p, q in zip(model.parameters(), before, strict=True))
    engine = wrap(model)
    engine.backward(engine(rows(0)).square().sum())
    assert engine.step().updated


def test_a_parameter_that_is_placed_anew_after_wrap_is_named(mesh):
    wide = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    param = nn.Parameter(distribute_tensor(torch.ones(16, 4), wide, [Shard(0), Replicate()]))
    optimizer = OffloadedAdamW([param])
    param.sum().backward()
    other = distribute_tensor(torch.ones(16, 4), wide, [Shard(1), Replicate()])
    param._spec, param._local_tensor = other._spec, other._local_tensor
    with pytest.raises(ParameterError, match=r"is placed as \[Shard\(dim=1\), Replicate\(\)\], and was \[Shard\(dim=0"):
        optimizer.step()
