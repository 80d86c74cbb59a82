"""Builds the C sources of the tests. Importing it skips the test module where gcc is not installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

if not shutil.which("gcc"):
    pytest.skip("gcc is not installed", allow_module_level=True)

from offload_core.native._ffi_build import COMPILE_ARGS

C_SRC = Path(__file__).resolve().parents[2] / "c_src"
KERNELS = tuple(sorted(C_SRC.glob("*.c")))
INLINE = "static inline __attribute__((always_inline))"


def run(*command: str | Path, **options) -> str:
    """Run a program to its end and return what it printed; a failure shows the command and all output."""
    words = list(map(str, command))
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options)
    assert done.returncode == 0, f"{' '.join(words)} gave {done.returncode}:\n{done.stdout}"
    return done.stdout


def not_inlined(folder: Path) -> Path:
    """Copy the sources into a folder, and let the compiler inline nothing there if it does not optimise.

    Each function is compiled once then, and not for each of the hundreds of pairs of element types that the vector
    kernels have: an instruction set takes 0.3 s, not 4. Bits depend neither on this nor on the optimisation.
    """
    texts = {path.relative_to(C_SRC): path.read_text() for path in C_SRC.rglob("*.[ch]")}
    assert any(INLINE in text for text in texts.values())
    (folder / "tests").mkdir()
    for path, text in texts.items():
        (folder / path).write_text(text.replace(INLINE, "static inline"))
    return folder


def compile_objects(sources, folder: Path, *flags: str, compiler: str = "gcc") -> dict[str, Path]:
    """Compile side by side with the flags of the package and these; return the object of each source by name."""
    objects = {source.name: folder / f"{source.stem}.o" for source in sources}
    commands = [[compiler, *COMPILE_ARGS, *flags, "-c", str(s), "-o", str(objects[s.name])] for s in sources]
    compilers = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for c in commands]
    outputs = [process.communicate()[0] for process in compilers]
    for process, command, output in zip(compilers, commands, outputs, strict=True):
        assert process.returncode == 0, f"{' '.join(command)}:\n{output}"
    return objects
