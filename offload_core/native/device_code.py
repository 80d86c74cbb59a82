"""The kernels of a device: ``c_src/device.h``, compiled by the vendor's own run-time compiler when first needed.

The compiler (NVRTC, HIPRTC) is a library that torch's and JAX's builds for a device bring along, so no toolkit is
needed. It compiles the text that the C compiler has compiled for the host, and the results have the same bits
(docs/numerics.md).
"""

import ctypes
import os
import struct
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, Protocol

import numpy as np

from ..dtypes import FLOAT32, ElementType
from ..errors import KernelError
from . import kernels

Upload = Callable[[np.ndarray], int]
"""Copies an array to the device, in the stream's order, and returns its address there, a multiple of 8. The caller of
this module keeps that memory until the stream has run the kernel."""


class Driver(Protocol):
    """A vendor's driver and one of its devices (``offload_core/memory/pinning.py``)."""

    vendor: str

    def architecture(self) -> tuple[str, int]:
        """Return the compiler's name for the device, and the newest major version of the compiler that fits."""
        ...

    def current(self) -> AbstractContextManager[None]:
        """Return a context manager in which the calling thread uses this device."""
        ...

    def load(self, code: bytes, function: str) -> int:
        """Load code into the device. Return a handle of the function."""
        ...

    def launch(self, function: int, groups: int, threads: int, arguments: Sequence[bytes], stream: int) -> None:
        """Have the device run the function, in the stream's order."""
        ...


