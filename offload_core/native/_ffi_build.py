"""Builds ``offload_core.native._offload`` (cffi, API mode, stable ABI) from ``c_src/``. Run by setuptools."""

import os
from collections.abc import Iterator
from glob import glob
from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parents[2]
C_SRC = ROOT / "c_src"
# -ffp-contract=off: the compiler makes an FMA only where the source says fma (docs/numerics.md).
# -g0: Python's own flags have -g, which doubles the compiler's time.
COMPILE_ARGS = ["-std=c11", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-pthread", "-g0"]
LINK_ARGS = ["-pthread", "-lm"]


def device_text(folder: Path = C_SRC) -> str:
    """Return ``device.h`` with its headers in their places: one text, for a compiler that is given no files."""
    included: set[str] = set()

    def lines_of(name: str) -> Iterator[str]:
        if name in included:
            return
        included.add(name)
        for line in (folder / name).read_text().splitlines():
            if line.startswith('#include "'):
                yield from lines_of(line.split('"')[1])
            elif not line.startswith("#include <"):
                yield line

    return "\n".join(lines_of("device.h")) + "\n"


def c_string(text: str) -> str:
    """Return C's literal of a text, a line for a line."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return "\n".join(f'"{line}\\n"' for line in escaped.splitlines())


ffibuilder = FFI()
ffibuilder.cdef((C_SRC / "api.h").read_text())
ffibuilder.cdef("extern const char oc_device_text[];")
ffibuilder.set_source(
    "offload_core.native._offload",
    f'#include "offload_core.h"\nstatic const char oc_device_text[] =\n{c_string(device_text())};',
    sources=sorted(os.path.relpath(path) for path in glob(str(C_SRC / "*.c"))),
    depends=sorted(os.path.relpath(path) for path in glob(str(C_SRC / "*.h"))),
    include_dirs=[os.path.relpath(C_SRC)],
    extra_compile_args=COMPILE_ARGS,
    extra_link_args=LINK_ARGS,
)
