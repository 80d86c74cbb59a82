"""The laws of the seam *store*, over each of its implementations."""

import gc
import re
import tempfile
import threading
import weakref
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.commands.compare import Tier
from offload_core.commands.plan import _memory_table
from offload_core.config.options import OffloadConfig
from offload_core.config.state_formats import SPLIT
from offload_core.device.exchange_sizes import planned_device
from offload_core.dtypes import BFLOAT16
from offload_core.errors import CollectiveError, DiskSpaceError, StateError
from offload_core.layout.partition import ParamSpec, build_buckets
from offload_core.memory.host_memory import HostMemory
from offload_core.memory.plan import BLOCKS, MemoryPlan, PlanRow
from offload_core.plans.planner import Planner
from offload_core.plans.terms import BucketTerms
from offload_core.rules.adam import AdamHyper
from offload_core.states import STORES
from offload_core.states.on_disk import StatesOnDisk
from offload_core.states.store import Extent
from offload_core.step.decision import StepArguments
from offload_core.step.state_access import StateAccess
from offload_core.testing.fake_device import FakeDevice
from offload_core.testing.late_store import AHEAD, LateStore
from offload_core.testing.thread_ranks import run_ranks
from tests.support import late_stores
from tests.support.oracles import assert_same_bits
from tests.support.pipelines import Subject, bits, make, overwrite
from tests.support.strategies import law

SIZES = (300, 40, 700, 2500, 512)
STATE_FORMATS = {name: {"state_format": name} for name in ("fp32", "bf16", "8bit")}
HYPERS = [AdamHyper(1e-2)]


def config_of(kind):
    on_disk = {"offload_optimizer": "nvme", "nvme_path": tempfile.gettempdir()} if kind is StatesOnDisk else {}
    return OffloadConfig(num_threads=1, **on_disk)


