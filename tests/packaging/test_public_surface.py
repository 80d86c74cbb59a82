"""Names, signatures, defaults, bases of errors and options of commands are those that users know.

Where a change is meant, write ``public_surface.txt`` anew as ``public_surface.py`` says, and put it in the changelog.
"""

import difflib
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@pytest.mark.integration
def test_the_public_surface_is_as_users_know_it():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(HERE / "public_surface.py")]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    expected = (HERE / "public_surface.txt").read_text()
    difference = difflib.unified_diff(
        expected.splitlines(), found.stdout.splitlines(), "expected", "found", lineterm=""
    )
    assert found.stdout == expected, "the public surface has changed:\n" + "\n".join(difference)
