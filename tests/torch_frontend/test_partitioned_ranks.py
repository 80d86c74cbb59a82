"""Stage 3 over real processes: the bits of stage 2 and of DistributedDataParallel, from shards."""

import os
import re
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn

import frontends.torch.training.components as parts_module
from frontends.torch import gathered_parameters, wrap
from frontends.torch.ranks.collectives import TorchRanks
from frontends.torch.ranks.device import memory_of
from frontends.torch.ranks.device_ranks import DeviceRanks, device_for
from frontends.torch.stage3 import partitioned as partitioned_module
from tests.support.experts import Experts, mixture, rows
from tests.support.late_stores import STATES_ON_DISK
from tests.support.partitioned_models import MODELS, OF_TRANSFORMERS, External, external_loss, gpt, gpt_loss, ids
from tests.support.processes import on_ranks
from tests.support.torch_rank import bits, give_up, said_by, whole_bits

NARROW = {"max_live_parameters": 4000, "prefetch_bucket_size": 2500, "max_reuse_distance": 3000}
STAGE_3 = {"stage": 3, "param_persistence_threshold": 40, "reduce_bucket_size": 3000}
ON_DISK = {"offload_param": "nvme", **STATES_ON_DISK}


def train(engine, loss_of, rank, steps):
    for step in steps:
        engine.backward(loss_of(engine, 2 * step + rank))
        engine.step()


