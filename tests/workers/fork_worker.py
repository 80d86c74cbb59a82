"""Forks of a training process, as a data loader makes them: SCENARIO FOLDER. Prints what the child said."""

import json
import os
import signal
import sys
import threading
from pathlib import Path

import torch

from frontends.torch import wrap
from frontends.torch.ranks import device_ranks
from offload_core.checkpoint import shard_writer
from offload_core.checkpoint.saving import Save
from offload_core.support import threads
from tests.support.slow_torch_device import SlowTorchDevice

SECONDS = 20
"""After which a child that hangs is ended."""


def engine_of(**fields):
    torch.manual_seed(0)
    fields = {"param_dtype": "bfloat16", "reduce_bucket_size": 4096, "num_threads": 1, **fields}
    return wrap(torch.nn.Linear(8, 2048), lr=1e-2, **fields)


def backward(engine):
    engine.backward(engine(torch.ones(4, 8)).float().pow(2).mean())


def in_child(*acts):
    """What each of these returns, or raises, in a forked process."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
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


class Gate(threading.Event):
    """Known to have been reached."""

    def __init__(self):
        super().__init__()
        self.reached = threading.Event()

    def wait(self, timeout=None):
        self.reached.set()
        return super().wait(timeout)


def section(folder):
    """Another thread forks in the middle of a section of the main thread; the child trains an engine of its own."""
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
    threads.uninterrupted(lambda: (inside.set(), go.wait(SECONDS)))
    other.join()
    return said


def saving(folder):
    """Another thread forks while the main thread saves: the child's copy of the states is whole."""
    engine, said = engine_of(), []
    backward(engine)
    engine.step()
    engine.flush()
    write, weight = Save.prepare, engine.module.weight

    def prepare(*arguments):
        def count():
            return engine.optimizer.state[weight]["step"].item()

        other = threading.Thread(target=lambda: said.extend(in_child(count)))
        other.start()
        other.join()
        return write(*arguments)

    Save.prepare = prepare
    engine.save_checkpoint(folder)
    return said


def slow_device():
    slow = SlowTorchDevice(0.0)
    device_ranks.memory_of = lambda device: slow
    return slow


def pending(folder):
    """A child reads a parameter whose update is on its way, and one whose update has ended."""
    slow, engine = slow_device(), engine_of()
    backward(engine)
    slow.gate.clear()
    engine.step()
    weight = engine.module.weight

    def read():
        return weight.float().sum().item()

    def step():
        backward(engine)
        return str(engine.step())

    said = in_child(read, lambda: str(engine.optimizer.state_dict()["state"]), step)
    slow.gate.set()
    here = read()
    return {"on its way": said, "here": here, "ended": in_child(read)}


def torn(folder):
    """A thread forks while the main thread is in the middle of a step."""
    slow, engine = slow_device(), engine_of(schedule="serial")
    backward(engine)
    slow.gate = Gate()
    said = []

    def fork():
        slow.gate.reached.wait()
        said.extend(in_child(lambda: len(engine.optimizer.state_dict()["state"])))
        slow.gate.set()

    other = threading.Thread(target=fork)
    other.start()
    engine.step()
    other.join()
    return {"said": said, "updates": engine.optimizer.updates}


def lock(folder):
    """A child outlives its parent, which was killed in the middle of a save."""
    reads, writes = os.pipe()
    parent = os.fork()
    if parent == 0:
        shard_writer.os.pwrite = lambda *args: threading.Event().wait()
        engine = engine_of()
        engine.save_checkpoint(folder, wait=False)
        child = os.fork()
        if child == 0:
            os.read(os.pipe()[0], 1)
        os.write(writes, str(child).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(parent, 0)
    child = int(os.read(reads, 20))
    try:
        engine = engine_of()
        path = engine.save_checkpoint(folder)
        return {"saved": path.name}
    except Exception as error:
        return {"saved": str(error)}
    finally:
        os.kill(child, signal.SIGKILL)


def unfinished(folder):
    """A child of a process that saves: it leaves the save alone, and its own changes wait for no one."""
    pwrite, gate = os.pwrite, threading.Event()
    shard_writer.BLOCK_BYTES = 8192  # more blocks than buffers
    shard_writer.os.pwrite = lambda *args: gate.wait() and pwrite(*args)
    engine = engine_of()
    path = engine.save_checkpoint(folder, wait=False)

    def step():
        backward(engine)
        return str(engine.step().updated)

    said = in_child(step, lambda: str(engine.wait_for_checkpoint()))
    gate.set()
    engine.wait_for_checkpoint()
    engine.load_checkpoint(path)
    return {"said": said, "updates": engine.optimizer.updates}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(globals()[sys.argv[1]](Path(sys.argv[2]))))