# --- the text of one kernel -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """One kernel of the text, for some types. Each is compiled on its own.

    Attributes:
        function: its name.
        defines: the macros that choose it (``c_src/device.h``), and their values.
    """

    function: str
    defines: tuple[tuple[str, str], ...]

    def text(self) -> str:
        """Return the text for the compiler."""
        lines = [f"#define {name} {value}\n" for name, value in self.defines]
        return "".join(lines) + kernels.device_text()


def update_kernel(kind: Any) -> Kernel:
    """The update of a kind (``kernels.kind_of``)."""
    values = kind.grad_dtype, kind.param_dtype, kind.rule, kind.keep_states, kind.master_format
    moments = ", ".join(map(str, kind.moment_formats))
    return Kernel("oc_device_update", (("OC_UPDATE", f"{{{', '.join(map(str, values))}, {{{moments}}}}}"),))


def sum_squares_kernel(dtype: ElementType) -> Kernel:
    """The exact sum of squares of elements of this type."""
    return Kernel("oc_device_sum_squares", (("OC_SUM_SQUARES", str(dtype.code)),))


def accumulate_kernel(dtype: ElementType) -> Kernel:
    """The addition of elements of this type to float32."""
    return Kernel("oc_device_accumulate", (("OC_ACCUMULATE", str(dtype.code)),))


def reduce_kernel(dtype: ElementType) -> Kernel:
    """The sum of several runs of this type."""
    return Kernel("oc_device_reduce", (("OC_REDUCE", str(dtype.code)),))


def cast_kernel(src: ElementType, dst: ElementType) -> Kernel:
    """The conversion of ``src`` to ``dst``."""
    return Kernel("oc_device_cast", (("OC_CAST", str(src.code)), ("OC_CAST_TO", str(dst.code))))


# --- the compilers ----------------------------------------------------------------------------------------


class Compiler(ABC):
    """A vendor's compiler at run time.

    Args:
        library: the path or the name of its shared library.
    """

    prefix: ClassVar[str]
    code_name: ClassVar[str]
    options: ClassVar[tuple[str, ...]]

    def __init__(self, library: str) -> None:
        self.library = library

    @abstractmethod
    def target(self, architecture: str) -> tuple[str, ...]:
        """Return the options for this architecture of ``Driver.architecture``."""

    def compile(self, kernel: Kernel, architecture: str, *, changes: Sequence[str] = ()) -> bytes:
        """Return the code of one kernel for the driver to load.

        Args:
            changes: more options, after :attr:`options`.

        Raises:
            KernelError: it cannot be compiled; the compiler's words are in it.
        """
        options = (*self.target(architecture), *self.options, *changes)
        with self._compiled(kernel, options) as program:
            return self._bytes_of(program, self.code_name)

    @contextmanager
    def _compiled(self, kernel: Kernel, options: Sequence[str]) -> Iterator[ctypes.c_void_p]:
        program = ctypes.c_void_p()
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        text, name = kernel.text().encode(), f"{kernel.function}.cu".encode()
        self._call("CreateProgram", ctypes.byref(program), ctypes.c_char_p(text), ctypes.c_char_p(name), 0, None, None)
        try:
            code = self._function("CompileProgram")(program, len(options), given)
            if code:
                log = self._bytes_of(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
                raise KernelError(
                    f"{self.library} cannot compile {kernel.function} ({self.prefix} error {code}); the options were "
                    f"{' '.join(options)}. Install the version of the compiler that belongs to the driver. It "
                    f"says:\n{log}"
                )
            yield program
        finally:
            self._call("DestroyProgram", ctypes.byref(program))

    def _bytes_of(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"Get{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"Get{what}", program, buffer)
        return buffer.raw

    @cached_property
    def _functions(self) -> ctypes.CDLL:
        return ctypes.CDLL(self.library)

    def _function(self, name: str) -> Any:
        try:
            return getattr(self._functions, self.prefix + name)
        except (OSError, AttributeError) as error:
            raise KernelError(
                f"{self.library} cannot be used ({error}), expected the vendor's run-time compiler: install it again"
            ) from None

    def _call(self, name: str, *args: Any) -> None:
        code = self._function(name)(*args)
        if code:
            raise KernelError(
                f"{self.prefix}{name} of {self.library} failed with error {code}, expected 0: install the version of "
                "the compiler that belongs to the driver"
            )


def _path_of(library: str) -> Path:
    """Return the path of a library that this process has loaded by its name or path."""
    if os.sep in library:
        return Path(library)
    with suppress(OSError), open("/proc/self/maps") as lines:
        for line in lines:
            if line.rstrip().endswith("/" + library):
                return Path(line.split(maxsplit=5)[-1].rstrip())
    return Path(library)


class Nvrtc(Compiler):
    """NVIDIA's. A device that is newer than the compiler gets PTX of the newest one that it knows, which the driver
    translates."""

    prefix, code_name = "nvrtc", "CUBIN"
    # All that would change a bit, though some are the defaults. What the C compiler takes is a function of the device.
    options = (
        *("--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true", "--std=c++17"),
        *("--device-as-default-execution-space", "--diag-suppress=177"),
    )

    @cached_property
    def _functions(self) -> ctypes.CDLL:
        """The library, and the one that it opens by name: version 13.0 of the wheel does not find it beside itself."""
        functions = ctypes.CDLL(self.library)
        for path in sorted(_path_of(self.library).parent.glob("libnvrtc-builtins.so.*")):
            ctypes.CDLL(str(path))
        return functions

    def target(self, architecture: str) -> tuple[str, ...]:
        """As :meth:`Compiler.target`."""
        return (f"--gpu-architecture={architecture}",)

    def compile(self, kernel: Kernel, architecture: str, *, changes: Sequence[str] = ()) -> bytes:
        """As :meth:`Compiler.compile`."""
        number = int(architecture.removeprefix("sm_"))
        known = self.architectures()
        if number in known:
            return super().compile(kernel, architecture, changes=changes)
        older = max((each for each in known if each < number), default=0)
        if not older:
            raise KernelError(
                f"{self.library} compiles for sm_{min(known)} and newer, and the device is {architecture}: install an "
                "older version of it, or take a newer device"
            )
        return self.assembly(kernel, f"compute_{older}", changes=changes)

    def assembly(self, kernel: Kernel, architecture: str, *, changes: Sequence[str] = ()) -> bytes:
        """Return the PTX of one kernel."""
        options = (*self.target(architecture), *self.options, *changes)
        with self._compiled(kernel, options) as program:
            return self._bytes_of(program, "PTX")

    def architectures(self) -> list[int]:
        """Return the numbers of the architectures that this compiler knows: 90 stands for ``sm_90``."""
        count = ctypes.c_int()
        self._call("GetNumSupportedArchs", ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._call("GetSupportedArchs", numbers)
        return list(numbers)


class Hiprtc(Compiler):
    """AMD's. It compiles for the device that the calling thread uses."""

    prefix, code_name = "hiprtc", "Code"
    options = (
        *("-std=c++17", "-O3", "-ffp-contract=off", "-fno-fast-math"),
        *("-fhip-fp32-correctly-rounded-divide-sqrt", "-fno-gpu-flush-denormals-to-zero"),
    )

    def target(self, architecture: str) -> tuple[str, ...]:
        """As :meth:`Compiler.target`."""
        return (f"--offload-arch={architecture}",) if architecture else ()


