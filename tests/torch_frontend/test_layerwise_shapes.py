"""Models whose code around and inside blocks does something of its own: ``accumulate()`` has the loop's gradients."""

import warnings
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from frontends.torch import wrap
from frontends.torch.layerwise.waiting import HostSlots
from tests.support.torch_models import place, same_bits

WIDTH = 8
STAGE_3 = {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 0}


class Added(nn.Module):
    """A block that adds a parameter of a sequence's shape: autograd hands both of them one gradient."""

    def __init__(self, view):
        super().__init__()
        self.table, self.linear = nn.Parameter(torch.randn(1, 5, WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.view = view

    def forward(self, x):
        return self.linear(torch.tanh(x + (self.table[0][None] if self.view else self.table)))


class Summed(nn.Module):
    """A block with two parameters that get one gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return torch.tanh(x) * (self.first + self.second)


class Moving(nn.Module):
    """A block that divides by a scale, which it then moves towards its input's."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        x = self.linear(x) / self.scale.clone()
        with torch.no_grad():
            self.scale.mul_(0.5).add_(0.5 * x.abs().mean())
        return x


class Scripted(nn.Module):
    """A block that ends in TorchScript."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return gated(self.linear(x), x)


def _gated(x, y):
    return x + torch.sigmoid(y) * x


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # many models have it
    gated = torch.jit.script(_gated)


class Catching(nn.Module):
    """A block that tries something, and goes on where it fails."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        try:
            return torch.tanh(self.linear(x)) * x
        except Exception:
            return x


class Cut(nn.Module):
    """A block that returns a view of what it gets."""

    def forward(self, x):
        return x[:, 1:]


class Trunk(nn.Module):
    """Blocks, and around them what ``between`` does with them."""

    def __init__(self, block, between=None, shared=False):
        super().__init__()
        self.first, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(3))
        self.head = self.layers[-1] if shared else nn.Linear(WIDTH, WIDTH)
        self.between = between

    def forward(self, x):
        x = self.first(x)
        if self.between is not None:
            return self.between(self, x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def gated_before(trunk, x):
    h = torch.sigmoid(x)
    r = torch.tanh(trunk.gate(h))
    x = x + trunk.layers[0](h) * r
    for layer in trunk.layers[1:]:
        x = layer(x) + torch.sigmoid(x)
    return trunk.head(x)


def products(trunk, x):
    aside = 0
    for layer in trunk.layers:
        x = layer(x)
        aside = aside + x * x
    return trunk.head(x) + aside


def skips(trunk, x):
    kept = []
    for layer in trunk.layers:
        kept.append(x)
        x = layer(x + kept[0].transpose(0, 1).transpose(0, 1) if len(kept) > 1 else x)
    return trunk.head(x * kept[1] + kept[2])


def hooked(trunk, x):
    x.register_hook(lambda gradient: gradient * 0.5)
    for layer in trunk.layers:
        x = layer(x)
    return trunk.head(x)


def with_kernels(trunk, x):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        for layer in trunk.layers:
            x = layer(x)
    return trunk.head(x)


def linear():
    return nn.Linear(WIDTH, WIDTH)


MODELS = {
    "a table": lambda: Trunk(lambda: Added(view=False)),
    "a table's view": lambda: Trunk(lambda: Added(view=True)),
    "one gradient of two": lambda: Trunk(Summed),
    "a buffer": lambda: Trunk(Moving),
    "TorchScript": lambda: Trunk(Scripted),
    "an exception that is caught": lambda: Trunk(Catching),
    "a view of the input": lambda: nn.Sequential(linear(), linear(), Cut(), nn.Flatten(), nn.Linear(4 * WIDTH, 3)),
    "saved before": lambda: Trunk(linear, gated_before),
    "products": lambda: Trunk(linear, products),
    "skips": lambda: Trunk(linear, skips),
    "a hook": lambda: Trunk(linear, hooked),
    "kernels": lambda: Trunk(linear, with_kernels),
}


def batches(seed):
    return [
        torch.randn(1, 5, WIDTH, generator=torch.Generator().manual_seed(9 * seed + i)).to(place()) for i in range(3)
    ]


def squared(output, _):
    return output.float().pow(2).mean()


@pytest.mark.draws(8)
@pytest.mark.parametrize("fields", [{}, STAGE_3, {"host_activation_memory": 1 << 20}], ids=["whole", "stage 3", "host"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_buffers_are_those_of_the_loop(name, fields, device):
    engines, buffers = [], []
    for _ in range(2):
        torch.manual_seed(0)
        engines.append(wrap(MODELS[name]().to(place()), gradient_accumulation_steps=6, **fields))
    loop, engine = engines
    flash = torch.backends.cuda.flash_sdp_enabled()
    for x in (*batches(0), *batches(1)):
        loop.backward(squared(loop(x), x))
        if len(buffers) < 5:
            loop.step()
            buffers.append(0)
    for call in range(2):
        engine.accumulate(batches(call), squared)
        if call == 0:
            engine.step()
    assert torch.backends.cuda.flash_sdp_enabled() == flash
    theirs = dict(loop.module.named_parameters())
    for key, param in engine.module.named_parameters():
        mine, expected = engine.optimizer.whole_gradient(param), loop.optimizer.whole_gradient(theirs[key])
        assert (mine is None) == (expected is None), key
        assert mine is None or torch.allclose(mine, expected, rtol=1e-4, atol=1e-6), key
    for (key, value), expected in zip(engine.module.named_buffers(), loop.module.buffers(), strict=True):
        assert same_bits(value, expected), key


def test_a_block_whose_module_is_used_behind_the_blocks_too():
    """Its gradient is not complete before the block has run backward, so it is not updated there."""
    for fields in ({}, {"update_in_backward": True, "reduce_bucket_size": 64}):
        torch.manual_seed(0)
        engine = wrap(Trunk(linear, shared=True), gradient_accumulation_steps=3, **fields)
        blocks = ["layers.0", "layers.1"]
        engine.accumulate(batches(0), squared, blocks=blocks)
        assert engine.step().updated


def test_a_slot_that_gives_way_is_freed_behind_the_copies_from_it():
    """Slots are lent again if they fit. Else the device ends its copies before their memory is freed."""
    events = []
    device = SimpleNamespace(synchronize=lambda: events.append("the device has ended"))

    def allocate(label, numel, dtype, *, pinned):
        slot = np.empty(numel, dtype)
        weakref.finalize(slot, events.append, f"{numel} freed")
        return slot

    slots = HostSlots(SimpleNamespace(allocate=allocate), 100, device)
    slots.give_back(slots.borrow(80))
    again = slots.borrow(60)
    assert again.size == 80, "lent again"
    assert slots.borrow(30) is None, "all of them are lent"
    slots.give_back(again)
    del again
    assert events == []
    assert slots.borrow(30).size == 30
    assert events[:2] == ["the device has ended", "80 freed"]
    del slots
    assert events[-1] == "the device has ended"
