"""Ranks that exchange buckets between their devices (nccl, xccl), as the core's ``Device``."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from offload_core.config.options import OffloadConfig
from offload_core.device.events import Event, traced
from offload_core.device.exchange_sizes import OnDevice
from offload_core.device.host_ranks import HostRanks
from offload_core.device.protocols import Copy, HostArray, Matrices
from offload_core.device.trace import MATRICES, TO_DEVICE, TO_HOST
from offload_core.dtypes import ElementType
from offload_core.errors import CollectiveError
from offload_core.layout.partition import Bucket
from offload_core.memory.host_memory import Lease
from offload_core.memory.numa import bind_threads_near
from offload_core.ranks.consistency import check_start

from ..params.tensors import TORCH_DTYPES
from .collectives import TorchRanks, all_gather, reduce_scatter
from .device import TorchDevice, as_torch, fill, memory_of, spread
from .device_kernels import compute_in
from .pinning import drivers_of
from .private_group import timeout_of


class _Compared:
    """The end of an exchange. Waiting for it compares the headers of all ranks. The start does not compare them,
    because it runs in another thread than the host's exchanges."""

    def __init__(self, event: Event, compare: Callable[[], None]) -> None:
        self._event = event
        self._compare: Callable[[], None] | None = compare

    def wait(self) -> None:  # waits
        if self._compare is not None:
            self._compare()
            self._compare = None
        self._event.wait()

    def order(self) -> None:  # waits
        self._event.order()

    def done(self) -> bool:
        return self._event.done()


class DeviceRanks(HostRanks):
    """One rank per process; only its own shards are copied to the host and back.

    The bucket's slices are exchanged, and summed in rank order and fp32, on the device.

    Args:
        group: a process group whose backend moves the device's memory.
        publishing: another group for parameters, if a thread sends them while another one sends gradients, or the
            program exchanges something of its own. The exchanges of a group must be asked for in the same order on all
            ranks. None: ``group``.
    """

    def __init__(
        self, memory: TorchDevice, collectives: TorchRanks, group: Any, *, native: bool = False, publishing: Any = None
    ) -> None:
        super().__init__(memory, collectives, native=native, sizes=OnDevice(collectives.world_size, native))
        self._memory = memory
        self._ranks = collectives
        # Only torch's registry owns the group: a reference kept after destroy_process_group() can abort the exit.
        self._group = weakref.ref(group or dist.group.WORLD)
        self._publishing = self._group if publishing is None else weakref.ref(publishing)
        self._sent_bytes = 0

    @property
    def sent_bytes(self) -> int:
        """As :attr:`Device.sent_bytes`."""
        return self._sent_bytes

    def reduce(
        self, bucket: Bucket, comm_dtype: ElementType, gradients: Mapping[int, Any], out: Any, staging: Lease
    ) -> Event:
        copies = [Copy(gradients[p.param], p.start, p.numel, p.offset) for p in bucket.pieces if p.param in gradients]
        what = f"bucket {bucket.index}: exchange of gradients"
        start = partial(self._reduce, bucket, comm_dtype, copies, out, what)
        arrived = traced(self.trace, TO_HOST, bucket.index, out.nbytes, start)
        return _Compared(arrived, partial(self._ranks.compare_headers, what, bucket.padded_numel * comm_dtype.itemsize))

    def _reduce(self, bucket: Bucket, comm_dtype: ElementType, copies: Sequence[Copy], out: Any, what: str) -> Event:
        with self._memory.to_host_lane() as lane:
            send = self._empty(bucket.padded_numel, comm_dtype)
            fill(send, copies)
            if self.native:
                shard = self._empty(bucket.shard_numel, comm_dtype)
                self._run(what, reduce_scatter, shard, send)
            else:
                received = torch.empty_like(send)
                self._run(what, dist.all_to_all_single, received, send)
                shard = self._mean(received.view(self.world_size, -1))
            _tensor(out).copy_(shard, non_blocking=True)
            self._sent_bytes += send.nbytes * (self.world_size - 1) // self.world_size
            return lane.event(copies)

    def _mean(self, parts: torch.Tensor) -> torch.Tensor:
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        # By a tensor: on CUDA, torch turns division by a number into multiplication by its reciprocal.
        return total.div_(torch.full((1,), float(self.world_size), device=total.device))

    def publish(
        self,
        bucket: Bucket,
        shards: Any,
        tensors: Sequence[Any],
        present: set[int],
        staging: Lease,
        after: Event,
    ) -> Event:
        if bucket.partitioned:
            return super().publish(bucket, shards, tensors, present, staging, after)
        copies = [Copy(tensors[p.param], p.start, p.numel, p.offset) for p in bucket.pieces if p.param in present]
        start = partial(self._publish, bucket, shards, copies, after)
        return traced(self.trace, TO_DEVICE, bucket.index, shards.nbytes, start)

    def _publish(self, bucket: Bucket, shards: Any, copies: Sequence[Copy], after: Event) -> Event:
        with self._memory.to_device_lane(after) as lane:
            mine = _tensor(shards).to(self._memory.device, non_blocking=True)
            gathered = self._empty(bucket.padded_numel, bucket.dtype)
            what = f"bucket {bucket.index}: gathering of parameters"
            self._ranks.compare_headers(what, gathered.nbytes)
            self._run(what, all_gather, gathered, mine, group=self._publishing)
            spread(gathered, copies)
            self._sent_bytes += mine.nbytes * (self.world_size - 1)
            return lane.event((copies, mine))

    def transform(self, bucket: Bucket, matrices: Matrices, shards: Any, staging: Lease) -> Event:
        start = partial(self._transform, bucket, matrices, shards)
        return traced(self.trace, MATRICES, bucket.index, shards.nbytes, start)

    def _transform(self, bucket: Bucket, matrices: Matrices, shards: Any) -> Event:
        what = f"bucket {bucket.index}: exchange of matrices"
        rank = self.ranks[0]

        def compute(mine: torch.Tensor) -> None:
            whole = mine.new_empty(bucket.padded_numel)
            self._ranks.compare_headers(what, whole.nbytes)
            self._run(what, all_gather, whole, mine, group=self._publishing)
            self._sent_bytes += mine.nbytes * (self.world_size - 1)
            compute_in(matrices.of_ranks(self.ranks), whole)
            for matrix, row in zip(matrices.in_(whole), matrices.rows, strict=True):
                self._run(what, partial(dist.broadcast, group_src=row.owner), matrix, group=self._publishing)
                if row.owner == rank:
                    self._sent_bytes += matrix.nbytes * (self.world_size - 1)
            mine.copy_(whole[rank * bucket.shard_numel :][: bucket.shard_numel])

        return self._memory.through(_tensor(shards), compute)

    def gather(self, bucket: Bucket, shard: Any, whole: Any, after: Event, what: str) -> Event:
        mine = as_torch(shard.view()) if isinstance(shard, HostArray) else shard
        start = partial(self._gather, mine, whole[bucket.start : bucket.start + bucket.padded_numel], after, what)
        return traced(self.trace, TO_DEVICE, bucket.index, whole.nbytes, start)

    def _gather(self, mine: torch.Tensor, whole: torch.Tensor, after: Event, what: str) -> Event:
        with self._memory.to_device_lane(after) as lane:
            mine = mine.to(self._memory.device, non_blocking=True)
            self._ranks.compare_headers(what, whole.nbytes)
            self._run(what, all_gather, whole, mine)
            self._sent_bytes += mine.nbytes * (self.world_size - 1)
            return lane.event(whole)

    def _empty(self, numel: int, dtype: ElementType) -> torch.Tensor:
        return torch.empty(numel, dtype=TORCH_DTYPES[dtype], device=self._memory.device)

    def _run(self, what: str, collective: Callable[..., Any], *tensors: torch.Tensor, group: Any = None) -> None:
        self._ranks.refuse_if_gone(what)
        try:
            collective(*tensors, group=(group or self._group)())
        except Exception as error:
            raise CollectiveError.of(self.ranks[0], what, error) from error


