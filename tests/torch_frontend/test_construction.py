"""``init()``: models built in shards are those that would have been built whole, in the memory of a few parameters."""

import copy
import gc
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from bench.train.gpt_torch import GPT
from bench.train.presets import PRESETS
from frontends.torch import OffloadedAdamW, gathered_parameters, init, register_external_parameter, wrap
from frontends.torch.params.managed import _MANAGED, managed
from frontends.torch.params.residency import Residency
from frontends.torch.stage3 import construction
from frontends.torch.stage3.shards import DiskShard
from offload_core import ConfigError, OffloadConfig, ParameterError, StateError
from offload_core.commands.model_shapes import GPTConfig
from tests.support.held import await_end_on_disk, on_disk
from tests.support.late_stores import STATES_ON_DISK
from tests.support.partitioned_models import MODELS, gpt, gpt_loss, llama
from tests.support.processes import on_ranks
from tests.support.torch_models import place
from tests.support.torch_rank import whole_bits

STAGE_3 = {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 40, "reduce_bucket_size": 1000}
SIDE = 16
everywhere = pytest.mark.usefixtures("device")


def whole_numel(params):
    """Elements of those parameters that have memory and are not small."""
    with torch._C.DisableTorchFunction():
        return sum(p.numel() for p in params if p.numel() >= 40 and p.untyped_storage().nbytes())


def values(model):
    with gathered_parameters(model.parameters()):
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(model, expected):
    ours, theirs = values(model), expected.state_dict()
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype
        assert torch.equal(ours[name], value), name


@pytest.mark.draws(1)
@pytest.mark.parametrize(
    ("device", "name", "param_dtype"),
    [
        ("host", "gpt", None),
        ("late", "gpt", "bfloat16"),
        ("host", "external", None),
        pytest.param("host", "llama", "bfloat16", marks=pytest.mark.integration),
        ("simulated, delays 0", "gpt", "bfloat16"),
        ("simulated, delays 0", "external", None),
    ],
    indirect=["device"],
)
def test_a_model_built_in_shards_trains_to_the_bits_of_one_built_whole(device, name, param_dtype):
    make, loss_of = MODELS[name]
    trained = []
    for built_in_shards in (False, True):
        with init(**STAGE_3, enabled=built_in_shards):
            model = make()
        assert bool(whole_numel(model.parameters())) != built_in_shards
        next(model.children()).requires_grad_(False)
        engine = wrap(model, lr=1e-2, param_dtype=param_dtype, **STAGE_3)
        for step in range(2):
            engine.backward(loss_of(engine, step))
            engine.step()
        masters = [v for s in engine.optimizer.state.values() for v in s.values()]
        trained.append([*values(model).values(), *masters])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*trained, strict=True))


# --- what constructors do ---------------------------------------------------------------------------


