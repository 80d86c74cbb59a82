"""Any sequence of steps, reads, writes, exchanges, saves, loads and freezes gives the bits of plain torch."""

import copy
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import nn

from frontends.torch import gathered_parameters, wrap
from offload_core.config.options import OffloadConfig
from offload_core.dtypes import BFLOAT16, FLOAT32
from offload_core.rules.adam import AdamHyper
from tests.support.pipelines import STATES, Naive
from tests.support.torch_models import same_bits
from tests.support.ways import WAYS

HYPER = {"lr": 1e-2, "weight_decay": 0.1}
FORMATS = [
    {}, {"state_format": "bf16"}, {"state_format": "8bit"}, {"exp_avg_dtype": "float8"},
    {"exp_avg_sq_dtype": "bfloat16"}, {"state_format": "8bit", "master_dtype": "bfloat16"},
]  # fmt: skip
params = st.integers(0, 3)
seeds = st.integers(0, 2**32 - 1)


def made(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).to(dtype)


def batch(seed, dtype):
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(seed)).to(dtype)


def loss_of(model, seed, dtype):
    return model(batch(seed, dtype)).float().pow(2).mean()


class OfTorch:
    """Torch's fused AdamW on fp32 master weights."""

    def __init__(self, masters):
        self.masters = [nn.Parameter(m) for m in masters]
        self.optimizer = torch.optim.AdamW(self.masters, fused=True, **HYPER)

    def update(self, gradients):
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient
        self.optimizer.step()

    def states(self, i):
        state = self.optimizer.state.get(self.masters[i], {})
        zeros = torch.zeros_like(self.masters[i])
        return [self.masters[i], *(state.get(name, zeros) for name in STATES[1:])]

    def replace(self, i, changed, values):
        with torch.no_grad():
            self.masters[i][changed] = values[changed]


class ByDefinition:
    """The definition of AdamW, with states in narrow formats."""

    def __init__(self, masters, names, dtype, fields):
        config = OffloadConfig(op_order="torch", **fields)
        kinds = [BFLOAT16 if dtype is torch.bfloat16 else FLOAT32] * len(masters)
        self.shapes = [m.shape for m in masters]
        hypers = [AdamHyper(HYPER["lr"], (0.9, 0.999), 1e-8, HYPER["weight_decay"])]
        self.naive = Naive([m.numpy().ravel() for m in masters], kinds, [0] * len(masters), config, hypers, names)

    def update(self, gradients):
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                self.naive.add_gradient(i, gradient.numpy().ravel())
        self.naive.step(1.0)

    def states(self, i):
        return [torch.from_numpy(state).view(self.shapes[i]) for state in self.naive.states[i]]

    def replace(self, i, changed, values):
        self.naive.states[i][0] = np.where(changed.numpy().ravel(), values.numpy().ravel(), self.naive.states[i][0])


class Plain:
    """A plain model, its gradients by torch, and their sum over micro-steps in fp32."""

    def __init__(self, dtype, fields, accumulation):
        self.dtype, self.accumulation = dtype, accumulation
        whole, self.model = made(), made(dtype)
        masters = [p.detach().clone() for p in whole.parameters()]
        names = [name for name, _ in whole.named_parameters()]
        self.rule = ByDefinition(masters, names, dtype, fields) if fields else OfTorch(masters)
        self.params = [*self.model.parameters()]
        self.sums = [None] * len(self.params)
        self.micro_steps = 0

    def micro_step(self, seed):
        loss_of(self.model, seed, self.dtype).backward()
        for i, p in enumerate(self.params):
            if p.grad is not None:
                self.sums[i] = p.grad.float() if self.sums[i] is None else self.sums[i] + p.grad.float()
                p.grad = None
        self.micro_steps = (self.micro_steps + 1) % self.accumulation
        if self.micro_steps == 0:
            present = [g is not None for g in self.sums]
            self.rule.update([None if g is None else g / self.accumulation for g in self.sums])
            self.sums = [None] * len(self.params)
            with torch.no_grad():
                for i, p in enumerate(self.params):
                    if present[i]:
                        p.copy_(self.rule.states(i)[0])

    def write(self, i, values):
        p = self.params[i]
        kind = torch.int16 if p.dtype is torch.bfloat16 else torch.int32
        changed = p.detach().view(kind) != values.view(kind)
        with torch.no_grad():
            p.copy_(values)
        self.rule.replace(i, changed, values.float())


