"""The set-up of a checkout: kernels are compiled once and side by side, what is missing is said in a line, and what is
half-made is made anew."""

import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from tests.support.processes import ROOT

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
processors = partial(getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1)), 0)
LIMIT = 120
"""Seconds after which a wait is given up."""
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name not in ("PYTHON", "CC", "MAKEFLAGS", "MFLAGS", "MAKELEVEL", "SYSTEM", "TMPDIR")
}
PYTHON_WITHOUT_PIP = f"""#!/bin/sh
case "$*" in
*"import pip"*) echo 3.11 ;;
*"-m pip"*) echo "$*" >>pips ;;
*) exec {sys.executable} "$@" ;;
esac
"""


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def checkout(tmp_path):
    """The files that set-up works with, and a source to compile."""
    build = "offload_core/native/_ffi_build.py"
    for name in ("Makefile", "pyproject.toml", "README.md", "constraints.txt", "setup.py", build, "c_src/api.h"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "c_src" / "offload_core.h").write_text('#include <stdint.h>\n#include "api.h"\n')
    (tmp_path / "c_src" / "device.h").write_text('#include "api.h"\n')
    (tmp_path / "c_src" / "a.c").write_text("int a;\n")
    return tmp_path


def without_programs(folder: Path) -> dict[str, str]:
    """An environment in which no program is found."""
    return {name: value for name, value in ENVIRONMENT.items() if name != "CC"} | {"PATH": str(folder)}


def make(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = ["make", *arguments]
    return subprocess.run(command, cwd=folder, env=ENVIRONMENT | environment, capture_output=True, text=True)


def test_sources_without_their_kernels_say_how_to_build_them(tmp_path):
    """They hide an installed package from a program that runs in the checkout."""
    shutil.copytree(
        ROOT / "offload_core", tmp_path / "offload_core", ignore=shutil.ignore_patterns("_offload*", "*.pyc")
    )
    done = subprocess.run(
        [sys.executable, "-c", "import offload_core.native.kernels"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1
    here = tmp_path / "offload_core" / "native"
    assert (
        f"ImportError: the C kernels are not built in {here}, whose sources Python found first: run pip install -e ."
        in (done.stderr)
    )


def test_without_a_compiler_the_build_says_what_to_install(checkout):
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=checkout, env=without_programs(checkout), capture_output=True, text=True)
    assert done.returncode == 1
    assert (
        "offload-core needs a C compiler to build its kernels, and found none (looked for: cc, gcc, clang)"
        in done.stderr
    )


def test_without_a_compiler_tests_of_c_are_skipped_by_name(tmp_path):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-rs",
        "-p",
        "no:cacheprovider",
        "tests/kernels/test_c.py",
    ]
    done = subprocess.run(command, cwd=ROOT, env=without_programs(tmp_path), capture_output=True, text=True)
    assert "gcc is not installed" in done.stdout, done.stdout
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED


@needs_make
def test_a_python_that_does_not_run_is_named_and_nothing_is_removed(checkout):
    (checkout / ".venv").mkdir()
    done = make(checkout, "--dry-run", "train", "PYTHON=python3.99")
    assert done.returncode == 2
    assert "python3.99 does not run here: install Python 3.11 or newer, or name yours" in done.stderr
    assert (checkout / ".venv").is_dir()


@needs_make
def test_a_framework_that_there_is_not_is_named(checkout):
    done = make(checkout, "--dry-run", "train", f"PYTHON={sys.executable}", "FRONTEND=tensorflow")
    assert done.returncode == 2
    assert "FRONTEND=tensorflow, expected torch or jax" in done.stderr


@needs_make
def test_a_half_made_environment_is_made_anew(checkout):
    """As after a set-up without python3-venv."""
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / ".has-torch").touch()
    done = make(checkout, "--dry-run", "train", f"PYTHON={sys.executable}")
    assert done.returncode == 0, done.stderr
    assert ".venv is half-made, or of another Python" in done.stdout
    assert "-m venv" in done.stdout
    assert not (checkout / ".venv").exists()


