"""Saves that are killed: children forked from one warm process, which knows no framework, and what is left of them.

``python checkpoint_crash_worker.py ACT FOLDER COUNT SEED`` prints what was hit as JSON; a broken law is an error.
"""

import collections
import io
import itertools
import json
import mmap
import os
import random
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np

import offload_core.checkpoint.shard_writer
import offload_core.support.checkpoint_folder
from offload_core.checkpoint.checkpoints import Checkpoints, Contents
from offload_core.checkpoint.loading import Target
from offload_core.checkpoint.reader import Checkpoint, Want
from offload_core.checkpoint.shard_writer import Source
from offload_core.config.options import OffloadConfig
from offload_core.device.host import HostDevice
from offload_core.device.host_ranks import HostRanks
from offload_core.dtypes import BFLOAT16
from offload_core.errors import CheckpointError, CollectiveError
from offload_core.layout.partition import ParamSpec
from offload_core.layout.regions import Region
from offload_core.rules.adam import AdamHyper
from offload_core.step.decision import StepArguments
from offload_core.step.state_access import StateAccess
from tests.support.locking_pipeline import LockingPipeline

SIZES = (40, 1500, 3)
KEEP = 2
PHASES = ("begin", "blocks", "part", "manifest", "rename", "latest", "rotation")
CALLS = (
    *(
        "mkdir",
        "open",
        "posix_fallocate",
        "pwrite",
        "fsync",
        "close",
        "rename",
        "replace",
        "unlink",
        "rmdir",
        "scandir",
    ),
    *("preadv", "stat", "lstat"),
)
FAILED = 7

offload_core.checkpoint.shard_writer.BLOCK_BYTES = 4096


# --- a run whose states say of which step they are ---------------------------------------------------------


def values(step, i, name, numel):
    return np.random.default_rng([step, i, len(name)]).standard_normal(numel).astype(np.float32)


class Run:
    def __init__(self, collectives=None):
        config = OffloadConfig(num_threads=1, schedule="serial", reduce_bucket_size=700)
        self.pipeline = LockingPipeline(config, HostRanks(HostDevice(), collectives), None)
        self.tensors = [np.zeros(n, BFLOAT16.numpy) for n in SIZES]
        specs = [ParamSpec(f"p{i}", n, BFLOAT16, 0) for i, n in enumerate(SIZES)]
        self.names = [spec.name for spec in specs]
        self.pipeline.add_parameters(specs, self.tensors)
        self.buffer = np.zeros(9, np.float32)
        self.region = Region((9,), 0, 9)
        self.checkpoints = Checkpoints(self.pipeline, StateAccess(self.pipeline))

    def views(self):
        for i, numel in enumerate(SIZES):
            for start, views in StateAccess(self.pipeline).states(i):
                for name, view in views.items():
                    yield (
                        view,
                        lambda step, i=i, n=numel, name=name, start=start, size=view.size: values(step, i, name, n)[
                            start : start + size
                        ],
                    )

    def become(self, step):
        for view, expected in self.views():
            view[:] = expected(step)
        self.buffer[:] = step
        for i in range(len(SIZES)):
            self.pipeline.counts.steps[i][...] = step

    def save(self, folder, step, *, wait=True, tag=None):
        self.become(step)
        contents = Contents(
            self.names,
            sources=[Source.of("buffer", "param", self.region, self.buffer)]
            * (self.pipeline.device.collectives.rank == 0),
            shapes={"buffer": (self.buffer.shape, self.buffer.dtype)},
            state={"step": step, "table": np.full(5, step)},
            own=np.full(3, step),
        )
        keep = KEEP if tag is None else None
        self.checkpoints.save(folder, contents, self.tensors, step=step, keep=keep, wait=wait, tag=tag)
        if not wait:
            self.train()
            self.checkpoints.wait()

    def train(self):
        for i, tensor in enumerate(self.tensors):
            self.pipeline.gradients.add({i: np.ones(tensor.size, BFLOAT16.numpy)})
        self.pipeline.gradients.end_micro_step()
        assert self.pipeline.step(StepArguments([AdamHyper(1e-2)], self.tensors)).updated

    def load(self, folder):
        """The step that was loaded, whole."""
        self.become(0)
        target = Target("buffer", (9,), lambda kind: [Want("buffer", kind, self.region, self.buffer)])
        publish = partial(self.pipeline.parameters.flush, self.tensors)
        loaded = self.checkpoints.load(folder, self.names, [target], self.tensors, publish)
        step = loaded.step
        assert all(np.array_equal(view, expected(step)) for view, expected in self.views()), "a mixture"
        assert (self.buffer == step).all()
        assert loaded.state["step"] == step
        assert loaded.own is None or (loaded.own == step).all()
        assert (loaded.state["table"] == step).all()
        assert [float(s) for s in self.pipeline.counts.steps] == [step] * len(SIZES)
        return step


