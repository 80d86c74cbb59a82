"""A torch model with all that a module can have, for the subjects of torch."""

import random

import numpy as np
import torch
from torch import nn

from tests.support.torch_models import _SEED, place


class Mixed(nn.Module):
    """A convolution in memory order, dropout, statistics, and tied, frozen and odd tensors."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 4)
        self.tied = self.head
        self.scale = nn.Parameter(torch.randn(()))
        self.frozen = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.register_buffer("mask", torch.rand(4) > 0.5)
        self.register_buffer("spread", torch.randn(3, 8)[:, ::2])
        self.register_buffer("cache", torch.randn(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(torch.relu(self.norm(self.conv(x)))).mean((2, 3))
        return (self.tied(x) @ self.frozen) * self.scale


class Remembering(Mixed):
    """It has besides what not every call takes: a state that is no tensor, complex and overlapping elements."""

    seen = 0
    refuses = False
    """True has it refuse its state."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.register_buffer("phase", torch.randn(2, dtype=torch.complex64))
        self.register_buffer("ones", torch.ones(3, 1).expand(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += self.training
        return super().forward(x)

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        if self.refuses:
            raise KeyError("set_extra_state")
        self.seen = state["seen"]


def mixed(seed: int = 0, kind: type[Mixed] = Mixed) -> Mixed:
    with _SEED:
        return kind(seed).to(place())


def images(number: int | None = None) -> torch.Tensor:
    """A batch of four images of 3 x 6 x 6, drawn from three generators. A number seeds them first."""
    if number is not None:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(number)
    return torch.randn(4, 3, 6, 6).to(place()) + np.random.rand() + random.random()