@pytest.mark.draws(1)
@pytest.mark.parametrize("name", ["gpt", "external", OF_TRANSFORMERS])
def test_three_models_train_as_in_stage_2_and_as_under_ddp_with_fused_adamw(name, drawn):
    """A GPT with tied embeddings, the three kinds of external parameters, and a Llama of Hugging Face's."""
    early = {**STAGE_3, **NARROW, "update_in_backward": True}
    others = [STAGE_3] if name == "gpt" else []
    settings = drawn([{"stage": 2}, {**STAGE_3, **NARROW}, early, {**STAGE_3, **NARROW, **ON_DISK}, *others], 1)

    @on_ranks(2)
    def found(rank):
        make, loss_of = MODELS[name]
        ddp = nn.parallel.DistributedDataParallel(make())
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2, fused=True)
        for step in range(8):
            loss_of(ddp, 2 * step + rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        result = [bits(ddp.module)]
        for fields in settings:
            engine = wrap(make(), lr=1e-2, **fields)
            train(engine, loss_of, rank, range(8))
            result.append(whole_bits(engine))
        return result

    assert len({*found[0], *found[1]}) == 1, found


def between_devices(device, group, config, *, separate=False):
    """Ranks that exchange buckets between devices, here the CPU's own memory."""
    if separate:
        group = dist.new_group(dist.get_process_group_ranks(group))
    return DeviceRanks(memory_of(device), TorchRanks(group), group)


IN_SHARDS = {**STAGE_3, **NARROW}
EARLY = {**IN_SHARDS, "update_in_backward": True}
HELD = [
    *((0.1, between, fields) for between in (False, True)
      for fields in (IN_SHARDS, {**IN_SHARDS, "offload_param": "cpu"}, {**IN_SHARDS, **ON_DISK})),
    *((None, between, fields) for between in (False, True) for fields in (EARLY, {**EARLY, "offload_param": "cpu"})),
]  # fmt: skip
"""A bound on the norm, whether ranks exchange buckets between devices, and fields."""


@pytest.mark.long("several trainings on two ranks or more")
def test_every_way_to_hold_and_gather_shards_gives_the_same_bits(drawn):
    """Checkpointing, accumulation, clipping, another element type; shards in host memory or between devices."""
    cases = drawn(HELD, 1)

    @on_ranks(2)
    def found(rank):
        def trained(clipping, **fields):
            model = gpt(activation_checkpointing=True)
            model.blocks[0].requires_grad_(False)
            if rank:
                for p in model.parameters():
                    nn.init.normal_(p)  # rank 0's values are taken, of what is frozen too
            engine = wrap(model, lr=1e-2, param_dtype="bfloat16", gradient_clipping=clipping,
                          gradient_accumulation_steps=2, **fields)  # fmt: skip
            train(engine, gpt_loss, rank, range(4))
            model.blocks[0].requires_grad_(True)
            train(engine, gpt_loss, rank, range(4, 6))
            return engine

        result = {clipping: [whole_bits(trained(clipping))] for clipping in {clipping for clipping, _, _ in cases}}
        through_the_host = device_for
        for clipping, between, fields in cases:
            parts_module.device_for = partitioned_module.device_for = between_devices if between else through_the_host
            engine = trained(clipping, **fields)
            if fields == IN_SHARDS and not between:
                parted = engine.optimizer.sharding
                whole = sum(p.nbytes for p in engine.module.parameters() if p not in parted)
                n_bytes = sum(p.nbytes for p in engine.module.parameters() if p in parted)
                # Nothing but this rank's half.
                assert n_bytes / 2 <= engine.memory_report().device_bytes - whole <= n_bytes / 2 * 1.05
                # The root's embedding, and the two modules that are whole where a checkpointed one is computed again.
                assert 0 < parted.live.peak_numel <= 64 * 32 + 2 * (32 * 128 + 128) < n_bytes / 2
            result[clipping].append(whole_bits(engine))
            engine.close()
            result[clipping].append(bits(engine.module))
        return result

    for clipping, of_first in found[0].items():
        assert len({*of_first, *found[1][clipping]}) == 1, found


@pytest.mark.long("several trainings on two ranks or more")
def test_a_step_sends_the_bytes_of_the_plan():
    """Once the order of uses is known; where matrices are spread over ranks, it is their mean."""
    one_by_one = {"max_live_parameters": 0, "prefetch_bucket_size": 0}
    cases = [{}, {**STAGE_3, **one_by_one, "offload_param": "cpu"}, {**STAGE_3, "optimizer": "muon"}]
    n, steps = 2, 2

    @on_ranks(2)
    def found(rank):
        result = []
        for fields in cases:
            engine = wrap(gpt(), lr=1e-2, param_dtype="bfloat16", gradient_accumulation_steps=n, **fields)
            for step in range(steps):
                before = engine.sent_bytes
                train(engine, gpt_loss, rank, range(step * n, (step + 1) * n))
            core = engine.optimizer.core
            whole, _ = core._planner.traffic(core._pipeline.buckets.params)
            result.append((whole.sent, engine.sent_bytes - before))
        return result

    for (planned, first), (same, second) in zip(*found, strict=True):
        assert planned == same == (first + second) / 2 > 0


@pytest.mark.parametrize("fields", [{}, {**STAGE_3, "offload_param": "cpu"}])
def test_accumulate_sends_the_bytes_of_the_plan_but_for_the_last_block(fields):
    """The last block stays whole from forward to backward, so it is gathered once."""

    @on_ranks(2)
    def found(rank):
        engine = wrap(gpt(), param_dtype="bfloat16", gradient_accumulation_steps=4, layerwise=True, **fields)
        for step in range(2):
            before = engine.sent_bytes
            batches = [ids(17, 8 * step + 2 * i + rank) for i in range(4)]
            engine.accumulate([(x[:, :-1], x[:, 1:]) for x in batches], loss=lambda output, _: output)
            engine.step()
        core, block = engine.optimizer.core, engine.module.blocks[-1]
        whole, _ = core._planner.traffic(core._pipeline.buckets.params)
        last = sum(p.nbytes for p in block.parameters() if p in engine.optimizer.sharding)
        return whole.sent, engine.sent_bytes - before, last

    for planned, sent, last in found:
        assert sent == planned - last / 2 > 0  # this rank's half
        assert (last > 0) == bool(fields)


def test_one_rank_changes_parameters_for_all_and_masters_follow():
    @on_ranks(2)
    def found(rank):
        result = []
        for fields in ({}, STAGE_3, {**STAGE_3, **ON_DISK}):
            engine = wrap(External(), lr=1e-2, param_dtype="bfloat16", **fields)
            train(engine, external_loss, rank, range(2))
            places = [engine.module.embedding.weight, engine.module.blocks[0].first.bias, engine.module.scale.weight]
            with gathered_parameters(places, modifier_rank=1), torch.no_grad():
                for p in places:
                    p.mul_(1.5 if rank == 1 or not fields else 7.0)
            train(engine, external_loss, rank, range(2, 4))
            result.append(whole_bits(engine))
        return result

    assert len({*found[0], *found[1]}) == 1, found


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x, order):
        for i in order:
            x = self.parts[i](x)
        return x.sum()


def test_ranks_that_run_other_modules_of_equal_size_get_one_error_instead_of_mixed_layers():
    """The first evaluation and later calls say it."""

    @on_ranks(2)
    def _(rank):
        engine = wrap(Both(), lr=1e-2, **STAGE_3)
        engine.backward(engine(torch.ones(2, 16), [0, 1]))
        engine.step()
        for order in ([0, 1] if rank == 0 else [1, 0], [0, 1]):
            with torch.no_grad():
                said = said_by(lambda order=order: engine(torch.ones(2, 16), order))
            assert said == (
                "CollectiveError: ranks went different ways: rank 0 at parameter 'parts.0.weight': gathering of its "
                "shards (1,024 bytes); rank 1 at parameter 'parts.1.weight': gathering of its shards (1,024 bytes); "
                "expected the same on every rank: equally many backwards and steps, in stage 3 the same modules in the "
                "same order: end this run and resume from the last checkpoint"
            )


