"""The bytes that a wrap will need, computed before anything is allocated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..errors import DeviceMemoryError, DiskSpaceError, HostMemoryError, OffloadError
from ..layout.partition import ParamSpec
from .host_memory import format_bytes

HOST, DEVICE = "host", "device"
"""The two places of memory that every plan has. A store of states may have a place of its own."""
DISK = "disk"
"""The place of states with ``offload_optimizer="nvme"``."""
PARAMETERS, SHARDS = "parameters", "shards of parameters"
GATHERED = "gathered parameters"
GRADIENTS = "gradients"
BLOCKS = "blocks of states"
"""The label of host memory for states of another place while they are updated."""
BLOCK_COPY = "a block that is read"
"""The label of a copy of a block of states, from which parameters are sent while the states stay."""
READ_STATES = "states that are read"
"""The label of pinned host memory through which states in the device's memory are read and written."""
RELEASED_STATES = "states that left the device"
"""The label of host memory for the states of the device's memory while an engine is released."""
PARAMETER_SHARDS = "parameters on the host"
"""The label of the parameters that ``offload_param`` keeps on the host: in reports of memory, and in the plan."""
FROZEN_SHARDS = "frozen parameters"
"""The label of parameters that lie on disk without states."""
PARAMETERS_ON_WAY = "parameters on their way"
"""The label of host memory for parameters on their way from disk to the device."""
SHARE = "device_states_bytes"
"""The setting that says which states are on the device."""
_NAMED = 3
"""The number of consumers that an error names."""


@dataclass(frozen=True)
class PlanRow:
    """One consumer of memory: its name, place (:data:`HOST`, :data:`DEVICE` or a store's), bytes, and the setting that
    shrinks it."""

    what: str
    where: str
    n_bytes: int
    remedy: str
    passing: bool = False
    """True if it exists only while ``wrap`` runs, before gradients and gathered parameters do."""
    brief: bool = False
    """True if it comes and goes in each step."""
    leaves: bool = False
    """True if a release copies it from the device to the host."""


@dataclass(frozen=True)
class ArrayBytes:
    """An array of a model, and the bytes that its values take on a process's devices, including replicas."""

    params: Sequence[int]
    """The numbers of the core's parameters in this array."""
    parameter: int
    following: int
    """The bytes of the array's next value, allocated while the present value still exists."""
    gradient: int
    """The bytes of its gradient on the devices."""
    what: str = PARAMETERS
    """The name of the array's row in plans; :data:`SHARDS` if it is not whole on each device."""
    where: str = DEVICE
    """:data:`HOST` if parameters are in the host's memory."""
    gradient_on_host: int = 0
    """The bytes of its gradient in host memory where kernels read it, if the devices' memory is not the host's."""

    @classmethod
    def of_shards(
        cls,
        params: Sequence[int],
        specs: Sequence[ParamSpec],
        copies: Sequence[int],
        *,
        on_host: bool,
        leaves: bool = False,
    ) -> "ArrayBytes":
        """Return the bytes of an array whose shards are parameters of the core.

        Args:
            params: the numbers of ``specs``.
            copies: for each shard, the number of the process's devices that have it.
            on_host: True if devices that have the same shard share the memory of its next value.
            leaves: True if the gradient is copied to host memory, from one device for each shard. The devices keep it
                only if several have a shard.
        """
        once = [spec.numel * spec.dtype.itemsize for spec in specs]
        n_bytes = sum(n * each for n, each in zip(copies, once, strict=True))
        following, stays = sum(once) if on_host else n_bytes, not leaves or any(n > 1 for n in copies)
        on_devices = n_bytes if stays else 0
        return cls(params, n_bytes, following, on_devices, gradient_on_host=sum(once) if leaves else 0)


class Elsewhere(NamedTuple):
    """Settings that keep states, and maybe parameters, on the device or on a disk."""

    setting: str
    saved: int
    """The bytes of the host that it saves."""
    n_bytes: int
    """The bytes that it takes on the device, or on the disk."""


