"""Forks of a process that trains and saves, as a data loader makes them: nothing in them hangs, and nothing of the
parent's is kept."""

import gc
import json
import os
import signal
import sys
import threading

import pytest
import torch

from frontends.torch import init, wrap
from frontends.torch.ranks import device_ranks
from offload_core.checkpoint import shard_writer
from offload_core.checkpoint.saving import Save
from offload_core.support import threads
from tests.support.late_stores import PARAMETERS_ON_DISK, STATES_ON_DISK
from tests.support.processes import forked
from tests.support.slow_torch_device import SlowTorchDevice


def engine_of(**fields):
    torch.manual_seed(0)
    fields = {"param_dtype": "bfloat16", "reduce_bucket_size": 4096, "num_threads": 1, **fields}
    return wrap(torch.nn.Linear(8, 2048), lr=1e-2, **fields)


def backward(engine):
    engine.backward(engine(torch.ones(4, 8)).float().pow(2).mean())


def slow_device():
    slow = SlowTorchDevice(0.0)
    device_ranks.memory_of = lambda device: slow
    return slow


def in_child(*acts):
    """Return the result or the error of each act in a forked process, which is ended if it hangs."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(120)
        said = []
        for act in acts:
            try:
                said.append(act())
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
        os.write(writes, json.dumps(said).encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if text else [f"ended by signal {os.WTERMSIG(status)}"]


def test_a_child_that_reads_a_parameter_whose_update_is_on_its_way_gets_an_error():
    @forked
    def _():
        slow, engine = slow_device(), engine_of()
        backward(engine)
        slow.gate.clear()
        engine.step()

        def read():
            return engine.module.weight.float().sum().item()

        def step():
            backward(engine)
            return str(engine.step())

        said = in_child(read, lambda: str(engine.optimizer.state_dict()["state"]), step)
        assert len(said) == 3
        for error in said:
            assert error.startswith("StateError: this process was forked, and the background thread")
        slow.gate.set()
        assert [read()] == in_child(read)  # now that it has ended


class Gate(threading.Event):
    """Known to have been reached."""

    def __init__(self):
        super().__init__()
        self.reached = threading.Event()

    def wait(self, timeout=None):
        self.reached.set()
        return super().wait(timeout)


def test_a_child_of_another_thread_does_not_read_the_middle_of_a_step():
    @forked
    def _():
        slow, engine = slow_device(), engine_of(schedule="serial")
        backward(engine)
        slow.gate = gate = Gate()

        def fork():
            gate.reached.wait()
            said.extend(in_child(lambda: len(engine.optimizer.state_dict()["state"])))
            gate.set()

        said, other = [], threading.Thread(target=fork)
        other.start()
        engine.step()
        other.join()
        [error] = said
        assert error.startswith("StateError: this process was forked while another thread was in the middle of step()")
        assert engine.optimizer.updates == 1


def test_a_child_that_outlives_its_parent_does_not_keep_the_checkpoints_lock(tmp_path):
    """The parent was killed in the middle of a save."""

    @forked
    def _():
        reads, writes = os.pipe()
        parent = os.fork()
        if parent == 0:
            shard_writer.os.pwrite = lambda *args: threading.Event().wait()
            engine = engine_of()
            engine.save_checkpoint(tmp_path, wait=False)
            if os.fork() == 0:  # it has closed what it must not keep when this returns
                os.write(writes, str(os.getpid()).encode())
                os.read(os.pipe()[0], 1)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(parent, 0)
        child = int(os.read(reads, 20))
        try:
            assert engine_of().save_checkpoint(tmp_path).name == "step-00000000"
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.states_in_memory  # a fork has no thread that reads and writes those on disk
def test_a_child_leaves_its_parents_save_alone(tmp_path):
    """And its own changes wait for no one."""

    @forked
    def _():
        pwrite, gate = os.pwrite, threading.Event()
        shard_writer.BLOCK_BYTES = 8192  # more blocks than buffers
        shard_writer.os.pwrite = lambda *args: gate.wait() and pwrite(*args)
        engine = engine_of()
        path = engine.save_checkpoint(tmp_path, wait=False)

        def step():
            backward(engine)
            return engine.step().updated

        assert in_child(step, engine.wait_for_checkpoint) == [True, None]
        gate.set()
        engine.wait_for_checkpoint()
        engine.load_checkpoint(path)
        assert engine.optimizer.updates == 0


@pytest.mark.parametrize("kind", ["states", "built"])
def test_a_child_drops_what_is_on_disk_without_a_word_and_its_parent_trains_on(kind):
    @forked
    def _():
        fields = {"lr": 0.1, **(PARAMETERS_ON_DISK if kind == "built" else STATES_ON_DISK)}
        with init(**PARAMETERS_ON_DISK, enabled=kind == "built"):
            model = torch.nn.Linear(8, 2048)
        held = [model if kind == "built" else wrap(model, **fields)]
        del model

        def drop():
            said = []
            sys.unraisablehook = lambda error: said.append(str(error.exc_value))
            held.clear()
            gc.collect()
            return said

        assert in_child(drop) == [[]]
        engine = wrap(held[0], **fields) if kind == "built" else held[0]
        backward(engine)
        assert engine.step().updated


def test_a_child_of_another_thread_trains_although_the_main_thread_was_in_a_section():
    @forked
    def _():
        inside, go, said = threading.Event(), threading.Event(), []

        def train():
            engine = engine_of(schedule="serial")
            backward(engine)
            return engine.step().updated

        def forgotten():
            heard = []
            other = threading.Thread(target=lambda: heard.append(threads.in_section()))
            other.start()
            other.join()
            return heard

        def fork():
            inside.wait()
            said.extend(in_child(train, forgotten))
            go.set()

        other = threading.Thread(target=fork)
        other.start()
        threads.uninterrupted(lambda: (inside.set(), go.wait()))
        other.join()
        assert said == [True, [False]]


def test_a_child_of_a_process_that_saves_reads_its_states(tmp_path):
    """Another thread forks while the main thread saves: the child's copy of the states is whole."""

    @forked
    def _():
        engine, said = engine_of(), []
        backward(engine)
        engine.step()
        engine.flush()
        write, weight = Save.prepare, engine.module.weight

        def prepare(*arguments):
            count = lambda: engine.optimizer.state[weight]["step"].item()  # noqa: E731
            other = threading.Thread(target=lambda: said.extend(in_child(count)))
            other.start()
            other.join()
            return write(*arguments)

        Save.prepare = prepare
        engine.save_checkpoint(tmp_path)
        assert said == [1.0]
