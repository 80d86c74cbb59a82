"""Checkpoints of torch engines: resuming is invisible, whatever the model holds, and wrong ones are refused."""

import copy
import random

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR

from frontends.torch import gathered_parameters, wrap
from frontends.torch.weights.checkpoint import load_weights
from offload_core.checkpoint.reader import Checkpoint
from offload_core.errors import CheckpointError
from tests.support.late_stores import PARAMETERS_ON_DISK
from tests.support.subjects.models import mixed
from tests.support.torch_models import batch, make, place, same_bits, step

everywhere = pytest.mark.usefixtures("device")


def train(engine, steps, *schedules):
    for _ in range(steps):
        x = torch.randn(4, 3, 6, 6).to(place())
        x = x + np.random.rand() + random.random()
        engine.backward(engine(x).float().pow(2).mean())
        engine.step()
        for schedule in schedules:
            schedule.step()


def everything(engine):
    with gathered_parameters(engine.module.parameters()):
        found = {name: t.detach().clone() for name, t in engine.module.state_dict().items()}
    for i, (name, state) in enumerate(zip(engine.module.parameters(), engine.optimizer.state.values(), strict=False)):
        found |= {f"{i} {name}": torch.as_tensor(value).clone() for name, value in state.items()}
    return found


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert same_bits(tensor, other[name]), name


WAYS = {
    "plain": {},
    "stage 3": {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 8},
    "stage 3 on disk": {**PARAMETERS_ON_DISK, "param_persistence_threshold": 8, "param_dtype": "bfloat16"},
}


def test_any_reader_of_the_format_reads_what_is_saved(tmp_path):
    [shard] = wrap(mixed(), lr=1e-2).save_checkpoint(tmp_path).glob("*.safetensors")
    stored = safetensors.torch.load_file(shard)
    assert stored["param/mask"].dtype == torch.bool
    assert "param/cache" not in stored


@everywhere
def test_a_parameter_that_is_frozen_or_trained_now_only(tmp_path):
    engine = wrap(mixed(), lr=1e-2)
    train(engine, 2)
    engine.save_checkpoint(tmp_path)
    model = mixed(1)
    model.frozen.requires_grad_(True)
    model.head.weight.requires_grad_(False)
    other = wrap(model, lr=1e-2, param_dtype="bfloat16")
    other.load_checkpoint(tmp_path)
    assert same_bits(model.frozen, engine.module.frozen.bfloat16())
    assert same_bits(model.head.weight, engine.module.head.weight.bfloat16())
    state = other.optimizer.state[model.frozen]
    assert state["step"] == 0
    assert not state["exp_avg"].any()
    assert same_bits(state["master"], engine.module.frozen)
    train(other, 1)


@pytest.mark.draws(1)
@everywhere
def test_a_parameter_that_was_unfrozen_on_the_way_keeps_its_states(tmp_path):
    def new(seed):
        model = mixed(seed)
        model.head.requires_grad_(False)
        engine = wrap(model, lr=1e-2, param_dtype="bfloat16")
        return model, engine

    model, engine = new(0)
    train(engine, 1)
    model.head.requires_grad_(True)
    train(engine, 2)
    engine.save_checkpoint(tmp_path)
    train(engine, 2)
    model, other = new(1)
    model.head.requires_grad_(True)  # and nothing has had a gradient yet
    other.load_checkpoint(tmp_path)
    train(other, 2)
    for name, tensor in model.state_dict().items():
        assert name == "cache" or same_bits(tensor, engine.module.state_dict()[name]), name
    for param, same in zip(model.parameters(), engine.module.parameters(), strict=True):
        for name, state in engine.optimizer.state.get(same, {}).items():
            assert same_bits(torch.as_tensor(other.optimizer.state[param][name]), torch.as_tensor(state)), name


