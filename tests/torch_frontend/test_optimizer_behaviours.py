"""Demands of PyTorch's own optimizer tests, side by side with torch.optim.AdamW; docs/optimizers.md has the list."""

import copy
import pickle
import re
import warnings
from collections import defaultdict
from contextlib import ExitStack

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.optim import lr_scheduler, swa_utils
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from frontends.torch import OffloadedAdamW, wrap
from offload_core import ConfigError, GradientError, ParameterError, StateError
from tests.support.torch_models import (
    assert_alike,
    assert_same,
    batch,
    beside_torch,
    loss_of,
    make,
    place,
    same_bits,
    train,
)

everywhere = pytest.mark.usefixtures("device")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """For models this small more threads only wait for each other."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


def torchs(params, *args, **kwargs):
    return torch.optim.AdamW(params, *args, fused=True, **kwargs)


def alone(params, *args, **kwargs):
    return OffloadedAdamW(params, *args, **kwargs)


def two_groups(model, tensors=False):
    def value(x):
        return torch.tensor(x) if tensors else x

    return [
        {"params": model[0].parameters(), "lr": value(0.01)},
        {"params": model[2].parameters(), "lr": value(0.003), "weight_decay": 0.1},
    ]


def hyper_parameters(optimizer):
    return [
        [float(x) for x in (group["lr"], *group["betas"], group["eps"], group["weight_decay"])]
        for group in optimizer.param_groups
    ]


# --- schedulers ---------------------------------------------------------------------------------------

SCHEDULERS = {
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, total_iters=3),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6, eta_min=1e-4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, [1e-4, 1e-5], [1e-2, 1e-3], 2, 3, mode="triangular2"),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda n: 0.9**n, lambda n: 1 / (1 + n)]),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=4),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5], 0.3),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda n: 0.8),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, [1e-2, 1e-3], total_steps=9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 6, 2.0),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1, cooldown=1),
    "SWALR": lambda o: swa_utils.SWALR(o, [2e-3, 1e-3], 3),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 5)], [3]
    ),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
}
"""A schedule of each class, of two parameter groups; one that torch adds wants a line here."""

FOUND = sorted(
    name
    for module in (lr_scheduler, swa_utils)
    for name, cls in vars(module).items()
    if isinstance(cls, type)
    and issubclass(cls, lr_scheduler.LRScheduler)
    and cls is not lr_scheduler.LRScheduler
    and not name.startswith("_")
)


def advance(schedule, n_step):
    """Advance the schedule; ``ReduceLROnPlateau`` by a metric that gets worse in the middle."""
    schedule.step(*([abs(n_step - 4.0)] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else []))


@pytest.mark.draws(10)
@pytest.mark.parametrize(
    ("device", "kind"),
    [*(("host", kind) for kind in ("alone", "engine", "tensors", "resumed")), ("simulated, delays 0", "engine")],
    indirect=["device"],
)
@pytest.mark.parametrize("name", FOUND)
def test_a_schedule_does_step_by_step_what_it_does_to_torchs_optimizer(name, device, kind):
    """Alone, of an Engine, with a learning rate that is a tensor, and where both are loaded half-way."""
    ours, theirs = make(), make()
    tensors = kind == "tensors"
    yours = torchs(two_groups(theirs, tensors))
    engine = wrap(ours, params=two_groups(ours)) if kind == "engine" else None
    mine = OffloadedAdamW(two_groups(ours, tensors)) if engine is None else engine.optimizer
    other, schedule = SCHEDULERS[name](yours), SCHEDULERS[name](mine)
    assert hyper_parameters(mine) == hyper_parameters(yours)
    for n_step in range(8):
        if kind == "resumed" and n_step == 4:
            states = mine.state_dict(), schedule.state_dict()
            mine.close()
            mine = OffloadedAdamW(two_groups(ours))
            schedule = SCHEDULERS[name](mine)
            mine.load_state_dict(states[0])
            schedule.load_state_dict(states[1])
        loss_of(ours, n_step).backward()
        mine.step() if engine is None else engine.step()
        train(theirs, yours, [n_step])
        advance(schedule, n_step)
        advance(other, n_step)
        assert hyper_parameters(mine) == hyper_parameters(yours), n_step
        assert schedule.get_last_lr() == other.get_last_lr()
        mine.zero_grad()
    assert all(isinstance(group["lr"], torch.Tensor) == tensors for group in mine.param_groups)
    assert_same(ours, theirs, mine, yours)


@everywhere
def test_copies_of_model_optimizer_and_schedule_go_on_together():
    for how in (copy.deepcopy, lambda all: pickle.loads(pickle.dumps(all))):
        model = make()
        optimizer = OffloadedAdamW(model.parameters(), lr=torch.tensor(0.01))
        schedule = lr_scheduler.StepLR(optimizer, 2, 0.5)
        train(model, optimizer, range(1))
        schedule.step()
        other, twin, its = how((model, optimizer, schedule))
        assert its.optimizer is twin
        for m, o, s in ((model, optimizer, schedule), (other, twin, its)):
            for seed in range(1, 5):
                train(m, o, [seed])
                s.step()
        assert float(twin.param_groups[0]["lr"]) == float(optimizer.param_groups[0]["lr"]) < 0.01
        assert_same(model, other, optimizer, twin)
        public = [{name for name in vars(o) if not name.startswith("_")} - {"step"} for o in (optimizer, twin)]
        assert public[0] == public[1]


@pytest.mark.draws(1)
@everywhere
@pytest.mark.parametrize("early_copy", [False, True])
def test_averaged_models_are_those_of_torchs_optimizer(early_copy):
    """Stochastic weight averaging with its schedule, an exponential average, and the batch norm's new statistics."""
    results = []
    for new in (lambda p: OffloadedAdamW(p, lr=0.01, early_copy=early_copy), lambda p: torchs(p, lr=0.01)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)).to(place())
        optimizer = new(model.parameters())
        schedule = swa_utils.SWALR(optimizer, 0.05, anneal_epochs=2)
        mean = swa_utils.AveragedModel(model)
        moving = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
        for seed in range(4):
            train(model, optimizer, [seed])
            schedule.step()
            mean.update_parameters(model)
            moving.update_parameters(model)
        swa_utils.update_bn([batch(seed) for seed in range(3)], mean)
        results.append([*model.state_dict().values(), *mean.state_dict().values(), *moving.state_dict().values()])
    assert len(results[0]) == len(results[1])
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


