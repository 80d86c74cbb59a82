"""Checkpoints of the pipelines in pipelines.py: saved, loaded, and written by a slow disk."""

import threading
from functools import partial

from offload_core.checkpoint.checkpoints import Checkpoints, Contents
from offload_core.checkpoint.shard_writer import ShardWriter
from offload_core.rules.adam import AdamHyper
from offload_core.step.decision import StepArguments
from offload_core.step.state_access import StateAccess


def names_of(subject):
    return [spec.name for spec in subject.specs]


def save(subject, folder, *, wait=True, step=1, keep=None, tag=None, latest=True, checkpoints=None, **contents):
    checkpoints = checkpoints or Checkpoints(subject.pipeline, StateAccess(subject.pipeline))
    named = Contents(names_of(subject), **contents)
    path = checkpoints.save(folder, named, subject.tensors, step=step, keep=keep, wait=wait, tag=tag, latest=latest)
    return path, checkpoints


def load(subject, path, targets=(), names=None, **options):
    checkpoints = Checkpoints(subject.pipeline, StateAccess(subject.pipeline))
    publish = partial(subject.pipeline.parameters.flush, subject.tensors)
    return checkpoints.load(path, names or names_of(subject), targets, subject.tensors, publish, **options)


def one_step(subject, value=0.5):
    subject.add_all(value)
    subject.pipeline.gradients.end_micro_step()
    return subject.pipeline.step(StepArguments([AdamHyper(1e-2)], subject.tensors))


class Loader:
    """A data loader's place, which it may refuse to take."""

    def __init__(self, at=0):
        self.at, self.refuses = at, False

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        if self.refuses:
            raise KeyError("load_state_dict")
        self.at = state["at"]


class Slow:
    """A disk that writes a block when it is told to."""

    def __init__(self, monkeypatch):
        self.allowed = threading.Semaphore(0)
        put = ShardWriter._put

        def slowly(writer, data, at):
            assert self.allowed.acquire(timeout=60)
            put(writer, data, at)

        monkeypatch.setattr(ShardWriter, "_put", slowly)

    def go_on(self):
        self.allowed.release(10**6)
