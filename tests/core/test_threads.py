"""Threads and their tasks: an interrupt at any moment leaves them working, and they end when nobody needs them."""

import subprocess
import sys
import threading
import time

import pytest

from offload_core.errors import StateError
from offload_core.support import threads
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


def test_an_interrupt_at_any_moment_of_the_first_section_leaves_the_next_ones_working(monkeypatch):
    number = 0
    while True:
        monkeypatch.setattr(threads, "_sections", None)
        done = []
        interrupted = interrupt_at_event(number, lambda done=done: uninterrupted(lambda: done.append("first")))
        uninterrupted(lambda done=done: done.append("next"))
        assert done in (["next"], ["first", "next"])
        if not interrupted:
            break
        number += 1
    assert number > 20


def test_all_sections_run_in_one_thread():
    ran_in = set()
    for _ in range(3):
        uninterrupted(lambda: ran_in.add(threading.get_ident()))
    assert len(ran_in) == 1
    assert ran_in.isdisjoint({threading.get_ident()})


def test_a_section_that_garbage_or_a_handler_asks_for_meanwhile_follows_the_one_that_runs(monkeypatch):
    """Python calls both in the middle of the wait."""
    done, begun = [], threading.Event()

    def section():
        begun.set()
        time.sleep(0.01)
        done.append("first")

    wait = Task.wait

    def wait_and_ask(task):
        if begun.wait(60) and not done:
            monkeypatch.setattr(Task, "wait", wait)
            uninterrupted(lambda: done.append("second"))
        wait(task)

    monkeypatch.setattr(Task, "wait", wait_and_ask)
    uninterrupted(section)
    assert done == ["first", "second"]


def said_by(code):
    """What a process prints that runs this; it has the function ``uninterrupted``."""
    code = "import os, threading; from offload_core.support.threads import uninterrupted\n" + code
    options = {"env": environment_of(ROOT), "capture_output": True, "text": True, "timeout": 60, "check": True}
    quiet = ["-W", "ignore:This process:DeprecationWarning"]  # of Python 3.12 and later, at a fork
    done = subprocess.run([sys.executable, *quiet, "-c", code], **options)
    assert not done.stderr
    return done.stdout


def test_a_fork_runs_sections_in_a_thread_of_its_own():
    code = (
        "main = threading.get_ident(); uninterrupted(lambda: None)\n"
        "if child := os.fork(): print(os.waitpid(child, 0)[1])\n"
        "else: uninterrupted(lambda: print(threading.get_ident() != main, flush=True)); os._exit(0)"
    )
    assert said_by(code) == "True\n0\n"


def test_a_section_of_an_object_that_dies_with_the_interpreter_runs():
    """Its thread is gone by then."""
    code = (
        "class Kept:\n"
        "    def __del__(self): uninterrupted(lambda: os.write(1, b'ended'))\n"
        "kept = Kept(); kept.itself = kept; uninterrupted(lambda: os.write(1, b'began '))"
    )
    assert said_by(code) == "began ended"


def test_what_another_thread_clears_up_has_ended_before_the_interpreter_has():
    """Python would end its thread in the middle of it."""
    code = (
        "import time; from offload_core.support.threads import clear_up\n"
        "def act(): time.sleep(0.2); os.write(1, b'ended')\n"
        "other = threading.Thread(target=clear_up, args=(act,)); other.start(); other.join()"
    )
    assert said_by(code) == "ended"


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
    condition, holds, task = Condition(), [], Task(lambda: None)
    waiters = [threading.Thread(target=lambda: condition.wait_for(lambda: holds)), threading.Thread(target=task.wait)]
    for waiter in waiters:
        waiter.start()
    holds.append(True)  # and nobody calls notify_all()
    task._done = True  # and nobody releases its lock
    for waiter in waiters:
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