class Adapted(nn.Module):
    """A frozen base, and adapters."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(256, 256).requires_grad_(False)
        torch.manual_seed(seed)
        self.down, self.up = nn.Linear(256, 2), nn.Linear(2, 256)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapted(seed):
    with place():
        return Adapted(seed)


def adapt(engine, seeds):
    for seed in seeds:
        x = torch.randn(4, 256, generator=torch.Generator().manual_seed(seed)).to(place())
        engine.backward(engine(x).pow(2).mean())
        engine.step()


@pytest.mark.draws(2)
@everywhere
@pytest.mark.parametrize("way", ["plain", "stage 3", "stage 3 on disk"])
def test_a_checkpoint_without_the_frozen_base_resumes_on_the_same_base(tmp_path, way):
    engine = wrap(adapted(1), lr=1e-2, **{**WAYS[way], "param_dtype": None})
    adapt(engine, range(3))
    path = engine.save_checkpoint(tmp_path, frozen=False)
    n_trained = sum(p.numel() for p in engine.module.parameters() if p.requires_grad)
    assert sum(file.stat().st_size for file in path.iterdir()) < 12 * n_trained + 2**15  # of 2**18
    adapt(engine, range(3, 6))
    other = wrap(adapted(2), lr=1e-2, **WAYS["plain"])
    other.load_checkpoint(tmp_path)
    adapt(other, range(3, 6))
    engine.close()
    for (name, p), q in zip(other.module.named_parameters(), engine.module.parameters(), strict=True):
        assert same_bits(p, q), name
    weights = adapted(3)
    load_weights(weights, path)
    assert same_bits(weights.base.weight, other.module.base.weight)
    assert not same_bits(weights.up.weight, adapted(3).up.weight)


def test_a_checkpoint_without_the_frozen_base_fits_no_other_model(tmp_path):
    engine = wrap(adapted(1), lr=1e-2)
    adapt(engine, range(2))
    engine.save_checkpoint(tmp_path, frozen=False)
    unfrozen, smaller = adapted(2), adapted(2)
    unfrozen.base.weight.requires_grad_(True)
    smaller.base = nn.Linear(256, 128).requires_grad_(False)
    for model, said in (
        (unfrozen, r"saved without 'base.weight', which was frozen and is trained now; expected it frozen"),
        (smaller, r"'base.weight' has shape \[256, 256\] in it, expected \[128, 256\]"),
        (adapted(2).down, "this model lacks"),
    ):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        other = wrap(model, lr=1e-2)
        with pytest.raises(CheckpointError, match=said):
            other.load_checkpoint(tmp_path)
        assert all(same_bits(tensor, before[name]) for name, tensor in model.state_dict().items())
        other.flush()  # the states are not broken


class Counting(nn.Linear):
    """Knows how often it was called, in the state that modules have besides tensors."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


def test_what_modules_have_besides_tensors_comes_back(tmp_path):
    engine = wrap(nn.Sequential(Counting(3, 3), nn.Linear(3, 3)), lr=1e-2)
    engine(torch.ones(1, 3))
    engine.save_checkpoint(tmp_path)
    inside = nn.ModuleDict({"inner": nn.Sequential(Counting(3, 3), nn.Linear(3, 3))})
    other = wrap(inside, lr=1e-2)
    other.load_checkpoint(tmp_path, names=lambda name: name.removeprefix("inner."))
    assert inside["inner"][0].calls == 1
    both = wrap(nn.Sequential(Counting(3, 3), Counting(3, 3)), lr=1e-2)
    with pytest.raises(CheckpointError, match=r"has no '1\._extra_state'.*get_extra_state"):
        both.load_checkpoint(tmp_path)


def test_a_compiled_model_is_the_same_model(tmp_path):
    plain, within = nn.Linear(3, 3), nn.Linear(3, 3)
    within.register_buffer("mask", torch.ones(2))
    plain.register_buffer("mask", torch.zeros(2))
    compiled = torch.compile(within, backend="eager")
    engine, other = wrap(compiled, lr=1e-2), wrap(plain, lr=1e-2)
    engine.save_checkpoint(tmp_path)
    other.load_checkpoint(tmp_path)
    for name, tensor in plain.state_dict().items():
        assert same_bits(tensor, within.state_dict()[name]), name
    engine.load_checkpoint(tmp_path)


@everywhere
def test_a_schedule_that_counts_its_milestones_comes_back(tmp_path):
    def new():
        engine = wrap(make(), lr=1e-2)
        return engine, MultiStepLR(engine.optimizer, [1, 3, 3])

    engine, schedule = new()
    engine.optimizer.step()
    schedule.step()
    engine.save_checkpoint(tmp_path, stateful={"schedule": schedule})
    resumed, other = new()
    resumed.load_checkpoint(tmp_path, stateful={"schedule": other})
    assert other.state_dict() == schedule.state_dict()
    for each in (schedule, other):
        each.optimizer.step()
        each.step()
        each.step()
    assert other.get_last_lr() == schedule.get_last_lr() == [1e-2 * 0.1**3]


