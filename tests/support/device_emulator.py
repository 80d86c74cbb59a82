"""A device on the host, which runs the text of a device's kernels: the C++ compiler takes the place of the vendor's."""

import ctypes
import platform
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if not shutil.which("g++") or platform.system() != "Linux":
    pytest.skip("g++ is not installed, or this is not Linux", allow_module_level=True)

from offload_core.native import kernels
from offload_core.native.device_code import Compiler, DeviceCode, Kernel
from tests.support.c_build import run

_SOURCE = Path(__file__).with_suffix(".cpp")
_FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-Wall", "-Wno-unused-function")


def build(folder: Path, text: str) -> Path:
    """Compile an emulator of this text."""
    source, library = folder / "device.cpp", folder / "device.so"
    source.write_text(_SOURCE.read_text().replace("\nTEXT\n", f"\n{text}\n"))
    run("g++", *_FLAGS, source, "-o", library)
    return library


class EmulatedDriver:
    """A driver of the emulated device. Device memory is the host's.

    Attributes:
        turn: an odd number, on which the order of the threads depends.
        loaded: the functions, in the order in which they were loaded.
    """

    vendor = "emulated"

    def __init__(self, library: Path) -> None:
        self._emulate = ctypes.CDLL(str(library)).emulate
        self.turn = 1
        self.loaded: list[tuple[str, list[int]]] = []

    def architecture(self) -> tuple[str, int]:
        return "host", 0

    def current(self) -> Any:
        return nullcontext()

    def load(self, code: bytes, function: str) -> int:
        self.loaded.append((function, list(code)))
        return len(self.loaded)

    def launch(self, function: int, groups: int, threads: int, arguments: Sequence[bytes], stream: int) -> None:
        assert threads == kernels.STATE_BLOCK
        name, types = self.loaded[function - 1]
        values = [ctypes.create_string_buffer(value, len(value)) for value in arguments]
        places = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        diverged = self._emulate(
            name.encode(), (ctypes.c_int * 7)(*types), ctypes.c_int(groups), places, ctypes.c_int(self.turn)
        )
        assert not diverged, f"{name}: threads of a group wait at different barriers"


class EmulatedCompiler(Compiler):
    """Compiles nothing: the code of a kernel is its types, which the emulator reads at run time."""

    def __init__(self) -> None:
        super().__init__("")

    def target(self, architecture: str) -> tuple[str, ...]:
        return ()

    def compile(self, kernel: Kernel, architecture: str, *, changes: Sequence[str] = ()) -> bytes:
        return bytes(int(number) for _, value in kernel.defines for number in re.findall(r"\d+", value))


class Emulated:
    """The calls of ``kernels``, run by an emulated device."""

    def __init__(self, library: Path) -> None:
        self.driver = EmulatedDriver(library)
        self.code = DeviceCode(self.driver, EmulatedCompiler())
        self._uploaded: list[np.ndarray] = []

    def _upload(self, array: np.ndarray) -> int:
        self._uploaded = [array.copy()]
        return self._uploaded[0].ctypes.data

    def _call(self, method: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, threads: int, **kind: Any) -> None:
            method(*args, **kind, upload=self._upload, stream=0)

        return call

    def sum_squares(self, spans: np.ndarray, dtype: Any, bins: np.ndarray, *, threads: int) -> None:
        self.code.sum_squares(spans, dtype, bins.ctypes.data, upload=self._upload, stream=0)

    def reduce(self, src, n_sources, src_type, dst, *, divisor, add, threads) -> None:
        at = src.ctypes.data, n_sources, src_type, dst.ctypes.data, dst.size
        self.code.reduce(*at, divisor=divisor, add=add, stream=0)

    @contextmanager
    def in_place_of_kernels(self, turn: int = 1) -> Iterator[None]:
        """The functions of ``kernels`` are the device's meanwhile."""
        self.driver.turn = turn
        with pytest.MonkeyPatch.context() as patch:
            for name in ("update", "accumulate", "cast"):
                patch.setattr(kernels, name, self._call(getattr(self.code, name)))
            patch.setattr(kernels, "sum_squares", self.sum_squares)
            patch.setattr(kernels, "reduce", self.reduce)
            yield


TURNS = (1, 255, 77, 131)
"""Orders of threads: upward, downward, and two that mix them."""
