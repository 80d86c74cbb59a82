"""One rank of a real process group that builds models in shards: SCENARIO RANK WORLD_SIZE FOLDER, as rank_worker.py."""

import gc
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from bench.train.gpt_torch import GPT
from bench.train.presets import PRESETS
from frontends.torch import gathered_parameters, init, wrap
from offload_core import StateError
from offload_core.commands.model_shapes import GPTConfig
from tests.support.partitioned_models import gpt_loss
from tests.support.torch_rank import main, whole_bits

SMALL = GPTConfig(vocabulary=64, width=32, heads=2, layers=2, positions=16)
STAGE_3 = {"stage": 3, "param_persistence_threshold": 40, "reduce_bucket_size": 1000}


def status(field):
    """Bytes that the kernel reports of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


def memory(shape):
    """Resident bytes that building a model takes at most, and that it leaves."""
    with init(param_persistence_threshold=1):  # what any first use brings along
        GPT(SMALL)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS:")
    with init():
        model = GPT(shape)
    sizes = [4 * p.numel() for p in model.parameters()]
    peak, left = status("VmHWM:") - before, status("VmRSS:") - before
    return {"whole": sum(sizes), "largest": max(sizes), "peak": peak, "left": left}


def training(rank, how):
    """Bits after a few steps; what each rank would build differs, and rank 0's counts."""
    torch.manual_seed(rank)
    if how == "whole":
        model = GPT(SMALL)
    elif how == "init":
        with init(**STAGE_3):
            model = GPT(SMALL)
    else:
        with torch.device("meta"):
            model = GPT(SMALL)
        with init(model, **STAGE_3, init_fn=lambda module: None):
            torch.manual_seed(rank)
            model.load_state_dict(GPT(SMALL).state_dict())
    model.blocks[0].requires_grad_(False)
    engine = wrap(model, lr=1e-2, param_dtype="bfloat16", **STAGE_3)
    for step in range(3):
        engine.backward(gpt_loss(engine, 2 * step + rank))
        engine.step()
    return whole_bits(engine)


def by_hand(rank):
    """What rank 1 changes alone, before there is an engine, in the context and after it."""
    with init(**STAGE_3):
        model = nn.Linear(20, 20)
        with gathered_parameters(model.parameters(), modifier_rank=1), torch.no_grad():
            model.weight.fill_(2 + rank)
            model.bias.fill_(4 + rank)
    with gathered_parameters(model.weight, modifier_rank=1), torch.no_grad():
        model.weight[0] = 6 + rank
    with gathered_parameters(model.parameters()):
        return [model.weight[0].unique().tolist(), model.weight[1:].unique().tolist(), model.bias.unique().tolist()]


def differing(rank):
    try:
        with init(**STAGE_3):
            model = nn.Linear(20, 20)
            nn.Linear(20, 30)
            if rank == 1:
                model.weight.sum()
    except StateError as error:
        return str(error)


def building(rank, world_size):
    shape = replace(PRESETS["gpt2-1.5b"].gpt, layers=6, width=800, vocabulary=1024, positions=64)
    result = {"memory": memory(shape)}
    result["bits"] = {how: training(rank, how) for how in ("whole", "init", "meta")}
    result["by hand"] = by_hand(rank)
    result["differing"] = differing(rank)
    return result


if __name__ == "__main__":
    main(globals())
