"""One rank of Hugging Face's Trainer, run by test_trainer.py: SCENARIO RANK WORLD_SIZE FOLDER."""

import os
import sys

import torch.distributed as dist

from frontends.torch.integrations.transformers import OffloadCallback
from offload_core.errors import ConfigError
from tests.support.hugging_face import ARGUMENTS, LR, TORCHS, trained, trainer_of
from tests.support.torch_rank import bits, main

RANKS = {"per_device_train_batch_size": 1, "ddp_backend": "gloo"}


def shards(rank, world_size):
    """Against fused AdamW, which like ours finds the gradients that DistributedDataParallel has averaged."""
    folder = sys.argv[4]
    settings = {"learning_rate": LR, "max_steps": 5, "save_steps": 2, **RANKS}
    saving = {**settings, "save_only_model": True}
    theirs = trained(f"{folder}/theirs", TORCHS, **settings, save_strategy="no")
    ours = trained(f"{folder}/ours", ARGUMENTS, callbacks=[OffloadCallback()], **saving)
    dist.barrier()
    resumed = trained(
        f"{folder}/ours", ARGUMENTS, callbacks=[OffloadCallback()], resume=f"{folder}/ours/checkpoint-2", **saving
    )
    try:
        trained(f"{folder}/refused", ARGUMENTS, callbacks=[OffloadCallback()], **settings)
        refused = ""
    except ConfigError as error:
        refused = str(error)
    unpartitioned = trainer_of(f"{folder}/whole", callbacks=[OffloadCallback()], **saving)
    try:  # each rank has all states, and would write the same files at the first save
        unpartitioned.train()
        whole = ""
    except ConfigError as error:
        whole = str(error)
    said = {"refused": refused, "whole": whole, "steps": unpartitioned.state.global_step}
    held = sum(state["exp_avg"].numel() for state in resumed.optimizer.state.values())
    numel = sum(p.numel() for p in resumed.model.parameters())
    runs = {"ours": ours, "theirs": theirs, "resumed": resumed}
    return {name: bits(run.model) for name, run in runs.items()} | {"share": held / numel} | said


if __name__ == "__main__":
    launched = {"RANK": sys.argv[2], "LOCAL_RANK": sys.argv[2], "WORLD_SIZE": sys.argv[3]}
    os.environ |= launched | {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "HF_HUB_OFFLINE": "1"}
    main(globals(), timeout=60)