@needs_make
@pytest.mark.parametrize(("asked", "stays"), [(["PYTHON={}"], True), ([], True), (["PYTHON=./other"], False)])
def test_an_environment_of_another_python_than_asked_for_is_made_anew(checkout, asked, stays):
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").symlink_to(sys.executable)
    program(checkout / "other", "#!/bin/sh\necho 3.99\n")
    done = make(checkout, "--dry-run", "train", *(word.format(sys.executable) for word in asked))
    assert done.returncode == 0, done.stderr
    assert (checkout / ".venv").exists() == stays


@pytest.fixture
def pips(checkout):
    """Makes .venv's files with a pip that only writes its arguments down. Returns them, call by call."""
    program(checkout / ".venv" / "bin" / "python", PYTHON_WITHOUT_PIP)
    (checkout / ".venv" / ".python").touch()

    def calls(*targets: str, **environment: str) -> list[str]:
        for file in checkout.rglob("*"):
            os.utime(file, (0, 0))
        for changed in environment.pop("changed", "").split():
            (checkout / changed).touch()
        done = make(checkout, *(f".venv/{target}" for target in targets), **environment)
        written = checkout / "pips"
        lines = written.read_text().splitlines() if written.exists() else []
        written.unlink(missing_ok=True)
        return lines if done.returncode == 0 else [done.stdout]

    return calls


@needs_make
def test_kernels_are_compiled_once_for_all_sets_and_again_only_for_new_sources(pips):
    release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    sets = [".has-torch", ".has-test", ".has-lint"]
    first = pips(*sets)
    assert [call.endswith("-e .") for call in first] == [True] + [False] * (len(first) - 1)
    # The exact version: no other project of this name can be taken from an index.
    assert sum(f"]=={release}" in call for call in first) == sum("offload-core" in call for call in first) == 4
    assert pips(*sets) == []
    assert [call.endswith("-e .") for call in pips(*sets, changed="c_src/a.c")] == [True]
    assert len(pips(*sets, changed="pyproject.toml")) == 7  # two more for what tests take without its own needs
    assert not any(call.endswith("-e .") for call in pips(*sets, changed="constraints.txt"))


@needs_make
@pytest.mark.parametrize("status", [0, 1])
def test_make_names_each_compiled_file_and_repeats_pip_only_if_it_fails(checkout, status):
    said = rf"printf '%s\n' 'some words' '  a.c: 9 s' '  a.c:3: error in \t'; exit {status}"
    program(checkout / ".venv" / "bin" / "python", PYTHON_WITHOUT_PIP.replace('echo "$*" >>pips', said))
    (checkout / ".venv" / ".python").touch()
    done = make(checkout, ".venv/.built")
    first, second, *rest = done.stdout.splitlines()
    assert first.startswith("make: compiling the kernels: 1 files")
    assert second == "make: a.c: 9 s"
    if status:
        why = "make: the kernels could not be compiled (the reason is above)"
        assert rest == ["some words", r"a.c:3: error in \t", why]
    else:
        assert [line.startswith("make: compiled, in ") for line in rest] == [True]
    assert (done.returncode == 0) == (status == 0) == (checkout / ".venv" / ".built").exists()


@needs_make
def test_a_package_that_pip_was_interrupted_at_is_installed_again(checkout, pips):
    packages = checkout / ".venv" / "lib" / "python3.11" / "site-packages"
    for file in ("half-1.dist-info/METADATA", "whole-1.dist-info/METADATA", "whole-1.dist-info/INSTALLER"):
        (packages / file).parent.mkdir(parents=True, exist_ok=True)
        (packages / file).touch()
    assert pips(".built")
    assert [path.name for path in packages.iterdir()] == ["whole-1.dist-info"]


@needs_make
def test_a_full_folder_for_temporary_files_is_named(checkout, pips):
    program(checkout / "bin" / "df", "#!/bin/sh\necho header\necho tmpfs 20480 19000 2048 93% /tmp\n")
    (said,) = pips(".built", PATH=f"{checkout / 'bin'}:{os.environ['PATH']}", TMPDIR="/tmp")
    assert said == (
        "make: /tmp is full (2 MB free), and pip and the compiler write there: free 100 MB or more, or name another "
        "folder, as in make TMPDIR=/var/tmp .venv/.built\n"
    )


