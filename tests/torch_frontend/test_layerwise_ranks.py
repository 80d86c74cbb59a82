"""``engine.accumulate()`` on ranks: each sums its micro-batches, then the ranks are reduced once."""

import os
import re
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn

from frontends.torch import wrap
from frontends.torch.layerwise.sweeps import Sweeps
from tests.support.blocks import batches, loss_of, made
from tests.support.experts import mixture, rows
from tests.support.late_stores import PARAMETERS_ON_DISK
from tests.support.processes import on_ranks
from tests.support.torch_rank import bits, said_by, whole_bits

STAGE_3 = {"stage": 3, "param_persistence_threshold": 40, "reduce_bucket_size": 3000}
WAYS = {
    "stage 1": {"stage": 1},
    "stage 2, clipped": {"gradient_clipping": 0.1},
    "stage 3": {**STAGE_3, "gradient_clipping": 0.1},
    "stage 3, on the host, in backward": {**STAGE_3, "offload_param": "cpu", "update_in_backward": True},
    "stage 3, on disk": {**PARAMETERS_ON_DISK, "param_persistence_threshold": 40},
}


def data_of(step, rank, n=3):
    return batches(n, 10 * step + rank)


def backward_of_a_third(loss):
    (loss * torch.tensor(1 / 3)).backward()


@pytest.mark.draws(2)
@pytest.mark.parametrize("name", WAYS)
def test_the_bits_are_those_of_the_loop_with_no_sync(name):
    """And of DistributedDataParallel's ``no_sync`` with fused AdamW, where nothing is clipped."""
    fields = WAYS[name]

    @on_ranks(2)
    def found(rank):
        clipped = {key: value for key, value in fields.items() if key == "gradient_clipping"}
        loop = wrap(made(), lr=1e-2, stage=1, gradient_accumulation_steps=3, **clipped)
        engine = wrap(made(), lr=1e-2, gradient_accumulation_steps=3, layerwise=True, **fields)
        ddp = nn.parallel.DistributedDataParallel(made())
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2, fused=True)
        for step in range(5):
            data = data_of(step, rank)
            for last, batch in enumerate(data, 1):
                for module, backward in ((loop, loop.backward), (ddp, backward_of_a_third)):
                    if last < 3:
                        with module.no_sync():
                            backward(loss_of(module(batch), batch))
                    else:
                        backward(loss_of(module(batch), batch))
            loop.step(boundary=True)
            optimizer.step()
            optimizer.zero_grad()
            engine.accumulate(data, loss_of)
            assert engine.step().updated
        return [bits(loop.module), whole_bits(engine), engine.sent_bytes]

    assert len({each for of_rank in found for each in of_rank[:2]}) == 1, found


@pytest.mark.parametrize("fields", [{"stage": 2}, {**STAGE_3, "offload_param": "cpu"}], ids=["stage 2", "stage 3"])
def test_ranks_send_as_much_for_any_number_of_micro_batches(fields):
    @on_ranks(2)
    def found(rank):
        sent = []
        for n in (1, 2, 8):
            engine = wrap(made(), lr=1e-2, gradient_accumulation_steps=n, layerwise=True, **fields)
            for step in range(3):
                before = engine.sent_bytes
                engine.accumulate(data_of(step, rank, n), loss_of)
                engine.step()
                engine.flush()
            sent.append(engine.sent_bytes - before)
        return sent

    assert len({*found[0], *found[1]}) == 1, found


def test_ranks_that_run_other_experts():
    """As leaf modules, and as modules of their own: a block gathers all of its experts on all ranks."""

    @on_ranks(2)
    def found(rank):
        result = []
        for fields in ({"stage": 2}, {**STAGE_3, "leaf_modules": ("Experts",)}, STAGE_3):
            engine = wrap(mixture(), lr=1e-2, gradient_accumulation_steps=3, layerwise=True, **fields)
            for step in range(4):
                data = [rows(9 * step + 3 * i + rank) for i in range(3)]
                engine.accumulate(data, lambda output, _: output.float().pow(2).mean())
                engine.step()
            result.append(whole_bits(engine))
        return result

    assert len({*found[0], *found[1]}) == 1, found


def test_a_rank_that_is_lost_in_the_middle_is_an_error_on_the_others():
    @on_ranks(2, killed=[1])
    def _(rank):
        engine = wrap(made(), gradient_accumulation_steps=3, layerwise=True, **STAGE_3, offload_param="cpu")
        engine.accumulate(data_of(0, rank), loss_of)
        engine.step()
        if rank == 1:
            engine.module.layers[1].norm.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        said = said_by(lambda: engine.accumulate(data_of(1, rank), loss_of))
        assert re.match("CollectiveError: ", said), said
        assert engine.optimizer.sharding.live.numel == 0
        assert said_by(lambda: engine.accumulate(data_of(1, rank), loss_of)).startswith("CollectiveError: ")


def test_an_error_on_all_ranks_ends_it_on_all():
    """Each has the same error, as from the same code; the next step is as ever."""

    @on_ranks(2)
    def found(rank):
        engines = [
            wrap(made(), lr=1e-2, gradient_accumulation_steps=3, layerwise=True, **STAGE_3, offload_param="cpu")
            for _ in range(2)
        ]
        backward = Sweeps._backward_of

        def fails(sweeps, line, call):
            backward(sweeps, line, call)
            if call.number == 1:
                raise ValueError("mine")

        Sweeps._backward_of = fails
        for _ in range(2):
            assert said_by(lambda: engines[0].accumulate(data_of(0, rank), loss_of)) == "ValueError: mine"
        Sweeps._backward_of = backward
        dist.barrier()
        for engine in engines:
            engine.accumulate(data_of(0, rank), loss_of)
            engine.step()
        return [whole_bits(engine) for engine in engines]

    assert len({*found[0], *found[1]}) == 1, found
