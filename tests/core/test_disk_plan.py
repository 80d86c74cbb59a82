"""Plans of states on disk: the memory and the space that they take, what a step moves, and what is refused."""

import itertools
import json
import os
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
from offload_core.__main__ import main
from offload_core.commands import machine
from offload_core.config.options import OffloadConfig
from offload_core.device.exchange_sizes import planned_device
from offload_core.disk.scratch import ScratchFiles
from offload_core.disk.shards import OnDisk, bytes_of
from offload_core.disk.space import DiskSpace
from offload_core.dtypes import BFLOAT16
from offload_core.layout.partition import ParamSpec
from offload_core.memory.host_memory import HostMemory, format_bytes
from offload_core.memory.plan import MemoryPlan
from offload_core.plans.allocated import Allocated
from offload_core.plans.planner import Planner, check_memory
from offload_core.plans.prediction import Speeds, predict
from offload_core.plans.terms import BucketTerms
from offload_core.rules.adam import AdamHyper
from offload_core.states.on_disk import StatesOnDisk
from offload_core.states.slots import SLOTS
from offload_core.step.decision import StepArguments
from offload_core.testing.fake_device import FakeDevice, FakeTensor
from tests.support.pipelines import STATES, Subject
from tests.support.strategies import law

pytestmark = pytest.mark.states_in_memory  # those of offload_optimizer="cpu"
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
    "torch": (in_torch, "offload_core.engine.available_bytes", 2),
    "jax": (in_jax, "offload_core.engine.available_bytes", 3),
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


@pytest.mark.draws(1)
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


