"""Host memory: exact-size, huge-page arrays, pinned where a device copies from them; staging rings; budgets."""

import ctypes
import resource
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import HostMemoryError, HostMemoryWarning
from ..support import control_groups
from ..support.user_line import UserLine
from .pinning import Pinning, in_wsl2, mapped
from .working_memory import Blocks, blocks_of, shared_bytes

ROUNDING = "rounding of pinned memory"
"""The label of the bytes that an allocator of pinned memory takes beyond the arrays' own."""


class _Held(NamedTuple):
    """An array or a reservation."""

    label: str
    n_bytes: int
    rounding: int = 0
    """The bytes that its allocator takes beyond ``n_bytes``."""
    way: str | None = None
    """The way in which memory that was to be pinned is; None: it was to be pageable."""


class HostMemory:
    """The account of one engine's host memory: the bytes that it holds, by label.

    Each array is its own anonymous mapping, so its size is exact to a page (framework caching allocators
    round pinned blocks up to powers of two), its start is page-aligned, and it goes back to the system when
    the last view of it dies. Where a device's driver refuses to register such memory, the driver allocates it, and
    where it refuses that, too, the memory is pageable. A warning says each of both once, and then holds for all later
    arrays.

    Args:
        threads: write the memory first, each its part.
        pinning: the ways to pin arrays for the device, best first; empty: it needs no pinned memory.
    """

    def __init__(self, threads: int, pinning: Sequence[Pinning] = ()) -> None:
        self._threads = threads
        self._to_pin = bool(pinning)
        self._ways = tuple(pinning)
        """The ways that have not failed yet."""
        self._live: dict[object, _Held] = {}
        """Each array and reservation. Each has an entry, and no sum is kept: a finalizer may
        remove one in any thread, and two threads that change a sum lose one of the changes."""
        self._engine = object()
        """Stands for the engine among those that use memory in turn."""

    def allocate(self, label: str, numel: int, dtype: np.dtype, *, pinned: bool = False) -> np.ndarray:
        """A zeroed array of ``numel`` elements.

        Args:
            label: the kind of its contents, for :meth:`report`.
            pinned: pin it, so that device copies run asynchronously.

        Raises:
            HostMemoryError: the system refused the memory.
        """
        n_bytes = numel * dtype.itemsize
        if n_bytes == 0:
            return np.empty(0, dtype)
        while True:
            way = self._way(pinned)
            try:
                array = self._make(way, label, n_bytes)
                break
            except _WayRefusedError:
                pass  # a warning has said so
        weakref.finalize(array, self._live.pop, self._note(label, [n_bytes], way, pinned), None)
        return array.view(dtype)

    def _way(self, pinned: bool) -> Pinning | None:
        """Return the way to pin memory now; None: it is pageable."""
        return self._ways[0] if pinned and self._ways else None

    def _make(self, way: Pinning | None, label: str, n_bytes: int) -> np.ndarray:
        """Return zeroed bytes, pinned in this way.

        Raises:
            HostMemoryError: the system refused the memory.
            _WayRefusedError: this way failed, now or before.
        """
        if way is not None and way not in self._ways:
            raise _WayRefusedError
        try:
            return mapped(n_bytes, self._threads) if way is None else way.allocate(n_bytes, self._threads)
        except OSError as error:
            raise HostMemoryError(
                f"{label}: the system refused {format_bytes(n_bytes)} of host memory ({error})"
            ) from None
        except HostMemoryError as error:
            assert way is not None
            self._give_up(way, label, n_bytes, error)
            raise _WayRefusedError from None

    def _give_up(self, way: Pinning, label: str, n_bytes: int, error: HostMemoryError) -> None:
        """Pin no further memory in this way, and warn of the cost of the next one, unless another thread has."""
        if way not in self._ways:
            return
        self._ways = tuple(other for other in self._ways if other != way)
        if self._ways:
            after = self._ways[0]
            told = (
                f"{label}: {format_bytes(n_bytes)} of host memory could not be {way.done} ({error}); it is "
                f"{after.done} from now on. {after.cost}. pin_memory={after.name!r} asks for that at once"
            )
        else:
            limits = "".join(f"{limit}. " for limit in limits_of_pinned_memory())
            told = (
                f"{label}: {format_bytes(n_bytes)} of host memory could not be pinned ({error}); it is pageable from "
                f"now on: copies to and from the device will wait for each other and the host. {limits}Set "
                "pin_memory=False if that is meant"
            )
        UserLine.now().warn(HostMemoryWarning(told))

    def _note(self, label: str, sizes: Sequence[int], way: Pinning | None, pinned: bool) -> object:
        """Count an array or a reservation. Return the key by which it ends."""
        rounding = 0 if way is None else sum(way.taken(size) - size for size in sizes)
        named = None
        if pinned and self._to_pin:
            named = "pageable" if way is None else way.done
        key = object()
        self._live[key] = _Held(label, sum(sizes), rounding, named)
        return key

    # --- memory that engines use in turn ---------------------------------------------------------------

    def reserve(self, label: str, sizes: Iterable[int], *, pinned: bool) -> "Reservation":
        """Have memory for arrays of these sizes at a time, in bytes, that other engines use while this one rests.

        Args:
            label, pinned: as in :meth:`allocate`. The report counts all of it as this engine's.

        Raises:
            HostMemoryError: the system refused the memory.
        """
        sizes = [size for size in sizes if size]
        while True:
            with suppress(_WayRefusedError):  # a warning has said so
                return Reservation(self, label, sizes, pinned=pinned)

    def lacking_bytes(self, sizes: Iterable[int], *, pinned: bool) -> int:
        """Return the bytes of memory that :meth:`reserve` would make for these sizes."""
        return sum(blocks_of(self._way(pinned)).lacking(self._engine, sizes))

    @property
    def shared_bytes(self) -> int:
        """Bytes held now that other engines of this process would keep if this one were closed."""
        return shared_bytes(self._engine)

    @property
    def n_bytes(self) -> int:
        """Bytes held now."""
        return sum(self.report().values())

    def report(self) -> dict[str, int]:
        """Bytes held now, by label."""
        bytes_by_label: Counter[str] = Counter()
        for held in [*self._live.values()]:
            bytes_by_label[held.label] += held.n_bytes
            bytes_by_label[ROUNDING] += held.rounding
        return {label: n_bytes for label, n_bytes in bytes_by_label.items() if n_bytes}

    def pinned(self) -> dict[str, int]:
        """Bytes held now that the device copies from or to, by the way in which they are pinned
        (:attr:`Pinning.done`), or ``"pageable"``. Empty if the device needs no pinned memory."""
        bytes_by_way: Counter[str] = Counter()
        for held in [*self._live.values()]:
            if held.way is not None:
                bytes_by_way[held.way] += held.n_bytes
        return dict(bytes_by_way)


