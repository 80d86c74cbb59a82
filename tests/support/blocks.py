"""Models of blocks, for micro-batches that pass them block by block, and the loop with which they are compared."""

from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout, scaled_dot_product_attention

from offload_core.stage3.live_params import LiveParams
from tests.support.torch_models import place

VOCABULARY, WIDTH = 61, 32


class Block(nn.Module):
    """A block of a transformer with what real ones have: a mask by keyword, a table that all blocks get and that wants
    a gradient, a parameter of its own, and a tuple as its output."""

    def __init__(self, width=WIDTH, drop=0.0):
        super().__init__()
        self.norm, self.attend, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.ones(width))
        self.drop = drop

    def forward(self, x, table, *, mask=None):
        q, k, v = self.attend(self.norm(x) + table).chunk(3, -1)
        x = x + self.out(scaled_dot_product_attention(q, k, v, attn_mask=mask))
        hidden = dropout(nn.functional.gelu(self.up(x)), self.drop, self.training)
        return x + self.down(hidden) * self.scale + table, hidden.detach().mean()


class Gpt(nn.Module):
    """A small GPT, whose first hidden state is added again after the last block.

    Args:
        skip: False: it is not added again.
        tied: the head's weight is the embedding's.
        frozen: the number of first blocks that are not trained.
    """

    def __init__(self, n=3, drop=0.0, tied=False, frozen=0, skip=True):
        super().__init__()
        self.skip = skip
        self.embedding, self.table = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(Block(drop=drop) for _ in range(n))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        for module in (self.embedding, self.table, *self.layers[:frozen]) if frozen else ():
            module.requires_grad_(False)

    def forward(self, x):
        first = hidden = self.embedding(x)
        table = torch.tanh(self.table(torch.arange(x.shape[1], device=x.device)))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        for layer in self.layers:
            hidden, _ = layer(hidden, table, mask=mask)
            hidden = hidden * 0.5
        return self.head(self.norm(hidden + first if self.skip else hidden))


def made(seed=0, **options):
    torch.manual_seed(seed)
    return Gpt(**options).to(place())


def loss_of(output, batch):
    return cross_entropy(output.flatten(0, 1).float(), batch.flatten())


def batches(n, seed=0):
    """Micro-batches of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (2, 5 + 3 * (i % 4)), generator=generator).to(place()) for i in range(n)]


def loop(engine, data):
    """Train a step with the loop; return its losses, and the report of its update."""
    losses, report = [], None
    for batch in data:
        loss = loss_of(engine(batch), batch)
        losses.append(loss.item())
        engine.backward(loss)
        report = engine.step()
    return losses, report


def by_blocks(engine, data, **options):
    """Train a step block by block; return its losses, and the report of its update."""
    losses = [loss.item() for loss in engine.accumulate(data, loss_of, **options)]
    return losses, engine.step()


def by_no_sync(engine, data):
    """Train a step with the loop in which gradients are reduced behind the last backward alone; return its losses."""
    losses = []
    for batch in data:
        loss = loss_of(engine(batch), batch)
        losses.append(loss.item())
        with engine.no_sync() if batch is not data[-1] else nullcontext():
            engine.backward(loss)
    engine.step(boundary=True)
    return losses


class Gathered:
    """Counts the gatherings of each parameter of an engine, by name. Engines that were deleted gather, too."""

    def __init__(self, patch, engine):
        self.counts, mine = {}, engine.optimizer.sharding.live
        gather = LiveParams._gather

        def count(live, param):
            if live is not mine:
                return gather(live, param)
            self.counts[param.spec.name] = self.counts.get(param.spec.name, 0) + 1
            return gather(live, param)

        patch.setattr(LiveParams, "_gather", count)
