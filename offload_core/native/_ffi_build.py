"""Builds ``offload_core.native._offload`` (cffi, API mode, stable ABI) from ``c_src/``. Run by setuptools."""

import os
from glob import glob
from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parents[2]
# -ffp-contract=off: the compiler makes an FMA only where the source says fma (docs/numerics.md).
# -g0: Python's own flags have -g, which doubles the compiler's time.
COMPILE_ARGS = ["-std=c11", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-pthread", "-g0"]
LINK_ARGS = ["-pthread", "-lm"]

ffibuilder = FFI()
ffibuilder.cdef((ROOT / "c_src" / "api.h").read_text())
ffibuilder.set_source(
    "offload_core.native._offload",
    '#include "offload_core.h"',
    sources=sorted(os.path.relpath(path) for path in glob(str(ROOT / "c_src" / "*.c"))),
    depends=sorted(os.path.relpath(path) for path in glob(str(ROOT / "c_src" / "*.h"))),
    include_dirs=[os.path.relpath(ROOT / "c_src")],
    extra_compile_args=COMPILE_ARGS,
    extra_link_args=LINK_ARGS,
)
