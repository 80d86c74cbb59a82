"""``torch.distributed`` process groups as the core's ``Collectives``."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from offload_core.dtypes import BY_NUMPY
from offload_core.errors import ConfigError
from offload_core.support.checks import shown
from offload_core.support.launchers import refuse_if_launched

from ..params.tensors import TORCH_DTYPES
from .private_group import PrivateGroup

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TorchRanks:
    """The ranks of a process group, exchanging host memory.

    Data moves as bytes, so every element type works. The ranks use a separate gloo group (``PrivateGroup``); making it
    is collective. Once the program has destroyed ``group``, only parameters are still gathered: an update that is
    running ends, and no other begins.
    """

    def __init__(self, group: Any) -> None:
        self._own = PrivateGroup(group)
        self.rank = self._own.rank
        self.world_size = self._own.world_size
        self.close = self._own.close
        self.compare_headers = self._own.compare_headers
        self.refuse_if_gone = self._own.refuse_if_gone
        self.where = self._own.where
        self.sent_bytes = 0
        """Bytes of gradients and parameters that this rank sent to others."""

    def exchange(self, send: np.ndarray, received: np.ndarray, what: str) -> None:
        self.sent_bytes += send.nbytes * (self.world_size - 1) // self.world_size

        def start(gloo: Any, received: torch.Tensor, send: torch.Tensor) -> Iterable[Any]:
            return [gloo.alltoall_base(received, send, [], [])]

        self._begin(what, start, received, send)

    def reduce_scatter(self, send: np.ndarray, received: np.ndarray, what: str) -> None:
        self.sent_bytes += send.nbytes * (self.world_size - 1) // self.world_size
        dtype = TORCH_DTYPES[BY_NUMPY[send.dtype]]

        def start(gloo: Any, received: torch.Tensor, send: torch.Tensor) -> Iterable[Any]:
            return [gloo._reduce_scatter_base(received.view(dtype), send.view(dtype))]

        self._begin(what, start, received, send)

    def gather(self, send: np.ndarray, received: np.ndarray, what: str) -> None:
        self.sent_bytes += send.nbytes * (self.world_size - 1)

        def start(gloo: Any, received: torch.Tensor, send: torch.Tensor) -> Iterable[Any]:
            # gloo's all-gather takes 2.5 times as long: it copies all data through another buffer.
            parts = received.view(self.world_size, -1)
            parts[self.rank] = send
            return [gloo.broadcast(parts[rank], rank) for rank in range(self.world_size)]

        self._own.run(what, start, received, send)

    def sum_integers(self, array: np.ndarray, what: str) -> None:
        self._begin(what, lambda gloo, data: [gloo.allreduce(data.view(torch.int64))], array)

    def broadcast(self, array: np.ndarray, what: str, source: int = 0) -> None:
        self._begin(what, lambda gloo, data: [gloo.broadcast(data, source)], array)

    def _begin(self, what: str, start: Callable[..., Iterable[Any]], *arrays: np.ndarray) -> None:
        self._own.refuse_if_gone(what)
        self._own.run(what, start, *arrays)


ALONE = "alone"
"""The value of ``process_group`` with which one of several processes of a launcher trains by itself."""
_JOIN = f"""these two lines at the beginning:
    from frontends.torch import init_process_group
    device = init_process_group()
or, if each process is to train by itself, process_group={ALONE!r}"""


def default_group(group: Any) -> Any:
    """Return the given group; for None all ranks if ``torch.distributed`` is initialised. None: this process alone."""
    if group is None and dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return group


def checked_group(group: Any) -> Any:
    """Return the process group of an argument; None: this process alone.

    Raises:
        ConfigError: it is none; or a launcher started several processes, and this one has joined no others.
    """
    if isinstance(group, str) and group != ALONE:
        raise ConfigError(
            f"process_group: got {shown(group)}, expected a group of torch.distributed, None or {ALONE!r}"
        )
    if group is None and not (dist.is_available() and dist.is_initialized()):
        refuse_if_launched(_JOIN)
    return None if isinstance(group, str) else group
