"""Plain torch whose gradients and states are read and changed between backward and step, and an engine that does the
same: every value that is read, and every bit at the end, is compared."""

from dataclasses import dataclass

import torch
from torch import nn

from frontends.torch import wrap
from tests.support.torch_models import place, same_bits

LR = 1e-2


class Model(nn.Module):
    """Of its last layer some batches make no use."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.rare = nn.Linear(32, 64), nn.Linear(64, 16), nn.Linear(16, 16)

    def forward(self, x, rare):
        x = self.last(nn.functional.gelu(self.first(x)))
        return self.rare(x) if rare else x


def model():
    torch.manual_seed(0)
    return Model().to(place())


def loss_of(net, seed, rank, dtype, *, alike=False):
    """Args: alike: all ranks use the last layer, or none does."""
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1000 * seed + rank)).to(place(), dtype)
    return net(x, rare=(seed + rank * (not alike)) % 3 == 1).float().pow(2).mean()


@dataclass(frozen=True)
class Change:
    """A gradient that is read (``factor`` None), or changed to ``factor * gradient + 1``: that of one parameter, after
    the backward of this step and micro-step; ``own``: each rank reads and writes its part alone."""

    step: int
    micro_step: int
    param: int
    own: bool
    factor: float | None


class Plain:
    """The loop by hand: one process with the batches of all ranks, fp32 masters and torch's fused AdamW."""

    def __init__(self, n_ranks, dtype, divisor, scale, alike):
        self.net, self.n_ranks, self.dtype, self.divisor, self.scale = model(), n_ranks, dtype, divisor, scale
        self.alike = alike
        self.masters = [p.detach().cpu().clone() for p in self.net.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, lr=LR, fused=True)
        self.net.to(dtype)
        self.sums = [None] * len(self.masters)

    def backward(self, seed):
        came = [[] for _ in self.masters]
        for rank in range(self.n_ranks):
            (loss_of(self.net, seed, rank, self.dtype, alike=self.alike) * self.scale).backward()
            for i, p in enumerate(self.net.parameters()):
                came[i].append(None if p.grad is None else p.grad.detach().cpu().float())
                p.grad = None
        for i, (each, master) in enumerate(zip(came, self.masters, strict=True)):
            if any(gradient is not None for gradient in each):
                first, *others = (torch.zeros_like(master) if gradient is None else gradient for gradient in each)
                mean = sum(others, first) / self.n_ranks
                self.sums[i] = mean if self.sums[i] is None else self.sums[i] + mean

    def gradient(self, i):
        return None if self.sums[i] is None else self.sums[i] / (self.divisor * self.scale)

    def change(self, i, factor):
        self.sums[i] = (self.gradient(i) * factor + 1) * (self.divisor * self.scale)

    def norm(self):
        present = [self.gradient(i) for i, held in enumerate(self.sums) if held is not None]
        return torch.cat([gradient.double().flatten() for gradient in present]).norm().item()

    def step(self, coefficient):
        for i, master in enumerate(self.masters):
            master.grad = None if self.sums[i] is None else self.gradient(i) * coefficient
        self.optimizer.step()
        with torch.no_grad():
            for p, master in zip(self.net.parameters(), self.masters, strict=True):
                p.copy_(master)
        self.sums = [None] * len(self.masters)


def compare(changes, *, rank=0, n_ranks=1, dtype=torch.float32, steps=2, **fields):
    """Run both, with these changes on the way; both are then equal in every bit. Return what an engine has read.

    Args:
        fields: of the engine.
    """
    micro_steps, scale = fields.get("gradient_accumulation_steps", 1), fields.get("loss_scale", 1)
    alike = fields.get("stage") == 3  # where ranks run the same modules
    plain = Plain(n_ranks, dtype, micro_steps, scale, alike)
    engine = wrap(model(), lr=LR, param_dtype=dtype, **fields)
    params, optimizer, read = [*engine.module.parameters()], engine.optimizer, 0
    for step in range(steps):
        for micro_step in range(micro_steps):
            seed = step * micro_steps + micro_step
            plain.backward(seed)
            engine.backward(loss_of(engine, seed, rank, dtype, alike=alike))
            for change in (c for c in changes if (c.step, c.micro_step) == (step, micro_step)):
                param, expected = params[change.param], plain.gradient(change.param)
                whole = optimizer.whole_gradient(param)
                assert (whole is None) == (expected is None), change
                if expected is None:
                    assert optimizer.own_gradient(param) is None, change
                    continue
                assert same_bits(whole, expected), change
                read += 1
                own = optimizer.own_gradient(param)
                if n_ranks == 1:
                    assert same_bits(own, expected.flatten()), change
                if change.factor is not None:
                    before = own if change.own else whole
                    optimizer.load_gradient(param, before * change.factor + 1, own=change.own)
                    plain.change(change.param, change.factor)
                    assert same_bits(optimizer.whole_gradient(param), plain.gradient(change.param)), change
            norm = plain.norm()
            report = engine.step()
        assert report.updated, report
        if report.grad_norm is not None:
            assert abs(report.grad_norm - norm) <= 1e-6 * norm
        plain.step(report.clip_coefficient)
    for (name, param), master, moved in zip(
        engine.module.named_parameters(), plain.masters, plain.net.parameters(), strict=True
    ):
        states = {**optimizer.whole_states(param)}
        assert same_bits(states["master"], master), name
        if master in plain.optimizer.state:
            assert same_bits(states["exp_avg"], plain.optimizer.state[master]["exp_avg"]), name
        if fields.get("stage") != 3:
            assert same_bits(param, moved), name
    engine.close()
    return read
