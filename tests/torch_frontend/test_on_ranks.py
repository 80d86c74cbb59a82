"""Results and errors that a test on ranks gets. Ranks leave nothing behind."""

import os
import random
import select
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support import processes
from tests.support.processes import ROOT, environment_of, forked, on_ranks


def add(rank):
    return 10 * rank


def test_a_function_uses_what_stands_around_it_and_returns_what_it_likes(tmp_path):
    def also(value, *, by=1):
        return value + by

    @on_ranks(2)
    def found(rank):
        class Local:
            values = also(rank), add(rank)

        summed = torch.ones(2) + rank
        dist.all_reduce(summed)
        return summed, Local.values, tmp_path

    for rank, (summed, values, path) in enumerate(found):
        assert summed.tolist() == [3, 3]
        assert (values, path) == ((rank + 1, 10 * rank), tmp_path)


def test_a_function_in_a_fork_is_no_rank_and_its_draws_come_from_the_tests():
    def draws():
        assert not dist.is_initialized()
        assert "RANK" not in os.environ
        return random.random(), np.random.rand(), torch.rand(()).item()

    found = []
    for _ in range(2):
        random.seed(0)
        found += [forked(draws), forked(draws)]
    assert found[0] == found[2] != found[1] == found[3]


def test_a_rank_that_raises_is_an_error_with_what_all_have_said():
    with pytest.raises(AssertionError, match=r"rank 0 ended with 1: (.*\n)*.*Connection") as caught:

        @on_ranks(2)
        def fails(rank):
            if rank == 1:
                print("some word")
                assert [rank] == [2]
            dist.barrier()

    assert "rank 1 ended with 1: some word\nTraceback" in str(caught.value)
    assert "assert [1] == [2]" in str(caught.value)


def test_a_rank_that_is_gone_without_a_result_is_an_error_unless_the_test_kills_it():
    def body(rank):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return rank

    assert on_ranks(2, killed=[1])(body) == [0, None]
    with pytest.raises(AssertionError, match="rank 1 ended with -9"):
        on_ranks(2)(body)
    with pytest.raises(AssertionError, match="rank 0 ended with 0"):
        on_ranks(2, killed=[0, 1])(body)


def hang():
    dist.group.WORLD.get_group_store().set("here", "")
    threading.Event().wait()


def test_a_rank_that_hangs_is_ended_and_says_where(monkeypatch):
    monkeypatch.setattr(processes, "GRACE", 0)
    with pytest.raises(AssertionError, match=r"rank 1 ended with -6: (.*\n)*.* in hang\n"):

        @on_ranks(2)
        def fails(rank):
            if rank == 1:
                hang()
            dist.group.WORLD.get_group_store().wait(["here"])
            raise ValueError


@pytest.mark.draws(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_processes_end_with_the_one_that_runs_them(number, tmp_path):
    os.mkfifo(tmp_path / "pid")
    fifo = os.open(tmp_path / "pid", os.O_RDWR)
    child = (
        f"import os, threading; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); threading.Event().wait()"
    )
    code = f"from tests.support.processes import ForkServer; ForkServer().run(['-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", code], env=environment_of(ROOT), stderr=subprocess.DEVNULL) as program:
        started, _, _ = select.select([fifo, os.pidfd_open(program.pid)], [], [], 60)
        assert started == [fifo], "the program has ended"
        process = os.pidfd_open(int(os.read(fifo, 100)))
        program.send_signal(number)
        program.wait()
        assert select.select([process], [], [], 60)[0], "the process is still there"
