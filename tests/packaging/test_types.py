"""A type checker sees the settings of ``wrap`` in a checkout that is installed as editable."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, SupportsFloat, get_type_hints

import pytest

from frontends.jax.optax_bridge.words import WORDS, JaxSettings
from frontends.torch.training.groups import OptimizerSettings
from frontends.torch.training.rule_words import OPTIONS
from offload_core import OffloadConfig, OffloadSettings
from offload_core.config.options import FIELDS
from tests.support.processes import ROOT

CONVERTED = {
    "lr": SupportsFloat | Callable[[Any], Any],
    "betas": tuple[Any, Any] | list[Any] | Callable[[Any], tuple[float, float]],
    "leaf_modules": tuple[str, ...] | list[str],
    "muon_params": tuple[str, ...] | list[str] | None,
    "nvme_path": str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None,
    "ns_coefficients": tuple[float, float, float] | list[float],
    **{name: Any for name in FIELDS if name.endswith("_dtype")},
}
"""The types that ``wrap`` converts to those of the fields: numbers and element types may be of any library."""


def test_settings_are_the_fields():
    """Of ``OffloadConfig``, in offload_core/config/settings.py."""
    fields = {name: hint for name, hint in get_type_hints(OffloadConfig).items() if name in FIELDS}
    assert get_type_hints(OffloadSettings) == fields | CONVERTED
    assert OffloadSettings.__required_keys__ == frozenset()


def test_front_ends_take_the_same_settings_and_words_of_their_libraries():
    assert {*get_type_hints(JaxSettings)} == {*FIELDS, *WORDS}
    assert {*get_type_hints(OptimizerSettings)} == {*FIELDS, *OPTIONS} - {"lr"}


USER = """
import frontends.jax, frontends.torch
from frontends.torch import OffloadedAdamW, wrap
from typing import Any, Unpack
from offload_core import OffloadConfig, OffloadSettings

def of(model: Any, **settings: Unpack[OffloadSettings]) -> frontends.torch.Engine:
    wrap(model, gradient_acumulation=2)
    wrap(model, gradient_accumulation_steps="2")
    frontends.jax.wrap(model, gradient_acumulation=2)
    frontends.jax.wrap(model, lr=1e-3, learning_rate=1e-3, b1=0.9)
    OffloadedAdamW(model, 1e-3, weigth_decay=0.1)
    OffloadedAdamW(model, 1e-3, weight_decay=0.1, fused=True, betas=[0.9, 0.95])
    reveal_type(OffloadConfig().stage)
    return wrap(model, {"stage": 3}, **settings)
"""
FOUND = """
8: error: Unexpected keyword argument "gradient_acumulation" for "wrap"
9: error: Argument "gradient_accumulation_steps" to "wrap" has incompatible type "str"
10: error: Unexpected keyword argument "gradient_acumulation" for "wrap"
12: error: Unexpected keyword argument "weigth_decay" for "OffloadedAdamW"
14: note: Revealed type is "int"
"""


@pytest.fixture
def editable(tmp_path):
    """A Python in whose packages this checkout is editable, as ``pip install -e .`` makes it, and nothing else is."""
    project, home = tmp_path / "project", tmp_path / "home"
    project.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project / name)
    for name in ("offload_core", "frontends"):
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("_offload*", "__pycache__"))
    made = "import setuptools.build_meta as backend; backend.build_editable('wheels')"
    subprocess.run([sys.executable, "-c", made], cwd=project, check=True, capture_output=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    (packages,) = home.glob("lib/python*/site-packages")
    (wheel,) = project.glob("wheels/*.whl")
    shutil.unpack_archive(wheel, packages, "zip")
    return home / "bin" / "python"


@pytest.mark.integration
def test_a_type_checker_finds_a_misspelt_setting(editable, tmp_path):
    pytest.importorskip("mypy")
    user = tmp_path / "user.py"
    user.write_text(USER)
    options = ["--config-file=", "--cache-dir", str(tmp_path / "cache"), "--no-error-summary", "--hide-error-codes"]
    command = [sys.executable, "-m", "mypy", *options, "--python-executable", str(editable), user.name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    lines = [line.removeprefix("user.py:") for line in done.stdout.splitlines() if "defined in" not in line]
    lines = [line.partition(";")[0] for line in lines]  # what follows is "did you mean"
    assert "\n".join(lines) == FOUND.strip(), done.stdout + done.stderr
