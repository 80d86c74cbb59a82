"""Pinned host memory, which a device copies from and to while the host goes on, and the drivers of devices, which pin
it and run the kernels of a device.

Vendors have names here alone.
"""

import ctypes
import mmap
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np

from ..errors import HostMemoryError, KernelError
from ..native import kernels

_HUGE_PAGE = 2 * 2**20
_PORTABLE = 1


class Pinning(Protocol):
    """Pins host memory in the way of a device's framework."""

    def allocate(self, n_bytes: int, threads: int) -> np.ndarray:
        """Return zeroed bytes that are pinned until the array dies.

        Raises:
            HostMemoryError: they cannot be pinned.
            OSError: the system has no memory for them.
        """
        ...


def mapped(n_bytes: int, threads: int) -> np.ndarray:
    """Return zeroed bytes in a new anonymous mapping: exact to a page, and in huge pages if it is large.

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
        register: given address and length in bytes, pins the memory and returns what ends that; raises
            :class:`HostMemoryError`.
    """

    register: Callable[[int, int], Callable[[], object]]

    def allocate(self, n_bytes: int, threads: int) -> np.ndarray:
        array = mapped(n_bytes, threads)
        weakref.finalize(array, self.register(kernels.address(array), n_bytes))
        return array


class Driver(ABC):
    """A vendor's library, loaded at run time: building needs none of its tools."""

    vendor: str
    start_name: str
    device_name: str
    address_name: str
    load_name: str
    function_name: str
    launch_name: str

    def __init__(self, library: str) -> None:
        self.library = library

    @abstractmethod
    def register(self, address: int, n_bytes: int) -> Callable[[], None]:
        """As :attr:`Registered.register`."""

    def start(self) -> bool:
        """Start the driver in a process where no framework has; True if it is there."""
        try:
            self._call(self.start_name, 0)
        except (HostMemoryError, AttributeError):
            return False
        return True

    def pci_address(self, ordinal: int) -> str | None:
        """The PCI address of a device, as sysfs writes it; None: it is unknown, or there is no such device.

        Args:
            ordinal: its number among the devices that this process sees (``CUDA_VISIBLE_DEVICES``).
        """
        device, text = ctypes.c_int(), ctypes.create_string_buffer(32)
        try:
            self._call(self.device_name, ctypes.byref(device), ctypes.c_int(ordinal))
            self._call(self.address_name, text, len(text), device)
        except (HostMemoryError, AttributeError):
            return None
        return text.value.decode("ascii", "replace").lower()

    @abstractmethod
    def architecture(self) -> tuple[str, int]:
        """Return the name that the vendor's compiler has for the device, and the newest major version of the compiler
        whose code this driver loads. Empty and 0: the compiler asks the driver itself."""

    @abstractmethod
    def current(self) -> Any:
        """Return a context manager in which the calling thread uses this device, and after which what it did before."""

    def load(self, code: bytes, function: str) -> int:
        """Load compiled code into the device. Return the handle of the function, for :meth:`launch`.

        It stays loaded until the process ends.

        Raises:
            KernelError: the driver refuses it.
        """
        module, handle = ctypes.c_void_p(), ctypes.c_void_p()
        with self.current():
            self._run(self.load_name, ctypes.byref(module), ctypes.c_char_p(code))
            self._run(self.function_name, ctypes.byref(handle), module, ctypes.c_char_p(function.encode()))
        return handle.value or 0

    def launch(self, function: int, groups: int, threads: int, arguments: Sequence[bytes], stream: int) -> None:
        """Have the device run a function of :meth:`load`, in the stream's order.

        Args:
            groups: of ``threads`` threads each.
            arguments: the bytes of each parameter.
            stream: the driver's handle; 0: the default stream of the device.

        Raises:
            KernelError: the driver refuses it.
        """
        values = [ctypes.create_string_buffer(value, len(value)) for value in arguments]
        places = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        with self.current():
            self._run(
                self.launch_name,
                ctypes.c_void_p(function),
                *map(ctypes.c_uint, (groups, 1, 1, threads, 1, 1, 0)),
                ctypes.c_void_p(stream),
                places,
                None,
            )

    @cached_property
    def _functions(self) -> ctypes.CDLL:
        return ctypes.CDLL(self.library)

    def _run(self, name: str, *args: Any) -> None:
        """Call one of the driver's functions for the sake of kernels."""
        try:
            code = getattr(self._functions, name)(*args)
        except (OSError, AttributeError) as error:
            raise KernelError(
                f"the {self.vendor} driver library cannot be used ({error}), and a device's kernels need {name} of "
                "it: install the driver of the device"
            ) from None
        if code:
            raise KernelError(
                f"{name} failed with {self.vendor} error {code}, expected 0: the device's memory may be full, or an "
                "earlier kernel has failed (CUDA_LAUNCH_BLOCKING=1 makes the call that started it fail)"
            )

    def _call(self, name: str, *args: Any) -> None:
        """Call one of the driver's functions, all of which return an error code; 0: no error."""
        try:
            code = getattr(ctypes.CDLL(self.library), name)(*args)
        except OSError as error:
            raise HostMemoryError(f"the {self.vendor} driver library cannot be loaded ({error})") from None
        if code:
            raise HostMemoryError(
                f"{name} failed with {self.vendor} error {code}; if it is the one for too little memory, raise the "
                "locked-memory limit (ulimit -l)"
            )


