"""Gradients on the host: how much memory they take, whose it is and until when, and that no wait for it is for ever."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core import HostMemoryWarning
from offload_core.config.options import OffloadConfig
from offload_core.device.host import HostDevice
from offload_core.dtypes import BFLOAT16, FLOAT16, FLOAT32
from offload_core.errors import CollectiveError
from offload_core.layout.partition import ParamSpec
from offload_core.plans.terms import GRADIENT_SLOTS, GRADIENTS_ON_HOST
from offload_core.rules.adam import AdamHyper
from offload_core.step.decision import StepArguments
from offload_core.step.loss_scale import LossScaler
from offload_core.step.state_access import StateAccess
from offload_core.step.update import Updates
from offload_core.testing.fake_device import FakeDevice, FakeTensor
from offload_core.testing.thread_ranks import run_ranks
from tests.sampling import least
from tests.support.interrupts import FewerLines, interrupt_at, numbers_of
from tests.support.one_thread import Threads, ThreadsOfRanks
from tests.support.oracles import assert_same_bits
from tests.support.pipelines import Case, Subject, bits
from tests.support.rank_pipelines import rank_cases
from tests.support.strategies import law

HYPERS = [AdamHyper(1e-2)]
SIZES = (40, 100, 7, 64, 33)
"""244 elements: 8 buckets of at most 32."""
BACKWARD = (4, 3, 2, 1, 0)


def make(device=None, dtype=BFLOAT16, sizes=SIZES, scaler=None, collectives=None, **fields):
    masters = [np.random.default_rng(n).standard_normal(n).astype(np.float32) for n in sizes]
    defaults = {"update_in_backward": True, "reduce_bucket_size": 32, "num_threads": 1}
    dtypes = dtype if isinstance(dtype, list) else [dtype] * len(sizes)
    config = OffloadConfig(**{**defaults, **fields})
    return Subject(device or FakeDevice(), masters, dtypes, [0] * len(sizes), config, scaler, collectives)


def gradient(subject, i, number=0):
    rng = np.random.default_rng(10 * number + i)
    return (rng.standard_normal(subject.specs[i].numel) * 0.1).astype(subject.specs[i].dtype.numpy)


def held(subject):
    """The bytes of gradients on the host, and those that were planned."""
    [row] = [row for row in subject.engine.memory_report((), {}).rows if row.what == GRADIENTS_ON_HOST]
    return row.held, row.planned


def add(subject, params, number=0):
    """Gradients one by one; what they take on the host at most."""
    most = 0
    for i in params:
        subject.add_gradient(i, gradient(subject, i, number))
        most = max(most, held(subject)[0])
    return most


def step(subject, params=BACKWARD, number=0):
    """An announced step; what gradients take on the host at most."""
    subject.pipeline.early.expect_step(StepArguments(HYPERS, subject.tensors))
    most = add(subject, params, number)
    subject.pipeline.gradients.end_micro_step()
    most = max(most, held(subject)[0])
    subject.pipeline.step(StepArguments(HYPERS, subject.tensors))
    return max(most, held(subject)[0])


def all_lent(subject):
    buffers = subject.pipeline.buckets.gradient_memory._buffers
    return {bucket.layout.index not in buffers for bucket in subject.pipeline.buckets.all}


# --- bytes -----------------------------------------------------------------------------------------


@pytest.mark.states_on_host
@pytest.mark.draws(2)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("numel", [500, 2000, 8000])
def test_gradients_take_the_bytes_of_a_few_buckets_whatever_the_size_of_the_model(numel, stage):
    subject = make(sizes=(numel, 100), reduce_bucket_size=64, stage=stage)
    expected = GRADIENT_SLOTS * 64 * 2
    for number in range(3):
        assert step(subject, (1, 0), number) == expected
    assert held(subject) == (expected, expected)
    assert all_lent(subject) == {True}
    subject.device.close()


@pytest.mark.states_on_host
def test_slots_take_the_largest_bucket():
    """Of fp32 parameters among bf16 ones, and of parameters that are added later."""
    subject = make(dtype=[FLOAT32, *[BFLOAT16] * 4])
    assert held(subject) == (GRADIENT_SLOTS * 32 * 4,) * 2
    blocks = make(sizes=(3000, 40, 70), state_format="8bit")  # whole blocks of 256 elements, whatever was asked
    largest = max(bucket.layout.shard_numel for bucket in blocks.pipeline.buckets.all)
    assert largest >= 256
    assert held(blocks) == (GRADIENT_SLOTS * largest * 2,) * 2
    for each in (subject, blocks):
        step(each, range(len(each.specs)))
        assert all_lent(each) == {True}
        each.device.close()


@pytest.mark.states_on_host
def test_parameters_that_are_added_share_the_slots_and_larger_ones_replace_them():
    subject, reference = make(), make(schedule="serial", update_in_backward=False)
    more = ParamSpec("more", 500, BFLOAT16), ParamSpec("wide", 500, FLOAT32)
    for i, spec in enumerate(more):
        for each in (subject, reference):
            step(each, range(len(each.specs)))
            tensor = FakeTensor(np.ones(500, spec.dtype.numpy))
            each.pipeline.add_parameters([spec], [tensor])
            each.specs.append(spec)
            each.tensors.append(tensor)
        assert held(subject) == (GRADIENT_SLOTS * 32 * spec.dtype.itemsize,) * 2, i
    for each in (subject, reference):
        step(each, range(len(each.specs)))
    assert bits(subject) == bits(reference)
    assert all_lent(subject) == {True}


@pytest.mark.states_on_host
def test_a_model_of_few_buckets_has_memory_for_each():
    subject = make(sizes=(100, 4))
    assert len(subject.pipeline.buckets.all) == GRADIENT_SLOTS
    expected = sum(bucket.layout.shard_numel for bucket in subject.pipeline.buckets.all) * 2
    assert step(subject, (1, 0)) == expected < GRADIENT_SLOTS * 32 * 2
    assert held(subject) == (expected, expected)
    assert all_lent(subject) == {False}


@pytest.mark.states_on_host
@pytest.mark.draws(2)
@pytest.mark.parametrize(
    ("fields", "dtype", "scaler"),
    [
        ({"update_in_backward": False}, BFLOAT16, None),
        ({"gradient_clipping": 1e3}, BFLOAT16, None),
        ({"skip_nonfinite": True}, BFLOAT16, None),
        ({"gradient_accumulation_steps": 2}, BFLOAT16, None),
        ({"schedule": "serial"}, BFLOAT16, None),
        ({"schedule": "delayed"}, BFLOAT16, None),
        ({"stage": 3, "gradient_clipping": 1e3}, BFLOAT16, None),
        ({}, FLOAT16, LossScaler(4.0, 2)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, LossScaler) else str(value),
)
def test_where_something_needs_gradients_later_each_bucket_has_memory_of_its_own(fields, dtype, scaler):
    subject = make(dtype=dtype, scaler=scaler, **fields)
    wide = 4 if fields.get("gradient_accumulation_steps") else 2
    expected = sum(bucket.layout.shard_numel for bucket in subject.pipeline.buckets.all) * wide
    assert expected >= sum(SIZES) * wide
    assert held(subject) == (expected, expected)
    assert step(subject) == expected
    assert all_lent(subject) == {False}


def test_on_the_host_itself_gradients_are_read_where_they_are():
    assert not [row for row in make(HostDevice()).engine.memory_report((), {}).rows if row.what == GRADIENTS_ON_HOST]


# --- bits ------------------------------------------------------------------------------------------


@pytest.mark.states_on_host
@law(40)
@given(
    rank_cases(),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 3]),
    st.none() | st.integers(0, 2**32 - 1),
    st.sampled_from(["ordered", "native"]),
)
def test_no_bit_and_no_byte_depends_on_the_slots(ranks, world_size, stage, seed, reduction):
    """Some parameters have no gradient, on some ranks or on all; ranks get theirs in other orders."""
    ranks = [ranks[rank % len(ranks)] for rank in range(world_size)]
    fields = {"stage": stage, "reduction": reduction, "gradient_clipping": None, "gradient_accumulation_steps": 1}
    assert train(ranks, seed, **fields, **EARLY) == train(ranks, seed, **fields, schedule="serial")


EARLY = {"schedule": "overlap", "update_in_backward": True}


@pytest.mark.states_on_host
@pytest.mark.draws(2)
@pytest.mark.parametrize("clipping", [None, 1e6])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_in_which_no_rank_has_a_gradient_is_followed_by_others(stage, clipping):
    gradients = [(i, np.float32([0.5 - i])) for i in range(2)]
    case = Case(
        masters=[np.float32([0.25]), np.float32([-0.5])],
        dtypes=[FLOAT32, FLOAT32],
        groups=[0, 0],
        config=OffloadConfig(reduce_bucket_size=1),
        hypers=[AdamHyper(lr=0.01)],
        steps=[[gradients], [gradients[1:]], [[]]],
    )
    fields = {"stage": stage, "gradient_clipping": clipping}
    assert train([case] * 2, None, **fields, **EARLY) == train([case] * 2, None, **fields, schedule="serial")


def train(ranks, seed, **fields):
    """Take each rank's steps, twice; return all that came of them."""
    threads = ThreadsOfRanks()

    def body(rank):
        threads.here = Threads(None if seed is None else seed + rank.rank)
        case = replace(ranks[rank.rank], config=replace(ranks[rank.rank].config, **fields))
        subject = Subject.of(FakeDevice(), case, collectives=rank if len(ranks) > 1 else None)
        reports = [rank_step(subject, case, micro_steps[0]) for micro_steps in [*case.steps, *case.steps]]
        subject.pipeline.last_step.finish()
        if case.config.update_in_backward:
            assert held(subject)[0] == held(subject)[1], "memory that was not planned"
        states = [view.tobytes() for i in range(len(subject.specs)) for view in views_of(subject, i)]
        return reports, [param.tobytes() for param in subject.params()], states, subject.pipeline.counts.steps

    with pytest.MonkeyPatch.context() as patch:
        threads.play(patch)
        return run_ranks(len(ranks), body)


