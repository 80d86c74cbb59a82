"""SGD: wrap(model, optimizer="sgd"), OffloadedSGD, and models of two optimizers."""

import copy
import math

import pytest
import torch
from torch import nn

from frontends.torch import OffloadedAdamW, OffloadedSGD, gathered_parameters, wrap
from offload_core import CheckpointError, ConfigError, StateError
from tests.support.torch_models import loss_of, make, same_bits
from tests.support.ways import WAYS

KINDS = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "momentum": {"momentum": 0.9, "weight_decay": 0.1},
    "dampening": {"momentum": 0.9, "dampening": 0.3},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
}
MOMENTUM = KINDS["momentum"]
everywhere = pytest.mark.usefixtures("device")


def of_torch(model, **options):
    return torch.optim.SGD(model.parameters(), **{"lr": 1e-2, **options}, fused=True)


def step(engine, seed):
    engine.backward(loss_of(engine, seed))
    return engine.step()


def step_of(optimizer, model, seed):
    loss_of(model, seed).backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_same_values(ours, theirs):
    with gathered_parameters([*ours.parameters()]):
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert same_bits(mine, other)


@everywhere
@pytest.mark.parametrize("kind", KINDS)
def test_twenty_steps_equal_torch_fused_bit_for_bit(kind):
    ours, theirs = make(), make()
    engine, reference = wrap(ours, optimizer="sgd", lr=1e-2, **KINDS[kind]), of_torch(theirs, **KINDS[kind])
    for seed in range(20):
        assert step(engine, seed).updated
        step_of(reference, theirs, seed)
    assert_same_values(ours, theirs)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        expected = reference.state[other].get("momentum_buffer")
        found = engine.optimizer.state[mine].get("momentum_buffer")
        assert (found is None) == (expected is None)
        assert expected is None or same_bits(found, expected)


@pytest.mark.parametrize("way", WAYS)
def test_each_way_of_running_gives_the_same_bits(way):
    ours, theirs = make(), make()
    engine = wrap(ours, optimizer="sgd", lr=1e-2, reduce_bucket_size=100, **MOMENTUM, **WAYS[way])
    reference = of_torch(theirs, **MOMENTUM)
    for seed in range(5):
        step(engine, seed)
        step_of(reference, theirs, seed)
    assert_same_values(ours, theirs)


@pytest.mark.parametrize("state_format", ["bf16", "8bit"])
@pytest.mark.parametrize("way", ["stage 2", "stage 3"])
def test_a_momentum_in_fewer_bits_does_not_depend_on_buckets(state_format, way):
    models = [make(), make()]
    fields = {"optimizer": "sgd", "state_format": state_format, "param_dtype": "bfloat16", **MOMENTUM, **WAYS[way]}
    engines = [
        wrap(model, reduce_bucket_size=size, num_threads=threads, **fields)
        for model, size, threads in zip(models, (256, 2**20), (1, 2), strict=True)
    ]
    for seed in range(5):
        for engine in engines:
            step(engine, seed)
    with gathered_parameters([*models[1].parameters()]):
        assert_same_values(*models)


def test_clipping_is_that_of_torch():
    ours, theirs = make(), make()
    engine = wrap(ours, optimizer="sgd", lr=1e-2, gradient_clipping=math.inf, **MOMENTUM)
    reference = of_torch(theirs, **MOMENTUM)
    norm = step(engine, 0).grad_norm
    step_of(reference, theirs, 0)
    assert norm is not None
    assert_same_values(ours, theirs)


@everywhere
def test_one_model_may_have_two_optimizers():
    """Each group has the bits that its own optimizer would give it, states of its own, and defaults of its own."""
    ours, theirs = make(), make()
    halves = [[*model.parameters()] for model in (ours, theirs)]
    n = len(halves[0]) // 2
    groups = [
        {"params": halves[0][:n], "weight_decay": 0.1},
        {"params": halves[0][n:], "optimizer": "sgd", "momentum": 0.9, "lr": 3e-2},
    ]
    engine = wrap(ours, params=groups, lr=1e-2)
    references = [
        torch.optim.AdamW(halves[1][:n], lr=1e-2, weight_decay=0.1, fused=True),
        torch.optim.SGD(halves[1][n:], lr=3e-2, momentum=0.9, fused=True),
    ]
    for seed in range(10):
        step(engine, seed)
        loss_of(theirs, seed).backward()
        for reference in references:
            reference.step()
            reference.zero_grad()
    assert_same_values(ours, theirs)
    names = [set(engine.optimizer.state[half]) - {"master"} for half in (halves[0][0], halves[0][-1])]
    assert names == [{"step", "exp_avg", "exp_avg_sq"}, {"step", "momentum_buffer"}]
    with pytest.raises(StateError, match="groups of several optimizers"):
        engine.optimizer.torch_state_dict()


