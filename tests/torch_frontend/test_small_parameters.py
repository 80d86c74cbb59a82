"""Many small parameters: what a step does for all of them at once gives each what it would have got alone."""

import gc
import sys
from collections import Counter

import pytest
import torch
from torch import nn

from frontends.torch import OffloadedAdamW, wrap
from frontends.torch.params import pending
from offload_core.errors import GradientError, ParameterError
from offload_core.step import last_step

SIZES = [(16,), (4, 8), (32,), (2, 16)]


def made(n):
    torch.manual_seed(1)
    return [nn.Parameter(torch.randn(SIZES[i % len(SIZES)])) for i in range(n)]


def gradients_like(params, seed):
    drawn = torch.Generator().manual_seed(seed)
    return [torch.randn(param.shape, generator=drawn) for param in params]


def give(params, gradients):
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = None if gradient is None else gradient.clone()


def assert_same(ours, theirs):
    for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(mine, other), f"parameter {i}"


def write(param):
    with torch.no_grad():
        param.mul_(0.5)


def replace(param):
    param.data = param.data * 0.5


def write_data(param):
    param.data.mul_(0.5)


CHANGES = {"written": write, "replaced": replace, "written through data": write_data}


@pytest.mark.parametrize("change", CHANGES)
def test_parameters_in_many_states_get_the_bits_of_torchs_optimizer(change):
    """Some have no gradient, some are written from outside, some leave their group and come back."""
    ours, theirs = made(40), made(40)
    mine, other = OffloadedAdamW(ours, lr=1e-2), torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    for step in range(6):
        drawn = gradients_like(ours, step)
        for params, optimizer in ((ours, mine), (theirs, other)):
            for param in params[step::7]:
                CHANGES[change](param)
            give(params, [None if (i + step) % 5 == 0 else gradient for i, gradient in enumerate(drawn)])
            optimizer.step()
        assert_same(ours, theirs)


def test_parameters_that_leave_their_group_and_come_back_get_the_bits_of_torchs_optimizer():
    ours, theirs = made(20), made(20)
    mine, other = OffloadedAdamW(ours, lr=1e-2), torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    for step, present in enumerate((range(20), range(3, 20), range(0, 20, 2), range(20))):
        drawn = gradients_like(ours, step)
        for params, optimizer in ((ours, mine), (theirs, other)):
            optimizer.param_groups[0]["params"][:] = [params[i] for i in present]
            give(params, drawn)
            optimizer.step()
        assert_same(ours, theirs)


def step_with_plain_gradients(optimizers, n):
    """Gradients that lie as their parameters do are known to each optimizer from then on."""
    for optimizer in optimizers:
        for seed in range(n):
            params = optimizer.param_groups[0]["params"]
            give(params, gradients_like(params, seed))
            optimizer.step()


@pytest.mark.parametrize("steps_before", [0, 2])
def test_one_gradient_that_lies_otherwise_among_many_counts_as_what_it_holds(steps_before):
    ours, theirs = made(12), made(12)
    mine, other = OffloadedAdamW(ours, lr=1e-2), torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    step_with_plain_gradients([mine, other], steps_before)
    drawn = gradients_like(ours, 0)
    give(theirs, [*drawn[:4], -drawn[4], *drawn[5:]])
    give(ours, drawn)
    ours[1].grad = ours[1].grad.t().contiguous().t()
    ours[4].grad = torch.complex(drawn[4], drawn[4]).conj().imag
    assert ours[4].grad.is_neg()
    mine.step()
    other.step()
    assert_same(ours, theirs)


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("wrong", ["sparse", "of another type", "resized", "reshaped"])
def test_one_that_does_not_fit_among_many_is_named_and_nothing_changes(wrong, steps_before):
    params = made(12)
    optimizer = OffloadedAdamW(params, lr=1e-2)
    step_with_plain_gradients([optimizer], steps_before)
    before = [param.detach().clone() for param in params]
    give(params, gradients_like(params, 0))
    if wrong == "sparse":
        params[5].grad = params[5].grad.to_sparse()
    elif wrong == "of another type":
        params[5].grad.data = params[5].grad.bfloat16()
    elif wrong == "resized":
        params[5].grad.resize_(4, 4)
    else:
        params[5].grad = None
        params[5].data = params[5].data.reshape(8, 4)
    with pytest.raises((GradientError, ParameterError), match="group 0, parameter 5'"):
        optimizer.step()
    if wrong == "reshaped":
        params[5].data = params[5].data.reshape(4, 8)
    assert_same(params, before)
    give(params, gradients_like(params, 0))
    optimizer.step()
    assert not any(map(torch.equal, params, before))


class _Sum(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.params = nn.ParameterList(made(n))

    def forward(self):
        return sum(param.square().sum() for param in self.params)


def calls_of(act):
    """Calls of Python functions in this thread by name, generators that go on included."""
    calls = Counter()
    gc.collect()  # else the end of an earlier optimizer may come in the middle
    gc.disable()
    sys.setprofile(lambda frame, event, argument: calls.update([frame.f_code.co_qualname]) if event == "call" else None)
    try:
        act()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def test_no_python_function_is_called_for_each_parameter_of_a_step(monkeypatch):
    monkeypatch.setattr(last_step, "uninterrupted", lambda section: section())
    monkeypatch.setattr(pending, "AWAITED", set())  # an engine of another test may have tensors in it

    def of_optimizer(n):
        params = made(n)
        optimizer = OffloadedAdamW(params, lr=1e-2)
        give(params, gradients_like(params, 0))
        optimizer.step()
        return calls_of(optimizer.step)

    def of_engine(n):
        engine = wrap(_Sum(n), lr=1e-2)
        for _ in range(2):
            engine.backward(engine())
            calls = calls_of(engine.step)
        return calls

    assert of_optimizer(60) == of_optimizer(30)
    assert of_engine(60) == of_engine(30)


def test_a_gradient_in_backward_takes_at_most_twenty_one_calls():
    def calls(n):
        engine = wrap(_Sum(n), lr=1e-2)
        for _ in range(2):
            loss = engine()
            calls = calls_of(lambda: engine.backward(loss))  # noqa: B023
            engine.step()
        return calls

    assert calls(60).total() - calls(30).total() <= 21 * 30


@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_gradient_in_backward_whose_memory_is_negated_counts_as_what_it_holds(steps_before):
    ours, theirs = nn.Parameter(torch.ones(4, 8)), nn.Parameter(torch.ones(4, 8))
    mine, other = OffloadedAdamW([ours], early_copy=True), torch.optim.AdamW([theirs], fused=True)
    drawn = [gradients_like([ours], seed)[0] for seed in range(steps_before + 1)]
    for step, gradient in enumerate(drawn):
        if step == steps_before:
            ours.register_hook(lambda gradient: torch._neg_view(gradient.clone()))
            theirs.register_hook(torch.neg)
        for param, optimizer in ((ours, mine), (theirs, other)):
            (param * gradient).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(ours, theirs)


def test_memory_that_a_parameter_gave_up_is_free():
    layer = torch.nn.Linear(64, 64)
    optimizer = OffloadedAdamW(layer.parameters(), lr=0.1)
    layer(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = layer.weight.detach().clone()
    address = layer.weight.data_ptr()
    layer.weight.data = torch.empty(0)
    held = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.numel() == 64 * 64]
    assert address not in [tensor.data_ptr() for tensor in held if tensor.device.type == "cpu"]
    layer.weight.data = before.clone()
    layer(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    assert not torch.equal(layer.weight, before)
