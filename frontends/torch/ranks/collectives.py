"""``torch.distributed`` process groups as the core's ``Collectives``."""

import functools
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from offload_core.dtypes import BY_NUMPY
from offload_core.errors import CollectiveError, ConfigError
from offload_core.support.launchers import warn_if_launched

from ..tensors import TORCH_DTYPES

_PATIENCE = 1.0
"""Seconds to wait for the group's thread to release a buffer."""
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TorchRanks:
    """The ranks of a process group, exchanging host memory.

    Data moves as bytes, so every element type works. The ranks use a gloo group of their own, because the user's
    program may use ``group`` at the same time; making it is collective.
    """

    def __init__(self, group: Any) -> None:
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ConfigError(
                "process_group: this process is not one of its ranks; expected wrap() on its members only, or a group "
                "that this process belongs to"
            )
        self.world_size = dist.get_world_size(group)
        own = dist.new_group(
            dist.get_process_group_ranks(group),
            timeout=_timeout(group),
            backend="gloo",
            use_local_synchronization=True,
        )
        # Only torch's registry owns the group: a reference kept after destroy_process_group() can abort the process at
        # its exit.
        self._group = weakref.ref(own)
        self.sent_bytes = 0
        """Bytes of gradients and parameters that this rank sent to others."""

    def exchange(self, send: np.ndarray, received: np.ndarray, what: str) -> None:
        self.sent_bytes += send.nbytes * (self.world_size - 1) // self.world_size
        self._run(what, dist.all_to_all_single, received, send)

    def reduce_scatter(self, send: np.ndarray, received: np.ndarray, what: str) -> None:
        self.sent_bytes += send.nbytes * (self.world_size - 1) // self.world_size
        dtype = TORCH_DTYPES[BY_NUMPY[send.dtype]]

        def typed(received: torch.Tensor, send: torch.Tensor, group: Any) -> None:
            reduce_scatter(received.view(dtype), send.view(dtype), group=group)

        self._run(what, typed, received, send)

    def gather(self, send: np.ndarray, received: np.ndarray, what: str) -> None:
        self.sent_bytes += send.nbytes * (self.world_size - 1)

        def broadcasts(received: torch.Tensor, send: torch.Tensor, group: Any) -> None:
            # gloo's all-gather takes 2.5 times as long: it copies all data through a buffer of its own.
            parts = received.view(self.world_size, -1)
            parts[self.rank] = send
            sources = range(self.world_size)
            pending = [dist.broadcast(parts[r], group_src=r, group=group, async_op=True) for r in sources]
            for work in pending:
                work.wait()

        self._run(what, broadcasts, received, send)

    def sum_integers(self, array: np.ndarray, what: str) -> None:
        def sums(numbers: torch.Tensor, group: Any) -> None:
            dist.all_reduce(numbers.view(torch.int64), group=group)

        self._run(what, sums, array)

    def broadcast(self, array: np.ndarray, what: str, source: int = 0) -> None:
        self._run(what, functools.partial(dist.broadcast, group_src=source), array)

    def _run(self, what: str, collective: Callable[..., Any], *arrays: np.ndarray) -> None:
        """Call the collective with the bytes of these arrays, as tensors."""
        readers, tensors = [], []
        for array in arrays:
            # Made here: where the compiler evaluates frames, a caller keeps its arguments until the call returns.
            view = array.reshape(-1).view(np.uint8)
            readers.append(weakref.ref(view))
            tensors.append(torch.from_numpy(view))
            del view
        try:
            collective(*tensors, group=self._group())
        except RuntimeError as error:
            raise CollectiveError.of(self.rank, what, error) from error
        # The group's thread releases the tensors after the wait. If it were the last owner, it would need the
        # interpreter to free NumPy's memory, and would abort a process that is exiting by then.
        del tensors
        deadline = time.monotonic() + _PATIENCE
        while any(reader() is not None for reader in readers) and time.monotonic() < deadline:
            time.sleep(0)


def default_group(group: Any) -> Any:
    """The given group; for None all ranks if ``torch.distributed`` is initialised, else None: this process alone."""
    if group is not None:
        return group
    if dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    warn_if_launched("frontends.torch.init_process_group() before wrap()")
    return None


def _timeout(group: Any) -> timedelta | None:
    """The time that a group's ranks wait for each other; None if its backend does not tell."""
    group = group or dist.group.WORLD
    for device in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(device)).options._timeout
        except (AttributeError, RuntimeError):
            continue
    return None