def compile_text(library: str, architecture: str, kernel: Kernel) -> bytes:
    """Return the code of one kernel for a device that need not be here.

    Args:
        library: of NVRTC or HIPRTC.
        architecture: ``"sm_90"``, say; HIPRTC's are like ``"gfx942"``.
    """
    compiler = Hiprtc if "hiprtc" in os.path.basename(library) else Nvrtc
    return compiler(library).compile(kernel, architecture)


_NAMES = {
    "CUDA": {"libnvrtc.so.13": 13, "libnvrtc.so.12": 12},
    "HIP": {"libhiprtc.so.7": 7, "libhiprtc.so.6": 6, "libhiprtc.so": 0},
}
"""The names of each vendor's library, and their major versions; 0: any."""
_FOLDERS = {"CUDA": ("nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"), "HIP": ("torch/lib", "/opt/rocm/lib")}
"""Where packages have it, in a folder of ``sys.path``."""
_COMPILERS: dict[str, type[Compiler]] = {"CUDA": Nvrtc, "HIP": Hiprtc}
_PACKAGES = {"CUDA": "nvidia-cuda-nvrtc-cu12 or nvidia-cuda-nvrtc", "HIP": "torch for ROCm, or ROCm"}


def find_compiler(vendor: str, newest: int = 0) -> Compiler:
    """Return the compiler of a vendor: one that this process has loaded, or on the loader's path, or in a package.

    Args:
        newest: the major version that the driver fits; 0: any.

    Raises:
        KernelError: none is found.
    """
    names = [name for name, version in _NAMES[vendor].items() if not newest or version <= newest]
    paths = [Path(folder, place, name) for name in names for folder in sys.path for place in _FOLDERS[vendor]]
    loaded = [(name, os.RTLD_NOW | os.RTLD_NOLOAD) for name in names]
    others = [(name, os.RTLD_NOW) for name in (*names, *(str(path) for path in paths if path.exists()))]
    for library, mode in (*loaded, *others):
        try:
            ctypes.CDLL(library, mode=mode)
        except OSError:
            continue
        return _COMPILERS[vendor](library)
    raise KernelError(
        f"no run-time compiler for {vendor} devices: looked for {', '.join(names)} among this process's libraries, "
        f"on the loader's path and in {', '.join(_FOLDERS[vendor])} of each folder of sys.path; install "
        f"{_PACKAGES[vendor]}, or add the library's folder to LD_LIBRARY_PATH"
    )


# --- calls ------------------------------------------------------------------------------------------------


