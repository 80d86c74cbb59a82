"""Torch's checkpoint tools over every rule, from and to torch's own optimizers: the tables of docs/optimizers.md."""

import copy
import itertools
import re

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import frontends.torch
from frontends.torch import OffloadedSGD, wrap
from offload_core.errors import ConfigWarning
from tests.support.processes import ROOT, on_ranks

SETTINGS = {
    "AdamW": {"lr": 0.1},
    "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5},
    "Adagrad": {"lr": 0.1},
    "Muon": {"lr": 0.1},
    "Lion": {"lr": 0.1},
}
WAYS = {
    "set_optimizer_state_dict": {},
    "flattened": {"flatten_optimizer_state_dict": True},
    "full_state_dict": {"full_state_dict": True},
    "dcp": {},
    "dcp, flattened": {"flatten_optimizer_state_dict": True},
}
DIRECTIONS = ("torch to ours", "ours to torch", "ours to ours")
SHAPES = ((16, 8), (5, 8))  # on two ranks, three rows and two


def is_possible(rule, direction, *, sharded):
    """Torch has no Lion, and neither Muon takes the shards of FSDP2."""
    return not (rule == "Lion" and "torch" in direction) and not (rule == "Muon" and sharded)


class Trained:
    """Two matrices under one of torch's optimizers or one of ours, whole or sharded by FSDP2."""

    def __init__(self, rule, whose, *, sharded, **more):
        torch.manual_seed(0)
        self.model = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in SHAPES)
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if sharded else None
        if sharded:
            fully_shard(self.model, mesh=self.mesh)
        module, prefix = (torch.optim, "") if whose == "torch" else (frontends.torch, "Offloaded")
        self.optimizer = getattr(module, prefix + rule)(self.model.parameters(), **SETTINGS[rule], **more)

    def update(self, seeds):
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            for param in self.model.parameters():
                gradient = torch.randn(param.shape, generator=generator)
                if self.mesh is not None:
                    gradient = distribute_tensor(gradient, self.mesh, param.placements)
                param.grad = gradient
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def values(self):
        return [(p.full_tensor() if self.mesh is not None else p).detach().clone() for p in self.model.parameters()]

    def take_values(self, other):
        with torch.no_grad():
            for param, source in zip(self.model.parameters(), other.model.parameters(), strict=True):
                param.copy_(source)


def carried(rule, direction, way, folder, *, sharded):
    """Return two runs of which one has made three updates, and the other has got its states and parameters."""
    saver, loader = direction.split(" to ")
    options = StateDictOptions(**WAYS[way])
    source = Trained(rule, saver, sharded=sharded).update(range(3))
    target = Trained(rule, loader, sharded=sharded)
    states = get_optimizer_state_dict(source.model, source.optimizer, options=options)
    if way.startswith("dcp"):
        dcp.save(states, checkpoint_id=folder)
        states = get_optimizer_state_dict(target.model, target.optimizer, options=options)
        dcp.load(states, checkpoint_id=folder)
    else:
        states = copy.deepcopy(states)
        if way == "full_state_dict" and sharded:  # it is gathered on the first rank alone
            states = [states]
            dist.broadcast_object_list(states)
            [states] = states
    target.take_values(source)
    set_optimizer_state_dict(target.model, target.optimizer, states, options=options)
    return source, target


def outcome(rule, direction, way, folder, *, sharded):
    """Return the table's word for what the next updates are."""
    source, target = carried(rule, direction, way, folder, sharded=sharded)
    expected, found = (run.update([7, 8]).values() for run in (source, target))
    if all(map(torch.equal, expected, found)):
        return "the same bits" if direction == "ours to ours" else "the same"
    assert direction != "ours to ours", f"{rule}, {way}: other bits"
    for theirs, ours in zip(expected, found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)
    return "the same"


def rows(folder, *, sharded, ways=WAYS, rules=SETTINGS):
    """Return the outcomes by rule and direction, in the order of these ways."""
    found = {}
    for rule, direction in itertools.product(rules, DIRECTIONS):
        if is_possible(rule, direction, sharded=sharded):
            name = f"{rule}, {direction}"
            found[name] = [
                outcome(rule, direction, way, folder / f"{name}, {way}, {sharded}", sharded=sharded) for way in ways
            ]
    return found


def table(sharded, ways):
    """Return the rows of docs/optimizers.md about whole parameters, or about sharded ones, in these columns."""
    text = (ROOT / "docs/optimizers.md").read_text()
    head = "under `fully_shard`" if sharded else "whole parameters"
    [body] = re.findall(rf"^\| {re.escape(head)} \|.*\n\|.*\n((?:\|.*\n)+)", text, flags=re.MULTILINE)
    rows = [line.strip("| ").split(" | ") for line in body.splitlines()]
    return {name: [cells[[*WAYS].index(way)] for way in ways] for name, *cells in rows}


@pytest.mark.filterwarnings("ignore")  # of DCP: there is no process group
def test_states_of_every_rule_go_from_and_to_torchs_own_optimizers_as_the_page_says(tmp_path, drawn):
    ways = drawn(WAYS, 1)
    assert rows(tmp_path, sharded=False, ways=ways) == table(sharded=False, ways=ways)


