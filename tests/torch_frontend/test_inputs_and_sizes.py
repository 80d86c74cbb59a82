"""Gradients of chosen parameters, and parameters of another size, in every way in which an engine runs."""

import pytest
import torch

from frontends.torch import gathered_parameters, wrap
from offload_core import ParameterError
from tests.support.torch_models import loss_of, make, same_bits
from tests.support.ways import STAGE_3, WAYS


@pytest.mark.parametrize("fields", WAYS.values(), ids=WAYS)
def test_gradients_of_chosen_parameters_are_those_of_torch(fields):
    engine, theirs = wrap(make(), lr=1e-2, **fields), make()
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
    for seed in range(3):
        found = torch.autograd.grad(loss_of(engine, seed), [*engine.parameters()])
        for gradient, expected in zip(
            found, torch.autograd.grad(loss_of(theirs, seed), [*theirs.parameters()]), strict=True
        ):
            assert same_bits(gradient, expected)
        engine.backward(loss_of(engine, seed), inputs=[*engine.module[2].parameters()])
        engine.step()
        loss_of(theirs, seed).backward(inputs=[*theirs[2].parameters()])
        optimizer.step()
        optimizer.zero_grad()
    engine.flush()
    with gathered_parameters(engine.parameters()):
        for p, q in zip(engine.parameters(), theirs.parameters(), strict=True):
            assert same_bits(p, q)


def grown(p):
    return torch.cat([p.data, p.data[:4]])


CHANGES = {
    "more rows": grown,
    "as many elements": lambda p: p.data.view(p.shape[1], p.shape[0]),
    "another type": lambda p: p.data.half(),
    "another order": lambda p: p.data.t().contiguous().t(),
}


@pytest.mark.parametrize("modifier_rank", [None, 0])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_parameter_of_another_size_is_named_where_it_is_gathered_and_training_goes_on(change, modifier_rank):
    engine, twin = (wrap(make(), lr=1e-2, **STAGE_3) for _ in range(2))
    weight = next(engine.module[2].parameters())
    said = (
        r"parameter '2\.weight' became \(\d+, \d+\) torch\.float\d\d inside gathered.*resize or cast the model before"
    )
    with pytest.raises(ParameterError, match=said), gathered_parameters(weight, modifier_rank=modifier_rank):
        weight.data = change(weight)
    for each in (engine, twin):
        each.backward(loss_of(each, 0))
        each.step()
    with gathered_parameters([*engine.parameters(), *twin.parameters()]):
        for p, q in zip(engine.parameters(), twin.parameters(), strict=True):
            assert same_bits(p, q)
