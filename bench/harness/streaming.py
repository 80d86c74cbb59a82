"""The streaming limit of an update: a loop that reads and writes the same arrays, without arithmetic."""

import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from cffi import FFI

_CDEF = """
uint32_t stream(void **arrays, const int64_t *block_bytes, const int *modes, int count, int64_t blocks, int64_t *next,
                uint32_t zero);
"""
BLOCK = 4096
"""Elements that the loop takes of one array before it goes on to the next; less is slower. The rest is left out."""
READ, UPDATE, WRITE = range(3)
"""Modes, as in ``stream.c``. An array that is updated is read and written."""

Traffic = Sequence[tuple[np.ndarray, int]]
"""The arrays that a call passes over, each with its mode."""


def bytes_a_parameter(traffic: Traffic, n: int) -> float:
    """Return the bytes that are read and written for each of n parameters."""
    return sum(array.nbytes * (2 if mode == UPDATE else 1) for array, mode in traffic) / n


@cache
def _compiled() -> tuple[FFI, Any]:
    """Compile ``stream.c`` for this machine."""
    ffi = FFI()
    ffi.cdef(_CDEF)
    target = Path(tempfile.mkdtemp()) / "stream.so"
    source = Path(__file__).with_name("stream.c")
    subprocess.run(["cc", "-O3", "-march=native", "-shared", "-fPIC", str(source), "-o", str(target)], check=True)
    return ffi, ffi.dlopen(str(target))


def streaming(traffic: Traffic, n: int, threads: int) -> Callable[[], None]:
    """Return a pass over the arrays of n parameters. Arrays that are read or updated keep their values."""
    ffi, lib = _compiled()
    pool = ThreadPoolExecutor(threads)
    arrays = ffi.new("void *[]", [ffi.cast("void *", array.ctypes.data) for array, _ in traffic])
    block_bytes = ffi.new("int64_t[]", [array.nbytes * BLOCK // n for array, _ in traffic])
    modes = ffi.new("int[]", [mode for _, mode in traffic])
    blocks = n // BLOCK

    def run() -> None:
        following = ffi.new("int64_t *")
        arguments = (arrays, block_bytes, modes, len(traffic), blocks, following, 0)
        list(pool.map(lambda _: lib.stream(*arguments), range(threads)))

    return run