@dataclass(frozen=True)
class MemoryPlan:
    """The consumers of one process, at the moment when together they take the most.

    Activations, temporary memory of autograd and XLA, and the framework itself are not included.
    """

    rows: tuple[PlanRow, ...]
    numel: int
    """Trained parameters, in elements."""
    shared: bool = False
    """True if the device's memory is the host's."""
    held: int = 0
    """Bytes of the device that the model takes now; the plan's rows replace them."""
    savings: tuple[tuple[str, int], ...] = ()
    """Settings that store states in fewer bytes, and the bytes that each would save on the host, least first."""
    on_device: tuple[Elsewhere, ...] = ()
    """The settings that move states from the host to the device, least first; empty: some are there, or none can be."""
    on_disk: tuple[Elsewhere, ...] = ()
    """The settings that move states, or more, to a disk, least first; empty: they are there."""
    free_elsewhere: Mapping[str, int | None] = field(default_factory=dict)
    """Free bytes by place, of places that are neither the host nor the device; None: unknown, and counted as enough."""
    folders: tuple[str, ...] = ()
    """The folders of such a place."""

    @property
    def host_bytes(self) -> int:
        """Bytes that stay allocated on the host."""
        return self.bytes_in(HOST)

    @property
    def device_bytes(self) -> int:
        """Bytes that parameters and gradients take on the device."""
        return self.bytes_in(DEVICE)

    def bytes_in(self, where: str, *, passing: bool = False) -> int:
        """Bytes in one place that stay, or those that are there only while ``wrap`` runs."""
        return sum(row.n_bytes for row in self.rows if row.where == where and row.passing is passing)

    @property
    def needs(self) -> dict[str, int]:
        """Bytes that must be free by memory: while ``wrap`` runs or while the model trains, whichever takes more."""
        training = {where: self.bytes_in(where) for where in (HOST, DEVICE, *self.elsewhere)}
        wrapping = {where: self.bytes_in(where, passing=True) + n for where, n in training.items()}
        wrapping[DEVICE] -= self.device_bytes
        training[DEVICE] -= self.held
        needs = {where: max(wrapping[where], n) for where, n in training.items()}
        if self.shared:
            needs[HOST] = max(of[HOST] + of[DEVICE] for of in (wrapping, training))
            del needs[DEVICE]
        return needs

    @property
    def elsewhere(self) -> tuple[str, ...]:
        """The places of memory that is neither the host's nor the device's."""
        return tuple(dict.fromkeys(row.where for row in self.rows if row.where not in (HOST, DEVICE)))

    def missing(self, host: int | None, device: int | None = None, *, processes: int = 1) -> dict[str, int]:
        """The bytes that are needed in each memory that has fewer free.

        Args:
            host: free bytes; None: unknown, and counted as enough. ``device`` is read in the same way.
            processes: processes of this machine with such a plan each; they share its memory.
        """
        free = self._free(host, device)
        needed = {where: n if where == DEVICE else processes * n for where, n in self.needs.items()}
        return {where: n for where, n in needed.items() if n > (n if (has := free.get(where)) is None else has)}

    def free(self, where: str, host: int | None, device: int | None) -> int | None:
        """Return the free bytes of a place, of which ``host`` and ``device`` are two; None: unknown."""
        return self._free(host, device).get(where)

    def _free(self, host: int | None, device: int | None) -> dict[str, int | None]:
        return {**self.free_elsewhere, HOST: host, DEVICE: device}

    def check(self, host: int, device: int | None = None, *, processes: int = 1) -> None:
        """Raise an error with the table if a memory is :meth:`missing`.

        Raises:
            HostMemoryError: the host has too little memory.
            DeviceMemoryError: the device has too little memory.
            DiskSpaceError: the place of the states, which is neither of the two, has too little space.
        """
        for where, needed in self.missing(host, device, processes=processes).items():
            free = self.free(where, host, device)
            assert free is not None
            kind = {HOST: HostMemoryError, DEVICE: DeviceMemoryError}.get(where)
            room = None if device is None or self.shared else device - self.needs[DEVICE]
            raise self._error(where, kind, needed, free, processes, room)

    def _error(
        self, where: str, kind: type[OffloadError] | None, needed: int, free: int, processes: int, room: int | None
    ) -> OffloadError:
        of = f" on each of {processes} ranks of this machine" if processes > 1 and where != DEVICE else ""
        if self.held and where == (HOST if self.shared else DEVICE):
            of += f" besides the {format_bytes(self.held)} that the model takes"
        memory = "memory" if kind else "space"
        place = f"{where} {memory}" + (f" in {', '.join(self.folders)}" if self.folders and kind is None else "")
        return (kind or DiskSpaceError)(
            f"training needs {format_bytes(needed)} of {place} for {self.numel:,} parameters{of}, and "
            f"{format_bytes(free)} is available; nothing was allocated. Largest consumers: "
            f"{self.largest(where)}. {self._enough(where, needed, free, processes, room)}Free {memory}, or change a "
            f"setting of this table:\n{self.table()}"
        )

    def _enough(self, where: str, needed: int, free: int, processes: int, room: int | None) -> str:
        """The places and the format of states with which there is enough memory, as sentences; empty if there are none.

        Args:
            room: the bytes of the device that the plan leaves free; None: unknown, and counted as none.
        """
        if where == DEVICE:
            return self._fewer_on_device(needed - free)
        if where != HOST:
            return ""
        sentences = []
        for device in self.on_device:
            left = needed - processes * device.saved
            if left <= free and room is not None and device.n_bytes <= room:
                sentences.append(
                    f"With {device.setting} it would fit, in {format_bytes(left)} of host memory and "
                    f"{format_bytes(device.n_bytes)} more of each device's, if that is of CUDA or ROCm "
                    "(docs/tiers.md). "
                )
                break
        for setting, saved in self.savings:
            if needed - processes * saved <= free:
                it_takes = format_bytes(needed - processes * saved)
                sentences.append(f"With {setting} it would fit, in {it_takes} (docs/formats.md). ")
                break
        for disk in self.on_disk:
            left = needed - processes * disk.saved
            if left <= free:
                sentences.append(
                    f"With {disk.setting} it would fit, in {format_bytes(left)} of host memory or more, and "
                    f"{format_bytes(processes * disk.n_bytes)} of disk space or less (docs/disk.md). "
                )
                break
        return "".join(sentences)

    def _fewer_on_device(self, missing: int) -> str:
        """The states that fit on the device if so many bytes are missing there, as a sentence; empty if even none do
        not suffice."""
        there = [row for row in self.rows if row.leaves]
        left = sum(row.n_bytes for row in there) - missing
        if left < 0:
            return ""
        beside = "" if there[0].remedy == SHARE else f"{there[0].remedy}, "
        return f"With {beside}{SHARE}={left} it would fit there (docs/tiers.md). "

    def largest(self, where: str) -> str:
        """The largest consumers of a memory as text, with the settings that shrink them."""
        places = (HOST, DEVICE) if self.shared and where == HOST else (where,)
        rows = [row for row in self.rows if row.n_bytes and row.where in places]
        rows = sorted(rows, key=lambda row: -row.n_bytes)[:_NAMED]
        return ", ".join(f"{row.what} {format_bytes(row.n_bytes)} ({row.remedy})" for row in rows)

    def table(self) -> str:
        """The plan as text, largest consumer first."""
        return format_table(
            [
                (
                    row.where + " (in wrap only)" * row.passing,
                    row.what,
                    format_bytes(row.n_bytes),
                    f"{row.n_bytes / self.numel:.2f}" if self.numel else "",
                    row.remedy,
                )
                for row in sorted(self.rows, key=lambda row: (row.where, -row.n_bytes))
                if row.n_bytes
            ],
            ("where", "what", "bytes", "per parameter", "made smaller by"),
        )


def format_table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    """Plain text columns."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)
