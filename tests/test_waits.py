"""Every wait of the core is needed: where any one of them is taken out, a scenario here fails.

All threads are played by one, and everything is done as late as can be (``one_thread.py``), so a missing wait shows in
every run: what it should have waited for has not even begun.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from one_thread import Threads
from oracles import assert_same_bits
from test_pipeline import STATES, Naive, Subject
from wait_mutants import ROOT, Change, assert_noticed, waits_of

from offload_core.config import OffloadConfig
from offload_core.cpu_adam import AdamHyper
from offload_core.device import Copy, Waiting
from offload_core.device import traced as watched
from offload_core.dtypes import BFLOAT16
from offload_core.errors import CollectiveError, ParameterError
from offload_core.fake_device import FakeDevice, FakeTensor
from offload_core.partition import ParamSpec
from offload_core.step_state import TRANSITIONS, BucketEvent, BucketLife, BucketState
from offload_core.thread_ranks import run_ranks
from offload_core.trace import REDUCTION, TO_DEVICE, TO_HOST, UPDATE

# --- scenarios -------------------------------------------------------------------------------------


class Twin:
    """A pipeline on a late device, and the naive loop, which are given the same."""

    def __init__(self, sizes=(40, 100), *, fail_at=(), rank=None, **fields):
        self.rng = np.random.default_rng(0)
        masters = [np.random.default_rng(n).standard_normal(n).astype(np.float32) for n in sizes]
        self.device = FakeDevice(fail_at=frozenset(fail_at))
        defaults = {"schedule": "overlap", "reduce_bucket_size": 32, "op_order": "torch", "num_threads": 1}
        config = OffloadConfig(**{**defaults, **fields})
        self.hypers = [AdamHyper(1e-2)]
        dtypes, groups = [BFLOAT16] * len(sizes), [0] * len(sizes)
        self.naive = Naive(masters, dtypes, groups, config, self.hypers)
        self.subject = Subject(self.device, masters, dtypes, groups, config, collectives=rank)
        self.pipeline = self.subject.pipeline

    @property
    def tensors(self):
        return self.subject.tensors

    def add(self, *params):
        """Gradients, which the device makes when it gets round to it."""
        for i in params:
            self.naive.add_gradient(i, self.give(i, self.draw(i)))

    def draw(self, i):
        return (self.rng.standard_normal(self.tensors[i].memory.size) * 0.1).astype(BFLOAT16.numpy)

    def give(self, i, values):
        gradient = FakeTensor(np.full_like(values, np.nan))
        self.device.compute(lambda: np.copyto(gradient.memory, values))
        self.pipeline.add_gradient(i, gradient)
        return values

    def update(self):
        self.pipeline.step(self.hypers, self.tensors)

    def step(self, *params):
        """An update by these gradients; the pipeline's may still be on its way."""
        self.add(*params)
        before = [t.memory.copy() for t in self.tensors]
        seen = [[] for _ in before]
        for tensor, copies in zip(self.tensors, seen, strict=True):  # the backward may still be reading
            self.device.compute(lambda tensor=tensor, copies=copies: copies.append(tensor.memory.copy()))
        self.update()
        self.naive.step(1.0)
        self.device.compute(lambda: None).wait()
        for i, [copy] in enumerate(seen):
            assert_same_bits(f"parameter {i} before the update", copy, before[i])

    def check(self, *params):
        """The pipeline has finished what it was asked for, whether or not somebody waits."""
        for i in params or range(len(self.tensors)):
            assert_same_bits(f"parameter {i}", self.tensors[i].memory, self.naive.params()[i])
            self.check_states(i, self.pipeline._buckets.local_states(i))
            assert self.pipeline.steps[i] == self.naive.steps[i]

    def check_states(self, i, states):
        for name, expected in zip(STATES, self.naive.states[i], strict=True):
            assert_same_bits(f"{name} of parameter {i}", states[name], expected)

    def check_at_rest(self):
        """No bucket is on its way, and all staging is back."""
        buckets = self.pipeline._buckets
        assert {work.life.state for work in buckets.all} <= {BucketState.EMPTY}
        assert len(buckets.staging._free) == buckets._staging_slots
        assert not buckets.in_staging


def steps_and_finish():
    twin = Twin()
    for params in ([1, 0], [0], [1], [0, 1]):
        twin.step(*params)
        twin.pipeline.finish()
        twin.check()
        twin.check_at_rest()


def steps_without_a_pause():
    twin = Twin(gradient_clipping=0.5)
    for params in ([1, 0], [0, 1], [1], [0, 1]):
        twin.step(*params)
    twin.pipeline.finish()
    twin.check()
    twin.check_at_rest()


