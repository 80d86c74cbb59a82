"""One rank of a real process group that exports: SCENARIO RANK WORLD_SIZE FOLDER, as rank_worker.py."""

import os
import sys
import tarfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from frontends.torch import gathered_parameters, load_deepspeed, wrap
from offload_core import CheckpointError
from tests.support.archives import unpack
from tests.support.deepspeed_checkpoints import model as ds_model
from tests.support.partitioned_models import gpt, gpt_loss
from tests.support.torch_rank import main

STAGE_3 = {"stage": 3, "param_persistence_threshold": 40, "reduce_bucket_size": 3000}
FOLDER = Path(sys.argv[4])
DEEPSPEED = Path(__file__).parents[1] / "fixtures" / "deepspeed"


def same(got, expected):
    return got.keys() == expected.keys() and all(
        got[n].dtype == t.dtype and torch.equal(got[n], t) for n, t in expected.items()
    )


def train(model, optimizer, rank, steps):
    for step in range(steps):
        loss = gpt_loss(model, 2 * step + rank)
        if optimizer is None:
            model.backward(loss)
            model.step()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def exported(engine, name, rank, **options):
    folder = FOLDER / name
    engine.export_safetensors(folder, **options)
    dist.barrier()
    return load_file(folder / "model.safetensors")


def written(rank, world_size):
    """Weights and states of each stage against DistributedDataParallel with fused AdamW."""
    ddp = nn.parallel.DistributedDataParallel(gpt())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2, fused=True)
    train(ddp, optimizer, rank, 3)
    expected, states = dict(ddp.module.named_parameters()), optimizer.state_dict()["state"]
    result = {}
    for name, fields in {"1": {"stage": 1}, "2": {"reduce_bucket_size": 1000}, "3": STAGE_3}.items():
        engine = wrap(gpt(), lr=1e-2, **fields)
        train(engine, None, rank, 3)
        for dtype in (None, "float32"):
            result[f"{name} {dtype}"] = same(exported(engine, f"{name} {dtype}", rank, dtype=dtype), expected)
        saved = engine.optimizer.torch_state_dict()
        result[f"{name} rank 0"] = (saved is None) == bool(rank)
        saved = engine.optimizer.torch_state_dict(rank0_only=False)
        result[f"{name} states"] = saved["state"].keys() == states.keys() and all(
            same(entry, states[i]) for i, entry in saved["state"].items()
        )
    return result


def masters(rank, world_size):
    """Of bfloat16 parameters: each rank's part, end to end where there is one bucket."""
    engine = wrap(gpt(), lr=1e-2, param_dtype="bfloat16")
    train(engine, None, rank, 2)
    found = exported(engine, "masters", rank, dtype="float32")
    result = {}
    for name, param in engine.module.named_parameters():
        parts = [None] * world_size
        dist.all_gather_object(parts, engine.optimizer.state[param].get("master", torch.empty(0)).clone())
        result[name] = torch.equal(torch.cat(parts).view(param.shape), found[name])
    parted = wrap(gpt(), lr=1e-2, param_dtype="bfloat16", **STAGE_3, offload_param="cpu")
    train(parted, None, rank, 2)
    result["stage 3"] = same(exported(parted, "parted", rank, dtype="float32"), found)
    with gathered_parameters(parted.module.parameters()):
        whole = {name: param.detach() for name, param in parted.module.named_parameters()}
    result["stage 3, device"] = same(exported(parted, "device", rank), whole)
    # Between backward and step, when gradients are on their way, ranks meet in one order.
    collectives = parted.optimizer.pipeline.device.collectives
    exchange = collectives.exchange
    collectives.exchange = lambda *args: (time.sleep(0.02 * rank), exchange(*args))[1]
    parted.backward(gpt_loss(parted, rank))
    moments = parted.optimizer.torch_state_dict(rank0_only=False)["state"]
    result["states under way"] = all(int(entry["step"]) == 2 for entry in moments.values())
    result["under way"] = same(exported(parted, "under way", rank, dtype="float32"), found)
    result["updated"] = parted.step().updated
    return result


def deepspeed(rank, world_size):
    """Weights of a DeepSpeed checkpoint, written again as they were."""
    name, result = "stage3-bf16-2", {}
    if rank == 0:
        with tarfile.open(DEEPSPEED / f"{name}.tar.xz") as archive:
            unpack(archive, FOLDER / "deepspeed")
    dist.barrier()
    expected = {n: tensor.float() for n, tensor in load_file(DEEPSPEED / f"{name}.safetensors").items()}
    del expected["head.weight"]  # tied
    expected["offset"] = expected["offset"].bfloat16().float()  # a buffer, of the engine's element type
    for stage in (2, 3):
        types = {"param_dtype": "bfloat16", "buffer_dtype": "bfloat16"}
        engine = wrap(ds_model(), **types, stage=stage, param_persistence_threshold=10)
        load_deepspeed(engine, FOLDER / "deepspeed")
        result[f"{stage} fp32"] = same(exported(engine, f"{stage} fp32", rank, dtype="float32"), expected)
        rounded = {name: tensor.bfloat16() for name, tensor in expected.items()}
        result[f"{stage} bf16"] = same(exported(engine, f"{stage} bf16", rank), rounded)
        engine.backward(engine(torch.arange(7)).float().pow(2).mean())
        result[f"{stage} step"] = engine.step().updated
        (FOLDER / "none").mkdir(exist_ok=True)
        try:
            load_deepspeed(engine, FOLDER / ("deepspeed" if rank else "none"))
        except CheckpointError as error:
            result[f"{stage} refused"] = ("failed in process 0" if rank else "latest: no such file") in str(error)
    return result


def refused(rank, world_size):
    """Rank 0 cannot write: an error on both, and training goes on."""
    engine = wrap(gpt(), lr=1e-2)
    (FOLDER / "file").touch()
    said = None
    try:
        engine.export_safetensors(FOLDER / "file")
    except CheckpointError as error:
        said = str(error)
    train(engine, None, rank, 1)
    return {"said": said, "left": sorted(os.listdir(FOLDER))}


if __name__ == "__main__":
    main({scenario.__name__: scenario for scenario in (written, masters, deepspeed, refused)})
