"""``engine.named_weights(merge_lora=True)``: the bits and names of ``merge_and_unload()`` of a copy on the CPU."""

import copy
import gc
import warnings

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, TaskType, get_peft_model, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn

from frontends.torch import gathered_parameters, wrap
from frontends.torch.weights.merged_weights import AdaptedLayer
from offload_core.errors import ParameterError
from tests.support.adapters import LORA, adapted, batch, on_engine
from tests.support.hugging_face import LR, alone, llama
from tests.support.processes import on_ranks
from tests.support.torch_models import same_bits
from tests.support.ways import STAGE_3

__all__ = ["alone"]  # a fixture
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's

STAGES = {"2": {"stage": 2}, "3": STAGE_3, "bf16": {**STAGE_3, "param_dtype": "bfloat16"}}


@pytest.fixture(params=STAGES)
def stage(request):
    return STAGES[request.param]


class Convolutions(nn.Module):
    """A convolution in another memory order, an embedding, a linear layer with a bias, and a buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(8, 12)
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 5)

    def forward(self, ids):
        x = self.embed(ids).view(-1, 3, 2, 2)
        return self.head(self.norm(self.conv(x)).flatten(1))


def merged_by_peft(model, masters=None, dtype=None):
    """The weights of a copy on the CPU that PEFT has merged: from these master weights in fp32, rounded at the end."""
    mine = copy.deepcopy(model)
    if masters is not None:
        mine.float()
        with torch.no_grad():
            for name, param in mine.named_parameters():
                param.copy_(masters.get(name, param))
    merged = mine.merge_and_unload().state_dict()
    return {name: t.to(dtype) if dtype and t.is_floating_point() else t for name, t in merged.items()}


def whole_model(engine):
    """A copy of the model without the engine, and its master weights."""
    masters = {n: engine.optimizer.whole_states(p)["master"] for n, p in engine.module.named_parameters()
               if engine.optimizer.has_states(p)}  # fmt: skip
    engine.close()
    return engine.module, masters


def check(engine, tied=()):
    """Compare with PEFT, for each element type; the engine is closed then."""
    dtypes = (None, "float32", "bfloat16")
    given = {dtype: list(engine.named_weights(dtype=dtype, merge_lora=True)) for dtype in dtypes}
    before = {name: tensor.clone() for name, tensor in engine.named_weights()}
    assert len(before) > len(given[None])  # the model still has its adapters
    model, masters = whole_model(engine)
    for dtype, named in given.items():
        expected = merged_by_peft(model, *(() if dtype is None else (masters, getattr(torch, dtype))))
        assert [name for name, _ in named] == [name for name in expected if name not in tied]
        wrong = [name for name, tensor in named if not same_bits(tensor, expected[name])]
        assert wrong == [], dtype
    after = model.state_dict()
    assert [name for name, tensor in before.items() if not same_bits(tensor, after[name])] == []


@pytest.mark.draws(2)
@pytest.mark.parametrize("fields", [{}, {"use_dora": True}, {"lora_alpha": 3, "use_rslora": True, "bias": "lora_only"},
                                    {"modules_to_save": ["lm_head", "embed_tokens"]}], ids=str)  # fmt: skip
def test_merged_weights_are_those_of_peft_on_the_cpu(stage, fields):
    engine = wrap(adapted(**fields), lr=LR, **stage)
    on_engine(engine, range(3))
    check(engine)


@pytest.mark.parametrize("fields", [{}, STAGE_3], ids=["2", "3"])
def test_embeddings_and_convolutions_merge_too(fields):
    config = LoraConfig(r=2, target_modules=["embed", "conv", "head"], init_lora_weights=False)
    engine = wrap(get_peft_model(Convolutions(), config), lr=LR, **fields)
    for _ in range(2):
        engine.backward(engine(torch.arange(8)).pow(2).mean())
        engine.step()
    check(engine)


def test_of_several_adapters_the_active_ones_are_merged():
    model = adapted()
    torch.manual_seed(5)
    model.add_adapter("second", LoraConfig(**LORA | {"target_modules": ["q_proj", "o_proj"]}))
    model.add_adapter("third", LoraConfig(**LORA | {"target_modules": ["k_proj"]}))
    model.base_model.set_adapter(["default", "second"])
    engine = wrap(model, lr=LR)
    on_engine(engine, range(2))
    check(engine)


def test_adapters_in_a_plain_model_are_merged_under_its_own_names():
    torch.manual_seed(0)
    model = inject_adapter_in_model(LoraConfig(**LORA), llama().eval(), "default")
    engine = wrap(model, lr=LR)
    on_engine(engine, range(2))
    names = list(llama().state_dict())
    assert list(dict(engine.named_weights(merge_lora=True))) == names
    expected = get_peft_model(llama(), LoraConfig(**LORA)).eval()
    engine.close()
    expected.base_model.model.load_state_dict(model.state_dict())
    again = dict(wrap(model, lr=LR).named_weights(merge_lora=True))
    merged = expected.merge_and_unload().state_dict()
    assert [name for name in names if not same_bits(again[name], merged[name])] == []
    assert list(dict(wrap(llama()).named_weights(merge_lora=True))) == names  # there are no adapters


def test_since_a_report_only_layers_with_an_adapter_are_given(stage):
    engine = wrap(adapted(), lr=LR, **stage)
    on_engine(engine, [0])
    report = engine.optimizer.report
    assert dict(engine.named_weights(since=report, merge_lora=True)) == {}
    on_engine(engine, [1])
    names = [name for name, _ in engine.named_weights(since=report, merge_lora=True)]
    assert names == [name for name in llama().state_dict() if "q_proj" in name or "v_proj" in name]


def test_one_layer_is_copied_at_a_time_without_the_hooks_of_the_engine(monkeypatch):
    engine = wrap(adapted(), lr=LR, **STAGE_3)
    on_engine(engine, [0])

    def layers():
        gc.collect()
        return sum(type(each).__module__.startswith("peft.tuners.lora") for each in gc.get_objects())

    def hooks(layer):
        return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in layer.modules())

    seen, make = [], AdaptedLayer._copy

    def copied(adapted, values):
        layer = make(adapted, values)
        seen.append((hooks(adapted.layer) > 0, hooks(layer)))
        return layer

    monkeypatch.setattr(AdaptedLayer, "_copy", copied)
    held, alive = layers(), []
    engine.named_weights(merge_lora=True, into=lambda bucket: alive.append(layers()))
    assert alive == [held]
    assert seen == [(True, 0)] * 4


def test_adapters_that_cannot_be_merged_are_refused_by_name():
    torch.manual_seed(0)
    tied = llama()
    tied.lm_head.weight = tied.model.embed_tokens.weight
    engine = wrap(get_peft_model(tied, LoraConfig(**LORA | {"target_modules": ["embed_tokens"]})))
    with pytest.raises(ParameterError, match=r"'model.embed_tokens.weight' is tied .*; expected merge_lora=False"):
        engine.named_weights(merge_lora=True)
    prompts = get_peft_model(llama(), PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=2))
    with pytest.raises(ParameterError, match="the adapter is of PromptTuningConfig, which has no weights to merge"):
        wrap(prompts).named_weights(merge_lora=True)


@pytest.mark.parametrize("kind", ["nf4", "nf4 as bfloat16", "int8", "torchao"])
def test_a_quantised_base_is_refused_by_name(kind):
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("torchao")
    from tests.support.quantised import model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's, which says of torchao that it cannot merge
        adapted = get_peft_model(model(kind), LoraConfig(r=2, target_modules=["base"]))
    with pytest.raises(ParameterError, match="'0.base.weight' is quantised .*; expected merge_lora=False"):
        wrap(adapted).named_weights(merge_lora=True)


def test_two_ranks_merge_as_one_process_does_and_one_of_them_may_get_nothing():
    @on_ranks(2)
    def _(rank):
        engine = wrap(adapted(), lr=LR, **STAGE_3)
        on_engine(engine, range(2), rank, 2)
        given = dict(engine.named_weights(merge_lora=True))
        alone = dict(engine.named_weights(merge_lora=True, rank0_only=True))
        with gathered_parameters(engine.module.parameters()):
            expected = {n: t.clone() for n, t in merged_by_peft(adapted_like(engine.module)).items()}
        assert given.keys() == expected.keys()
        assert [name for name in expected if not same_bits(given[name], expected[name])] == []
        assert alone.keys() == (set() if rank else given.keys())
        on_engine(engine, [2], rank, 2)


def adapted_like(model):
    """A new model with this one's values."""
    new = adapted()
    new.load_state_dict(model.state_dict())
    assert batch(0)["input_ids"].shape
    return new