@pytest.mark.parametrize("rules", [["SGD"], pytest.param([*SETTINGS], marks=pytest.mark.slow)], ids=["SGD", "all"])
def test_sharded_states_of_every_rule_go_from_and_to_torchs_own_optimizers_as_the_page_says(tmp_path, rules, drawn):
    ways = drawn(WAYS, 1)

    @on_ranks(2)
    def found(rank):
        return rows(tmp_path, sharded=True, ways=ways, rules=rules)

    expected = table(sharded=True, ways=ways)
    assert found == [{name: row for name, row in expected.items() if name.split(",")[0] in rules}] * 2


@pytest.mark.draws(1)
@pytest.mark.parametrize("rule", ["SGD", "Muon", "Lion"])
def test_entries_list_no_count_where_torch_has_none_and_a_resumed_run_has_the_same_bits(rule):
    """Also before the first update, where dampening would show: torch's SGD does not dampen the first gradient."""
    for updates in (0, 1, 3):
        run, other = (Trained(rule, "ours", sharded=False) for _ in range(2))
        run.update(range(updates))
        saved = copy.deepcopy(run.optimizer.state_dict())
        assert all("step" not in entry for entry in saved["state"].values())
        assert all(run.optimizer.state[param]["step"] == updates for param in run.model)
        assert all("step" not in [*run.optimizer.state[param]] for param in run.model)
        other.take_values(run)
        other.optimizer.load_state_dict(saved)
        twin = copy.deepcopy(run.optimizer)
        assert [twin.state[param]["step"] for group in twin.param_groups for param in group["params"]] == [updates] * 2
        assert all(map(torch.equal, run.update([9]).values(), other.update([9]).values()))
        assert all(run.optimizer.state[param]["step"] == updates + 1 for param in run.model)


@pytest.mark.parametrize("way", ["set_optimizer_state_dict", "flattened"])
def test_master_weights_of_sgd_without_momentum_go_through_torchs_tools(way):
    """They are its only states: nothing else says that there were updates."""
    options = StateDictOptions(**WAYS[way])
    models = [nn.ModuleDict({"layer": nn.Linear(8, 2)}).bfloat16() for _ in range(2)]
    run, other = (OffloadedSGD(model.parameters(), lr=1e-3) for model in models)
    for _ in range(3):
        models[0]["layer"](torch.ones(2, 8).bfloat16()).sum().backward()
        run.step()
        run.zero_grad()
    saved = copy.deepcopy(get_optimizer_state_dict(models[0], run, options=options))
    models[1].load_state_dict(models[0].state_dict())
    set_optimizer_state_dict(models[1], other, saved, options=options)
    for mine, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(run.state[mine]["master"], other.state[theirs]["master"])


@pytest.mark.parametrize("rule", [*SETTINGS])
def test_a_count_that_is_there_is_no_default(rule):
    run = Trained(rule, "ours", sharded=False).update(range(3))
    entry = run.optimizer.state[run.model[0]]
    listed = [*entry]
    assert entry.setdefault("step", 0) == entry.get("step", 0) == 3
    assert [*entry] == listed
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    assert run.optimizer.state[run.model[0]]["step"] == 3


@pytest.mark.parametrize("updates", [0, 2])
def test_a_copy_of_an_entry_has_its_count_and_is_what_it_was_if_assigned_again(updates):
    run, other = (Trained("SGD", "ours", sharded=False).update(range(updates)) for _ in range(2))
    for param in run.model:
        run.optimizer.state[param] = copy.deepcopy(run.optimizer.state[param])
        assert run.optimizer.state[param]["step"] == updates
    assert all(map(torch.equal, run.update([7]).values(), other.update([7]).values()))


@pytest.mark.parametrize("listed", [True, False])
def test_a_momentum_that_comes_with_a_count_of_0_is_used(listed):
    """As torch's tools merge it: into a state dict of an optimizer that has made no update."""
    run, other = Trained("SGD", "torch", sharded=False).update(range(3)), Trained("SGD", "ours", sharded=False)
    merged = other.optimizer.state_dict()
    for i, entry in run.optimizer.state_dict()["state"].items():
        merged["state"][i] |= {**({"step": torch.tensor(0.0)} if listed else {}), **copy.deepcopy(entry)}
    other.take_values(run)
    other.optimizer.load_state_dict(merged)
    for expected, found in zip(run.update([7]).values(), other.update([7]).values(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


def test_a_momentum_that_is_written_in_place_before_the_first_update_is_used():
    run, other = (Trained("SGD", "ours", sharded=False) for _ in range(2))
    run.update(range(3))
    other.take_values(run)
    for mine, theirs in zip(other.model, run.model, strict=True):
        other.optimizer.state[mine]["momentum_buffer"].copy_(run.optimizer.state[theirs]["momentum_buffer"])
    assert all(map(torch.equal, run.update([7]).values(), other.update([7]).values()))


def test_states_without_a_count_tell_of_a_schedule_that_begins_again():
    model = nn.Linear(4, 4)
    run = Trained("SGD", "torch", sharded=False).update([1])
    mine = OffloadedSGD(
        [nn.Parameter(torch.zeros(shape)) for shape in SHAPES], lr=lambda n: 0.1 / (n + 1), momentum=0.9
    )
    with pytest.warns(ConfigWarning, match="lr is a function of the number of updates, and these states have none"):
        mine.load_state_dict(run.optimizer.state_dict())
    assert mine.updates == 1
    engine = wrap(model, optimizer="sgd", momentum=0.9, lr=lambda n: 0.1 / (n + 1))
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
    saved = copy.deepcopy(engine.optimizer.state_dict())
    engine.optimizer.load_state_dict(saved)  # its own count is beside the entries
    assert engine.optimizer.updates == 2
