"""The residency of a tensor: each state with each event, and each way to read it."""

import copy
import gc
import re

import pytest
import torch
from torch import nn

from frontends.torch import OffloadedAdamW, wrap
from frontends.torch.params import pending
from frontends.torch.params.managed import AWAITED, managed
from frontends.torch.params.residency import RESIDENCY, Residency, ResidencyEvent
from offload_core.errors import StateError
from tests.support.interrupts import FewerLines, interrupt_at


class Special(nn.Parameter):
    """A class that holds values itself, as those of quantised parameters do."""


def noted(log, word):
    def wait(tensor):
        log.append(word)

    return wait


EVENTS = {
    ResidencyEvent.UPDATE: pending.update,
    ResidencyEvent.RELEASE: pending.release,
    ResidencyEvent.RESTORE: lambda tensor, wait: pending._move(tensor, ResidencyEvent.RESTORE, wait),
    ResidencyEvent.SHARD: pending.shard,
    ResidencyEvent.ARRIVE: lambda tensor, wait: pending.arrive(tensor),
}
INTO = {
    Residency.RESIDENT: (),
    Residency.WRITING: (pending.update,),
    Residency.SHARDED: (pending.shard,),
    Residency.RELEASED: (pending.release,),
}


def tensor_in(state, log, kind=nn.Parameter):
    tensor = kind(torch.ones(3))
    for enter in INTO[state]:
        enter(tensor, noted(log, state.value))
    assert pending.residency_of(tensor) is state
    return tensor


def _known(tensor):
    this = managed(tensor)
    return this.residency, this.wait, this in AWAITED


@pytest.mark.parametrize("state", Residency)
def test_each_event_moves_a_tensor_along_the_table_or_is_an_error_and_moves_nothing(state):
    for event, act in EVENTS.items():
        log = []
        tensor = tensor_in(state, log)
        kind, known = type(tensor), _known(tensor)
        after, waits = RESIDENCY.get((state, event)), "new"
        if after is None:
            words = f"a tensor (3,) of torch.float32: {event.value!r} is not allowed while it is {state.value!r}"
            with pytest.raises(StateError, match=re.escape(words)):
                act(tensor, noted(log, "new"))
            assert (type(tensor), known) == (kind, _known(tensor))
            after, waits = state, state.value
        else:
            act(tensor, noted(log, "new"))
        assert (pending.residency_of(tensor), log) == (after, [])
        assert tensor.sum() == 3
        assert log == [waits] * (after is not Residency.RESIDENT)
        assert pending.residency_of(tensor) is Residency.RESIDENT
        assert type(tensor) is nn.Parameter
        assert _known(tensor) == (Residency.RESIDENT, None, False)


@pytest.mark.parametrize(("state", "event"), RESIDENCY)
def test_an_interrupt_at_any_line_of_a_move_leaves_the_state_before_it_or_after_it(state, event):
    number, allowed = 0, {state, RESIDENCY[state, event]}
    while True:
        log = []
        tensor = tensor_in(state, log)
        try:
            interrupt_at(number, lambda tensor=tensor, log=log: EVENTS[event](tensor, noted(log, "new")))
        except FewerLines:
            break
        left = pending.residency_of(tensor)
        assert left in allowed
        assert (type(tensor) is nn.Parameter) == (left is Residency.RESIDENT)
        assert tensor.sum() == 3
        assert log in ([[]] if left is Residency.RESIDENT else [["new"], [state.value]])
        pending.update(tensor, noted(log, "later"))
        pending.arrive(tensor)
        assert _known(tensor) == (Residency.RESIDENT, None, False)
        number += 1
    assert number > 5


DOORS = {
    "a function": lambda p: p + 1,
    "a method": lambda p: p.tolist(),
    "a copy": copy.deepcopy,
    "a view": lambda p: p[0],
    "its data": lambda p: p.data,
    "a write": lambda p: p.detach().zero_(),
    "a module": lambda p: _module_of(p)(torch.ones(1, 3)),
    "a state dict": lambda p: _module_of(p).state_dict()["weight"] + 0,
}


def _module_of(param):
    module = nn.PReLU(3)
    module.weight = param
    return module


@pytest.mark.parametrize("kind", [nn.Parameter, Special])
@pytest.mark.parametrize("door", DOORS)
def test_a_read_through_each_door_calls_the_function_of_its_state_once(door, kind):
    for state in Residency:
        if state is Residency.WRITING and kind is Special:
            continue  # update() waits at once
        log = []
        tensor = tensor_in(state, log, kind)
        DOORS[door](tensor)
        assert log == [state.value] * (state is not Residency.RESIDENT)
        assert type(tensor) is kind


@pytest.mark.parametrize("state", [state for state in Residency if state is not Residency.RESIDENT])
def test_a_read_that_is_refused_is_refused_each_time_and_metadata_may_be_asked_for(state):
    tensor = nn.Parameter(torch.ones(3))

    def refuse(tensor):
        raise StateError("not now")

    INTO[state][0](tensor, refuse)
    for read in DOORS.values():
        with pytest.raises(StateError, match="not now"):
            read(tensor)
    assert (tensor.shape, tensor.dtype, tensor.grad, len({tensor})) == ((3,), torch.float32, None, 1)
    assert pending.residency_of(tensor) is state
    pending.arrive(tensor)


def test_who_restores_a_tensor_that_another_engine_has_released_since_leaves_it_released():
    tensor, first, second = nn.Parameter(torch.ones(3)), noted([], ""), noted([], "")
    pending.release(tensor, first)
    pending.release(tensor, second)
    pending.restore(tensor, first)
    pending.end_wait(tensor, first)
    assert pending.residency_of(tensor) is Residency.RELEASED
    pending.restore(tensor, second)
    assert pending.residency_of(tensor) is Residency.WRITING
    pending.end_wait(tensor, second)
    assert pending.residency_of(tensor) is Residency.RESIDENT


STAGE_3 = {"stage": 3, "param_persistence_threshold": 0}


@pytest.mark.parametrize(("fields", "closed"), [(None, False), (None, True), ({"stage": 2}, True), (STAGE_3, True)])
def test_torch_may_swap_tensors_that_were_read_as_it_does_with_those_of_dtensors(fields, closed):
    """It swaps none that has a weak reference. An open engine has some, to tell parameters that come later."""
    model = nn.Linear(3, 2)
    optimizer = OffloadedAdamW(model.parameters(), lr=1e-2) if fields is None else wrap(model, lr=1e-2, **fields)
    out = (model if fields is None else optimizer)(torch.ones(1, 3)).sum()
    out.backward() if fields is None else optimizer.backward(out)
    optimizer.step()
    if closed:
        optimizer.close()
        del optimizer
        gc.collect()
    weights = copy.deepcopy(model.state_dict())
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict(weights)
        model.to(torch.float32)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert all(map(torch.equal, model.state_dict().values(), weights.values()))
