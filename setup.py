"""The C extension; everything else is in pyproject.toml."""

from setuptools import setup

setup(
    cffi_modules=["offload_core/native/_ffi_build.py:ffibuilder"],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
