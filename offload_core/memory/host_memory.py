"""Host memory: exact-size, huge-page arrays, pinned where a device copies from them; staging rings; budgets."""

import ctypes
import weakref
from collections import Counter, deque
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import HostMemoryError, HostMemoryWarning
from ..support import control_groups
from ..support.user_line import UserLine
from .pinning import Pinning, mapped
from .working_memory import Blocks, blocks_of, shared_bytes


class HostMemory:
    """The account of one engine's host memory: the bytes that it holds, by label.

    Each array is its own anonymous mapping, so its size is exact to a page (framework caching allocators
    round pinned blocks up to powers of two), its start is page-aligned, and it goes back to the system when
    the last view of it dies.

    Args:
        threads: write the memory first, each its part.
        pinning: pins arrays for the device; None: it needs no pinned memory.
    """

    def __init__(self, threads: int, pinning: Pinning | None = None) -> None:
        self._threads = threads
        self._pinning = pinning
        self._live: dict[object, tuple[str, int]] = {}
        """The label and the bytes of each array and reservation. Each has an entry, and no sum is kept: a finalizer may
        remove one in any thread, and two threads that change a sum lose one of the changes."""
        self._engine = object()
        """Stands for the engine among those that use memory in turn."""

    def allocate(self, label: str, numel: int, dtype: np.dtype, *, pinned: bool = False) -> np.ndarray:
        """A zeroed array of ``numel`` elements.

        Args:
            label: the kind of its contents, for :meth:`report`.
            pinned: pin it, so that device copies run asynchronously. Where that fails, a warning says so once, and
                this and all later arrays are pageable.

        Raises:
            HostMemoryError: the system refused the memory.
        """
        n_bytes = numel * dtype.itemsize
        if n_bytes == 0:
            return np.empty(0, dtype)
        array = self._new(label, n_bytes, pinned)
        key = object()
        self._live[key] = (label, n_bytes)
        weakref.finalize(array, self._live.pop, key, None)
        return array.view(dtype)

    def _new(self, label: str, n_bytes: int, pinned: bool) -> np.ndarray:
        try:
            array = self._pinned(label, n_bytes) if pinned else None
            return mapped(n_bytes, self._threads) if array is None else array
        except OSError as error:
            raise _refused(label, n_bytes, error) from None

    # --- memory that engines use in turn ---------------------------------------------------------------

    def reserve(self, label: str, sizes: Iterable[int], *, pinned: bool) -> "Reservation":
        """Have memory for arrays of these sizes at a time, in bytes, that other engines use while this one rests.

        Args:
            label, pinned: as in :meth:`allocate`. The report counts all of it as this engine's.

        Raises:
            HostMemoryError: the system refused the memory.
        """
        sizes = [size for size in sizes if size]
        try:
            return Reservation(self, label, sizes, pinned=pinned)
        except _NotPinnedError:  # a warning has said so
            return Reservation(self, label, sizes, pinned=False)

    def lacking_bytes(self, sizes: Iterable[int], *, pinned: bool) -> int:
        """Return the bytes of memory that :meth:`reserve` would make for these sizes."""
        return sum(blocks_of(self._pinning if pinned else None).lacking(self._engine, sizes))

    @property
    def shared_bytes(self) -> int:
        """Bytes held now that other engines of this process would keep if this one were closed."""
        return shared_bytes(self._engine)

    def _pinned(self, label: str, n_bytes: int) -> np.ndarray | None:
        """Return pinned bytes; None if the memory cannot be pinned."""
        if self._pinning is None:
            return None
        try:
            return self._pinning.allocate(n_bytes, self._threads)
        except HostMemoryError as error:
            self._pinning = None
            UserLine.now().warn(
                HostMemoryWarning(
                    f"{label}: {format_bytes(n_bytes)} of host memory could not be pinned ({error}); copies to "
                    "and from the device will wait for each other and the host. Set pin_memory=False if that is meant"
                )
            )
            return None

    @property
    def n_bytes(self) -> int:
        """Bytes held now."""
        return sum(n_bytes for _, n_bytes in [*self._live.values()])

    def report(self) -> dict[str, int]:
        """Bytes held now, by label."""
        bytes_by_label: Counter[str] = Counter()
        for label, n_bytes in [*self._live.values()]:
            bytes_by_label[label] += n_bytes
        return {label: n_bytes for label, n_bytes in bytes_by_label.items() if n_bytes}


class _NotPinnedError(Exception):
    """Memory could not be pinned, and pageable memory must not be taken for pinned by other engines."""


