"""Where a process is in a step: what each part says of itself, and the answer to a signal."""

import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import suppress

import numpy as np
import pytest

from offload_core.errors import CollectiveError
from offload_core.step.health import HealthEvent, PipelineHealth
from offload_core.support import threads
from offload_core.support.threads import TaskThread, uninterrupted
from offload_core.support.where import ASK, told
from offload_core.testing.thread_ranks import run_ranks
from tests.support.pipelines import make
from tests.support.processes import ROOT, environment_of


def until(holds):
    """Return the first value that is true."""
    while not (value := holds()):
        threading.Event().wait(0.001)
    return value


# --- parts --------------------------------------------------------------------------------------------------


def test_a_rank_names_the_exchange_that_it_waits_for_and_the_last_one_with_the_numbers_of_all_ranks():
    ranks = [None, None]

    def body(rank):
        ranks[rank.rank] = rank
        assert rank.where() == "exchange: none so far"
        rank.sum_integers(np.zeros(1, np.int64), "first")
        if rank.rank == 1:
            waits = until(lambda: "second" in ranks[0].where() and ranks[0].where())
            assert re.fullmatch(
                r"exchange: number 2, 'second' has waited for the other ranks for [\d.]+ s\n"
                r"last exchange: number 1, 'first' ended [\d.]+ s ago",
                waits,
            )
            assert re.fullmatch(r"last exchange: number 1, 'first' ended [\d.]+ s ago", rank.where())
        rank.sum_integers(np.zeros(1, np.int64), "second")
        with pytest.raises(CollectiveError):
            rank.sum_integers(np.zeros(1, np.int64), f"of rank {rank.rank}")
        assert re.fullmatch(rf"last exchange: number 3, 'of rank {rank.rank}' failed [\d.]+ s ago", rank.where())

    run_ranks(2, body)


def test_a_thread_names_the_task_that_it_does_and_the_number_of_later_ones():
    thread, begun, end = TaskThread("of this test"), threading.Event(), threading.Event()

    def work():
        begun.set()
        end.wait()

    thread.submit(work)
    last = thread.submit(work)
    begun.wait()
    said = threads.where()
    end.set()
    last.result()
    name = work.__qualname__.replace("<locals>.", "")
    assert re.search(rf"^thread 'of this test': {name}, for .* s; 1 later$", said, re.MULTILINE)
    until(lambda: "of this test" not in threads.where())


def test_a_section_is_named_while_it_runs():
    said = []

    def section():
        said.append(threads.where())

    uninterrupted(section)
    assert re.search(r"^section: .*section, for [\d.]+ s$", said[0], re.MULTILINE)
    assert "section: " not in threads.where()


def test_health_says_what_is_allowed_and_the_last_error():
    health = PipelineHealth()
    assert health.where() == (
        "health: sound. allowed: wait for the last step, read states; send parameters; add gradients, step"
    )
    health.released = "parameters have no memory"
    assert health.where() == ("health: sound. allowed: wait for the last step, read states. parameters have no memory")
    health.on(HealthEvent.TEAR, "a load broke off")
    assert health.where() == (
        "health: torn. allowed: load a checkpoint, which repairs this. parameters have no memory. "
        "last error: a load broke off"
    )
    health.on(HealthEvent.LOSE_RANK_IN_UPDATE)
    assert health.where().startswith("health: gone. allowed: nothing. ")


def test_a_pipeline_counts_updates_micro_steps_and_gradients_and_names_its_call():
    engine = make().engine
    pipeline = engine.pipeline
    said = engine.where().splitlines()
    assert said[0] == f"offload-core: rank 0 of 1, process {os.getpid()}"
    assert said[2:6] == [
        "  updates: 0, and 0 skipped",
        "  micro-steps since the last update: 0 of 1, and gradients of 0 parameters",
        "  call: none that changes anything",
        "  exchange: none, this is the only rank",
    ]
    pipeline.counts.updates, pipeline.counts.skipped = 5, 2
    pipeline.arrivals.since.micro_steps, pipeline.arrivals.per_update = 3, 4
    pipeline.arrivals.since.present.update([0, 2])
    said = pipeline.state_lock.change("a change", engine.where).splitlines()
    assert said[2:5] == [
        "  updates: 5, and 2 skipped",
        "  micro-steps since the last update: 3 of 4, and gradients of 2 parameters",
        "  call: a change",
    ]


