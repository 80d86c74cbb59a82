"""Gradients that are read and changed between backward and step, with the bits of plain torch whose are."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from frontends.torch import OffloadedAdamW, wrap
from offload_core import GradientError, ParameterError, StateError
from tests.support import experts
from tests.support.changed_gradients import Change, compare, loss_of, model
from tests.support.late_stores import STATES_ON_DISK
from tests.support.processes import on_ranks
from tests.support.strategies import law
from tests.support.torch_models import assert_all_same, everything, make, same_bits
from tests.support.torch_models import step as step_of
from tests.support.ways import WAYS

CLIPPED = {"gradient_clipping": 0.5}
OF_WAYS = {
    **{name: fields if "update_in_backward" not in fields else {**fields, **CLIPPED} for name, fields in WAYS.items()},
    "clipped": CLIPPED,
    "delayed": {"schedule": "delayed", "delay_warmup_steps": 100},
    "on disk": STATES_ON_DISK,
    "small buckets": {"reduce_bucket_size": 1000, "gradient_accumulation_steps": 2, **CLIPPED},
}
"""Where states wait for the step: else gradients have been used when backward has ended."""
ALL = [
    Change(step, micro, param, own, factor)
    for step, micro, param in product(range(2), range(2), range(6))
    for own, factor in (((False, True)[param % 2], (None, 0.5, 2.0)[(param + step + micro) % 3]),)
]

changes = st.builds(
    Change,
    st.integers(0, 1),
    st.integers(0, 1),
    st.integers(0, 5),
    st.booleans(),
    st.none() | st.sampled_from([0.0, -1.0, 0.3]),
)


@pytest.mark.draws(8)
@pytest.mark.parametrize("device", ["host", "simulated, delays 0", "late"], indirect=True)
@pytest.mark.parametrize("way", OF_WAYS)
def test_in_every_way_a_gradient_is_read_and_changed_as_in_plain_torch(way, device):
    assert compare(ALL, **OF_WAYS[way]) > 0


@law(25)
@given(
    st.lists(changes, min_size=1, max_size=8),
    st.sampled_from([*OF_WAYS]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([1, 2]),
    st.sampled_from([100, 1000, 10**6]),
)
def test_any_changes_in_any_order_give_the_bits_of_plain_torch(drawn, way, dtype, micro_steps, bucket):
    fields = {**OF_WAYS[way], "gradient_accumulation_steps": micro_steps, "reduce_bucket_size": bucket}
    compare(drawn, dtype=dtype, **fields)


@pytest.mark.parametrize("device", ["host", "late"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_values_are_without_the_loss_scale(dtype, device):
    scaled = {"loss_scale": 1024.0} if dtype is torch.float16 else {}
    assert compare(ALL, dtype=dtype, gradient_accumulation_steps=2, **scaled, **CLIPPED) > 0


def test_two_ranks_read_and_change_the_mean_of_their_gradients_whole_or_each_its_part(drawn):
    """Parameters have a gradient on both ranks, on one of them, or on none."""
    runs = [
        *((fields, torch.float32) for name, fields in OF_WAYS.items() if name != "delayed"),
        ({"gradient_accumulation_steps": 2, "stage": 1, **CLIPPED}, torch.bfloat16),
        ({"loss_scale": 1024.0, "reduce_bucket_size": 1000}, torch.float16),
    ]
    runs = drawn(runs, 2)

    @on_ranks(2)
    def found(rank):
        return [compare(ALL, rank=rank, n_ranks=2, dtype=dtype, **fields) for fields, dtype in runs]

    assert found[0] == found[1]
    assert all(found[0])


def test_a_step_after_a_read_exchanges_no_gradient_again():
    @on_ranks(2)
    def found(rank):
        sent = {}
        for reads in (0, 3):
            engine = wrap(model(), lr=1e-2)
            engine.backward(loss_of(engine, 0, rank, torch.float32))
            for _ in range(reads):
                engine.optimizer.own_gradient(engine.module.first.weight)
            engine.step()
            sent[reads] = engine.sent_bytes
        return sent

    assert all(sent[0] == sent[3] for sent in found)


def test_a_read_while_a_delayed_update_is_on_its_way_changes_no_bit():
    found = []
    for reads in (False, True):
        engine = wrap(model(), lr=1e-2, param_dtype="bfloat16", schedule="delayed")
        for seed in range(4):
            engine.backward(loss_of(engine, seed, 0, torch.bfloat16))
            for p in engine.module.parameters() if reads else ():
                gradient = engine.optimizer.whole_gradient(p)
                if gradient is not None:
                    engine.optimizer.load_gradient(p, gradient)
            engine.step()
        found.append(everything(engine))
    assert_all_same(*found)


@pytest.mark.quick
def test_a_further_backward_is_added_to_a_gradient_that_was_changed():
    engine, plain = wrap(model(), lr=1e-2), model()
    for seed in (0, 1):
        engine.backward(loss_of(engine, seed, 0, torch.float32))
        loss_of(plain, seed, 0, torch.float32).backward()
        for p, q in zip(engine.module.parameters(), plain.parameters(), strict=True):
            if q.grad is not None:
                engine.optimizer.load_gradient(p, engine.optimizer.whole_gradient(p) * 3)
                q.grad.mul_(3)
                assert same_bits(engine.optimizer.whole_gradient(p), q.grad)


def test_a_placed_parameter_is_read_whole_and_changed_whole_or_in_its_local_tensor():
    """FSDP2 shards it. Of ``rare`` there is no gradient."""

    @on_ranks(2)
    def _(rank):
        mesh = init_device_mesh("cpu", (2,))
        nets = [model(), model()]
        for net in nets:
            for module in (net.first, net.last, net):
                fully_shard(module, mesh=mesh)
        engine, twin = wrap(nets[0], lr=1e-2), nets[1]
        optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True)
        for seed in (0, 3):
            engine.backward(loss_of(engine, seed, 0, torch.float32))
            loss_of(twin, seed, 0, torch.float32).backward()
            for n, (p, q) in enumerate(zip(engine.module.parameters(), twin.parameters(), strict=True)):
                if q.grad is None:
                    assert engine.optimizer.whole_gradient(p) is None
                    continue
                whole = engine.optimizer.whole_gradient(p)
                assert same_bits(whole, q.grad.full_tensor())
                own = engine.optimizer.own_gradient(p)
                assert same_bits(own, q.grad.to_local().flatten())
                engine.optimizer.load_gradient(p, own * 2 if n % 2 else whole * 2, own=bool(n % 2))
                q.grad.mul_(2)
            engine.step()
            optimizer.step()
            optimizer.zero_grad()
        for p, q in zip(engine.module.parameters(), twin.parameters(), strict=True):
            assert same_bits(p.to_local(), q.to_local())


@pytest.mark.long("several trainings of mixtures of experts")
def test_ranks_whose_experts_differ_read_the_mean_over_all():
    """In leaf modules, whose gradients come on some ranks alone."""

    @on_ranks(2)
    def found(rank):
        read = []
        for fields in ({}, {**OF_WAYS["stage 3"], "leaf_modules": ["Experts"]}):
            engine = wrap(experts.mixture(), lr=1e-2, reduce_bucket_size=1000, **fields)
            for seed in range(2):
                engine.backward(engine(experts.rows(2 * seed + rank)).square().mean())
                masters = [engine.optimizer.whole_states(p)["master"] for p in engine.module.parameters()]
                assert all(master.isfinite().all() for master in masters)  # they come after all gradients, too
                read.append([engine.optimizer.whole_gradient(p) for p in engine.module.parameters()])
                engine.step()
            engine.close()
        return read

    for stage_2, stage_3 in ((0, 2), (1, 3)):
        for of_one in zip(*(read[n] for read in found for n in (stage_2, stage_3)), strict=True):
            assert all((each is None) == (of_one[0] is None) for each in of_one)
            assert of_one[0] is None or all(same_bits(each, of_one[0]) for each in of_one)
    assert any(each is None for each in found[0][0])


def test_values_are_shaped_and_laid_out_as_the_parameter():
    conv = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
    engine, x = wrap(conv, lr=1e-2), torch.randn(2, 4, 8, 8)
    twin = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
    twin.load_state_dict(conv.state_dict())
    for net, back in ((engine, engine.backward), (twin, lambda loss: loss.backward())):
        back(net(x).square().mean())
    found = engine.optimizer.whole_gradient(conv.weight)
    assert found.shape == conv.weight.shape
    assert found.stride() == conv.weight.stride()
    assert same_bits(found, twin.weight.grad)
    flat = engine.optimizer.own_gradient(conv.weight)
    assert same_bits(flat, twin.weight.grad.permute(0, 2, 3, 1).flatten())
    for own, value in ((True, flat * 2), (False, found * 2)):
        engine.optimizer.load_gradient(conv.weight, value, own=own)
        assert same_bits(engine.optimizer.whole_gradient(conv.weight), twin.weight.grad * 2)


def test_none_is_read_after_a_step_after_zero_grad_and_of_a_parameter_without_states():
    engine = wrap(make(), lr=1e-2)
    first = engine.module[0]
    step_of(engine)
    assert engine.optimizer.whole_gradient(first.weight) is None
    engine.backward(engine(torch.randn(2, 32)).sum())
    first.weight.grad = None  # discards it
    assert engine.optimizer.whole_gradient(first.weight) is None
    assert engine.optimizer.own_gradient(first.weight) is None
    assert engine.optimizer.whole_gradient(first.bias) is not None
    engine.optimizer.zero_grad()
    assert engine.optimizer.whole_gradient(first.bias) is None
    assert engine.optimizer.whole_gradient(nn.Parameter(torch.ones(2))) is None


def test_what_cannot_be_read_or_written_says_why():
    engine = wrap(make(), lr=1e-2)
    weight = engine.module[0].weight
    with pytest.raises(StateError, match="'0.weight': its gradient is to be overwritten, and no rank has had one"):
        engine.optimizer.load_gradient(weight, torch.zeros(64, 32))
    with pytest.raises(ParameterError, match="that this optimizer has no states of"):
        engine.optimizer.load_gradient(nn.Parameter(torch.ones(2)), torch.ones(2))
    said = []

    def read(gradient):
        with pytest.raises(StateError, match="in the middle of a backward") as error:
            engine.optimizer.whole_gradient(weight)
        said.append(error)

    weight.register_hook(read)
    engine.backward(engine(torch.randn(2, 32)).sum())
    assert said
    with pytest.raises(GradientError, match=r"values of shape \(32, 64\), expected \(64, 32\)"):
        engine.optimizer.load_gradient(weight, torch.zeros(32, 64))
    with pytest.raises(StateError, match="got 3 elements for this rank's part, expected 2048"):
        engine.optimizer.load_gradient(weight, torch.zeros(3), own=True)
    engine.step()

    early = wrap(make(), lr=1e-2, update_in_backward=True)
    early.backward(early(torch.randn(2, 32)).sum())
    with pytest.raises(StateError, match="update_in_backward=True has used gradients there"):
        early.optimizer.whole_gradient(early.module[0].weight)
    assert early.step().updated

    net = make()
    alone = OffloadedAdamW(net.parameters(), lr=1e-2)
    net(torch.randn(2, 32)).sum().backward()
    with pytest.raises(StateError, match=r"its gradient is in p\.grad still"):
        alone.whole_gradient(net[0].weight)


def test_a_state_is_overwritten_whole_or_in_parts():
    @on_ranks(2)
    def _(rank):
        for fields in ({}, OF_WAYS["stage 3"], {"param_dtype": "bfloat16"}, {"optimizer": "sgd", "momentum": 0.9}):
            engine = wrap(make(), lr=1e-2, **fields)
            optimizer = engine.optimizer
            names = ["master", "momentum_buffer"] if "optimizer" in fields else ["master", "exp_avg", "exp_avg_sq"]
            for p in engine.module.parameters():
                for name in names:
                    values = torch.arange(p.numel(), dtype=torch.float32).view(p.shape) / 1024 + 1
                    optimizer.load_state(p, name, values)
                    assert same_bits(optimizer.whole_states(p, [name])[name], values)
                    optimizer.load_state(p, name, optimizer.own_states(p, [name])[name] * 2, own=True)
                    assert same_bits(optimizer.whole_states(p, [name])[name], values * 2)
            with pytest.raises(StateError, match="has no state 'variance'; expected one of master, "):
                optimizer.load_state(p, "variance", p)
            with pytest.raises(StateError, match=r"got master of shape \(3,\), expected"):
                optimizer.load_state(p, "master", torch.zeros(3))
            engine.close()


def test_a_master_weight_that_is_overwritten_is_the_parameter_from_then_on():
    engine = wrap(make(), lr=1e-2, param_dtype="bfloat16")
    weight = engine.module[0].weight
    engine.optimizer.load_state(weight, "master", torch.full((64, 32), 0.1))
    assert same_bits(weight, torch.full((64, 32), 0.1).bfloat16())