def views_of(subject, i):
    return [view for _, views in StateAccess(subject.pipeline).states(i) for name, view in sorted(views.items())
            if name != "master"]  # fmt: skip


def rank_step(subject, case, arrivals):
    subject.pipeline.early.expect_step(StepArguments(case.hypers, subject.tensors))
    for i, values in arrivals:
        subject.add_gradient(i, values)
    subject.pipeline.gradients.end_micro_step()
    return repr(subject.pipeline.step(StepArguments(case.hypers, subject.tensors)))


@pytest.mark.states_on_host
def test_parameters_without_a_gradient_take_no_memory_and_keep_their_values(monkeypatch):
    """Every bucket waits for a gradient that never comes; each is updated with what it has when backward has ended."""
    Threads().play(monkeypatch)
    sizes = [16] * 20  # ten buckets of two
    subject, reference = make(sizes=sizes), make(sizes=sizes, schedule="serial", update_in_backward=False)
    before = [tensor.memory.copy() for tensor in subject.tensors]
    for number in range(2):
        assert step(subject, range(0, 20, 2), number) == GRADIENT_SLOTS * 32 * 2
        step(reference, range(0, 20, 2), number)
    assert bits(subject) == bits(reference)
    for i, param in enumerate(subject.params()):
        assert (param.tobytes() == before[i].tobytes()) == bool(i % 2)
    assert [int(n) for n in subject.pipeline.counts.steps] == [2, 0] * 10


