"""Contenders are processes of their own: their allocator, their ranks, their repetitions, and how they end."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from bench.harness.contenders import measure_all
from bench.harness.processes import KEEP_FREED_MEMORY, ContenderError, ProcessGroup, in_parallel
from bench.parts import ranks, step

ROOT = Path(__file__).parents[2]

TELL = """
import os
from bench.harness.worker import become_rank, serve

_, *streams = become_rank()
print("this is no answer", flush=True)
serve(*streams, 1, None, malloc={k: v for k, v in os.environ.items() if k.startswith(("MALLOC_", "GLIBC_"))})
"""
COUNT = """
import os
from bench.harness.worker import become_rank, serve

(arguments, *streams), first = become_rank(), os.getppid()
rank = int(os.environ["RANK"])
if arguments == ["once"]:
    os.close(os.open("once", os.O_CREAT | os.O_EXCL))

def step(micro_batch):
    if arguments == ["dies"] and rank == 1:
        raise OSError("no luck")
    return {"total": float(os.getpid()), "loss": float(rank)}

serve(*streams, 1, lambda: step, versions={"first": str(first)})
"""
STUCK = """
import os, subprocess, time
from bench.harness import worker as contender

contender._PATIENCE = 0.1

def step(micro_batch):
    compiler = subprocess.Popen(["sleep", "600"])
    with open("stuck", "a") as told:
        print(os.getpid(), compiler.pid, file=told)
    time.sleep(600)

contender.serve(*contender.become_rank()[1:], 1, lambda: step)
"""
ASK = """
from bench.harness.processes import ProcessGroup

group = ProcessGroup("contender_here", [], ranks=2, threads=1)
group.answers()
group.ask(steps=1)
"""
BEFORE_IT_ANSWERS = """
import os, time
from bench.harness.worker import become_rank

rank = become_rank()
with open("stuck", "a") as told:
    print(os.getpid(), file=told)
if os.environ["RANK"] == "0":
    time.sleep(600)  # as in a collective
while len(stuck := open("stuck").read().split()) < 2:
    time.sleep(0.01)
