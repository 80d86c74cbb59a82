"""One rank of a real process group: what the workers of tests/workers/ share."""

import hashlib
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from frontends.torch import gathered_parameters


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16))


def batch(seed, rank):
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(1000 * seed + rank))


def loss_of(model, seed, rank):
    return model(batch(seed, rank)).float().pow(2).mean()


def bits(model):
    digest = hashlib.sha256()
    for p in model.parameters():
        digest.update(p.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def main(scenarios, timeout=5, backend="gloo"):
    scenario, rank, world_size, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )
    result = scenarios[scenario](rank, world_size)
    (folder / f"{rank}.json").write_text(json.dumps(result))
    os._exit(0)  # a group that lost a rank would wait for it


def whole_bits(engine):
    with gathered_parameters(engine.module.parameters()):
        return bits(engine.module)