# --- who is killed, and where --------------------------------------------------------------------------------


class Killer:
    """Counts this process's system calls from now on, says in which phase of a save they are, and ends it at one."""

    def __init__(self, phase, at=None):
        self.phase, self.at, self.n = phase, at, 0
        for name in CALLS:
            setattr(os, name, self.watched(getattr(os, name), name))
        io.open = self.watched(io.open, "open")
        offload_core.support.checkpoint_folder.exchange = self.watched(
            offload_core.support.checkpoint_folder.exchange, "rename"
        )

    def watched(self, call, name):
        def watching(*args, **options):
            self.note(name, " ".join(os.fspath(a) for a in args if isinstance(a, str | Path)))
            if self.n == self.at:
                os.kill(os.getpid(), signal.SIGKILL)
            self.n += 1
            return call(*args, **options)

        return watching

    def note(self, name, paths):
        hints = {
            "rotation": ".discarded" in paths,
            "rename": name == "rename" and ".saving" in paths,
            "latest": "latest" in paths,
            "manifest": "manifest" in paths,
            "part": "part-" in paths,
            "blocks": "shard-" in paths,
            "begin": name == "mkdir",
        }
        known = [phase for phase, hit in hints.items() if hit]
        if known and not (name in ("stat", "lstat", "scandir") and known[0] not in ("rotation",)):
            self.phase[0] = PHASES.index(known[0])


def forked(act):
    """The child's process number; it ends when ``act`` does."""
    child = os.fork()
    if child:
        return child
    try:
        act()
        os._exit(0)
    except (CheckpointError, CollectiveError):
        os._exit(FAILED)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)


