"""Laws of ownership, of the norm and of the update, over drawn meshes, shapes and placements."""

import math
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, assume, example, given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from frontends.torch import OffloadedAdamW
from frontends.torch.params.dtensor import UNDIVIDED, count_once, placement_of
from offload_core.testing.thread_ranks import run_ranks
from tests import sampling
from tests.support.drawn_meshes import Drawn, Tensor, drawn
from tests.support.mesh_runs import each, no_errors
from tests.support.meshes import WORLD, local
from tests.support.processes import on_ranks
from tests.support.strategies import law
from tests.support.torch_models import same_bits


def as_rank(rank, case, body):
    """Run this as a rank of a group that exchanges nothing, with the case's mesh."""
    n_ranks = math.prod(case.root)
    dist.init_process_group("fake", rank=rank, world_size=n_ranks, store=FakeStore())
    try:
        return body(init_device_mesh("cpu", case.root, mesh_dim_names=case.names))
    finally:
        dist.destroy_process_group()


def parts_of(case, mesh):
    """This rank's parameters by name, and what the optimizer reads of their placement."""
    named = [(f"p{i}", tensor.on(mesh, torch.zeros(tensor.shape))) for i, tensor in enumerate(case.tensors)]
    return [(name, p, placement_of(name, p, None)) for name, p in named]


def assert_owned(case):
    ranks = [as_rank(rank, case, partial(parts_of, case)) for rank in range(math.prod(case.root))]
    counted = run_ranks(len(ranks), lambda rank: count_once(rank, ranks[rank.rank]))
    for i, tensor in enumerate(case.tensors):
        times = torch.zeros(tensor.shape, dtype=torch.int)
        for place, held_by_rank, mine in zip(case.places(), ranks, counted, strict=True):
            _, param, placed = held_by_rank[i]
            if placed.part is None:
                times += mine[i]
                continue
            held = torch.arange(times.numel()).reshape(tensor.shape)[placed.part.index]
            assert torch.equal(held, tensor.indices(case.root, place)), (i, place)
            assert tuple(local(param).shape) == placed.part.local_shape
            times[placed.part.index] += mine[i]
        assert bool((times == 1).all()), (i, times)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ranks_that_hold_nothing_of_a_parameter_agree_on_it_in_any_element_type(dtype):
    def agree(rank):
        return count_once(rank, [("p", torch.empty(0, dtype=dtype), UNDIVIDED)])

    assert sorted(run_ranks(2, agree)) == [[False], [True]]


HALVES = Tensor((5, 3), (0, 1), (0, 0), later=True)


@example(case=Drawn((2, 2), (HALVES, replace(HALVES, later=False), Tensor((5, 3), (1,), (0,))), 0))
@example(case=Drawn((8,), (Tensor((3,), (0,), (0,)), Tensor((), (0,), (None,)), Tensor((2, 2), None)), 0))
@given(case=drawn())
@law(25)
def test_each_element_has_one_rank_that_counts_it_and_those_that_hold_it_are_those_of_torch_chunk(case):
    """For up to 8 ranks, as threads."""
    assert_owned(case)


@given(case=drawn(4))
@law(25)
def test_the_support_cuts_as_torch_distributes(case):
    """Of tensors that no two dimensions of the mesh cut in the other order, which torch does not distribute."""

    def compare(mesh):
        for tensor in case.tensors:
            if tensor.dims is None or tensor.strided:
                continue
            values = torch.arange(math.prod(tensor.shape)).reshape(tensor.shape)
            mine = tensor.on(mesh, values)
            torchs = distribute_tensor(values, mine.device_mesh, mine.placements, src_data_rank=None)
            assert torch.equal(local(mine), local(torchs))

    for rank in range(4):
        as_rank(rank, case, compare)


def whole_of(tensor, generator, dtype):
    return tensor.laid(torch.randint(-64, 64, tensor.shape, generator=generator).to(dtype))


