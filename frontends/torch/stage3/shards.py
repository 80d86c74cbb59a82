"""A rank's shards of one parameter, concatenated: in memory, or on disk.

To add a kind of shard, add a :class:`Shard`, a ``ShardSource`` in the core from which the parameter is gathered, and
the :class:`DeviceTier` that makes such shards for a value of ``offload_param``. Two other modules distinguish kinds of
shards: the plan (``plans/terms.py``), and loads of checkpoints, which fill shards in memory in place
(``weights/checkpoint.py``).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from offload_core.config.options import OffloadConfig
from offload_core.disk.shards import DiskShards, OnDisk, ShardsInMemory, ShardSource
from offload_core.dtypes import ElementType
from offload_core.engine import StateAccess
from offload_core.memory.host_memory import HostMemory
from offload_core.memory.plan import DEVICE, DISK, HOST, PARAMETER_SHARDS

from ..params.tensors import MOVED_TYPES, TORCH_DTYPES, memory
from ..ranks.device import as_torch
from .cut import Cut


class Shard(ABC):
    """A rank's shards of a parameter, concatenated.

    Attributes:
        values: the memory or disk space that the core reads start values from and publishes to.
    """

    values: torch.Tensor | OnDisk

    @property
    @abstractmethod
    def numel(self) -> int:
        """The number of elements of all shards."""

    @abstractmethod
    def read(self, start: int, numel: int) -> torch.Tensor:
        """Return ``numel`` elements from element ``start`` on: a view of memory, or a copy from disk."""

    @abstractmethod
    def write(self, values: torch.Tensor, at: int = 0) -> None:
        """Replace the elements from ``at`` on, which are the shards of one or more whole buckets. Shards that are
        master weights on disk already have the values, and are not written."""

    @abstractmethod
    def source(self, lent: Callable[[torch.Tensor], Any]) -> ShardSource:
        """Return the source from which the parameter is gathered.

        Args:
            lent: converts memory to the form that the gathering device takes.
        """

    @abstractmethod
    def on(self, device: torch.device) -> list[torch.Tensor]:
        """Return the shards' memory on ``device``; an empty list if they are elsewhere."""

    @abstractmethod
    def near(self, device: torch.device) -> "Shard":
        """Return these shards, copied to the memory of ``device`` unless they are on disk."""


class MemoryShard(Shard):
    """Shards in the memory of a device or of the host. This memory may be the upper halves of master weights."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values: torch.Tensor = values

    @property
    def numel(self) -> int:
        return self.values.numel()

    def read(self, start: int, numel: int) -> torch.Tensor:
        return self.values[start : start + numel]

    def write(self, values: torch.Tensor, at: int = 0) -> None:
        self.values[at : at + values.numel()].copy_(values)

    def source(self, lent: Callable[[torch.Tensor], Any]) -> ShardSource:
        return ShardsInMemory(lent(self.values))

    def on(self, device: torch.device) -> list[torch.Tensor]:
        return [self.values] if self.values.device == device else []

    def near(self, device: torch.device) -> Shard:
        return MemoryShard(self.values.to(device))


class DiskShard(Shard):
    """Shards in separate space on disk."""

    def __init__(self, values: OnDisk) -> None:
        self.values: OnDisk = values

    @property
    def numel(self) -> int:
        return self.values.numel

    def read(self, start: int, numel: int) -> torch.Tensor:
        out = np.empty(numel, self.values.dtype.numpy)
        self.values.read(start, out)
        return as_torch(out)

    def write(self, values: torch.Tensor, at: int = 0) -> None:
        self.values.write(memory(values), at)

    def source(self, lent: Callable[[torch.Tensor], Any]) -> ShardSource:
        return self.values

    def on(self, device: torch.device) -> list[torch.Tensor]:
        return []

    def near(self, device: torch.device) -> Shard:
        return self


class StatesShard(DiskShard):
    """Shards whose values are the master weights on disk."""

    def write(self, values: torch.Tensor, at: int = 0) -> None:
        pass


# --- tiers: the memory or disk of all shards of a model ----------------------------------------------------


class DeviceTier:
    """Shards in the memory of the device on which parameters are gathered.

    Attributes:
        device: the device whose memory has the shards. Shards on disk are in this memory before they are written.
        where: the name of the shards' memory or disk space in plans.
    """

    def __init__(self, device: torch.device, memory: HostMemory) -> None:
        self.device = device
        self.where = HOST if device.type == "cpu" else DEVICE
        self._memory = memory

    def given(self) -> Callable[[Cut, torch.Tensor], Shard]:
        """Return a function that makes temporary shards of a parameter, in its present element type."""
        return lambda cut, part: MemoryShard(part)

    def keep(self, cut: Cut, given: Shard) -> Shard:
        """Return the final shards of a parameter, in its final element type."""
        return MemoryShard(given.read(0, cut.shard_numel).to(self.device, TORCH_DTYPES[cut.spec.dtype]))

    def in_states(self, states: StateAccess, index: int, dtype: ElementType) -> Shard | None:
        """Return the shards of a trained parameter that its master weights contain; None: they contain none."""
        values = states.parameter_memory(index)
        return None if values is None else MemoryShard(as_torch(values))

    @property
    def disk_bytes(self) -> int:
        """The bytes that shards take on disk, without the shards that are master weights."""
        return 0

    def close(self) -> None:
        """Free the shards' disk space."""


class HostTier(DeviceTier):
    """Shards in pinned host memory."""

    def __init__(self, memory: HostMemory) -> None:
        super().__init__(torch.device("cpu"), memory)

    def keep(self, cut: Cut, given: Shard) -> Shard:
        host = self._memory.allocate(PARAMETER_SHARDS, cut.shard_numel, cut.spec.dtype.numpy, pinned=True)
        return MemoryShard(as_torch(host).copy_(given.read(0, cut.shard_numel)))


class DiskTier(HostTier):
    """Shards on disk. A trained parameter's shards are its master weights; a frozen parameter's are separate."""

    def __init__(self, folders: Sequence[str], memory: HostMemory) -> None:
        super().__init__(memory)
        self.where = DISK
        self._folders = folders
        self._disk = DiskShards(folders, memory)

    def given(self) -> Callable[[Cut, torch.Tensor], Shard]:
        disk = DiskShards(self._folders, self._memory)
        return lambda cut, part: on_disk(disk, cut, MemoryShard(part), MOVED_TYPES[part.dtype])

    def keep(self, cut: Cut, given: Shard) -> Shard:
        return on_disk(self._disk, cut, given, cut.spec.dtype)

    def in_states(self, states: StateAccess, index: int, dtype: ElementType) -> Shard | None:
        parts = states.parameter_parts(index)
        return None if parts is None else StatesShard(self._disk.with_states(parts, dtype))

    @property
    def disk_bytes(self) -> int:
        return self._disk.n_bytes

    def close(self) -> None:
        self._disk.close()


def on_disk(disk: DiskShards, cut: Cut, shard: Shard, dtype: ElementType) -> DiskShard:
    """Copy this rank's shards of a parameter to disk, bucket by bucket, in this element type."""
    values = ((b, memory(shard.read(b.shard_start, b.shard_numel).to(TORCH_DTYPES[dtype]))) for b in cut.buckets)
    return DiskShard(disk.keep(values, dtype))


def tier_for(config: OffloadConfig, device: torch.device, memory: HostMemory) -> DeviceTier:
    """Return the tier for the configuration's ``offload_param``."""
    if config.offload_param == "nvme":
        return DiskTier(config.nvme_path or (), memory)
    return DeviceTier(device, memory) if config.offload_param is None else HostTier(memory)
