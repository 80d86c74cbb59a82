"""Whoever is killed while saving leaves the old checkpoint or the new one, whole."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PHASES = {"begin", "blocks", "part", "manifest", "rename", "latest", "rotation"}


def hits(folder, act, count, seed=0):
    """Return the number of times that each phase of a save was hit."""
    command = [sys.executable, ROOT / "tests/workers/checkpoint_crash_worker.py", act, folder, str(count), str(seed)]
    done = subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def in_memory():
    """A folder that needs no waiting for a disk: who is killed leaves there what it would leave on one."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)


def test_a_process_killed_at_any_third_of_its_system_calls(in_memory):
    assert set(hits(in_memory, "at_every_call", 3)) == PHASES


def test_a_process_killed_at_any_third_of_its_system_calls_while_a_tag_is_replaced(in_memory):
    assert set(hits(in_memory, "with_a_tag", 3)) == PHASES - {"rotation"}


def test_a_process_killed_at_random_moments(tmp_path):
    assert sum(hits(tmp_path, "at_random", 20).values()) == 20


def test_one_of_two_killed_at_any_fifteenth_of_its_system_calls(in_memory):
    found = hits(in_memory, "of_two", 15)  # how often one looks for the other's part is not known
    assert {phase.split()[-1] for phase in found} == {"0", "1"}


@pytest.mark.slow
class TestAll:
    def test_of_its_system_calls(self, tmp_path):
        assert set(hits(tmp_path, "at_every_call", 1)) == PHASES

    def test_of_its_system_calls_while_a_tag_is_replaced(self, in_memory):
        assert set(hits(in_memory, "with_a_tag", 1)) == PHASES - {"rotation"}

    def test_moments(self, in_memory):
        assert sum(hits(in_memory, "at_random", 200, 1).values()) == 200

    def test_of_the_system_calls_of_two(self, in_memory):
        found = hits(in_memory, "of_two", 1)
        assert {f"{phase} of 0" for phase in PHASES} <= set(found)
        assert {"blocks of 1", "part of 1"} <= set(found)
