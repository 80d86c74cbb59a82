"""Builds the C sources of the tests. Importing it skips the test module where gcc is not installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

if not shutil.which("gcc"):
    pytest.skip("gcc is not installed", allow_module_level=True)

from offload_core.native._ffi_build import COMPILE_ARGS  # exits where there is no compiler

C_SRC = Path(__file__).resolve().parents[2] / "c_src"
KERNELS = tuple(sorted(C_SRC.glob("*.c")))


def run(*command: str | Path, **options) -> str:
    """Run a program to its end and return what it printed; a failure shows the command and all output."""
    words = list(map(str, command))
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options)
    assert done.returncode == 0, f"{' '.join(words)} gave {done.returncode}:\n{done.stdout}"
    return done.stdout


def compile_objects(sources, folder: Path, *flags: str, compiler: str = "gcc") -> dict[str, Path]:
    """Compile side by side with the flags of the package and these; return the object of each source by name."""
    objects = {source.name: folder / f"{source.stem}.o" for source in sources}
    commands = [[compiler, *COMPILE_ARGS, *flags, "-c", str(s), "-o", str(objects[s.name])] for s in sources]
    compilers = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for c in commands]
    outputs = [process.communicate()[0] for process in compilers]
    for process, command, output in zip(compilers, commands, outputs, strict=True):
        assert process.returncode == 0, f"{' '.join(command)}:\n{output}"
    return objects
