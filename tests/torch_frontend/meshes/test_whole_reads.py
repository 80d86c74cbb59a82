"""Whole parameters, states and gradients of shards that are uneven: one rank may have all rows, and others none."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from frontends.torch import OffloadedMuon, wrap
from tests.support.exports import load
from tests.support.processes import on_ranks
from tests.support.torch_rank import said_by


class Parts(nn.Module):
    """Its parameters have 8, 5, 2 and 1 rows, so that a rank has all rows, some or none; one is a scalar, one has no
    elements, two are frozen, and one is tied."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 5), nn.Linear(5, 2))
        self.base, self.frozen_head = nn.Linear(8, 2), nn.Linear(2, 1)
        self.head, self.again = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
        self.again.weight = self.head.weight
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.unused = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        for frozen in (self.base, self.frozen_head):
            frozen.requires_grad_(False)
        self.register_buffer("count", torch.arange(3))

    def forward(self, x):
        sums = [Partial()] * self.scale.device_mesh.ndim
        y = (self.layers(x) + self.base(x)) * self.scale.to_local(grad_placements=sums)
        return self.head(y) + self.again(y) + self.frozen_head(y)


def sharded(mesh_of=lambda n: init_device_mesh("cpu", (n,)), dtype=torch.float32):
    torch.manual_seed(0)
    mesh = mesh_of(dist.get_world_size())
    model = Parts().to(dtype)
    scale = nn.Parameter(distribute_tensor(model.scale.detach(), mesh, [Replicate()] * mesh.ndim))
    model.scale = scale
    fully_shard(model.layers, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params={scale})
    return model


def joined(param, local):
    """The whole tensor of which each rank has a part, as torch puts it together; a whole one is the same on all."""
    placed = DTensor.from_local(
        local.detach().view(param.to_local().shape),
        param.device_mesh,
        param.placements,
        shape=param.shape,
        stride=param.stride(),
    )
    return placed.full_tensor()


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def assert_reads_are_whole(engine, model):
    named = dict(model.named_parameters())
    optimizer = engine.optimizer
    expected = {name: param.full_tensor().detach() for name, param in named.items()}
    exact = dict(expected)
    for name, param in named.items():
        gradient = optimizer.whole_gradient(param)
        if optimizer.has_states(param):
            own = optimizer.own_states(param)
            whole = optimizer.whole_states(param)
            assert {"master", "exp_avg", "exp_avg_sq"} == whole.keys() == own.keys()
            for state, value in whole.items():
                assert same(value, joined(param, own[state])), (name, state)
            exact[name] = whole["master"]
            mine = optimizer.own_gradient(param)
            assert (gradient is None) == (mine is None), name
            assert mine is None or same(gradient, joined(param, mine)), name
        else:
            assert gradient is None
    for dtype, values in ((None, expected), ("float32", exact)):
        given = dict(engine.named_weights(dtype=dtype))
        assert given.keys() == expected.keys() | {"count"}
        for name, value in values.items():
            assert same(given[name], value.float() if dtype else value), (name, dtype)
    state_dict = engine.whole_state_dict()
    assert (state_dict is None) == (dist.get_rank() > 0)
    for name, value in (state_dict or {}).items():
        assert same(value, model.count if name == "count" else expected[name.replace("again", "head")]), name


def read_everything(folder, steps=3, **options):
    model = sharded(**options)
    engine = wrap(model, lr=1e-2)
    for seed in range(steps):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * seed + dist.get_rank()))
        engine.backward(engine(x.to(model.base.weight.dtype)).float().square().sum())
        assert_reads_are_whole(engine, model)
        engine.step()
        assert_reads_are_whole(engine, model)
        engine.optimizer.torch_state_dict()
        engine.export_safetensors(folder / str(seed), dtype="float32")
        dist.barrier()
        written = load(folder / str(seed))[0]
        for name, value in engine.named_weights(dtype="float32"):
            assert same(written[name], value), name
    engine.close()


@pytest.mark.long("DTensors on two to four ranks: torch works out each operator's sharding anew for each mesh")
@pytest.mark.draws(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_reads_under_fsdp2_are_of_all_parts_whatever_each_rank_has(tmp_path, dtype):
    @on_ranks(2)
    def _(rank):
        read_everything(tmp_path, 2, dtype=dtype)


def test_a_matrix_of_one_row_is_refused_on_all_ranks_by_a_rule_of_whole_matrices():
    @on_ranks(2)
    def found(rank):
        layer = nn.Linear(8, 1, bias=False)
        fully_shard(layer)
        return said_by(lambda: OffloadedMuon(layer.parameters()))

    assert all("needs whole matrices" in said for said in found), found


def given(engine, folder):
    """What a model's weights are, by each way that reads them."""
    engine.export_safetensors(folder)
    dist.barrier()
    ways = [dict(engine.named_weights(dtype=dtype)) for dtype in (None, "float32", "bfloat16")]
    return [*ways, engine.whole_state_dict() or {}, load(folder)[0]]


def stepped(dtype=torch.float32, **options):
    """An engine after a step."""
    engine = wrap(sharded(dtype=dtype, **options), lr=1e-2)
    engine.backward(engine(torch.ones(4, 8, dtype=dtype)).float().square().sum())
    engine.step()
    return engine


def released(folder, **options):
    engine = stepped(**options)
    before = given(engine, folder / "before")
    for i, keep in enumerate(([], ["base"], ["frozen_head.weight", "head", "scale"])):
        with engine.released(keep=keep):
            for expected, found in zip(before, given(engine, folder / str(i)), strict=True):
                assert expected.keys() == found.keys()
                for name, value in expected.items():
                    assert same(found[name], value), name
    engine.close()


@pytest.mark.draws(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_released_engine_gives_the_weights_that_it_gave_before_frozen_ones_included(tmp_path, dtype):
    @on_ranks(2)
    def _(rank):
        released(tmp_path, dtype=dtype)


def test_a_released_engine_that_trains_nothing_gives_its_weights(tmp_path):
    @on_ranks(2)
    def _(rank):
        model = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 1)).requires_grad_(False)
        fully_shard(model)
        engine = wrap(model)
        before = dict(engine.named_weights())
        with engine.released():
            for name, value in engine.named_weights():
                assert same(value, before[name]), name


@pytest.mark.slow
def test_whole_reads_on_three_ranks(tmp_path):
    @on_ranks(3)
    def _(rank):
        read_everything(tmp_path)


@pytest.mark.slow
def test_whole_reads_where_two_ranks_hold_each_part(tmp_path):
    @on_ranks(4)
    def _(rank):
        def mesh_of(n):
            return init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("a", "b"))

        read_everything(tmp_path, mesh_of=mesh_of)
        released(tmp_path, mesh_of=mesh_of)
