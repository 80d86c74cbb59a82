"""Mixtures of experts: Mixtral and Qwen3-MoE of transformers have the bits of torch's fused AdamW, on ranks, too."""

import pytest
import torch

from frontends.torch import gathered_parameters, wrap
from tests.support.hugging_face import LR, alone
from tests.support.mixtures import KINDS, N_EXPERTS, batch, mixture, routed
from tests.support.processes import run
from tests.support.torch_models import same_bits

__all__ = ["alone"]  # a fixture
STAGE_3 = {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 0}


@pytest.fixture(scope="module", params=KINDS)
def reference(request):
    model, experts = mixture(request.param), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    for step in range(4):
        output = model(**batch(step))
        experts.append(routed(output))
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert any(len(block) < N_EXPERTS for step in experts for block in step), "every expert had tokens"
    return request.param, model, experts


@pytest.mark.parametrize(
    "fields",
    [{"stage": 1}, {"stage": 2}, {"stage": 2, "update_in_backward": True}, STAGE_3, {**STAGE_3, "leaf_modules": None}],
    ids=["1", "2", "2, early", "3", "3, leaves"],
)
def test_experts_without_tokens_train_as_with_torch(reference, fields):
    kind, expected, experts = reference
    if "leaf_modules" in fields:
        fields = {**fields, "leaf_modules": [KINDS[kind]]}
    engine, found = wrap(mixture(kind), lr=LR, **fields), []
    for step in range(4):
        output = engine(**batch(step))
        found.append(routed(output))
        engine.backward(output.loss)
        engine.step()
    assert found == experts
    with gathered_parameters(engine.module.parameters()):
        for (name, p), theirs in zip(engine.module.named_parameters(), expected.parameters(), strict=True):
            assert same_bits(p, theirs), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "modules"])
def test_ranks_that_route_to_other_experts_train_as_torch_does_with_the_mean_of_their_gradients(tmp_path, kind):
    """``"modules"``: each expert is a module of its own, as in older models, and has no gradient without tokens."""
    first, second = run(kind, 2, tmp_path, "mixture_worker.py")
    assert first["routed"] != second["routed"]
    alone = [set(mine) ^ set(theirs) for mine, theirs in zip(first["routed"], second["routed"], strict=True)]
    unused = [set(range(first["experts"])) - {*mine, *theirs}
              for mine, theirs in zip(first["routed"], second["routed"], strict=True)]  # fmt: skip
    assert any(alone), "no expert had tokens on one rank alone"
    assert any(unused), "each expert had tokens somewhere"
    for result in (first, second):
        for name, found in result["bits"].items():
            assert found == first["theirs"], name


@pytest.fixture(scope="module")
def leaves(tmp_path_factory):
    return run("leaves", 2, tmp_path_factory.mktemp("leaves"), "mixture_worker.py")


@pytest.mark.slow
def test_in_every_way_experts_of_leaf_modules_have_the_bits_of_stage_2(leaves):
    first, second = leaves
    for way, found in first.items():
        assert found["3"] == found["2"] == second[way]["3"], way
    blocks = [[block for step in result["plain"]["routed"] for block in step] for result in leaves]
    pairs = [*zip(*blocks, strict=True)]
    assert any(set(mine) != set(theirs) for mine, theirs in pairs), "each expert had tokens on both ranks or on none"
    assert any(len({*mine, *theirs}) < 6 for mine, theirs in pairs), "each expert had tokens somewhere"


@pytest.mark.slow
def test_gradients_of_leaf_modules_leave_during_backward_and_fewer_are_on_the_device_at_a_time(leaves):
    """A bucket for each matrix of 3 blocks of 6 experts, and one for all that is small."""
    at_the_end = {
        "a graph that is kept": "another backward may bring gradients",
        "a forward without backward": "that forward's backward may come",
        "weights used outside, small": "they share a bucket with the first layer",
    }
    for result in leaves:
        for way, found in result.items():
            events = found["events"]
            rounds = 2 if way in ("two backwards", "a graph that is kept") else 1
            assert events.count("exchange") == rounds * found["buckets"], way
            before = events[: events.index("first layer")].count("exchange")
            if way in at_the_end:
                assert before < 8, way
            else:
                assert before >= 22, way
        assert result["plain"]["share"] < 0.7 * result["a forward without backward"]["share"]


@pytest.mark.slow
def test_a_parameter_from_outside_that_a_leaf_module_reads_on_one_rank_alone_is_an_error_when_time_is_over(tmp_path):
    for result in run("violating", 2, tmp_path, "mixture_worker.py"):
        assert "exchange of gradients" in result["said"]
        assert "'trunk.3.weight': gathering of its shards" in result["said"]
        assert "(in stage 3: ran other modules or lacked a gradient; leaf_modules names modules" in result["said"]
