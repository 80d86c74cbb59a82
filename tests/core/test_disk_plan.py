"""Plans of states on disk: the memory and the space that they take, what a step moves, and what is refused."""

import re
from collections import Counter
from contextlib import contextmanager

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from frontends.jax import wrap as wrap_jax
from frontends.torch import wrap
from offload_core import DiskSpaceError, HostMemoryError
from offload_core.config.options import OffloadConfig
from offload_core.device.exchange_sizes import planned_device
from offload_core.disk.scratch import ScratchFiles
from offload_core.dtypes import BFLOAT16
from offload_core.layout.partition import ParamSpec
from offload_core.memory.host_memory import HostMemory, format_bytes
from offload_core.memory.plan import MemoryPlan
from offload_core.plans.planner import Planner
from offload_core.plans.prediction import Speeds, predict
from offload_core.plans.terms import BucketTerms
from offload_core.rules.adam import AdamHyper
from offload_core.states.on_disk import StatesOnDisk
from offload_core.states.ring import SLOTS
from offload_core.step.decision import StepArguments
from offload_core.testing.fake_device import FakeDevice
from tests.support.pipelines import STATES, Subject
from tests.support.strategies import law

BUCKETS, NUMEL = 12, 1024
STATE = 4 * NUMEL
"""The bytes of a state of one bucket, in whole pages."""
RESERVE = 2**30
"""Less than 10 GiB are free in these tests."""


def in_torch(**fields):
    params = [torch.nn.Parameter(torch.ones(NUMEL)) for _ in range(BUCKETS)]
    return wrap(torch.nn.ParameterList(params), reduce_bucket_size=NUMEL, num_threads=1, **fields)


def in_jax(**fields):
    return wrap_jax(
        {str(i): jnp.ones(NUMEL) for i in range(BUCKETS)}, reduce_bucket_size=NUMEL, num_threads=1, **fields
    )


FRONTENDS = {
    "torch": (in_torch, "frontends.torch.registration.available_bytes", 2),
    "jax": (in_jax, "frontends.jax.placement.memory.available_bytes", 3),
}
"""A model, where its front end asks for free memory, and the states of a parameter: torch updates fp32 parameters in
place, so that they have no master weights."""
over_frontends = pytest.mark.parametrize("frontend", FRONTENDS)


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    return {"offload_optimizer": "nvme", "nvme_path": str(tmp_path_factory.mktemp("disk"))}


@contextmanager
def free_memory(frontend, n_bytes):
    """A machine with so much free memory; the plans that are checked meanwhile."""
    seen: list[MemoryPlan] = []
    check = MemoryPlan.check
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FRONTENDS[frontend][1], lambda: n_bytes)
        patch.setattr(MemoryPlan, "check", lambda plan, *args, **kw: seen.append(plan) or check(plan, *args, **kw))
        yield seen


@contextmanager
def nothing_allocated():
    taken = []
    with pytest.MonkeyPatch.context() as patch:
        for kind, name in ((HostMemory, "allocate"), (ScratchFiles, "grow")):
            patch.setattr(kind, name, lambda *args, **kw: taken.append(args))
        yield
    assert not taken


def needs_of_all_on_disk(frontend, disk):
    with free_memory(frontend, 10**9) as plans:
        FRONTENDS[frontend][0](nvme_host_bytes=0, **disk)
    [plan] = plans
    return plan.needs["host"]


def states_on(report, where):
    return sum(row.held for row in report.rows if row.where == where and row.what in STATES)


