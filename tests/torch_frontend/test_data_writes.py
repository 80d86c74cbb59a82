"""Writes through ``p.data``, which torch does not count: they are adopted like those that it counts, or refused."""

import copy

import pytest
import torch
from torch import nn

from frontends.torch import OffloadedAdamW, data_writes, gathered_parameters, wrap
from frontends.torch.ranks import device_ranks
from offload_core import StateError
from offload_core.step.state_access import StateAccess
from tests.support.slow_torch_device import SlowTorchDevice
from tests.support.torch_models import batch, loss_of, make, same_bits

CLIP = 0.01


@pytest.fixture(params=["host", "late"])
def device(request, monkeypatch):
    """The host, where kernels write in place, or a device whose copies arrive late."""
    if request.param == "late":
        slow = SlowTorchDevice()
        monkeypatch.setattr(device_ranks, "memory_of", lambda device: slow)


@pytest.fixture
def compared(monkeypatch):
    """The parameters that were compared with their master weights, by number."""
    seen = []
    adopt = StateAccess.adopt

    def noted(self, param, tensor, **options):
        seen.append(param)
        adopt(self, param, tensor, **options)

    monkeypatch.setattr(StateAccess, "adopt", noted)
    return seen


def everything(engine):
    return [
        *(p.detach().clone() for p in engine.module.parameters()),
        *(value.clone() for state in engine.optimizer.state.values() for value in state.values()),
    ]


def assert_equal(engine, other):
    for a, b in zip(everything(engine), everything(other), strict=True):
        assert same_bits(a, b)


def step(engine, seed):
    engine.backward(loss_of(engine, seed))
    assert engine.step().updated


def counted(p):
    with torch.no_grad():
        p.clamp_(-CLIP, CLIP)


def through_numpy(p):
    view = p.data.view(torch.int16).numpy()
    view[...] = p.data.clamp(-CLIP, CLIP).view(torch.int16).numpy()


def assigned_then_written(p):
    values = p.detach().clone()
    p.data = values
    values.clamp_(-CLIP, CLIP)