# --- hooks --------------------------------------------------------------------------------------------


def step_hooks(optimizer, model):
    """Return the calls of hooks of this optimizer and of all. One hook gives the step its closure."""
    said = []

    def say(what):
        return lambda o, args, kwargs: said.append((what, o is optimizer, len(args), [*kwargs]))

    def closure():
        said.append(("closure", torch.is_grad_enabled()))
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    with ExitStack() as stack:
        for register, hook in (
            (register_optimizer_step_pre_hook, say("all, before")),
            (register_optimizer_step_post_hook, say("all, after")),
            (optimizer.register_step_pre_hook, lambda o, args, kwargs: (args, {"closure": closure})),
            (optimizer.register_step_pre_hook, say("before")),
            (optimizer.register_step_post_hook, say("after")),
        ):
            stack.callback(register(hook).remove)
        said.append(optimizer.step().item())
    loss_of(model, 1).backward()
    optimizer.step()  # they are gone
    return said


def state_dict_hooks(optimizer, model):
    said = []

    def before(what):
        return lambda o: said.append((what, o is optimizer, sorted(o.state[model[0].weight])[:1]))

    def after(what, result=None):
        def hook(o, state_dict):
            said.append((what, sorted(state_dict["state"][0])[:1], state_dict.get("name")))
            return None if result is None else {**state_dict, "name": result}

        return hook

    train(model, optimizer, range(2))
    optimizer.register_state_dict_pre_hook(before("second"))
    optimizer.register_state_dict_pre_hook(before("first"), prepend=True)
    optimizer.register_state_dict_post_hook(after("fourth"))
    optimizer.register_state_dict_post_hook(after("third", "third's"), prepend=True)
    saved = optimizer.state_dict()
    wrapped = {"state": saved["state"], "param_groups": [{**g, "lr": 0.5} for g in saved["param_groups"]]}
    optimizer.register_load_state_dict_pre_hook(lambda o, state: state["name"])  # another state dict in its place
    optimizer.register_load_state_dict_pre_hook(after("fifth"), prepend=True)
    optimizer.register_load_state_dict_post_hook(lambda o: said.append(o.param_groups[0]["lr"]))
    optimizer.register_load_state_dict_post_hook(before("sixth"), prepend=True)
    optimizer.load_state_dict({**saved, "name": wrapped})
    said[4] = said[4][:2]  # the state dict itself
    return [*said, saved["name"]]