def end_of(child):
    """Wait for a child. Return its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def assert_clean(folder, tag=None):
    left = {path.name for path in folder.iterdir() if not path.name.startswith("step-")} - {"latest", tag}
    assert not left, left


def shared_byte():
    byte = mmap.mmap(-1, 1)
    byte[0] = 0
    return byte


def at_every_call(folder, count, seed, tag=None):
    """Kill one process at each ``count``-th call of a save, from the ``seed``-th on.

    Args:
        tag: the name of all checkpoints: each takes the place of the one before.
    """
    run, hit = Run(), collections.Counter()
    last = 0
    run.save(folder, last := last + 1, tag=tag)
    run.save(folder, last := last + 1, tag=tag)
    stride = max(1, count)
    for at in itertools.count(seed % stride, stride):
        phase = shared_byte()

        def act(at=at, phase=phase, step=last + 1):
            Killer(phase, at)
            run.save(folder, step, tag=tag)

        code = end_of(forked(act))
        loaded = run.load(folder)
        if code == 0:
            assert loaded == last + 1
            break
        assert code == -signal.SIGKILL, code
        assert loaded in (last, last + 1), (loaded, last)
        hit[PHASES[phase[0]]] += 1
        last = loaded
        run.save(folder, last := last + 1, tag=tag)
        assert_clean(folder, tag)
        Checkpoint(folder).verify()
        assert len([*folder.glob("step-*")]) == (KEEP if tag is None else 0)
    return hit


at_every_call_with_a_tag = partial(at_every_call, tag="best")


def at_random(folder, count, seed):
    """Kill one process that saves over and over, at random moments."""
    rng, run, hit = random.Random(seed), Run(), collections.Counter()
    last = 1
    start = time.monotonic()
    run.save(folder, last)
    took = time.monotonic() - start
    for _ in range(count):
        phase, wait, (ours, theirs) = shared_byte(), rng.random() < 0.5, os.pipe()

        def act(phase=phase, theirs=theirs, first=last + 1, wait=wait):
            Killer(phase)
            for step in itertools.count(first):
                run.save(folder, step, wait=wait)
                os.write(theirs, step.to_bytes(4, "little"))

        child = forked(act)
        os.close(theirs)
        time.sleep(rng.uniform(0, 1.5 * took))
        os.kill(child, signal.SIGKILL)
        assert end_of(child) == -signal.SIGKILL
        told = bytearray()
        while part := os.read(ours, 4096):
            told += part
        os.close(ours)
        complete = int.from_bytes(told[-4:], "little") if told else last
        loaded = run.load(folder)
        assert loaded in (complete, complete + 1), (loaded, complete)
        hit[PHASES[phase[0]]] += 1
        last = loaded
    run.save(folder, last + 1)
    assert_clean(folder)
    return hit


class Link:
    """Two ranks over a socket."""

    world_size = 2
    sent_bytes = 0

    def __init__(self, rank, end):
        self.rank, self._end = rank, end

    def _swap(self, data, what):
        try:
            self._end.sendall(data)
            theirs = bytearray()
            while len(theirs) < len(data):
                part = self._end.recv(len(data) - len(theirs))
                if not part:
                    raise EOFError("the other rank is gone")
                theirs += part
        except (OSError, EOFError) as error:
            raise CollectiveError.of(self.rank, what, error) from error
        return theirs

    def _both(self, array, what):
        theirs = np.frombuffer(self._swap(array.tobytes(), what), array.dtype).reshape(array.shape)
        return (array, theirs) if self.rank == 0 else (theirs, array)

    def sum_integers(self, array, what):
        np.copyto(array, np.sum(self._both(array, what), axis=0))

    def broadcast(self, array, what, source=0):
        np.copyto(array, self._both(array, what)[source])

    def exchange(self, send, received, what):
        parts = [both.reshape(2, -1)[self.rank] for both in self._both(send, what)]
        np.copyto(received.reshape(2, -1), parts)

    def gather(self, send, received, what):
        np.copyto(received.reshape(2, -1), [both.reshape(-1) for both in self._both(send, what)])


def pair(act):
    """Run ``act(rank, run)`` on two ranks. Return how each ended."""
    ends = socket.socketpair()

    def body(rank):
        ends[1 - rank].close()
        act(rank, Run(Link(rank, ends[rank])))

    children = [forked(partial(body, rank)) for rank in range(2)]
    for end in ends:
        end.close()
    return [end_of(child) for child in children]


def of_two(folder, count, seed):
    """Kill one of two ranks at each ``count``-th call of a save, from the ``seed``-th on."""
    alone, hit = Run(), collections.Counter()
    alone.save(folder, 1)
    last = 1
    stride = max(1, count)
    for victim in (0, 1):
        for at in itertools.count(seed % stride, stride):
            phase = shared_byte()

            def act(rank, run, victim=victim, at=at, phase=phase, step=last + 1):
                if rank == victim:
                    Killer(phase, at)
                run.save(folder, step, wait=at % 2 == 0)

            codes = pair(act)
            loaded = alone.load(folder)
            if codes[victim] == 0:
                assert codes == [0, 0], codes
                assert loaded == last + 1
                last = loaded
                break
            assert codes[victim] == -signal.SIGKILL, codes
            assert codes[1 - victim] in (FAILED, 0), codes
            assert loaded in (last, last + 1), (loaded, last)
            assert loaded == last + 1 or codes[1 - victim] == FAILED, "told that it was saved, and it was not"
            hit[f"{PHASES[phase[0]]} of {victim}"] += 1
            last = loaded

            def go_on(rank, run, step=last + 1):
                assert run.load(folder) == step - 1
                run.train()
                run.save(folder, step)

            codes = pair(go_on)
            assert codes == [0, 0], codes
            last += 1
            assert alone.load(folder) == last
            assert_clean(folder)
    return hit


if __name__ == "__main__":
    name, path, count, seed = sys.argv[1:]
    acts = {
        "at_every_call": at_every_call,
        "with_a_tag": at_every_call_with_a_tag,
        "at_random": at_random,
        "of_two": of_two,
    }
    print(json.dumps(acts[name](Path(path), int(count), int(seed))))
    assert not {"torch", "jax"} & sys.modules.keys()