WAYS = {
    "p.data": lambda p: p.data.clamp_(-CLIP, CLIP),
    "a view": lambda p: p.data.view(-1)[:].clamp_(-CLIP, CLIP),
    "twice": lambda p: p.data.data.detach().clamp_(-CLIP, CLIP),
    "numpy": through_numpy,
    "assigned": assigned_then_written,
}
FIELDS = {
    "bfloat16": {"param_dtype": "bfloat16"},
    "serial": {"param_dtype": "bfloat16", "schedule": "serial"},
    "in backward": {"param_dtype": "bfloat16", "update_in_backward": True},
    "tentative": {"param_dtype": "bfloat16", "update_in_backward": True, "gradient_clipping": 1.0},
    "warming up": {"param_dtype": "bfloat16", "schedule": "delayed"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fields", FIELDS)
def test_weights_that_are_clipped_after_each_step_are_those_of_a_counted_write(device, way, fields):
    """As in WGAN."""
    engine, reference = (wrap(make(), lr=1e-3, reduce_bucket_size=512, **FIELDS[fields]) for _ in range(2))
    for seed in range(4):
        for one, clip in ((engine, WAYS[way]), (reference, counted)):
            step(one, seed)
            for p in one.module.parameters():
                clip(p)
                assert float(p.detach().abs().max()) <= CLIP * 1.01
    for one in (engine, reference):
        step(one, 4)
    assert_equal(engine, reference)
    assert float(engine.module[0].weight.detach().abs().max()) < 2 * CLIP


def assigned(p):
    values = p.detach().clone()
    p.data = values
    return values


KEPT = {
    "p.data": lambda p: p.data,
    "a view": lambda p: p.data[1:],
    "numpy": lambda p: p.data.view(torch.int16).numpy(),
    "assigned": assigned,
}


@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT)
def test_what_p_data_gave_once_is_followed_for_as_long_as_it_is_kept(device, keep, compared):
    engine, reference = (wrap(make(), lr=1e-3, param_dtype="bfloat16") for _ in range(2))
    kept = keep(engine.module[2].weight)
    for seed in range(4):
        step(engine, seed)
        step(reference, seed)
        engine.flush()
        kept[...] = 0
        with torch.no_grad():
            reference.module[2].weight.copy_(engine.module[2].weight)
    assert set(compared) == {2}
    del kept
    step(engine, 4)
    step(reference, 4)
    compared.clear()
    step(engine, 5)
    assert not compared
    step(reference, 5)
    assert_equal(engine, reference)


def test_reading_p_data_changes_no_bits_and_costs_one_comparison(device, compared):
    engine, reference = (wrap(make(), lr=1e-3, param_dtype="bfloat16") for _ in range(2))
    for seed in range(6):
        step(engine, seed)
        step(reference, seed)
        assert compared == ([0, 3] if seed in (2, 4) else [])
        compared.clear()
        if seed in (1, 3):
            assert engine.module[0].weight.data.norm() > 0
            copy.deepcopy(engine.module[2].bias)
    assert_equal(engine, reference)


def test_a_write_through_p_data_is_part_of_checkpoints_and_whole_states(tmp_path):
    engine = wrap(make(), lr=1e-3, param_dtype="bfloat16")
    step(engine, 0)
    engine.module[0].weight.data[0] = 3.0
    engine.save_checkpoint(tmp_path)
    engine.module[2].bias.data.zero_()
    assert not engine.optimizer.whole_states(engine.module[2].bias)["master"].any()
    other = wrap(make(seed=1), lr=1e-3, param_dtype="bfloat16")
    other.load_checkpoint(tmp_path)
    assert (other.optimizer.whole_states(other.module[0].weight)["master"][0] == 3.0).all()


@pytest.mark.parametrize("early_copy", [False, True])
def test_the_optimizer_alone_follows_and_a_tensor_that_is_no_parameter_always(early_copy):
    tensor = torch.ones(64, dtype=torch.bfloat16).requires_grad_()
    parameter = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = OffloadedAdamW([tensor, parameter], lr=0.1, early_copy=early_copy)
    for _ in range(3):
        (tensor.float().sum() + parameter.float().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        for p in (tensor, parameter):
            assert float(p.detach().max()) < 0.95
            p.data.fill_(0.5)
    assert all((optimizer.whole_states(p)["master"] == 0.5).all() for p in (tensor, parameter))


def test_where_the_last_update_is_held_back_the_use_of_p_data_is_an_error_until_a_flush():
    engine, reference = (
        wrap(make(), lr=1e-2, param_dtype="bfloat16", schedule="delayed", delay_warmup_steps=2) for _ in range(2)
    )
    for one in (engine, reference):
        for seed in range(4):
            step(one, seed)
    before = everything(reference)
    engine.module[0].weight.data.clamp_(-CLIP, CLIP)
    engine.backward(loss_of(engine, 4))
    for _ in range(2):
        with pytest.raises(StateError, match=r"'0\.weight': p\.data was used.*engine\.flush\(\)"):
            engine.step()
    engine.optimizer.zero_grad()
    for a, b in zip(everything(engine)[4:], before[4:], strict=True):
        assert same_bits(a, b)  # states
    for one in (engine, reference):
        one.flush()
    assert_equal(engine, reference)
    engine.module[0].weight.data.zero_()
    with torch.no_grad():
        reference.module[0].weight.zero_()
    for one in (engine, reference):
        step(one, 5)
        one.flush()
    assert_equal(engine, reference)


STAGE_3 = {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 8, "param_dtype": "bfloat16"}


@pytest.mark.parametrize("way", WAYS)
def test_a_gathered_parameter_is_written_to_with_a_modifier_only(device, way):
    engine = wrap(make(), lr=1e-3, **STAGE_3)
    model = engine.module
    model[2].requires_grad_(False)
    for layer in (model[0], model[2]):
        lost = pytest.raises(StateError, match="was changed inside gathered_parameters.*the change is lost")
        with lost, gathered_parameters(layer.weight):
            WAYS[way](layer.weight)
        with gathered_parameters(layer.weight):
            assert layer.weight.data.abs().max() > 2 * CLIP  # reading is no change
        with gathered_parameters(layer.weight, modifier_rank=0):
            WAYS[way](layer.weight)
        with gathered_parameters(layer.weight):
            assert float(layer.weight.detach().abs().max()) <= CLIP * 1.01
    step(engine, 0)


def test_parameters_of_no_optimizer_are_not_watched():
    engine = wrap(make(), param_dtype="bfloat16")
    watched = {id(p) for p in engine.module.parameters()}
    assert watched <= set(data_writes._WATCHED)
    engine.close()
    assert not watched & set(data_writes._WATCHED)
    free = nn.Parameter(torch.ones(3))
    free.data.mul_(2)
    free.data = torch.zeros(2)
    assert free.shape == (2,)
    assert type(free.data) is torch.Tensor
    assert not free.data.requires_grad


def test_a_compiled_forward_that_reads_p_data_is_one_graph():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x):
            return x @ self.weight / self.weight.data.norm()

    model = Scaled()
    wrap(model)
    x = batch(0)[:, :4]
    assert torch.equal(torch.compile(model, fullgraph=True, backend="eager")(x), model(x))
