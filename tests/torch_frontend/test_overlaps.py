"""Parameters over one memory: what overlaps is named when it is wrapped, and what does not is trained."""

import pytest
import torch
from torch import nn

from frontends.torch import OffloadedAdamW, wrap
from offload_core import ParameterError
from tests.support.ways import WAYS


def model():
    """Each parameter has a multiple of 8 elements, as torch's fused AdamW rounds the others' last ones otherwise."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4, bias=False))


def alias(change):
    made = model()
    with torch.no_grad():
        change(made)
    return made


OVERLAPS = {
    "the same": lambda m: setattr(m[2].weight, "data", m[0].weight.data),
    "transposed": lambda m: setattr(m[2].weight, "data", m[0].weight.data.t()),
    "some rows": lambda m: setattr(m[4].weight, "data", m[0].weight.data[2:6]),
    "frozen": lambda m: (setattr(m[2].weight, "data", m[0].weight.data), m[2].requires_grad_(False)),
    "a buffer": lambda m: m[0].register_buffer("before", m[0].weight.detach()),
    "an attribute": lambda m: setattr(m[2], "before", m[0].weight.detach()[:, 3]),
}


@pytest.mark.draws(10)
@pytest.mark.parametrize("fields", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("change", OVERLAPS.values(), ids=OVERLAPS)
def test_tensors_over_the_memory_of_a_trained_parameter_are_named(change, fields):
    other = r"'(2|4)\.weight'|'0\.before'|'2\.before'"
    with pytest.raises(ParameterError, match=rf"parameter '0\.weight' and ({other}) lie over one memory; .*nn\.Param"):
        wrap(alias(change), lr=1e-3, **fields)


def test_the_optimizer_alone_names_them_too_also_in_a_group_that_is_added():
    made = alias(OVERLAPS["the same"])
    with pytest.raises(ParameterError, match="lie over one memory"):
        OffloadedAdamW(made.parameters())
    optimizer = OffloadedAdamW(made[0].parameters())
    with pytest.raises(ParameterError, match="lie over one memory"):
        optimizer.add_param_group({"params": [made[2].weight]})


def tied(m):
    m[2].weight = m[0].weight


def parts_of_one_memory(m):
    params = [*m.parameters()]
    memory = torch.cat([p.data.flatten() for p in params])
    for p, part in zip(params, memory.split([p.numel() for p in params]), strict=True):
        p.data = part.view_as(p)


def interleaved(m):
    both = torch.stack([m[0].bias.data, torch.zeros(8)], dim=1)
    m[0].bias.data = both[:, 0].contiguous()
    memory = torch.zeros(8, 2)
    m.register_buffer("odd", memory[:, 1])
    m.register_buffer("even", memory[:, 0])


@pytest.mark.draws(5)
@pytest.mark.parametrize("change", [tied, parts_of_one_memory, interleaved])
@pytest.mark.parametrize("fields", WAYS.values(), ids=WAYS)
def test_what_does_not_overlap_trains_as_in_torch(change, fields):
    ours, theirs = alias(change), alias(change)
    engine = wrap(ours, lr=1e-2, **fields)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
    for seed in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        engine.backward(engine(x).pow(2).mean())
        engine.step()
        theirs(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(engine(x), theirs(x))
