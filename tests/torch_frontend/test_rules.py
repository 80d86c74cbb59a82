"""The laws of every update rule in torch: wrap(model, optimizer=...), and each class alone."""

import copy

import pytest
import torch
from torch import nn

from frontends.torch import gathered_parameters, wrap
from frontends.torch.optim.optimizer import CLASSES
from offload_core import ConfigError, StateError
from tests.support.rules import KINDS, REFERENCES, settings_of
from tests.support.torch_models import loss_of, make, same_bits, step
from tests.support.ways import STAGE_3, WAYS

everywhere = pytest.mark.usefixtures("device")
of_each_rule = pytest.mark.parametrize("name", REFERENCES)


def of_torch(model, name, kind="most"):
    settings = {key: value for key, value in settings_of(name, kind).items() if key != "optimizer"}
    return REFERENCES[name].of_torch(model.parameters(), settings)


def step_of(optimizer, model, seed):
    loss_of(model, seed).backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_same_values(ours, theirs):
    with gathered_parameters([*ours.parameters(), *theirs.parameters()]):
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert same_bits(mine, other)


@pytest.mark.draws(5)
@everywhere
@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_ten_steps_have_the_bits_of_torch(name, kind):
    ours, theirs = make(), make()
    engine, reference = wrap(ours, **settings_of(name, kind)), of_torch(theirs, name, kind)
    for seed in range(10):
        assert step(engine, seed).updated
        step_of(reference, theirs, seed)
    assert_same_values(ours, theirs)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        expected = {key: value for key, value in reference.state[other].items() if key != "step" and value is not None}
        found = engine.optimizer.state[mine]
        assert found.keys() - {"step", "master"} == expected.keys()
        assert all(same_bits(found[key], value) for key, value in expected.items())


@pytest.mark.draws(7)
@of_each_rule
@pytest.mark.parametrize("way", WAYS)
def test_each_way_of_running_gives_the_same_bits(name, way):
    ours, theirs = make(), make()
    engine = wrap(ours, reduce_bucket_size=100, **settings_of(name), **WAYS[way])
    reference = of_torch(theirs, name)
    for seed in range(4):
        step(engine, seed)
        step_of(reference, theirs, seed)
    assert_same_values(ours, theirs)


@pytest.mark.draws(2)
@of_each_rule
@pytest.mark.parametrize("state_format", ["bf16", "8bit"])
def test_states_in_fewer_bits_depend_on_no_bucket_thread_or_stage(name, state_format):
    models = [make(), make()]
    fields = {"state_format": state_format, "param_dtype": "bfloat16", **settings_of(name)}
    engines = [
        wrap(model, reduce_bucket_size=size, num_threads=threads, **fields, **way)
        for model, size, threads, way in zip(models, (256, 2**20), (1, 2), ({}, STAGE_3), strict=True)
    ]
    for seed in range(4):
        for engine in engines:
            step(engine, seed)
    assert_same_values(*models)


@pytest.mark.draws(1)
@of_each_rule
def test_a_skipped_step_changes_nothing_and_is_not_counted(name):
    ours, theirs = make(), make()
    engine, reference = wrap(ours, skip_nonfinite=True, **settings_of(name)), of_torch(theirs, name)
    for seed in range(3):
        engine.backward(loss_of(engine, seed) * float("inf"))
        assert not engine.step().updated
        step(engine, seed)
        step_of(reference, theirs, seed)
    assert_same_values(ours, theirs)


@pytest.mark.draws(1)
@of_each_rule
def test_a_class_alone_follows_schedules_and_takes_torchs_states(name):
    ours, theirs, again = make(), make(), make()
    kind, fields = CLASSES[name], settings_of(name)
    optimizer, reference = kind(ours.parameters(), **fields), of_torch(theirs, name)
    schedules = [torch.optim.lr_scheduler.StepLR(each, 2) for each in (optimizer, reference)]
    for seed in range(4):
        for each, model, schedule in zip((optimizer, reference), (ours, theirs), schedules, strict=True):
            step_of(each, model, seed)
            schedule.step()
    assert_same_values(ours, theirs)
    third = kind(again.parameters(), **{**fields, "lr": 1.0})
    again.load_state_dict(theirs.state_dict())
    third.load_state_dict(reference.state_dict())
    for each, model in ((third, again), (reference, theirs), (optimizer, ours)):
        step_of(each, model, 9)
    assert_same_values(again, theirs)
    assert_same_values(ours, theirs)


@pytest.mark.parametrize("name", [name for name in REFERENCES if name != "lion"])
def test_torch_goes_on_from_exported_states(name):
    ours, theirs = make(), make()
    optimizer, reference = CLASSES[name](ours.parameters(), **settings_of(name)), of_torch(theirs, name)
    for seed in range(2):
        step_of(optimizer, ours, seed)
        step_of(reference, theirs, seed)
    plain = of_torch(ours, name)
    plain.load_state_dict(optimizer.torch_state_dict())
    optimizer.close()
    for each, model in ((plain, ours), (reference, theirs)):
        step_of(each, model, 9)
    assert_same_values(ours, theirs)


