"""Builds ``offload_core.native._offload`` (cffi, API mode, stable ABI) from ``c_src/``. Run by setuptools."""

import os
import shutil
import sys
from glob import glob
from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parents[2]
# -ffp-contract=off: the compiler makes an FMA only where the source says fma (docs/numerics.md).
# -g0: Python's own flags have -g, which doubles the compiler's time.
COMPILE_ARGS = ["-std=c11", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-pthread", "-g0"]
LINK_ARGS = ["-pthread", "-lm"]

NO_COMPILER = """\
offload-core needs a C compiler to build its kernels, and found none (looked for: {compiler}).
Install one (Debian, Ubuntu: apt install gcc python3-dev; Fedora: dnf install gcc python3-devel;
macOS: xcode-select --install), or name yours: CC=/path/to/cc pip install ..."""


def require_compiler() -> None:
    """Raise SystemExit, with the packages to install, if there is no C compiler."""
    compiler = os.environ.get("CC", "").split() or ["cc", "gcc", "clang"]
    candidates = compiler[:1] if os.environ.get("CC") else compiler
    if not any(shutil.which(name) for name in candidates):
        raise SystemExit(NO_COMPILER.format(compiler=", ".join(candidates)))
    if not os.environ.get("CC") and not shutil.which("gcc"):
        os.environ["CC"] = next(name for name in candidates if shutil.which(name))


if not {"egg_info", "dist_info", "sdist"} & set(sys.argv):
    require_compiler()

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