class _WayRefusedError(Exception):
    """Memory could not be pinned in one way, and memory of another way must not be taken for it by other engines."""


class Reservation:
    """Memory that an engine may borrow in turn with others, until this object dies; see :mod:`.working_memory`."""

    def __init__(self, memory: HostMemory, label: str, sizes: list[int], *, pinned: bool) -> None:
        self._memory, self._label = memory, label
        way = memory._way(pinned)
        self._blocks, self._make = self._source(way)
        self._blocks.reserve(memory._engine, sizes, self._make)
        key = memory._note(label, sizes, way, pinned)
        ends = weakref.finalize(self, _end, memory._live, key, self._blocks, memory._engine, sizes)
        ends.atexit = False

    def _source(self, way: Pinning | None) -> tuple[Blocks, Callable[[int], np.ndarray]]:
        """Return the blocks that are pinned in this way, and the function that makes a further one of so many bytes."""
        return blocks_of(way), partial(self._memory._make, way, self._label)

    def borrow(self, numel: int, dtype: np.dtype) -> np.ndarray:
        """An array with any contents. Its memory is free again when no view of it is alive."""
        n_bytes = numel * dtype.itemsize
        if n_bytes == 0:
            return np.empty(0, dtype)
        blocks, make = self._blocks, self._make
        while True:
            try:
                return blocks.lend(n_bytes, make).view(dtype)
            except _WayRefusedError:  # beyond the reserved blocks
                blocks, make = self._source(self._memory._way(pinned=True))


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


def limits_of_pinned_memory() -> list[str]:
    """Return the limits on pinned memory that this process can read, each with the way to raise it."""
    limits, locked, group = [], _locked_memory_limit(), control_group_limit()
    if locked is not None:
        limits.append(
            f"This process may lock {format_bytes(locked)}: raise it by ulimit -l, or in a container by --ulimit "
            "memlock=-1"
        )
    if group is not None:
        limits.append(f"The control group of this process grants {format_bytes(group)} of memory, pinned or not")
    if in_wsl2():
        limits.append("Windows lets WSL2 pin a part of its memory only, and Docker in WSL2 still less")
    return limits


def _locked_memory_limit() -> int | None:
    """Return the bytes that this process may lock in memory; None: no bound."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit


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
