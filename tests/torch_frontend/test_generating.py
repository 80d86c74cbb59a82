"""Generation in stage 3: parameters are gathered once for all tokens, whatever lengths the ranks generate."""

import collections

import pytest
import torch
from torch import nn

from frontends.torch import gathered_parameters, wrap
from offload_core import StateError
from tests.support.partitioned_models import llama, llama_loss
from tests.support.processes import on_ranks
from tests.support.torch_models import place
from tests.support.torch_rank import whole_bits

STAGE_3 = {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 1}
NARROW = {**STAGE_3, "max_live_parameters": 4000, "prefetch_bucket_size": 2500, "max_reuse_distance": 3000}
everywhere = pytest.mark.usefixtures("device")
rarely = pytest.mark.parametrize(
    "device", ["host", pytest.param("simulated, delays 0", marks=pytest.mark.slow)], indirect=True
)


def counted(engine, act):
    """What a function returns, and how often each parameter was gathered in it."""
    live, gathered = engine.optimizer.sharding.live, collections.Counter()
    gather = live._gather

    def count(param):
        gathered[param.spec.name] += 1
        gather(param)

    live._gather = count
    try:
        return act(), gathered
    finally:
        del live._gather


def step(engine, seed):
    engine.backward(llama_loss(engine, seed))
    engine.step()


@pytest.mark.integration
@rarely
@everywhere
def test_a_generation_gathers_each_parameter_once():
    """Right after an update, in a model of more elements than may be live, and under gradients."""
    plain, engine = wrap(llama(), lr=1e-2), wrap(llama(), lr=1e-2, **NARROW)
    prompt = torch.tensor([[1, 2, 3]], device=place())
    for seed in range(2):
        step(plain, seed), step(engine, seed)
        expected = plain.generate(prompt, max_new_tokens=32, do_sample=False)
        texts, gathered = counted(engine, lambda: engine.generate(prompt, max_new_tokens=32, do_sample=False))
        assert texts.tolist() == expected.tolist()
        names = [name for name, p in engine.module.named_parameters() if p in engine.optimizer.sharding]
        assert gathered == dict.fromkeys(names, 1)
        assert engine.optimizer.sharding.live.numel == 0
    _, gathered = counted(engine, lambda: engine.module.generate(prompt, max_new_tokens=32, do_sample=False))
    assert max(gathered.values()) > 8  # as it would be without
    assert whole_bits(engine) == whole_bits(plain)


class Branches(nn.Module):
    """Ranks run other branches in ``generate``, and another number of them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, order=(0, 1, 2, 3)):
        for i in order:
            x = self.branches[i](x).tanh()
        return x

    def generate(self, x, rank):
        with torch.no_grad():
            for i in range(2 + 3 * rank):
                x = self(x, order=(3, rank, i % 4))
        return x


def test_ranks_generate_to_other_lengths_and_prefetch_alike_later():
    @on_ranks(2)
    def found(rank):
        engine = wrap(Branches(), lr=1e-2, **{**STAGE_3, "max_live_parameters": 150, "prefetch_bucket_size": 150})
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(rank))
        made = []
        for _ in range(4):
            made.append(engine.generate(x, rank).tolist())
            with torch.no_grad():
                made.append(engine(x).tolist())
            engine.backward(engine(x).square().mean())
            engine.step()
        plain = wrap(Branches(), lr=1e-2)
        for i in range(4):
            assert plain.module.generate(x, rank).tolist() == made[2 * i]
            plain.backward(plain(x).square().mean())
            plain.step()
        return whole_bits(engine), whole_bits(plain)

    assert len({*found[0], *found[1]}) == 1


@pytest.mark.integration
def test_ranks_generate_with_transformers_to_other_lengths():
    @on_ranks(2)
    def found(rank):
        engine = wrap(llama(), lr=1e-2, **NARROW)
        tokens = torch.tensor([[3 + rank, 5, 7]])
        for _ in range(2):
            made, gathered = counted(
                engine, lambda: engine.generate(tokens, max_new_tokens=4 + 5 * rank, do_sample=False)
            )
            assert made.shape[1] == (12 if rank else 7)
            assert {*gathered.values()} == {1}
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        return whole_bits(engine)

    assert found[0] == found[1]


@pytest.mark.integration
@pytest.mark.parametrize("fields", [{}, STAGE_3], ids=["whole", "shards"])
def test_parameters_are_read_inside_and_a_graph_made_there_has_its_backward_after(fields):
    engine, plain = wrap(llama(), lr=1e-2, **fields), wrap(llama(), lr=1e-2)
    with engine.generating():
        norm = sum(float(p.detach().square().sum()) for p in engine.module.parameters())
        loss = llama_loss(engine, 0)
        with engine.generating():
            pass
        assert norm == sum(float(p.detach().square().sum()) for p in engine.module.parameters())
    engine.backward(loss)
    engine.step()
    step(plain, 0)
    assert whole_bits(engine) == whole_bits(plain)


@pytest.mark.integration
def test_inside_no_update_is_made_and_no_change_that_other_ranks_lack():
    engine = wrap(llama(), lr=1e-2, **STAGE_3)
    before = whole_bits(engine)
    weight = engine.module.lm_head.weight
    said = r"inside gathered_parameters\(\) or generating\(\); expected it after"
    with pytest.raises(StateError, match=said), engine.generating():
        step(engine, 0)
    engine.zero_grad()
    said = r"'lm_head.weight' was changed inside generating\(\).*the change is lost"
    with pytest.raises(StateError, match=said), engine.generating(), torch.no_grad():
        weight.add_(1)
    assert whole_bits(engine) == before
    with engine.generating(), gathered_parameters(weight, modifier_rank=0), torch.no_grad():
        weight.add_(1)
    assert whole_bits(engine) != before


@pytest.mark.integration
def test_an_error_inside_releases_all_parameters():
    engine = wrap(llama(), lr=1e-2, **STAGE_3)
    with pytest.raises(ZeroDivisionError), engine.generating():
        raise ZeroDivisionError
    assert engine.optimizer.sharding.live.numel == 0
    with pytest.raises(AttributeError, match="generate"):
        wrap(nn.Linear(4, 4), lr=1e-2).generate()
