"""Partitioned parameters of the core, read by one rank and by several, and scenarios in which a missing wait shows."""

import tempfile
from dataclasses import replace

import numpy as np
import pytest

from offload_core.config.options import OffloadConfig
from offload_core.device.events import Done
from offload_core.device.host import HostDevice
from offload_core.device.host_ranks import HostRanks
from offload_core.disk.shards import DiskShards, ShardsInMemory
from offload_core.dtypes import BFLOAT16, FLOAT32
from offload_core.layout.partition import ParamSpec, build_buckets
from offload_core.rules.adam import AdamHyper
from offload_core.stage3.live_params import LiveParams
from offload_core.step.decision import StepArguments
from offload_core.step.health import PipelineHealth
from offload_core.step.state_access import StateAccess
from offload_core.step.state_lock import StateLock
from offload_core.testing.fake_device import FakeDevice, FakeTensor
from offload_core.testing.thread_ranks import ThreadRank, _Group, run_ranks
from tests.support.locking_pipeline import LockingPipeline
from tests.support.scripted_disk import scripted

SIZES = (40, 1, 200, 77, 33)


class Whole:
    """Memory that others use as soon as it is taken back: the device writes 7 to it."""

    def __init__(self, device, put, numel, dtype):
        self.device = device
        self.tensor = put(np.full(numel, 7).astype(dtype.numpy))
        self.given = False

    @property
    def array(self):
        return getattr(self.tensor, "memory", self.tensor)

    def allocate(self):
        assert not self.given
        self.given = True
        return self.tensor

    def free(self):
        assert self.given
        self.given = False
        if isinstance(self.device, FakeDevice):
            self.device.compute(lambda: self.array.fill(7))
        else:
            self.array[:] = 7


class Model:
    """Partitioned parameters, trained by a pipeline; what is read of them is read by the device itself."""

    def __init__(self, config, device, world=None, apart=None):
        self.device = device
        put = FakeTensor if isinstance(device, FakeDevice) else np.copy
        ranks = HostRanks(device, world)
        self.pipeline = LockingPipeline(config, ranks, None)
        self.live = LiveParams(config, HostRanks(device, apart), StateLock(), PipelineHealth())
        self.specs = [ParamSpec(f"p{i}", n, (FLOAT32, BFLOAT16)[i % 2], partitioned=True) for i, n in enumerate(SIZES)]
        rng = np.random.default_rng(0)
        self.put, self.params = put, []
        shards, wholes = [], []
        for spec in self.specs:
            values = rng.standard_normal(spec.numel).astype(spec.dtype.numpy)
            buckets = build_buckets([spec], world_size=ranks.world_size, bucket_numel=config.reduce_bucket_size)
            shard = np.zeros(sum(b.shard_numel for b in buckets), spec.dtype.numpy)
            for bucket in buckets:
                for piece in bucket.shards(ranks.ranks):
                    start = bucket.in_tensor(piece)
                    shard[start : start + piece.numel] = values[piece.start : piece.stop]
            shards.append(shard if self.pipeline.buckets.terms.host_shards else put(shard))
            wholes.append((buckets, Whole(device, put, sum(b.padded_numel for b in buckets), spec.dtype)))
        disk = None
        self.pipeline.add_parameters(self.specs, shards)
        states = StateAccess(self.pipeline)
        if self.pipeline.buckets.terms.shards_on_disk:
            disk = DiskShards(config.nvme_path, self.pipeline.memory)
            self.shards = [disk.with_states(states.parameter_parts(i), spec.dtype) for i, spec in enumerate(self.specs)]
        else:
            kept = [states.parameter_memory(i) for i in range(len(self.specs))]
            self.shards = [own if memory is None else memory for own, memory in zip(shards, kept, strict=True)]
        for i, (spec, shard, (buckets, memory)) in enumerate(zip(self.specs, self.shards, wholes, strict=True)):
            on_host = self.pipeline.buckets.terms.host_shards
            place = shard if disk else ShardsInMemory(device.host_array(shard) if on_host else shard)
            self.params.append(self.live.add(spec, buckets, place, memory))
            self.params[i].updated = lambda i=i: self.pipeline.updates.update_of(i)

    def read_later(self, used):
        """Read these parameters as a module does. Call the result to see the values when the device has computed."""
        params = [self.params[i] for i in used]
        self.live.acquire(params)
        found = [np.empty(p.numel, p.spec.dtype.numpy) for p in params]

        def compute():
            for param, out in zip(params, found, strict=True):
                out[:] = param.memory.array[: param.numel]

        computed = self.device.compute(compute) if isinstance(self.device, FakeDevice) else compute() or Done()
        self.live.release(params)

        def look():
            computed.wait()
            return [array.tobytes() for array in found]

        return look

    def read(self, used):
        return self.read_later(used)()

    def check_released(self):
        """Nothing is whole, and nothing has written to memory that others have by now."""
        assert self.live.numel == self.live.n_bytes == 0
        self.device.mark().wait()
        self.device.synchronize()
        for param in self.params:
            assert not param.memory.given
            assert (param.memory.array == 7).all()

    def step(self, seed):
        digest = self.live.release_all()
        rng = np.random.default_rng(seed)
        for i, spec in enumerate(self.specs):
            self.pipeline.gradients.add({i: self.put(rng.standard_normal(spec.numel).astype(spec.dtype.numpy))})
        self.pipeline.gradients.end_micro_step()
        self.pipeline.step(StepArguments([AdamHyper(lr=0.1)], self.shards), gathered=digest)


