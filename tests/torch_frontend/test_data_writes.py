"""In-place writes through ``p.data``, which torch does not count: they are adopted like those that it counts."""

import copy
import gc

import pytest
import torch
from torch import nn

from frontends.torch import OffloadedAdamW, gathered_parameters, wrap
from frontends.torch.params.managed import managed
from frontends.torch.ranks import device_ranks
from offload_core import StateError
from offload_core.step.state_access import StateAccess
from tests.support.slow_torch_device import SlowTorchDevice
from tests.support.torch_models import batch, loss_of, make, same_bits, step

CLIP = 0.01


@pytest.fixture(params=["host", "late"])
def device(request, monkeypatch):
    """The host, where kernels write in place, or a device whose copies arrive late."""
    if request.param == "late":
        slow = SlowTorchDevice()
        monkeypatch.setattr(device_ranks, "memory_of", lambda device: slow)


@pytest.fixture
def adopted(monkeypatch):
    """The parameters whose changes were taken up, by number."""
    seen = []
    adopt = StateAccess.adopt

    def noted(self, param, tensor):
        seen.append(param)
        adopt(self, param, tensor)

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


def counted(p):
    with torch.no_grad():
        p.clamp_(-CLIP, CLIP)


def assigned_then_written(p):
    values = p.detach().clone()
    p.data = values
    values.clamp_(-CLIP, CLIP)


def in_inference_mode(p):
    with torch.inference_mode():
        p.data.clamp_(-CLIP, CLIP)


def behind_many_others(p):
    """More tensors than are kept lie between the write and the step."""
    p.data.clamp_(-CLIP, CLIP)
    for _ in range(100):
        p.data  # noqa: B018


WAYS = {
    "p.data": lambda p: p.data.clamp_(-CLIP, CLIP),
    "a view": lambda p: p.data.view(-1)[:].clamp_(-CLIP, CLIP),
    "out": lambda p: torch.clamp(p.data, -CLIP, CLIP, out=p.data),
    "foreach": lambda p: torch._foreach_copy_([p.data], [p.data.clamp(-CLIP, CLIP)]),
    "assigned": assigned_then_written,
    "inference mode": in_inference_mode,
    "many": behind_many_others,
}
FIELDS = {
    "overlap": {},
    "serial": {"schedule": "serial"},
    "in backward": {"update_in_backward": True},
    "tentative": {"update_in_backward": True, "gradient_clipping": 1.0},
    "delayed": {"schedule": "delayed", "delay_warmup_steps": 2},
}


@pytest.mark.draws(5)
@pytest.mark.parametrize(
    ("way", "fields"),
    [
        pytest.param(way, fields, marks=[] if fields == "overlap" or way == "p.data" else pytest.mark.slow)
        for way in WAYS
        for fields in FIELDS
    ],
)
def test_weights_that_are_clipped_after_each_step_are_those_of_a_counted_write(device, way, fields):
    """As in WGAN."""
    options = {"lr": 1e-3, "reduce_bucket_size": 512, "param_dtype": "bfloat16", **FIELDS[fields]}
    engine, reference = (wrap(make(), **options) for _ in range(2))
    for seed in range(4):
        for one, clip in ((engine, WAYS[way]), (reference, counted)):
            step(one, seed)
            for p in one.module.parameters():
                clip(p)
                assert float(p.detach().abs().max()) <= CLIP * 1.01
    for one in (engine, reference):
        step(one, 4)
        one.flush()
    assert_equal(engine, reference)
    assert float(engine.module[0].weight.detach().abs().max()) < 2 * CLIP


def assigned(p):
    values = p.detach().clone()
    p.data = values
    return values


KEPT = {
    "p.data": lambda p: p.data,
    "a view": lambda p: p.data[1:],
    "assigned": assigned,
    "a view of what was assigned": lambda p: assigned(p)[1:],
}


@pytest.mark.draws(2)
@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT)
def test_what_p_data_gave_once_is_followed_for_as_long_as_it_is_kept(device, keep, adopted):
    engine, reference = (wrap(make(), lr=1e-3, param_dtype="bfloat16") for _ in range(2))
    kept = keep(engine.module[2].weight)
    for seed in range(4):
        gc.collect()
        step(engine, seed)
        step(reference, seed)
        engine.flush()
        kept[...] = 0
        with torch.no_grad():
            reference.module[2].weight.copy_(engine.module[2].weight)
    assert set(adopted) == {2}
    step(engine, 4)
    step(reference, 4)
    watched = managed(engine.module[2].weight).data_writes
    assert len(watched._tensors) == 1
    del kept
    adopted.clear()
    step(engine, 5)
    assert not adopted
    assert not watched._tensors
    step(reference, 5)
    assert_equal(engine, reference)


def test_reading_p_data_is_no_change(device, adopted):
    engine, reference = (wrap(make(), lr=1e-3, param_dtype="bfloat16") for _ in range(2))
    average = torch.zeros(64, 32)
    for seed in range(4):
        for one in (engine, reference):
            step(one, seed)
        average.lerp_(engine.module[0].weight.data.float(), 0.1)
        copy.deepcopy(engine.module)
    assert not adopted
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


def test_the_optimizer_alone_follows():
    parameter = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = OffloadedAdamW([parameter], lr=0.1)
    for _ in range(3):
        parameter.float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert float(parameter.detach().max()) < 0.95
        parameter.data.fill_(0.5)
    assert (optimizer.whole_states(parameter)["master"] == 0.5).all()


@pytest.mark.parametrize("clipping", [None, 1.0])
def test_where_what_p_data_gave_is_kept_no_parameter_is_sent_early(monkeypatch, clipping):
    """Code that keeps it can write to it between backward and step, and cannot be made to wait."""
    monkeypatch.setattr(device_ranks, "memory_of", lambda device: SlowTorchDevice())
    options = {"lr": 1e-2, "param_dtype": "bfloat16", "gradient_clipping": clipping}
    engine = wrap(make(), update_in_backward=True, **options)
    reference = wrap(make(), **options)
    for one in (engine, reference):
        step(one, 0)
        one.flush()
    kept = engine.module[0].weight.data
    for one in (engine, reference):
        one.backward(loss_of(one, 1))
    engine.optimizer.core._pipeline.buckets.run(lambda: None)  # what would be sent early would be there
    kept.zero_()
    with torch.no_grad():
        reference.module[0].weight.zero_()
    for one in (engine, reference):
        one.step()
        one.flush()
    assert_equal(engine, reference)
    del kept
    step(engine, 2)
    step(reference, 2)
    assert_equal(engine, reference)


STAGE_3 = {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 8, "param_dtype": "bfloat16"}


@pytest.mark.draws(3)
@pytest.mark.parametrize("way", WAYS)
def test_a_gathered_parameter_is_written_to_with_a_modifier_only(device, way):
    engine = wrap(make(), lr=1e-3, **STAGE_3)
    model = engine.module
    model[2].requires_grad_(False)
    for layer in (model[0], model[2]):
        said = "was changed inside gathered_parameters.*the change is lost"
        with pytest.raises(StateError, match=said), gathered_parameters(layer.weight):
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
    watched = [managed(p) for p in engine.module.parameters()]
    assert None not in [each.data_writes for each in watched]
    engine.close()
    assert {each.data_writes for each in watched} == {None}
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
