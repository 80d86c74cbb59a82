"""Builds and runs ``c_src/tests/test_kernels.c``: plainly, under the sanitizers, and for AArch64 in an emulator."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

if not shutil.which("gcc"):
    pytest.skip("gcc is not installed", allow_module_level=True)

from offload_core._ffi_build import COMPILE_ARGS  # exits where there is no compiler

C_SRC = Path(__file__).resolve().parent.parent / "c_src"
PROGRAM = C_SRC / "tests" / "test_kernels.c"
WARNINGS = ["-Wall", "-Wextra", "-Werror"]


def build_and_run(folder: Path, *, compiler="gcc", flags=(), runner=(), sections=(), **environment: str) -> None:
    program = folder / "test_kernels"
    sources = [str(PROGRAM), *map(str, sorted(C_SRC.glob("*.c")))]
    command = [compiler, *COMPILE_ARGS, *WARNINGS, *flags, *sources, "-o", str(program), "-lm"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, f"{' '.join(command)}\n{built.stderr}"
    command = [*runner, str(program), *sections]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    assert ran.returncode == 0, f"{' '.join(command)}\n{ran.stdout}{ran.stderr}"
    assert ran.stdout.endswith("checks passed\n")


def test_every_kernel_equals_the_scalar_oracle(tmp_path):
    build_and_run(tmp_path)


@pytest.mark.skipif(not shutil.which("clang"), reason="clang is not installed")
def test_another_compiler_gives_the_same_bits(tmp_path):
    build_and_run(tmp_path, compiler="clang")


def test_no_kernel_strays_from_its_memory_or_from_defined_behaviour(tmp_path):
    flags = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    build_and_run(tmp_path, flags=flags)


def test_the_pool_has_no_data_race(tmp_path):
    build_and_run(
        tmp_path,
        flags=["-O1", "-g", "-fsanitize=thread"],
        runner=["setarch", "-R"] if shutil.which("setarch") else [],  # its shadow memory wants fixed addresses
        sections=["pool", "fork"],
        TSAN_OPTIONS="halt_on_error=1 die_after_fork=0",
    )


@pytest.mark.skipif(not shutil.which("aarch64-linux-gnu-gcc"), reason="gcc-aarch64-linux-gnu is not installed")
@pytest.mark.skipif(not shutil.which("qemu-aarch64"), reason="qemu-user is not installed")
def test_neon_equals_the_scalar_oracle(tmp_path):
    build_and_run(
        tmp_path,
        compiler="aarch64-linux-gnu-gcc",
        flags=["-static"],
        runner=["qemu-aarch64"],
        # no "stream": NEON has no streaming stores; no "fork": the emulator loses track of a threaded child
        sections=["adam", "cast", "accumulate", "norm", "entry", "pool"],
    )
