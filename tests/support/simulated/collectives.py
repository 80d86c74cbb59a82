"""A process group of simulated devices, as nccl is one of GPUs: what it exchanges waits in a stream of its own.

Beneath is gloo, between pinned buffers: the stream copies to the host, exchanges, and copies to the device.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.support.simulated import NAME, call, load

BACKEND = "late"


class LateGroup(dist.ProcessGroup):
    """Tensors of the host have a gloo of their own, as beside nccl: streams come to their exchanges at any time."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store = store
        made = (dist.PrefixStore(f"gloo {which}/", store) for which in ("of the device", "of the host"))
        self._gloo, self._host = (dist.ProcessGroupGloo(each, rank, size, timeout=timeout) for each in made)
        self._stream: torch.Stream | None = None
        self._failure: BaseException | None = None

    def name(self) -> str:
        return BACKEND

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        """As torch knows it: groups that are written in Python are not told."""
        return dist.distributed_c10d._world.pg_names[self]

    def get_group_store(self) -> Any:
        return self._store

    def _get_backend(self, device: torch.device) -> Any:
        return self._host if device.type == "cpu" else self

    def alltoall_base(self, received: Any, sent: Any, *sizes: Any) -> Any:
        return self._exchange(received, sent, lambda gloo, to, of: gloo.alltoall_base(to, of, [], []))

    def all_gather_single(self, received: Any, sent: Any, *options: Any) -> Any:
        return self._exchange(received, sent, dist.ProcessGroupGloo._allgather_base)

    _allgather_base = all_gather_single  # its name before torch 2.13

    def reduce_scatter_single(self, received: Any, sent: Any, *options: Any) -> Any:
        return self._exchange(received, sent, dist.ProcessGroupGloo._reduce_scatter_base)

    _reduce_scatter_base = reduce_scatter_single

    def broadcast(self, tensors: Any, options: Any) -> Any:
        [tensor] = tensors
        source = dist.BroadcastOptions()  # the given one is gone when the stream comes to it
        source.rootRank = options.rootRank

        def start(gloo: Any, to: torch.Tensor, of: torch.Tensor) -> Any:
            to.copy_(of)
            return gloo.broadcast([to], source)

        return self._exchange(tensor, tensor, start)

    def allreduce(self, tensors: Any, options: Any) -> Any:
        [tensor] = tensors
        how = dist.AllreduceOptions()
        how.reduceOp = options.reduceOp

        def start(gloo: Any, to: torch.Tensor, of: torch.Tensor) -> Any:
            to.copy_(of)
            return gloo.allreduce([to], how)

        return self._exchange(tensor, tensor, start)

    def allgather(self, received: Any, sent: Any, options: Any) -> Any:
        """Gather tensors of the host: libraries gather objects so."""
        return self._host.allgather(received, sent)

    def barrier(self, opts: Any = None) -> Any:
        return self._host.barrier()

    def _exchange(self, received: torch.Tensor, sent: torch.Tensor, start: Callable[..., Any]) -> Any:
        if received.device.type == "cpu":
            return start(self._host, received, sent)
        if self._failure is not None:
            raise RuntimeError("an exchange has failed") from self._failure
        # No group shares a stream with another one: they would wait for each other, as ranks may use them in any order.
        self._stream = stream = self._stream or torch.Stream(received.device, priority=-1)
        stream.wait_event(torch.accelerator.current_stream(received.device).record_event())
        to, of = (torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in (received, sent))

        def exchange() -> None:
            try:
                start(self._gloo, to, of).wait()
            except BaseException as error:
                self._failure = error
                raise

        with stream:
            of.copy_(sent, non_blocking=True)
            call(stream, exchange)
            received.copy_(to, non_blocking=True)
            return _Exchange(received.device, stream.record_event())


class _Exchange(dist.Work):
    def __init__(self, device: torch.device, ended: torch.Event) -> None:
        super().__init__()
        self._device = device
        self._ended = ended

    def wait(self, timeout: timedelta | None = None) -> bool:
        torch.accelerator.current_stream(self._device).wait_event(self._ended)
        return True

    def is_completed(self) -> bool:
        return self._ended.query()


def register() -> None:
    """Make it the backend of groups of simulated devices."""
    load()
    dist.Backend.register_backend(BACKEND, LateGroup, devices=["cpu", NAME])
