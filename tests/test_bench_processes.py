"""Contenders get the allocator that a part asks for, whatever the shell asks; parts take the rounds they are told."""

import os

import pytest

from bench import ranks, step
from bench.processes import Group
from bench.turns import KEEP_MEMORY

TELL = """
import json, os, sys
print(json.dumps({k: v for k, v in os.environ.items() if k.startswith(("MALLOC_", "GLIBC_"))}), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    "malloc", [KEEP_MEMORY, {}, {"MALLOC_MMAP_THRESHOLD_": "1048576"}], ids=["kept", "none", "own"]
)
def test_the_shells_allocator_is_not_the_contenders(tmp_path, monkeypatch, malloc):
    (tmp_path / "tell_malloc.py").write_text(TELL)
    monkeypatch.setenv("MALLOC_ARENA_TEST", "3")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=2")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    group = Group("tell_malloc", [], ranks=1, threads=1, environment={"PYTHONPATH": path}, malloc=malloc)
    try:
        assert group.answers() == [dict(malloc)]
    finally:
        group.close()


def test_a_heat_has_its_own_rounds_unless_told():
    plain, quick, told = (step.parse(a) for a in ([], ["--quick"], ["--rounds=7", "--steps=2"]))
    assert [(h.rounds, h.steps) for h in step.heats("319m", plain)] == [(h.rounds, h.steps) for h in step.HEATS["319m"]]
    assert {(h.rounds, h.steps) for h in step.heats("34m", quick)} == {(2, 1)}
    assert {(h.rounds, h.steps) for h in step.heats("319m", told)} == {(7, 2)}


def test_the_targets_ranks_have_most_rounds():
    args = ranks.parse([])
    assert [ranks.turns(args, n) for n in (1, 2, 4)] == [(2, 1), (ranks.ROUNDS, ranks.STEPS), (2, 1)]
    assert ranks.turns(ranks.parse(["--rounds=5"]), 4) == (5, 1)


def test_no_rounds_are_an_error(capsys):
    with pytest.raises(SystemExit):
        step.parse(["--rounds=0"])
    assert "--rounds: " in capsys.readouterr().err
