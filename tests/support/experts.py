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
        again: what backward computes again: ``"block"``, ``"expert"`` or nothing; ``", reentrant"`` after it: with a
            backward of its own.
    """

    def __init__(self, again):
        super().__init__()
        self.again, _, self.reentrant = (again or "").partition(", ")
        self.router = nn.Linear(16, N_EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(N_EXPERTS))
        self.routed = []

    def forward(self, x):
        return self.computed_again(self.mix, x) if self.again == "block" else self.mix(x)

    def computed_again(self, part, x):
        return checkpoint(part, x, use_reentrant=bool(self.reentrant))

    def mix(self, x):
        share, chosen = self.router(x).softmax(-1).max(-1)
        self.routed = chosen.unique().tolist()
        out = torch.zeros_like(x)
        for number in self.routed:
            at, expert = chosen == number, self.experts[number]
            made = self.computed_again(expert, x[at]) if self.again == "expert" else expert(x[at])
            out[at] = made * share[at, None]
        return x + out


class Layer(nn.Module):
    """A block of experts behind a linear layer, both of which backward computes again: ``again="layer"``."""

    def __init__(self, again):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.block = Experts(again)

    def forward(self, x):
        block = self.block
        return block.computed_again(self.both, x) if block.again == "layer" else self.both(x)

    def both(self, x):
        return self.block(torch.tanh(self.linear(x)))


def mixture(again=None):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), Experts(again), Experts(again), nn.Linear(16, 1)).to(place())


class Repeated(nn.Sequential):
    """Its blocks run twice, with the same parameters."""

    def forward(self, x):
        for module in self[:-1]:
            x = module(x)
        for block in self[1:-1]:
            x = block(x)
        return self[-1](x)


class Borrowing(nn.Sequential):
    """Weights of an expert of each block are used outside of it, too: before it and after it."""

    def forward(self, x):
        blocks = [layer.block for layer in self[1:-1]]
        x = self[0](x)
        first, last = blocks[0].experts[0].down.weight, blocks[-1].experts[1].down.weight
        x = x + torch.tanh(x @ blocks[-1].experts[0].down.weight @ last.T)
        for layer in self[1:-1]:
            x = layer(x)
        return self[-1](x + torch.tanh(x @ first @ blocks[0].experts[1].down.weight.T))


def deep(again=None, kind=nn.Sequential):
    """Three blocks of experts behind layers."""
    torch.manual_seed(0)
    return kind(nn.Linear(8, 16), *(Layer(again) for _ in range(3)), nn.Linear(16, 1)).to(place())


def rows(seed):
    """A batch of three rows."""
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(seed)).to(place())