@over_frontends
@law(12)
@given(blocks=st.integers(-2, BUCKETS + 2), more=st.integers(-1, 1))
@example(blocks=1, more=-1)
@example(blocks=1, more=0)
@example(blocks=BUCKETS, more=-1)
@example(blocks=BUCKETS, more=0)
def test_states_take_the_free_memory_less_a_reserve_as_planned(frontend, disk, blocks, more):
    make_model, _, states = FRONTENDS[frontend]
    room = blocks * states * STATE + more
    others = needs_of_all_on_disk(frontend, disk)
    with free_memory(frontend, max(others + RESERVE + room, others)) as plans:
        report = make_model(**disk).memory_report()
    kept = min(max(room, 0) // (states * STATE), BUCKETS)
    assert states_on(report, "host") == kept * states * STATE
    assert states_on(report, "disk") == (BUCKETS - kept) * states * STATE
    assert plans[0].needs["host"] <= others + max(room, 0)
    lasting = [row for row in report.rows if row.where != "device" and not row.brief]
    assert [row.planned for row in lasting] == [row.held for row in lasting]
    assert {row.what for row in lasting} >= {"exp_avg", "exp_avg_sq"}


def moved_in(subject, n_steps):
    """The bytes that the disk reads and writes in so many steps."""
    moved = Counter()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("read", "write"):
            move = getattr(ScratchFiles, name)

            def counted(files, at, memory, *args, name=name, move=move):
                moved[name] += memory.size
                return move(files, at, memory, *args)

            patch.setattr(ScratchFiles, name, counted)
        for _ in range(n_steps):
            subject.add_all()
            subject.pipeline.step(StepArguments([AdamHyper(1e-2)], subject.tensors))
            subject.pipeline.last_step.finish()
    return moved["read"], moved["write"]


@pytest.mark.parametrize("fields", [{}, {"state_format": "8bit"}, {"schedule": "serial"}, {"nvme_host_bytes": 40_000}])
def test_a_step_reads_and_writes_what_is_planned(fields, disk):
    config = OffloadConfig(**{"nvme_host_bytes": 0, "reduce_bucket_size": 512, **disk, **fields})
    n = 3 * SLOTS
    subject = Subject(FakeDevice(), [np.ones(512, np.float32)] * n, [BFLOAT16] * n, [0] * n, config)
    pipeline = subject.pipeline
    traffic, last = Planner(BucketTerms(pipeline.config, pipeline.device)).traffic(subject.specs)
    blocks = len(pipeline.buckets.store._layouts)
    assert n - blocks == (3 if config.nvme_host_bytes else 0)
    assert traffic.disk_read == traffic.disk_write
    block = (5 if config.state_format == "8bit" else 3) * 4096  # of two moments scales lie beside
    assert traffic.disk_write == blocks * block
    assert (last.disk_read, last.disk_write) == (0, 0)
    moved_in(subject, 2)
    read, written = moved_in(subject, 4)
    assert written == 4 * traffic.disk_write
    assert abs(read - 4 * traffic.disk_read) <= SLOTS * block  # some are ahead, or still there


# --- refused --------------------------------------------------------------------------------------------


@over_frontends
def test_memory_for_states_that_is_not_free_is_refused(frontend, disk):
    make_model, _, states = FRONTENDS[frontend]
    free = needs_of_all_on_disk(frontend, disk) + (BUCKETS - SLOTS) * states * STATE - 1  # and no slots
    with free_memory(frontend, free), nothing_allocated(), pytest.raises(HostMemoryError, match="of host memory"):
        make_model(nvme_host_bytes=10**9, **disk)
    with free_memory(frontend, free + 1):
        make_model(nvme_host_bytes=10**9, **disk)


@over_frontends
def test_a_disk_that_is_too_small_is_refused_with_its_folder_and_the_plan(frontend, disk, monkeypatch):
    make_model, _, states = FRONTENDS[frontend]
    needed = BUCKETS * states * STATE
    monkeypatch.setattr(StatesOnDisk, "free_bytes", lambda config: needed - 1)
    with nothing_allocated(), pytest.raises(DiskSpaceError) as error:
        make_model(nvme_host_bytes=0, **disk)
    said = str(error.value)
    size = format_bytes(needed)
    assert f"needs {size} of disk space in {disk['nvme_path']} for 12,288 parameters, and {size} is available" in said
    assert "nothing was allocated" in said
    assert re.search(r"Free space, or change what is named:\nwhere .*\ndevice ", said)
    assert re.search(r"disk +exp_avg +48\.0 KiB +4\.00", said)
    monkeypatch.setattr(StatesOnDisk, "free_bytes", lambda config: needed)
    make_model(nvme_host_bytes=0, **disk)


@over_frontends
def test_a_model_too_large_for_the_host_is_told_of_the_disk_with_figures_that_hold(frontend, disk):
    make_model, _, states = FRONTENDS[frontend]
    others = needs_of_all_on_disk(frontend, disk)
    with free_memory(frontend, others) as plans, nothing_allocated(), pytest.raises(HostMemoryError) as error:
        make_model()
    assert plans[0].on_disk[1:] == (plans[0].needs["host"] - others, BUCKETS * states * STATE)
    assert plans[0].on_disk.saved > 0
    assert (
        f"With offload_optimizer='nvme', nvme_path='/folder/on/a/disk' it would fit, in {format_bytes(others)} of host "
        f"memory or more, and {format_bytes(BUCKETS * states * STATE)} of disk space or less (docs/disk.md)"
    ) in str(error.value)
    with free_memory(frontend, others):
        make_model(**disk)
    with free_memory(frontend, others - 1), pytest.raises(HostMemoryError) as error:
        make_model()
    assert "nvme" not in str(error.value)
    with free_memory(frontend, others - 1), pytest.raises(HostMemoryError) as error:
        make_model(**disk)
    assert "nvme" not in str(error.value)


# --- a step's time --------------------------------------------------------------------------------------


def test_of_much_free_memory_a_tenth_stays_free():
    terms = BucketTerms(OffloadConfig(offload_optimizer="nvme", nvme_path="/disk"), planned_device(1, addressable=True))
    terms.take_free(100 * 2**30, 7)
    assert terms.state_budget == 90 * 2**30 - 7
    terms.take_free(5 * 2**30, 7)
    assert terms.state_budget == 4 * 2**30 - 7
    terms.take_free(2**30, 7)
    assert terms.state_budget == 0


def step_time(speeds, world_size=1, addressable=False, **fields):
    config = OffloadConfig(
        reduce_bucket_size=16_384, offload_optimizer="nvme", nvme_path="/disk", nvme_host_bytes=0, **fields
    )
    terms = BucketTerms(config, planned_device(world_size, addressable=addressable))
    specs = [ParamSpec(str(i), 16_384, BFLOAT16) for i in range(10)]
    return predict(terms, specs, speeds, processes=world_size, tokens=100)


def test_a_disk_works_beside_the_update_in_every_schedule_and_beside_all_if_they_overlap():
    n = 163_840
    moved = 2 * 12 * n  # three states read and written
    slow = Speeds(28e6, 2e6, 6e9, moved / 100)
    time = step_time(slow)
    assert time.disk == pytest.approx(100)
    assert time.seconds == pytest.approx(100 + time.tail)
    serial = step_time(slow, schedule="serial")
    assert serial.seconds == pytest.approx(serial.compute + serial.to_host + serial.to_device + 100)
    alone = step_time(slow, addressable=True)
    assert alone.seconds == pytest.approx(alone.compute + 100)
    fast = Speeds(28e6, 2e6, 6e9, moved * 1e9)
    for fields in ({}, {"schedule": "serial"}, {"addressable": True}):
        found = step_time(fast, **fields)
        rest = (found.compute, found.update, found.to_host, found.to_device)
        assert found.seconds == pytest.approx(max(rest) + found.tail if not fields else sum(rest))
    assert step_time(slow, 2).disk == pytest.approx(100)  # two ranks of a machine have half each, on one disk
    assert step_time(slow, state_format="8bit").disk == pytest.approx(100 * (4 + 2 * 1.25) / 12)  # and a page of scales
    unknown = step_time(Speeds(28e6, 2e6, 6e9))
    assert unknown.disk is None
    assert not unknown.is_known
    assert unknown.seconds == pytest.approx(max(unknown.update, unknown.to_host, unknown.compute) + unknown.tail)
