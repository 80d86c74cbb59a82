"""``average_over_ranks=False``: gradients are the sums over the ranks."""

import pytest
import torch
from torch import nn

from frontends.torch import OffloadedAdamW, deepspeed, wrap
from offload_core.errors import ConfigError
from tests.support import meshes
from tests.support.meshes import Sharded
from tests.support.processes import on_ranks
from tests.support.torch_rank import loss_of, make, whole_bits

SETTINGS = {
    "stage 1": {"stage": 1},
    "stage 2, clipped": {"gradient_clipping": 0.3, "param_dtype": "bfloat16"},
    "stage 2, updated in backward": {"update_in_backward": True, "gradient_clipping": 0.3},
    "stage 3, two micro-steps": {
        "stage": 3,
        "param_persistence_threshold": 0,
        "gradient_accumulation_steps": 2,
        "average_plain_backward": True,
    },
    "native, scaled": {"reduction": "native", "param_dtype": "bfloat16", "loss_scale": 16.0},
    "sgd": {"optimizer": "sgd", "momentum": 0.9},
}


def trained(rank, fields, factor=1.0):
    """The bits after six updates, the norms, and the gradient that was read before the last one."""
    engine, norms, read = wrap(make(), lr=1e-2, **fields), [], None
    for seed in range(6):
        engine.backward(factor * loss_of(engine, seed, rank))
        if not fields.get("update_in_backward"):
            read = engine.optimizer.whole_gradient(next(iter(engine.module.parameters())))
        norms.append(engine.step().grad_norm)
    return whole_bits(engine), norms, None if read is None else read.sum().item()


@pytest.mark.draws(1)
@pytest.mark.parametrize("name", SETTINGS)
def test_of_two_ranks_they_are_those_of_the_doubled_loss_bit_for_bit(name):
    """A factor of two is exact."""

    @on_ranks(2)
    def found(rank):
        mine = trained(rank, {**SETTINGS[name], "average_over_ranks": False})
        return mine, trained(rank, SETTINGS[name], 2.0), trained(rank, SETTINGS[name])[0]

    for mine, doubled, averaged in found:
        assert mine == doubled
        assert mine[0] != averaged or name == "stage 1"  # AdamW follows no factor but in its eps


def test_of_three_ranks_they_are_the_gradients_of_the_whole_batch():
    @on_ranks(3)
    def found(rank):
        engine = wrap(make(), optimizer="sgd", lr=0.1, average_over_ranks=False)
        plain = make()
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        for seed in range(4):
            engine.backward(loss_of(engine, seed, rank) / 3)
            engine.step()
            (sum(loss_of(plain, seed, each) for each in range(3)) / 3).backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.flush()
        for mine, theirs in zip(engine.module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


def test_an_optimizer_alone_sums_over_its_process_group():
    @on_ranks(2)
    def found(rank):
        result = []
        for factor, averages in ((1.0, False), (2.0, True)):
            model = make()
            group = torch.distributed.group.WORLD
            optimizer = OffloadedAdamW(model.parameters(), lr=1e-2, process_group=group, average_over_ranks=averages)
            for seed in range(3):
                (factor * loss_of(model, seed, rank)).backward()
                optimizer.step()
                optimizer.zero_grad()
            optimizer.flush()
            result.append([p.detach().clone() for p in model.parameters()])
        assert all(map(torch.equal, *result))


def test_it_is_deepspeeds_gradient_allreduce_op():
    @on_ranks(2)
    def found(rank):
        result = []
        for stage in (0, 1, 2, 3):
            model = nn.Linear(2, 1, bias=False)
            nn.init.zeros_(model.weight)
            config = {
                "train_micro_batch_size_per_gpu": 1,
                "gradient_allreduce_op": "sum",
                "gradient_clipping": 0.0,
                "zero_optimization": {"stage": stage},
            }
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
            engine.backward(engine(torch.tensor([[1.0 + rank, 2.0]])).sum())
            engine.step()
            with deepspeed.zero.GatheredParameters(model.weight):
                result.append(model.weight.detach().tolist())
            engine.destroy()
        return result

    assert found == [[[[-3.0, -4.0]]] * 4] * 2


def test_where_gradients_come_reduced_it_is_an_error():
    @on_ranks(2)
    def found(rank):
        meshes.WORLD = 2
        with pytest.raises(ConfigError, match=r"average_over_ranks=False with DTensor.*set_gradient_divide_factor"):
            wrap(Sharded("uneven", "fsdp").make("cpu"), lr=1e-2, average_over_ranks=False)


def test_on_one_rank_it_changes_nothing():
    engine, other = (wrap(make(), lr=1e-2, average_over_ranks=averages) for averages in (False, True))
    for each in (engine, other):
        each.backward(loss_of(each, 0, 0))
        each.step()
        each.flush()
    assert all(map(torch.equal, engine.module.parameters(), other.module.parameters()))