class Applies(nn.Module):
    """As GPTs do: sets all weights from the outside, ties one, and cuts another to a pattern."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Embedding(SIDE, SIDE, padding_idx=3), nn.Linear(SIDE, SIDE))
        self.head = nn.Linear(SIDE, SIDE, bias=False)
        self.apply(self.set_weights)
        for name, param in self.named_parameters():
            if name.endswith("2.weight"):
                torch.nn.init.normal_(param, std=0.02)
        self.head.weight = self.body[1].weight

    def set_weights(self, module):
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(std=0.1)
        elif isinstance(module, nn.Embedding):
            torch.nn.init.normal_(tensor=module.weight)
            with torch.no_grad():
                module.weight[module.padding_idx].zero_()


def several_at_once():
    layers = nn.ModuleList(nn.Linear(SIDE, SIDE) for _ in range(3))
    weights = [layer.weight for layer in layers]
    with torch.no_grad():
        weights[1].copy_(weights[0])
        weights[0].mul_(2)
        weights[0].add_(weights[2])  # one whole, one in shards
        torch._foreach_add_(weights, 1.0)
    return layers


def reference_held():
    layers = nn.ModuleList(nn.Linear(SIDE, SIDE) for _ in range(2))
    first = layers[0].weight.data
    layers[1].weight.data.fill_(3)
    first.fill_(2)
    return layers


def own_parameters_around_a_childs():
    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.empty(SIDE, SIDE))
            self.child = nn.Linear(SIDE, SIDE)
            self.b = nn.Parameter(torch.empty(SIDE, SIDE))
            nn.init.orthogonal_(self.a)
            nn.init.kaiming_normal_(self.b)

    return Around()


def loaded():
    model = Applies()
    torch.manual_seed(1)
    model.load_state_dict({name: torch.randn_like(value) for name, value in values(model).items()})
    return model


def cast_and_reordered():
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 4, 3))
    return model.half().to(memory_format=torch.channels_last).float()


def picklable():
    return copy.deepcopy(nn.Sequential(Applies(), nn.LSTM(SIDE, SIDE, num_layers=2)))


def encoder():
    layer = nn.TransformerEncoderLayer(SIDE, 2, 2 * SIDE, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def parametrized():
    return nn.utils.parametrizations.weight_norm(nn.Linear(SIDE, SIDE))


CONSTRUCTORS = [Applies, several_at_once, reference_held, own_parameters_around_a_childs, loaded, cast_and_reordered,
                picklable, encoder, parametrized]  # fmt: skip


@pytest.mark.draws(4)
@everywhere
@pytest.mark.parametrize("make", CONSTRUCTORS)
def test_constructors_do_what_they_do_to_a_whole_model(make):
    torch.manual_seed(0)
    with place():
        expected = make()
    torch.manual_seed(0)
    with place(), init(**STAGE_3):
        model = make()
    assert {p.device.type for p in model.parameters()} == {place().type}
    assert whole_numel(model.parameters()) == 0
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in expected.parameters()]
    assert_same(model, expected)


@everywhere
def test_never_are_more_parameters_whole_than_a_module_and_the_one_before_it_have():
    made, seen = [], []

    def count(module, name, param):
        made.append(param)
        seen.append(whole_numel(made))

    class Watched(nn.Sequential):
        def __init__(self, *layers):
            super().__init__(*layers)
            self.apply(self.look)

        def look(self, module):
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight)
            seen.append(whole_numel(made))

    handle = torch_module.register_module_parameter_registration_hook(count)
    try:
        with place(), init(**STAGE_3):
            layers = [nn.Linear(SIDE, SIDE) for _ in range(8)]
            Watched(*layers, *(copy.deepcopy(layer) for layer in layers))
            made += [p for layer in encoder().layers for p in layer.parameters()]
            seen.append(whole_numel(made))
    finally:
        handle.remove()
    attention, largest = 3 * SIDE * (SIDE + 1), 2 * SIDE * SIDE
    assert 0 < max(seen) <= attention + largest
    assert whole_numel(made) == 0


def test_what_is_whole_is_cut_when_another_becomes_whole_and_no_sooner(monkeypatch):
    cut = []
    release = construction.InitShards.release

    def count(shards, param):
        cut.append(shards.spec.name)
        release(shards, param)

    monkeypatch.setattr(construction.InitShards, "release", count)
    of_lstm = ["LSTM.weight_ih_l0", "LSTM.weight_hh_l0", "LSTM.bias_ih_l0", "LSTM.bias_hh_l0"]
    with init(**STAGE_3):
        nn.LSTM(SIDE, SIDE)  # registers all, then sets all
        assert cut == []
        layers = [nn.Linear(SIDE, SIDE) for _ in range(3)]
        assert cut == [*of_lstm, "Linear.weight", "Linear.weight"]
        with torch.no_grad():
            layers[2].weight.add_(layers[0].weight)  # one is whole
            layers[2].weight.add_(layers[0].weight)
        assert len(cut) == 6
        layers[1].weight.sum()
        assert len(cut) == 8
    assert len(cut) == 9


@pytest.mark.draws(1)
@everywhere
@pytest.mark.parametrize("then", ["nvme", "cpu"])
def test_a_model_that_was_built_on_disk_is_wrapped_with_its_parameters_anywhere(then):
    """And leaves no file when both it and its engine are gone."""
    before = on_disk()
    trained = []
    for fields in ({"remote_device": "nvme", **STATES_ON_DISK}, {"enabled": False}):
        with init(**{**STAGE_3, "offload_param": None}, **fields):
            model = gpt()
        model.blocks[0].requires_grad_(False)
        if "remote_device" in fields:
            assert not whole_numel(model.parameters())
            assert on_disk() - before
            for param in model.parameters():
                shards = construction.shards_of(param)
                assert shards is None or isinstance(shards.shard, DiskShard)
        disk = STATES_ON_DISK if then == "nvme" else {}
        engine = wrap(model, lr=1e-2, param_dtype="bfloat16", **{**STAGE_3, "offload_param": then}, **disk)
        for step in range(2):
            engine.backward(gpt_loss(engine, step))
            engine.step()
        trained.append([*values(model).values()])
        engine.close()
    assert all(map(torch.equal, *trained))
    del engine, model, param, shards
    await_end_on_disk(before)


@everywhere
def test_shards_of_parameters_that_are_no_more_are_freed():
    gc.collect()
    before = len(_MANAGED)
    with place(), init(**STAGE_3):
        model = Applies()  # whose head had a weight of its own
    gc.collect()
    built = [known for param in model.parameters() if (known := managed(param)).shards is not None]
    assert {each.residency for each in built} == {Residency.SHARDED}
    held = weakref.WeakSet(each.shards for each in built)
    assert len(held) == 3 == len(_MANAGED) - before
    del model, built
    gc.collect()
    assert (len(_MANAGED), len(held)) == (before, 0)


@pytest.mark.integration
def test_hugging_face_models_are_loaded_into_shards(tmp_path):
    from transformers import LlamaForCausalLM

    expected = llama()
    expected.save_pretrained(tmp_path)
    with init(**STAGE_3):
        model = LlamaForCausalLM.from_pretrained(tmp_path)
    assert whole_numel(model.parameters()) == 0
    assert_same(model, expected)


# --- before there is an engine ----------------------------------------------------------------------


@everywhere
def test_parameters_can_be_read_and_run_in_gathered_parameters_only():
    x = torch.ones(SIDE, device=place())
    with place(), init(**STAGE_3):
        model = nn.Linear(SIDE, SIDE)
    for read in (
        model.state_dict,
        lambda: model.weight.sum(),
        lambda: model(x),
        lambda: str(model.weight),
    ):
        with pytest.raises(
            StateError, match=r"parameter 'Linear.weight', built in shards by init\(\), was read; expected"
        ):
            read()
    with gathered_parameters(model.weight):
        model(x).sum().backward()
        kept = model.state_dict()["weight"]
    assert whole_numel([model.weight]) == 0
    with (
        pytest.raises(StateError, match="which says that no rank changes it"),
        gathered_parameters(model.weight),
        torch.no_grad(),
    ):
        model.weight.zero_()
    with gathered_parameters(model.weight):
        assert torch.equal(model.weight, kept)
    with gathered_parameters(model.weight, modifier_rank=0), gathered_parameters([model.weight, model.weight]):
        model.weight.data.fill_(2)
    with gathered_parameters(model.weight):
        assert model.weight.eq(2).all()


@everywhere
def test_a_graph_that_saved_a_parameter_does_not_go_on_after_it_was_cut():
    with place(), init(**STAGE_3):
        first, second = nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE)
        loss = (first.weight * torch.ones(SIDE, requires_grad=True)).sum()
        other = first(torch.ones(SIDE)).sum()  # refers to the weight's memory
        second.weight.sum()
    other.backward()
    assert first.weight.grad.eq(1).all()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# --- the way to an engine ---------------------------------------------------------------------------


def small():
    return nn.Sequential(nn.Linear(SIDE, 4 * SIDE), nn.Linear(4 * SIDE, SIDE))


@pytest.mark.draws(2)
@pytest.mark.parametrize(
    ("act", "kind", "match"),
    [
        (lambda m: wrap(m, stage=2), StateError, "'0.weight' was built in shards, by init.*stage=2.*stage=3"),
        (lambda m: wrap(m, stage=3), StateError, "offload_param=None on these ranks keeps parameters whole"),
        (lambda m: wrap(m, params=[m[1].bias], stage=2), StateError, "'0.weight' was built in shards"),
        (lambda m: OffloadedAdamW(m.parameters()), StateError, "was built in shards"),
        (lambda m: wrap(m, **{**STAGE_3, "reduce_bucket_size": 500}), ConfigError,
         "'0.weight' was cut for 1 ranks with reduce_bucket_size=1000 and state_format='fp32' by init"),
        (lambda m: wrap(m, **STAGE_3, state_format="8bit"), ConfigError, "expected the same .* and formats of states"),
    ],
)  # fmt: skip
def test_an_engine_that_would_not_cut_alike_is_refused_and_another_takes_the_shards(act, kind, match):
    with init(**STAGE_3):
        model = small()
    expected = values(model)
    with pytest.raises(kind, match=match):
        act(model)
    assert all(torch.equal(value, expected[name]) for name, value in values(model).items())
    engine = wrap(model, **{**STAGE_3, "param_persistence_threshold": 1_000_000})
    assert engine.optimizer.sharding.live.peak_numel == 0  # nothing was gathered
    assert all(torch.equal(value, expected[name]) for name, value in values(model).items())


def test_a_model_is_not_wrapped_while_it_is_built_or_gathered():
    with init(**STAGE_3):
        model = small()
        with pytest.raises(StateError, match=r"inside init\(\).*after the block"):
            wrap(model, **STAGE_3)
    with (
        gathered_parameters(model[0].weight, modifier_rank=0),
        pytest.raises(StateError, match=r"'0.weight' is wrapped inside gathered_parameters\(\).*after the block"),
    ):
        wrap(model, **STAGE_3)
    wrap(model, **STAGE_3)


# --- the context itself -----------------------------------------------------------------------------


def test_an_error_inside_leaves_torch_as_it_was():
    set_state, hooks = nn.Module.__setstate__, {**torch_module._global_parameter_registration_hooks}
    made = []

    def fail():
        made.append(nn.Sequential(small(), small()))
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"), init(**STAGE_3):
        fail()
    assert nn.Module.__setstate__ is set_state
    assert torch_module._global_parameter_registration_hooks == hooks
    numel = 2 * 4 * SIDE * SIDE + 4 * SIDE
    assert whole_numel(small().parameters()) == numel
    with pytest.raises(StateError, match="was read"):
        made[0][0][0].weight.sum()
    with init(**STAGE_3):
        assert whole_numel(small().parameters()) < numel


def test_an_inner_context_is_the_outer_one():
    with init(**STAGE_3):
        with init(**STAGE_3):
            first = small()
        with init(**STAGE_3, enabled=False):
            second = small()
        with pytest.raises(StateError, match="of another configuration"), init(**STAGE_3, lr=0.5):
            pass
        first[0].weight.sum()
        third = small()
    assert not any(whole_numel(model.parameters()) for model in (first, second, third))


def test_only_stage_3_builds_in_shards():
    with pytest.raises(ConfigError, match=r"init\(\) with stage=2"):
        init(config={"offload_param": None})
    with pytest.raises(ConfigError, match="remote_device: got 'gpu', expected 'cpu', 'nvme' or None"):
        init(remote_device="gpu")
    with pytest.raises(
        ConfigError, match="offload_param='nvme' with .*expected offload_optimizer='nvme' and nvme_path"
    ):
        init(remote_device="nvme")
    with pytest.raises(ConfigError, match="nvme_path: got '/not/there', which does not exist"):
        init(remote_device="nvme", **{**STATES_ON_DISK, "nvme_path": "/not/there"})
    with pytest.raises(ParameterError, match="got a dict"):
        init(STAGE_3)
    with init(config=OffloadConfig(stage=3, param_persistence_threshold=1), remote_device="cpu"):
        assert nn.Linear(2, 2)
    with init(param_persistence_threshold=1):  # one rank: nothing to share, and no host memory asked for
        model = small()
    wrap(model, stage=3)


# --- the meta device --------------------------------------------------------------------------------


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(64)
        self.embedding = nn.Embedding(SIDE, SIDE)
        self.head = nn.Linear(SIDE, SIDE, bias=False)
        self.head.weight = self.embedding.weight
        register_external_parameter(self, self.embedding.weight)
        self.attention = nn.MultiheadAttention(SIDE, 2)


@everywhere
def test_a_module_of_the_meta_device_is_made_as_its_parts_reset_themselves():
    with torch.device("meta"):
        model = Buffered()
    model.norm.bias.requires_grad_(False)
    tied = model.embedding.weight
    torch.manual_seed(0)
    with place():
        context = init(model, **STAGE_3)
    assert model.head.weight is tied is model.embedding.weight
    assert model._offload_external_parameters[0] is tied
    assert whole_numel(model.parameters()) == 0
    assert not model.norm.bias.requires_grad
    with context:
        model.embedding.weight.data.mul_(2)
    torch.manual_seed(0)
    with place():
        expected = Buffered()  # its parts are made in the same order
    torch.manual_seed(0)
    for part in expected.modules():
        reset = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", lambda: None)
        if part is not expected.head and not isinstance(part, nn.modules.linear.NonDynamicallyQuantizableLinear):
            reset()
    got = values(model)
    assert torch.equal(got["embedding.weight"], 2 * expected.embedding.weight)
    assert got["norm.running_var"].eq(1).all()
    assert got["attention.out_proj.bias"].eq(0).all()
    wrap(model, **STAGE_3)


def test_a_module_of_the_meta_device_takes_values_from_init_fn_or_is_left_alone():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(50))
            self.inner = nn.Linear(SIDE, SIDE)

    with torch.device("meta"):
        model = nn.Sequential(Own(), nn.GELU())
    with pytest.raises(ParameterError, match=r"Own '0' has scale on the meta device and no reset_parameters\(\)"):
        init(model, **STAGE_3)
    assert all(p.is_meta for p in model.parameters())
    seen = []

    def give(module):
        seen.append(type(module).__name__)
        for number, param in enumerate(module.parameters(recurse=False)):
            param.fill_(len(seen) + number)

    init(model, **STAGE_3, init_fn=give)
    assert seen == ["Linear", "Own"]
    got = values(model)
    assert [got[name].unique().tolist() for name in ("0.inner.weight", "0.inner.bias", "0.scale")] == [[1], [2], [2]]
    with torch.device("meta"), pytest.raises(ParameterError, match="default device"):
        init(nn.Linear(2, 2), **STAGE_3)


@everywhere
def test_a_whole_module_is_cut_as_it_is():
    model, expected = gpt(), gpt()
    init(model, **STAGE_3)
    assert whole_numel(model.parameters()) == 0
    assert_same(model, expected)


# --- ranks ------------------------------------------------------------------------------------------


SMALL = GPTConfig(vocabulary=64, width=32, heads=2, layers=2, positions=16)


def status(field):
    """Bytes that the kernel reports of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