@everywhere
def test_an_object_whose_state_is_read_of_the_engine_is_saved(tmp_path):
    """Its ``state_dict()`` runs before anything is locked."""

    class Averages:
        def state_dict(self):
            entry = engine.optimizer.state[next(engine.module.parameters())]
            return {"exp_avg": entry["exp_avg"].clone(), "steps": engine.optimizer.state_dict()["state"][0]["step"]}

        def load_state_dict(self, state):
            self.loaded = state

    engine, averages = wrap(make(), lr=1e-2), Averages()
    step(engine)
    expected = averages.state_dict()
    engine.save_checkpoint(tmp_path, stateful={"averages": averages})
    engine.load_checkpoint(tmp_path, stateful={"averages": averages})
    assert same_bits(averages.loaded["exp_avg"], expected["exp_avg"])
    assert averages.loaded["steps"] == expected["steps"] == 1


def test_two_tensors_of_one_name_are_refused_before_anything_is_written(tmp_path):
    engine = wrap(nn.Linear(3, 3), lr=1e-2)
    engine.optimizer.add_param_group({"params": [("weight", nn.Parameter(torch.ones(3)))]})
    with pytest.raises(CheckpointError, match="two tensors are named 'weight'.*rename one"):
        engine.save_checkpoint(tmp_path)
    assert not list(tmp_path.iterdir())


@everywhere
def test_parameters_that_are_changed_by_hand_right_after_the_call_are_saved_as_they_were(tmp_path):
    """They may be: weights are swapped for their average, then evaluated."""
    engine = wrap(make(), lr=1e-2)
    step(engine, 0)
    before = everything(engine)
    engine.save_checkpoint(tmp_path, wait=False)
    with torch.no_grad():
        for param in engine.module.parameters():
            param.zero_()
    engine.wait_for_checkpoint()
    other = wrap(make(), lr=1e-2)
    other.load_checkpoint(tmp_path)
    assert_same(everything(other), before)


def test_names_are_translated_and_the_optimizers_groups_must_agree(tmp_path):
    engine = wrap(make(), lr=1e-2)
    engine.save_checkpoint(tmp_path)
    inside = nn.ModuleDict({"inner": make()})
    with pytest.raises(CheckpointError, match=r"it lacks 'inner\.0\.weight'.*`names=` translates"):
        wrap(inside, lr=1e-2).load_checkpoint(tmp_path)
    inside = nn.ModuleDict({"inner": make()})
    other = wrap(inside, lr=1e-2)
    other.load_checkpoint(tmp_path, names=lambda name: name.removeprefix("inner."))
    for a, b in zip(other.module.parameters(), engine.module.parameters(), strict=True):
        assert same_bits(a, b)
    model = make()
    first, *rest = model.parameters()
    grouped = wrap(model, lr=1e-2, params=[{"params": [first]}, {"params": rest}])
    with pytest.raises(CheckpointError, match="1 parameter groups in it, expected 2"):
        grouped.load_checkpoint(tmp_path)


@everywhere
def test_gradients_that_wait_are_discarded_by_loading(tmp_path):
    engine, straight = (wrap(make(), lr=1e-2, gradient_accumulation_steps=2) for _ in range(2))
    engine.save_checkpoint(tmp_path)
    step(engine, 7)
    engine.load_checkpoint(tmp_path)
    for subject in (engine, straight):
        for seed in range(2):
            step(subject, seed)
    assert_same(everything(engine), everything(straight))


@everywhere
def test_an_engine_that_saves_can_be_copied_and_a_checkpoint_stays_as_it_is(tmp_path):
    engine = wrap(make(), lr=1e-2)
    engine.save_checkpoint(tmp_path, wait=False)
    twin = copy.deepcopy(engine)
    for seed in range(3):
        step(twin, seed)
    engine.wait_for_checkpoint()
    Checkpoint(tmp_path).verify()
    twin.load_checkpoint(tmp_path)
    assert_same(everything(twin), everything(engine))
    assert same_bits(twin(batch(0)), engine(batch(0)))