@everywhere
@pytest.mark.parametrize("say", [step_hooks, state_dict_hooks])
def test_hooks_are_called_when_and_with_what_torchs_optimizer_calls_them(say):
    (ours, mine), (theirs, yours) = runs = beside_torch()
    assert say(mine, ours) == say(yours, theirs)
    assert_alike(*runs)


# --- groups, and what they are made of ----------------------------------------------------------------


@pytest.mark.draws(1)
@everywhere
@pytest.mark.parametrize("early_copy", [False, True])
def test_groups_added_before_the_first_step_and_after_it(early_copy):
    ours, theirs = make(), make()
    mine = OffloadedAdamW([("0.weight", ours[0].weight)], lr=0.01, early_copy=early_copy)
    yours = torchs([("0.weight", theirs[0].weight)], lr=0.01)
    for model, optimizer in ((ours, mine), (theirs, yours)):
        optimizer.add_param_group({"params": [("0.bias", model[0].bias)], "betas": (0.5, 0.9)})
        train(model, optimizer, range(2))
        optimizer.add_param_group({"params": ((f"2.{name}", p) for name, p in model[2].named_parameters()), "lr": 0.1})
        train(model, optimizer, range(2, 4))
    assert_same(ours, theirs, mine, yours)
    assert mine.state_dict()["param_groups"] == yours.state_dict()["param_groups"]
    assert mine.param_groups[2]["param_names"] == ["2.weight", "2.bias"]


@everywhere
def test_a_group_may_be_empty_and_a_single_tensor():
    ours, theirs = (nn.Parameter(torch.ones(16, device=place())) for _ in range(2))
    mine, yours = (new([{"params": []}, {"params": p}]) for new, p in ((alone, ours), (torchs, theirs)))
    for p, optimizer in ((ours, mine), (theirs, yours)):
        optimizer.add_param_group({"params": []})
        p.grad = torch.arange(16.0, device=place())
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
    assert same_bits(ours, theirs)
    assert len(mine.param_groups) == 3


@everywhere
def test_groups_of_several_element_types_are_each_updated_in_their_own():
    """As torch would the float32 masters, from the same gradients; rounded once."""
    torch.manual_seed(0)
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float32]
    ours = [nn.Parameter(torch.randn(48).to(place(), dtype)) for dtype in dtypes]
    theirs = [nn.Parameter(p.detach().float().clone()) for p in ours]

    def groups(params):
        return [{"params": params[:2], "lr": 0.01}, {"params": params[2:], "lr": 0.03, "weight_decay": 0.5}]

    mine, yours = alone(groups(ours)), torchs(groups(theirs))
    for _ in range(4):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(48).to(p)
            q.grad = p.grad.float()
        mine.step()
        yours.step()
    for p, q in zip(ours, theirs, strict=True):
        assert same_bits(p, q.to(p.dtype))
        assert same_bits(mine.state[p].get("master", p), q)


