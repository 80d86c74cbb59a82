"""Threads and their tasks: an interrupt at any moment leaves them working, and they end when nobody needs them."""

import subprocess
import sys
import threading
import time

import pytest

from offload_core.errors import StateError
from offload_core.support.threads import Condition, Task, TaskThread, do_in_threads, uninterrupted
from tests.support.interrupts import interrupt_at_event
from tests.support.processes import ROOT, environment_of


def in_time(act):
    """Return the result of ``act`` in another thread. This thread would wait forever if ``act`` hung."""
    got = []
    other = threading.Thread(target=lambda: got.append(act()), daemon=True)
    other.start()
    other.join(60)
    assert got, "it hangs"
    return got[0]


def test_an_interrupt_at_any_moment_leaves_the_thread_working():
    number = 0
    while True:
        thread, done = TaskThread("offload test"), []

        def ask(thread=thread, done=done):
            tasks = [thread.submit(lambda i=i: (time.sleep(1e-4), done.append(i))) for i in range(3)]
            tasks[-1].result()

        interrupted = interrupt_at_event(number, ask)
        assert in_time(lambda thread=thread: thread.submit(lambda: "works").result()) == "works"
        assert done in ([], [0], [0, 1], [0, 1, 2])
        in_time(lambda thread=thread: thread.close() or True)
        if not interrupted:
            assert done == [0, 1, 2]
            break
        number += 1
    assert number > 20


def test_an_interrupt_at_any_moment_leaves_a_section_whole_or_not_begun():
    number, seen = 0, set()
    while True:
        done = []

        def section(done=done):
            done.append("begun")
            time.sleep(1e-4)
            done.append("ended")

        interrupted = interrupt_at_event(number, lambda section=section: uninterrupted(section))
        assert done in ([], ["begun", "ended"])
        seen.add(len(done))
        if not interrupted:
            break
        number += 1
    assert seen == {0, 2}


def test_tasks_are_done_in_order_and_their_errors_are_those_of_who_asks():
    thread, done = TaskThread("offload test"), []
    tasks = [thread.submit(lambda i=i: done.append(i) or i) for i in range(5)]
    wrong = thread.submit(lambda: 1 / 0)
    assert [task.result() for task in tasks] == [0, 1, 2, 3, 4] == done
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            wrong.result()
    assert isinstance(wrong.exception(), ZeroDivisionError)
    thread.close()


def test_a_cancelled_task_is_never_done_and_one_that_was_begun_is_not_cancelled():
    task, done = Task(lambda: done.append(True)), []
    assert task.cancel()
    task.run()
    assert not done
    begun = Task.ended(3)
    assert not begun.cancel()
    assert begun.result() == 3


def test_a_thread_that_was_told_to_end_refuses_tasks_and_has_done_those_before():
    thread = TaskThread("offload test")
    task = thread.submit(lambda: time.sleep(0.01) or 7)
    thread.close()
    assert task.done()
    assert task.result() == 7
    with pytest.raises(StateError, match="the thread 'offload test' has ended; expected submit.. before close"):
        thread.submit(lambda: None)


def test_several_threads_wait_for_one_task():
    gate, got = threading.Event(), []
    task = Task(lambda: gate.wait(60))
    waiters = [threading.Thread(target=lambda: got.append(task.result())) for _ in range(5)]
    for waiter in waiters:
        waiter.start()
    worker = threading.Thread(target=task.run)
    worker.start()
    assert not task.done()
    gate.set()
    for waiter in waiters:
        waiter.join(60)
    assert got == [True] * 5
    worker.join()


def test_a_waiter_whose_notice_was_cut_short_looks_again():
    condition, holds = Condition(), []
    waiter = threading.Thread(target=lambda: condition.wait_for(lambda: holds))
    waiter.start()
    holds.append(True)  # and nobody calls notify_all()
    waiter.join(60)
    assert not waiter.is_alive()


def test_acts_are_done_in_threads_and_the_first_error_is_raised_when_all_have_ended():
    ended = []

    def fail(n):
        time.sleep(0.01 * n)
        ended.append(n)
        raise ValueError(str(n))

    with pytest.raises(ValueError, match="2"):
        do_in_threads([lambda: fail(2), lambda: fail(1)])
    assert sorted(ended) == [1, 2]
    barrier = threading.Barrier(3)
    do_in_threads([lambda: barrier.wait(60)] * 3)  # at the same time


def test_the_interpreter_ends_when_all_tasks_are_done():
    code = (
        "import time; from offload_core.support.threads import TaskThread; thread = TaskThread('offload test')\n"
        "for i in range(3): thread.submit(lambda i=i: (time.sleep(0.05), print(i, flush=True)))\n"
        "del thread; kept = TaskThread('offload test'); kept.submit(lambda: print('kept', flush=True))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment_of(ROOT), capture_output=True, text=True, timeout=60, check=True
    )
    assert sorted(done.stdout.split()) == ["0", "1", "2", "kept"]
    assert not done.stderr
