"""One rank of a real process group with partitioned parameters: SCENARIO RANK WORLD_SIZE FOLDER, as rank_worker.py."""

import os
import signal

import torch
import torch.distributed as dist
from torch import nn

import frontends.torch.optimizer as optimizer_module
from frontends.torch import gathered_parameters, wrap
from frontends.torch.ranks.collectives import TorchRanks
from frontends.torch.ranks.device import memory_of
from frontends.torch.ranks.device_ranks import DeviceRanks
from frontends.torch.stage3 import partitioned as partitioned_module
from offload_core import CollectiveError
from tests.support.experts import Experts, mixture, rows
from tests.support.hugging_face import llama
from tests.support.partitioned_models import MODELS, External, external_loss, gpt, gpt_loss
from tests.support.torch_rank import bits, main, whole_bits

NARROW = {"max_live_parameters": 4000, "prefetch_bucket_size": 2500, "max_reuse_distance": 3000}
STAGE_3 = {"stage": 3, "param_persistence_threshold": 40, "reduce_bucket_size": 3000}


def train(engine, loss_of, rank, steps, first=0):
    for step in range(first, first + steps):
        engine.backward(loss_of(engine, 2 * step + rank))
        engine.step()


def against_ddp(rank, world_size):
    """The same run in stage 2, in stage 3 and by DistributedDataParallel with fused AdamW."""
    result = {}
    for name, (make, loss_of) in MODELS.items():
        ddp = nn.parallel.DistributedDataParallel(make())
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2, fused=True)
        for step in range(20):
            loss_of(ddp, 2 * step + rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        found = {"ddp": bits(ddp.module)}
        runs = {"stage 2": {"stage": 2}, "stage 3": {**STAGE_3, **NARROW}}
        for stage, fields in {**runs, **({"stage 3, whole": STAGE_3} if name == "gpt" else {})}.items():
            engine = wrap(make(), lr=1e-2, **fields)
            train(engine, loss_of, rank, 20)
            found[stage] = whole_bits(engine)
        result[name] = found
    return result


def on_devices(device, group, config, *, apart=False):
    """Ranks that exchange buckets between devices, here the CPU's own memory."""
    if apart:
        group = dist.new_group(dist.get_process_group_ranks(group))
    return DeviceRanks(memory_of(device), TorchRanks(group), group)


def ways(rank, world_size):
    """Checkpointing, accumulation, clipping, another element type; shards in host memory or between devices."""

    def run(**fields):
        model = gpt(activation_checkpointing=True)
        model.blocks[0].requires_grad_(False)
        if rank:
            for p in model.parameters():
                nn.init.normal_(p)  # rank 0's values are taken, of what is frozen too
        engine = wrap(model, lr=1e-2, param_dtype="bfloat16", gradient_clipping=0.1, gradient_accumulation_steps=2,
                      **fields)  # fmt: skip
        train(engine, gpt_loss, rank, 4)
        model.blocks[0].requires_grad_(True)
        train(engine, gpt_loss, rank, 2, first=4)
        return engine

    engine = run()
    result = {"stage 2": whole_bits(engine)}
    engine = run(**STAGE_3, **NARROW)
    parted = engine.optimizer.partitioned
    whole = sum(p.nbytes for p in engine.module.parameters() if p not in parted)
    n_bytes = sum(p.nbytes for p in engine.module.parameters() if p in parted)
    memory = {"bytes": engine.memory_report().device_bytes - whole, "of": n_bytes, "peak": parted.live.peak_numel}
    result["stage 3"] = whole_bits(engine)
    result["offloaded"] = whole_bits(run(**STAGE_3, **NARROW, offload_param="cpu"))
    optimizer_module.device_for = partitioned_module.device_for = on_devices
    result["between devices"] = whole_bits(run(**STAGE_3, **NARROW))
    engine = run(**STAGE_3, **NARROW, offload_param="cpu")
    result["between devices, offloaded"] = whole_bits(engine)
    engine.close()
    result["closed"] = bits(engine.module)
    return {"bits": result, "memory": memory}


def changes(rank, world_size):
    """One rank changes parameters for all, in the midst of training; then ranks run modules in another order."""
    result = {"other order": other_order(rank)}
    for name, fields in {"stage 2": {}, "stage 3": STAGE_3}.items():
        engine = wrap(External(), lr=1e-2, param_dtype="bfloat16", **fields)
        train(engine, external_loss, rank, 2)
        places = [engine.module.embedding.weight, engine.module.blocks[0].first.bias, engine.module.scale.weight]
        with gathered_parameters(places, modifier_rank=1), torch.no_grad():
            for p in places:
                p.mul_(1.5 if rank == 1 or not fields else 7.0)
        train(engine, external_loss, rank, 2, first=2)
        result[name] = whole_bits(engine)
    return result


def other_order(rank):
    """Ranks that run equal modules in another order: what the first evaluation and later calls say."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

        def forward(self, x, order):
            for i in order:
                x = self.parts[i](x)
            return x.sum()

    torch.manual_seed(0)
    engine = wrap(Both(), lr=1e-2, **STAGE_3)
    train = lambda: engine.backward(engine(torch.ones(2, 16), [0, 1]))  # noqa: E731
    train()
    engine.step()
    said = []
    for act in (lambda: engine(torch.ones(2, 16), [0, 1] if rank == 0 else [1, 0]), train):
        try:
            with torch.no_grad():
                act()
            said.append(None)
        except CollectiveError as error:
            said.append(str(error))
    return said


def experts(rank, world_size):
    """Ranks whose tokens go to other experts: whole blocks are gathered together."""
    results = {}
    for name, checkpoint in (("plain", None), ("blocks again", "block"), ("experts again", "expert")):
        runs = {"stage 2": {"stage": 2}, "leaves": {**STAGE_3, **NARROW, "leaf_modules": ["Experts"]}}
        for stage, fields in runs.items():
            engine = wrap(mixture(checkpoint), lr=1e-2, **fields)
            routed = []
            for step in range(6):
                engine.backward(engine(rows(2 * step + rank)).square().mean())
                engine.step()
                routed.append([block.routed for block in engine.module if isinstance(block, Experts)])
            results[f"{name}, {stage}"] = {"bits": whole_bits(engine), "routed": routed}
    said = None
    try:
        engine = wrap(mixture(), lr=1e-2, **STAGE_3)
        for step in range(6):
            engine.backward(engine(rows(2 * step + rank)).square().mean())
            engine.step()
    except CollectiveError as error:
        said = str(error)
    return {"runs": results, "said": said}


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


def lacking(rank, world_size):
    """One rank lacks the gradient of a layer, in every second step; in a leaf module, and in none."""
    result = {"said": None}
    for name, fields in {"stage 2": {}, "leaf": {"leaf_modules": ["Branches"]}, "none": {}}.items():
        engine = wrap(Branches(), lr=1e-2, **({} if name == "stage 2" else STAGE_3), **fields)
        try:
            for step in range(6):
                x = torch.randn(4, 16, generator=torch.Generator().manual_seed(2 * step + rank))
                engine.backward(engine(x, rank == 0 or step % 2 == 0))
                engine.step()
            result[name] = whole_bits(engine)
        except CollectiveError as error:
            result["said"] = str(error)
    return result


def generates(rank, world_size):
    """Each rank generates to another length, and trains on; then without waiting for the other."""
    engine = wrap(llama(), **STAGE_3)
    tokens = torch.tensor([[3 + rank, 5, 7]])
    lengths, said = [], None
    try:
        for synced in (True, False):
            made = engine.module.generate(tokens, max_new_tokens=4 + 5 * rank, do_sample=False, synced_gpus=synced)
            lengths.append(made.shape[1])
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
    except CollectiveError as error:
        said = str(error)
    return {"lengths": lengths, "said": said}


def quantised(rank, world_size):
    """Of each kind of base: whether adapters get the bits of stage 2, and the bytes of the base and its shard."""
    from tests.support import quantised as quantised_base  # its libraries take seconds to import

    result = {}
    for kind in quantised_base.KINDS:
        engines = [
            wrap(quantised_base.model(kind), lr=1e-2, **fields) for fields in ({"stage": 2}, {**STAGE_3, **NARROW})
        ]
        for engine in engines:
            train(engine, quantised_base.loss_of, rank, 4)
        record = engines[1].optimizer.partitioned.parameters.record_of(engines[1].module[0].base.weight)
        with gathered_parameters(engines[1].module.parameters()):
            pairs = zip(*(engine.module.parameters() for engine in engines), strict=True)
            alike = all(torch.equal(a.detach(), b.detach()) for a, b in pairs if a.requires_grad)
        result[kind] = [alike, record.spec.numel * record.spec.dtype.itemsize, record.shard.nbytes]
    return result


def killed(rank, world_size):
    """A rank that goes in the midst of a forward."""
    engine = wrap(gpt(), **STAGE_3, **NARROW)
    train(engine, gpt_loss, rank, 2)
    if rank == 1:
        engine.module.blocks[1].register_forward_pre_hook(lambda *args: os.kill(os.getpid(), signal.SIGKILL))
    try:
        gpt_loss(engine, 4)
        said = None
    except CollectiveError as error:
        said = str(error)
    return {"said": said, "live": engine.optimizer.partitioned.live.numel}


if __name__ == "__main__":
    main(globals())