@everywhere
def test_tensors_as_learning_rate_and_betas_mean_their_value_at_each_step():
    ours, theirs = make(), make()
    runs = []
    for new, model in ((alone, ours), (torchs, theirs)):
        lr, betas = torch.tensor(0.003), (torch.tensor(0.8), torch.tensor(0.99))
        runs.append((model, new(model.parameters(), lr=lr, betas=betas), lr, betas))
    for seed in range(4):
        for model, optimizer, lr, betas in runs:
            train(model, optimizer, [seed])
            lr.mul_(0.5)  # the very tensors that are in the group
            betas[0].add_(0.01)
    mine, yours = runs[0][1], runs[1][1]
    assert hyper_parameters(mine) == hyper_parameters(yours)
    assert_same(ours, theirs, mine, yours)
    assert OffloadedAdamW(make().parameters(), lr=torch.tensor([0.5])).config.lr == 0.5
    with pytest.raises(ConfigError, match=r"betas\[0\]: got a tensor of 2 elements, expected one"):
        OffloadedAdamW(make().parameters(), betas=(torch.zeros(2), 0.9))


@everywhere
def test_a_parameter_that_is_given_twice_is_warned_of_and_is_one():
    """torch warns too, and says that it will be an error; it would update it twice at a step."""
    ours, theirs = make(), make()
    with pytest.warns(UserWarning, match="a parameter group with duplicate parameters"):
        mine = alone([*ours.parameters(), ours[0].weight])
    yours = torchs(theirs.parameters())
    for model, optimizer in ((ours, mine), (theirs, yours)):
        train(model, optimizer, range(2))
        optimizer.load_state_dict(optimizer.state_dict())
        train(model, optimizer, range(2, 4))
    assert_same(ours, theirs, mine, yours)


P, Q = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))


@pytest.mark.draws(3)
@pytest.mark.parametrize(
    ("error", "params", "options"),
    [
        (ValueError, [{"params": [P]}, {"params": [P]}], {}),
        (ValueError, [("p", P), Q], {}),
        (ValueError, [{"params": [P]}, {"params": [("q", Q)]}], {}),
        (ValueError, [P * 2], {}),
        (ValueError, [], {}),
        (TypeError, [1.0], {}),
        (TypeError, [{"params": {P, Q}}], {}),
        (ValueError, [P], {"lr": torch.ones(2)}),
        (ValueError, [P], {"lr": -1.0}),
        (ValueError, [P], {"betas": (1.0, 0.9)}),
        (ValueError, [P], {"eps": -1e-8}),
        (ValueError, [P], {"weight_decay": -0.1}),
    ],
    ids=["two groups", "half named", "groups half named", "no leaf", "none", "no tensor", "set", "lr of two",
         "lr", "betas", "eps", "weight_decay"],
)  # fmt: skip
def test_what_torchs_optimizer_refuses_is_refused_with_the_same_kind_of_error(error, params, options):
    for new in (torchs, alone):
        with pytest.raises(error):
            new([*params], **options)
    assert alone([P, Q]).close() is None  # nobody owns them


@pytest.mark.parametrize(
    ("error", "said", "values", "args"),
    [
        (TypeError, "positional arguments", torch.ones(4), (1e-3, (0.9, 0.95))),
        (ParameterError, r"float64; expected .*model.float\(\)", torch.ones(4, dtype=torch.float64), ()),
        (ParameterError, "gaps or overlaps; .*contiguous", torch.ones(4, 6)[:, ::2], ()),
        (ParameterError, "gaps or overlaps; .*contiguous", torch.ones(1).expand(4), ()),
    ],
    ids=["positional betas", "fp64", "gaps", "overlaps"],
)
def test_what_torchs_optimizer_takes_and_this_one_does_not_is_refused_by_name(error, said, values, args):
    assert torch.optim.AdamW([nn.Parameter(values)], *args)
    with pytest.raises(error, match=said):
        OffloadedAdamW([nn.Parameter(values)], *args)
    for dense in (torch.ones(4, 6).t(), torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)):
        OffloadedAdamW([nn.Parameter(dense)])


