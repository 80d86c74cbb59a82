"""Parameters that come to a model after ``wrap``, or leave it: the next step names those that would train in vain."""

import copy

import pytest
import torch
from torch import nn

from frontends.torch import wrap
from offload_core import StateError
from tests.support.torch_models import make, step
from tests.support.ways import WAYS


def parameter(*, trained):
    return nn.Parameter(torch.zeros(64), requires_grad=trained)


def by_table(model, *, trained):
    model[0]._parameters["bias"] = parameter(trained=trained)


def by_attribute(model, *, trained):
    model[0].bias = parameter(trained=trained)


def module_by_table(model, *, trained):
    model._modules["0"] = nn.Linear(32, 64).requires_grad_(trained)


def by_another_dict(model, *, trained):
    model[0].__dict__["_parameters"] = {**model[0]._parameters, "bias": parameter(trained=trained)}


@pytest.mark.draws(13)
@pytest.mark.parametrize("door", [by_table, by_attribute, module_by_table, by_another_dict])
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("fields", WAYS.values(), ids=WAYS)
def test_a_parameter_that_took_anothers_place_is_named(fields, trained, door):
    engine = wrap(make(), lr=1e-2, **fields)
    step(engine)
    door(engine.module, trained=trained)
    happened = "came to" if trained else "has been replaced in"
    match = rf"parameter '0\.(weight|bias)'(, '\S+'| and \d others)? {happened}"
    for act in (lambda: step(engine), engine.step):  # and again, until it is mended
        with pytest.raises(StateError, match=match):
            act()


def test_a_trained_parameter_may_leave_the_model_and_come_back():
    engine = wrap(make(), lr=1e-2)
    bias = engine.module[2]._parameters["bias"]
    engine.module[2]._parameters["bias"] = None
    step(engine)
    engine.module[2]._parameters["bias"] = bias
    step(engine)


@pytest.mark.draws(2)
@pytest.mark.parametrize("fields", WAYS.values(), ids=WAYS)
def test_layers_that_are_unfrozen_later_and_are_in_no_group_are_named_once(fields, recwarn):
    model = make()
    model[0].requires_grad_(False)
    engine = wrap(model, params=model[2].parameters(), lr=1e-2, **fields)
    step(engine)
    assert not recwarn.list
    model[0].requires_grad_(True)
    with pytest.warns(UserWarning, match=r"are in no group: '0\.weight', '0\.bias'; they are not trained"):
        step(engine)
    recwarn.clear()
    step(engine)
    assert not recwarn.list


def test_a_copy_knows_its_own_parameters():
    engine = copy.deepcopy(wrap(make(), lr=1e-2))
    step(engine)
    by_table(engine.module, trained=True)
    with pytest.raises(StateError, match=r"parameter '0\.bias' came to"):
        step(engine)


def test_a_new_head_that_the_optimizer_was_given_trains_in_the_old_ones_place():
    engine = wrap(make(), lr=1e-2)
    step(engine)
    engine.module[2] = nn.Linear(64, 16)
    engine.optimizer.add_param_group({"params": [*engine.module[2].parameters()]})
    before = engine.module[2].weight.detach().clone()
    step(engine)
    assert not torch.equal(engine.module[2].weight, before)
