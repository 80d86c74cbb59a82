"""Sections that no interrupt cuts, and the calls that interrupts come out of. tests/laws has interrupts of steps."""

import _thread
import signal
import threading
import time
from contextlib import suppress
from functools import partial

import pytest

from offload_core.step.state_lock import StateLock
from offload_core.support import threads
from offload_core.support.threads import uninterrupted
from tests.support.interrupts import Interrupt, interrupt_at, lines_of


def test_a_section_that_was_interrupted_has_ended_before_its_caller_goes_on():
    ended, begun = [], threading.Event()

    def section():
        begun.set()
        time.sleep(0.05)
        ended.append(True)

    def interrupted():
        uninterrupted(section)

    for number in range(lines_of(interrupted)):
        ended.clear()
        begun.clear()
        interrupt_at(number, interrupted)
        assert bool(ended) == begun.is_set()


def test_a_second_interrupt_does_not_end_the_wait_either():
    ended = []

    def section():
        for _ in range(3):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # it wakes the wait
            time.sleep(0.05)
        ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        uninterrupted(section)
    assert ended


def test_two_interrupts_at_once_let_no_other_thread_into_a_section():
    """The second one leaves the ``except`` of the first, and so the locks, while the section still runs."""

    def interrupt(number, frame):
        raise Interrupt(number)

    signals = (signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.signal(number, interrupt) for number in signals]
    seen = []
    try:
        for _ in range(30):
            lock, state, begun, interrupted = StateLock(), [0, 0], threading.Event(), threading.Event()

            def section(state=state, begun=begun, interrupted=interrupted):
                state[0] = 1
                begun.set()
                interrupted.wait(60)  # else the second would come after all that expects it
                time.sleep(0.01)
                state[1] = 1

            def save(lock=lock, state=state, begun=begun, interrupted=interrupted):
                begun.wait(60)
                for number in signals:
                    signal.pthread_kill(threading.main_thread().ident, number)
                interrupted.set()
                seen.append(lock.consistent("save", lambda: tuple(state)))

            other = threads.Task(save)  # an interrupt in the middle of Thread.join has the next one wait for ever
            _thread.start_new_thread(other.run, ())
            with suppress(Interrupt):
                with suppress(Interrupt):
                    lock.change("step()", partial(uninterrupted, section))
                other.wait()
            other.result()
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
    assert seen == [(1, 1)] * 30


def test_where_no_thread_can_be_started_the_caller_runs_the_section(monkeypatch):
    monkeypatch.setattr(threads, "_sections", None)  # as at the first section of a process
    ran_in = []
    before = threading.stack_size(2**46)  # more than there is
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            _thread.start_new_thread(print, ())
        uninterrupted(lambda: ran_in.append(threading.current_thread()))
    finally:
        threading.stack_size(before)
    assert ran_in == [threading.main_thread()]


def test_a_handlers_runtime_error_does_not_make_the_caller_run_the_section(monkeypatch):
    """It would be interrupted there."""

    def starts_as_a_signal_comes(run, arguments):
        raise RuntimeError("the handler's")

    monkeypatch.setattr(threads, "_sections", None)
    monkeypatch.setattr(threads, "start_new_thread", starts_as_a_signal_comes)
    ran = []
    with pytest.raises(RuntimeError, match="the handler's"):
        uninterrupted(lambda: ran.append(True))
    assert not ran


def test_an_error_in_an_interrupted_section_is_raised_all_the_same():
    def fail():
        raise ValueError("the section's")

    with pytest.raises(ValueError, match="the section's"):
        uninterrupted(fail)
    raised = []
    for number in range(50):
        try:
            interrupt_at(number, lambda: uninterrupted(fail))
        except ValueError as error:
            raised.append(str(error))
    assert raised
    assert issubclass(Interrupt, KeyboardInterrupt)