raise OSError("no luck")
"""


def module(folder, monkeypatch, text):
    """Have contenders find it, in a folder of their own."""
    (folder / "contender_here.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT)]))
    monkeypatch.chdir(folder)


def all_ended(pids):
    """True if all end within 10 s. A zombie counts, because its new parent may not have reaped it yet."""
    deadline = time.monotonic() + 10
    while not all(map(has_ended, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def has_ended(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize(
    "malloc", [KEEP_FREED_MEMORY, {}, {"MALLOC_MMAP_THRESHOLD_": "1048576"}], ids=["kept", "none", "own"]
)
def test_the_shells_allocator_is_not_the_contenders(tmp_path, monkeypatch, malloc):
    module(tmp_path, monkeypatch, TELL)
    monkeypatch.setenv("MALLOC_ARENA_TEST", "3")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=2")
    group = ProcessGroup("contender_here", [], ranks=1, threads=1, malloc=malloc)
    try:
        assert [answer["malloc"] for answer in group.answers()] == [dict(malloc)]
    finally:
        group.close()


def test_ranks_are_forks_of_one_process_and_end_with_their_group(tmp_path, monkeypatch):
    module(tmp_path, monkeypatch, COUNT)
    with pytest.raises(ValueError, match="got 40, expected at most 31 on one machine"):
        ProcessGroup("contender_here", [], ranks=40, threads=1)
    group = ProcessGroup("contender_here", [], ranks=3, threads=1)
    try:
        first = {answer["versions"]["first"] for answer in group.answers()}
        steps = [answer["steps"] for answer in group.ask(steps=1)]
        assert len(first) == 1
        assert [each["loss"] for [each] in steps] == [0.0, 1.0, 2.0]
        assert [each["total"] for [each] in steps] == group.pids
        assert len(set(group.pids)) == 3
        assert group.resident() > 0
    finally:
        group.close()
    assert all_ended(group.pids)


def test_a_rank_that_fails_ends_the_others_and_its_last_words_are_told(tmp_path, monkeypatch):
    module(tmp_path, monkeypatch, COUNT)
    group = ProcessGroup("contender_here", ["dies"], ranks=2, threads=1)
    try:
        group.answers()
        with pytest.raises(ContenderError) as caught:
            group.ask(steps=1)
        assert caught.value.why == "OSError: no luck"
        assert all_ended(group.pids)
    finally:
        group.close()


def stuck(folder, count):
    """The pids told there, once there are so many."""
    deadline = time.monotonic() + 30
    pids = []
    while len(pids) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)
        told = folder / "stuck"
        pids = list(map(int, told.read_text().split())) if told.exists() else []
    return pids


def test_ranks_that_are_stuck_end_when_who_asked_is_killed(tmp_path, monkeypatch):
    module(tmp_path, monkeypatch, STUCK)
    with subprocess.Popen([sys.executable, "-c", ASK]) as asking:
        pids = stuck(tmp_path, 4)  # ranks and what they have started
        assert not any(map(has_ended, pids))
        asking.kill()
    assert all_ended(pids)


def test_a_rank_that_ends_before_it_answers_ends_the_others(tmp_path, monkeypatch):
    module(tmp_path, monkeypatch, BEFORE_IT_ANSWERS)
    group = ProcessGroup("contender_here", [], ranks=2, threads=1)
    with pytest.raises(ContenderError) as caught:
        group.answers()
    assert caught.value.why == "OSError: no luck"
    assert all(map(has_ended, stuck(tmp_path, 2)))
    assert (group.resident(), group.peak()) == (0, 0)
    group.forget_peak()
    group.close()


def test_all_contenders_of_a_library_are_told_why_it_cannot_be_imported(tmp_path, monkeypatch):
    module(tmp_path, monkeypatch, "import no_such_library")
    groups = [ProcessGroup("contender_here", [], ranks=ranks, threads=1) for ranks in (1, 2)]
    for group in groups:
        with pytest.raises(ContenderError) as caught:
            group.answers()
        assert caught.value.why == "ModuleNotFoundError: No module named 'no_such_library'"
        group.close()
        group.close()


def test_contenders_of_a_library_are_forks_of_one_process_unless_their_environments_differ(tmp_path, monkeypatch):
    module(tmp_path, monkeypatch, COUNT)
    ways = [{}, {}, {"malloc": {}}, {"library": "other"}, {"environment": {"OF_CONTENDERS": "1"}}]
    groups = [ProcessGroup("contender_here", [], ranks=1, threads=1, **way) for way in ways]
    firsts = [answer["versions"]["first"] for group in groups for answer in group.answers()]
    for group in groups:
        group.close()
    assert firsts[0] == firsts[1]
    assert len(set(firsts)) == len(ways) - 1


def test_what_interrupts_some_ends_those_that_the_others_wait_for(tmp_path, monkeypatch):
    module(tmp_path, monkeypatch, STUCK)
    groups = {name: ProcessGroup("contender_here", [], ranks=1, threads=1) for name in "abcd"}

    def act(name):
        groups[name].answers()
        if name == "b":
            stuck(tmp_path, 2)  # a's are
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        with suppress(ContenderError):
            groups[name].ask(steps=1)

    with pytest.raises(KeyboardInterrupt):
        in_parallel(groups.values(), act, groups, 2)
    for group in groups.values():
        group.close()
    assert all_ended(stuck(tmp_path, 2))


def test_each_sitting_has_new_processes_and_who_fails_in_one_is_left_out(tmp_path, monkeypatch):
    module(tmp_path, monkeypatch, COUNT)
    groups = {
        name: partial(ProcessGroup, "contender_here", arguments, ranks=1, threads=1)
        for name, arguments in {"a": [], "b": [], "only once": ["once"]}.items()
    }
    seen = []
    results, failures, _ = measure_all(
        groups,
        repetitions=2,
        rounds=3,
        steps=2,
        warm_up=1,
        each_round=lambda known: seen.append({name: len(result.samples("total")) for name, [result] in known.items()}),
    )
    assert seen[0] == {"a": 2, "b": 2, "only once": 2}
    assert seen[-1] == {"a": 12, "b": 12}
    assert [known["a"] for known in seen] == [2, 4, 6, 8, 10, 12]
    assert results.keys() == {"a", "b"}
    assert failures["only once"].why.startswith("FileExistsError")
    for [result] in results.values():
        pids = result.samples("total")
        assert pids == [pids[0]] * 6 + [pids[-1]] * 6
        assert pids[0] != pids[-1]


def test_a_heat_has_its_own_turns_unless_told():
    def of(model, *arguments):
        return counts(step.experiments(model, step.parse(list(arguments))))

    def counts(experiments):
        return [(each.repetitions, each.rounds, each.steps) for each in experiments]

    assert of("319m") == counts(step.EXPERIMENTS["319m"])
    assert set(of("34m", "--quick")) == {(1, 2, 1)}
    assert set(of("319m", "--rounds=7", "--steps=2", "--repetitions=3")) == {(3, 7, 2)}


def test_the_targets_ranks_have_most_turns():
    args = ranks.parse([])
    elsewhere = ranks.COUNTS_ELSEWHERE
    assert [ranks.counts_of(args, n) for n in (1, 2, 4)] == [elsewhere, ranks.COUNTS, elsewhere]
    assert ranks.counts_of(ranks.parse(["--rounds=5"]), 4) == elsewhere | {"rounds": 5}


def test_no_rounds_are_an_error(capsys):
    with pytest.raises(SystemExit):
        step.parse(["--rounds=0"])
    assert "--rounds: " in capsys.readouterr().err