class Cuda(Driver):
    """NVIDIA's driver, which registers memory in the context that is current in the calling thread.

    Threads of torch have the primary context of the device that they used last, those of JAX none. So the device's own
    is retained for as long as the memory is registered in it, and current during each call. Its other users are not
    disturbed: it is the one of torch, JAX and the CUDA runtime, and threads get back what was current before.

    Args:
        device: its number among those that the process sees.
    """

    vendor = "CUDA"
    start_name, device_name, address_name = "cuInit", "cuDeviceGet", "cuDeviceGetPCIBusId"
    load_name, function_name, launch_name = "cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel"

    def __init__(self, device: int = 0, library: str = "libcuda.so.1") -> None:
        super().__init__(library)
        self._device = device

    def register(self, address: int, n_bytes: int) -> Callable[[], None]:
        """As :attr:`Registered.register`."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(self._device))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        with ExitStack() as undo:
            undo.callback(self._call, "cuDevicePrimaryCtxRelease_v2", device)
            with self._current(context):
                self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(n_bytes), _PORTABLE)
            undo.pop_all()
        return partial(self._unregister, device, context, address)

    def _unregister(self, device: ctypes.c_int, context: ctypes.c_void_p, address: int) -> None:
        with suppress(HostMemoryError):  # at the interpreter's end the driver may have ended before
            with self._current(context):
                self._call("cuMemHostUnregister", ctypes.c_void_p(address))
            self._call("cuDevicePrimaryCtxRelease_v2", device)

    def architecture(self) -> tuple[str, int]:
        """As :meth:`Driver.architecture`: ``("sm_90", 12)``, say."""
        version, values = ctypes.c_int(), (ctypes.c_int(), ctypes.c_int())
        self._run("cuDriverGetVersion", ctypes.byref(version))
        for value, attribute in zip(values, (75, 76), strict=True):  # compute capability, major and minor
            self._run("cuDeviceGetAttribute", ctypes.byref(value), attribute, self._own[0])
        return "sm_{}{}".format(*(value.value for value in values)), version.value // 1000

    @cached_property
    def _own(self) -> tuple[ctypes.c_int, ctypes.c_void_p]:
        """The device and its primary context, retained until the process ends, as long as code is loaded in it."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._run("cuDeviceGet", ctypes.byref(device), ctypes.c_int(self._device))
        self._run("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        return device, context

    @contextmanager
    def current(self) -> Iterator[None]:
        """As :meth:`Driver.current`."""
        self._run("cuCtxPushCurrent_v2", self._own[1])
        try:
            yield
        finally:
            self._run("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    @contextmanager
    def _current(self, context: ctypes.c_void_p) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


class Hip(Driver):
    """AMD's driver. Every thread has a context, and memory is registered for all devices (``hipHostRegister``: "HIP
    only supports one context").

    Args:
        device: the number of the device that runs kernels, among those that the process sees.
    """

    vendor = "HIP"
    start_name, device_name, address_name = "hipInit", "hipDeviceGet", "hipDeviceGetPCIBusId"
    load_name, function_name, launch_name = "hipModuleLoadData", "hipModuleGetFunction", "hipModuleLaunchKernel"

    def __init__(self, library: str = "libamdhip64.so", device: int = 0) -> None:
        super().__init__(library)
        self._device = device

    def architecture(self) -> tuple[str, int]:
        """As :meth:`Driver.architecture`."""
        return "", 0

    @contextmanager
    def current(self) -> Iterator[None]:
        """As :meth:`Driver.current`."""
        before = ctypes.c_int()
        self._run("hipGetDevice", ctypes.byref(before))
        self._run("hipSetDevice", ctypes.c_int(self._device))
        try:
            yield
        finally:
            self._run("hipSetDevice", before)

    def register(self, address: int, n_bytes: int) -> Callable[[], None]:
        """As :attr:`Registered.register`."""
        self._call("hipHostRegister", ctypes.c_void_p(address), ctypes.c_size_t(n_bytes), _PORTABLE)
        return partial(self._unregister, address)

    def _unregister(self, address: int) -> None:
        with suppress(HostMemoryError):
            self._call("hipHostUnregister", ctypes.c_void_p(address))


DRIVERS: tuple[Driver, ...] = (Cuda(), Hip())
