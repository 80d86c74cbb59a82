"""FSDP2 on two simulated devices whose kernels and copies are late: each gathering sees finished updates."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from frontends.torch import OffloadedAdamW, wrap
from frontends.torch.params import fsdp
from offload_core.step.parameters import Parameters
from tests.support import simulated
from tests.support.processes import on_ranks
from tests.support.simulated import collectives
from tests.support.torch_rank import batch, make

pytestmark = pytest.mark.skipif((missing := simulated.why_not()) is not None, reason=missing or "")

STEPS = 3
on_devices = on_ranks(2, backend=collectives.BACKEND)


@pytest.fixture(autouse=True)
def prepared():
    """The devices are built before ranks need them."""
    simulated.prepare()


def device_of(rank):
    device = torch.device(simulated.NAME, rank)
    torch.accelerator.set_device_index(device)
    return device


def sharded(device, *, prefetch=False):
    model = make().to(device)
    mesh = DeviceMesh(torch.device(device).type, [0, 1])
    layers = [layer for layer in model if [*layer.parameters()]]
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if prefetch:
        model.set_modules_to_forward_prefetch(layers)
    return model


def trained(device, rank, *, alone=False, read=False, prefetch=False, **fields):
    """The bits of this rank's parameters after some steps."""
    model = sharded(device, prefetch=prefetch)
    engine = None if alone else wrap(model, lr=1e-2, reduce_bucket_size=1000, **fields)
    optimizer = OffloadedAdamW(model.parameters(), lr=1e-2, **fields) if engine is None else engine.optimizer
    for step in range(STEPS):
        loss = (engine or model)(batch(step, rank).to(device)).float().pow(2).mean()
        if engine is None:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            engine.backward(loss)
            engine.step()
        if read:
            next(model.parameters()).detach().clone()
    optimizer.flush()
    torch.accelerator.synchronize()
    found = [param._local_tensor.detach().cpu().view(torch.int32).tolist() for param in model.parameters()]
    optimizer.close()
    return found


WAYS = {
    "optimizer alone": {"alone": True, "early_copy": True},
    "engine": {},
    "serial": {"schedule": "serial"},
    "read by hand": {"read": True},
    "layers gathered early": {"prefetch": True},
    "updated in backward": {"update_in_backward": True},
}


def test_late_kernels_and_copies_change_no_bit(drawn):
    cases = drawn([(name, seed) for name in WAYS for seed in (3, None)], 2)

    def everywhere(rank):
        found = {"on the host": trained("cpu", rank)}
        device = device_of(rank)
        for name, seed in cases:
            late = simulated.delays(seed=seed + rank, kernel=200, copy=2000) if seed else nullcontext()
            with late:
                found[f"{name}, {'late' if seed else 'at once'}"] = trained(device, rank, **WAYS[name])
        return found

    for found in on_devices(everywhere):
        expected = found.pop("on the host")
        assert len(found) == len(cases)
        assert [name for name, bits in found.items() if bits != expected] == []


def test_a_gathering_that_does_not_wait_is_noticed(drawn):
    """The law above, with each of the waits taken out."""
    ordered = Parameters.await_param
    changes = drawn(
        [
            ("no wait", lambda parameters, param, on_host: None),
            ("the reader's stream alone waits", lambda parameters, param, on_host: ordered(parameters, param)),
        ],
        1,
    )

    def everywhere(rank):
        device = device_of(rank)
        before = trained("cpu", rank)
        noticed = {}
        for name, instead in changes:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Parameters, "await_param", instead)
                for seed in range(1, 9):  # later and later, so that a busy machine's own delays hide nothing
                    with simulated.delays(seed=seed + rank, kernel=200, copy=1000 * 2**seed):
                        noticed[name] = trained(device, rank) != before
                    on_ranks_noticed = torch.tensor([float(noticed[name])], device=device)
                    dist.all_reduce(on_ranks_noticed)
                    if on_ranks_noticed.item():
                        break
        return noticed

    results = on_devices(everywhere)
    for name in results[0]:
        assert any(found[name] for found in results), name


def test_where_torch_gathers_in_another_way_each_update_ends_before_the_next_forward(monkeypatch):
    def everywhere(rank):
        device = device_of(rank)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fsdp, "_groups", lambda module: None)
            engine = wrap(sharded(device), lr=1e-2)
            assert not engine._reads_wait
            engine.close() if hasattr(engine, "close") else engine.optimizer.close()
            with simulated.delays(seed=rank + 1, kernel=200, copy=2000):
                late = trained(device, rank)
        return late == trained("cpu", rank)

    assert on_devices(everywhere) == [True, True]
