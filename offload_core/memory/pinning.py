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
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..errors import ConfigError, HostMemoryError, KernelError
from ..native import kernels

_HUGE_PAGE = 2 * 2**20
_PORTABLE = 1


REGISTER, ALLOCATE = "register", "allocate"
"""The two values of ``pin_memory`` that ask for one way to pin memory."""


class Pinning(Protocol):
    """One way to pin host memory for a device."""

    name: str
    """:data:`REGISTER` or :data:`ALLOCATE`."""
    done: str
    """The participle that messages and reports use: "registered with the device's driver"."""
    cost: str
    """The cost of this way beside the way before it, as a warning says it; empty: this way is always first."""

    def taken(self, n_bytes: int) -> int:
        """Return the bytes of host memory that an array of ``n_bytes`` takes, to a page."""
        return n_bytes

    def allocate(self, n_bytes: int, threads: int) -> np.ndarray:
        """Return zeroed bytes that are pinned until the array dies.

        Raises:
            HostMemoryError: they cannot be pinned.
            OSError: the system has no memory for them.
        """
        ...


def in_wsl2(version: Path = Path("/proc/version"), device: Path = Path("/dev/dxg")) -> bool:
    """True if this is Linux in Windows (WSL2), also in a container there.

    A kernel of the device cannot use the host's address of registered memory there, and faults if it does. It can use
    the address of memory that the driver allocated.
    """
    try:
        return device.exists() or "microsoft" in version.read_text().lower()
    except OSError:
        return False


def ways_to_pin(device: Sequence[Pinning], pin_memory: bool | str) -> Sequence[Pinning]:
    """Return the ways to pin memory for a device that an engine tries, in this order; empty: its memory is pageable.

    Args:
        device: the ways that the device has, best first; empty: it needs no pinned memory.
        pin_memory: the setting. True: all ways, but in WSL2 no registered memory.

    Raises:
        ConfigError: the setting asks for a way that the device lacks.
    """
    if not pin_memory or not device:
        return ()
    if pin_memory is True:
        return [way for way in device if way.name != REGISTER or not in_wsl2()]
    if ways := [way for way in device if way.name == pin_memory]:
        return ways
    raise ConfigError(
        f"pin_memory={pin_memory!r}: memory for this device can only be {' or '.join(way.done for way in device)}; "
        f"expected pin_memory=True, or {' or '.join(repr(way.name) for way in device)}"
    )


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
class Registered(Pinning):
    """Mappings of exact size that are registered with the device's driver.

    Attributes:
        register: given address and length in bytes, pins the memory and returns what ends that; raises
            :class:`HostMemoryError`.
    """

    register: Callable[[int, int], Callable[[], object]]
    name = REGISTER
    done = "registered with the device's driver"
    cost = ""

    def allocate(self, n_bytes: int, threads: int) -> np.ndarray:
        array = mapped(n_bytes, threads)
        weakref.finalize(array, self.register(kernels.address(array), n_bytes))
        return array


@dataclass(frozen=True)
class Allocated(Pinning):
    """Memory that the device's driver allocates, exact to a page.

    Attributes:
        take: given a length in bytes, returns an address and a function that frees this memory; raises
            :class:`HostMemoryError`.
    """

    take: Callable[[int], tuple[int, Callable[[], object]]]
    name = ALLOCATE
    done = "allocated by the device's driver"
    cost = (
        "Copies are as fast. The driver chooses the size of the pages and the memory node, so the update may read this "
        "memory more slowly"
    )

    def allocate(self, n_bytes: int, threads: int) -> np.ndarray:
        address, free = self.take(n_bytes)
        array = np.ctypeslib.as_array((ctypes.c_uint8 * n_bytes).from_address(address))
        weakref.finalize(array, free).atexit = False  # others may still read it then; the process ends, and frees it
        array.fill(0)
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

    @abstractmethod
    def allocate(self, n_bytes: int) -> tuple[int, Callable[[], None]]:
        """As :attr:`Allocated.take`."""

    @property
    def ways(self) -> Sequence[Pinning]:
        """The ways to pin memory for the device, best first. Two calls return equal ways."""
        return Registered(self.register), Allocated(self.allocate)

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

    def _quietly(self, name: str, *args: Any) -> None:
        """As :meth:`_call`, at the end of memory: when the interpreter ends, the driver may have ended before."""
        with suppress(HostMemoryError):
            self._call(name, *args)

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
        place = ctypes.c_void_p(address)
        return self._pin(
            ("cuMemHostRegister_v2", place, ctypes.c_size_t(n_bytes), _PORTABLE), ("cuMemHostUnregister", place)
        )

    def allocate(self, n_bytes: int) -> tuple[int, Callable[[], None]]:
        """As :attr:`Allocated.take`."""
        place = ctypes.c_void_p()
        ends = self._pin(
            ("cuMemHostAlloc", ctypes.byref(place), ctypes.c_size_t(n_bytes), _PORTABLE), ("cuMemFreeHost", place)
        )
        return place.value or 0, ends

    def _pin(self, begin: tuple[Any, ...], end: tuple[Any, ...]) -> Callable[[], None]:
        """Make the call ``begin`` in the device's own context. Return a function that makes the call ``end`` there and
        releases the context. If a later call fails here, ``end`` is called at once."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(self._device))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        with ExitStack() as undo:
            undo.callback(self._quietly, "cuDevicePrimaryCtxRelease_v2", device)
            with self._current(context):
                self._call(*begin)
                undo.callback(self._unpin, context, end)
            return undo.pop_all().close

    def _unpin(self, context: ctypes.c_void_p, end: tuple[Any, ...]) -> None:
        with suppress(HostMemoryError), self._current(context):
            self._call(*end)

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
        place = ctypes.c_void_p(address)
        self._call("hipHostRegister", place, ctypes.c_size_t(n_bytes), _PORTABLE)
        return partial(self._quietly, "hipHostUnregister", place)

    def allocate(self, n_bytes: int) -> tuple[int, Callable[[], None]]:
        """As :attr:`Allocated.take`."""
        place = ctypes.c_void_p()
        self._call("hipHostMalloc", ctypes.byref(place), ctypes.c_size_t(n_bytes), _PORTABLE)
        return place.value or 0, partial(self._quietly, "hipHostFree", place)


DRIVERS: tuple[Driver, ...] = (Cuda(), Hip())
