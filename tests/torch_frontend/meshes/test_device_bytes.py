"""Device memory under FSDP2 on two simulated devices: gradients leave during backward, and states are never there."""

import gc
import time

import pytest
import torch

from frontends.torch import OffloadedAdamW, wrap
from tests.support import meshes, simulated
from tests.support.device_memory import allocated, allocated_before
from tests.support.meshes import Sharded, local
from tests.support.processes import on_ranks
from tests.support.simulated import collectives

pytestmark = pytest.mark.skipif((missing := simulated.why_not()) is not None, reason=missing or "")


@pytest.fixture(autouse=True)
def prepared():
    """The devices are built before ranks need them."""
    simulated.prepare()


def torchs(model):
    return torch.optim.AdamW(model.parameters(), fused=False, foreach=False)


WAYS = {
    "torch": torchs,
    "plain": lambda model: OffloadedAdamW(model.parameters()),
    "early": lambda model: OffloadedAdamW(model.parameters(), early_copy=True),
    "wrap": wrap,
}


def held_by(way):
    """Bytes that the device allocates beside the model by the end of each backward, and those of this rank's
    parameters."""
    model = Sharded("uneven", "fsdp").make(simulated.NAME)
    with torch.no_grad():
        model.loss(0)  # FSDP2 makes what it keeps
    before, found = allocated_before(), []
    run = WAYS[way](model)
    for seed in range(2):
        loss = model.loss(seed)
        run.backward(loss) if way == "wrap" else loss.backward()
        del loss
        gc.collect()
        while way in ("early", "wrap") and allocated() != before:
            time.sleep(0.001)  # the last gradients are on their way; if they stay, the test's time ends
        found.append(allocated() - before)
        run.step()
        run.zero_grad()
    return found, sum(local(p).nbytes for p in model.parameters())


def test_after_backward_the_device_holds_no_state_and_no_gradient_that_has_left(drawn):
    ways = drawn(WAYS, 1)

    @on_ranks(2, backend=collectives.BACKEND)
    def found(rank):
        meshes.WORLD = 2
        torch.accelerator.set_device_index(torch.device(simulated.NAME, rank))
        return {way: held_by(way) for way in ways}

    for of_one in found:
        assert of_one.keys() == {*ways}
        for way, ((first, second), parameters) in of_one.items():
            if way == "plain":
                assert parameters <= first == second < 1.3 * parameters  # gradients alone; allocations are rounded up
            elif way == "torch":
                assert first < 1.3 * parameters
                assert second >= 3 * parameters  # and moments
            else:
                assert [first, second] == [0, 0]