class DeviceCode:
    """The kernels on one device. Its methods are those of ``kernels``: addresses are the device's, and work is done in
    the order of a stream of the driver (``stream``, its handle). Any thread may call them.

    Args:
        driver: its driver, and the device's number.
        compiler: default: the one that :func:`find_compiler` finds.
    """

    def __init__(self, driver: Driver, compiler: Compiler | None = None) -> None:
        self._driver = driver
        self._architecture, newest = driver.architecture()
        self._compiler = compiler or find_compiler(driver.vendor, newest)
        self._functions: dict[Kernel, int] = {}
        self._lock = Lock()

    def update(
        self,
        segments: np.ndarray,
        scalars: np.ndarray,
        *,
        grad_dtype: ElementType,
        param_dtype: ElementType | None,
        rule: str,
        keep_states: bool = False,
        master_format: str = "float32",
        moment_formats: Sequence[str] = (),
        upload: Upload,
        stream: int,
    ) -> None:
        """As :func:`kernels.update`, whose arguments these are."""
        kind = kernels.kind_of(grad_dtype, param_dtype, rule, keep_states, master_format, moment_formats)
        kernels.check_update(segments, scalars, kind)
        self._run_blocks(update_kernel(kind), segments, kernels.GROUP_BLOCKS, upload, stream, scalars)

    def sum_squares(self, spans: np.ndarray, dtype: ElementType, bins_at: int, *, upload: Upload, stream: int) -> None:
        """Add the exact sum of squares of the spans' ``src`` to the int64s at ``bins_at``, ``NORM_BINS`` long."""
        kernels.check_spans("oc_sum_squares", spans, dtype, None)
        self._run_blocks(sum_squares_kernel(dtype), spans, kernels.SUM_BLOCKS, upload, stream, bins_at)

    def accumulate(self, spans: np.ndarray, dtype: ElementType, *, upload: Upload, stream: int) -> None:
        """As :func:`kernels.accumulate`."""
        kernels.check_spans("oc_accumulate", spans, dtype, FLOAT32)
        self._run_blocks(accumulate_kernel(dtype), spans, kernels.GROUP_BLOCKS, upload, stream)

    def cast(self, spans: np.ndarray, src: ElementType, dst: ElementType, *, upload: Upload, stream: int) -> None:
        """As :func:`kernels.cast`."""
        kernels.check_spans("oc_cast", spans, src, dst)
        self._run_blocks(cast_kernel(src, dst), spans, kernels.GROUP_BLOCKS, upload, stream)

    def reduce(
        self,
        src_at: int,
        n_sources: int,
        src_type: ElementType,
        dst_at: int,
        numel: int,
        *,
        divisor: float,
        add: bool,
        stream: int,
    ) -> None:
        """As :func:`kernels.reduce`, of runs of ``numel`` elements."""
        reduction = kernels.reduction_of(src_at, n_sources, src_type, dst_at, numel, divisor=divisor, add=add)
        kernels.check_reduction(reduction)
        self._launch(reduce_kernel(src_type), _blocks(numel), [bytes(kernels.ffi.buffer(reduction))], stream)

    def _run_blocks(
        self,
        kernel: Kernel,
        runs: np.ndarray,
        group_blocks: int,
        upload: Upload,
        stream: int,
        last: np.ndarray | int | None = None,
    ) -> None:
        """Launch a kernel over runs, whose table and the numbers of their first blocks go to the device in one copy.

        Args:
            last: the kernel's last argument, if it has four: an array goes along with the copy.
        """
        first = np.zeros(len(runs) + 1, np.int64)
        np.cumsum(_blocks(runs["numel"]), out=first[1:])
        tables = [runs, first, *([last] if isinstance(last, np.ndarray) else [])]
        if not first[-1]:
            return
        start = upload(np.concatenate([np.ascontiguousarray(table).view(np.uint8) for table in tables]))
        runs_at, first_at, last_at = (start + n for n in (0, runs.nbytes, runs.nbytes + first.nbytes))
        arguments = [struct.pack("Q", runs_at), struct.pack("Q", first_at), struct.pack("q", len(runs))]
        if last is not None:
            arguments.append(struct.pack("Q", last_at if isinstance(last, np.ndarray) else last))
        self._launch(kernel, -(-int(first[-1]) // group_blocks), arguments, stream)

    def _launch(self, kernel: Kernel, groups: int, arguments: Sequence[bytes], stream: int) -> None:
        if groups:
            self._driver.launch(self._function(kernel), groups, kernels.STATE_BLOCK, arguments, stream)

    def _function(self, kernel: Kernel) -> int:
        with self._lock:
            if kernel not in self._functions:
                with self._driver.current():
                    code = self._compiler.compile(kernel, self._architecture)
                self._functions[kernel] = self._driver.load(code, kernel.function)
            return self._functions[kernel]


def _blocks(numel: Any) -> Any:
    """Return the number of blocks of 256 elements that ``numel`` elements take."""
    return -(-numel // kernels.STATE_BLOCK)
