"""States that are rounded stochastically: which elements of a placed parameter have which random numbers."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from frontends.torch import OffloadedAdamW
from tests.support.processes import on_ranks

FORMATS = [{"state_format": "bf16"}, {"state_format": "8bit", "master_dtype": "bfloat16"}]


def trained(values, gradients, mesh=None, dim=0, **fields):
    param = nn.Parameter(values.clone() if mesh is None else distribute_tensor(values, mesh, [Shard(dim)]))
    optimizer = OffloadedAdamW([("w", param)], lr=1e-2, **fields)
    for gradient in gradients:
        param.grad = gradient.clone() if mesh is None else distribute_tensor(gradient, mesh, [Shard(dim)])
        optimizer.step()
    found = [param.detach() if mesh is None else param.full_tensor().detach()]
    found += [optimizer.whole_states(param)[name] for name in ("exp_avg", "exp_avg_sq")]
    optimizer.close()
    return found


def drawn(*shape):
    draw = torch.Generator().manual_seed(0)
    values, *gradients = (torch.randn(*shape, generator=draw).bfloat16() for _ in range(4))
    return values, gradients


@pytest.mark.draws(1)
@pytest.mark.parametrize("fields", FORMATS, ids=str)
def test_runs_from_a_whole_block_on_have_the_bits_of_one_process(fields):
    """Two shards of 4 x 256 elements."""

    @on_ranks(2)
    def found(rank):
        mesh = init_device_mesh("cpu", (2,))
        values, gradients = drawn(8, 256)
        pairs = zip(trained(values, gradients, mesh, **fields), trained(values, gradients, **fields), strict=True)
        return [torch.equal(a, b) for a, b in pairs]

    assert found == [[True] * 3] * 2


def test_other_parts_have_random_numbers_of_their_own():
    """Alike values and gradients in the columns of both shards: with one seed both would be rounded alike."""

    @on_ranks(2)
    def found(rank):
        mesh = init_device_mesh("cpu", (2,))
        values, gradients = drawn(64, 16)
        values, gradients = torch.cat([values] * 2, 1), [torch.cat([gradient] * 2, 1) for gradient in gradients]
        _, mean, _ = trained(values, gradients, mesh, dim=1, state_format="bf16")
        rank_of = dist.get_rank()
        return rank_of == rank and not torch.equal(mean[:, :16], mean[:, 16:])

    assert found == [True, True]