@pytest.mark.long("a model large enough to measure, built on two ranks")
def test_two_ranks_build_a_model_in_half_its_memory():
    @on_ranks(2)
    def _(rank):
        with init(param_persistence_threshold=1):  # what any first use brings along
            GPT(SMALL)
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS:")
        with init():
            model = GPT(replace(PRESETS["gpt2-1.5b"].gpt, layers=6, width=800, vocabulary=1024, positions=64))
        sizes = [4 * p.numel() for p in model.parameters()]
        peak, left, half = status("VmHWM:") - before, status("VmRSS:") - before, sum(sizes) / 2
        # A parameter, the buffer that it travels through, and freed memory that the allocator may keep.
        window = 3 * max(sizes) + construction._KEPT + 2**23
        assert half + window < 0.85 * sum(sizes)
        assert peak < half + window
        assert half < left < half + 2**23


@pytest.mark.long("several trainings on two ranks or more")
def test_two_ranks_train_a_model_that_they_built_in_shards_to_the_bits_of_a_whole_one(drawn):
    """Each rank would build different values, and rank 0's count."""
    ways = drawn(("in shards", "meta"), 1)
    stage_3 = {**STAGE_3, "offload_param": None}

    @on_ranks(2)
    def found(rank):
        def trained(model):
            model.blocks[0].requires_grad_(False)
            engine = wrap(model, lr=1e-2, param_dtype="bfloat16", **stage_3)
            for step in range(3):
                engine.backward(gpt_loss(engine, 2 * step + rank))
                engine.step()
            return whole_bits(engine)

        torch.manual_seed(rank)
        whole = trained(GPT(SMALL))
        torch.manual_seed(rank)
        with init(**stage_3):
            in_shards = GPT(SMALL)
        torch.manual_seed(rank)
        with torch.device("meta"):
            meta = GPT(SMALL)
        with init(meta, **stage_3, init_fn=lambda module: None):
            torch.manual_seed(rank)
            meta.load_state_dict(GPT(SMALL).state_dict())
        return [whole, *(trained({"in shards": in_shards, "meta": meta}[way]) for way in ways)]

    assert len({*found[0], *found[1]}) == 1


def test_one_rank_changes_what_is_being_built_for_all():
    """Before there is an engine, in the context and after it."""

    @on_ranks(2)
    def _(rank):
        with init(**STAGE_3):
            model = nn.Linear(20, 20)
            with gathered_parameters(model.parameters(), modifier_rank=1), torch.no_grad():
                model.weight.fill_(2 + rank)
                model.bias.fill_(4 + rank)
        with gathered_parameters(model.weight, modifier_rank=1), torch.no_grad():
            model.weight[0] = 6 + rank
        with gathered_parameters(model.parameters()):
            assert model.weight[0].eq(7).all()
            assert model.weight[1:].eq(3).all()
            assert model.bias.eq(5).all()


def test_ranks_that_build_in_different_ways_are_told_so():
    @on_ranks(2)
    def _(rank):
        def build():
            with init(**STAGE_3):
                model = nn.Linear(20, 20)
                nn.Linear(20, 30)
                if rank == 1:
                    model.weight.sum()

        with pytest.raises(StateError, match="ranks differ in what they do while a model is built") as caught:
            build()
        assert rank == 0 or "gather 'Linear.weight' [20, 20]" in str(caught.value)
