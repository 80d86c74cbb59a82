"""The group that an engine owns: it ends with the engine, is final once the program's group is gone, and says who was
not there."""

import gc
import os
import re
import resource
import threading
import time
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import frontends.torch.training.components as parts_module
from frontends.torch import wrap
from frontends.torch.ranks import private_group
from frontends.torch.ranks.collectives import TorchRanks
from frontends.torch.ranks.device import memory_of
from frontends.torch.ranks.device_ranks import DeviceRanks
from frontends.torch.ranks.header_line import HeaderLine
from tests.support.processes import on_ranks
from tests.support.torch_rank import bits, give_up, loss_of, make, said_by, train

FIELDS = {"lr": 1e-2, "param_dtype": "bfloat16", "reduce_bucket_size": 1000}


def trained(rank, seeds, **fields):
    engine = wrap(make(), **(fields or FIELDS))
    train(engine, rank, seeds)
    return engine


def begin_late_update(engine, rank):
    """Begin a step whose first bucket is gathered only when the returned event is set."""
    engine.flush()
    go, collectives = threading.Event(), engine.optimizer.core.device.collectives
    name = "gather" if type(engine.optimizer.core.device).__name__ == "HostRanks" else "compare_headers"
    original = getattr(collectives, name)

    def late(*arguments):
        if name == "gather" or "gathering" in arguments[0]:
            go.wait()
        original(*arguments)

    setattr(collectives, name, late)
    train(engine, rank, [1])
    return go


def destroy_groups_and_make_another(rank, between=lambda: None):
    store = dist.group.WORLD.get_group_store()
    dist.destroy_process_group()
    between()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=2)


@pytest.mark.long("starts two ranks")
def test_an_update_ends_after_its_process_group_was_destroyed_and_none_begins():
    @on_ranks(2)
    def _(rank):
        expected = bits(trained(rank, [0, 1]).module)
        engine = trained(rank, [0])
        gone = (
            f"CollectiveError: rank {rank}: bucket 0: exchange of gradients: the process group of this engine was "
            "destroyed, and the engine ends with it; expected destroy_process_group() after the last step: wrap the "
            "model anew in a new group. Its parameters are those of the last step"
        )

        def no_step_begins():
            assert bits(engine.module) == expected
            assert re.sub(r"bucket \d", "bucket 0", said_by(lambda: train(engine, rank, [2]))) == gone
            assert bits(engine.module) == expected

        go = begin_late_update(engine, rank)
        destroy_groups_and_make_another(rank, between=lambda: (go.set(), no_step_begins()))
        no_step_begins()
        engine.close()
        trained(rank, [0])


def test_where_the_process_group_carries_buckets_its_end_is_final_also_after_another_was_made():
    @on_ranks(2)
    def _(rank):
        parts_module.device_for = lambda device, group, config: DeviceRanks(memory_of(device), TorchRanks(group), group)
        engine = trained(rank, [0])
        go = begin_late_update(engine, rank)
        destroy_groups_and_make_another(rank)
        go.set()
        said = said_by(engine.flush)
        assert said.startswith(f"CollectiveError: rank {rank}: bucket ")
        assert "the process group of this engine was destroyed" in said
        assert said_by(lambda: train(engine, rank, [2])).startswith("StateError: the last update broke off")


def held():
    """Descriptors, and threads that are not Python's."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")) - threading.active_count()


def assert_no_more_is_held(than):
    """In the end: a thread is Python's no more a moment before it has ended."""
    until = time.monotonic() + 60
    while any(now > then for now, then in zip(held(), than, strict=True)):
        assert time.monotonic() < until, (held(), than)
        time.sleep(0.01)


def test_engines_leave_no_descriptors_and_no_threads():
    @on_ranks(2)
    def _(rank):
        def closed(stage):
            engine = trained(rank, [0], lr=1e-2, stage=stage, param_persistence_threshold=100)
            engine.flush()
            engine.close()
            return engine, engine.optimizer.sharding  # a program may keep what is closed

        for stage in (2, 3):
            kept = [closed(stage)]  # what the first one starts may stay
            before = held()
            kept += [closed(stage) for _ in range(3)]
            assert_no_more_is_held(before)
        del kept
        before = held()
        for _ in range(3):
            trained(rank, [0]).flush()
            gc.collect()
        assert_no_more_is_held(before)