class Both:
    """A store, and the arrays that its states are to equal: by bucket and state, decoded."""

    def __init__(self, kind, fields, budget=0):
        config = OffloadConfig(op_order="torch", **fields)
        specs = [ParamSpec(f"p{i}", size, BFLOAT16) for i, size in enumerate(SIZES)]
        self.buckets = build_buckets(specs, world_size=1, bucket_numel=512, block=config.state_block)
        self.formats = config.state_formats(BFLOAT16)
        self.store = kind(config_of(kind), HostMemory(1), 1)
        self.store.allocate(self.buckets, lambda bucket: self.formats, budget)
        self.expected = [
            {name: np.zeros(bucket.shard_numel, np.float32) for name in self.formats} for bucket in self.buckets
        ]
        self.rng = np.random.default_rng(0)

    def drawn(self, numel):
        """Values that every format keeps as they are: each block of 256 has one value."""
        values = np.exp2(self.rng.integers(-3, 3, -(-numel // 256))).astype(np.float32)
        return np.repeat(values, 256)[:numel]

    def pieces(self, param):
        found = [(bucket.index, piece) for bucket in self.buckets for piece in bucket.pieces if piece.param == param]
        return sorted(found, key=lambda each: each[1].start)

    def run(self, param):
        return self.store.run([Extent(index, piece.offset, piece.numel) for index, piece in self.pieces(param)])

    def update(self, buckets):
        self.store.expect(buckets)
        for index in buckets:
            block = self.store.load(index, [piece.param for piece in self.buckets[index].pieces])
            for name, array in block.arrays.items():
                values = self.drawn(array.size)
                array.write(values)
                self.expected[index][name] = values
            self.store.commit(block)

    def write(self, param):
        for name, run in self.run(param).items():
            at = 0
            values = self.drawn(run.size)
            run.write(values)
            for index, piece in self.pieces(param):
                self.expected[index][name][piece.offset : piece.offset + piece.numel] = values[at : at + piece.numel]
                at += piece.numel

    def check(self):
        for param in range(len(SIZES)):
            for name, run in self.run(param).items():
                mine = [self.expected[i][name][piece.offset :][: piece.numel] for i, piece in self.pieces(param)]
                assert_same_bits(name, run.values().astype(np.float32), np.concatenate(mine))
                part = np.empty(run.size // 2, np.float32)
                run[1:].read(2, part[: run.size - 3])
                assert_same_bits(name, part[: run.size - 3], np.concatenate(mine)[3 : 3 + part.size])

    def check_blocks(self):
        for bucket in self.buckets:
            for name, array in self.store.read(bucket.index).arrays.items():
                values, expected = array.values().astype(np.float32), self.expected[bucket.index][name]
                for piece in bucket.pieces:  # what lies between them shares scales with them
                    run = slice(piece.offset, piece.offset + piece.numel)
                    assert_same_bits(name, values[run], expected[run])


@pytest.mark.draws(2)
@pytest.mark.parametrize("kind", [*STORES.values(), LateStore], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("fields", STATE_FORMATS.values(), ids=STATE_FORMATS)
@law(20)
@given(
    acts=st.lists(
        st.sampled_from(["update", "some", "backwards", "write", "check", "expect", "break off"]), max_size=8
    ),
    budget=st.sampled_from([0, 5000, 10**9]),
)
def test_a_store_gives_what_was_committed_and_written_last(kind, fields, acts, budget):
    both = Both(kind, fields, budget)
    order = [bucket.index for bucket in both.buckets]
    for i, act in enumerate(acts):
        match act:
            case "update":
                both.update(order)
            case "some":
                both.update(order[::2])
            case "backwards":
                both.update(order[::-1])
            case "write":
                both.write(i % len(SIZES))
            case "check":
                both.check()
            case "expect":  # and then the step breaks off
                both.store.expect(order)
            case "break off" if kind is LateStore or (kind is StatesOnDisk and not budget):  # in mid-update
                for array in both.store.load(order[i % len(order)], []).arrays.values():
                    array.write(both.drawn(array.size))
    both.check_blocks()
    both.check()
    both.store.close()


def test_the_memory_of_a_late_store_is_another_each_time_and_nobodys_view():
    both = Both(LateStore, {})
    both.update([0])
    first, second = (both.store.read(0).arrays["master"].view for _ in range(2))
    assert not np.shares_memory(first, second)
    assert both.run(0)["master"].view is None
    with pytest.raises(ValueError, match="read-only"):
        both.run(0)["master"].values()[0] = 1
    block = both.store.load(0, [0])
    held = block.arrays["master"].view
    both.store.commit(block)
    both.store.read(0)
    assert np.isnan(held).all()  # who still reads it sees that
    both.store.close()


@pytest.mark.states_on_host
@pytest.mark.draws(1)
@pytest.mark.parametrize(
    ("schedule", "early"), [("serial", False), ("overlap", False), ("overlap", True), ("delayed", False)]
)
def test_buckets_are_loaded_in_the_order_that_was_announced(schedule, early):
    with late_stores.late():
        subject = make(
            FakeDevice(), schedule=schedule, update_in_backward=early, reduce_bucket_size=16, delay_warmup_steps=1
        )
    for _ in range(4):
        subject.pipeline.early.expect_step(StepArguments(HYPERS, subject.tensors))
        for i in (1, 0):
            subject.add_gradient(i, np.ones(subject.specs[i].numel, BFLOAT16.numpy))
        subject.pipeline.step(StepArguments(HYPERS, subject.tensors))
        subject.pipeline.last_step.finish()
    store = subject.pipeline.buckets.store
    assert store.asked > 4 * len(subject.pipeline.buckets.all) > 4 * AHEAD
    assert store.unforeseen == 0


@pytest.mark.states_on_host
@pytest.mark.draws(4)
@pytest.mark.parametrize("schedule", ["serial", "overlap"])
@pytest.mark.parametrize("failing", range(0, 24, 3))
def test_a_load_or_a_commit_that_fails_is_one_error_and_loses_no_update(schedule, failing):
    def trained(fail):
        with late_stores.late():
            subject = make(FakeDevice(), schedule=schedule, reduce_bucket_size=16)
        store = subject.pipeline.buckets.store
        subject.pipeline.last_step.finish()
        if fail:
            store.fail_at = frozenset([store.asked + failing])
        raised = []
        for _ in range(3):
            for i in (1, 0):
                subject.add_gradient(i, np.ones(subject.specs[i].numel, BFLOAT16.numpy))
            for act in (
                lambda: subject.pipeline.step(StepArguments(HYPERS, subject.tensors)),
                subject.pipeline.last_step.finish,
            ):
                try:
                    act()
                except OSError as error:
                    raised.append(error)
        subject.pipeline.parameters.flush(subject.tensors)
        try:
            subject.states(0)
        except OSError as error:
            raised.append(error)
        return bits(subject), raised

    (found, raised), (expected, none) = trained(True), trained(False)
    assert len(raised) == 1
    assert not none
    assert found == expected


def add_gradients(subject):
    for i in (1, 0):
        subject.add_gradient(i, np.ones(subject.specs[i].numel, BFLOAT16.numpy))


def step(subject):
    subject.pipeline.step(StepArguments(HYPERS, subject.tensors))
    subject.pipeline.last_step.finish()


@pytest.mark.states_on_host
@pytest.mark.draws(2)
@pytest.mark.parametrize("schedule", ["serial", "overlap", "delayed"])
def test_an_update_that_cannot_be_completed_either_is_said_by_each_call_until_a_load(schedule):
    def trained(fail):
        with late_stores.late():
            subject = make(FakeDevice(), schedule=schedule, reduce_bucket_size=16, delay_warmup_steps=0)
        pipeline, store = subject.pipeline, subject.pipeline.buckets.store
        if fail:
            add_gradients(subject)
            store.fail_at = frozenset(range(store.asked, 10**6))
            with pytest.raises(OSError, match="failed as asked"):
                step(subject)
            store.fail_at = frozenset()
            for act in (
                partial(add_gradients, subject),
                partial(pipeline.step, StepArguments(HYPERS, subject.tensors)),
                partial(pipeline.parameters.flush, subject.tensors),
                pipeline.last_step.finish,
                partial(subject.states, 0),
            ):
                with pytest.raises(StateError, match="could not be completed .*a checkpoint to be loaded next"):
                    act()
        with pipeline.replacing_states():
            for i in range(2):
                overwrite(pipeline, i, 1.0)
                StateAccess(pipeline).publish_later([i])
                pipeline.counts.steps[i][...] = 0
        pipeline.parameters.flush(subject.tensors)
        add_gradients(subject)
        pipeline.step(StepArguments(HYPERS, subject.tensors))
        pipeline.parameters.flush(subject.tensors)
        return bits(subject)

    assert trained(True) == trained(False)


@pytest.mark.states_on_host
@pytest.mark.parametrize("failing", range(6))
def test_a_store_that_fails_in_backward_loses_no_update_that_is_counted(failing):
    config = OffloadConfig(update_in_backward=True, reduce_bucket_size=64)
    with late_stores.late():
        subject = Subject(FakeDevice(), [np.ones(64, np.float32)] * 3, [BFLOAT16] * 3, [0] * 3, config)
    pipeline, store = subject.pipeline, subject.pipeline.buckets.store
    assert [bucket.members for bucket in pipeline.buckets.all] == [{2}, {1}, {0}]
    pipeline.early.expect_step(StepArguments(HYPERS, subject.tensors))
    store.fail_at = frozenset([store.asked + failing])
    try:
        for i in (2, 1, 0):
            subject.add_gradient(i, np.ones(64, BFLOAT16.numpy))
        pipeline.gradients.end_micro_step()
        pipeline.step(StepArguments(HYPERS, subject.tensors))
    except OSError:
        pipeline.gradients.drop()
    for i in range(3):
        with suppress(OSError):  # of a commit, which is tried again
            subject.states(i)
        assert subject.states(i)[1].all() == bool(pipeline.counts.steps[i]), i


@pytest.mark.states_on_host
def test_ranks_whose_store_failed_in_backward_say_so_to_readers():
    """Not that the parameter is of a step to come."""

    def body(rank):
        subject = make(FakeDevice(), collectives=rank, update_in_backward=True, reduce_bucket_size=64)
        pipeline = subject.pipeline
        store = pipeline.buckets.store
        arguments = StepArguments(HYPERS, subject.tensors)
        pipeline.early.expect_step(arguments)
        if rank.rank == 0:
            store.fail_at = frozenset([store.asked])
        with pytest.raises(OSError if rank.rank == 0 else CollectiveError):  # noqa: PT012
            try:
                add_gradients(subject)
                pipeline.gradients.end_micro_step()
                pipeline.step(arguments)
                pipeline.last_step.finish()
            finally:
                rank._group.lose()  # as a process that ends does
        for param in range(2):
            with pytest.raises(StateError, match="^the last update broke off"):
                pipeline.parameters.await_param(param)

    with late_stores.late():
        run_ranks(2, body)


@pytest.mark.states_on_host
def test_a_store_is_closed_once_with_its_pipeline_and_by_nobody_before(monkeypatch):
    closed, close = [], LateStore.close
    monkeypatch.setattr(LateStore, "close", lambda store: (closed.append(id(store)), close(store)))

    class Saver:
        """As a save that is written while training goes on."""

        def __init__(self, pipeline):
            self.pipeline = pipeline

        def before(self, params):
            told.append(params)

    def train():
        with late_stores.late():
            subject = make(FakeDevice())
        pipeline, saver = subject.pipeline, Saver(subject.pipeline)
        StateAccess(pipeline).watch(saver.before)
        add_gradients(subject)
        pipeline.step(StepArguments(HYPERS, subject.tensors))
        pipeline.last_step.finish()
        gc.collect()
        return subject, saver

    told = []
    [subject, saver] = train()
    assert told
    assert not closed
    expected = id(subject.pipeline.buckets.store)
    del subject, saver
    gc.collect()
    assert closed == [expected]
    [subject, saver] = train()
    subject.pipeline.start_over()
    assert len(closed) == 2
    del subject, saver
    gc.collect()
    assert len(closed) == 2


@pytest.mark.states_in_memory
def test_a_split_master_weight_is_only_in_a_store_whose_memory_stays():
    config = OffloadConfig(op_order="torch", stage=3, offload_param="cpu", param_persistence_threshold=0)
    spec = ParamSpec("p", 1000, BFLOAT16, partitioned=True)

    def format_of_masters():
        terms = BucketTerms(config, planned_device(1, addressable=False))
        return terms.state_formats(terms.cut([spec])[0])["master"]

    assert format_of_masters() is SPLIT
    with late_stores.late():
        assert format_of_masters().name == "float32"


@pytest.mark.states_on_host
@pytest.mark.parametrize("schedule", ["serial", "overlap", "delayed"])
def test_the_blocks_of_an_update_take_the_host_memory_that_is_planned(schedule, monkeypatch):
    live, counts, zeros = 0, [], LateStore._zeros
    turn = threading.RLock()

    def add(n_bytes):
        nonlocal live
        with turn:
            live += n_bytes
            counts.append(live)

    def counted(store, format, numel):
        array = zeros(store, format, numel)
        n_bytes = sum(part.nbytes for part in array.stored)
        add(n_bytes)
        weakref.finalize(array, add, -n_bytes)
        return array

    with late_stores.late():
        subject = make(FakeDevice(), schedule=schedule, reduce_bucket_size=16, delay_warmup_steps=0)
    monkeypatch.setattr(LateStore, "_zeros", counted)
    for _ in range(3):
        add_gradients(subject)
        subject.pipeline.step(StepArguments(HYPERS, subject.tensors))
    subject.pipeline.parameters.flush(subject.tensors)
    [planned] = [row for row in subject.pipeline.buckets.planned if row.what == BLOCKS]
    assert planned.where == "host"
    assert 0 < max(counts) <= planned.n_bytes


@pytest.mark.states_on_host
def test_a_store_of_another_place_has_a_column_and_rows_of_its_own(monkeypatch):
    with late_stores.late():
        subject = make(FakeDevice())
        terms = BucketTerms(subject.pipeline.config, planned_device(1, addressable=False))
        plan = Planner(terms).plan(subject.specs)
    assert plan.needs["late store"] == plan.bytes_in("late store") == 12 * 144  # 140 elements, padded
    assert plan.host_bytes == sum(row.n_bytes for row in plan.rows if row.where == "host") > 0
    assert not {row.what for row in plan.rows if row.where == "host"} & {"master", "exp_avg", "exp_avg_sq"}
    assert "late store" not in plan.missing(0, 0)  # nobody has said what is free there
    for free, missing in ((12 * 144, {}), (12 * 144 - 1, {"late store": 12 * 144})):
        monkeypatch.setattr(LateStore, "free", free)
        with late_stores.late():
            plan = Planner(terms).plan(subject.specs)
        assert plan.missing(None) == missing
    with pytest.raises(
        DiskSpaceError, match=r"needs 1\.7 KiB of late store space .* and 1\.7 KiB is available.*Free space"
    ):
        plan.check(10**9)
    report = subject.engine.memory_report([], {})
    assert {(row.what, row.planned, row.held) for row in report.rows if row.where == "late store"} == {
        (name, 4 * 144, 4 * 144) for name in ("master", "exp_avg", "exp_avg_sq")
    }
    assert report.host_bytes == report.planned_host_bytes  # blocks come and go
    assert re.search("late store +in all", str(report))


@pytest.mark.integration
def test_a_store_of_another_place_has_a_bar_of_its_own(tmp_path):
    pytest.importorskip("matplotlib")
    with late_stores.late():
        report = make(FakeDevice()).engine.memory_report([], {})
    report.plot(tmp_path / "report.svg")
    assert "late store" in (tmp_path / "report.svg").read_text()


def test_a_plan_of_three_places_needs_each():
    rows = (PlanRow("a", "host", 100, "x"), PlanRow("b", "device", 50, "y"), PlanRow("c", "disk", 30, "z"))
    assert MemoryPlan(rows, 1).needs == {"host": 100, "device": 50, "disk": 30}
    assert MemoryPlan(rows, 1, shared=True).needs == {"host": 150, "disk": 30}
    table = _memory_table([Tier({"donate": True}, MemoryPlan(rows, 1), {}, None, None, [])])
    assert table.split("\n")[0].split() == ["memory", "host", "device", "disk", "fits"]
    assert "30 bytes" in table