def expected(rounds, config):
    """The whole parameters at every read, as one rank on the host has them."""
    in_memory = {"offload_optimizer": "cpu", "nvme_path": None, "nvme_host_bytes": None}
    if config.offload_param is not None:
        in_memory["offload_param"] = "cpu"
    model = Model(replace(config, schedule="serial", **in_memory), HostDevice())
    seen = []
    for step, uses in enumerate(rounds):
        seen += [[model.shards[i][: SIZES[i]].tobytes() for i in used] for used in uses]
        model.step(step)
    return seen


def run(model, rounds, *, at_once=False):
    """Return the values read in these rounds, each with a step at its end. Look at them after all, or at once."""
    seen = []
    for step, uses in enumerate(rounds):
        model.live.begin_round("forward")
        for used in uses:
            seen.append(model.read_later(used))
            if at_once:
                seen[-1]()
        model.step(step)
        assert model.live.numel == 0
    model.pipeline.last_step.finish()
    found = [look() for look in seen]
    model.check_released()
    return found


CONFIG = OffloadConfig(stage=3, offload_param="cpu", max_reuse_distance=0)


def a_gather_that_fails():
    """It is an error of who needs it; the next one works."""
    model = Model(CONFIG, FakeDevice())
    model.read([0])
    gather = model.live.device.gather

    def failing(*args):
        raise OSError("as asked")

    model.live.device.gather = failing
    with pytest.raises(OSError, match="as asked"):
        model.live.acquire(model.params[:2])
    assert model.live.numel == 0
    assert [param.holds for param in model.params[:2]] == [0, 0]
    model.live.device.gather = gather
    assert model.read([1]) == [model.shards[1][:1].tobytes()]
    model.check_released()


ROUNDS = [[[0, 2], [3]], [[0, 2], [3], [4]], [[0, 2], [4]], [[0, 2], [3], [4], [0]], [[1]]]
"""In some of them what is expected does not come."""


def parameters_that_are_read_after_updates():
    for fields in ({}, {"prefetch_bucket_size": 0, "max_live_parameters": 0}, {"max_reuse_distance": 10**6}):
        model = Model(replace(CONFIG, **fields), FakeDevice())
        assert run(model, ROUNDS) == expected(ROUNDS, CONFIG)
    assert run(Model(CONFIG, FakeDevice()), ROUNDS, at_once=True) == expected(ROUNDS, CONFIG)


def parameters_on_disk():
    """Shards that lie with their states are read as the last update leaves them, whenever transfers end."""
    on_disk = {"offload_param": "nvme", "offload_optimizer": "nvme", "nvme_path": tempfile.gettempdir()}
    config = replace(CONFIG, nvme_host_bytes=0, reduce_bucket_size=64, **on_disk)
    for order in ("late", "at once", 0):
        for fields in ({}, {"prefetch_bucket_size": 100, "max_live_parameters": 150}):
            with scripted(order):
                model = Model(replace(config, **fields), FakeDevice())
                assert run(model, ROUNDS, at_once=bool(fields)) == expected(ROUNDS, config)
                model.pipeline.buckets.close()


def parameters_of_ranks():
    for offload_param in (None, "cpu"):
        config = replace(CONFIG, offload_param=offload_param, reduce_bucket_size=64)
        apart = _Group(2, 60.0)

        def body(rank, config=config, apart=apart):
            return run(Model(config, FakeDevice(), rank, ThreadRank(apart, rank.rank)), ROUNDS)

        ranks = run_ranks(2, body)
        assert ranks[0] == ranks[1] == expected(ROUNDS, CONFIG)


def a_task_among_the_gathers():
    """It has ended when the call returns."""
    done = []
    Model(CONFIG, FakeDevice()).live.in_order(lambda: done.append(True))
    assert done


SCENARIOS = [
    a_gather_that_fails,
    parameters_that_are_read_after_updates,
    parameters_on_disk,
    parameters_of_ranks,
    a_task_among_the_gathers,
]
"""Scenarios in which a missing wait of the core shows (``test_waits.py``)."""
