"""An optimizer whose parameters a library is about to replace by shards of theirs, as Accelerate does under FSDP2."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from frontends.torch import OffloadedAdamW
from frontends.torch.optim import optimizer
from offload_core.errors import StateError
from tests.support.processes import on_ranks
from tests.support.torch_models import same_bits
from tests.support.torch_rank import loss_of, make

SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}


def train(model, made, seeds, rank=0):
    for seed in seeds:
        loss_of(model, seed, rank).backward()
        made.step()
        made.zero_grad()


@pytest.fixture
def shards_come(monkeypatch):
    monkeypatch.setattr(optimizer, "shards_to_come", lambda: True)


def test_it_has_no_states_while_it_waits_and_takes_those_parameters_if_no_shards_come(shards_come):
    model, like = make(), make()
    waiting, plain = OffloadedAdamW(model.parameters(), **SETTINGS), torch.optim.AdamW(like.parameters(), fused=True)
    saved = waiting.state_dict()
    assert not waiting.slots
    assert not saved["state"]
    saved["param_groups"][0]["lr"] = plain.param_groups[0]["lr"] = 3e-3
    plain.param_groups[0]["weight_decay"] = 0.1
    waiting.load_state_dict(saved)
    waiting.zero_grad()
    assert not waiting.state
    assert not waiting.slots
    train(model, waiting, range(3))
    train(like, plain, range(3))
    assert len(waiting.slots) == len([*model.parameters()])
    assert all(map(same_bits, model.parameters(), like.parameters()))


def test_states_that_are_loaded_end_the_wait(shards_come):
    model, like = make(), make()
    plain = torch.optim.AdamW(like.parameters(), **SETTINGS, fused=True)
    train(like, plain, range(2))
    waiting = OffloadedAdamW(model.parameters(), **SETTINGS)
    model.load_state_dict(like.state_dict())
    waiting.load_state_dict(plain.state_dict())
    train(model, waiting, range(2, 4))
    train(like, plain, range(2, 4))
    assert all(map(same_bits, model.parameters(), like.parameters()))


@pytest.mark.parametrize(
    "use",
    [
        lambda made, p: made.flush(),
        lambda made, p: made.whole_states(p),
        lambda made, p: made.load_master(p, torch.ones_like(p)),
        lambda made, p: made.torch_state_dict(),
        lambda made, p: made.memory_report(),
        lambda made, p: made.checkpoints,
        lambda made, p: copy.deepcopy(made),
    ],
    ids=["flush", "whole_states", "load_master", "torch_state_dict", "memory_report", "checkpoints", "deepcopy"],
)
def test_a_use_of_the_states_ends_the_wait(shards_come, use):
    model = make()
    waiting = OffloadedAdamW(model.parameters(), **SETTINGS)
    use(waiting, next(model.parameters()))
    assert len(waiting.slots) == len([*model.parameters()])


def test_states_that_are_assigned_while_it_waits_are_kept(shards_come):
    model = make()
    waiting, first = OffloadedAdamW(model.parameters(), **SETTINGS), next(model.parameters())
    values = {name: torch.full_like(first, 2.0) for name in ("exp_avg", "exp_avg_sq")}
    waiting.state[first] = {"step": torch.tensor(3.0), **values}
    waiting.flush()
    assert {name: float(value.mean()) for name, value in waiting.state[first].items() if name != "master"} == {
        "step": 3.0, "exp_avg": 2.0, "exp_avg_sq": 2.0,
    }  # fmt: skip


def test_it_may_be_closed_while_it_waits(shards_come):
    model = make()
    waiting = OffloadedAdamW(model.parameters(), **SETTINGS)
    waiting.close()
    with pytest.raises(StateError, match="this optimizer was closed"):
        waiting.step()
    assert not hasattr(waiting, "checkpoints")


def replace_by_shards(model, made):
    """As Accelerate does; returns the shards."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shards = [torch.nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for p in model.parameters()]
    for group in made.param_groups:
        for i, p in enumerate(group["params"]):
            group["params"][i] = torch.empty(1, dtype=p.dtype)
        group["params"] = shards
    return shards


@pytest.mark.slow
@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("first", ["step", "state", "state_dict", "zero_grad", "load_state_dict"])
def test_shards_that_stand_in_the_groups_get_the_states_of_local_elements(waits, first):
    @on_ranks(2)
    def found(rank):
        optimizer.shards_to_come = lambda: waits
        model, like = make(), make()
        made = OffloadedAdamW(model.parameters(), **SETTINGS)
        held = len(made.slots)
        shards = replace_by_shards(model, made)
        plain = torch.optim.AdamW(like.parameters(), **SETTINGS, fused=True)
        if first == "state":
            assert made.state[shards[0]]["exp_avg"].shape == shards[0].shape
        elif first == "load_state_dict":
            made.load_state_dict({"state": {}, "param_groups": made.state_dict()["param_groups"]})
        elif first != "step":
            getattr(made, first)()
        for seed in range(3):
            loss_of(like, seed, 0).backward()  # the same on both ranks
            for shard, p in zip(shards, like.parameters(), strict=True):
                shard.grad = distribute_tensor(p.grad, shard.device_mesh, [Shard(0)])
            made.step()
            plain.step()
            made.zero_grad()
            plain.zero_grad()
        wholes = [(shard.full_tensor(), p) for shard, p in zip(shards, like.parameters(), strict=True)]
        n_states = sum(slot.values.numel() for slot in made.slots)
        return held, all(same_bits(*pair) for pair in wholes), n_states == sum(s.to_local().numel() for s in shards)

    n_params = len([*make().parameters()])
    assert found == [(0 if waits else n_params, True, True)] * 2