class Layers(torch.nn.Module):
    """Parameters of several sizes, the first of which is not trained."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(n, 60, bias=False) for n in (50, 60, 50, 70, 60, 50, 1))
        self.layers[0].requires_grad_(False)

    def forward(self, x):
        return sum(layer(x[:, : layer.in_features]) for layer in self.layers)


@pytest.mark.draws(2)
@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "fields", [{}, {"nvme_host_bytes": 60_000}, {"state_format": "8bit"}, {"param_dtype": "float32"}]
)
def test_parameters_on_disk_take_what_is_planned(fields, given, disk):
    fields = {"nvme_host_bytes": 0, "param_dtype": "bfloat16", "offload_param": "nvme", "stage": 3, **fields}
    model = Layers().to(given)
    engine = wrap(model, reduce_bucket_size=1024, param_persistence_threshold=100, num_threads=1, **disk, **fields)
    for _ in range(2):
        engine.backward(engine(torch.randn(2, 70).to(given)).float().sum())
        engine.step()
    report = engine.memory_report()
    lasting = {(row.where, row.what): row for row in report.rows if row.where != "device" and not row.brief}
    assert {key: row.planned for key, row in lasting.items()} == {key: row.held for key, row in lasting.items()}
    assert lasting["disk", "frozen parameters"].held == 3 * 4096  # of 3,000 elements, in three buckets
    assert ("host", "parameters on their way") in lasting
    assert (("host", "parameters on the host") in lasting) == (fields["nvme_host_bytes"] > 0)
    engine.close()


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


def test_parameters_that_are_added_later_are_planned_beside_what_exists(disk):
    """Each buffer counts once, and all states in host memory together take at most ``nvme_host_bytes``."""
    config = OffloadConfig(reduce_bucket_size=NUMEL, nvme_host_bytes=3 * 3 * STATE, op_order="torch", **disk)
    subject = Subject(FakeDevice(), [np.ones(NUMEL, np.float32)] * 2, [BFLOAT16] * 2, [0] * 2, config)
    for _ in range(2):
        more = [np.ones(NUMEL, np.float32)] * 3
        subject.pipeline.add_parameters([ParamSpec("more", NUMEL, BFLOAT16)] * 3, [*map(FakeTensor, more)])
        report = subject.engine.memory_report([], {})
        assert [(row.what, row.planned) for row in report.rows] == [(row.what, row.held) for row in report.rows]
    assert (states_on(report, "host"), states_on(report, "disk")) == (3 * 3 * STATE, 5 * 3 * STATE)


@pytest.mark.draws(1)
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


@pytest.mark.draws(1)
@pytest.mark.parametrize("live", [{}, {"max_live_parameters": 0, "max_reuse_distance": 0}])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_parameters_on_disk_are_lent_as_often_as_is_planned(dtype, live, disk, monkeypatch):
    engine = wrap(
        Layers(),
        reduce_bucket_size=1024,
        param_persistence_threshold=100,
        param_dtype=dtype,
        nvme_host_bytes=0,
        offload_param="nvme",
        stage=3,
        **disk,
        **live,
    )
    pipeline = engine.optimizer.components.core._pipeline
    traffic, _ = Planner(BucketTerms(pipeline.config, pipeline.device)).traffic(pipeline.params)
    lent = []
    lend = OnDisk.lend

    def counted(shards, bucket, updated):
        part = shards._parts[bucket.shard_start]
        if not isinstance(part, DiskSpace):  # of a frozen parameter
            lent.append(bytes_of(part))
        return lend(shards, bucket, updated)

    monkeypatch.setattr(OnDisk, "lend", counted)
    for _ in range(3):
        lent.clear()
        engine.backward(engine(torch.randn(2, 70).to(next(engine.module.parameters()).dtype)).float().sum())
        engine.step()
    assert sum(lent) == traffic.disk_read - traffic.disk_write > 0
    engine.close()


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
    assert re.search(r"Free space, or change a setting of this table:\nwhere .*\ndevice ", said)
    assert re.search(r"disk +exp_avg +48\.0 KiB +4\.00", said)
    monkeypatch.setattr(StatesOnDisk, "free_bytes", lambda config: needed)
    make_model(nvme_host_bytes=0, **disk)


@over_frontends
def test_a_model_too_large_for_the_host_is_told_of_the_disk_with_figures_that_hold(frontend, disk):
    make_model, _, states = FRONTENDS[frontend]
    others = needs_of_all_on_disk(frontend, disk)
    with free_memory(frontend, others) as plans, nothing_allocated(), pytest.raises(HostMemoryError) as error:
        make_model()
    [found] = plans[0].on_disk
    assert found[1:] == (plans[0].needs["host"] - others, BUCKETS * states * STATE)
    assert found.saved > 0
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


def test_each_process_of_a_machine_fills_its_part_of_the_free_memory():
    config = OffloadConfig(offload_optimizer="nvme", nvme_path="/")
    planner = Planner(BucketTerms(config, planned_device(2, addressable=True)))
    specs = [ParamSpec("p", NUMEL, BFLOAT16)]

    def plan():
        return planner.plan(specs)

    others = plan().needs["host"]
    check_memory(planner, plan(), plan, specs, host=2 * (others + RESERVE + 10**6), device=None, processes=2)
    assert planner.allocated.state_budget == 10**6
    check_memory(planner, plan(), plan, specs, host=2 * (others + RESERVE + 9), device=None, processes=2)
    assert planner.allocated.state_budget == 9, "for later parameters it is found anew"


# --- a step's time --------------------------------------------------------------------------------------


def test_parameters_of_the_host_may_lie_on_the_disk_too_if_states_there_are_not_enough(disk):
    fields = {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 0, "gradient_accumulation_steps": 2}
    config = OffloadConfig(reduce_bucket_size=16_384, **fields)
    specs = [ParamSpec(str(i), 16_384, BFLOAT16, partitioned=True) for i in range(BUCKETS)]
    plan = Planner(BucketTerms(config, planned_device(1, addressable=False))).plan(specs)
    states, both = plan.on_disk
    assert states.saved < both.saved
    assert both.setting == states.setting + ", offload_param='nvme'"
    for saved, named in ((states.saved, states), (states.saved + 1, both), (both.saved, both), (both.saved + 1, None)):
        with pytest.raises(HostMemoryError) as error:
            plan.check(plan.needs["host"] - saved)
        assert re.findall(r"With (offload_optimizer.*?) it would fit", str(error.value)) == (
            [named.setting] if named else []
        )
    given = {**fields, **disk, "offload_param": "nvme", "nvme_host_bytes": 0}
    terms = BucketTerms(OffloadConfig(reduce_bucket_size=16_384, **given), planned_device(1, addressable=False))
    there = Planner(terms).plan(specs)
    assert there.needs["host"] == plan.needs["host"] - both.saved
    assert there.needs["disk"] == both.n_bytes


def test_of_much_free_memory_a_tenth_stays_free():
    terms = BucketTerms(OffloadConfig(offload_optimizer="nvme", nvme_path="/disk"), planned_device(1, addressable=True))
    allocated = Allocated(terms)
    allocated.take_free(100 * 2**30, 7)
    assert allocated.state_budget == 90 * 2**30 - 7
    allocated.take_free(5 * 2**30, 7)
    assert allocated.state_budget == 4 * 2**30 - 7
    allocated.take_free(2**30, 7)
    assert allocated.state_budget == 0


def step_time(speeds, world_size=1, addressable=False, **fields):
    config = OffloadConfig(
        reduce_bucket_size=16_384, offload_optimizer="nvme", nvme_path="/disk", nvme_host_bytes=0, **fields
    )
    terms = BucketTerms(config, planned_device(world_size, addressable=addressable))
    specs = [ParamSpec(str(i), 16_384, BFLOAT16) for i in range(10)]
    return predict(Planner(terms), specs, speeds, processes=world_size, tokens=100)


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


# --- the commands ---------------------------------------------------------------------------------------

SPEEDS = ["--dram-bandwidth=40GB", "--link-bandwidth=25GB", "--disk-bandwidth=6GB"]
SMALL_HOST = ["--parameters=7B", "--host-memory=64GB", "--device-memory=24GB", *SPEEDS]


def plan(capsys, *arguments, status=0):
    assert main(["plan", "--json", *map(str, arguments)]) == status
    return json.loads(capsys.readouterr().out)


@pytest.mark.long("searches through settings with the whole plan at each")
def test_the_disk_is_the_last_tier_and_fits_where_host_memory_does_not(capsys, drawn):
    found = plan(capsys, *SMALL_HOST, "--disk-memory=100GB")
    assert [tier["offload_optimizer"] for tier in found["tiers"]] == ["cpu"] * 4 + ["nvme"] * 5
    assert [tier["fits"] for tier in found["tiers"]] == [False] * 4 + [True] * 5
    assert [tier["disk"] for tier in found["tiers"][:4]] == [None] * 4
    for tier in found["tiers"][4:]:
        free, reserve = 64 * 10**9, 64 * 10**8
        block = 3 * 4 * 2**22
        assert free - reserve - block < tier["host_bytes"] <= free - reserve, "to a bucket"
        on_disk = sum(row["n_bytes"] for row in tier["rows"] if row["where"] == "disk")
        read, written = tier["disk"]["read"], tier["disk"]["written"]
        assert written == on_disk
        assert read == written or tier["offload_param"] == "nvme"
        assert tier["step"]["disk"] == pytest.approx((read + written) / 6e9)
        assert tier["step"]["seconds"] == pytest.approx(tier["step"]["disk"] + tier["step"]["tail"])
        assert tier["disk"]["a_day"] == pytest.approx(on_disk * 86400 / tier["step"]["seconds"])
    assert {tier["offload_optimizer"] for each in found["formats"] for tier in each["tiers"]} == {"cpu"}

    def small():
        small = plan(capsys, *SMALL_HOST, "--disk-memory=40GB", status=1)
        assert [tier["missing"] for tier in small["tiers"][4:]] == [
            {"disk": sum(row["n_bytes"] for row in tier["rows"] if row["where"] == "disk")}
            for tier in small["tiers"][4:]
        ]

    def none():
        assert not any(
            tier["offload_optimizer"] == "nvme" for tier in plan(capsys, *SMALL_HOST[:-1], status=1)["tiers"]
        )

    for check in drawn((small, none), 1):
        check()


@pytest.mark.draws(1)
@pytest.mark.parametrize("frontend", ["torch", "jax"])
def test_the_disk_alone_is_planned_where_it_is_asked_for(frontend, capsys):
    asked = ["--parameters=7B", "--host-memory=640GB", *SPEEDS, f"--frontend={frontend}", "--offload-optimizer=nvme"]
    asked += ["--stage=2"] if frontend == "torch" else []
    found = plan(capsys, *asked)
    assert {tier["offload_optimizer"] for tier in found["tiers"]} == {"nvme"}
    assert {tier["disk"]["written"] for tier in found["tiers"]} == {0}, "there is memory for all"
    assert {tier["step"]["disk"] for tier in found["tiers"]} == {0}
    bytes_of = [12, 8, 6.008, 4.008]
    found = plan(capsys, *asked, "--nvme-host-bytes=0")
    for each, n_bytes in zip(found["formats"], bytes_of, strict=True):
        for tier in each["tiers"]:
            assert tier["disk_bytes"] == pytest.approx(n_bytes * found["parameters"], rel=0.002)
    wider = plan(capsys, *asked, "--nvme-host-bytes=40GB")
    for tier, all_on_disk in zip(wider["tiers"], found["tiers"], strict=True):
        assert 0 < 40 * 10**9 - (all_on_disk["disk"]["read"] - tier["disk"]["read"]) < 2**29


def test_ranks_of_a_machine_share_its_disk_and_its_memory(capsys):
    asked = [*SMALL_HOST, "--offload-optimizer=nvme", "--disk-memory=100GB", "--stage=2", "--nvme-host-bytes=0"]
    [one] = plan(capsys, *asked)["tiers"]
    [two] = plan(capsys, *asked, "--world-size=2")["tiers"]
    assert two["disk"]["written"] == pytest.approx(one["disk"]["written"] / 2, rel=0.01)
    assert two["step"]["disk"] == pytest.approx(one["step"]["disk"], rel=0.01)
    assert two["disk"]["a_day"] == pytest.approx(one["disk"]["a_day"], rel=0.01)
    [filled] = plan(capsys, *asked[:-1], "--world-size=2")["tiers"]
    assert 56 * 10**9 < 2 * filled["host_bytes"] < 64 * 10**9 * 0.9


def test_parameters_on_disk_are_read_as_often_as_they_are_gathered(capsys):
    asked = ["--parameters=7B", "--host-memory=64GB", *SPEEDS, "--offload-optimizer=nvme", "--nvme-host-bytes=0"]

    def tier(*more):
        found = plan(capsys, *asked, "--offload-param=nvme", *more)
        [one] = found["tiers"]
        return one, found["parameters"]

    one, n = tier()
    assert one["disk"]["read"] - one["disk"]["written"] == pytest.approx(2 * 2 * n, rel=0.002)  # twice, in bf16
    assert tier("--max-live-parameters=100B")[0]["disk"]["read"] == one["disk"]["read"], "max_reuse_distance"
    steps, _ = tier("--gradient-accumulation-steps=3")
    assert steps["disk"]["read"] - steps["disk"]["written"] == pytest.approx(3 * 2 * 2 * n, rel=0.002)
    on_host = plan(capsys, *asked, "--offload-param=cpu")["tiers"][0]
    rows = {(row["where"], row["what"]): row["n_bytes"] for row in one["rows"]}
    assert ("host", "parameters on the host") not in rows
    assert rows["host", "parameters on their way"] == 4 * 2 * 2**22
    # Masters are kept with the parameters: two bytes, their lower halves and a bit of eight.
    assert one["disk_bytes"] == pytest.approx((2 + 2.125 + 8) * n, rel=0.002)
    assert on_host["host_bytes"] - one["host_bytes"] == pytest.approx(2 * n - 4 * 2 * 2**22, rel=0.002)
    assert len(plan(capsys, *asked, "--schedule=delayed")["tiers"]) == 4


def test_what_is_printed_of_a_disk(capsys, drawn):
    def enough():
        assert main(["plan", *SMALL_HOST, "--disk-memory=100GB", "--stage=2"]) == 0
        printed = capsys.readouterr().out
        assert "disk: 93.1 GiB free on a machine; bandwidth, read and written, 6.0 GB/s (as given)" in printed
        assert re.search(r"^stage 2, nvme +37\.4 GiB +37\.4 GiB +13\.4 s +at most 259\.\d TB$", printed, re.M)

    def too_small():
        assert main(["plan", *SMALL_HOST, "--disk-memory=10GB", "--stage=2"]) == 1
        printed = capsys.readouterr().out
        assert re.search(r"^stage 2, nvme .* no: disk too small$", printed, re.M)
        assert "stage 2, nvme: 37.4 GiB of disk space, of 9.3 GiB: master 12.5 GiB" in printed

    def not_asked_for():
        assert main(["plan", *SMALL_HOST[:-1]]) == 1
        printed = capsys.readouterr().out
        assert (
            "with states on a disk it does: stage 1, nvme: 13.2 GiB of host memory and 77.9 GiB of disk\n"
            "    (--offload-optimizer nvme)"
        ) in printed

    def refused():
        assert main(["plan", *SMALL_HOST[:-1], "--offload-optimizer=cpu"]) == 1
        assert "nvme" not in capsys.readouterr().out

    def no_help():
        assert main(["plan", *SMALL_HOST[:-1], "--host-memory=14GB"]) == 1
        assert "nvme" not in capsys.readouterr().out

    for check in drawn((enough, too_small, not_asked_for, refused, no_help), 2):
        check()


@pytest.mark.draws(1)
@pytest.mark.parametrize("memory", [["--host-memory=9TB"], ["--device-memory=1GB", "--host-memory=1GB"]])
@pytest.mark.parametrize(
    "tiers", [["--stage=1"], ["--stage=2"], ["--stage=3"], pytest.param([], marks=pytest.mark.slow)]
)
def test_what_is_printed_of_a_disk_is_at_most_100_columns_wide(memory, tiers, capsys):
    asked = ["--parameters=900B", "--world-size=64", "--local-world-size=8", "--reduce-bucket-size=2000000000"]
    asked += ["--disk-memory=1TB", *SPEEDS]
    main(["plan", *asked, *tiers, *memory])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


@pytest.mark.long("measures a disk, three times")
def test_a_disk_is_measured_and_nothing_stays_there(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(machine, "_ON_DISK", 64 * 2**20)
    descriptors = len(os.listdir("/proc/self/fd"))
    assert main(["info", "--nvme-path", str(tmp_path)]) == 0
    rates = r"\d+\.\d GB/s read, \d+\.\d GB/s written, \d+\.\d GB/s one after the other; [\d.]+ .iB free"
    assert re.search(rf"^disk +{re.escape(str(tmp_path))}: {rates}$", capsys.readouterr().out, re.M)
    assert main(["info", "--json", "--nvme-path", str(tmp_path)]) == 0
    disk = json.loads(capsys.readouterr().out)["disk"]
    assert disk["read"] > 0
    assert disk["write"] > 0
    assert not os.listdir(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    found = plan(capsys, "--preset=tiny", "--host-memory=1GB", *SPEEDS[:2], f"--nvme-path={tmp_path}")
    assert found["speeds"]["disk"] > 0
    assert found["disk_memory"] > 64 * 2**20
    assert not os.listdir(tmp_path)
    monkeypatch.setattr(machine, "free_bytes", lambda folders: 100)
    assert main(["info", "--nvme-path", str(tmp_path)]) == 2
    assert "100 bytes of free space; expected at least 320.0 MiB" in capsys.readouterr().err


@law(20)
@given(n_bytes=st.integers(1, 40), seconds=st.sampled_from([0, 0.5, 10**6]))
def test_a_measurement_moves_whole_buffers_in_turns_until_its_time_or_its_bytes_end(n_bytes, seconds):
    unit = machine._AT_A_TIME
    buffers = [np.empty(0) for _ in range(3)]
    begun, ended, now = [], [], itertools.count(0, 0.1)

    class Moved:
        def __init__(self, at, buffer):
            begun.append((at, id(buffer)))
            assert len(begun) - len(ended) <= 3

        def error(self):
            ended.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "_SECONDS_EACH_WAY", seconds)
        patch.setattr(machine.time, "perf_counter", lambda: next(now))
        done, rate = machine._stream(Moved, buffers, n_bytes * unit)
    assert begun == [(i * unit, id(buffers[i % 3])) for i in range(done // unit)]
    assert len(ended) == len(begun) == {0: 1, 0.5: min(5, n_bytes), 10**6: n_bytes}[seconds]
    assert rate > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "--preset=tiny", "--offload-optimizer=cpu", "--disk-memory=1GB"], "--disk-memory is of --off"),
        (["plan", "--preset=tiny", "--offload-optimizer=ssd"], "--offload-optimizer"),
        (["plan", "--preset=tiny", "--offload-param=nvme"], "expected --offload-optimizer nvme beside it"),
        (["plan", "--preset=tiny", "--offload-param=nvme", "--stage=2"], "of stage 3"),
        (["plan", "--preset=tiny", "--nvme-path=/no/such/folder"], "nvme_path: got '/no/such/folder'"),
        (["plan", "--preset=tiny", "--nvme-host-bytes=5"], "expected a size such as 32GB"),
        (["plan", "--preset=tiny", "--disk-bandwidth=fast"], "expected bytes a second"),
        (["info", "--nvme-path=/no/such/folder"], "nvme_path: got '/no/such/folder'"),
    ],
)  # fmt: skip
def test_wrong_options_of_disks_are_one_line(arguments, words, capsys):
    try:
        status = main(arguments)
    except SystemExit as exit_:
        status = exit_.code
    out, complaint = capsys.readouterr()
    assert (status, out, complaint.count("\n")) == (2, "", 1), (status, out, complaint)
    assert words in complaint