@pytest.mark.parametrize("name", ["amsgrad", "maximize", "capturable", "differentiable"])
def test_an_option_of_torchs_adamw_that_changes_what_is_computed_is_refused(name):
    said = rf"{name}=True is not supported; expected False \("
    for make_it in (lambda: OffloadedAdamW(make().parameters(), **{name: True}), lambda: wrap(make(), **{name: True})):
        with pytest.raises(ConfigError, match=f"^{said}"):
            make_it()


def test_options_of_torchs_adamw_that_change_nothing_are_taken():
    model = make()
    options = {"amsgrad": False, "maximize": False, "capturable": False, "differentiable": False}
    for choice in ({"foreach": True}, {"foreach": False}, {"fused": True}, {"fused": False}):
        OffloadedAdamW(model.parameters(), 0.01, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1, **options, **choice)
    assert wrap(model, fused=True).optimizer.param_groups[0].keys() == torchs([P]).param_groups[0].keys()


# --- gradients and closures ---------------------------------------------------------------------------


@pytest.mark.draws(3)
@everywhere
@pytest.mark.parametrize("early_copy", [False, True])
@pytest.mark.parametrize("how", ["closure", "closure, by name, no gradient", "engine"])
def test_closures_are_called_once_and_their_loss_is_returned(how, early_copy):
    losses = []
    ours, theirs = make(), make()
    engine = wrap(ours, lr=0.01) if how == "engine" else None
    mine = engine.optimizer if engine else OffloadedAdamW(ours.parameters(), lr=0.01, early_copy=early_copy)
    yours = torchs(theirs.parameters(), lr=0.01)
    for model, optimizer in ((ours, mine), (theirs, yours)):
        for seed in range(3):

            def closure(model=model, optimizer=optimizer, seed=seed):
                optimizer.zero_grad()
                loss = loss_of(model, seed)
                loss.backward()
                losses.append(loss)
                return loss.item()

            with torch.set_grad_enabled(how != "closure, by name, no gradient"):
                found = optimizer.step(closure=closure) if "by name" in how else optimizer.step(closure)
            assert found == losses[-1].item()
    assert len(losses) == 6
    assert losses[:3] == losses[3:]
    assert_same(ours, theirs, mine, yours)


@everywhere
def test_gradients_that_are_zero_count_and_those_that_are_none_do_not():
    runs = beside_torch(lr=0.01)
    for model, optimizer in runs:
        train(model, optimizer, range(2))
        for set_to_none in (False, True):
            optimizer.zero_grad(set_to_none=set_to_none)
            gradient = model[2].weight.grad
            assert gradient is None if set_to_none else not gradient.any()
            model[0](batch(5)).pow(2).mean().backward()
            optimizer.step()
        assert float(optimizer.state[model[2].weight]["step"]) == 3
    assert_alike(*runs)


@everywhere
def test_gradients_that_have_left_are_none_after_zero_grad_and_never_zero():
    model = make()
    optimizer = wrap(model, lr=0.01).optimizer
    loss_of(model, 0).backward()
    with pytest.raises(GradientError, match=r"discard with zero_grad\(set_to_none=True\)"):
        model.zero_grad(set_to_none=False)
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.draws(1)
@everywhere
@pytest.mark.parametrize("by_itself", [False, True])
def test_grad_scaler_unscales_and_skips_and_what_an_engine_took_cannot_be(by_itself, device):
    runs = beside_torch()
    for model, optimizer in runs:
        scaler = torch.amp.GradScaler(device, init_scale=256.0, growth_interval=2)
        for seed in range(5):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, seed)).backward()
            if seed == 2:
                model[2].bias.grad[3] = torch.nan
            if not by_itself:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 512.0
        assert float(optimizer.state[model[0].weight]["step"]) == 4
    assert_alike(*runs)
    engine = wrap(make())
    scaler = torch.amp.GradScaler(device)
    scaler.scale(loss_of(engine, 0)).backward()
    with pytest.raises(GradientError, match="already left for the host"):
        scaler.step(engine.optimizer)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_compiled_step_is_the_step():
    (ours, mine), (theirs, yours) = runs = beside_torch(lr=0.01)
    step = torch.compile(mine.step, backend="eager")
    for seed in range(3):
        loss_of(ours, seed).backward()
        step()
        mine.zero_grad()
    train(theirs, yours, range(3))
    assert_alike(*runs)