# --- waiting ---------------------------------------------------------------------------------------


@pytest.mark.states_on_host
def test_a_trace_shows_the_waits(tmp_path, monkeypatch):
    Threads().play(monkeypatch)  # all is done as late as can be
    subject = make()
    step(subject)
    with subject.engine.trace(tmp_path / "step.json"):
        step(subject)
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    waits = [event["name"] for event in events if "gradient memory" in event["name"]]
    n_buckets = len(subject.pipeline.buckets.all)
    order = [bucket.layout.index for bucket in subject.pipeline.arrivals.order]
    assert waits == [f"bucket {i}: wait for gradient memory" for i in order[: n_buckets - GRADIENT_SLOTS]]


@pytest.mark.states_on_host
def test_gradients_that_nobody_announced_take_memory_that_stays_and_a_warning_says_so():
    subject, reference = make(), make(schedule="serial", update_in_backward=False)
    n_buckets = len(subject.pipeline.buckets.all)
    params = range(len(SIZES))
    with pytest.warns(HostMemoryWarning, match=r"of gradients wait on the host for step\(\).*not announced") as warned:
        add(subject, params)
    assert len(warned) == 1
    add(reference, params)
    for each in (subject, reference):
        each.pipeline.gradients.end_micro_step()
        each.pipeline.step(StepArguments(HYPERS, each.tensors))
    private = [
        bucket.gradient.private.nbytes for bucket in subject.pipeline.buckets.all if bucket.gradient.private is not None
    ]
    assert len(private) == n_buckets - GRADIENT_SLOTS
    own = sum(private)
    planned = GRADIENT_SLOTS * 32 * 2
    assert held(subject) == (planned + own, planned)
    for number in (1, 2):
        assert step(subject, number=number) == planned + own
        step(reference, number=number)
    assert bits(subject) == bits(reference)


@pytest.mark.states_on_host
@pytest.mark.filterwarnings("ignore:.*wait on the host for step:offload_core.HostMemoryWarning")
def test_gradients_that_were_not_announced_can_be_dropped_and_added_to():
    subject, reference = make(), make(schedule="serial", update_in_backward=False)
    for each in (subject, reference):
        add(each, range(len(SIZES)))
        each.pipeline.gradients.drop([1])
        add(each, (1, 0), number=3)
        add(each, (2,), number=4)
        each.pipeline.step(StepArguments(HYPERS, each.tensors))
        add(each, range(len(SIZES)))
        each.pipeline.gradients.drop()
        step(each, number=5)
    assert bits(subject) == bits(reference)


