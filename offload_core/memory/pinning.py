"""Pinned host memory, which a device copies from and to while the host goes on, and the drivers of devices.

Vendors have names here alone.
"""

import ctypes
import mmap
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..errors import HostMemoryError
from ..native import kernels

_HUGE_PAGE = 2 * 2**20
_PORTABLE = 1


class Pinning(Protocol):
    """How a device's framework pins host memory."""

    def allocate(self, n_bytes: int, threads: int) -> np.ndarray:
        """Zeroed bytes that are pinned until the array dies.

        Raises:
            HostMemoryError: they cannot be pinned.
            OSError: the system has none.
        """
        ...


def mapped(n_bytes: int, threads: int) -> np.ndarray:
    """Zeroed bytes in an anonymous mapping of their own: exact to a page, in huge pages where it is large.

    Raises:
        OSError: the system refused the mapping.
    """
    mapping = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE") and n_bytes >= _HUGE_PAGE:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(mapping, np.uint8, n_bytes)
    kernels.first_touch(array, threads=threads)
    return array


@dataclass(frozen=True)
class Registered:
    """Mappings of exact size that are registered with the device's driver.

    Attributes:
        register: given address and length in bytes, pins the memory; raises :class:`HostMemoryError`.
        unregister: given the address, ends that.
    """

    register: Callable[[int, int], None]
    unregister: Callable[[int], None]

    def allocate(self, n_bytes: int, threads: int) -> np.ndarray:
        array = mapped(n_bytes, threads)
        address = kernels.address(array)
        self.register(address, n_bytes)
        weakref.finalize(array, self.unregister, address)
        return array


@dataclass(frozen=True)
class Driver:
    """A vendor's library, loaded at run time: building needs none of its tools."""

    vendor: str
    library: str
    register_name: str
    unregister_name: str
    start_name: str
    device_name: str
    address_name: str

    def register(self, address: int, n_bytes: int) -> None:
        # A context is current in this thread once the framework has put anything on the device.
        register = getattr(self._load(), self.register_name)
        code = register(ctypes.c_void_p(address), ctypes.c_size_t(n_bytes), _PORTABLE)
        if code:
            raise HostMemoryError(
                f"{self.register_name} failed with {self.vendor} error {code}; raise the locked-memory limit "
                "(ulimit -l)"
            )

    def unregister(self, address: int) -> None:
        getattr(self._load(), self.unregister_name)(ctypes.c_void_p(address))

    def start(self) -> bool:
        """Start the driver in a process where no framework has; True if it is there."""
        try:
            return getattr(self._load(), self.start_name)(0) == 0
        except (HostMemoryError, AttributeError):
            return False

    def pci_address(self, ordinal: int) -> str | None:
        """The PCI address of a device, as sysfs writes it; None: it is unknown, or there is no such device.

        Args:
            ordinal: its number among the devices that this process sees (``CUDA_VISIBLE_DEVICES``).
        """
        device, text = ctypes.c_int(), ctypes.create_string_buffer(32)
        try:
            get_device, get_address = (getattr(self._load(), name) for name in (self.device_name, self.address_name))
        except (HostMemoryError, AttributeError):
            return None
        if get_device(ctypes.byref(device), ordinal) or get_address(text, len(text), device):
            return None
        return text.value.decode("ascii", "replace").lower()

    def _load(self) -> ctypes.CDLL:
        try:
            return ctypes.CDLL(self.library)
        except OSError as error:
            raise HostMemoryError(f"the {self.vendor} driver library cannot be loaded ({error})") from None


CUDA = Driver(
    "CUDA",
    "libcuda.so.1",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuInit",
    "cuDeviceGet",
    "cuDeviceGetPCIBusId",
)
HIP = Driver(
    "HIP",
    "libamdhip64.so",
    "hipHostRegister",
    "hipHostUnregister",
    "hipInit",
    "hipDeviceGet",
    "hipDeviceGetPCIBusId",
)
DRIVERS = (CUDA, HIP)