def test_the_front_ends_lines_are_among_them_and_one_that_cannot_be_read_hides_no_other():
    def changing():
        raise RuntimeError("dictionary changed size during iteration")

    said = make().engine.where(lambda: "tensors: 3 resident", changing)
    assert "\n  tensors: 3 resident\n" in said
    assert re.search(r"^  \S*changing: not to be read now \(RuntimeError: dictionary changed", said, re.MULTILINE)
    assert told("title", lambda: "a\nb") == "title\n  a\n  b"


# --- by a signal --------------------------------------------------------------------------------------------

PROCESS = """
import asyncio, ctypes, os, signal, sys, time
from offload_core.support.where import answer_signals

class Engine:
    def __init__(self, name):
        self.name = name
    def where(self):
        return f"{self.name} of {os.getpid()}"

def say(text):
    os.write(1, f"{text}\\n".encode())

def hang():
    "Hang in C, which runs no handler of Python's."
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)

def wrap(*names):
    engines = [Engine(name) for name in names]
    for engine in engines:
        answer_signals(engine)
    return engines

"""


SECONDS = 60
"""After which a process that hangs is ended, and gives no line."""


class Process:
    """A process that runs this code after PROCESS; its standard error goes where its output goes. It and its forks end
    with the context."""

    def __init__(self, code, asked="1"):
        environment = environment_of(ROOT) | {ASK: asked}
        command = [sys.executable, "-c", PROCESS + code]
        self._process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        self.pid = self._process.pid
        self._limit = threading.Timer(SECONDS, self._end)

    def __enter__(self):
        self._limit.start()
        return self

    def __exit__(self, *error):
        self._limit.cancel()
        self._end()
        self._process.communicate()

    def _end(self):
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def line(self):
        return self._process.stdout.readline().decode().rstrip()

    def ended(self):
        return self._process.wait()


def test_a_signal_is_answered_while_the_main_thread_hangs_in_c_and_in_a_forked_process_too():
    code = "engines = wrap('a')\nwrap('gone')\nif os.fork() == 0: say(os.getpid())\nhang()"
    with Process(code) as process:
        child = int(process.line())
        for _ in range(3):  # the first one may come before the process hangs
            for pid in (process.pid, child):
                os.kill(pid, signal.SIGUSR1)
                assert process.line() == f"a of {pid}"  # by this process alone, and once


def test_a_signal_asks_each_engine_and_an_earlier_handler_is_called_too():
    code = (
        "signal.signal(signal.SIGUSR1, lambda *_: say('an earlier handler'))\n"
        "engines = wrap('a', 'b')\nsay('ready')\nwhile True: time.sleep(0.01)"
    )
    with Process(code) as process:
        assert process.line() == "ready"
        for _ in range(2):
            os.kill(process.pid, signal.SIGUSR1)
            assert {process.line() for _ in range(3)} == {
                "an earlier handler", f"a of {process.pid}", f"b of {process.pid}",
            }  # fmt: skip


def test_asyncio_and_the_answer_do_not_take_each_others_signals():
    code = (
        "engines = wrap('a')\nloop = asyncio.new_event_loop()\n"
        "loop.add_signal_handler(signal.SIGTERM, lambda: (say('a loop that ends'), loop.stop()))\n"
        "loop.call_soon(say, 'ready')\nloop.run_forever()"
    )
    with Process(code) as process:
        assert process.line() == "ready"
        os.kill(process.pid, signal.SIGUSR1)
        assert process.line() == f"a of {process.pid}"
        os.kill(process.pid, signal.SIGTERM)
        assert process.line() == "a loop that ends"
        assert process.ended() == 0


def test_without_the_variable_the_signal_is_not_ours():
    with Process("engines = wrap('a')\nsay('ready')\nhang()", asked="") as process:
        assert process.line() == "ready"
        os.kill(process.pid, signal.SIGUSR1)
        assert process.ended() == -signal.SIGUSR1
