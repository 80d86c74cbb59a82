"""Uses a wheel as somebody does who has just installed it: in an empty environment, without a compiler.

    python tests/packaging/first_use.py dist/*.whl [dist/*.tar.gz]

installs the wheel with torch and jax, runs the first block of README.md for each of them, and ``python -m offload_core
prove --quick``. With a source distribution it also checks that pip, which cannot compile it there, says what is
missing. It needs the standard library and pip's index alone. Exit 1 at the first step that fails.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMPILERS = ("cc", "gcc", "clang", "c++", "g++")
TORCH_WITHOUT_CUDA = "https://download.pytorch.org/whl/cpu"
NO_COMPILER = "offload-core needs a C compiler to build its kernels, and found none"
"""The words of setup.py."""
_BLOCK = re.compile(r"^```python\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


def readme_block(front_end: str, readme: Path = ROOT / "README.md") -> str:
    """Return the first block of Python in README.md that imports this front end."""
    for block in _BLOCK.findall(readme.read_text()):
        if f"from frontends.{front_end} import" in block:
            return str(block)
    raise SystemExit(f"{readme}: no block of Python imports frontends.{front_end}; expected one")


def without_compiler(folder: Path) -> dict[str, str]:
    """Return the variables of a user whose PATH is the environment in ``folder`` alone."""
    mine = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX", "VIRTUAL_ENV")}
    variables = {name: value for name, value in mine.items() if not name.startswith("PYTHON")}
    variables["PATH"] = str(folder / "bin")
    found = [name for name in COMPILERS if shutil.which(name, path=variables["PATH"])]
    assert not found, f"{variables['PATH']} has {found}, expected no compiler"
    return variables


class Environment:
    """An empty environment of this Python, and a folder beside it in which programs run."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder / "env", with_pip=True)
        self._python = folder / "env/bin/python"
        self._variables: Mapping[str, str] = without_compiler(folder / "env")
        self._elsewhere = folder / "elsewhere"
        self._elsewhere.mkdir()

    def run(self, what: str, *arguments: str, fails_with: str | None = None, may_fail: bool = False) -> None:
        """Run Python with these arguments.

        Args:
            what: the name of this step.
            fails_with: words of the error that is expected; None: it is expected to succeed.
            may_fail: True if another step makes up for a failure.
        """
        start = time.monotonic()
        command = [str(self._python), *arguments]
        done = subprocess.run(
            command, cwd=self._elsewhere, env=self._variables, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        as_expected = done.returncode == 0 if fails_with is None else done.returncode and fails_with in done.stdout
        print(f"{what}: {'as expected' if as_expected else 'not as expected'}, {time.monotonic() - start:.0f} s")
        if not (as_expected or may_fail):
            expected = "0" if fails_with is None else f"an error with {fails_with!r}"
            raise SystemExit(f"{done.stdout}\n{' '.join(command)}: exit {done.returncode}, expected {expected}")
        print("\n".join(f"    {line}" for line in done.stdout.splitlines()[-12:]), flush=True)

    def install(self, what: str, *arguments: str, **expected: str | bool) -> None:
        constraints = ("--constraint", str(ROOT / "constraints.txt"))
        self.run(what, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *constraints, *arguments,
                 **expected)  # type: ignore[arg-type]  # fmt: skip


def first_use(wheel: Path, sdist: Path | None, folder: Path, front_ends: Sequence[str]) -> None:
    environment = Environment(folder)
    if "torch" in front_ends and sys.platform == "linux":
        index = ("--no-deps", "--retries", "0", "--index-url", TORCH_WITHOUT_CUDA)
        environment.install("torch without CUDA, 200 MB in place of 3 GB", *index, "torch", may_fail=True)
    environment.install("the wheel, and its requirements", f"{wheel}[{','.join(front_ends)}]")
    for front_end in front_ends:
        environment.run(f"README.md, the block of {front_end}", "-W", "error", "-c", readme_block(front_end))
    environment.run("python -m offload_core prove --quick", "-m", "offload_core", "prove", "--quick")
    if sdist is not None:
        environment.install(
            "the source distribution, without a compiler", "--force-reinstall", "--no-deps", str(sdist),
            fails_with=NO_COMPILER,
        )  # fmt: skip
        environment.run("the wheel is still there", "-m", "offload_core", "info")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("sdist", type=Path, nargs="?")
    parser.add_argument("--front-ends", nargs="+", default=["torch", "jax"], choices=["torch", "jax"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sdist = None if args.sdist is None else args.sdist.resolve()
        first_use(args.wheel.resolve(), sdist, Path(folder), args.front_ends)


if __name__ == "__main__":
    main()
