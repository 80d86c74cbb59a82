"""Stage 3 in torch on one rank, its parameters in host memory: the bits of stage 2, and bounded device memory."""

import copy
import gc
import hashlib

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from partitioned_models import External, external_loss, gpt, gpt_loss
from slow_torch_device import SlowTorchDevice
from strategies import law
from torch import nn
from torch.utils.checkpoint import checkpoint

import frontends.torch.device_ranks as device_ranks
from frontends.torch import OffloadedAdamW, gathered_parameters, wrap
from frontends.torch.pending import PendingParameter
from offload_core import ConfigError, StateError

WIDTH = 4
STAGE_3 = {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 1}
NARROW = {**STAGE_3, "max_live_parameters": 4000, "prefetch_bucket_size": 2500, "max_reuse_distance": 3000}


def live(engine):
    return engine.optimizer.partitioned.live


def released(engine):
    whole = [p for p in engine.parameters() if p.untyped_storage().nbytes()]
    return live(engine).numel == live(engine).n_bytes == 0 and not whole


def values(engine):
    with gathered_parameters(engine.module.parameters()):
        return [p.detach().clone() for p in engine.parameters()]


def digest(engine):
    return hashlib.sha256(b"".join(v.view(torch.uint8).numpy().tobytes() for v in values(engine))).hexdigest()


def train(engine, loss_of, steps, first=0):
    losses = []
    for step in range(first, first + steps):
        loss = loss_of(engine, step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


# --- random module trees ------------------------------------------------------------------------------


class Leaf(nn.Linear):
    """What a tree is made of; wider ones are more parameters."""

    def __init__(self, hidden):
        super().__init__(WIDTH, hidden)
        self.back = nn.Parameter(torch.randn(hidden, WIDTH) * 0.3)

    def forward(self, x, skipped):
        return torch.tanh(super().forward(x) @ self.back)


class Node(nn.Module):
    """Runs its children, some of them again and some not at all, maybe under checkpointing; has a weight of its own and
    maybe uses one of a child's."""

    def __init__(self, children, order, scale, borrows, checkpoints):
        super().__init__()
        self.parts = nn.ModuleList(children)
        self.order = order
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5) if scale else None
        self.borrows = borrows
        self.checkpoints = checkpoints

    def run(self, x, skipped):
        for i in self.order:
            if i % 3 != skipped:
                x = x + self.parts[i % len(self.parts)](x, skipped)
        return x

    def forward(self, x, skipped):
        if self.checkpoints is None or not torch.is_grad_enabled():
            x = self.run(x, skipped)
        else:
            x = checkpoint(self.run, x, skipped, use_reentrant=self.checkpoints)
        leaves = [part for part in self.parts if isinstance(part, Leaf)]
        if self.borrows and leaves:
            x = x + F.linear(x, leaves[0].weight[:WIDTH])
        return x if self.scale is None else x * self.scale


@st.composite
def trees(draw):
    """How to build a tree, as nested tuples; a leaf or a node may occur several times."""
    made = []

    def build(depth):
        if made and draw(st.integers(0, 3)) == 0:
            return ("again", draw(st.integers(0, len(made) - 1)))
        if depth == 0 or draw(st.booleans()):
            made.append(None)
            return ("leaf", len(made) - 1, draw(st.sampled_from([4, 7, 16])), draw(st.integers(0, 5)) == 0)
        parts = [build(depth - 1) for _ in range(draw(st.integers(1, 3)))]
        made.append(None)
        order = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
        how = draw(st.sampled_from([None, None, False, True]))
        return ("node", len(made) - 1, parts, order, draw(st.booleans()), draw(st.booleans()), how)

    parts = [build(2) for _ in range(draw(st.integers(1, 3)))]
    return ("node", len(made), parts, [0, 1, 2, 4, 5, 7], draw(st.booleans()), draw(st.booleans()), None)


def plant(tree):
    torch.manual_seed(0)
    made = {}

    def build(tree):
        kind, number, *rest = tree
        if kind == "again":
            return made[number]
        if kind == "leaf":
            hidden, frozen = rest
            made[number] = Leaf(hidden).requires_grad_(not frozen)
        else:
            parts, order, scale, borrows, how = rest
            made[number] = Node([build(part) for part in parts], order, scale, borrows, how)
        return made[number]

    root = nn.ModuleDict({"tree": build(tree), "head": nn.Linear(WIDTH, 3)})
    return root


class Rooted(nn.Module):
    def __init__(self, tree):
        super().__init__()
        parts = plant(tree)
        self.tree, self.head = parts["tree"], parts["head"]

    def forward(self, x, skipped):
        return self.head(self.tree(x, skipped)).pow(2).mean()


def own(module):
    borrowed = module.__dict__.get("_offload_external_parameters", [])
    return {id(p): p.numel() for p in [*module.parameters(recurse=False), *borrowed]}


def deepest(module, above=frozenset()):
    """The most elements that a module, what runs it and what that borrows have."""
    held = dict(above) | own(module)
    return max([sum(held.values()), *(deepest(child, held.items()) for child in module.children())])


@law(40)
@given(
    tree=trees(),
    fields=st.fixed_dictionaries(
        {
            "max_live_parameters": st.sampled_from([0, 60, 150, 10**9]),
            "prefetch_bucket_size": st.sampled_from([0, 40, 100, 10**9]),
            "max_reuse_distance": st.sampled_from([0, 50, 10**9]),
            "param_persistence_threshold": st.sampled_from([0, 5, 20]),
            "gradient_accumulation_steps": st.sampled_from([1, 2]),
        }
    ),
    skips=st.lists(st.sampled_from([0, 1, 2, 3]), min_size=3, max_size=4),
    input_has_gradient=st.booleans(),
    slow=st.booleans(),
)
def test_any_tree_trains_to_the_same_bits_within_its_window(tree, fields, skips, input_has_gradient, slow):
    def run(config):
        torch.manual_seed(1)
        engine = wrap(Rooted(tree), lr=1e-2, **config)
        losses = []
        for step, skipped in enumerate(skips):
            for _ in range(config["gradient_accumulation_steps"]):
                x = torch.randn(3, WIDTH, requires_grad=input_has_gradient)
                loss = engine(x, skipped)
                engine.backward(loss)
                report = engine.step()
            with torch.no_grad():
                losses += [loss.item(), engine(x.detach(), skips[step - 1]).item()]
        assert report.updated
        return engine, losses

    expected, expected_losses = run({"gradient_accumulation_steps": fields["gradient_accumulation_steps"]})
    with pytest.MonkeyPatch.context() as patch:
        if slow:
            patch.setattr(device_ranks, "memory_of", lambda device: SlowTorchDevice(delay=1e-4))
        engine, losses = run({**STAGE_3, **fields})
        assert losses == expected_losses
        assert live(engine).numel == 0
        bound = deepest(engine.module)
        checkpoints = any(getattr(module, "checkpoints", None) is not None for module in engine.modules())
        # A run that is computed again holds its first modules beside the one whose backward asked for it.
        assert live(engine).peak_numel <= max(fields["max_live_parameters"], bound * (2 if checkpoints else 1))
        for ours, theirs in zip(values(engine), expected.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        engine.close()
    for ours, theirs in zip(engine.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs)