def micro_steps():
    """More arrive than were announced, too, and parameters are missing here and there."""
    for announced in (1, 2):
        twin = Twin(gradient_accumulation_steps=announced, gradient_clipping=0.5)
        for first, second in (([1, 0], [0, 1]), ([1], [0]), ([0, 1], [0]), ([0], [1, 0])):
            twin.add(*first)
            twin.pipeline.end_micro_step()
            twin.step(*second)
        twin.pipeline.finish()
        twin.check()


def serial():
    twin = Twin(schedule="serial")
    for _ in range(2):
        twin.step(1, 0)
        twin.check()
        assert twin.pipeline.finished


def reads(read: Callable[[Twin], None]):
    def scenario():
        twin = Twin()
        twin.step(1, 0)
        twin.pipeline.finish()
        twin.step(0, 1)
        read(twin)

    scenario.__name__ = read.__name__
    return scenario


def a_layer_reads_its_parameters_of(twin):
    for i in (0, 1):
        got = []
        twin.pipeline.await_param(i)
        twin.device.compute(lambda i=i, got=got: got.append(twin.tensors[i].memory.copy())).wait()
        assert_same_bits(f"parameter {i}", got[0], twin.naive.params()[i])


@reads
def a_layer_reads_its_parameters(twin):
    a_layer_reads_its_parameters_of(twin)


@reads
def states_are_read(twin):
    [(start, states)] = twin.pipeline.states(1)
    assert start == 0
    twin.check_states(1, states)


@reads
def local_states_are_read(twin):
    twin.check_states(1, twin.pipeline.local_states(1))


@reads
def a_master_is_loaded(twin):
    twin.pipeline.reload_master(0, FakeTensor(np.full(40, 7, BFLOAT16.numpy)))
    twin.naive.states[0][0][:] = 7
    twin.pipeline.finish()
    twin.check_states(0, twin.pipeline.local_states(0))
    twin.check(1)


@reads
def a_change_is_adopted(twin):
    changed = FakeTensor(twin.naive.params()[0])
    changed.memory[5] = 7
    twin.pipeline.adopt(0, changed)
    twin.naive.states[0][0][5] = 7
    twin.pipeline.finish()
    twin.check_states(0, twin.pipeline.local_states(0))
    twin.check(1)


@reads
def parameters_are_added(twin):
    new = np.linspace(-1, 1, 300, dtype=np.float32)
    twin.tensors.append(FakeTensor(new.astype(BFLOAT16.numpy)))
    twin.pipeline.add_parameters([ParamSpec("new", 300, BFLOAT16)], [FakeTensor(new)])
    twin.naive.states.append([new.copy(), np.zeros_like(new), np.zeros_like(new)])
    twin.naive.dtypes, twin.naive.groups = [BFLOAT16] * 3, [0] * 3
    twin.naive.sums.append(None)
    twin.naive.steps.append(0)
    twin.check()
    twin.step(2, 1, 0)
    twin.pipeline.finish()
    twin.check()


def gradients_are_dropped():
    for dropped in ([0], [1], None):
        twin = Twin()
        twin.add(1, 0)
        twin.pipeline.drop_gradients(dropped)
        for i in dropped or (0, 1):
            twin.naive.sums[i] = None
        twin.step(*(dropped or [0]))
        twin.pipeline.finish()
        twin.check()
        twin.check_at_rest()


def a_gradient_that_is_lost():
    """Is an error before anything changes, on whatever way it is met."""
    loads = count_of_loads()
    last = len(Twin().pipeline._buckets.all) - 1
    for number in (0, 1, last):
        for meet, options in (
            ("step", {}),
            ("step", {"gradient_clipping": 0.5}),
            ("add", {}),
            ("add", {"schedule": "serial", "gradient_accumulation_steps": 2}),
            ("drop", {}),
        ):
            twin = Twin(fail_at=[loads + number], **options)
            failed = 0
            try:
                twin.add(1, 0)
                if meet == "add":
                    twin.add(0, 1)
                if meet != "drop":
                    twin.update()
            except OSError:
                failed = 1
            assert failed == (meet != "drop"), f"copy {number} failed and {meet} said nothing"
            twin.pipeline.drop_gradients()
            twin.check_at_rest()
            twin.naive.sums = [None, None]
            twin.check()
            twin.step(0, 1)
            twin.pipeline.finish()
            twin.check()


def count_of_loads():
    return Twin().device._copies


def update_and_call(twin, call, last):
    twin.update()
    call(twin, last)