def test_a_resumed_run_of_two_optimizers_has_the_bits_of_an_uninterrupted_one(tmp_path):
    def wrapped():
        model = make()
        params = [*model.parameters()]
        groups = [{"params": params[:2]}, {"params": params[2:], "optimizer": "sgd", "momentum": 0.9}]
        return wrap(model, params=groups, lr=1e-2)

    first, second = wrapped(), wrapped()
    for seed in range(3):
        step(first, seed)
    folder = first.save_checkpoint(tmp_path)
    third = wrapped()
    third.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    third.module.load_state_dict(first.module.state_dict())
    second.load_checkpoint(folder)
    for engine in (first, second, third):
        step(engine, 3)
    assert_same_values(first.module, second.module)
    assert_same_values(first.module, third.module)


def test_the_optimizer_alone_is_that_of_torch_and_states_go_both_ways():
    ours, theirs, again = make(), make(), make()
    optimizer, reference = OffloadedSGD(ours.parameters(), lr=1e-2, **MOMENTUM), of_torch(theirs, **MOMENTUM)
    schedules = [torch.optim.lr_scheduler.StepLR(each, 2) for each in (optimizer, reference)]
    for seed in range(5):
        for each, model, schedule in zip((optimizer, reference), (ours, theirs), schedules, strict=True):
            step_of(each, model, seed)
            schedule.step()
    assert_same_values(ours, theirs)
    third = OffloadedSGD(again.parameters(), lr=1.0, **MOMENTUM)
    again.load_state_dict(theirs.state_dict())
    third.load_state_dict(reference.state_dict())
    plain = of_torch(ours, **MOMENTUM)
    plain.load_state_dict(optimizer.torch_state_dict())
    optimizer.close()
    for each, model in ((third, again), (plain, ours), (reference, theirs)):
        step_of(each, model, 9)
    assert_same_values(again, theirs)
    assert_same_values(ours, theirs)


def test_a_checkpoint_of_another_optimizer_is_refused_by_name(tmp_path):
    engines = [wrap(make()), wrap(make(), optimizer="sgd", momentum=0.9), wrap(make(), optimizer="sgd")]
    folders = []
    for i, engine in enumerate(engines):
        step(engine, 0)
        folders.append(engine.save_checkpoint(tmp_path / str(i)))
    for i, engine in enumerate(engines):
        for j, folder in enumerate(folders):
            if i != j:
                with pytest.raises(CheckpointError, match="it was saved with another optimizer"):
                    engine.load_checkpoint(folder)
        engine.load_checkpoint(folders[i])
        step(engine, 1)


@pytest.mark.states_in_memory
def test_memory_is_that_of_the_states():
    def bytes_of(**fields):
        engine = wrap(nn.Linear(1024, 1024), param_dtype="bfloat16", **fields)
        rows = {row.what: row.held for row in engine.memory_report().rows if row.where == "host"}
        return {name: rows[name] for name in ("master", "exp_avg", "exp_avg_sq", "momentum_buffer") if name in rows}

    whole = 4 * 1024 * 1025
    assert bytes_of(optimizer="sgd") == {"master": whole}
    assert bytes_of(optimizer="sgd", momentum=0.9) == {"master": whole, "momentum_buffer": whole}
    assert bytes_of() == {"master": whole, "exp_avg": whole, "exp_avg_sq": whole}


