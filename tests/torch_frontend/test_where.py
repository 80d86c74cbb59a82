"""``where()`` of an engine: for whoever waits for a step, in another thread, another process or a signal handler."""

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from frontends.torch import OffloadedAdamW, wrap
from frontends.torch.params import pending
from offload_core.support.threads import TaskThread
from offload_core.support.where import ASK
from tests.support.interrupts import handled_at_each_line
from tests.support.processes import forked, on_ranks
from tests.support.torch_rank import batch, bits, make, said_by, train


def until(holds):
    """Return the first value that is true."""
    while not (value := holds()):
        time.sleep(0.001)
    return value


def numbers(lines):
    """The numbers of exchanges in these lines, by the words before them."""
    return {words: int(number) for words, number in re.findall(r"^  (.*xchange): number (\d+)", lines, re.MULTILINE)}


@pytest.mark.quick
@pytest.mark.draws(1)
@pytest.mark.parametrize("schedule", ["serial", "overlap"])
def test_a_rank_whose_peer_does_not_come_names_it_and_the_exchange(schedule, tmp_path):
    """Another thread asks while the main one hangs. The numbers of exchanges tell which rank is late."""

    @on_ranks(2)
    def found(rank):
        engine = wrap(make(), schedule=schedule)
        train(engine, rank, [0])
        engine.flush()
        if rank == 1:
            lines = engine.where()
            until((tmp_path / "asked").exists)
        else:
            said = []

            def ask():
                said.append(until(lambda: "has waited" in engine.where() and engine.where()))
                (tmp_path / "asked").touch()

            asking = threading.Thread(target=ask)
            asking.start()
        train(engine, rank, [1])
        engine.flush()
        if rank == 0:
            asking.join()
            [lines] = said
        return lines

    waits, late = found
    assert re.search(
        r"^  exchange: number \d+, 'bucket 0: exchange of gradients' has waited for rank 1 for [\d.]+ s$",
        waits,
        re.MULTILINE,
    )
    assert numbers(late)["last exchange"] == numbers(waits)["last exchange"] == numbers(waits)["exchange"] - 1
    assert waits.startswith("offload-core: rank 0 of 2, process ")
    assert "\n  updates: 1, and 0 skipped\n" in waits
    if schedule == "overlap":
        assert re.search(r"^  thread 'offload': Reduction\._start\.land, for", waits, re.MULTILINE)
    else:
        assert "\n  call: backward()\n" in waits


def test_a_rank_that_waits_for_rank_0_says_that_it_may_be_any_and_names_data_once_all_have_come(tmp_path):
    @on_ranks(2)
    def found(rank):
        engine = wrap(make())
        group = engine.optimizer.core.device.collectives._own
        said = []
        if rank == 0:
            until((tmp_path / "asked").exists)
            group._gloo[0] = Looking(group._gloo[0], lambda: said.append(engine.where()))
            train(engine, rank, [0])
        else:
            threading.Thread(
                target=lambda: (
                    said.append(until(lambda: "has waited for rank 0" in engine.where() and engine.where())),
                    (tmp_path / "asked").touch(),
                )
            ).start()
            train(engine, rank, [0])
        engine.flush()
        return said[0]

    assert "has waited for data: all ranks have come for" in found[0]
    assert "'bucket 0: exchange of gradients' has waited for rank 0 and all other ranks for" in found[1]


class Looking:
    """A gloo group that looks around as an exchange begins."""

    def __init__(self, gloo, look):
        self._gloo, self._look = gloo, look

    def __getattr__(self, name):
        self._look()
        return getattr(self._gloo, name)


def test_after_a_rank_was_lost_the_last_error_is_among_the_lines():
    @on_ranks(2, killed=[1])
    def _(rank):
        engine = wrap(make())
        train(engine, rank, [0])
        engine.flush()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        said = said_by(lambda: (train(engine, rank, [1]), engine.flush()))
        assert said.startswith("CollectiveError: ")
        lines = engine.where()
        assert "\n  health: without a rank that was lost. allowed: wait for the last step, read states; send " in lines
        assert f". last error: {said.removeprefix('CollectiveError: ')}\n" in lines
        assert re.search(r"^  last exchange: .*'bucket 0: exchange of gradients' failed", lines, re.MULTILINE)
        engine.close()
        assert re.fullmatch(r"offload-core: process \d+ has an optimizer that was closed", engine.where())