class Reservation:
    """Memory that an engine may borrow in turn with others, until this object dies; see :mod:`.working_memory`."""

    def __init__(self, memory: HostMemory, label: str, sizes: list[int], *, pinned: bool) -> None:
        self._pageable = partial(memory._new, label, pinned=False)
        self._blocks, self._make = blocks_of(None), self._pageable
        if pinned and memory._pinning is not None:
            self._blocks, self._make = blocks_of(memory._pinning), partial(_pinned, memory, label)
        self._blocks.reserve(memory._engine, sizes, self._make)
        key = object()
        memory._live[key] = (label, sum(sizes))
        ends = weakref.finalize(self, _end, memory._live, key, self._blocks, memory._engine, sizes)
        ends.atexit = False

    def borrow(self, numel: int, dtype: np.dtype) -> np.ndarray:
        """An array with any contents. Its memory is free again when no view of it is alive."""
        n_bytes = numel * dtype.itemsize
        if n_bytes == 0:
            return np.empty(0, dtype)
        try:
            return self._blocks.lend(n_bytes, self._make).view(dtype)
        except _NotPinnedError:
            return blocks_of(None).lend(n_bytes, self._pageable).view(dtype)


def _refused(label: str, n_bytes: int, error: OSError) -> HostMemoryError:
    return HostMemoryError(f"{label}: the system refused {format_bytes(n_bytes)} of host memory ({error})")


def _pinned(memory: HostMemory, label: str, n_bytes: int) -> np.ndarray:
    try:
        array = memory._pinned(label, n_bytes)
    except OSError as error:
        raise _refused(label, n_bytes, error) from None
    if array is None:
        raise _NotPinnedError
    return array


def _end(live: dict[object, Any], key: object, blocks: Blocks, engine: object, sizes: list[int]) -> None:
    live.pop(key, None)
    blocks.cancel(engine, sizes)


class StagingRing:
    """A bounded set of equal host buffers that device copies pass through, and other engines' in turn.

    The caller makes sure that a buffer is free before it borrows. Threads may borrow and return at the same time.
    """

    def __init__(self, memory: HostMemory, *, slots: int, n_bytes: int, pinned: bool, label: str = "staging") -> None:
        self.slot_bytes = n_bytes
        """Bytes of each buffer."""
        self.memory = memory.reserve(label, slots * [n_bytes], pinned=pinned)
        self._free = deque(range(slots))
        """The buffers that nobody borrows, by number."""


class Lease:
    """Buffers of a :class:`StagingRing` to be borrowed and given back together; :meth:`release` them when their last
    reader is done.

    Args:
        ring: None: nothing will be borrowed.
    """

    def __init__(self, ring: StagingRing | None) -> None:
        self._ring = ring
        self._numbers: list[int] = []
        self._borrowed: list[np.ndarray] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def borrow(self, numel: int, dtype: np.dtype) -> np.ndarray:
        """A buffer seen as ``numel`` elements of ``dtype``."""
        assert self._ring is not None
        self._numbers.append(self._ring._free.pop())
        self._borrowed.append(self._ring.memory.borrow(self._ring.slot_bytes, np.dtype(np.uint8)))
        return self._borrowed[-1][: numel * dtype.itemsize].view(dtype)

    def release(self) -> None:
        """Give the buffers back."""
        self._borrowed.clear()
        while self._ring is not None and self._numbers:
            self._ring._free.append(self._numbers.pop())


def give_back_freed() -> None:
    """Make the allocator return freed memory to the system: glibc keeps freed memory below a block that is in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def system_memory() -> Any:
    """``psutil.virtual_memory()``."""
    import psutil  # takes longer to import than all of this package

    return psutil.virtual_memory()


def available_bytes() -> int:
    """Host memory that can still be allocated: the system's, bounded by this control group's limit."""
    return max(min([system_memory().available, *_cgroup_headrooms()]), 0)


def control_group_limit() -> int | None:
    """The bytes that the control groups above this process grant it; None: no bound."""
    limits = [limit for limit, _ in _cgroups() if limit < system_memory().total]
    return min(limits, default=None)


def _cgroup_headrooms(root: Path = control_groups.ROOT, membership: Path = control_groups.MEMBERSHIP) -> list[int]:
    """Bytes that each control group above this process still grants."""
    return [limit - used for limit, used in _cgroups(root, membership)]


def _cgroups(root: Path = control_groups.ROOT, membership: Path = control_groups.MEMBERSHIP) -> list[tuple[int, int]]:
    """``(limit, used)`` in bytes of each control group above this process. Page cache that can be dropped is not
    counted."""
    groups = []
    for folder, version in control_groups.folders("memory", root, membership):
        names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        cache = "inactive_file" if version == 2 else "total_inactive_file"
        try:
            limit, used = (int((folder / name).read_text()) for name in names)
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            groups.append((limit, used - int(stat.get(cache, 0))))
        except (OSError, ValueError):
            pass  # no limit here ("max"), or no such file
    return groups


def format_bytes(n_bytes: float) -> str:
    """``1536`` as ``"1.5 KiB"``."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if abs(n_bytes) < 1024 or unit == "TiB":
            return f"{n_bytes:.0f} bytes" if unit == "bytes" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    raise AssertionError