WRONG = [
    ({"optimizer": "adam"}, "optimizer: got 'adam', expected one of 'adamw', 'sgd'"),
    ({"config": {"optimizer": "SGD"}}, "optimizer: got 'SGD', expected one of 'adamw', 'sgd'"),
    ({"config": {"optimizer": None}}, "optimizer: got None, expected one of 'adamw', 'sgd'"),
    ({"optimizer": "sgd", "momentum": lambda updates: 0.9}, "momentum: got <function.*, expected a number"),
    ({"weight_decay": lambda updates: 0.1}, "weight_decay: got <function.*, expected a number"),
    ({"optimizer": "sgd", "betas": (0.9, 0.95)}, r"betas=.* has no place in optimizer='sgd'"),
    ({"momentum": 0.9}, "momentum=0.9 has no place in optimizer='adamw'; expected optimizer='sgd' beside it"),
    ({"optimizer": "sgd", "nesterov": True}, "nesterov=True with momentum=0.0 and dampening=0.0; expected"),
    ({"optimizer": "sgd", "momentum": -1.0}, "momentum: got -1.0, expected a finite number >= 0"),
    ({"optimizer": "sgd", "momentum": 0.9, "maximize": True}, "maximize"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_wrong_settings_are_refused_before_anything_is_made(fields, message):
    model = make()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=message):
        wrap(model, **fields)
    assert all(same_bits(value, before[name]) for name, value in model.state_dict().items())
    wrap(model)


def test_wrong_groups_are_refused():
    model = make()
    params = [*model.parameters()]
    with pytest.raises(ConfigError, match="parameter group 1: optimizer: got 'lion', expected one of"):
        wrap(model, params=[{"params": params[:1]}, {"params": params[1:], "optimizer": "lion"}])
    with pytest.raises(ConfigError, match="parameter group 1: 'momentm' is no hyperparameter; expected 'momentum'"):
        wrap(model, params=[{"params": params[:1]}, {"params": params[1:], "optimizer": "sgd", "momentm": 0.9}])
    with pytest.raises(ConfigError, match="parameter group 1: 'momentum' is a hyperparameter of optimizer='sgd'"):
        wrap(model, params=[{"params": params[:1]}, {"params": params[1:], "momentum": 0.9}])
    for fields in ({"optimizer": "sgd"}, {"config": {"optimizer": "sgd"}}):
        with pytest.raises(ConfigError, match="optimizer='sgd' in OffloadedAdamW; expected OffloadedSGD"):
            OffloadedAdamW(params, **fields)


def test_the_momentum_may_change_but_not_from_or_to_zero():
    engine = wrap(make(), optimizer="sgd", momentum=0.9)
    step(engine, 0)
    [group] = engine.optimizer.param_groups
    group["momentum"] = 0.5
    assert step(engine, 1).updated
    group["momentum"] = 0.0
    engine.backward(loss_of(engine, 2))
    with pytest.raises(ConfigError, match=r"momentum: got 0.0, expected a value above 0: its state is there"):
        engine.step()
    group["momentum"] = 0.9
    assert engine.step().updated
    other = wrap(make(), optimizer="sgd")
    step(other, 0)
    other.optimizer.param_groups[0]["momentum"] = 0.9
    other.backward(loss_of(other, 1))
    with pytest.raises(ConfigError, match=r"momentum: got 0.9, expected 0, as it was when states were made"):
        other.step()


def test_a_parameter_cannot_move_to_a_group_of_another_optimizer():
    model = make()
    params = [*model.parameters()]
    groups = [{"params": params[:2]}, {"params": params[2:], "optimizer": "sgd"}]
    engine = wrap(model, params=groups)
    step(engine, 0)
    first, second = engine.optimizer.param_groups
    second["params"].append(first["params"].pop())
    engine.backward(loss_of(engine, 1))
    with pytest.raises(ConfigError, match="parameter group 1: states are those of optimizer='adamw'"):
        engine.step()
    first["params"].append(second["params"].pop())
    assert engine.step().updated


def test_a_refused_step_changes_no_rule():
    """A parameter that is unfrozen meanwhile gets states of the rule that its group has."""
    model = make()
    params = [*model.parameters()]
    params[-1].requires_grad_(False)
    optimizer = OffloadedSGD(params, lr=1e-2, momentum=0.9)
    step_of(optimizer, model, 0)
    params[-1].requires_grad_(True)
    optimizer.param_groups[0]["momentum"] = 0.0
    loss_of(model, 1).backward()
    with pytest.raises(ConfigError, match="its state is there"):
        optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0.9
    optimizer.step()
    assert "momentum_buffer" in optimizer.state[params[-1]]


def test_a_momentum_that_is_assigned_before_the_first_update_counts_as_in_torch():
    ours, theirs = make(), make()
    optimizer, reference = OffloadedSGD(ours.parameters(), lr=1e-2, **MOMENTUM), of_torch(theirs, **MOMENTUM)
    for each, model in ((optimizer, ours), (reference, theirs)):
        for param in model.parameters():
            each.state[param]["momentum_buffer"] = torch.ones_like(param)
        step_of(each, model, 0)
    assert_same_values(ours, theirs)


@pytest.mark.parametrize("other", [{"momentum": 0.0}, None], ids=["no momentum", "AdamW"])
def test_states_that_do_not_fit_are_refused_at_the_load_and_nothing_changes(other):
    model, twin = make(), make()
    optimizer = OffloadedSGD(model.parameters(), lr=1e-2, momentum=0.9)
    theirs = OffloadedAdamW(twin.parameters()) if other is None else of_torch(twin, **other)
    for each, trained in ((optimizer, model), (theirs, twin)):
        step_of(each, trained, 0)
    before = [optimizer.state[p]["momentum_buffer"].clone() for p in model.parameters()]
    with pytest.raises((ConfigError, StateError), match=r"momentum"):
        optimizer.load_state_dict(theirs.state_dict())
    assert all(map(same_bits, before, [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]))
    step_of(optimizer, model, 1)


def test_groups_that_all_name_one_optimizer_are_exported_as_that():
    model = make()
    params = [*model.parameters()]
    groups = [{"params": params[:2], "optimizer": "sgd", "momentum": 0.9}, {"params": params[2:], "optimizer": "sgd"}]
    optimizer = OffloadedAdamW(groups, lr=1e-2)
    step_of(optimizer, model, 0)
    exported = optimizer.torch_state_dict()
    optimizer.close()
    torch.optim.SGD(groups, lr=1e-2).load_state_dict(exported)
