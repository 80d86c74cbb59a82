"""A process group of this process alone, and what torch keeps of its meshes afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache


@contextmanager
def alone(backend: str = "gloo") -> Iterator[None]:
    """A process group of one rank.

    Torch keeps meshes, and with them their groups, in a cache of each thread. A child that another thread forks ends
    the cache of this one, and there waits for the groups' threads, which it has not; so the cache is cleared.
    """
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()