def test_the_profiler_shows_a_step_and_zero_grad_by_their_names():
    model = make()
    optimizer = alone(model.parameters())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        train(model, optimizer, range(1))
    names = {event.key for event in profile.key_averages()}
    assert {"Optimizer.step#OffloadedAdamW.step", "Optimizer.zero_grad#OffloadedAdamW.zero_grad"} <= names


def test_it_prints_as_torchs_optimizer_does():
    def lines(optimizer):
        return repr(optimizer).replace(type(optimizer).__name__, "").splitlines()

    ours, theirs = make(), make()
    assert lines(alone(two_groups(ours))) == lines(torchs(two_groups(theirs)))


# --- states -------------------------------------------------------------------------------------------


def test_a_state_dict_has_the_entries_of_torchs_and_is_loaded_by_copy():
    ours, theirs = make(), make()
    mine, yours = alone(two_groups(ours)), torchs(two_groups(theirs))
    for model, optimizer in ((ours, mine), (theirs, yours)):
        train(model, optimizer, range(2))
    saved, other = mine.state_dict(), yours.state_dict()
    assert [*saved] == [*other]
    assert saved["param_groups"] == other["param_groups"]
    assert [sorted(entry) for entry in saved["state"].values()] == [sorted(e) for e in other["state"].values()]
    assert all(type(entry) is dict for entry in saved["state"].values())
    kept = copy.deepcopy(other)
    mine.load_state_dict(other)
    train(ours, mine, range(2, 4))
    mine.param_groups[0]["lr"] = 1.0
    assert other["param_groups"] == kept["param_groups"]
    assert all(same_bits(other["state"][i][k], kept["state"][i][k]) for i in range(4) for k in kept["state"][i])


@everywhere
def test_each_class_keeps_its_way_to_decay_weights_whatever_it_loads():
    ours, theirs = make(), make()
    mine = OffloadedAdamW(ours.parameters(), lr=0.01, adam_mode="adam")
    yours = torchs(theirs.parameters(), lr=0.01, weight_decay=0.1)
    train(theirs, yours, range(2))
    ours.load_state_dict(theirs.state_dict())
    mine.load_state_dict(yours.state_dict())
    third = make()
    third.load_state_dict(ours.state_dict())
    adam = torch.optim.Adam(third.parameters(), fused=True)
    adam.load_state_dict(copy.deepcopy(mine.state_dict()))
    train(ours, mine, range(2, 4))
    train(third, adam, range(2, 4))
    assert_same(ours, third, mine, adam)


@everywhere
def test_names_are_saved_and_a_hook_can_map_states_by_them():
    """As torch's documentation has it: a state dict in another order is brought in this one's."""
    first, second = make(), make()
    named = [*first.named_parameters()]
    saver = alone(reversed(named), lr=0.01)
    train(first, saver, range(2))
    second.load_state_dict(first.state_dict())
    mine = alone(second.named_parameters())

    def by_name(optimizer, state_dict):
        [group] = state_dict["param_groups"]
        number = dict(zip(group["param_names"], group["params"], strict=True))
        names = optimizer.param_groups[0]["param_names"]
        group = {**group, "params": [number[name] for name in names], "param_names": names}
        return {"state": state_dict["state"], "param_groups": [group]}

    mine.register_load_state_dict_pre_hook(by_name)
    mine.load_state_dict(saver.state_dict())
    assert_same(first, second, saver, mine)
    assert mine.param_groups[0]["lr"] == 0.01
    unnamed = alone(make().parameters())
    saved = mine.state_dict()
    unnamed.load_state_dict(saved)
    assert unnamed.param_groups[0]["param_names"] == [name for name, _ in named]