def _tensor(array: Any) -> torch.Tensor:
    """A tensor with an array's memory: the host's, or the device's."""
    return as_torch(array) if isinstance(array, np.ndarray) else array


class PlacedParts(HostRanks):
    """Each process updates its own parts of placed parameters and sends them nowhere; ``processes`` decide together."""

    def __init__(self, memory: TorchDevice, processes: TorchRanks) -> None:
        super().__init__(memory, processes=processes)
        self.close = processes.close  # type: ignore[method-assign]


def device_for(device: torch.device, group: Any, config: OffloadConfig, *, separate: bool = False) -> HostRanks:
    """The core's ``Device`` for parameters on ``device`` and the ranks of a process group (None: one rank). The pool's
    threads work near it from now on.

    Args:
        separate: True gives it a separate group, whose transfers neither wait for the others nor follow their order.

    Raises:
        ConfigError, ParameterError: on all ranks, if they run different versions or have different settings.
    """
    memory, native = memory_of(device), config.reduction == "native"
    drivers = drivers_of(device)
    bind_threads_near(config, [device.index] if drivers else (), drivers)
    if group is None or dist.get_world_size(group) == 1:
        return HostRanks(memory)
    collectives = TorchRanks(group)
    check_start(collectives, replace(config, op_order=config.op_order or "torch"))
    if device.type != "cpu" and _moves(group, device):
        another = partial(
            dist.new_group,
            dist.get_process_group_ranks(group),
            timeout_of(group or dist.group.WORLD),
            dist.get_backend(group),
            use_local_synchronization=True,
        )
        if separate:
            group = another()
        publishing = another() if config.schedule != "serial" and not separate else None
        return DeviceRanks(memory, collectives, group, native=native, publishing=publishing)
    return HostRanks(memory, collectives, native=native)


def device_of_placed(device: torch.device, group: Any, config: OffloadConfig) -> HostRanks:
    """The core's ``Device`` for placed parameters: each process updates its own, and the group decides each update.

    Args:
        group: the processes that have parameters; None: this one alone.

    Raises as :func:`device_for` does.
    """
    memory, drivers = memory_of(device), drivers_of(device)
    bind_threads_near(config, [device.index] if drivers else (), drivers)
    if group is None:
        return HostRanks(memory)
    processes = TorchRanks(group)
    check_start(processes, replace(config, op_order=config.op_order or "torch"))
    return PlacedParts(memory, processes)


def _moves(group: Any, device: torch.device) -> bool:
    """True if the group has the device's own backend (nccl, xccl, …). Gloo would pass through the host."""
    try:
        own = dist.get_default_backend_for_device(device)
        return own != "gloo" and own in (group or dist.group.WORLD)._get_backend(device).name().lower()  # type: ignore[union-attr]
    except (RuntimeError, ValueError):
        return False