def routed_steps(engine, rank):
    """Train, and return the experts that each block has used."""
    for step in range(6):
        engine.backward(engine(rows(2 * step + rank)).square().mean())
        engine.step()
        yield [block.routed for block in engine.module if isinstance(block, Experts)]


@pytest.mark.long("several trainings of mixtures of experts")
@pytest.mark.draws(1)
@pytest.mark.parametrize("again", [None, "block", "expert"])
def test_ranks_run_other_experts_of_a_leaf_module(again, drawn):
    """Also with a block or an expert that backward recomputes."""
    parted = {**STAGE_3, **NARROW, "leaf_modules": ["Experts"]}
    others = drawn([parted, {**parted, "update_in_backward": True}, {**parted, **ON_DISK}], 1)

    @on_ranks(2)
    def found(rank):
        result = []
        for fields in ({"stage": 2}, *others):
            engine = wrap(mixture(again), lr=1e-2, **fields)
            routed = [*routed_steps(engine, rank)]
            result.append(whole_bits(engine))
        return result, routed

    assert len({*found[0][0], *found[1][0]}) == 1, found
    assert found[0][1] != found[1][1], "the ranks' tokens went to the same experts"


def test_ranks_that_run_other_experts_of_no_leaf_module_are_told_of_each_other():
    @on_ranks(2)
    def _(rank):
        engine = wrap(mixture(), lr=1e-2, **STAGE_3)
        assert "ranks went different ways" in said_by(lambda: [*routed_steps(engine, rank)])


class Branches(nn.Module):
    """Its loss may leave out a layer that has run."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        self.side = nn.Linear(16, 16)

    def forward(self, x, both):
        x = self.trunk(x)
        y = self.side(x).square().mean()
        return x.square().mean() + y if both else x.square().mean()


def test_a_gradient_that_one_rank_lacks_is_no_matter_in_a_leaf_module_and_an_error_that_names_it_elsewhere():
    """It comes when the group's time is over: each rank waits in another exchange."""

    @on_ranks(2)
    def found(rank):
        def steps(engine, steps):
            for step in steps:
                x = torch.randn(4, 16, generator=torch.Generator().manual_seed(2 * step + rank))
                engine.backward(engine(x, rank == 0 or step % 2 == 0))
                engine.step()

        result = []
        parted = {**STAGE_3, "leaf_modules": ["Branches"]}
        for fields in ({}, parted, {**parted, "update_in_backward": True}):
            engine = wrap(Branches(), lr=1e-2, **fields)
            steps(engine, range(6))
            result.append(whole_bits(engine))
        engine = wrap(Branches(), lr=1e-2, **STAGE_3)
        steps(engine, range(2))
        if rank:
            give_up("'side.weight': gathering", after=1, all_do=True)
        else:
            give_up("exchange of gradients", all_do=True)
        said = said_by(lambda: steps(engine, [2]))
        assert "exchange of gradients" in said
        assert "'side.weight': gathering" in said
        assert "(in stage 3: ran other modules or lacked a gradient; leaf_modules names modules" in said
        return result

    assert len({*found[0], *found[1]}) == 1, found


@pytest.mark.integration
def test_ranks_generate_to_other_lengths_with_synced_gpus_and_are_told_of_each_other_without():
    """Without, rank 1 makes another token while rank 0 trains on."""
    from tests.support.hugging_face import llama

    @on_ranks(2)
    def _(rank):
        engine = wrap(llama(), **STAGE_3)
        tokens = torch.tensor([[3 + rank, 5, 7]])

        def generate_and_train(synced):
            made = engine.module.generate(tokens, max_new_tokens=4 + 5 * rank, do_sample=False, synced_gpus=synced)
            assert made.shape[1] == (12 if rank else 7)
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()

        generate_and_train(True)
        if rank:
            give_up("'model.embed_tokens.weight': gathering", after=5, all_do=True)
        else:
            give_up("exchange of gradients", all_do=True)
        said = said_by(lambda: generate_and_train(False))
        assert "parameter 'model.embed_tokens.weight': gathering of its shards" in said
        assert f"rank {rank}:" in said
        assert f"rank {1 - rank} failed in" in said


def test_a_rank_that_is_lost_in_forward_is_an_error_that_names_what_was_gathered():
    @on_ranks(2, killed=[1])
    def _(rank):
        engine = wrap(gpt(), **STAGE_3, **NARROW)
        train(engine, gpt_loss, rank, range(2))
        if rank == 1:
            engine.module.blocks[1].register_forward_pre_hook(lambda *args: os.kill(os.getpid(), signal.SIGKILL))
        said = said_by(lambda: gpt_loss(engine, 4))
        assert re.match("CollectiveError: .*parameter 'blocks.*gathering of its shards failed", said)
        assert engine.optimizer.sharding.live.numel == 0
