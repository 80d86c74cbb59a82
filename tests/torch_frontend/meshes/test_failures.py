"""Errors in backward, and ranks that are lost, over meshes: one error, and nothing hangs."""

import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from offload_core import CollectiveError
from tests.support import meshes
from tests.support.mesh_runs import WAYS, Ours, TorchsOnLocals, assert_same, each, no_errors
from tests.support.meshes import WORLD, Sharded, blocks_of
from tests.support.processes import on_ranks

TP, FSDP = Sharded("gpt", "tp"), Sharded("gpt", "fsdp")


class Failing:
    """In backward, calls a function where the gradient of the first block's output has been computed."""

    def __init__(self, model, act):
        def on_output(module, args, output):
            output.register_hook(lambda grad: act())

        self._hook = blocks_of(model)[0].register_forward_hook(on_output)

    def remove(self):
        self._hook.remove()


def fail():
    raise InterruptedError("its own")


def after_an_error(how, way):
    """Two steps, of which the second is tried again after a backward that failed on all ranks."""
    model, other = how.make(), how.make()
    ours, theirs = Ours(model, way), TorchsOnLocals(other)
    for step in range(3):
        if step == 1:
            failing = Failing(model, fail)
            with pytest.raises(InterruptedError, match="its own"):
                ours.backward(model.loss(step))
            failing.remove()
            ours.optimizer.zero_grad()
        for run, of_run in ((ours, model), (theirs, other)):
            run.backward(of_run.loss(step))
            run.step()
        assert_same(ours, theirs, other)
    ours.close()


@pytest.mark.long("DTensors on two to four ranks: torch works out each operator's sharding anew for each mesh")
@pytest.mark.parametrize(
    ("way", "n_ranks"), [("wrap", 2), *(pytest.param(way, WORLD, marks=pytest.mark.slow) for way in WAYS)]
)
def test_an_error_in_backward_on_all_ranks_leaves_nothing_of_that_backward(way, n_ranks):
    """FSDP2 itself takes no further backward after one that failed; tensor parallelism does."""

    @on_ranks(n_ranks)
    def found(rank):
        meshes.WORLD = n_ranks
        return each([(way, lambda: after_an_error(TP, way))])

    no_errors(found)


def errors_of(act, n):
    """The errors of so many calls."""
    found = []
    for _ in range(n):
        try:
            act()
        except (CollectiveError, RuntimeError) as error:
            found.append((type(error).__name__, str(error)))
    return found


@pytest.mark.draws(1)
@pytest.mark.parametrize("way", ["plain", "wrap"])
def test_a_rank_that_is_lost_before_a_step_is_the_same_error_each_time(way):
    @on_ranks(WORLD, killed=[2])
    def found(rank):
        model = FSDP.make()
        ours = Ours(model, way, {"gradient_clipping": 1.0})
        ours.backward(model.loss(0))
        ours.step()
        ours.backward(model.loss(1))
        dist.barrier()
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        before = [p.to_local().clone() for p in model.parameters()]
        told = errors_of(ours.step, 3)
        same = all(torch.equal(a, p.to_local()) for a, p in zip(before, model.parameters(), strict=True))
        return told, same

    for rank in (0, 1, 3):
        told, same = found[rank]
        assert told == 3 * told[:1], told
        assert told[0][0] == "CollectiveError", told
        assert told[0][1].startswith(f"rank {rank}: gradient norm"), told
        assert same, "parameters changed"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["early", "wrap"])
def test_a_rank_that_is_lost_in_backward_is_torchs_error_there_and_ours_at_the_step(way):
    @on_ranks(WORLD, killed=[1])
    def found(rank):
        model = FSDP.make()
        ours = Ours(model, way, {"gradient_clipping": 1.0})
        ours.backward(model.loss(0))
        ours.step()
        if rank == 1:
            Failing(model, lambda: os.kill(os.getpid(), signal.SIGKILL))
        loss = model.loss(1)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=10))  # of ranks whose neighbours in torch's ring live
        return errors_of(lambda: ours.backward(loss), 1), errors_of(ours.step, 2)

    for rank in (0, 2, 3):
        [in_backward], at_step = found[rank]
        assert in_backward[0] == "RuntimeError", in_backward
        assert at_step == 2 * at_step[:1]
        assert [kind for kind, _ in at_step] == ["CollectiveError"] * 2, at_step
