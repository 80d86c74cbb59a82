"""A model with blocks of experts that are modules of their own, of which a batch uses few."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.torch_models import place

N_EXPERTS = 6


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Experts(nn.Module):
    """Each row goes to one expert.

    Args:
        again: what backward computes again: ``"block"``, ``"expert"`` or nothing.
    """

    def __init__(self, again):
        super().__init__()
        self.again = again
        self.router = nn.Linear(16, N_EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(N_EXPERTS))
        self.routed = []

    def forward(self, x):
        return checkpoint(self.mix, x, use_reentrant=False) if self.again == "block" else self.mix(x)

    def mix(self, x):
        share, chosen = self.router(x).softmax(-1).max(-1)
        self.routed = chosen.unique().tolist()
        out = torch.zeros_like(x)
        for number in self.routed:
            at, expert = chosen == number, self.experts[number]
            made = checkpoint(expert, x[at], use_reentrant=False) if self.again == "expert" else expert(x[at])
            out[at] = made * share[at, None]
        return x + out


def mixture(again=None):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), Experts(again), Experts(again), nn.Linear(16, 1)).to(place())


def rows(seed):
    """A batch of three rows."""
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(seed)).to(place())