def a_parameter_that_does_not_arrive():
    """Is an error of the next call of any kind; what has been updated stays so, and later updates go on from there."""
    calls = {
        "finish": lambda twin, last: twin.pipeline.finish(),
        "step": lambda twin, last: twin.update(),
        "add a gradient": lambda twin, last: twin.give(0, twin.draw(0)),
        "add a parameter": lambda twin, last: twin.pipeline.add_parameters(
            [ParamSpec("new", 3, BFLOAT16)], [FakeTensor(np.ones(3, BFLOAT16.numpy))]
        ),
        "end a micro-step": lambda twin, last: twin.pipeline.end_micro_step(),
        "read states": lambda twin, last: twin.pipeline.states(0),
        "read a parameter": lambda twin, last: twin.pipeline.await_param(last),
        "drop": lambda twin, last: (twin.pipeline.drop_gradients(), twin.pipeline.finish()),
        "serial": None,
    }
    loads, buckets = count_of_loads(), len(Twin().pipeline._buckets.all)
    for name, call in calls.items():
        for number in (0, 1, buckets - 1) if name == "finish" else (1,):
            twin = Twin(fail_at=[loads + buckets + number], schedule="overlap" if call else "serial")
            twin.add(1, 0)
            order = list(reversed(twin.pipeline._gradients.order_of_arrival()))
            with pytest.raises(OSError, match="failed as asked"):
                update_and_call(twin, call, order[-1].bucket.pieces[0].param)
            twin.check_at_rest()
            # What had left arrives, whatever is done with the staging that it went through.
            for buffer in twin.pipeline._buckets.staging._free:
                buffer[:] = 0xFF
            twin.device.synchronize()
            twin.pipeline.finish()  # it is said once
            twin.naive.states = [[twin.pipeline.states(i)[0][1][n].copy() for n in STATES] for i in (0, 1)]
            twin.naive.steps = [1, 1]
            twin.naive.sums = [None, None]
            for work in order[:number] + order[number + 1 :]:
                for piece in work.bucket.pieces:
                    run = slice(piece.start, piece.start + piece.numel)
                    got, expected = twin.tensors[piece.param].memory[run], twin.naive.params()[piece.param][run]
                    assert_same_bits(f"{name}: bucket {work.bucket.index}", got, expected)
            for work in order[number + 2 :]:  # nothing was begun after the failure
                for piece in work.bucket.pieces:
                    assert not twin.naive.states[piece.param][1][piece.start : piece.start + piece.numel].any()
            for _ in range(2):
                twin.step(1, 0)
            twin.pipeline.finish()
            twin.check()


def an_interrupt():
    """Between two buckets, in one, or when gradients are looked at: what was asked for ends first."""

    class Interrupt(BaseException):
        pass

    def interrupt(*args):
        raise Interrupt

    for owner, name in (("_updates", "_await_publication"), ("_updates", "_run_adam"), ("_gradients", "add_squares")):
        twin = Twin(gradient_clipping=0.5)
        twin.add(1, 0)
        setattr(getattr(twin.pipeline, owner), name, interrupt)
        with pytest.raises(Interrupt):
            update_and_call(twin, lambda twin, _: twin.pipeline.finish(), None)
        delattr(getattr(twin.pipeline, owner), name)
        twin.pipeline.drop_gradients()
        twin.check_at_rest()
        twin.naive.states = [[twin.pipeline.states(i)[0][1][n].copy() for n in STATES] for i in (0, 1)]
        twin.naive.steps = [int(n) for n in twin.pipeline.steps]
        twin.naive.sums = [None, None]
        for i in (0, 1):
            assert_same_bits(f"parameter {i}", twin.tensors[i].memory, twin.naive.params()[i])
        for _ in range(2):
            twin.step(1, 0)
        twin.pipeline.finish()
        twin.check()


def delayed():
    for clips in (None, 0.5):
        twin = Twin(schedule="delayed", delay_warmup_steps=1, gradient_clipping=clips)
        for params in ([1, 0], [0, 1], [1], [0, 1]):
            twin.step(*params)
        twin.pipeline.flush(twin.tensors)
        twin.check()
        twin.check_at_rest()
        twin.step(1, 0)
        twin.pipeline.finish()
        for i in (0, 1):
            twin.check_states(i, twin.pipeline._buckets.local_states(i))


def in_backward():
    twin = Twin(update_in_backward=True)
    for params in ([1, 0], [0, 1], [1], [0, 1]):
        twin.pipeline.expect_step(twin.hypers)
        twin.step(*params)
    twin.pipeline.finish()
    twin.check()
    twin.check_at_rest()