def test_headers_go_through_gloo_where_ranks_cannot_reach_each_other():
    @on_ranks(2)
    def _(rank):
        expected = trained(rank, [0])
        HeaderLine._connect = lambda self, store, timeout: store.set(str(rank), "not reached") or False
        engine = trained(rank, [0])
        engine.flush()
        expected.flush()
        assert bits(engine.module) == bits(expected.module)
        engine.backward(loss_of(engine, 1, rank))
        if rank == 0:
            engine.flush()
            said = said_by(lambda: engine.optimizer.whole_states(next(engine.module.parameters())))
        else:
            said = said_by(engine.step)
        assert f"rank {rank}" in said
        assert "ranks went different ways" in said or "failed" in said


def test_an_engine_beyond_the_limit_of_descriptors_is_refused_by_name():
    @on_ranks(2)
    def _(rank):
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (held()[0] + 10, before[1]))
        refused = said_by(lambda: wrap(make()))
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert refused.startswith(f"CollectiveError: rank {rank}: an engine of 2 ranks takes up to 20 file descriptors")
        assert "close() engines that are no longer used, or raise the limit (ulimit -n)" in refused
        trained(rank, [0])


def test_a_rank_that_comes_to_wrap_too_late_is_told_so_and_the_others_whom_they_missed():
    @on_ranks(2)
    def found(rank):
        store = dist.group.WORLD.get_group_store()
        if rank == 0:
            private_group.timeout_of = lambda group: timedelta(seconds=0.2)
        else:
            store.wait(["given up"])
        said = said_by(lambda: wrap(make()))
        store.set("given up", "")
        return said

    assert found[0].startswith("CollectiveError: rank 0: making a group of the engine's ranks failed (")
    assert "; missing: rank 1; a rank was lost, did not come in the group's time, or" in found[0]
    failed = "rank 1: making a group of the engine's ranks failed (rank 0 has given up waiting)"
    assert found[1].startswith(f"CollectiveError: {failed}; a rank was lost")


def test_a_lost_rank_is_the_same_error_each_time():
    @on_ranks(2)
    def found(rank):
        engine = wrap(make())
        give_up("")
        return [said_by(lambda: train(engine, rank, [0])) for _ in range(3 * (rank == 0))]

    assert found[0][0].startswith("CollectiveError: rank 0: bucket 0: exchange of gradients failed (")
    assert found[0] == 3 * found[0][:1]


def test_ranks_that_went_different_ways_all_get_one_error_before_data_of_equal_or_other_size_are_paired():
    """Ranks evaluate equal layers in another order, and one tries a failed backward again."""

    @on_ranks(2)
    def found(rank):
        layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        layers.forward = lambda x: layers[1 - rank](layers[rank](x)).sum()
        engine = wrap(layers, stage=3, param_persistence_threshold=100)
        with torch.no_grad():
            order = said_by(lambda: engine(torch.ones(2, 16)))
        engine = trained(rank, [0], lr=1e-2, reduce_bucket_size=1500)
        fails = [rank]

        def fail(gradient):
            if fails.pop() if fails else 0:
                raise InterruptedError("its own")

        engine.module[0].weight.register_hook(fail)
        with suppress(InterruptedError):
            engine.backward(loss_of(engine, 1, rank))
        return order, said_by(lambda: (rank and engine.backward(loss_of(engine, 1, rank)), engine.step()))

    assert found[0] == found[1]
    order, other = found[0]
    place = "at parameter '{}.weight': gathering of its shards (1,024 bytes)"
    error = "CollectiveError: ranks went different ways: rank 0 {}; rank 1 {}; expected the same on every rank: "
    assert order.startswith(error.format(place.format(0), place.format(1)))
    assert re.match(error.format("at gradient norm .*", "at bucket .: exchange of gradients .*"), other)


def test_a_group_of_one_rank_needs_no_connections():
    @on_ranks(1)
    def _(rank):
        before = held()[0]
        engine = wrap(nn.Linear(4, 4))
        assert held()[0] == before
        assert type(engine.optimizer.core.device.collectives).__name__ == "SingleRank"
