"""Frozen quantised parameters: packed elements and scales lie in shards, and come for the layers that use them."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("bitsandbytes")
pytest.importorskip("torchao")

from frontends.torch import gathered_parameters, wrap
from offload_core.errors import ParameterError, StateError
from tests.support import simulated
from tests.support.device_memory import allocated_before
from tests.support.late_stores import PARAMETERS_ON_DISK
from tests.support.processes import on_ranks
from tests.support.quantised import KINDS, Adapted, loss_of, model

pytestmark = pytest.mark.integration
PARTITIONED = {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 0}
ON_DISK = {**PARAMETERS_ON_DISK, "param_persistence_threshold": 0}
IDS = ["stage 2", "stage 3", "stage 3, serial", "stage 3, on disk"]
QUANTISED = [kind for kind in KINDS if kind != "bfloat16"]


def adapters(module):
    return [p.detach().clone() for p in module.parameters() if p.requires_grad]


def step(engine, seed):
    loss = loss_of(engine, seed)
    engine.backward(loss)
    assert engine.step().updated
    return loss.item()


def plain(kind, seeds=range(4)):
    module = model(kind)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.01, fused=True)
    losses = []
    for seed in seeds:
        loss = loss_of(module, seed)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, module


def record_of(engine, name="0.base.weight"):
    return engine.optimizer.sharding.parameters.record_of(dict(engine.module.named_parameters())[name])


@pytest.mark.draws(8)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fields", [{"stage": 2}, PARTITIONED, {**PARTITIONED, "schedule": "serial"}, ON_DISK], ids=IDS)
def test_adapters_get_the_bits_that_they_get_without_an_engine(kind, fields):
    engine = wrap(model(kind), lr=0.01, **fields)
    losses, expected = plain(kind)
    assert [step(engine, seed) for seed in range(4)] == losses
    engine.eval()
    with torch.no_grad():
        evaluated = loss_of(engine, 9)
    assert torch.equal(evaluated, loss_of(expected.eval(), 9))
    engine.close()
    assert all(map(torch.equal, adapters(engine.module), adapters(expected)))
    assert torch.equal(loss_of(engine.module, 9), evaluated)  # the base is whole again


@pytest.mark.parametrize("kind", QUANTISED)
def test_elements_and_scales_take_no_memory_while_their_layer_does_not_run(kind):
    module = model(kind)
    engine = wrap(module, lr=0.01, **PARTITIONED)
    for seed in range(2):
        step(engine, seed)
        record = record_of(engine)
        assert len(record.values.tensors) >= 2  # the scales, too
        with torch._C.DisableTorchFunctionSubclass():  # no read
            assert {t.untyped_storage().nbytes() for t in record.values.tensors} == {0}
    assert record.shard_numel >= record.spec.numel >= 256 * 512 // 2


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_read_outside_a_layer_is_an_error_and_gathered_parameters_has_the_values(kind):
    module = model(kind)
    expected = {name: str(value) for name, value in module.state_dict().items()}
    engine = wrap(module, lr=0.01, **PARTITIONED)
    for read in (module.state_dict, lambda: repr(module[0].base.weight)):
        with pytest.raises(StateError, match="was read outside the forward of a module"):
            read()
    with gathered_parameters(module.parameters()):
        assert {name: str(value) for name, value in module.state_dict().items()} == expected
    step(engine, 0)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_change_of_a_quantised_parameter_is_an_error(kind):
    module = model(kind)
    engine = wrap(module, lr=0.01, **PARTITIONED)
    weight = module[0].base.weight
    with (
        pytest.raises(StateError, match=r"'0.base.weight' is quantised, and was changed .* engine.close\(\)"),
        gathered_parameters(weight, modifier_rank=0),
        torch.no_grad(),
    ):
        weight.zero_()
    engine.close()


def test_a_quantised_parameter_that_would_train_is_an_error():
    module = model("torchao")
    module[0].base.weight.requires_grad_(True)
    with pytest.raises(ParameterError, match=r"0.base.weight.*freeze it if it is quantised"):
        wrap(module, lr=0.01, **PARTITIONED)


@pytest.mark.draws(5)
@pytest.mark.parametrize("kind", ["nf4", "int8", "torchao"])
@pytest.mark.parametrize(
    "ways",
    [({"stage": 2}, PARTITIONED), (PARTITIONED, {"stage": 2}), (PARTITIONED, ON_DISK), (ON_DISK, PARTITIONED)],
    ids=["2 to 3", "3 to 2", "to disk", "from disk"],
)
def test_a_checkpoint_leaves_the_base_out_and_loads_in_another_stage(kind, ways, tmp_path):
    first, second = (wrap(model(kind), lr=0.01, **fields) for fields in ways)
    for seed in range(2):
        step(first, seed)
    second.load_checkpoint(first.save_checkpoint(tmp_path))
    losses, _ = plain(kind)
    assert [step(second, seed) for seed in (2, 3)] == losses[2:]


def test_packed_elements_that_are_kept_as_bfloat16_are_not_cast():
    module = model("nf4 as bfloat16")
    before = module[0].base.weight.detach().clone().view(torch.uint8)
    engine = wrap(module, lr=0.01, param_dtype="float16", **PARTITIONED)
    with gathered_parameters(module.parameters()):
        assert torch.equal(module[0].base.weight.detach().view(torch.uint8), before)
    engine.close()


class Deep(nn.Module):
    def __init__(self, kind, depth):
        super().__init__()
        self.layers = nn.ModuleList(Adapted(kind, 512, 512) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def peak_of_a_step(kind, depth, device):
    memory, before = torch.accelerator, allocated_before()
    model = Deep(kind, depth).to(device)
    engine = wrap(model, max_live_parameters=2**20, prefetch_bucket_size=2**18, **PARTITIONED)
    for _ in range(2):
        memory.reset_peak_memory_stats()
        engine.backward(engine(torch.ones(1, 512, device=device)).square().mean())
        engine.step()
    engine.flush()
    return memory.max_memory_allocated() - before


@pytest.mark.skipif((missing := simulated.why_not()) is not None, reason=missing or "")
@pytest.mark.parametrize("fields", [{}, {"stage": 3, "param_persistence_threshold": 0}], ids=str)
def test_of_a_released_quantised_base_only_small_scales_take_memory_and_the_report_says_so(fields, accelerator):
    found = []
    for releases in (False, True):
        torch.manual_seed(0)
        engine, losses = wrap(Deep("torchao", 2).to(accelerator), lr=1e-2, **fields), []
        for _ in range(3):
            loss = engine(torch.ones(4, 512, device=accelerator)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if releases:
                with engine.released():
                    small = 2 * 512  # a byte for each element was given back; the scales are below 2 KiB a layer
                    assert engine.memory_report().device_bytes == small
                    for layer in engine.module.layers:
                        assert bytes_of_elements(layer.base.weight) == 0
        found.append(losses)
        engine.close()
    assert found[0] == found[1]


def bytes_of_elements(weight):
    with torch._C.DisableTorchFunctionSubclass():
        return getattr(weight, weight.__tensor_flatten__()[0][0]).untyped_storage().nbytes()


@pytest.mark.draws(1)
@pytest.mark.skipif((missing := simulated.why_not()) is not None, reason=missing or "")
@pytest.mark.parametrize("kind", ["bfloat16", "torchao"])
def test_device_memory_of_adapters_over_a_frozen_base_does_not_depend_on_its_depth(kind, accelerator):
    few, many = (peak_of_a_step(kind, depth, accelerator) for depth in (12, 48))
    assert 512 * 512 < many <= 1.05 * few + 36 * 4 * 512  # checkpointing keeps what each layer gets


@pytest.mark.draws(1)
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_hold_half_of_a_quantised_base_each(kind):
    """And their adapters get the bits of stage 2."""

    @on_ranks(2)
    def _(rank):
        narrow = {"max_live_parameters": 4000, "prefetch_bucket_size": 2500, "max_reuse_distance": 3000}
        engines = [wrap(model(kind), lr=1e-2, stage=2), wrap(model(kind), lr=1e-2, **{**PARTITIONED, **narrow})]
        for engine in engines:
            for seed in range(4):
                step(engine, 2 * seed + rank)
        record = record_of(engines[1])
        whole = record.spec.numel * record.spec.dtype.itemsize
        assert whole / 2 <= record.shard_numel * record.spec.dtype.itemsize <= whole / 2 * 1.05
        with gathered_parameters(engines[1].module.parameters()):
            for one, other in zip(*map(adapters, (engine.module for engine in engines)), strict=True):
                assert torch.equal(one, other)
