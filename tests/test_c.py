"""Builds and runs ``c_src/tests/test_kernels.c``: plainly, under the sanitizers, and for AArch64 in an emulator."""

import os
import shutil
from pathlib import Path

import pytest
from c_build import C_SRC, KERNELS, compile_objects, run

pytestmark = pytest.mark.slow

PROGRAM = C_SRC / "tests" / "test_kernels.c"
WARNINGS = ("-Wall", "-Wextra", "-Werror")
# Neither the sanitizers nor the emulator keep their own locks sound in the child of a process with threads.
ALL_BUT_FORK = ("adam", "cast", "accumulate", "reduce", "norm", "entry", "stream", "pool")


def check(folder: Path, *flags: str, compiler="gcc", runner=(), sections=(), **environment: str) -> None:
    """Build the program with the flags of the package and these, and run these sections of it (all if none)."""
    objects = compile_objects((PROGRAM, *KERNELS), folder, *WARNINGS, *flags, compiler=compiler)
    program = folder / "test_kernels"
    run(compiler, "-pthread", *flags, *objects.values(), "-o", program, "-lm")
    output = run(*runner, program, *sections, env={**os.environ, **environment})
    assert output.endswith("checks passed\n")


def test_every_kernel_equals_the_scalar_oracle(tmp_path):
    check(tmp_path)


@pytest.mark.skipif(not shutil.which("clang"), reason="clang is not installed")
def test_another_compiler_gives_the_same_bits(tmp_path):
    check(tmp_path, compiler="clang")


def test_no_kernel_strays_from_its_memory_or_from_defined_behaviour(tmp_path):
    flags = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    check(tmp_path, *flags, sections=ALL_BUT_FORK)


def test_the_pool_has_no_data_race(tmp_path):
    # ThreadSanitizer's shadow memory wants addresses that are not randomised.
    runner = ("setarch", "-R") if shutil.which("setarch") else ()
    check(tmp_path, "-O1", "-g", "-fsanitize=thread", runner=runner, sections=["pool"], TSAN_OPTIONS="halt_on_error=1")


@pytest.mark.skipif(not shutil.which("aarch64-linux-gnu-gcc"), reason="gcc-aarch64-linux-gnu is not installed")
@pytest.mark.skipif(not shutil.which("qemu-aarch64"), reason="qemu-user is not installed")
def test_neon_equals_the_scalar_oracle(tmp_path):
    sections = [name for name in ALL_BUT_FORK if name != "stream"]  # NEON has no streaming stores
    check(tmp_path, "-static", compiler="aarch64-linux-gnu-gcc", runner=["qemu-aarch64"], sections=sections)
