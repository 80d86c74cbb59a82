"""``engine.accumulate()`` on ranks: each sums its micro-batches, then the ranks are reduced once."""

import os
import re
import signal
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from frontends.torch import wrap
from frontends.torch.layerwise.sweeps import Sweeps
from tests.support.blocks import batches, by_no_sync, loss_of, made
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


@pytest.mark.draws(1)
@pytest.mark.long("several trainings on two ranks")
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
            by_no_sync(loop, data)
            for batch in data:
                with ddp.no_sync() if batch is not data[-1] else nullcontext():
                    (loss_of(ddp(batch), batch) * torch.tensor(1 / 3)).backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.accumulate(data, loss_of)
            assert engine.step().updated
        return [bits(loop.module), whole_bits(engine), engine.sent_bytes]

    assert len({each for of_rank in found for each in of_rank[:2]}) == 1, found


@pytest.mark.draws(1)
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


@pytest.mark.long("three trainings on two ranks")
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


@pytest.mark.draws(1)
@pytest.mark.parametrize("narrow", [False, True])
def test_fsdp2_gathers_a_block_twice_and_reduces_it_once(narrow):
    """With the bits of its own loop with ``no_sync``; an error in the middle leaves it as it was."""

    @on_ranks(2)
    def found(rank):
        def model():
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            made_of_blocks, options = made(skip=False), {"mp_policy": policy} if narrow else {}
            made_of_blocks.table.requires_grad_(False)  # FSDP2 makes a tensor for each block that it goes into
            for block in made_of_blocks.layers:
                fully_shard(block, **options)
            return fully_shard(made_of_blocks, **options)

        unshard, reduced, counts = FSDPParamGroup.unshard, param_group.foreach_reduce, Counter()

        def gathers(group, *args, **options):
            counts["gathered", group._module_fqn] += not group.is_unsharded and group._all_gather_result is None
            return unshard(group, *args, **options)

        def reduces(params, *args, **options):
            counts["reduced", params[0]._param_fqn.rpartition(".")[0].removesuffix(".norm")] += 1
            return reduced(params, *args, **options)

        FSDPParamGroup.unshard, param_group.foreach_reduce = gathers, reduces
        loop, engine = (wrap(model(), lr=1e-2, gradient_accumulation_steps=3, layerwise=each) for each in (False, True))
        for step in range(4):
            losses = by_no_sync(loop, data_of(step, rank))
            if step == 2:
                hook = engine.module.layers[0].up.register_forward_pre_hook(fails_after(4))
                assert said_by(lambda: engine.accumulate(data_of(0, rank), loss_of)) == "ValueError: mine"
                hook.remove()
                assert "no gradient arrived" in said_by(engine.step)
            counts.clear()
            others = engine.accumulate(data_of(step, rank), loss_of)
            assert losses == [loss.item() for loss in others]
            engine.step()
        same = all(map(torch.equal, *([p.full_tensor() for p in e.module.parameters()] for e in (loop, engine))))
        return same, dict(counts)

    for same, counts in found:
        assert same
        gathered = {name: count for (what, name), count in counts.items() if what == "gathered"}
        assert gathered == {"": 1, "layers.0": 2, "layers.1": 2, "layers.2": 1}
        assert {count for (what, _), count in counts.items() if what == "reduced"} == {1}


def fails_after(count):
    calls = []

    def hook(*_):
        calls.append(1)
        if len(calls) > count:
            raise ValueError("mine")

    return hook