@pytest.mark.parametrize("schedule", ["serial", pytest.param("overlap", marks=pytest.mark.slow)])
def test_a_signal_handler_may_ask_at_each_line_of_a_step_and_changes_no_bits(schedule):
    def trained(ask):
        engine = wrap(make(), schedule=schedule, gradient_clipping=1.0)
        train(engine, 0, [0])
        said = []
        handled_at_each_line(
            lambda: (train(engine, 0, [1]), engine.release(), engine.restore(), engine.flush()),
            lambda place: said.append(engine.where()) if ask else None,
        )
        return said, bits(engine.module)

    said, asked = trained(True)
    assert len(said) > 500
    titles = {re.sub(r"'.*?'", "", line.split(":")[0].strip()) for text in said for line in text.splitlines()}
    assert titles >= {"offload-core", "health", "updates", "call", "exchange", "tensors"}
    assert not [text for text in said if "not to be read now" in text]
    calls = {call for text in said for call in re.findall("^  call: (.*)", text, re.MULTILINE)}
    assert calls >= {"none that changes anything", "backward()", "step()", "release()", "restore()"}
    assert trained(False)[1] == asked


def test_another_thread_may_ask_at_any_time():
    engine, alone = (wrap(make(), schedule="overlap") for _ in range(2))
    end, said = threading.Event(), []

    def ask():
        while not end.is_set():
            said.append(engine.where())

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for step in range(20):
            train(engine, 0, [step])
            train(alone, 0, [step])
    finally:
        end.set()
        asking.join()
    assert bits(engine.module) == bits(alone.module)
    assert re.search(r"^  tensors: .*resident|being written", said[-1], re.MULTILINE)


def test_tensors_are_counted_by_residency():
    engine = wrap(make())
    engine.module.register_buffer("scale", torch.ones(1))
    assert "\n  tensors: 7 resident\n" in engine.where()
    pending.update(engine.module[0].weight, lambda tensor: None)
    assert "\n  tensors: 1 being written, 6 resident\n" in engine.where()
    engine.release()
    assert "\n  tensors: 7 released\n" in engine.where()
    alone = OffloadedAdamW(make().parameters(), lr=1e-3)
    assert "\n  tensors: 6 resident\n" in alone.where()


def test_a_forked_process_says_which_tasks_its_parent_has():
    @forked
    def _():
        engine = wrap(make(), schedule="overlap")
        train(engine, 0, [0])
        engine.flush()
        end, parent = threading.Event(), os.getpid()
        thread = TaskThread("of the parent")
        thread.submit(end.wait)
        until(lambda: "thread 'of the parent'" in engine.where())
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            os.write(write, engine.where().encode())
            os._exit(0)
        os.close(write)
        with open(read) as said:
            lines = said.read()
        assert os.waitpid(child, 0)[1] == 0
        end.set()
        assert lines.startswith(f"offload-core: rank 0 of 1, process {child}, a fork of process {parent}\n")
        assert re.search(
            rf"^  thread 'of the parent': Event\.wait, for [\d.]+ s, in process {parent}; 0 later$", lines, re.MULTILINE
        )


def test_a_signal_is_answered_while_the_main_thread_hangs_in_a_collective_in_c(tmp_path):
    """It waits in gloo for a rank that does not come, where it runs no handler of Python's."""
    printed, chained = tmp_path / "printed", []

    @on_ranks(2)
    def _(rank):
        group = dist.new_group(backend="gloo")
        if rank == 1:
            pid = int(until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text()))
            for n in range(3):  # the first signal may come before the other rank hangs
                while printed.read_text().count("offload-core: rank 0 of 1") <= n:
                    os.kill(pid, signal.SIGUSR1)
                    time.sleep(0.1)
        else:
            signal.signal(signal.SIGUSR1, lambda number, frame: chained.append(number))
            os.environ[ASK] = "1"
            engine = wrap(make(), process_group="alone")
            stderr = os.dup(2)
            with open(printed, "wb") as file:
                os.dup2(file.fileno(), 2)
            Path(tmp_path, "new").write_text(str(os.getpid()))
            os.rename(tmp_path / "new", tmp_path / "pid")
        dist.barrier(group)
        if rank == 0:
            os.dup2(stderr, 2)
            assert "\n  health: sound. " in printed.read_text()
            assert chained  # the earlier handler has run, too, when the main thread has come back
            engine.backward(engine(batch(0, 0)).sum())
            assert engine.step().updated
