"""Parameters on parts of a mesh: which processes decide updates together, and which elements they count."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from frontends.torch import OffloadedSGD, gathered_parameters, wrap
from tests.support.processes import on_ranks

WORLD = 4


class Meshes:
    def __init__(self):
        self.world = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("world",))
        two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        self.tp, self.place = two["tp"], two.get_local_rank("dp")
        self.first = DeviceMesh("cpu", [0, 1])


def on(mesh, value=1.0):
    """64 elements of this value; None: a plain parameter."""
    whole = torch.full((64,), value)
    return nn.Parameter(whole if mesh is None else distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None))


def norm(params, optimizer=None, **fields):
    """The norm that the optimizer sees, where each parameter's gradient is its value."""
    optimizer = optimizer or OffloadedSGD(params, lr=1.0, gradient_clipping=1e6, **fields)
    for param in params:
        param.grad = param.detach().clone()
    optimizer.step()
    return optimizer.report.grad_norm


def refusal(act):
    try:
        return f"no error: {act()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def later(first, mesh, unfrozen, **fields):
    """A parameter on this mesh comes after the others, added or unfrozen."""
    params = [on(first), on(mesh)]
    params[1].requires_grad_(not unfrozen)
    optimizer = OffloadedSGD(params if unfrozen else params[:1], lr=1.0, gradient_clipping=1e6, **fields)
    params[1].requires_grad_(True)
    if not unfrozen:
        optimizer.add_param_group({"params": params[1:]})
    return norm(params, optimizer)


def on_four(body):
    return on_ranks(WORLD)(lambda rank: body(Meshes()))


@pytest.mark.draws(1)
@pytest.mark.parametrize("unfrozen", [False, True])
def test_a_later_parameter_on_processes_that_decide_no_update_is_refused(unfrozen):
    """A norm without its other components would be too small, and on each process another."""
    found = on_four(
        lambda meshes: [
            refusal(lambda: later(None, meshes.world, unfrozen)),
            refusal(lambda: later(meshes.tp, meshes.world, unfrozen)),
            refusal(lambda: later(None, meshes.world, unfrozen, process_group=dist.group.WORLD)),
            later(meshes.world, meshes.tp, unfrozen),
            later(meshes.world, None, unfrozen),
        ]
    )
    name = "group 0, parameter 1" if unfrozen else "group 1, parameter 0"
    for rank, (*refused, narrower, plain) in enumerate(found):
        pair = [0, 1] if rank < 2 else [2, 3]
        for said, members in zip(refused, ([rank], pair, "none"), strict=True):
            assert said.startswith(
                f"ParameterError: parameter {name!r} is a DTensor on the processes [0, 1, 2, 3], and the parameters "
                f"that this optimizer was made of are parts on {members}"
            ), said
        assert narrower == plain == 128**0.5


def test_copies_on_submeshes_beside_each_other_count_once_and_must_be_alike():
    """Experts of one name and shape that differ by process are no copies; one set of them would not be counted."""
    found = on_four(
        lambda meshes: (
            norm([on(meshes.world), on(meshes.tp)]),
            norm([on(meshes.tp, 1.0 + meshes.place)]),
            refusal(lambda: norm([on(meshes.world), on(meshes.tp, 1.0 + meshes.place)])),
        )
    )
    for rank, (copies, apart, experts) in enumerate(found):
        assert copies == 128**0.5
        assert apart == 8.0 * (1 + rank // 2)  # two optimizers, of two processes each
        assert experts.startswith(
            "ParameterError: parameter 'group 0, parameter 1' is a DTensor on submeshes beside each other, and "
            "processes have different values of it"
        )


def test_a_mesh_that_a_process_is_not_on_is_an_error_on_all_that_would_wait_for_it():
    def body(meshes):
        on_first = DTensor.from_local(
            torch.ones(32), meshes.first, [Shard(0)], run_check=False, shape=(64,), stride=(1,)
        )
        beside = refusal(lambda: norm([on(meshes.world), nn.Parameter(on_first)]))
        return beside, refusal(lambda: norm([nn.Parameter(on_first)]))

    for rank, (beside, alone) in enumerate(on_four(body)):
        assert "parameter 'group 0, parameter 1' is a DTensor here" in beside
        assert "differs on another process" in beside
        if rank < 2:
            assert alone == "no error: 8.0"
        else:
            assert f"which process {rank} is not on" in alone


def adapter_beside_a_frozen_base(rank, stage):
    base, adapter = nn.Linear(16, 16, bias=False).requires_grad_(False), nn.Linear(16, 1, bias=False)
    with torch.no_grad():
        base.weight.copy_(torch.eye(16))
        adapter.weight.zero_()
    engine = wrap(nn.Sequential(fully_shard(base), adapter), optimizer="sgd", lr=1.0, stage=stage)
    engine.backward(engine(torch.full((1, 16), 2.0 * rank)).sum())
    engine.step()
    with gathered_parameters([adapter.weight]):
        return adapter.weight.detach().unique().tolist()


def test_plain_parameters_beside_frozen_dtensors_are_averaged_over_all_ranks():
    """Adapters of a base that FSDP2 shards: nobody else averages their gradients."""

    @on_ranks(2)
    def found(rank):
        return [adapter_beside_a_frozen_base(rank, stage) for stage in (1, 2, 3)]

    assert found == [[[-1.0]] * 3] * 2


def test_meshes_without_one_in_common_are_refused_on_every_process():
    """Rows and columns of processes, each a mesh of its own."""

    @on_ranks(WORLD)
    def found(rank):
        pairs = [[0, 1], [2, 3], [0, 2], [1, 3]]
        row, column = (mesh for pair in pairs for mesh in [DeviceMesh("cpu", pair)] if rank in pair)
        return refusal(lambda: OffloadedSGD([on(row), on(column)], lr=1.0))

    for said in found:
        assert "ParameterError: parameters lie on meshes that are not parts of one: DeviceMesh" in said


def test_equal_submeshes_of_two_meshes_are_taken():
    """Torch takes them for one, and may give a parameter the submesh of an earlier mesh."""

    @on_ranks(WORLD)
    def found(rank):
        two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        earlier = on(two["a"])
        three = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "b", "c"))
        wide = distribute_tensor(torch.ones(64), three["b", "c"], [Shard(0), Shard(0)], src_data_rank=None)
        return norm([earlier, on(three["a"]), nn.Parameter(wide)])

    assert found == [192**0.5] * WORLD
