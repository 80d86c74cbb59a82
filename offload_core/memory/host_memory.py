"""Host memory: exact-size, huge-page arrays, pinned where a device copies from them; staging rings; budgets."""

import ctypes
import mmap
import weakref
from collections import Counter, deque
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import HostMemoryError
from ..native import kernels
from ..support import control_groups

_HUGE_PAGE = 2 * 2**20
_CUDA_DRIVER = "libcuda.so.1"
_CU_MEMHOSTREGISTER_PORTABLE = 1


class HostMemory:
    """The account of one engine's host memory: the bytes that it holds, by label.

    Each array is its own anonymous mapping, so its size is exact to a page (framework caching allocators
    round pinned blocks up to powers of two), its start is page-aligned, and it goes back to the system when
    the last view of it dies.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._live: Counter[str] = Counter()

    def allocate(self, label: str, numel: int, dtype: np.dtype, *, pinned: bool = False) -> np.ndarray:
        """A zeroed array of ``numel`` elements.

        Args:
            label: the kind of its contents, for :meth:`report`.
            pinned: register it with the CUDA driver, so that device copies run asynchronously.

        Raises:
            HostMemoryError: the system refused the mapping or the registration.
        """
        n_bytes = numel * dtype.itemsize
        if n_bytes == 0:
            return np.empty(0, dtype)
        try:
            mapping = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise HostMemoryError(
                f"{label}: the system refused {format_bytes(n_bytes)} of host memory ({error})"
            ) from None
        if hasattr(mmap, "MADV_HUGEPAGE") and n_bytes >= _HUGE_PAGE:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        array = np.frombuffer(mapping, dtype, numel)
        kernels.first_touch(array, threads=self._threads)
        if pinned:
            address = array.ctypes.data
            _register(address, n_bytes, label)
            weakref.finalize(mapping, _unregister, address)
        self._live[label] += n_bytes
        weakref.finalize(mapping, self._live.subtract, {label: n_bytes})
        return array

    @property
    def n_bytes(self) -> int:
        """Bytes held now."""
        return sum(self._live.values())

    def report(self) -> dict[str, int]:
        """Bytes held now, by label."""
        return {label: n_bytes for label, n_bytes in self._live.items() if n_bytes}


class StagingRing:
    """A bounded set of equal host buffers that device copies pass through, made once.

    The caller makes sure that a buffer is free before it borrows. Threads may borrow and return at the same time.
    """

    def __init__(self, memory: HostMemory, *, slots: int, n_bytes: int, pinned: bool) -> None:
        self.slot_bytes = n_bytes
        """Bytes of each buffer."""
        allocate = partial(memory.allocate, "staging", n_bytes, np.dtype(np.uint8), pinned=pinned)
        self._free = deque(allocate() for _ in range(slots))

    def lease(self) -> "Lease":
        """A set of buffers to be borrowed and given back together."""
        return Lease(self._free)


class Lease:
    """Borrowed buffers of a :class:`StagingRing`; :meth:`release` them when their last reader is done."""

    def __init__(self, free: deque[np.ndarray]) -> None:
        self._free = free
        self._borrowed: list[np.ndarray] = []

    def __len__(self) -> int:
        return len(self._borrowed)

    def borrow(self, numel: int, dtype: np.dtype) -> np.ndarray:
        """A buffer seen as ``numel`` elements of ``dtype``."""
        self._borrowed.append(self._free.pop())
        return self._borrowed[-1][: numel * dtype.itemsize].view(dtype)

    def release(self) -> None:
        """Give the buffers back."""
        while self._borrowed:
            self._free.append(self._borrowed.pop())


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


def _driver() -> ctypes.CDLL:
    """The CUDA driver, loaded at run time: building needs no CUDA toolkit, and pinning for JAX needs no torch."""
    try:
        return ctypes.CDLL(_CUDA_DRIVER)
    except OSError as error:
        raise HostMemoryError(
            f"pinned memory: the CUDA driver library cannot be loaded ({error}); set pin_memory=False"
        ) from None


def _register(address: int, n_bytes: int, label: str) -> None:
    # A context is current in this thread once the framework has put anything on the device.
    code = _driver().cuMemHostRegister_v2(
        ctypes.c_void_p(address), ctypes.c_size_t(n_bytes), _CU_MEMHOSTREGISTER_PORTABLE
    )
    if code:
        raise HostMemoryError(
            f"{label}: cuMemHostRegister of {format_bytes(n_bytes)} failed with CUDA error {code}; raise the "
            "locked-memory limit (ulimit -l) or set pin_memory=False"
        )


def _unregister(address: int) -> None:
    _driver().cuMemHostUnregister(ctypes.c_void_p(address))
