"""One rank of a process group, run by test_own_groups.py: SCENARIO RANK WORLD_SIZE FOLDER."""

import gc
import os
import resource
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import frontends.torch.optimizer as optimizer_module
from frontends.torch import wrap
from frontends.torch.ranks.collectives import TorchRanks
from frontends.torch.ranks.device import memory_of
from frontends.torch.ranks.device_ranks import DeviceRanks
from frontends.torch.ranks.header_line import HeaderLine
from offload_core import OffloadError
from tests.support.torch_rank import bits, loss_of, main, make

FIELDS = {"lr": 1e-2, "param_dtype": "bfloat16", "reduce_bucket_size": 1000}


def said_by(act):
    try:
        act()
    except OffloadError as error:
        return f"{type(error).__name__}: {error}"
    return None


def train(engine, rank, seed=0):
    engine.backward(loss_of(engine, seed, rank))
    engine.step()


def begin_late_update(engine, rank):
    """A step whose first bucket is gathered only when the returned event is set."""
    engine.flush()
    go, collectives = threading.Event(), engine.optimizer.pipeline.device.collectives
    name = "gather" if type(engine.optimizer.pipeline.device).__name__ == "HostRanks" else "agree"
    original = getattr(collectives, name)

    def late(*arguments):
        if name == "gather" or "gathering" in arguments[0]:
            go.wait(60)
        original(*arguments)

    setattr(collectives, name, late)
    train(engine, rank, 1)
    return go


def again(rank, world_size):
    """Initialise torch.distributed anew, in another file."""
    place = f"file://{sys.argv[4]}/rendezvous2"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=world_size, timeout=timedelta(seconds=5))


def destroyed(rank, world_size):
    """The program destroys its groups while an update is running, and then makes another."""
    expected = wrap(make(), **FIELDS)
    train(expected, rank)
    train(expected, rank, 1)
    engine = wrap(make(), **FIELDS)
    train(engine, rank)
    go = begin_late_update(engine, rank)
    dist.destroy_process_group()
    go.set()
    result = {"ended": bits(engine.module) == bits(expected.module)}
    result["gone"] = said_by(lambda: train(engine, rank, 2))
    again(rank, world_size)
    result["in another group"] = said_by(lambda: train(engine, rank, 2))
    result["unchanged"] = bits(engine.module) == bits(expected.module)
    result["close"] = said_by(engine.close)
    result["anew"] = said_by(lambda: train(wrap(make(), **FIELDS), rank))
    return result


def destroyed_between_devices(rank, world_size):
    """The same where the process group itself carries buckets."""
    optimizer_module.device_for = lambda device, group, config: DeviceRanks(memory_of(device), TorchRanks(group), group)
    engine = wrap(make(), **FIELDS)
    train(engine, rank)
    go = begin_late_update(engine, rank)
    dist.destroy_process_group()
    again(rank, world_size)
    go.set()
    return [said_by(engine.flush), said_by(lambda: train(engine, rank, 2))]


def held():
    """Descriptors, and threads that are not Python's."""
    return [len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")) - threading.active_count()]


def held_in_the_end(before):
    """As :func:`held`; a thread is Python's no more a moment before it has ended."""
    until = time.monotonic() + 10
    while any(now > then for now, then in zip(held(), before, strict=True)) and time.monotonic() < until:
        time.sleep(0.01)
    return held()


def ended(rank, world_size):
    """Descriptors and threads of engines that were closed, and of some that were only dropped."""

    def use(stage, close):
        engine = wrap(make(), lr=1e-2, stage=stage, param_persistence_threshold=100)
        train(engine, rank)
        engine.flush()
        parts = engine, engine.optimizer.partitioned
        if close:
            engine.close()
            return parts  # a program may keep what is closed
        return None

    result = {}
    for stage in (2, 3):
        kept = use(stage, close=True)  # what the first one starts may stay
        before = held()
        kept = [use(stage, close=True) for _ in range(3)]
        result[f"closed, stage {stage}"] = [before, held_in_the_end(before)]
        del kept
    before = held()
    for _ in range(3):
        use(2, close=False)
        gc.collect()
    result["dropped"] = [before, held_in_the_end(before)]
    return result


def unreachable(rank, world_size):
    """Where ranks cannot reach each other but through gloo, headers take that way."""
    train(before := wrap(make(), **FIELDS), rank)
    HeaderLine._connect = lambda self, store, timeout: store.set(str(rank), "not reached") or False
    engine = wrap(make(), **FIELDS)
    train(engine, rank)
    engine.flush()
    before.flush()
    result = [bits(engine.module) == bits(before.module)]
    engine.backward(loss_of(engine, 1, rank))
    if rank == 0:
        engine.optimizer.pipeline.flush(engine.optimizer.parts.registration.tensors())
        return [*result, said_by(lambda: engine.optimizer.whole_states(next(engine.module.parameters())))]
    return [*result, said_by(engine.step)]


def few_descriptors(rank, world_size):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (held()[0] + 10, before[1]))
    refused = said_by(lambda: wrap(make()))
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    return [refused, said_by(lambda: train(wrap(make()), rank))]


def late(rank, world_size):
    """Rank 1 comes when rank 0 has given up waiting for it."""
    group, store = dist.new_group(timeout=timedelta(seconds=1)), dist.group.WORLD.get_group_store()
    if rank == 1:
        store.wait(["given up"], timedelta(seconds=60))
    said = said_by(lambda: wrap(make(), process_group=group))
    store.set("given up", "")
    return said


def lost(rank, world_size):
    """What rank 0 is told of a rank that does not come, and what of the next attempts."""
    engine = wrap(make(), process_group=dist.new_group(timeout=timedelta(seconds=1)))
    store = dist.group.WORLD.get_group_store()
    if rank == 1:
        store.wait(["told"], timedelta(seconds=60))
        return None
    said = [said_by(lambda: train(engine, rank)) for _ in range(3)]
    store.set("told", "")
    return said


def astray(rank, world_size):
    """Ranks that evaluate equal layers in another order, and one that tries a failed backward again."""
    layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
    layers.forward = lambda x: layers[1 - rank](layers[rank](x)).sum()
    engine = wrap(layers, stage=3, param_persistence_threshold=100)
    with torch.no_grad():
        order = said_by(lambda: engine(torch.ones(2, 16)))
    engine = wrap(make(), lr=1e-2, reduce_bucket_size=1500)
    train(engine, rank)
    fails = [rank]

    def fail(gradient):
        if fails.pop() if fails else 0:
            raise InterruptedError("its own")

    engine.module[0].weight.register_hook(fail)
    with suppress(InterruptedError):
        engine.backward(loss_of(engine, 1, rank))
    return [order, said_by(lambda: (rank and engine.backward(loss_of(engine, 1, rank)), engine.step()))]


def alone(rank, world_size):
    """A group of one rank opens no connection."""
    before = held()[0]
    engine = wrap(nn.Linear(4, 4))
    return [held()[0] - before, type(engine.optimizer.pipeline.device.collectives).__name__]


if __name__ == "__main__":
    main(globals())
