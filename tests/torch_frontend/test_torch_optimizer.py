"""OffloadedAdamW against torch's own AdamW, and the optimizer protocol, behaviour by behaviour."""

import copy
import gc
import warnings
import weakref
from functools import partial

import pytest
import torch
from torch import nn

from frontends.torch import OffloadedAdamW
from offload_core import ConfigError, GradientError, ParameterError
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

pytestmark = pytest.mark.usefixtures("device")


@pytest.mark.draws(2)
@pytest.mark.parametrize("early_copy", [False, True])
@pytest.mark.parametrize(
    ("fields", "reference"),
    [
        ({}, {}),
        ({"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3}, {}),
        ({"betas": (0.3, 0.9), "weight_decay": 0.0}, {}),
        ({"adam_mode": "adam", "weight_decay": 0.1}, {"class": torch.optim.Adam}),
    ],
    ids=["defaults", "all fields", "small beta1", "adam"],
)
def test_fifty_steps_equal_torch_fused_bit_for_bit(early_copy, fields, reference, device):
    ours, theirs = make(), make()
    mine = OffloadedAdamW(ours.parameters(), early_copy=early_copy, **fields)
    cls = reference.get("class", torch.optim.AdamW)
    yours = cls(theirs.parameters(), **{k: v for k, v in fields.items() if k != "adam_mode"}, fused=True)
    for seed in range(50 if device == "cpu" else 10):
        train(ours, mine, [seed])
        train(theirs, yours, [seed])
    assert_same(ours, theirs, mine, yours)


@pytest.mark.draws(1)
def test_outside_clipping_keeps_its_meaning():
    runs = beside_torch()
    for model, optimizer in runs:
        for seed in range(10):
            loss_of(model, seed).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
    assert_alike(*runs)


def test_outside_clipping_that_would_be_lost_raises():
    model = make()
    optimizer = OffloadedAdamW(model.parameters(), early_copy=True)
    loss_of(model, 0).backward()
    for clip in (
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda: model[0].weight.grad.mul_(2),
    ):
        with pytest.raises(GradientError, match=r"already left for the host.*gradient_clipping"):
            clip()
    optimizer.step()
    assert optimizer.report.updated


@pytest.mark.draws(1)
@pytest.mark.parametrize("early_copy", [False, True])
def test_parameters_without_gradient_are_left_alone(early_copy):
    """No decay, no moments, no step: a parameter that takes no part keeps its bits and its step count."""
    runs = beside_torch(weight_decay=0.5, early_copy=early_copy)
    for model, optimizer in runs:
        for seed in range(6):
            loss = loss_of(model, seed) if seed % 2 else model[0](batch(seed)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert float(optimizer.state[model[2].weight]["step"]) == 3
    assert_alike(*runs)


@pytest.mark.draws(1)
@pytest.mark.parametrize("early_copy", [False, True])
def test_a_frozen_parameter_gets_states_when_it_is_unfrozen(early_copy):
    ours, theirs = make(), make()
    for model in (ours, theirs):
        model[0].requires_grad_(False)
    mine = OffloadedAdamW(ours.parameters(), early_copy=early_copy)
    yours = torch.optim.AdamW(theirs.parameters(), fused=True)
    assert ours[0].weight not in mine.state
    for model, optimizer in ((ours, mine), (theirs, yours)):
        train(model, optimizer, range(2))
        model[0].requires_grad_(True)
        train(model, optimizer, range(2, 4))
        model[2].requires_grad_(False)
        train(model, optimizer, range(4, 6))
    assert_same(ours, theirs, mine, yours)


def test_tied_parameters_are_one(device):
    def tied():
        torch.manual_seed(0)
        model = nn.ModuleDict({"a": nn.Embedding(16, 32), "b": nn.Linear(32, 16, bias=False)}).to(device)
        model["b"].weight = model["a"].weight
        return model

    ours, theirs = tied(), tied()
    mine, yours = OffloadedAdamW(ours.parameters(), early_copy=True), torch.optim.AdamW(theirs.parameters(), fused=True)
    for _ in range(5):
        for model, optimizer in ((ours, mine), (theirs, yours)):
            model["b"](model["a"](torch.arange(8, device=device))).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert ours["a"].weight is ours["b"].weight
    assert_same(ours, theirs, mine, yours)


def test_hyper_parameters_are_read_at_every_step():
    ours, theirs = make(), make()

    def groups(model):
        return [{"params": model[0].parameters(), "weight_decay": 0.0}, {"params": model[2].parameters(), "lr": 1e-2}]

    mine, yours = OffloadedAdamW(groups(ours), lr=1e-3), torch.optim.AdamW(groups(theirs), lr=1e-3, fused=True)
    for seed in range(6):
        for model, optimizer in ((ours, mine), (theirs, yours)):
            optimizer.param_groups[0]["lr"] = 1e-3 * (seed + 1)
            optimizer.param_groups[1]["betas"] = (0.9 - 0.01 * seed, 0.99)
            optimizer.param_groups[1]["eps"] = 1e-8 * (seed + 1)
            train(model, optimizer, [seed])
    assert_same(ours, theirs, mine, yours)


@pytest.mark.draws(1)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_through_the_model_alone_is_enough(set_to_none):
    runs = beside_torch()
    for model, optimizer in runs:
        for seed in range(4):
            model.zero_grad(set_to_none=set_to_none)
            loss_of(model, seed).backward()
            optimizer.step()
    assert_alike(*runs)


@pytest.mark.draws(1)
@pytest.mark.parametrize("through", ["model", "optimizer"])
def test_zero_grad_discards_gradients_that_have_left(through):
    runs = beside_torch(early_copy=True)
    for model, optimizer in runs:
        loss_of(model, 0).backward()
        (model if through == "model" else optimizer).zero_grad()
        loss_of(model, 1).backward()
        optimizer.step()
        loss_of(model, 2).backward()
        (model if through == "model" else optimizer).zero_grad()
        optimizer.step()  # nothing to do
    assert_alike(*runs)


@pytest.mark.parametrize("early_copy", [False, True])
def test_gradients_set_by_hand_count(early_copy):
    runs = beside_torch(early_copy=early_copy)
    for model, optimizer in runs:
        loss_of(model, 0).backward()
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.zero_grad()
        model[0].weight.grad = torch.full_like(model[0].weight, 0.5)
        loss_of(model, 1).backward()  # autograd adds to what is there
        optimizer.step()
    assert_alike(*runs)


@pytest.mark.draws(1)
@pytest.mark.parametrize("early_copy", [False, True])
def test_several_backwards_are_summed(early_copy):
    """bf16 gradients of several backwards are summed in fp32 with early_copy, in bf16 by autograd without."""
    ours = make(torch.bfloat16)
    mine = OffloadedAdamW(ours.parameters(), early_copy=early_copy)
    expected = {}
    other = make(torch.bfloat16)
    for seed in range(3):
        loss_of(other, seed).backward()
        if early_copy:
            for name, p in other.named_parameters():
                expected[name] = expected.get(name, 0) + p.grad.float()
            other.zero_grad()
    for seed in range(3):
        loss_of(ours, seed).backward()
    mine.step()
    for name, p in other.named_parameters():
        gradient = expected[name] if early_copy else p.grad.float()
        assert same_bits(mine.state[dict(ours.named_parameters())[name]]["exp_avg"], gradient * torch.tensor(1 - 0.9))


def test_memory_formats_are_kept_and_updated_in_place(device):
    """A channels_last or transposed parameter is updated where it is, whatever the strides of its gradient."""

    def conv():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(32, 16, bias=False))
        model = model.to(device, memory_format=torch.channels_last)
        model[2].weight = nn.Parameter(torch.randn(32, 16).to(device).t())
        return model

    ours, theirs = conv(), conv()
    mine, yours = OffloadedAdamW(ours.parameters()), torch.optim.AdamW(theirs.parameters(), fused=True)
    x = torch.randn(2, 4, 4, 4).to(device)
    strides = [p.stride() for p in ours.parameters()]
    pointers = [p.data_ptr() for p in ours.parameters()]
    for _ in range(3):
        for model, optimizer in ((ours, mine), (theirs, yours)):
            model(x).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [p.stride() for p in ours.parameters()] == strides
    assert [p.data_ptr() for p in ours.parameters()] == pointers
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)
        assert mine.state[p]["exp_avg"].shape == p.shape
        torch.testing.assert_close(mine.state[p]["exp_avg"], yours.state[q]["exp_avg"].cpu(), rtol=0, atol=1e-6)


@pytest.mark.draws(1)
def test_gradients_of_any_strides_count_as_what_they_hold(device):
    for gradient in (
        lambda: torch.arange(64.0, device=device).view(16, 4)[:, 0],
        lambda: torch.tensor(2.0, device=device).expand(16),
        lambda: torch.arange(16.0, device=device).flip(0)[::1],
        lambda: torch._neg_view(torch.arange(16.0, device=device)),
    ):
        for early_copy in (False, True):
            ours, theirs = (nn.Parameter(torch.ones(16, device=device)) for _ in range(2))
            mine, yours = OffloadedAdamW([ours], early_copy=early_copy), torch.optim.AdamW([theirs], fused=True)
            ours.grad, theirs.grad = gradient(), gradient().contiguous().clone()
            mine.step()
            yours.step()
            assert same_bits(ours, theirs)


def test_another_memory_format_after_the_states_were_made_is_refused(device):
    model = nn.Conv2d(4, 8, 3).to(device)
    optimizer = OffloadedAdamW(model.parameters())
    model.to(memory_format=torch.channels_last)
    model(torch.randn(1, 4, 5, 5).to(device)).sum().backward()
    with pytest.raises(ParameterError, match="strides .* reorder the model before wrap"):
        optimizer.step()


@pytest.mark.parametrize("early_copy", [False, True])
def test_autograd_grad_leaves_gradients_alone(early_copy):
    runs = beside_torch(early_copy=early_copy)
    for model, optimizer in runs:
        loss_of(model, 0).backward()
        torch.autograd.grad(loss_of(model, 1), list(model.parameters()))
        optimizer.step()
    assert_alike(*runs)


def test_what_only_an_engine_does_is_refused_alone():
    of_engines = {"loss_scale": "dynamic", "gradient_accumulation_steps": 4, "initial_loss_scale": 2.0}
    of_engines |= {"buffer_dtype": "bfloat16", "cast_inputs": False}
    for fields in ({name: value} for name, value in of_engines.items()):
        with pytest.raises(ConfigError, match=r"is what an Engine does; expected it in wrap\(model"):
            OffloadedAdamW(make().parameters(), **fields)
    with pytest.raises(ConfigError, match="eps_root=0.1 has no place in op_order='torch'"):
        OffloadedAdamW(make().parameters(), eps_root=0.1)


def test_an_optimizer_that_dies_takes_its_stand_ins_along():
    model = make()
    optimizer = OffloadedAdamW(model.parameters(), early_copy=True)
    loss_of(model, 0).backward()
    del optimizer
    gc.collect()
    assert all(p.grad is None for p in model.parameters())


def test_dropping_an_optimizer_frees_its_parameters_at_once():
    gc.disable()
    try:
        model = make()
        first = weakref.ref(model[0].weight)
        optimizer = OffloadedAdamW(model.parameters(), early_copy=True)
        loss_of(model, 0).backward()
        optimizer.step()
        del optimizer
        optimizer = OffloadedAdamW(model.parameters(), early_copy=True)  # no longer owned
        optimizer.close()
        del model, optimizer
        assert first() is None
    finally:
        gc.enable()


def test_create_graph_leaves_no_graph_on_the_stand_in():
    runs = beside_torch(early_copy=True)
    for model, optimizer in runs:
        for seed in range(4):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns of cycles with create_graph
                loss_of(model, seed).backward(create_graph=True)
                loss_of(model, seed + 10).backward(create_graph=True)
            if optimizer is runs[0][1]:
                assert all(p.grad.grad_fn is None for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
    assert_alike(*runs)


@pytest.mark.draws(1)
@pytest.mark.parametrize("early_copy", [False, True])
def test_states_of_a_layer_frozen_since_are_loaded_and_copied(early_copy):
    model = make()
    optimizer = OffloadedAdamW(model.parameters(), lr=1e-2, early_copy=early_copy)
    train(model, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    model[0].requires_grad_(False)
    train(model, optimizer, range(2, 4))
    other, twin = copy.deepcopy((model, optimizer))
    resumed = make()
    resumed.load_state_dict(model.state_dict())
    resumed[0].requires_grad_(False)
    loaded = OffloadedAdamW(resumed.parameters(), lr=1e-2, early_copy=early_copy)
    loaded.load_state_dict(optimizer.state_dict())
    for m in (model, other, resumed):
        m[0].requires_grad_(True)
    for m, o in ((model, optimizer), (other, twin), (resumed, loaded)):
        train(m, o, range(4, 6))
    assert_same(model, other, optimizer, twin)
    assert_same(model, resumed, optimizer, loaded)
    assert float(saved["state"][0]["step"]) == 2


def test_param_groups_mean_what_they_are_now():
    ours, theirs = make(), make()

    def groups(model):
        return [
            {"params": list(model[0].parameters()), "lr": 1e-1},
            {"params": list(model[2].parameters()), "lr": 1e-3},
        ]

    mine, yours = OffloadedAdamW(groups(ours)), torch.optim.AdamW(groups(theirs), fused=True)
    for seed, change in enumerate((list.reverse, lambda g: g[0]["params"].pop(), list.pop)):
        for model, optimizer in ((ours, mine), (theirs, yours)):
            change(optimizer.param_groups)
            loss_of(model, seed).backward()
            optimizer.step()
            model.zero_grad()
    assert_same(ours, theirs)


def test_closing_leaves_the_users_gradients():
    model = make()
    optimizer = OffloadedAdamW(model.parameters())
    loss_of(model, 0).backward()
    optimizer.close()
    assert all(type(p.grad) is torch.Tensor for p in model.parameters())


def test_loading_states_leaves_the_weights_alone():
    ours, theirs = make(torch.bfloat16), make(torch.bfloat16, seed=1)
    mine, yours = (OffloadedAdamW(m.parameters(), lr=1e-6) for m in (ours, theirs))
    train(theirs, yours, range(2))
    before = [p.detach().clone() for p in ours.parameters()]
    mine.load_state_dict(yours.state_dict())
    train(ours, mine, range(1))
    for p, q in zip(ours.parameters(), before, strict=True):
        torch.testing.assert_close(p, q, rtol=0.01, atol=1e-4)


def test_autograd_notices_an_update_between_forward_and_backward():
    model = make()
    optimizer = OffloadedAdamW(model.parameters())
    loss_of(model, 0).backward()
    stale = loss_of(model, 1)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


@pytest.mark.draws(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_changed_by_hand_is_followed(dtype):
    model = make(dtype)
    optimizer = OffloadedAdamW(model.parameters(), lr=1e-6)
    loss_of(model, 0).backward()
    optimizer.step()
    with torch.no_grad():
        model[0].weight[0] = 3.0
        model[2].weight.data = torch.full_like(model[2].weight, 2.0)
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    optimizer.step()
    torch.testing.assert_close(model[0].weight[0], torch.full_like(model[0].weight[0], 3.0))
    torch.testing.assert_close(model[2].weight, torch.full_like(model[2].weight, 2.0))


def test_loading_a_model_after_wrapping_is_followed():
    ours, theirs = make(torch.bfloat16), make(torch.bfloat16, seed=1)
    optimizer = OffloadedAdamW(ours.parameters())
    ours.load_state_dict(theirs.state_dict())
    reference = OffloadedAdamW(theirs.parameters())
    for model, opt in ((ours, optimizer), (theirs, reference)):
        loss_of(model, 0).backward()
        opt.step()
    assert_same(ours, theirs, optimizer, reference)


@pytest.mark.draws(2)
@pytest.mark.parametrize(
    ("fields", "gradient"),
    [
        ({"lr": 1e-39, "weight_decay": 0.0}, 1.0),
        ({"eps": 1e-40}, 0.0),  # 0 / eps is 0, and NaN where eps is flushed to zero
        ({"weight_decay": 1e-39, "adam_mode": "adam"}, 0.0),
        ({"gradient_clipping": 1e-36}, 1e3),
    ],
    ids=["rate", "eps", "weight decay", "clip factor"],
)
def test_a_caller_that_flushes_subnormals_to_zero_gets_the_bits_of_one_that_does_not(fields, gradient, device):
    def states(*, flush):
        param = nn.Parameter(torch.tensor([0.0, 1.0], device=device))
        optimizer = OffloadedAdamW([param], **fields)
        param.grad = torch.full_like(param, gradient)
        if flush and not torch.set_flush_denormal(True):
            pytest.skip("this processor cannot flush subnormals to zero")
        try:
            optimizer.step()
        finally:
            torch.set_flush_denormal(False)
        return [param, *(optimizer.state[param][name] for name in ("exp_avg", "exp_avg_sq"))]

    assert all(same_bits(a, b) for a, b in zip(states(flush=True), states(flush=False), strict=True))


# --- state ------------------------------------------------------------------------------------------


@pytest.mark.states_in_memory
def test_states_stay_fp32_and_on_the_host_through_load_state_dict():
    model = make(torch.bfloat16)
    optimizer = OffloadedAdamW(model.parameters())
    train(model, optimizer, range(2))
    pointers = [
        optimizer.state[p][k].data_ptr() for p in model.parameters() for k in ("exp_avg", "exp_avg_sq", "master")
    ]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p in model.parameters():
        for key in ("exp_avg", "exp_avg_sq", "master"):
            assert (optimizer.state[p][key].dtype, optimizer.state[p][key].device.type) == (torch.float32, "cpu")
            assert optimizer.state[p][key].shape == p.shape
    assert pointers == [
        optimizer.state[p][k].data_ptr() for p in model.parameters() for k in ("exp_avg", "exp_avg_sq", "master")
    ]


@pytest.mark.draws(1)
@pytest.mark.parametrize("older", [False, True])
def test_states_go_to_torch_and_back(older):
    """Older versions of torch have a step count that is a number, and groups without what has been added since."""
    (ours, mine), (theirs, yours) = beside_torch(lr=1e-2)
    train(theirs, yours, range(3))
    ours.load_state_dict(theirs.state_dict())
    mine.param_groups[0]["lr"] = 0.5
    saved = copy.deepcopy(yours.state_dict())
    if older:
        keep = ("lr", "betas", "eps", "weight_decay", "params")
        saved["param_groups"] = [{k: v for k, v in group.items() if k in keep} for group in saved["param_groups"]]
        for entry in saved["state"].values():
            entry["step"] = int(entry["step"])
    mine.load_state_dict(saved)
    assert mine.param_groups[0]["amsgrad"] is False
    train(ours, mine, range(3, 6))
    train(theirs, yours, range(3, 6))
    assert_same(ours, theirs, mine, yours)
    again = make()
    again.load_state_dict(ours.state_dict())
    back = torch.optim.AdamW(again.parameters(), lr=1e-2, fused=True)
    back.load_state_dict(mine.state_dict())
    train(again, back, range(6, 9))
    train(theirs, yours, range(6, 9))
    assert_same(again, theirs)


@pytest.mark.states_in_memory  # a load that a late store has begun keeps them until it ends
def test_a_dead_optimizer_leaves_no_hook_and_no_memory():
    model = make()
    optimizer = OffloadedAdamW(model.parameters(), early_copy=True)
    memory = weakref.ref(optimizer.core.memory)
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    del optimizer
    gc.collect()
    assert memory() is None
    loss_of(model, 0).backward()
    assert type(model[0].weight.grad) is torch.Tensor
    OffloadedAdamW(model.parameters())


def test_gradient_clipping_inside_equals_clipping_outside():
    ours, theirs = make(), make()
    mine = OffloadedAdamW(ours.parameters(), gradient_clipping=0.01)
    for seed in range(5):
        loss_of(ours, seed).backward()
        loss_of(theirs, seed).backward()
        expected = nn.utils.clip_grad_norm_(theirs.parameters(), 0.01)
        mine.step()
        theirs.load_state_dict(ours.state_dict())
        assert mine.report.grad_norm == pytest.approx(float(expected), rel=1e-6)
        assert mine.report.clip_coefficient == pytest.approx(min(1.0, 0.01 / (float(expected) + 1e-6)), rel=1e-6)
        mine.zero_grad()
        theirs.zero_grad()


def test_a_decay_near_one_is_rounded_once_as_in_torch():
    params = [nn.Parameter(torch.full((16,), 3.0, device=place())) for _ in range(2)]
    for p, make_optimizer in zip(params, (OffloadedAdamW, partial(torch.optim.AdamW, fused=True)), strict=True):
        optimizer = make_optimizer([p], lr=0.01, weight_decay=100.0)
        p.grad = torch.zeros_like(p)
        optimizer.step()
    assert params[0][0] != 0.0
    assert same_bits(*(p.detach().cpu() for p in params))


def test_state_dict_may_be_called_with_self_as_a_keyword():
    """As ``torch.distributed.checkpoint.state_dict`` does."""
    optimizer = OffloadedAdamW([nn.Parameter(torch.ones(3, device=place()))])
    assert OffloadedAdamW.state_dict(self=optimizer).keys() == optimizer.state_dict().keys()