@everywhere
def test_looking_for_states_that_are_not_there_finds_an_empty_entry_and_harms_nothing():
    model = make()
    model[0].requires_grad_(False)
    optimizer = alone(model.parameters(), lr=0.01)
    assert model[0].weight not in optimizer.state
    assert optimizer.state[model[0].weight] == {}
    optimizer.state["of all"] = 7
    for number in (1, 2):
        optimizer.state[model[2].weight]["own"] = number
    assert optimizer.state_dict()["state"][2]["own"] == 2
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.state[model[2].weight].pop("own", None) == 2
    other, twin = copy.deepcopy((model, optimizer))
    for m, o in ((model, optimizer), (other, twin)):
        assert o.state["of all"] == 7
        m[0].requires_grad_(True)
        train(m, o, range(2))
        assert float(o.state[m[0].weight]["step"]) == 2
    assert_same(model, other, optimizer, twin)


def cleared(optimizer):
    optimizer.state.clear()


def replaced(optimizer):
    optimizer.state = defaultdict(dict)


def emptied(optimizer):
    for param in list(optimizer.state):
        optimizer.state[param] = {}


def popped(optimizer):
    for param in list(optimizer.state):
        held = optimizer.state[param]["exp_avg"].clone()
        assert same_bits(optimizer.state.pop(param)["exp_avg"], held)


def deleted(optimizer):
    for param in list(optimizer.state):
        del optimizer.state[param]


def cleared_one_by_one(optimizer):
    for entry in optimizer.state.values():
        entry.clear()


def popped_one_by_one(optimizer):
    for entry in optimizer.state.values():
        assert float(entry.pop("step")) == 3
        del entry["exp_avg"], entry["exp_avg_sq"]


RESETS = [cleared, replaced, emptied, popped, deleted, cleared_one_by_one, popped_one_by_one]


@pytest.mark.draws(6)
@everywhere
@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.parametrize("early_copy", [False, True])
def test_states_that_are_taken_away_begin_anew(reset, early_copy):
    (ours, mine), (_, yours) = runs = beside_torch(lr=0.01, early_copy=early_copy)
    for model, optimizer in runs:
        train(model, optimizer, range(3))
        yours.state.clear() if optimizer is yours else reset(mine)
        train(model, optimizer, range(3, 5))
    assert_alike(*runs)
    assert float(mine.state[ours[0].weight]["step"]) == 2
    assert mine.state_dict()["state"].keys() == yours.state_dict()["state"].keys()


@pytest.mark.states_in_memory
@everywhere
def test_states_that_are_assigned_are_copied_to_where_they_are_held():
    (ours, mine), (_, yours) = runs = beside_torch(lr=0.01)
    for model, optimizer in runs:
        train(model, optimizer, range(3))
        first, second = optimizer.state[model[0].weight], optimizer.state[model[2].weight]
        address = first["exp_avg"].data_ptr()
        first["exp_avg"] = torch.full_like(first["exp_avg"], 0.25)
        first["step"] = torch.full_like(first["step"], 7.0)
        second["exp_avg_sq"].mul_(4)
        optimizer.state[model[2].bias] = {k: v.clone() for k, v in optimizer.state[model[2].bias].items()}
        optimizer.state = {p: {k: v * 1 for k, v in entry.items()} for p, entry in optimizer.state.items()}
        optimizer.state[model[0].bias].update(exp_avg=torch.ones(64, device=first["exp_avg"].device))
        entry = optimizer.state[model[0].bias]
        entry |= {"exp_avg_sq": torch.full_like(entry["exp_avg_sq"], 0.5)}
        step = torch.full_like(first["step"], 5.0)
        optimizer.state |= {model[2].bias: {**copy.copy(optimizer.state)[model[2].bias], "step": step}}
        assert optimizer is yours or optimizer.state[model[0].weight]["exp_avg"].data_ptr() == address
        train(model, optimizer, range(3, 5))
    assert float(mine.state[ours[0].weight]["step"]) == 9
    assert_alike(*runs)
    with pytest.raises(StateError, match=r"\['exp_avg'\] = a tensor of shape \(3,\), expected \(64, 32\)"):
        mine.state[ours[0].weight]["exp_avg"] = torch.zeros(3)
    with pytest.raises(StateError, match="exp_avg_sq is None"):
        mine.state[ours[0].weight] = {"exp_avg": torch.zeros(64, 32)}
    copied = copy.deepcopy(mine.state[ours[0].weight])
    assert type(copied) is dict
    assert type(copied["exp_avg"]) is torch.Tensor


