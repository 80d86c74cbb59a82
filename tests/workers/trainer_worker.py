"""One rank of Hugging Face's Trainer, run by test_trainer.py: SCENARIO RANK WORLD_SIZE FOLDER."""

import os
import sys

import torch.distributed as dist

from frontends.torch import OffloadedAdamW
from frontends.torch.integrations.transformers import OffloadCallback
from offload_core.errors import ConfigError
from tests.support.hugging_face import LR, TORCHS, trained
from tests.support.torch_rank import bits, main


def shards(rank, world_size):
    """Against fused AdamW, which like ours finds the gradients that DistributedDataParallel has averaged."""
    folder = sys.argv[4]
    optimizer = {"optimizer_cls_and_kwargs": (OffloadedAdamW, {"lr": LR, "process_group": dist.group.WORLD})}
    settings = {"per_device_train_batch_size": 1, "max_steps": 5, "save_steps": 2, "ddp_backend": "gloo"}
    saving = {**settings, "save_only_model": True}
    theirs = trained(f"{folder}/theirs", TORCHS, **settings, save_strategy="no")
    ours = trained(f"{folder}/ours", optimizer, callbacks=[OffloadCallback()], **saving)
    dist.barrier()
    resumed = trained(
        f"{folder}/ours", optimizer, callbacks=[OffloadCallback()], resume=f"{folder}/ours/checkpoint-2", **saving
    )
    try:
        trained(f"{folder}/refused", optimizer, callbacks=[OffloadCallback()], **settings)
        refused = ""
    except ConfigError as error:
        refused = str(error)
    held = sum(state["exp_avg"].numel() for state in resumed.optimizer.state.values())
    numel = sum(p.numel() for p in resumed.model.parameters())
    runs = {"ours": ours, "theirs": theirs, "resumed": resumed}
    return {name: bits(run.model) for name, run in runs.items()} | {"refused": refused, "share": held / numel}


if __name__ == "__main__":
    launched = {"RANK": sys.argv[2], "LOCAL_RANK": sys.argv[2], "WORLD_SIZE": sys.argv[3]}
    os.environ |= launched | {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "HF_HUB_OFFLINE": "1"}
    main(globals(), timeout=60)
