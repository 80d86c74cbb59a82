"""``deepspeed.comm``: ``torch.distributed``, and ``init_distributed``."""

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from offload_core.errors import StateError

from ..ranks.launch import init_process_group


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the other ranks, unless this process is in a group already: see ``frontends.torch.init_process_group``.

    A process that was started alone is a group of one rank. Launchers are always looked for, and nothing is printed.

    Raises:
        StateError: ``dist_init_required`` is False, and there is no group.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        remedy = "torch.distributed.init_process_group() before, or dist_init_required=None"
        raise StateError(f"dist_init_required=False, and this process is in no group; expected {remedy}")
    if init_method is not None or rank >= 0:
        dist.init_process_group(dist_backend, init_method, timeout, world_size, rank)
        return
    os.environ.setdefault("MASTER_PORT", str(distributed_port))
    init_process_group(backend=dist_backend, timeout=timeout)


def get_local_rank() -> int:
    """Return this rank's number among those of its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def __getattr__(name: str) -> Any:
    return getattr(dist, name)