@everywhere
def test_master_weights_keep_what_rounding_hid_when_moments_begin_anew():
    model = make(torch.bfloat16)
    optimizer = alone(model.parameters(), lr=1e-4)
    train(model, optimizer, range(2))
    before = optimizer.state[model[0].weight]["master"].clone()
    assert not same_bits(before, before.bfloat16().float())
    optimizer.state.clear()
    assert same_bits(optimizer.state[model[0].weight]["master"], before)


# --- torch.distributed.checkpoint ---------------------------------------------------------------------


def of_kind(kind, model):
    if kind == "torch":
        return torchs(model.parameters(), lr=0.01)
    return wrap(model, lr=0.01).optimizer if kind == "engine" else alone(model.parameters(), lr=0.01)


@pytest.mark.draws(3)
@pytest.mark.states_in_memory
@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize(
    ("device", "saver", "loader", "dtype"),
    [
        ("host", "alone", "alone", torch.bfloat16),
        ("host", "engine", "engine", torch.bfloat16),
        ("host", "torch", "alone", torch.float32),
        ("host", "alone", "torch", torch.float32),
        ("simulated, delays 0", "engine", "engine", torch.bfloat16),
        ("simulated, delays 0", "alone", "torch", torch.float32),
    ],
    indirect=["device"],
)
def test_torchs_distributed_checkpoint_saves_and_loads(tmp_path, flatten, device, saver, loader, dtype):
    """By parameters' names; from torch's optimizer and to it, too."""
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    straight, model = make(dtype), make(dtype, seed=7)
    first, second = of_kind(saver, straight), of_kind(loader, model)
    train(straight, first, range(3))
    parts = dict(zip(("model", "optimizer"), get_state_dict(straight, first, options=options), strict=True))
    names = [name for name in parts["optimizer"] if "0.weight" in name]
    assert ("state.0.weight.exp_avg" in names) if flatten else ("0.weight" in parts["optimizer"]["state"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one process alone
        dcp.save(parts, checkpoint_id=tmp_path / "saved", no_dist=True)
        loaded = dict(zip(("model", "optimizer"), get_state_dict(model, second, options=options), strict=True))
        dcp.load(loaded, checkpoint_id=tmp_path / "saved", no_dist=True)
    set_state_dict(
        model,
        second,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
        options=options,
    )
    train(straight, first, range(3, 5))
    train(model, second, range(3, 5))
    assert_same(straight, model, first, second)
    if dtype is torch.bfloat16:
        for p, q in zip(straight.parameters(), model.parameters(), strict=True):
            assert same_bits(first.state[p]["master"], second.state[q]["master"])


@everywhere
def test_a_full_state_dict_by_names_is_a_copy_on_the_host():
    model = make()
    optimizer = alone(model.parameters())
    train(model, optimizer, range(1))
    found = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    held = optimizer.state[model[0].weight]["exp_avg"]
    assert same_bits(found["state"]["0.weight"]["exp_avg"], held)
    assert re.match("cpu", str(found["state"]["0.weight"]["exp_avg"].device))
