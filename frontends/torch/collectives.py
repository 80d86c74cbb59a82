"""``torch.distributed`` process groups as the core's ``Collectives``."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from offload_core.errors import CollectiveError


class TorchRanks:
    """The ranks of a process group, exchanging host memory.

    Data moves as bytes, so every element type does. A group whose backend moves device memory only (nccl) is given a
    gloo group of the same ranks; making it is collective.
    """

    def __init__(self, group: Any) -> None:
        if "gloo" not in dist.get_backend(group):
            group = dist.new_group(dist.get_process_group_ranks(group), backend="gloo")
        self._group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.sent_bytes = 0
        """Bytes of gradients and parameters that this rank sent to others."""

    def exchange(self, send: np.ndarray, received: np.ndarray, what: str) -> None:
        self.sent_bytes += send.nbytes * (self.world_size - 1) // self.world_size
        self._run(what, lambda: dist.all_to_all_single(_bytes(received), _bytes(send), group=self._group))

    def gather(self, send: np.ndarray, received: np.ndarray, what: str) -> None:
        self.sent_bytes += send.nbytes * (self.world_size - 1)
        self._run(what, lambda: dist.all_gather_into_tensor(_bytes(received), _bytes(send), group=self._group))

    def sum_integers(self, array: np.ndarray, what: str) -> None:
        self._run(what, lambda: dist.all_reduce(torch.from_numpy(array), group=self._group))

    def broadcast(self, array: np.ndarray, what: str) -> None:
        first = dist.get_global_rank(self._group, 0)
        self._run(what, lambda: dist.broadcast(_bytes(array), first, group=self._group))

    def _run(self, what: str, collective: Callable[[], Any]) -> None:
        try:
            collective()
        except RuntimeError as error:
            raise CollectiveError(
                f"rank {self.rank}: {what} failed ({error}); a rank was lost, or did not come in the group's time: "
                "end this run and resume from the last checkpoint"
            ) from error


def _bytes(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.reshape(-1).view(np.uint8))
