"""Muon: wrap(model, optimizer="muon"), OffloadedMuon, and the bits of torch.optim.Muon on any ranks."""

import pytest
import torch
from torch import nn

from frontends.torch import gathered_parameters, wrap
from tests.support.processes import on_ranks
from tests.support.torch_models import place, same_bits
from tests.support.ways import STAGE_3, WAYS

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon to compare with")
everywhere = pytest.mark.usefixtures("device")


class Stacked(nn.Module):
    """Linear layers, and a stack of matrices, as a mixture of experts has them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(24, 48)
        self.experts = nn.Parameter(torch.randn(3, 48, 16) * 0.1)
        self.second = nn.Linear(16, 32)
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        y = torch.einsum("bi,eij->bj", torch.tanh(self.first(x)), self.experts)
        return self.head(torch.tanh(self.second(torch.tanh(y))))


MATRICES = ("first.weight", "experts", "second.weight")


def loss_of(model, seed, rank=0):
    param = next(model.parameters())
    x = torch.randn(8, 24, generator=torch.Generator().manual_seed(1000 * seed + rank))
    return model(x.to(param.device, param.dtype)).float().pow(2).mean()


class Reference:
    """Plain training of all ranks' batches by torch's optimizers, over fp32 master weights."""

    def __init__(self, model, *, ranks=1, micro_steps=1, clip=None, muon=None, adamw=None):
        self.model, self.ranks, self.micro_steps, self.clip = model, ranks, micro_steps, clip
        self.params = [*model.parameters()]
        self.masters = [p.detach().float().clone().requires_grad_() for p in self.params]
        matrices, others = [], []
        for (name, _), master in zip(model.named_parameters(), self.masters, strict=True):
            (matrices if name in MATRICES else others).append(master)
        self.matrices = {id(m): [x.detach().clone().requires_grad_() for x in _slices(m)] for m in matrices}
        flat = [x for each in self.matrices.values() for x in each]
        self.muon = torch.optim.Muon(flat, **{"lr": 0.02, **(muon or {})})
        self.adamw = torch.optim.AdamW(others, lr=1e-3, fused=True, **(adamw or {}))

    def masters_from(self, model):
        """Begin with another model's values, which this one's are rounded from."""
        with torch.no_grad():
            for master, param in zip(self.masters, model.parameters(), strict=True):
                master.copy_(param)
                for one, value in zip(self.matrices.get(id(master), ()), _slices(param), strict=False):
                    one.copy_(value)

    def step(self, seed):
        totals = [torch.zeros_like(m) for m in self.masters]
        for micro in range(self.micro_steps):
            of_ranks = []
            for rank in range(self.ranks):
                loss_of(self.model, seed * self.micro_steps + micro, rank).backward()
                of_ranks.append([p.grad.float() for p in self.params])
                self.model.zero_grad()
            for total, *gradients in zip(totals, *of_ranks, strict=True):
                mean = gradients[0].clone()
                for gradient in gradients[1:]:
                    mean += gradient
                total += mean / self.ranks
        for master, total in zip(self.masters, totals, strict=True):
            gradient = total / self.micro_steps
            for one, own in zip(self.matrices.get(id(master), ()), _slices(gradient), strict=False):
                one.grad = own.contiguous()
            master.grad = gradient
        self.muon.step()
        self.adamw.step()
        with torch.no_grad():
            for param, master in zip(self.params, self.masters, strict=True):
                if id(master) in self.matrices:
                    master.copy_(torch.stack(self.matrices[id(master)]).view_as(master))
                param.copy_(master)


def _slices(tensor):
    return [tensor] if tensor.dim() == 2 else [*tensor]


def train(engine, seeds, rank=0, micro_steps=1):
    for seed in seeds:
        for micro in range(micro_steps):
            engine.backward(loss_of(engine, seed * micro_steps + micro, rank))
            engine.step()
    engine.flush()


def values(model):
    with gathered_parameters([*model.parameters()]):
        return {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


def assert_same(found, expected):
    for name, value in expected.items():
        assert same_bits(found[name], value), name


@everywhere
@pytest.mark.quick
def test_twenty_steps_equal_torch_bit_for_bit():
    reference = Reference(Stacked())
    engine = wrap(Stacked().to(place()), optimizer="muon", lr=0.02)
    for seed in range(20):
        reference.step(seed)
    train(engine, range(20))
    assert_same(values(engine.module), values(reference.model))


ON_RANKS = {
    "stage 1": {"stage": 1},
    "stage 2": {"reduce_bucket_size": 1000, "gradient_accumulation_steps": 2},
    "clipped": {"gradient_clipping": 1e6, "reduce_bucket_size": 1},
    "narrow": {"param_dtype": "bfloat16", "communication_dtype": "float32", "reduce_bucket_size": 2500},
    "stage 3": STAGE_3,
    "delayed": {"schedule": "delayed", "delay_warmup_steps": 100},
}


def of_plain_training(world_size, fields, steps):
    dtype = torch.bfloat16 if "param_dtype" in fields else torch.float32
    reference = Reference(
        Stacked().to(dtype), ranks=world_size, micro_steps=fields.get("gradient_accumulation_steps", 1)
    )
    reference.masters_from(Stacked())
    for seed in range(steps):
        reference.step(seed)
    return {name: p.detach() for name, p in reference.model.named_parameters()}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_and_stages_give_the_bits_of_torch_in_one_process(world_size):
    @on_ranks(world_size)
    def found(rank):
        result = {}
        for name, fields in ON_RANKS.items():
            engine = wrap(Stacked(), optimizer="muon", lr=0.02, **fields)
            train(engine, range(4), rank, fields.get("gradient_accumulation_steps", 1))
            result[name] = values(engine.module)
            engine.close()
        return result

    for name, fields in ON_RANKS.items():
        expected = of_plain_training(world_size, fields, 4)
        for rank in range(world_size):
            assert_same(found[rank][name], expected)


@pytest.mark.parametrize("way", WAYS)
def test_each_way_of_running_gives_the_same_bits(way):
    engine = wrap(Stacked(), optimizer="muon", lr=0.02, reduce_bucket_size=100, **WAYS[way])
    train(engine, range(4))
    assert_same(values(engine.module), of_plain_training(1, {}, 4))
