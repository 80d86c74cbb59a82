"""One rank of a real process group with partitioned parameters: SCENARIO RANK WORLD_SIZE FOLDER, as rank_worker.py."""

import torch
from partitioned_models import MODELS
from rank_worker import bits, main
from torch import nn

from frontends.torch import gathered_parameters, wrap

STEPS = 20
WINDOWS = {
    "default": {},
    "narrow": {"max_live_parameters": 4000, "prefetch_bucket_size": 2500, "max_reuse_distance": 3000},
    "none": {"max_live_parameters": 0, "prefetch_bucket_size": 0, "max_reuse_distance": 0},
}


def whole_bits(engine):
    with gathered_parameters(engine.module.parameters()):
        return bits(engine.module)


def against_ddp(rank, world_size):
    """The same run in stage 2, in stage 3 and by DistributedDataParallel with fused AdamW."""
    result = {}
    for name, (make, loss_of) in MODELS.items():
        ddp = nn.parallel.DistributedDataParallel(make())
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2, fused=True)
        for step in range(STEPS):
            loss_of(ddp, 2 * step + rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        result[f"{name} ddp"] = bits(ddp.module)
        for stage, fields in [(2, {}), *((3, fields) for fields in WINDOWS.values())]:
            engine = wrap(
                make(), lr=1e-2, stage=stage, param_persistence_threshold=40, reduce_bucket_size=1000, **fields
            )
            for step in range(STEPS):
                engine.backward(loss_of(engine, 2 * step + rank))
                engine.step()
            result[f"{name} {stage} {fields}"] = whole_bits(engine)
            if stage == 3:
                assert engine.optimizer.partitioned.live.numel == 0
    return result


if __name__ == "__main__":
    main(globals())
