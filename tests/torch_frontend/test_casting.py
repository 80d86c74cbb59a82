"""The element types of a wrapped model's tensors and inputs: ``param_dtype``, ``buffer_dtype`` and ``cast_inputs``."""

import copy
import pickle

import pytest
import torch
from torch import nn

from frontends.torch import wrap
from tests.support.torch_models import place, same_bits

everywhere = pytest.mark.usefixtures("device")


class Rotary(nn.Module):
    """A layer that turns by angles, as transformers do (RoPE)."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, 16, 2) / 16), persistent=False)

    def angles(self, positions):
        return positions[:, None] * self.inv_freq

    def forward(self, x, positions):
        angles = self.angles(positions)
        a, b = self.linear(x).chunk(2, -1)
        cos, sin = angles.cos().to(a.dtype), angles.sin().to(a.dtype)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def convolutions(seed=0, norm=nn.BatchNorm2d):
    torch.manual_seed(seed)
    with place():
        return nn.Sequential(nn.Conv2d(3, 8, 3), norm(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))


def images(seed):
    return torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(seed)).to(place())


def step(engine, seed):
    engine.backward(engine(images(seed)).float().pow(2).mean())
    assert engine.step().skipped in (None, "overflow")


@everywhere
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_buffers_keep_their_bits_under_another_param_dtype(dtype):
    with place():
        model, plain, positions = Rotary(), Rotary(), torch.arange(1000.0)
    engine = wrap(model, param_dtype=dtype, cast_inputs=False)
    assert same_bits(model.inv_freq, plain.inv_freq)
    assert same_bits(model.angles(positions), plain.angles(positions))
    x = torch.randn(1000, 16, dtype=getattr(torch, dtype), device=place())
    assert engine(x, positions).dtype is x.dtype


@pytest.mark.draws(1)
@everywhere
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_statistics_in_a_narrow_model_are_those_in_fp32(dtype):
    with place():
        model, reference = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), nn.BatchNorm1d(8)
    engine = wrap(model, param_dtype=dtype)
    with torch.no_grad():
        for seed in range(50):
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed)).to(place())
            engine(x)
            reference(model[0](x.to(model[0].weight.dtype)).float())
    assert model[1].running_var.dtype is torch.float32
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(model[1], name), getattr(reference, name), rtol=1e-5, atol=1e-6)


@pytest.mark.draws(5)
@pytest.mark.parametrize(
    "fields", [{}, {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 8}], ids=str
)
@everywhere
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("buffers", "norm"), [(None, "float32"), ("float32", "float32"), ("bfloat16", "bfloat16")])
def test_layers_with_fp32_statistics_keep_fp32_parameters_and_all_others_are_cast(buffers, norm, frozen, fields):
    model = convolutions()
    model[1].requires_grad_(not frozen)
    engine = wrap(model, param_dtype="bfloat16", buffer_dtype=buffers, **fields)
    for seed in range(2):
        step(engine, seed)
    model.eval()
    assert engine(images(0)).dtype is torch.bfloat16
    own = {getattr(torch, norm)}
    assert {t.dtype for t in (*model[1].parameters(), model[1].running_mean, model[1].running_var)} == own
    assert {p.dtype for layer in (model[0], model[4]) for p in layer.parameters()} == {torch.bfloat16}
    assert model[1].num_batches_tracked.dtype is torch.int64
    [row] = [row for row in engine.memory_report().rows if (row.where, row.what) == ("device", "parameters")]
    assert row.planned == row.held


@everywhere
def test_normalisation_without_fp32_statistics_is_cast_like_any_layer():
    narrow = convolutions()
    narrow[1].to(torch.bfloat16)
    for model in (narrow, convolutions(norm=lambda n: nn.BatchNorm2d(n, track_running_stats=False))):
        engine = wrap(model, param_dtype="bfloat16")
        step(engine, 0)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@everywhere
def test_a_model_that_is_not_cast_keeps_every_type():
    model = convolutions().to(torch.bfloat16)
    model[1].running_mean.data = model[1].running_mean.float()
    before = [t.dtype for t in (*model.parameters(), *model.buffers())]
    wrap(model)
    assert [t.dtype for t in (*model.parameters(), *model.buffers())] == before


@everywhere
def test_buffer_dtype_casts_floating_point_buffers_alone_and_without_param_dtype():
    with place():
        model = Rotary()
        model.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        model.register_buffer("wide", torch.ones(3, dtype=torch.float64))
    wrap(model, buffer_dtype="float16")
    assert [b.dtype for b in model.buffers()] == [torch.float16, torch.bool, torch.float16]
    assert model.linear.weight.dtype is torch.float32


@pytest.mark.draws(1)
@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda engine: pickle.loads(pickle.dumps(engine))], ids=["copy", "pickle"]
)
@everywhere
def test_a_copied_engine_keeps_the_types(how):
    engine = wrap(convolutions(), param_dtype="bfloat16", lr=1e-2)
    step(engine, 0)
    twin = how(engine)
    for seed in (1, 2):
        nn.Sequential(nn.Linear(1, 1))  # another model gets parameters: each step looks for later ones
        step(engine, seed)
        step(twin, seed)
    assert all(map(same_bits, engine.module.state_dict().values(), twin.module.state_dict().values()))


class Echo(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, batch, *, label):
        self.seen = [*batch["x"], batch["ids"], label]
        return self.weight.sum()


@everywhere
@pytest.mark.parametrize("cast", [True, False])
def test_floating_point_arguments_are_cast_unless_that_is_turned_off(cast):
    with place():
        model, label, ids, x = Echo(), torch.tensor([1001.0]), torch.tensor([1001]), (torch.ones(2), torch.ones(1))
    wrap(model, param_dtype="bfloat16", cast_inputs=cast)({"x": x, "ids": ids}, label=label)
    expected = torch.bfloat16 if cast else torch.float32
    assert [seen.dtype for seen in model.seen] == [expected, expected, torch.int64, expected]
    assert float(model.seen[-1]) == (1000.0 if cast else 1001.0)
    assert model.seen[2] is ids