def test_a_state_for_an_optimizer_that_torch_lacks_is_refused():
    with pytest.raises(StateError, match="torch_state_dict: torch has none of optimizer='lion'; expected save_check"):
        wrap(make(), optimizer="lion").optimizer.torch_state_dict()


@of_each_rule
def test_a_parameter_that_begins_anew_has_the_first_states(name):
    ours, theirs = make(), make()
    optimizer, reference = CLASSES[name](ours.parameters(), **settings_of(name)), of_torch(theirs, name)
    step_of(optimizer, ours, 0)
    step_of(reference, theirs, 0)
    optimizer.state.clear()
    again = of_torch(theirs, name)
    for each, model in ((optimizer, ours), (again, theirs)):
        step_of(each, model, 1)
    assert_same_values(ours, theirs)


def test_a_parameter_that_was_frozen_when_it_was_saved_begins_with_the_first_states(tmp_path):
    engines = []
    for trains in (False, True):
        model = make()
        next(model.parameters()).requires_grad_(trains)
        engines.append(wrap(model, **settings_of("adagrad")))
        step(engines[-1], 0)
    engines[1].load_checkpoint(engines[0].save_checkpoint(tmp_path))
    state = engines[1].optimizer.state[next(engines[1].module.parameters())]
    assert state["step"] == 0
    assert (state["sum"] == REFERENCES["adagrad"].kinds["most"]["initial_accumulator_value"]).all()


@pytest.mark.draws(2)
@pytest.mark.parametrize("other", [name for name in REFERENCES if name != "adamw"])
@everywhere
def test_one_model_may_have_two_optimizers(other):
    """Each group has the bits that its own optimizer would give it, states of its own, and defaults of its own."""
    ours, theirs = make(), make()
    halves = [[*model.parameters()] for model in (ours, theirs)]
    n = len(halves[0]) // 2
    groups = [{"params": halves[0][:n], "weight_decay": 0.1}, {"params": halves[0][n:], **settings_of(other)}]
    engine = wrap(ours, params=groups, lr=1e-3)
    own = {key: value for key, value in settings_of(other).items() if key != "optimizer"}
    references = [
        torch.optim.AdamW(halves[1][:n], lr=1e-3, weight_decay=0.1, fused=True),
        REFERENCES[other].of_torch(halves[1][n:], own),
    ]
    for seed in range(5):
        step(engine, seed)
        loss_of(theirs, seed).backward()
        for reference in references:
            reference.step()
            reference.zero_grad()
    assert_same_values(ours, theirs)
    names = [set(engine.optimizer.state[half]) - {"master"} for half in (halves[0][0], halves[0][-1])]
    counted = {"step"} & {*references[1].state[halves[1][-1]]}  # as in the optimizer that it stands for
    assert names == [{"step", "exp_avg", "exp_avg_sq"}, {*counted, *REFERENCES[other].states}]
    with pytest.raises(StateError, match="groups of several optimizers"):
        engine.optimizer.torch_state_dict()


@pytest.mark.states_in_memory
@of_each_rule
def test_memory_is_that_of_the_states(name):
    engine = wrap(nn.Linear(1024, 1024), param_dtype="bfloat16", **settings_of(name))
    rows = {row.what: row.held for row in engine.memory_report().rows if row.where == "host"}
    states = {"master", *REFERENCES[name].states}
    every = {"master"}.union(*(reference.states for reference in REFERENCES.values()))
    assert {state: rows[state] for state in every if state in rows} == dict.fromkeys(states, 4 * 1024 * 1025)


WRONG = [
    *(
        ({"optimizer": name, **fields}, message)
        for name, reference in REFERENCES.items()
        for fields, message in reference.refused
    ),
    ({"optimizer": "adam"}, "optimizer: got 'adam', expected one of 'adamw', 'sgd', 'lion', 'adagrad'"),
    ({"config": {"optimizer": "SGD"}}, "optimizer: got 'SGD', expected one of 'adamw'"),
    ({"config": {"optimizer": None}}, "optimizer: got None, expected one of 'adamw'"),
    ({"weight_decay": lambda updates: 0.1}, "weight_decay: got a function, expected a number"),
    ({"optimizer": "adagrad", "maximize": True}, "maximize=True is not supported"),
]  # fmt: skip


@pytest.mark.draws(4)
@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_wrong_settings_are_refused_before_anything_is_made(fields, message):
    model = make()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=message):
        wrap(model, **fields)
    assert all(same_bits(value, before[name]) for name, value in model.state_dict().items())
    wrap(model)
