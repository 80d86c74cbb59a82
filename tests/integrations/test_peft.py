"""Adapters of PEFT on an engine: merged, saved and reloaded, with the bits of the same run with torch's fused AdamW."""

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from transformers import AutoModelForCausalLM

from frontends.torch import gathered_parameters, wrap
from frontends.torch.weights.export import whole_state_dict
from offload_core.errors import StateError
from tests.support.adapters import LORA, adapted, batch, each_layer, on_engine, with_torch
from tests.support.hugging_face import LR, alone, llama
from tests.support.processes import on_ranks
from tests.support.torch_models import same_bits
from tests.support.torch_rank import bits

__all__ = ["alone"]  # a fixture
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's

STAGES = {
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3": {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 0},
}


def assert_same(model, expected):
    with gathered_parameters(model.parameters()):
        mine, theirs = dict(model.named_parameters()), dict(expected.named_parameters())
        assert mine.keys() == theirs.keys()
        assert [name for name, p in mine.items() if not same_bits(p, theirs[name])] == []


@pytest.fixture(params=STAGES)
def stage(request):
    return STAGES[request.param]


def test_merged_layer_by_layer_the_weights_are_those_of_the_run_with_torch(stage, tmp_path):
    """As docs/integrations/trainer.md has it."""
    expected = adapted()
    with_torch(expected, range(3))
    expected = expected.merge_and_unload()
    engine = wrap(adapted(), lr=LR, **stage)
    on_engine(engine, range(3))
    each_layer(engine.module, lambda layer: layer.merge())
    merged = engine.module.unload()
    assert_same(merged, expected)
    merged.save_pretrained(tmp_path, state_dict=whole_state_dict(merged, wanted=True))
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path), expected)


def test_merged_at_once_inside_gathered_parameters_the_weights_are_the_same(stage):
    expected = adapted(use_dora=True)
    with_torch(expected, range(2))
    engine = wrap(adapted(use_dora=True), lr=LR, **stage)
    on_engine(engine, range(2))
    with gathered_parameters(engine.module.parameters(), modifier_rank=0):
        merged = engine.module.merge_and_unload()
    assert_same(merged, expected.merge_and_unload())


def test_an_adapter_is_merged_for_an_evaluation_and_trains_on(stage):
    """Merging and unmerging round as they do with torch."""
    expected, engine = adapted(), wrap(adapted(), lr=LR, **stage)
    optimizer = with_torch(expected, range(2))
    on_engine(engine, range(2))
    expected.merge_adapter()
    with gathered_parameters(engine.module.parameters(), modifier_rank=0):
        engine.module.merge_adapter()
    with torch.no_grad():
        assert engine(**batch(9)).loss.item() == expected(**batch(9)).loss.item()
    expected.unmerge_adapter()
    each_layer(engine.module, lambda layer: layer.unmerge())
    assert_same(engine.module, expected)
    with_torch(expected, range(2, 4), optimizer)
    on_engine(engine, range(2, 4))
    assert_same(engine.module, expected)


def test_merging_parameters_in_shards_says_what_is_missing(tmp_path):
    engine = wrap(adapted(), lr=LR, **STAGES["3"])
    missing = r"in stage 3 .*; expected `with gathered_parameters\(...\)` around what reads"
    with pytest.raises(StateError, match=missing):
        engine.module.merge_adapter()
    with pytest.raises(StateError, match=missing):
        engine.module.save_pretrained(tmp_path)
    lost = r"base_layer.weight' was changed .* gathered_parameters\(..., modifier_rank=0\)"
    with pytest.raises(StateError, match=lost), gathered_parameters(engine.module.parameters()):
        engine.module.merge_adapter()


def test_a_saved_adapter_is_read_by_peft_and_trains_on_in_another_engine(stage, tmp_path):
    expected, engine = adapted(), wrap(adapted(), lr=LR, **stage)
    with_torch(expected, range(2))
    on_engine(engine, range(2))
    trained = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    with gathered_parameters(trained.values()):
        engine.module.save_pretrained(tmp_path, state_dict=trained)
    read = PeftModel.from_pretrained(llama(), tmp_path, is_trainable=True).eval()
    assert_same(read, expected)
    again = wrap(read, lr=LR, **stage)
    with_torch(expected, range(2, 4))
    on_engine(again, range(2, 4))
    assert_same(again.module, expected)