def trained(case, *, dtype, way, clipping):
    """Three steps with drawn gradients, beside one process with the whole tensors.

    A gradient of an odd step may be missing. The sum of squares is of integers, and therefore exact in a double.
    """
    mesh = init_device_mesh("cpu", case.root, mesh_dim_names=case.names)
    generator = torch.Generator().manual_seed(case.seed)
    draws = random.Random(case.seed)
    place = mesh.get_coordinate()
    starts = [whole_of(tensor, generator, dtype) / 64 for tensor in case.tensors]
    wholes = [torch.nn.Parameter(start.clone()) for start in starts]
    params = [torch.nn.Parameter(tensor.on(mesh, start)) for tensor, start in zip(case.tensors, starts, strict=True)]
    fields = {"lr": 0.01, "gradient_clipping": clipping, "reduce_bucket_size": 40}
    ours, theirs = OffloadedAdamW(params, early_copy=way == "early", **fields), OffloadedAdamW(wholes, **fields)
    told = []
    for step in range(3):
        squares = 0
        for tensor, p, whole in zip(case.tensors, params, wholes, strict=True):
            if step == 1 and draws.random() < 0.3 and len(params) > 1 and whole is not wholes[0]:
                continue
            grad = whole_of(tensor, generator, dtype)
            squares += int(grad.double().square().sum())
            p.grad, whole.grad = tensor.on(mesh, grad), grad
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
            optimizer.flush()
        assert ours.report == theirs.report, (ours.report, theirs.report)
        assert ours.report.grad_norm == math.sqrt(squares), (ours.report, math.sqrt(squares))
        told.append((ours.report.grad_norm, ours.report.clip_coefficient))
        for i, (tensor, p, whole) in enumerate(zip(case.tensors, params, wholes, strict=True)):
            at = slice(None) if tensor.dims is None else tensor.indices(case.root, place).flatten()
            mine, expected = ours.state[p], theirs.state[whole]
            compared = [("value", p, whole)]
            compared += [(key, mine[key], expected[key]) for key in ("exp_avg", "exp_avg_sq") if key in expected]
            for key, own, of_whole in compared:
                assert same_bits(local(own).flatten(), of_whole.detach().flatten()[at]), (i, key, step)
    ours.close()
    return told


def runs_of_ranks(n):
    """So many examples, which are not made simpler when one fails: each starts processes."""
    return law(n, phases=[Phase.generate])


def assert_no_mesh_changes_an_update(cases, n_ranks):
    @on_ranks(n_ranks)
    def found(rank):
        runs = []
        for number, case in enumerate(cases):
            dtype, way = [torch.float32, torch.bfloat16][number % 2], ["plain", "early"][number // 2 % 2]
            run = partial(trained, case, dtype=dtype, way=way, clipping=50.0)
            runs.append((f"{number}: {case}, {dtype}, {way}", run))
        return each(runs)

    results = no_errors(found)
    assert all(each == results[0] for each in results)


FIXED = [
    Drawn((4,), (Tensor((1, 6), (0,), (0,)),), 0),  # three ranks have no element
    Drawn((2, 2), (HALVES, replace(HALVES, later=False), Tensor((7,), (0,), (0,))), 1),
    Drawn((2, 2), (Tensor((5, 3), (1,), (0,), transposed=True), Tensor((4, 4), None, transposed=True)), 2),
    Drawn((4,), (Tensor((3, 2, 2), (0,), (0,)), Tensor((), (0,), (None,)), Tensor((6,), (0,), (None,))), 3),
    Drawn((2, 1, 2), (Tensor((9, 5), (0, 2), (1, 0)), Tensor((2, 9), (0, 2), (1, 1), later=True)), 4),
]


@pytest.fixture(scope="module")
def fixed(drawn_of_file):
    return drawn_of_file(FIXED, 2)


IN_ONE_START = 8 if sampling.whole else 3


@pytest.mark.long("DTensors on two to four ranks: torch works out each operator's sharding anew for each mesh")
@given(cases=st.lists(drawn(WORLD), min_size=IN_ONE_START, max_size=IN_ONE_START))
@runs_of_ranks(1)
def test_no_mesh_changes_the_norm_the_clipping_or_the_update(fixed, cases):
    assume(any(case != cases[0] for case in cases))  # Hypothesis begins with the simplest one alone
    assert_no_mesh_changes_an_update(fixed + cases, WORLD)


@pytest.mark.slow
@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
@given(data=st.data())
@runs_of_ranks(3)
def test_no_mesh_of_any_number_of_ranks_changes_the_norm_the_clipping_or_the_update(n_ranks, data):
    cases = data.draw(st.lists(drawn(n_ranks), min_size=40, max_size=40))
    assert_no_mesh_changes_an_update(cases, n_ranks)
