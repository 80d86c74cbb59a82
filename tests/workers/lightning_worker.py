"""One rank of Lightning's Trainer, run by test_lightning.py: SCENARIO RANK WORLD_SIZE FOLDER."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from frontends.torch.integrations.lightning import OffloadStrategy
from offload_core.errors import StateError
from tests.support.lightning_models import BATCHES, STAGES, Model, engines, fitted, ours, torchs, weights_of
from tests.support.torch_rank import bits, main


def trained(rank, world_size):
    """Each stage against DistributedDataParallel and fused AdamW; stage 3 built in shards, and resumed in stage 2."""
    folder = Path(sys.argv[4])
    settings = {"devices": world_size, "batch_size": 1, "use_distributed_sampler": True}
    theirs = fitted(folder / "theirs", Model(torchs), "ddp", **settings)
    result = {"theirs": [bits(theirs), theirs.seen]}
    for stage, fields in STAGES.items():
        model = Model(engines, late=stage == 3)
        fitted(folder / f"{stage}", model, OffloadStrategy(**fields), save_every=BATCHES, **settings)
        weights = list(weights_of(model).values())
        result[f"{stage}"] = [bits(SimpleNamespace(parameters=lambda found=weights: found)), model.seen]
        held = sum(state["exp_avg"].numel() for state in model.fitting.optimizers[0].state.values())
        result[f"share {stage}"] = held / sum(p.numel() for p in model.parameters())
        path = folder / f"{stage}.ckpt"
        model.fitting.save_checkpoint(path, weights_only=True)
        loaded = Model()
        loaded.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
        result[f"file {stage}"] = bits(loaded)
    path = folder / "3" / f"step={BATCHES}.ckpt"
    resumed = fitted(folder / "resumed", Model(engines), OffloadStrategy(stage=2), resume=path, **settings)
    result["resumed"] = [bits(resumed), resumed.seen]
    return result | uneven(folder, settings) | deferred(folder, settings) | partitioned(folder, settings, rank)


class Uneven(pl.LightningModule):
    """Each micro-step one rank uses other parameters than the other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))

    def loss(self, batch_idx, rank):
        used = self.layers if rank == 0 else self.layers[batch_idx % 2 : batch_idx % 2 + 1]
        return sum(layer(torch.full((1, 16), batch_idx + rank + 1.0)).square().mean() for layer in used)

    def training_step(self, batch, batch_idx):
        return self.loss(batch_idx, self.global_rank)

    def configure_optimizers(self):
        return engines(self)


def uneven(folder, settings):
    """The last update of the epoch has one micro-step. By hand: each micro-step's mean over the ranks, summed."""
    settings = {**settings, "accumulate_grad_batches": 2, "max_epochs": 1}
    model = fitted(folder / "uneven", Uneven(), OffloadStrategy(), **settings)
    plain = Uneven()
    optimizer = torchs(plain)
    for batch_idx in range(BATCHES):
        losses = [plain.loss(batch_idx, rank) / 2 for rank in range(2)]
        grads = [torch.autograd.grad(loss, [*plain.parameters()], materialize_grads=True) for loss in losses]
        for p, first, second in zip(plain.parameters(), *grads, strict=True):
            mean = (first + second) / 2
            p.grad = mean if p.grad is None else p.grad + mean
        if batch_idx % 2 or batch_idx == BATCHES - 1:
            optimizer.step()
            optimizer.zero_grad()
    return {"uneven": [bits(model), bits(plain)]}


def deferred(folder, settings):
    """In stage 1 gradients are summed on each rank before they are reduced, as DistributedDataParallel's are."""
    settings = {**settings, "accumulate_grad_batches": 2}
    theirs = fitted(folder / "theirs", Model(torchs), "ddp", **settings)
    ours = fitted(folder / "1", Model(engines), OffloadStrategy(stage=1), **settings)
    return {"deferred": [[bits(model), model.seen] for model in (theirs, ours)]}


def partitioned(folder, settings, rank):
    def new(module):
        return ours(module, process_group=dist.group.WORLD)

    model = fitted(folder / "alone", Model(new), "ddp", **settings)
    said = None
    try:  # rank 0 alone writes Lightning's file
        if rank == 0:
            torch.save(model.fitting.strategy.optimizer_state(model.fitting.optimizers[0]), folder / "states.pt")
    except StateError as error:
        said = str(error)
    return {"alone": bits(model), "said": said}


if __name__ == "__main__":
    os.environ |= {"LOCAL_RANK": sys.argv[2], "RANK": sys.argv[2], "WORLD_SIZE": sys.argv[3], "NODE_RANK": "0",
                   "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # fmt: skip
    main(globals(), timeout=60)
