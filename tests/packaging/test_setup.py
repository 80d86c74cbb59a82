"""The set-up of a checkout: what is missing is said in a line, and a .venv that cannot be used is made anew."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.support.processes import ROOT

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


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


def made(folder, *arguments):
    """What make would do there."""
    shutil.copy(ROOT / "Makefile", folder)
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHON", "MAKEFLAGS", "MFLAGS")}
    command = ["make", "--dry-run", "train", *arguments]
    for name in ("pyproject.toml", "constraints.txt", "setup.py"):
        (folder / name).touch()
    build = folder / "offload_core" / "native" / "_ffi_build.py"
    build.parent.mkdir(parents=True)
    build.touch()
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@needs_make
def test_a_python_that_does_not_run_is_named_and_nothing_is_removed(tmp_path):
    (tmp_path / ".venv").mkdir()
    done = made(tmp_path, "PYTHON=python3.99")
    assert done.returncode == 2
    assert "python3.99 does not run here: install Python 3.11 or newer, or name yours" in done.stderr
    assert (tmp_path / ".venv").is_dir()


@needs_make
def test_a_framework_that_there_is_not_is_named(tmp_path):
    done = made(tmp_path, f"PYTHON={sys.executable}", "FRONTEND=tensorflow")
    assert done.returncode == 2
    assert "FRONTEND=tensorflow, expected torch or jax" in done.stderr


@needs_make
def test_a_half_made_environment_is_made_anew(tmp_path):
    """As after a set-up without python3-venv."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / ".has-torch").touch()
    done = made(tmp_path, f"PYTHON={sys.executable}")
    assert done.returncode == 0, done.stderr
    assert ".venv is half-made, or of another Python" in done.stdout
    assert "-m venv" in done.stdout
    assert not (tmp_path / ".venv").exists()


@needs_make
@pytest.mark.parametrize(("asked", "stays"), [(["PYTHON={}"], True), ([], True), (["PYTHON=./other"], False)])
def test_an_environment_of_another_python_than_asked_for_is_made_anew(tmp_path, asked, stays):
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    other = tmp_path / "other"
    other.write_text("#!/bin/sh\necho 3.99\n")
    other.chmod(0o755)
    done = made(tmp_path, *(word.format(sys.executable) for word in asked))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / ".venv").exists() == stays