@pytest.fixture
def build(checkout):
    """Starts setup.py, whose compiler first runs this for ``c_src/a.c``, and ``z`` for ``c_src/z.c``."""
    started = []

    def start(first: str, z: str = "touch began", **options) -> subprocess.Popen:
        cases = f'*" c_src/a.c "*) {first} ;; *" c_src/z.c "*) {z} ;;'
        compiler = program(checkout / "cc", f'#!/bin/sh\ncase "$*" in {cases} esac\nexec gcc "$@"\n')
        command = [sys.executable, "setup.py", "build_ext", "--inplace"]
        options |= {"cwd": checkout, "env": ENVIRONMENT | {"CC": str(compiler)}, "text": True}
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        started.append(subprocess.Popen(command, start_new_session=True, **output, **options))
        return started[-1]

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


@needs_gcc
@pytest.mark.skipif(len(processors()) == 1, reason="this process has one processor")
def test_sources_are_compiled_side_by_side(checkout, build):
    """The first of these is done after the last has begun."""
    (checkout / "c_src" / "z.c").write_text("int z;\n")
    process = build("until [ -e began ]; do sleep 0.01; done")
    said, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, said
    assert [*(checkout / "offload_core" / "native").glob("_offload*.so")]


@needs_gcc
def test_a_line_names_each_file_while_others_are_compiled(checkout, build):
    """The compiler of z.c waits for the line of a.c, which nobody has before it is flushed."""
    (checkout / "c_src" / "z.c").write_text("int z;\n")
    process = build(":", z="until [ -e heard ]; do sleep 0.01; done")
    for line in process.stdout:
        if line.startswith("a.c: "):
            (checkout / "heard").touch()
            break
    said, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, said
    assert any(line.startswith("z.c: ") for line in said.splitlines()), said


@needs_gcc
def test_the_compiler_is_heard_on_one_processor(checkout, build):
    (checkout / "c_src" / "a.c").write_text("#error there is a mistake here\n")
    before = processors()
    if sys.platform == "linux":  # a child has the processors of the thread that starts it
        os.sched_setaffinity(0, {min(before)})
    try:
        process = build(":")
    finally:
        if sys.platform == "linux":
            os.sched_setaffinity(0, before)
    said, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 1
    assert "error: #error there is a mistake here" in said


@needs_gcc
def test_an_interrupted_compilation_leaves_no_process_and_no_kernels(checkout, build):
    process = build("touch began; exec sleep 1000")
    end = time.monotonic() + LIMIT
    while not (checkout / "began").exists():
        assert time.monotonic() < end, "the compiler has not begun"
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=LIMIT)  # to the end of what all of its processes write
    assert process.returncode != 0
    assert not [*(checkout / "offload_core" / "native").glob("_offload*.so")], said


@needs_make
@pytest.mark.slow
@pytest.mark.parametrize("system", ["", "1"])
def test_a_python_that_is_in_an_environment_lends_that_environments_packages(checkout, system):
    given = checkout / "given"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(given)], check=True, env=ENVIRONMENT)
    [packages] = given.glob("lib/python*/site-packages")
    (packages / "lent.py").write_text("value = 3\n")
    done = make(checkout, ".venv/.python", "BUILD_REQUIRES=pip", f"SYSTEM={system}", f"PYTHON={given}/bin/python")
    assert done.returncode == 0, done.stderr
    ask = [".venv/bin/python", "-c", "import lent, sys; print(lent.value, sys.prefix)"]
    found = subprocess.run(ask, cwd=checkout, capture_output=True, text=True, env=ENVIRONMENT)
    assert found.stdout.split() == (["3", str(checkout / ".venv")] if system else []), found.stderr


def test_the_environment_of_the_readme_is_ignored_by_git():
    lines = (ROOT / "README.md").read_text().splitlines()
    [made] = [line.split()[3] for line in lines if line.startswith("python3 -m venv")]
    assert f"/{made}/" in (ROOT / ".gitignore").read_text().splitlines()
