"""One rank of Hugging Face's Accelerate, run by test_accelerate.py: SCENARIO RANK WORLD_SIZE FOLDER."""

import copy
import io
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator

from frontends.torch import OffloadedAdamW
from frontends.torch.integrations.accelerate import save_in_shards
from offload_core.errors import StateError
from tests.support.torch_rank import bits, main, make

FOLDER = Path(sys.argv[4]) / "state"


class Run:
    """A model with a frozen part, and an optimizer over the ranks, prepared."""

    def __init__(self, seed, *, shards=True):
        self.accelerator = Accelerator(cpu=True)
        model = make(seed).to(torch.bfloat16)
        model[0].requires_grad_(False)
        optimizer = OffloadedAdamW(model.parameters(), lr=1e-2, process_group=dist.group.WORLD)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        if shards:
            save_in_shards(self.accelerator, self.model, self.optimizer)

    def train(self, seeds):
        for seed in seeds:
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(2 * seed + dist.get_rank()))
            self.accelerator.backward(self.model(x.bfloat16()).float().pow(2).mean())
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self


def shards(rank, world_size):
    """A run goes on as if it had not been interrupted, also with the master weights that bfloat16 rounds."""
    straight = Run(0).train(range(3))
    straight.accelerator.save_state(str(FOLDER))
    straight.train(range(3, 5))
    resumed = Run(1)
    resumed.accelerator.load_state(str(FOLDER))
    resumed.train(range(3, 5))
    step = resumed.optimizer.optimizer.updates
    return {"straight": bits(straight.model), "resumed": bits(resumed.model), "step": step}


def plain(rank, world_size):
    """Accelerate's own file would hold the states of rank 0 alone, which no rank could load."""
    run = Run(0, shards=False).train(range(1))
    said = None
    try:
        run.accelerator.save_state(str(FOLDER))
    except StateError as error:
        said = str(error)
    file = io.BytesIO()
    torch.save(copy.deepcopy(run.optimizer.state_dict()), file)
    file.seek(0)
    run.optimizer.load_state_dict(torch.load(file))
    return {"said": said, "copied": True}


if __name__ == "__main__":
    os.environ |= {"LOCAL_RANK": sys.argv[2], "RANK": sys.argv[2], "WORLD_SIZE": sys.argv[3],
                   "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # fmt: skip
    main(globals(), timeout=60)
