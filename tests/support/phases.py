"""A model of all that a release must bring back, and training that is broken by releases."""

import pytest
import torch
from torch import nn

from tests.support import simulated
from tests.support.torch_models import _SEED, place

STREAMED = {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 0}


class Mixed(nn.Module):
    """Trained and frozen layers, tied weights, a view of a parameter, buffers that forward changes, and odd strides."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.norm = nn.BatchNorm1d(64)
        self.convolution = nn.Conv2d(4, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.tied = nn.Linear(64, 32, bias=False)
        self.last = nn.Linear(32, 64)
        self.last.weight = nn.Parameter(self.first.weight.detach().clone())
        self.tied.weight = nn.Parameter(torch.randn(32, 64) / 8)
        self.again = nn.Linear(64, 32, bias=False)
        self.again.weight = self.tied.weight
        self.register_buffer("shift", torch.arange(32.0), persistent=False)

    def forward(self, x):
        x = self.norm(self.frozen(torch.relu(self.first(x))))
        x = self.convolution(x.view(-1, 4, 4, 4)).flatten(1)
        return self.last(self.tied(x)) + self.again(x).sum() + (self.shift * 1e-3).sum() + self.part.sum() * 1e-3


def mixed(device=None):
    with _SEED:
        torch.manual_seed(0)
        model = Mixed().to(device or place())
    model.again.weight = model.tied.weight  # some devices part tied weights in to()
    model.register_buffer("part", model.shift[16:])
    return model


def x_of(seed, device=None):
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(seed)).to(device or place())


def train(engine, seeds):
    """Losses of steps with these seeds."""
    losses = []
    for seed in seeds:
        loss = engine(x_of(seed)).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def drained():
    """The device goes on after a copy that failed."""
    simulated.fail_copy(0)
    for _ in range(16):  # a failure may pass from stream to stream
        try:
            torch.accelerator.synchronize()
            return
        except RuntimeError:
            pass
    pytest.fail("the device does not go on")
