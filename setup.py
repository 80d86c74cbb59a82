"""The C extension; everything else is in pyproject.toml."""

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

from setuptools import setup
from setuptools.command.build_ext import build_ext

JOBS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


NO_COMPILER = """\
offload-core needs a C compiler to build its kernels, and found none (looked for: {compilers}).
Install one (Debian, Ubuntu: apt install gcc python3-dev; Fedora: dnf install gcc python3-devel;
macOS: xcode-select --install), or name yours: CC=/path/to/cc pip install ..."""


def require_compiler():
    """Choose a C compiler. Raise SystemExit, with the packages to install, if there is none."""
    named = os.environ.get("CC", "").split()[:1]
    compilers = named or ["cc", "gcc", "clang"]
    found = [name for name in compilers if shutil.which(name)]
    if not found:
        raise SystemExit(NO_COMPILER.format(compilers=", ".join(compilers)))
    if not named and not shutil.which("gcc"):
        os.environ["CC"] = found[0]


class BuildKernels(build_ext):
    """Compiles the sources side by side, because those of the vector kernels take seconds each. Prints a line for each
    file as it ends: pip shows these with ``-v`` alone, and make shows nothing else of pip's words."""

    def run(self):
        require_compiler()
        super().run()

    def build_extension(self, ext):
        compile_in_turn = self.compiler.compile

        def compile_side_by_side(sources, **options):
            def compile_one(source):
                start = time.monotonic()
                made = compile_in_turn([source], **options)
                print(f"{os.path.basename(source)}: {time.monotonic() - start:.0f} s", flush=True)
                return made

            with ThreadPoolExecutor(JOBS) as pool:
                return [path for paths in pool.map(compile_one, sources) for path in paths]

        self.compiler.compile = compile_side_by_side
        super().build_extension(ext)


setup(
    cffi_modules=["offload_core/native/_ffi_build.py:ffibuilder"],
    cmdclass={"build_ext": BuildKernels},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
