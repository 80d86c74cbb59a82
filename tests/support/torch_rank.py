"""One rank of a real process group: how it starts, and the model that many tests train."""

import hashlib
import os
import pickle
import random
import re
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from frontends.torch import gathered_parameters
from offload_core import OffloadError

SECONDS = 120
"""The timeout of ranks that wait for each other. No rank of a busy machine comes so late."""


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


def local_bits(model, optimizer):
    """Of this process's parts of parameters and moments; they may be DTensors."""
    digest = hashlib.sha256()
    for p in model.parameters():
        state = optimizer.state[p]
        for value in (p, state["exp_avg"], state["exp_avg_sq"]):
            local = value.to_local() if hasattr(value, "to_local") else value
            digest.update(local.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def whole_bits(engine):
    with gathered_parameters(engine.module.parameters()):
        return bits(engine.module)


def train(engine, rank, seeds):
    """The reports of steps with these batches."""
    reports = []
    for seed in seeds:
        engine.backward(loss_of(engine, seed, rank))
        reports.append(engine.step())
    return reports


def said_by(act):
    """The error that this raises, with its type; None without one."""
    try:
        act()
    except (OffloadError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def give_up(what, *, after=0, all_do=False):
    """Wait only a moment for other ranks at an exchange with such a name, for they do not come there.

    ``after``: how many more have such a name and are as ever. ``all_do``: the others give up, too, and each waits until
    it was told where.
    """
    from frontends.torch.ranks import private_group  # not in the code of earlier commits, which tests/fixtures runs

    agree, before = private_group.PrivateGroup._compare_headers, iter(range(after))

    def hastily(group, header):
        if re.search(what, header.what) is None or next(before, None) is not None:
            return agree(group, header)
        group._line._seconds = 0.2
        agree(group, header)
        print(f"{header.what}: the others came, and would not have if this machine had been busy")
        sys.stdout.flush()
        os._exit(1)

    private_group.PrivateGroup._compare_headers = hastily
    if all_do:
        private_group._PATIENCE = SECONDS


def run(
    folder, rank, world_size, seed, port, finished, listener=None, group=True, backend="gloo", store="memory"
) -> NoReturn:
    """Run the function that is pickled in this folder as this rank, and write what it returns.

    Args:
        group: False leaves torch.distributed alone.
        backend: of the group.
        store: that keeps the states, as ``pytest --store`` says.
        others: as fork_server.Job tells them.
    """
    torch.set_num_threads(1)
    if group:  # libraries look where torchrun tells them
        place = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": world_size,
                 "LOCAL_WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
        os.environ.update({name: str(value) for name, value in place.items()})
        if backend != "gloo":
            from tests.support.simulated import collectives  # not in the code of earlier commits

            collectives.register()
        open_socket = {} if listener is None else {"master_listen_fd": listener}
        timeout = timedelta(seconds=SECONDS)
        places = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, timeout, wait_for_workers=False, **open_socket)
        dist.init_process_group(backend, store=places, rank=rank, world_size=world_size, timeout=timeout)
    if store != "memory":
        from tests.support import late_stores

        late_stores.take_the_place_of_memory(store)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    result = pickle.loads(Path(folder, "body").read_bytes())(rank)
    Path(folder, f"{rank}.tmp").write_bytes(pickle.dumps(result))
    os.rename(Path(folder, f"{rank}.tmp"), Path(folder, f"{rank}"))
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(finished, bytes([rank]))
    while True:
        signal.pause()