SECOND = LoraConfig(**LORA | {"target_modules": ["o_proj"]})


def adds(model):
    torch.manual_seed(5)
    model.add_adapter("second", SECOND)
    model.base_model.set_adapter(["default", "second"])
    return [p for name, p in model.named_parameters() if "second" in name]


def test_an_adapter_that_comes_after_wrap_is_an_error_until_the_optimizer_has_it(stage):
    expected, engine = adapted(), wrap(adapted(), lr=LR, **stage)
    optimizer = with_torch(expected, range(2))
    on_engine(engine, range(2))
    added = adds(engine.module)
    engine.backward(engine(**batch(2)).loss)
    said = (
        r"'[\w.]+o_proj.lora_A.second.weight' and 3 others came to the model after wrap\(\) .*add_param_group\(\), or"
    )
    for _ in range(2):
        with pytest.raises(StateError, match=said):
            engine.step()
    engine.optimizer.zero_grad()
    for p in added:
        p.grad = None  # no optimizer's yet
    engine.optimizer.add_param_group({"params": added})
    optimizer.add_param_group({"params": adds(expected)})
    with_torch(expected, range(2, 4), optimizer)
    on_engine(engine, range(2, 4))
    assert_same(engine.module, expected)


@pytest.mark.parametrize("way", ["inject", "transformers", "loaded", "unfrozen later"])
def test_there_is_no_way_in_which_a_later_adapter_stays_as_it_is_in_silence(way, tmp_path):
    """With other parameters that go on training."""
    model = llama()
    if way in ("loaded", "unfrozen later"):
        model = adapted()
        model.save_pretrained(tmp_path)
        model.get_input_embeddings().weight.requires_grad_(True)
    engine = wrap(model, lr=LR)
    on_engine(engine, [0])
    if way == "inject":
        inject_adapter_in_model(SECOND, model, "second")
        model.model.norm.weight.requires_grad_(True)
    elif way == "transformers":
        model.add_adapter(SECOND, "second")
        model.model.norm.weight.requires_grad_(True)
    elif way == "loaded":
        model.load_adapter(tmp_path, "second", is_trainable=True)
    else:
        model.add_adapter("second", SECOND)
        on_engine(engine, [1])  # it takes no part
        model.set_adapter("second")
        model.get_input_embeddings().weight.requires_grad_(True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(StateError, match=r"second.weight' and \d+ others came to the model after wrap"):
        on_engine(engine, [2])
    for name, p in model.named_parameters():
        assert same_bits(p, before[name]), name


def test_an_adapter_that_is_taken_away_is_missed_by_nobody():
    engine = wrap(adapted(modules_to_save=["lm_head"]), lr=LR)
    adds(engine.module)
    engine.module.set_adapter("default")
    engine.module.delete_adapter("second")
    on_engine(engine, [0])
    assert engine.optimizer.updates == 1


def test_two_ranks_merge_and_save_what_one_process_with_torch_does(tmp_path):
    """An adapter in stage 3, merged layer by layer, against both ranks' batches with torch."""

    @on_ranks(2)
    def _(rank):
        expected = adapted()
        with_torch(expected, range(3), ranks=2)
        model = wrap(adapted(), lr=LR, **STAGES["3"])
        on_engine(model, range(3), rank, 2)
        trained = {name: p for name, p in model.module.named_parameters() if p.requires_grad}
        with gathered_parameters(trained.values()):
            model.module.save_pretrained(tmp_path, state_dict=trained, is_main_process=rank == 0)
        dist.barrier()
        assert bits(PeftModel.from_pretrained(llama(), tmp_path)) == bits(expected)
        each_layer(model.module, lambda layer: layer.merge())
        merged = model.module.unload()
        with gathered_parameters(merged.parameters()):
            assert bits(merged) == bits(expected.merge_and_unload())