def a_flush_in_backward_that_fails():
    buckets = len(Twin().pipeline._buckets.all)
    twin = Twin(update_in_backward=True, fail_at=[count_of_loads() + buckets])
    twin.pipeline.expect_step(twin.hypers)
    twin.add(1, 0)
    twin.pipeline._buckets.tasks.submit(lambda: None).result()  # all are updated
    with pytest.raises(OSError, match="failed as asked"):
        twin.pipeline.flush(twin.tensors)
    twin.check_at_rest()


def a_watched_event():
    trace, done = Twin().pipeline.device.trace, []
    with tempfile.TemporaryDirectory() as folder, trace.to_file(Path(folder) / "events.json"):
        event = watched(trace, TO_HOST, 0, 0, lambda: Waiting(lambda: done.append(1)))
        event.wait()
        event.order()
    assert done == [1, 1]


def traced():
    """The steps inside, whole, and no other."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.json"
        twin = Twin(gradient_clipping=0.5)
        twin.step(1, 0)
        with twin.pipeline.trace(path):
            twin.step(0, 1)
            a_layer_reads_its_parameters_of(twin)
            twin.step(1, 0)
        twin.check()
        twin.step(0, 1)
        lanes = Counter(event["cat"] for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X")
        buckets = len(twin.pipeline._buckets.all)
        assert {lanes[lane] for lane in (TO_HOST, REDUCTION, UPDATE, TO_DEVICE)} == {2 * buckets}
        twin.pipeline.finish()


def a_copy_knows_when_it_ran():
    twin = Twin()
    began, ended = twin.device.to_host([Copy(twin.tensors[0], 0, 40, 0)], np.empty(40, BFLOAT16.numpy)).ran
    assert began <= ended


def an_error_that_was_there_before_anybody_asked():
    twin = Twin(fail_at=[count_of_loads()])
    twin.add(1, 0)
    with pytest.raises(OSError, match="failed as asked"):
        twin.pipeline._buckets.tasks.submit(lambda: None).result()
    with pytest.raises(OSError, match="failed as asked"):
        twin.update()


def an_event_that_its_reader_brings_about():
    done = []
    Waiting(lambda: done.append(1)).order()
    Waiting(lambda: done.append(2)).wait()
    assert done == [1, 2]


def on_ranks(body, world_size=2, timeout=10.0):
    return run_ranks(world_size, body, timeout=timeout)


def ranks():
    """Several buckets on their way, each rank with gradients that others lack; no bucket waits for a finish."""

    def body(rank, options):
        twin = Twin(rank=rank, **options)
        n_ranks = rank.world_size
        for missing in ([()] * n_ranks, [(0,), ()], [(1,), (1,)], [(), (0, 1)], [()] * n_ranks):
            for _ in range(twin.pipeline.config.gradient_accumulation_steps):
                for i in (1, 0):
                    drawn = [twin.draw(i) for _ in range(n_ranks)]
                    drawn = [0 * d if i in absent else d for d, absent in zip(drawn, missing, strict=True)]
                    if i not in missing[rank.rank]:
                        twin.give(i, drawn[rank.rank])
                    if any(i not in absent for absent in missing):
                        total = drawn[0].astype(np.float32)
                        for d in drawn[1:]:
                            total = total + d.astype(np.float32)
                        twin.naive.add_gradient(i, total / np.float32(n_ranks))
                twin.pipeline.end_micro_step()
            twin.update()
            twin.naive.step(1.0)
        twin.pipeline.finish()
        twin.check_at_rest()
        for i in (0, 1):
            assert_same_bits(f"parameter {i}", twin.tensors[i].memory, twin.naive.params()[i])
            for start, views in twin.pipeline.states(i):
                for name, view in views.items():
                    expected = twin.naive.states[i][STATES.index(name)][start : start + view.size]
                    assert_same_bits(f"{name} of parameter {i}", view, expected)

    accumulating = {"gradient_accumulation_steps": 2}
    for options in ({}, {"gradient_clipping": 0.5}, accumulating, {**accumulating, "reduce_bucket_size": 1000}):
        on_ranks(lambda rank, options=options: body(rank, options))


def ranks_start_from_rank_0():
    def body(rank):
        twin = Twin(rank=rank)
        other = FakeTensor(np.full(40, rank.rank + 1, np.float32))
        tensor = FakeTensor(other.memory.astype(BFLOAT16.numpy))
        twin.pipeline.add_parameters([ParamSpec("new", 40, BFLOAT16)], [other])
        for _, views in twin.pipeline.states(2):
            assert_same_bits("master", views["master"], np.ones_like(views["master"]))
        assert (other.memory == 1).all(), tensor

    on_ranks(body)


def ranks_that_differ_and_then_agree():
    def body(rank):
        twin = Twin(rank=rank)
        tensors = [FakeTensor(np.ones(40, BFLOAT16.numpy))]
        with pytest.raises(ParameterError):
            twin.pipeline.add_parameters([ParamSpec(f"of rank {rank.rank}", 40, BFLOAT16)], tensors)
        twin.pipeline.add_parameters([ParamSpec("new", 40, BFLOAT16)], tensors)

    on_ranks(body)


def a_rank_whose_copy_fails():
    """Says so itself; the others hear that a rank was lost, and nobody hangs."""
    loads = on_ranks(lambda rank: Twin(rank=rank).device._copies)[1]
    for number in (0, 2, 6, 9):
        told = []

        def body(rank, told=told, number=number):
            twin = Twin(rank=rank, fail_at=[loads + number] if rank.rank else [])
            try:
                for i in (1, 0):
                    twin.give(i, twin.draw(i))
                twin.update()
                twin.pipeline.finish()
                rank.sum_integers(np.zeros(1, np.int64), "the end")
            except CollectiveError:
                twin.pipeline.drop_gradients()
                twin.check_at_rest()
                told.append(rank.rank)

        with pytest.raises(OSError, match="failed as asked"):
            on_ranks(body)
        assert told == [0]


SCENARIOS = [
    steps_and_finish,
    steps_without_a_pause,
    micro_steps,
    serial,
    a_layer_reads_its_parameters,
    states_are_read,
    local_states_are_read,
    a_master_is_loaded,
    a_change_is_adopted,
    parameters_are_added,
    gradients_are_dropped,
    a_gradient_that_is_lost,
    a_parameter_that_does_not_arrive,
    an_interrupt,
    delayed,
    in_backward,
    a_flush_in_backward_that_fails,
    a_watched_event,
    traced,
    a_copy_knows_when_it_ran,
    an_error_that_was_there_before_anybody_asked,
    an_event_that_its_reader_brings_about,
    ranks,
    ranks_start_from_rank_0,
    ranks_that_differ_and_then_agree,
    a_rank_whose_copy_fails,
]


CORE_WAITS = [wait for file in sorted(ROOT.glob("offload_core/*.py")) for wait in waits_of(f"offload_core.{file.stem}")]
CORE_CHANGES = [
    Change(f"offload_core.{module}", function, old, new)
    for module, function, old, new in [
        ("updates", "Updates._travel", "self._buckets.device.mark()", "Done()"),
        ("updates", "Updates._travel", "if len(travelling) == self._buckets.tasks.depth:", "if False:"),
        ("updates", "Updates._await_publication", "self._publishing.append", "id"),
        ("updates", "Updates.start_ahead", "work.task = ", ""),
        ("updates", "Updates._await_publication", "work.release()", "pass"),
        ("gradients", "Gradients._reduce", "if len(self._buckets.in_staging) == self._buckets.tasks.depth:", "if 0:"),
        ("gradients", "Gradients._reduce", "self._buckets.in_staging.append(work)", "pass"),
        ("gradients", "Gradients._reduce", "work.task = ", ""),
        ("gradients", "Gradients._reduce", "work.release()", "pass"),
        ("buckets", "LocalBuckets.recover", "work.release()", "pass"),
        ("tasks", "Background.submit", "if self._failure is not None:", "if False:"),
        ("tasks", "Background.recover", "self._failure = None", "pass"),
    ]
]


def test_the_sound_core_passes(monkeypatch):
    Threads().play(monkeypatch)
    for scenario in SCENARIOS:
        scenario()


def test_the_scenarios_walk_the_whole_transition_table(monkeypatch):
    Threads().play(monkeypatch)
    walked, on = set(), BucketLife.on

    def recording(life, event):
        walked.add((life.state, event))
        on(life, event)

    monkeypatch.setattr(BucketLife, "on", recording)
    for scenario in SCENARIOS:
        scenario()
    while_filling = {(state, BucketEvent.ABORT) for state in (BucketState.FILLING, BucketState.REDUCING)}
    assert walked == set(TRANSITIONS) - while_filling  # no update is on its way then


@pytest.mark.parametrize("mutant", [*CORE_WAITS, *CORE_CHANGES], ids=str)
def test_a_wait_of_the_core_that_is_taken_out_is_noticed(mutant, monkeypatch):
    Threads().play(monkeypatch)
    assert_noticed(mutant, SCENARIOS)