class Anything(RuleBasedStateMachine):
    @initialize(
        fields=st.sampled_from([*WAYS.values()]),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        formats=st.sampled_from(FORMATS),
        accumulation=st.integers(1, 2),
        bucket=st.sampled_from([100, 2**20]),
    )
    def begin(self, fields, dtype, formats, accumulation, bucket):
        if dtype is torch.float32:
            formats = {name: value for name, value in formats.items() if name != "master_dtype"}
        self.dtype, self.accumulation = dtype, accumulation
        self.folder, self.saved = Path(tempfile.mkdtemp()), []
        self.plain = Plain(dtype, formats, accumulation)
        kind = "bfloat16" if dtype is torch.bfloat16 else "float32"
        options = {**HYPER, **fields, **formats, "gradient_accumulation_steps": accumulation, "param_dtype": kind}
        self.engine = wrap(made(), reduce_bucket_size=bucket, **options)
        self.params = [*self.engine.module.parameters()]
        self.frozen = set()
        self.train(0, 1)

    def teardown(self):
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)
            for i in range(len(self.params)):
                self.read(i)
                self.read_states(i)

    at_boundary = precondition(lambda self: self.plain.micro_steps == 0)

    @rule(seed=seeds, times=st.integers(1, 4))
    def train(self, seed, times):
        for i in range(times):
            self.engine.backward(loss_of(self.engine, seed + i, self.dtype))
            self.engine.step()
            self.plain.micro_step(seed + i)

    @rule(i=params)
    def freeze_or_unfreeze(self, i):
        if len(self.frozen) < len(self.params) - 1 or i in self.frozen:
            self.frozen ^= {i}
            self.set_frozen(i)

    def set_frozen(self, i):
        for param in (self.params[i], self.plain.params[i]):
            param.requires_grad_(i not in self.frozen)

    @rule(i=params)
    def read(self, i):
        with gathered_parameters(self.params[i]):
            assert same_bits(self.params[i], self.plain.params[i])

    @rule(i=params)
    def read_states(self, i):
        found = self.engine.optimizer.whole_states(self.params[i])
        for name, expected in zip(STATES, self.plain.rule.states(i), strict=True):
            assert same_bits(found[name], expected), name

    @rule(seed=seeds)
    def evaluate(self, seed):
        with torch.no_grad():
            assert same_bits(self.engine(batch(seed, self.dtype)), self.plain.model(batch(seed, self.dtype)))

    @rule(i=params, row=st.integers(0, 15), value=st.sampled_from([0.0, -0.0, 1.0, 0.3]))
    def write(self, i, row, value):
        with gathered_parameters(self.params[i], modifier_rank=0), torch.no_grad():
            self.params[i][row] = value
            values = self.params[i].detach().clone()
        self.plain.write(i, values)

    @rule(change=st.sampled_from(["mul_", "fill_", "sub_"]), between=st.lists(st.integers(0, 3), max_size=3))
    def exchange(self, change, between):
        with gathered_parameters(self.params, modifier_rank=0), torch.no_grad():
            before = [p.clone() for p in self.params]
            for p in self.params:
                getattr(p, change)(0.5)
        for act in between:
            if act == 0:
                self.engine.flush()
            elif act == 1:
                self.engine.optimizer.whole_states(self.params[0])
            elif act == 2 and self.plain.micro_steps == 0:
                self.engine.save_checkpoint(self.folder / "between")
            else:
                self.engine.export_safetensors(self.folder / "exported")
        with gathered_parameters(self.params, modifier_rank=0), torch.no_grad():
            for p, old in zip(self.params, before, strict=True):
                p.copy_(old)

    @at_boundary
    @rule()
    def save(self):
        folder = self.folder / str(len(self.saved))
        self.saved.append((self.engine.save_checkpoint(folder), copy.deepcopy(self.plain)))

    @at_boundary
    @precondition(lambda self: self.saved)
    @rule(number=st.integers(0, 9))
    def load(self, number):
        folder, plain = self.saved[number % len(self.saved)]
        self.engine.load_checkpoint(folder)
        self.plain = copy.deepcopy(plain)
        for i in range(len(self.params)):
            self.set_frozen(i)


@pytest.mark.filterwarnings("ignore:.*wait on the host for step:offload_core.HostMemoryWarning")
class TestInterleavings(Anything.TestCase):
    settings = settings(max_examples=5, stateful_step_count=20)  # ``make test-all`` has 60 times as many


@pytest.mark.slow
class TestManyInterleavings(Anything.TestCase):
    settings = settings(max_examples=300, stateful_step_count=30)
