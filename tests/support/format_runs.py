"""Short runs of a small bfloat16 model, and their states."""

import torch

from frontends.torch import wrap


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(70, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3)).to(torch.bfloat16)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 70, generator=generator).bfloat16()


def trained(steps=5, **fields):
    engine = wrap(model(), lr=1e-2, **fields)
    go_on(engine, range(steps))
    return engine


def go_on(engine, steps):
    for step in steps:
        engine.backward(engine(batch(step)).square().mean())
        engine.step()


def result(engine):
    """Copies of all states, whole, by name: parameters are rounded master weights."""
    whole = {}
    for name, param in engine.module.named_parameters():
        for state, value in engine.optimizer.whole_states(param).items():
            whole[f"{state} of {name}"] = value
    return whole


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
