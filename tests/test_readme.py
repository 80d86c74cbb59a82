"""The README's examples run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_there_are_examples_for_both_frameworks():
    assert {"torch", "jax"} <= {word for code in EXAMPLES for word in re.findall(r"frontends\.(\w+)", code)}


@pytest.mark.parametrize("code", EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_runs_in_a_fresh_interpreter(code, tmp_path):
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_the_readme_names_the_two_commands_and_its_links_lead_somewhere():
    assert "make train" in README[:800]
    assert "make test" in README[:800]
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
