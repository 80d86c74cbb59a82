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
