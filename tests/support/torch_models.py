"""A small torch model with its batches and its loss, and comparisons bit for bit."""

import threading
from contextlib import contextmanager

import torch
from torch import nn

from frontends.torch import OffloadedAdamW, gathered_parameters

_SEED = threading.Lock()
"""Ranks that are threads share torch's random state."""
_device = "cpu"


@contextmanager
def on(device):
    """Models and batches are made on this device."""
    global _device
    before, _device = _device, device
    try:
        yield
    finally:
        _device = before


def place():
    """The device on which models and batches are made."""
    return torch.device(_device)


def make(dtype=torch.float32, seed=0, device=None):
    with _SEED:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16)).to(device or _device, dtype)


def batch(seed, dtype=torch.float32, device=None):
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(seed)).to(device or _device, dtype)


def loss_of(model, seed):
    first = next(model.parameters())
    return model(batch(seed, first.dtype, first.device)).float().pow(2).mean()


def same_bits(a, b):
    a, b = a.detach().cpu(), b.detach().cpu()
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.reshape(-1).contiguous().view(torch.uint8), b.reshape(-1).contiguous().view(torch.uint8))
    )


def assert_same(model, other, optimizer=None, other_optimizer=None):
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert same_bits(p, q), name
        if optimizer is not None:
            for key in ("exp_avg", "exp_avg_sq"):
                assert same_bits(optimizer.state[p][key], other_optimizer.state[q][key]), (name, key)
            assert float(optimizer.state[p]["step"]) == float(other_optimizer.state[q]["step"])


def everything(engine):
    """Copies, on the host, of the module's tensors and of the optimizer's states."""
    engine.flush()
    with gathered_parameters(engine.module.parameters()):
        found = [t.detach().cpu().clone() for t in engine.module.state_dict().values()]
    keys = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")
    states = engine.optimizer.state.values()
    return found + [torch.as_tensor(state[key]).clone() for state in states for key in keys if key in state]


def assert_all_same(found, expected):
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert same_bits(a, b), number


def step(engine, seed=0):
    engine.backward(loss_of(engine, seed))
    return engine.step()


def beside_torch(*, early_copy=False, **fields):
    """A model with its optimizer, ours, and the same with torch's."""
    ours, theirs = make(), make()
    mine = OffloadedAdamW(ours.parameters(), early_copy=early_copy, **fields)
    return (ours, mine), (theirs, torch.optim.AdamW(theirs.parameters(), fused=True, **fields))


def assert_alike(one, other):
    """Each is a model with its optimizer."""
    assert_same(one[0], other[0], one[1], other[1])


def train(model, optimizer, seeds):
    for seed in seeds:
        optimizer.zero_grad()
        loss_of(model, seed).backward()
        optimizer.step()
