"""Builds and runs the programs of ``c_src/tests``: plainly, under the sanitizers, and for AArch64 in an emulator; and
builds the extension for other systems."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from offload_core.dtypes import BY_NUMPY
from offload_core.native import kernels
from offload_core.native._ffi_build import COMPILE_ARGS, LINK_ARGS, ffibuilder
from tests.support import pinned_bits
from tests.support.c_build import C_SRC, KERNELS, compile_objects, not_inlined, run

PROGRAM = C_SRC / "tests" / "test_kernels.c"
REPLAY = C_SRC / "tests" / "replay.c"
WARNINGS = ("-Wall", "-Wextra", "-Werror")
# Neither the sanitizers nor the emulator keep their own locks sound in the child of a process with threads.
ALL_BUT_FORK = ("isa", "update", "formats", "cast", "accumulate", "reduce", "norm", "entry", "stream", "pool", "bind")


ORACLE = ("test_kernels.c", "kernels_scalar.c")
"""What the vector kernels are compared with; most of the time of the program goes there."""


def check(
    folder: Path, *flags: str, sources=C_SRC, compiler="gcc", oracle=(), runner=(), sections=(), **environment: str
) -> None:
    """Build the program with the flags of the package and these, and run these sections of it (all if none).

    Args:
        oracle: more flags, of :data:`ORACLE` alone.
    """
    objects = {}
    for of_oracle, more in ((False, ()), (True, oracle)):
        files = [file for file in (PROGRAM, *KERNELS) if (file.name in ORACLE) == of_oracle]
        files = [sources / file.relative_to(C_SRC) for file in files]
        objects |= compile_objects(files, folder, *WARNINGS, *flags, *more, compiler=compiler)
    program = folder / "test_kernels"
    run(compiler, "-pthread", *flags, *objects.values(), "-o", program, "-lm")
    output = run(*runner, program, *sections, env={**os.environ, **environment})
    assert output.endswith("checks passed\n")


@pytest.mark.long("compiles C")
def test_calls_are_checked_and_shared_among_threads_and_the_instruction_set_is_chosen(tmp_path):
    """The other files of this folder call the kernels from Python and do not see these parts."""
    sections = ("--few", "isa", "entry", "fork", "pool", "bind")
    check(tmp_path, "-O0", sources=not_inlined(tmp_path), oracle=["-O1"], sections=sections)


@pytest.mark.slow
def test_every_kernel_equals_the_scalar_oracle(tmp_path):
    check(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("clang"), reason="clang is not installed")
def test_another_compiler_gives_the_same_bits(tmp_path):
    check(tmp_path, compiler="clang")


@pytest.mark.slow
def test_no_kernel_strays_from_its_memory_or_from_defined_behaviour(tmp_path):
    flags = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    check(tmp_path, *flags, sources=not_inlined(tmp_path), sections=ALL_BUT_FORK)


@pytest.mark.slow
def test_neither_the_pool_nor_the_choice_of_instruction_set_has_a_data_race(tmp_path):
    # ThreadSanitizer's shadow memory wants addresses that are not randomised.
    runner = ("setarch", "-R") if shutil.which("setarch") else ()
    flags, sections = ("-O1", "-g", "-fsanitize=thread"), ("isa", "pool", "bind")
    sources = not_inlined(tmp_path)
    check(tmp_path, *flags, sources=sources, runner=runner, sections=sections, TSAN_OPTIONS="halt_on_error=1")


@pytest.fixture(scope="module")
def aarch64(tmp_path_factory):
    """Builds a program for AArch64 Linux; returns the command that runs it."""
    for tool, package in (("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu"), ("qemu-aarch64", "qemu-user")):
        if not shutil.which(tool):
            pytest.skip(f"{package} is not installed")
    folder, compiler = tmp_path_factory.mktemp("aarch64"), "aarch64-linux-gnu-gcc"
    objects = compile_objects((PROGRAM, REPLAY, *KERNELS), folder, *WARNINGS, compiler=compiler)

    def build(source: Path) -> list[str]:
        program = folder / source.stem
        kernels = [objects[kernel.name] for kernel in KERNELS]
        run(compiler, "-static", "-pthread", objects[source.name], *kernels, "-o", program, "-lm")
        return ["qemu-aarch64", str(program)]

    return build


@pytest.mark.slow
def test_neon_equals_the_scalar_oracle(aarch64):
    sections = [name for name in ALL_BUT_FORK if name != "stream"]  # NEON has no streaming stores
    assert run(*aarch64(PROGRAM), *sections).endswith("checks passed\n")


@pytest.mark.slow
def test_updates_have_the_bits_of_this_machine_on_aarch64(aarch64):
    given, expected = [], []
    for kind, state, scalars in pinned_bits.cases():
        dtype, grad_dtype = kind["param_dtype"], BY_NUMPY[state.grad.dtype]
        code, itemsize = (kernels.lib.OC_NO_PARAM, 0) if dtype is None else (dtype.code, dtype.itemsize)
        numel = state.master.size
        given += [
            np.int32([grad_dtype.code, code, kernels.RULES[kind["rule"]], 0, 0, 0, 0]),
            np.int64([len(scalars), numel, numel * grad_dtype.itemsize, numel * itemsize]),
            *(*scalars, state.grad, state.master, *state.moments),
        ]
        after = pinned_bits.after_steps(kind, state, scalars)
        expected += [after.master, *after.moments, *([] if dtype is None else [after.param])]
    done = subprocess.run(aarch64(REPLAY), input=b"".join(x.tobytes() for x in given), capture_output=True, check=True)
    assert done.stdout == b"".join(x.tobytes() for x in expected)


@pytest.mark.slow
def test_the_extension_builds_for_macos(tmp_path):
    pytest.importorskip("ziglang", reason="ziglang is not installed: it is of the extra `package`")
    wrapper, extension = tmp_path / "_offload.c", tmp_path / "_offload.abi3.so"
    ffibuilder.emit_c_code(str(wrapper))
    includes = [f"-I{C_SRC}", f"-I{sysconfig.get_path('include')}"]  # Python's are the same but for pyconfig.h
    link = ["-shared", "-undefined", "dynamic_lookup", *LINK_ARGS]
    flags = [*COMPILE_ARGS, "-O1", "-Werror=implicit-function-declaration", "-Werror=incompatible-pointer-types"]
    compiler = [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-macos"]
    run(*compiler, *flags, *includes, wrapper, *KERNELS, *link, "-o", extension)
    built = extension.read_bytes()
    assert built.startswith(b"\xcf\xfa\xed\xfe")  # Mach-O, 64 bits
    for symbol in (b"_PyInit__offload", b"_PyImport_ImportModule", b"_pthread_create"):
        assert symbol in built, symbol
