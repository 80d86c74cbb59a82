"""The C extension; everything else is in pyproject.toml."""

import os
from concurrent.futures import ThreadPoolExecutor

from setuptools import setup
from setuptools.command.build_ext import build_ext

JOBS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


class BuildKernels(build_ext):
    """Compiles the sources side by side, because those of the vector kernels take seconds each."""

    def build_extension(self, ext):
        compile_in_turn = self.compiler.compile

        def compile_side_by_side(sources, **options):
            with ThreadPoolExecutor(JOBS) as pool:
                made = pool.map(lambda source: compile_in_turn([source], **options), sources)
                return [path for paths in made for path in paths]

        self.compiler.compile = compile_side_by_side
        super().build_extension(ext)


setup(
    cffi_modules=["offload_core/native/_ffi_build.py:ffibuilder"],
    cmdclass={"build_ext": BuildKernels},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