def two_adapters():
    """A model whose layers, and a module of which each adapter has a copy, compute otherwise with each adapter."""
    torch.manual_seed(0)
    config = LoraConfig(target_modules=["0"], modules_to_save=["1"], init_lora_weights=False, r=2)
    model = get_peft_model(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), config)
    model.add_adapter("two", config)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param))
    return model


def with_scale(model, scale):
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.set_scale("default", scale)


CHANGES = {
    "another adapter": lambda model: model.set_adapter("two"),
    "a scale": lambda model: with_scale(model, 3.0),
    "disabled": lambda model: model.base_model.disable_adapter_layers(),
    "merged": lambda model: model.merge_adapter(),
    "another rank": lambda model: model.base_model.model[0].scaling.update(default=0.1),
    "both": lambda model: model.base_model.model[0].set_adapter(["default", "two"]),
    "one of two": lambda model: model.base_model.model[0].set_adapter(["two"]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_whatever_decides_a_merged_weight_counts_as_a_change(change):
    """A copy that is kept up to date by changes alone computes what the model computes."""
    model, batch = two_adapters(), torch.ones(3, 8)
    engine = wrap(model, lr=1e-2)

    def step():
        engine.backward(engine(batch).sum())
        return engine.step()

    def up_to_date():
        hidden = batch @ copied["0.weight"].T + copied["0.bias"]
        output = hidden @ copied["1.weight"].T + copied["1.bias"]
        return torch.allclose(output, engine(batch), atol=1e-4, rtol=1e-4)

    copied = dict(engine.named_weights(merge_lora=True))
    report = step()
    copied |= dict(engine.named_weights(merge_lora=True, since=report))
    report = step()
    assert set(engine.named_weights(merge_lora=True, since=report)) == set()
    copied |= dict(engine.named_weights(merge_lora=True))
    assert up_to_date()
    change(model)
    copied |= dict(engine.named_weights(merge_lora=True, since=report))
    assert up_to_date()
    assert dict(engine.named_weights(since=report)) == {} or change is CHANGES["merged"]