# --- faults ----------------------------------------------------------------------------------------


def finished_step(subject):
    step(subject, number=1)
    subject.pipeline.last_step.finish()


def consistent(subject):
    """After a step that broke off: its buckets have been updated whole, or not at all; it goes on from there."""
    subject.pipeline.gradients.drop()
    subject.pipeline.early.undo()
    for bucket in subject.pipeline.buckets.all:
        assert bucket.gradient.buffer is bucket.gradient.private, "memory was given back"
    planned = held(subject)[1]
    for number in (7, 8):
        assert step(subject, number=number) == planned
    for i, param in enumerate(subject.params()):
        [(_, views)] = StateAccess(subject.pipeline).states(i)
        assert_same_bits(f"parameter {i}", param, views["master"].astype(param.dtype))
        assert np.isfinite(views["exp_avg"]).all()
    assert held(subject)[0] == planned


@pytest.mark.states_on_host
@pytest.mark.draws(2)
@pytest.mark.parametrize("failing", range(5))
@pytest.mark.parametrize("seed", [None, 1])
def test_an_update_that_fails_while_backward_waits_for_a_slot_is_an_error_there(monkeypatch, failing, seed):
    Threads(seed).play(monkeypatch)
    subject = make()
    step(subject)
    subject.pipeline.last_step.finish()
    updates = []

    def fail(*args, **options):
        updates.append(args)
        if len(updates) == failing + 1:
            raise OSError("the update failed as asked")
        return run(*args, **options)

    run = Updates._run
    with monkeypatch.context() as patch:
        patch.setattr(Updates, "_run", fail)
        with pytest.raises(OSError, match="failed as asked"):
            finished_step(subject)
    consistent(subject)


@pytest.mark.states_on_host
@pytest.mark.draws(1)
@pytest.mark.parametrize("failing", [0, 3, 4, 8, 11])
def test_a_copy_that_fails_while_backward_waits_for_a_slot_is_an_error_of_the_step(failing):
    subject = make(FakeDevice(seed=failing, max_delay=1e-4))
    step(subject)
    subject.pipeline.last_step.finish()
    subject.device.fail_after(failing)
    with pytest.raises(OSError, match="failed as asked"):
        finished_step(subject)
    subject.device.fail_after(None)
    consistent(subject)
    subject.device.close()


@pytest.mark.states_on_host
@pytest.mark.parametrize("of", ["first pass", pytest.param("each pass", marks=pytest.mark.slow)])
def test_an_interrupt_at_any_line_of_a_wait_for_a_slot_loses_none(of, drawn):
    def begun():
        subject = make()
        step(subject)
        subject.pipeline.last_step.finish()
        subject.pipeline.early.expect_step(StepArguments(HYPERS, subject.tensors))
        add(subject, (4, 3), number=1)  # four buckets
        subject.values = gradient(subject, 1, 1)
        return subject

    counted = begun()
    numbers = numbers_of(lambda: counted.add_gradient(1, counted.values), of)  # which needs one more
    counted.device.close()
    for number in drawn(numbers, least(len(numbers))):
        subject = begun()
        try:
            interrupt_at(number, lambda subject=subject: subject.add_gradient(1, subject.values))
        except FewerLines:
            subject.device.close()
            continue
        if subject.pipeline._announced.requested:  # it came before anything changed: what was used stays used
            subject.pipeline.step(StepArguments(HYPERS, subject.tensors))
            subject.pipeline.last_step.finish()
        consistent(subject)
        subject.device.close()


@pytest.mark.states_on_host
def test_a_rank_that_is_lost_ends_the_wait_of_the_others():
    told = []

    def body(rank):
        subject = make(FakeDevice(), collectives=rank)
        step(subject)
        subject.pipeline.last_step.finish()
        subject.pipeline.early.expect_step(StepArguments(HYPERS, subject.tensors))
        try:
            for i in reversed(range(len(SIZES))):
                if rank.rank == 1 and i == 2:
                    raise OSError("this rank is lost")
                subject.add_gradient(i, gradient(subject, i))
            subject.pipeline.gradients.end_micro_step()
            subject.pipeline.step(StepArguments(HYPERS, subject.tensors))
            subject.pipeline.last_step.finish()
        except CollectiveError as error:
            told.append(str(error))
            assert {bucket.gradient.buffer is bucket.gradient.private for bucket in subject.pipeline.buckets.all} == {
                True
            }
        subject.device.close()

    with pytest.raises(OSError, match="this rank is lost"):
        run_ranks(2, body)
    assert len(told) == 1
