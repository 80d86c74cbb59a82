"""What SGD has that other rules have not, and groups of two optimizers; test_rules.py has the laws of all."""

import copy
import math
import pickle

import pytest
import torch
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

from frontends.torch import OffloadedAdamW, OffloadedSGD, wrap
from offload_core import ConfigError, OffloadConfig
from offload_core.rules.sgd import SGD
from tests.support.torch_models import loss_of, make, same_bits, step

MOMENTUM = {"momentum": 0.9, "weight_decay": 0.1}


def of_torch(model, **options):
    return torch.optim.SGD(model.parameters(), **{"lr": 1e-2, **options}, fused=True)


def step_of(optimizer, model, seed):
    loss_of(model, seed).backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_same_values(ours, theirs):
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert same_bits(mine, other)


def test_clipping_is_that_of_torch():
    ours, theirs = make(), make()
    engine = wrap(ours, optimizer="sgd", lr=1e-2, gradient_clipping=math.inf, **MOMENTUM)
    reference = of_torch(theirs, **MOMENTUM)
    norm = step(engine, 0).grad_norm
    step_of(reference, theirs, 0)
    assert norm is not None
    assert_same_values(ours, theirs)


def test_wrong_groups_are_refused():
    model = make()
    params = [*model.parameters()]
    with pytest.raises(ConfigError, match="parameter group 1: optimizer: got 'lio', expected one of"):
        wrap(model, params=[{"params": params[:1]}, {"params": params[1:], "optimizer": "lio"}])
    with pytest.raises(ConfigError, match="parameter group 1: 'momentm' is no hyperparameter; expected 'momentum'"):
        wrap(model, params=[{"params": params[:1]}, {"params": params[1:], "optimizer": "sgd", "momentm": 0.9}])
    with pytest.raises(ConfigError, match="parameter group 1: 'momentum' is a hyperparameter of optimizer='sgd'"):
        wrap(model, params=[{"params": params[:1]}, {"params": params[1:], "momentum": 0.9}])
    for fields in ({"optimizer": "sgd"}, {"config": {"optimizer": "sgd"}}):
        with pytest.raises(ConfigError, match="optimizer='sgd' in OffloadedAdamW; expected OffloadedSGD"):
            OffloadedAdamW(params, **fields)


def test_a_key_of_the_user_that_is_a_setting_of_all_groups_changes_no_rule():
    """Hyperparameters alone are a group's own."""

    def trained(**keys):
        model = make()
        params = [*model.parameters()]
        own = {"params": params[2:], "optimizer": "adamw", "weight_decay": 0.1}
        engine = wrap(model, optimizer="sgd", lr=1e-2, params=[{"params": params[:2]}, {**own, **keys}])
        for seed in range(3):
            step(engine, seed)
        assert keys.items() <= engine.optimizer.param_groups[1].items()
        return model

    assert_same_values(trained(adam_mode="adam", op_order="optax"), trained())


@pytest.mark.parametrize("fields", [{}, {"adam_mode": "adam", "betas": (0.5, 0.9), "lr": 1e-2}])
def test_a_configuration_that_was_pickled_before_there_were_rules_is_that_of_adam(fields):
    config = OffloadConfig(**fields)
    before = copy.copy(config)
    for name in ("optimizer", *SGD.settings):
        del vars(before)[name]
    loaded = pickle.loads(pickle.dumps(before))
    assert loaded == config
    assert loaded.rule() == config.rule()
    assert loaded.state_block == config.state_block


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
    with pytest.raises(ConfigError, match="parameter group 1: the states belong to optimizer='adamw'"):
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


def test_groups_that_all_name_one_optimizer_are_exported_as_that():
    model = make()
    params = [*model.parameters()]
    groups = [{"params": params[:2], "optimizer": "sgd", "momentum": 0.9}, {"params": params[2:], "optimizer": "sgd"}]
    optimizer = OffloadedAdamW(groups, lr=1e-2)
    step_of(optimizer, model, 0)
    exported = optimizer.torch_state_dict()
    optimizer.close()
    torch.optim.SGD(groups, lr=1e-2).load_state_dict(exported)


@pytest.mark.draws(2)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("engine", [True, False])
@pytest.mark.parametrize(
    "scheduler",
    [lambda o: OneCycleLR(o, 1e-2, total_steps=9), lambda o: CyclicLR(o, 1e-3, 1e-2, step_size_up=2)],
    ids=["OneCycleLR", "CyclicLR"],
)
def test_schedulers_that_cycle_the_momentum_begin_one_as_in_torch(scheduler, engine, momentum):
    """Their default sets a momentum over one of 0, when they are made."""
    ours, theirs = make(), make()
    settings = {"lr": 1e-2, "momentum": momentum}
    wrapped = wrap(ours, optimizer="sgd", **settings) if engine else None
    optimizer = wrapped.optimizer if engine else OffloadedSGD(ours.parameters(), **settings)
    reference = of_torch(theirs, momentum=momentum)
    schedules = [scheduler(each) for each in (optimizer, reference)]
    for seed in range(5):
        if engine:
            step(wrapped, seed)
        else:
            step_of(optimizer, ours, seed)
        step_of(reference, theirs, seed)
        for schedule in schedules:
            schedule.step()
    assert_same_values(ours, theirs)
    momenta = [each.param_groups[0]["momentum"] for each in (optimizer, reference)]
    assert momenta[0] == momenta[1] > 0
