"""The pipeline against a naive unsharded loop, on the host device and on the fake asynchronous one."""

import copy
import inspect
import math
import pickle
from dataclasses import replace
from operator import attrgetter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.config.options import OffloadConfig
from offload_core.device.host import HostDevice
from offload_core.device.host_ranks import HostRanks
from offload_core.dtypes import BFLOAT16, FLOAT16, FLOAT32
from offload_core.errors import GradientError, StateError
from offload_core.rules.adam import AdamHyper
from offload_core.step.bucket_states import Gradient, Publication
from offload_core.step.decision import StepArguments
from offload_core.step.local_bucket import BucketGradient
from offload_core.step.loss_scale import LossScaler
from offload_core.step.pipeline import Pipeline
from offload_core.step.state_access import StateAccess
from offload_core.step.update import Updates
from offload_core.support.threads import uninterrupted
from offload_core.testing.fake_device import FakeDevice, FakeTensor
from tests.support import oracles
from tests.support.kernel_calls import INSTRUCTION_SETS, using
from tests.support.late_stores import over_all_stores
from tests.support.locking_pipeline import LOCKED
from tests.support.one_thread import Threads
from tests.support.oracles import assert_same_bits
from tests.support.pipelines import (
    UNANNOUNCED,
    Case,
    Delayed,
    Naive,
    Subject,
    assert_equal_runs,
    bits,
    cases,
    make,
    overwrite,
    run,
)
from tests.support.strategies import element_types, float_arrays, law


@law(150)
@given(cases())
def test_the_host_device_equals_the_naive_loop(case):
    naive = Naive(case.masters, case.dtypes, case.groups, case.config, case.hypers)
    assert_equal_runs(case, Subject.of(HostDevice(), case), naive)


@pytest.mark.draws(1)
@over_all_stores
@pytest.mark.quick
@law(60)
@given(cases(), st.integers(0, 1000))
def test_a_device_of_late_copies_equals_the_naive_loop(case, seed):
    device = FakeDevice(seed=seed, max_delay=1e-4)
    try:
        naive = Naive(case.masters, case.dtypes, case.groups, case.config, case.hypers)
        assert_equal_runs(case, Subject.of(device, case), naive)
    finally:
        device.close()


@pytest.mark.quick
@law(40)
@given(cases(), st.sampled_from([1, 40, 999]), st.integers(1, 4), st.sampled_from(INSTRUCTION_SETS))
def test_bucket_size_thread_count_and_instruction_set_change_no_bits(case, bucket_size, threads, instruction_set):
    other = replace(case, config=replace(case.config, reduce_bucket_size=bucket_size, num_threads=threads))
    one = Subject.of(HostDevice(), case)
    two = Subject.of(HostDevice(), other)
    with using(instruction_set):
        norms = run(two, other)
    assert run(one, case) == norms
    for i, (a, b) in enumerate(zip(one.params(), two.params(), strict=True)):
        assert_same_bits(f"parameter {i}", a, b)
        for state, (x, y) in enumerate(zip(one.states(i), two.states(i), strict=True)):
            assert_same_bits(f"state {state} of parameter {i}", x, y)


@pytest.mark.draws(4)
@pytest.mark.parametrize("poison", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("fields", [{"gradient_clipping": 1.0}, {"skip_nonfinite": True}], ids=str)
def test_a_skipped_step_changes_nothing(poison, dtype, fields):
    subject = make(dtype=dtype, **fields)
    before = bits(subject)
    for i in range(2):
        gradient = np.ones(subject.specs[i].numel, dtype.numpy)
        gradient[-1] = poison if i == 0 else 1
        subject.add_gradient(i, gradient)
    report = subject.pipeline.step(StepArguments([AdamHyper(1e-2)], subject.tensors))
    assert (report.updated, report.skipped) == (False, "non-finite")
    assert bits(subject) == before
    # the gradients are gone: the next step starts clean
    subject.add_all()
    assert subject.pipeline.step(StepArguments([AdamHyper(1e-2)], subject.tensors)).updated
    assert bits(subject) != before


def test_loss_scale_is_the_one_that_the_gradients_carry():
    """Gradients made under a scale are divided by it even where that update makes the scale grow."""
    plain, scaled = make(dtype=FLOAT16), make(dtype=FLOAT16, scaler=LossScaler(8.0, window=1))
    reports = []
    for _ in range(3):
        scale = scaled.pipeline.loss_scale
        for i in range(2):
            gradient = np.full(plain.specs[i].numel, 0.25, np.float16)
            plain.add_gradient(i, gradient)
            scaled.add_gradient(i, gradient * np.float16(scale))
        plain.pipeline.step(StepArguments([AdamHyper(1e-2)], plain.tensors))
        reports.append(scaled.pipeline.step(StepArguments([AdamHyper(1e-2)], scaled.tensors)))
    assert [report.loss_scale for report in reports] == [8.0, 16.0, 32.0]
    assert {report.grad_norm for report in reports} == {math.sqrt(140 * 0.25**2)}
    assert bits(plain) == bits(scaled)


def test_dropped_gradients_are_forgotten_on_the_host_too():
    for drop in (None, [0, 1], [0]):
        subject, reference = make(gradient_accumulation_steps=2), make(gradient_accumulation_steps=2)
        subject.add_gradient(0, np.ones(40, BFLOAT16.numpy))
        if drop != [0]:
            subject.add_gradient(1, np.ones(100, BFLOAT16.numpy))
        subject.pipeline.gradients.drop(drop)
        for s in (subject, reference):
            s.add_gradient(1, np.full(100, 2, BFLOAT16.numpy))
            s.pipeline.step(StepArguments([AdamHyper(1e-2)], s.tensors))
        assert bits(subject) == bits(reference)


def test_dropping_the_last_arrival_keeps_what_earlier_micro_steps_brought():
    subject, reference = make(gradient_accumulation_steps=2), make(gradient_accumulation_steps=2)
    for s in (subject, reference):
        s.add_all()
    subject.add_gradient(0, np.ones(40, BFLOAT16.numpy))
    for s in (subject, reference):
        s.pipeline.gradients.drop([0])
        s.pipeline.step(StepArguments([AdamHyper(1e-2)], s.tensors))
    assert bits(subject) == bits(reference)


def test_a_step_without_gradients_changes_nothing():
    subject = make(gradient_clipping=1.0)
    before = bits(subject)
    report = subject.pipeline.step(StepArguments([AdamHyper(1e-2)], subject.tensors))
    assert (report.updated, report.skipped) == (False, "no gradients")
    assert bits(subject) == before


def test_a_gradient_of_the_wrong_length_is_refused_and_loses_nothing():
    subject = make()
    subject.add_gradient(0, np.ones(40, BFLOAT16.numpy))
    with pytest.raises(GradientError, match="'p1': gradient has 99 elements, expected 100"):
        subject.add_gradient(1, np.ones(99, BFLOAT16.numpy))
    subject.add_gradient(1, np.ones(100, BFLOAT16.numpy))
    assert subject.pipeline.step(StepArguments([AdamHyper(1e-2)], subject.tensors)).updated


@pytest.mark.states_on_host
@pytest.mark.parametrize("schedule", ["serial", "overlap"])
@pytest.mark.parametrize("delayed", [0.0, 1e-3])
def test_a_failed_copy_from_the_device_changes_no_state_and_can_be_dropped(delayed, schedule):
    device = FakeDevice(max_delay=delayed, fail_at=frozenset({5}))  # 4 copies load the masters
    subject = make(device, schedule=schedule, reduce_bucket_size=64)
    before = bits(subject)

    def one_step():
        for i in (1, 0):
            subject.add_gradient(i, np.ones(subject.specs[i].numel, BFLOAT16.numpy))
        subject.pipeline.step(StepArguments([AdamHyper(1e-2)], subject.tensors))
        subject.pipeline.last_step.finish()

    with pytest.raises(OSError, match="copy 5 failed"):
        one_step()
    assert bits(subject) == before
    subject.pipeline.gradients.drop()
    for _ in range(2):
        subject.add_all()
        assert subject.pipeline.step(StepArguments([AdamHyper(1e-2)], subject.tensors)).updated
    expected = make(FakeDevice(), schedule="serial", reduce_bucket_size=64)
    for _ in range(2):
        expected.add_all()
        expected.pipeline.step(StepArguments([AdamHyper(1e-2)], expected.tensors))
    assert bits(subject) == bits(expected)
    device.close()


@pytest.mark.states_on_host
@pytest.mark.parametrize("schedule", ["serial", "overlap"])
@pytest.mark.parametrize("failing", [7, 8, 9])  # after 4 copies that load the masters and 3 of gradients
def test_after_a_failed_copy_to_the_device_the_next_step_publishes_the_masters(failing, schedule):
    device = FakeDevice(max_delay=1e-3, fail_at=frozenset({failing}))
    subject = make(device, schedule=schedule, reduce_bucket_size=64)
    subject.add_all()

    def one_step():
        subject.pipeline.step(StepArguments([AdamHyper(1e-2)], subject.tensors))
        subject.pipeline.last_step.finish()

    with pytest.raises(OSError, match=f"copy {failing} failed"):
        one_step()
    subject.pipeline.last_step.finish()  # it is said once
    subject.add_all()
    assert subject.pipeline.step(StepArguments([AdamHyper(1e-2)], subject.tensors)).updated
    for i in range(2):
        assert_same_bits(f"parameter {i}", subject.params()[i], oracles.cast(subject.states(i)[0], BFLOAT16))
    device.close()


@pytest.mark.draws(1)
@over_all_stores
@pytest.mark.quick
@law(60)
@given(cases(), st.integers(0, 3), st.sampled_from(["host", "fake"]))
def test_the_delayed_schedule_is_what_its_definition_says(case, warmup, where):
    case = replace(case, config=replace(case.config, schedule="delayed", delay_warmup_steps=warmup))
    device = HostDevice() if where == "host" else FakeDevice(max_delay=1e-4)
    subject = Subject.of(device, case)
    naive = Delayed(case.masters, case.dtypes, case.groups, case.config, case.hypers)
    for micro_steps in [*case.steps, *case.steps]:
        for arrivals in micro_steps:
            for i, gradient in arrivals:
                subject.add_gradient(i, gradient)
                naive.add_gradient(i, gradient)
            subject.pipeline.gradients.end_micro_step()
        report = subject.pipeline.step(StepArguments(case.hypers, subject.tensors, float(len(micro_steps))))
        assert report.grad_norm == naive.step(float(len(micro_steps)))
        for i, expected in enumerate(naive.params()):
            assert_same_bits(f"parameter {i}", subject.params()[i], expected)
    subject.pipeline.parameters.flush(subject.tensors)
    for i, states in enumerate(naive.states):
        assert_same_bits(f"flushed parameter {i}", subject.params()[i], oracles.cast(states[0], case.dtypes[i]))
        for name, got, expected in zip(naive.rules[i].state_names, subject.states(i), states, strict=True):
            assert_same_bits(f"{name} of parameter {i}", got, expected)
    if where == "fake":
        device.close()


@pytest.mark.quick
@pytest.mark.filterwarnings(UNANNOUNCED)
@law(80)
@given(cases(), st.integers(0, 2**32 - 1), st.data())
def test_updating_in_backward_gives_the_bits_of_the_serial_schedule(case, seed, data):
    """Steps may be clipped, skipped or neither, and any part may have been written to the device by then."""
    clipping = data.draw(st.sampled_from([None, 0.5, 1e3]))
    scale = data.draw(st.sampled_from([None, 4.0])) if clipping else None
    kinds = [data.draw(st.sampled_from(["small", "small", "as it is", "inf"])) for _ in range(4)]
    factors = {"small": 1e-3, "as it is": 1.0, "inf": np.inf if clipping else 1.0}
    runs = []
    for early in (True, False):
        options = {"schedule": "overlap", "update_in_backward": True} if early else {"schedule": "serial"}
        with pytest.MonkeyPatch.context() as patch:
            Threads(seed).play(patch)
            scaler = LossScaler(scale, window=2) if scale else None
            config = replace(case.config, gradient_clipping=clipping, **options)
            subject = Subject(FakeDevice(), case.masters, case.dtypes, case.groups, config, scaler, hypers=case.hypers)
            reports = [
                repr(early_step(subject, case, micro_steps, factors[kind]))  # a norm may be NaN
                for micro_steps, kind in zip([*case.steps, *case.steps], kinds, strict=False)
            ]
            runs.append((reports, bits(subject)))
    assert runs[0] == runs[1]


def early_step(subject, case, micro_steps, factor):
    """A step that is announced before the last micro-step's gradients, where no others can still come."""
    divisor, pipeline = float(len(micro_steps)), subject.pipeline
    before = [g for arrivals in micro_steps[:-1] for g in arrivals]
    for i, gradient in before:
        subject.add_gradient(i, gradient)
    for _ in range(subject.pipeline.config.gradient_accumulation_steps - 1):
        pipeline.gradients.end_micro_step()
    pipeline.early.expect_step(StepArguments(case.hypers, subject.tensors, divisor))
    for i, gradient in micro_steps[-1]:
        with np.errstate(all="ignore"):  # a zero times inf
            gradient = gradient * gradient.dtype.type(factor)
        subject.add_gradient(i, gradient)
    pipeline.gradients.end_micro_step()
    return pipeline.step(StepArguments(case.hypers, subject.tensors, divisor))


def sent_early(subject, hypers, value=1.0):
    """Announce a step, bring gradients, and give the host the time to send all buckets early; their states."""
    subject.pipeline.early.expect_step(StepArguments(hypers, subject.tensors))
    for i in (1, 0):
        subject.add_gradient(i, np.full(subject.specs[i].numel, value, subject.specs[i].dtype.numpy))
    subject.pipeline.buckets.run(lambda: None)
    return {(bucket.publication.state, bucket.gradient.state) for bucket in subject.pipeline.buckets.all}


HYPER = [AdamHyper(1e-2)]
EARLY = {"update_in_backward": True, "reduce_bucket_size": 32}
KEPT = (Publication.EARLY, Gradient.LANDED)
"""Parameters sent early, whose gradients wait for their step to update states."""


@pytest.mark.states_on_host
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_parameters_sent_early_are_committed_sent_again_or_taken_back(dtype):
    """Gradients of 140 ones have the norm sqrt(140)."""
    for clipping, value, state in ((20.0, 1.0, "committed"), (0.5, 1.0, "sent again"), (0.5, np.inf, "taken back")):
        subject = make(FakeDevice(), dtype, gradient_clipping=clipping, **EARLY)
        serial = make(FakeDevice(), dtype, gradient_clipping=clipping, schedule="serial")
        before, states = bits(subject), [a.tobytes() for i in range(2) for a in subject.states(i)]
        buckets, copies = len(subject.pipeline.buckets.all), subject.device._copies
        assert sent_early(subject, HYPER, value) == {KEPT}
        assert subject.device._copies == copies + 2 * buckets
        assert [a.tobytes() for i in range(2) for a in subject.states(i)] == states, "states keep"
        subject.pipeline.updates.finish_publications()
        assert [t.memory.tobytes() for t in subject.tensors] != before[:2], "parameters do not"
        for i in (1, 0):
            serial.add_gradient(i, np.full(serial.specs[i].numel, value, dtype.numpy))
        reports = [
            repr(one.pipeline.step(StepArguments(HYPER, one.tensors))) for one in (subject, serial)
        ]  # a norm may be NaN
        assert reports[0] == reports[1]
        assert bits(subject) == bits(serial)
        assert (bits(subject) == before) == (state == "taken back")
        assert subject.device._copies == copies + (2 if state == "committed" else 3) * buckets
        # The next is likely to be clipped, too.
        assert sent_early(subject, HYPER) == {KEPT if state == "committed" else (Publication.CURRENT, Gradient.LANDED)}
        for each in (subject, serial):
            each.device.close()


@pytest.mark.states_on_host
def test_what_the_host_has_not_got_to_when_all_gradients_are_there_goes_in_the_order_of_the_next_forward(monkeypatch):
    Threads().play(monkeypatch)
    updated, run_adam = [], Updates._run

    def noting(updates, bucket, *args, **options):
        updated.append(bucket.layout.index)
        return run_adam(updates, bucket, *args, **options)

    monkeypatch.setattr(Updates, "_run", noting)
    for gradients_are_there in (False, True):
        subject = make(FakeDevice(), **{**EARLY, "reduce_bucket_size": 64})  # each has memory of its own
        subject.pipeline.early.expect_step(StepArguments(HYPER, subject.tensors))
        for i in (1, 0):
            subject.add_gradient(i, np.ones(subject.specs[i].numel, BFLOAT16.numpy))
        if gradients_are_there:
            subject.device.synchronize()
        updated.clear()
        subject.pipeline.step(StepArguments(HYPER, subject.tensors))
        subject.pipeline.last_step.finish()
        in_backward = [bucket.layout.index for bucket in subject.pipeline.arrivals.order]
        assert updated == (in_backward[::-1] if gradients_are_there else in_backward)


def test_parameters_sent_early_can_be_changed_discarded_joined_and_read():
    """As if nothing had been sent early."""

    def other_learning_rate(subject):
        return [AdamHyper(5e-3)]

    def discard(subject):
        subject.pipeline.gradients.drop()
        subject.pipeline.early.undo()
        check_parameters(subject)

    def discard_one(subject):
        subject.pipeline.gradients.drop([0])

    def join(subject):
        subject.add_gradient(0, np.full(40, 0.5, BFLOAT16.numpy))

    def read(subject):
        subject.pipeline.parameters.await_param(0)
        check_parameters(subject)

    def flush(subject):
        subject.pipeline.parameters.flush(subject.tensors)
        check_parameters(subject)

    def adopt(subject):
        changed = FakeTensor(make().tensors[0])
        changed.memory[3] = 7
        StateAccess(subject.pipeline).adopt(0, changed)

    def write_states(subject):
        overwrite(subject.pipeline, 0, 7, ["exp_avg"])

    def check_parameters(subject):
        for tensor, old in zip(subject.tensors, make().tensors, strict=True):
            assert_same_bits("as it was", tensor.memory, old)

    for act in (other_learning_rate, discard, discard_one, join, read, flush, adopt, write_states):
        for early in (True, False):
            options = {"schedule": "overlap", **EARLY} if early else {"schedule": "serial"}
            subject = make(FakeDevice(), gradient_clipping=20.0, **options)
            assert (KEPT in sent_early(subject, HYPER)) == early
            hypers = act(subject) or HYPER
            subject.pipeline.step(StepArguments(hypers, subject.tensors))
            result = bits(subject)
            if early:
                expected = result
            subject.device.close()
        assert result == expected, act.__name__


def test_what_update_in_backward_has_used_cannot_be_taken_back():
    subject = make(FakeDevice(), update_in_backward=True, reduce_bucket_size=32)
    hypers = [AdamHyper(1e-2)]
    subject.pipeline.early.expect_step(StepArguments(hypers, subject.tensors))
    subject.add_gradient(1, np.ones(100, BFLOAT16.numpy))
    subject.pipeline.buckets.run(lambda: None)
    assert subject.pipeline.buckets.all[0].gradient.state is Gradient.USED
    with pytest.raises(StateError, match=r"'p1': its gradient has been used, for update_in_backward=True"):
        subject.pipeline.gradients.drop([1])
    with pytest.raises(StateError, match=r"'p1': its gradient has been used"):
        subject.pipeline.gradients.drop()
    with pytest.raises(StateError, match=r"'p1': its gradient has been used"):
        subject.add_gradient(1, np.ones(100, BFLOAT16.numpy))
    with pytest.raises(StateError, match=r"hyperparameters.*changed between backward\(\) and step\(\)"):
        subject.pipeline.step(StepArguments([AdamHyper(2e-2)], subject.tensors))
    assert subject.pipeline.step(StepArguments(hypers, subject.tensors)).updated
    reference = make(HostDevice(), reduce_bucket_size=32)
    reference.add_gradient(1, np.ones(100, BFLOAT16.numpy))
    reference.pipeline.step(StepArguments(hypers, reference.tensors))
    assert bits(subject) == bits(reference)


@pytest.mark.states_on_host
def test_after_a_failed_step_that_was_not_announced_parameters_can_be_withdrawn():
    """As ``zero_grad()`` does. The step alone has said where the parameters are."""
    device = FakeDevice()
    subject = make(device, gradient_clipping=20.0, **EARLY)
    for i in (1, 0):
        subject.add_gradient(i, np.ones(subject.specs[i].numel, BFLOAT16.numpy))
    subject.pipeline.gradients.end_micro_step()
    subject.pipeline.buckets.run(lambda: None)
    device.fail_after(1)
    subject.pipeline.step(StepArguments(HYPER, subject.tensors))
    with pytest.raises(OSError, match="failed as asked"):
        subject.pipeline.last_step.finish()
    device.fail_after(None)
    subject.pipeline.early.undo()
    for i, tensor in enumerate(subject.tensors):
        master, *_ = subject.states(i)
        assert_same_bits(f"parameter {i}", tensor.memory, oracles.cast(master, BFLOAT16))
    device.close()


@pytest.mark.states_on_host
def test_an_update_that_failed_is_an_error_of_the_end_of_a_micro_step_too():
    device = FakeDevice(fail_at=frozenset({7}))
    subject = make(device, schedule="overlap", reduce_bucket_size=64)
    subject.add_all()
    subject.pipeline.step(StepArguments([AdamHyper(1e-2)], subject.tensors))
    with pytest.raises(OSError, match="copy 7 failed"):
        subject.pipeline.gradients.end_micro_step()
    subject.add_all()
    assert subject.pipeline.step(StepArguments([AdamHyper(1e-2)], subject.tensors)).updated
    for i in range(2):
        assert_same_bits(f"parameter {i}", subject.params()[i], oracles.cast(subject.states(i)[0], BFLOAT16))
    device.close()


@pytest.mark.states_on_host
@pytest.mark.parametrize("schedule", ["serial", "overlap"])
def test_a_gradient_that_is_lost_on_its_way_gives_its_staging_back(schedule):
    device = FakeDevice(fail_at=frozenset({2, 3, 4}))  # 2 copies load the masters
    subject = make(device, schedule=schedule, gradient_accumulation_steps=2)

    def one_step():
        subject.add_all()
        return subject.pipeline.step(StepArguments([AdamHyper(1e-2)], subject.tensors))

    for _ in range(3):
        with pytest.raises(OSError, match="failed as asked"):
            one_step()
        subject.pipeline.gradients.drop()
    assert one_step().updated
    subject.pipeline.last_step.finish()
    device.close()


@pytest.mark.states_on_host
def test_a_gradient_that_was_lost_on_its_way_is_not_forgotten_with_its_neighbour():
    device = FakeDevice(fail_at=frozenset({2}))  # 2 copies load the masters
    subject = make(device, schedule="overlap", gradient_accumulation_steps=2)
    before = bits(subject)
    subject.add_all()
    with pytest.raises(OSError, match="copy 2 failed"):
        subject.pipeline.gradients.drop([0])
    subject.pipeline.gradients.drop()
    assert bits(subject) == before
    device.close()


def test_an_interrupt_at_any_moment_of_a_step_leaves_a_pipeline_that_goes_on(monkeypatch):
    class Interrupt(BaseException):
        pass

    for name in ("held", "_run"):
        for after in (0, 1):
            subject = make(gradient_clipping=1.0, reduce_bucket_size=64)
            owner = BucketGradient if name == "held" else Updates
            original, count = getattr(owner, name), [0]

            def interrupted(*args, original=original, count=count, after=after, **options):
                count[0] += 1
                if count[0] == after + 1:
                    raise Interrupt
                return original(*args, **options)

            subject.add_all()
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, interrupted)
                with pytest.raises(Interrupt):
                    subject.pipeline.step(StepArguments([AdamHyper(1e-2)], subject.tensors))
            subject.pipeline.gradients.drop()
            subject.add_all()
            assert subject.pipeline.step(StepArguments([AdamHyper(1e-2)], subject.tensors)).updated


@pytest.mark.draws(3)
@pytest.mark.parametrize("call", LOCKED)
def test_what_changes_anything_is_refused_without_the_state_lock(call):
    """A front end that forgets the lock would let a save see the middle of a change."""
    pipeline = Pipeline(OffloadConfig(), HostRanks(HostDevice()), None)
    method = attrgetter(call)(pipeline)
    arguments = [None] * sum(p.default is p.empty for p in inspect.signature(method).parameters.values())
    with pytest.raises(AssertionError):
        method(*arguments)


@pytest.mark.parametrize("call", ["gradients.drop", "early.recall", "last_step.finish"])
def test_a_load_whose_caller_was_interrupted_twice_goes_on_without_the_lock(call):
    pipeline = Pipeline(OffloadConfig(), HostRanks(HostDevice()), None)
    uninterrupted(attrgetter(call)(pipeline))


def test_a_pipeline_is_not_copied_with_its_addresses():
    for attempt in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(StateError, match="which holds addresses; expected its states to be copied"):
            attempt(make().pipeline)


@over_all_stores
@pytest.mark.parametrize("device", [HostDevice, FakeDevice])
def test_a_change_from_outside_is_followed_and_the_rest_keeps_its_low_bits(device):
    subject = make(device())
    masters = [subject.states(i)[0].copy() for i in range(2)]
    subject.params()[0][5] = 7.0
    StateAccess(subject.pipeline).adopt(0, subject.tensors[0])
    StateAccess(subject.pipeline).adopt(1, subject.tensors[1])
    masters[0][5] = 7.0
    for i in range(2):
        assert_same_bits(f"master {i}", subject.states(i)[0], masters[i])


@law(30)
@given(st.lists(st.sampled_from([1, 5, 16, 100]), min_size=1, max_size=4), st.sampled_from([1, 20, 1000]))
def test_parameters_added_later_are_updated_like_the_first(sizes, bucket_size):
    config = OffloadConfig(reduce_bucket_size=bucket_size, op_order="torch")
    rng = np.random.default_rng(0)
    masters = [rng.standard_normal(n).astype(np.float32) for n in (30, *sizes)]
    dtypes, groups = [BFLOAT16] * len(masters), [0] * len(masters)
    whole = Subject(HostDevice(), masters, dtypes, groups, config)
    grown = Subject(HostDevice(), masters[:1], dtypes[:1], groups[:1], config)
    grown.specs += whole.specs[1:]
    grown.tensors += [m.astype(BFLOAT16.numpy) for m in masters[1:]]
    grown.pipeline.add_parameters(whole.specs[1:], masters[1:])
    for subject in (whole, grown):
        for i, m in enumerate(masters):
            subject.add_gradient(i, m.astype(BFLOAT16.numpy))
        subject.pipeline.step(StepArguments([AdamHyper(1e-2)], subject.tensors))
    for a, b in zip(whole.params(), grown.params(), strict=True):
        assert_same_bits("parameter", a, b)


@law(30)
@given(element_types.flatmap(lambda t: float_arrays(t, 50)), st.sampled_from(["torch", "optax"]))
def test_any_gradient_bits_give_what_the_oracle_gives(gradient, op_order):
    """Without clipping nothing is skipped: subnormals, infs and NaNs go through the update as in the frameworks."""
    dtype = oracles.BFLOAT16
    config = OffloadConfig(op_order=op_order)
    masters = [np.linspace(-1, 1, 50, dtype=np.float32)]
    case = Case(masters, [dtype], [0], config, [AdamHyper(1e-2)], [[[(0, gradient)]]])
    assert_equal_runs(
        case, Subject(HostDevice(), masters, [dtype], [0], config), Naive(masters, [dtype], [0], config, case.hypers)
    )


def test_the_plan_is_what_is_allocated():
    for device in (HostDevice(), FakeDevice()):
        for dtype in (FLOAT32, BFLOAT16):
            for fields in ({}, {"gradient_accumulation_steps": 2}, {"reduce_bucket_size": 64}, EARLY):
                subject = make(device, dtype, **fields)
                report = subject.engine.memory_report((), {})
                assert report.host_bytes == report.planned_host_bytes


@pytest.mark.states_on_host
@pytest.mark.parametrize(("schedule", "buckets"), [("serial", 1), ("overlap", 2)])
def test_staging_is_bounded_by_the_bucket_size(schedule, buckets):
    subject = make(FakeDevice(), reduce_bucket_size=32, schedule=schedule)
    assert subject.pipeline.memory.report()["staging"] == buckets * 32 * 2


@pytest.mark.parametrize(
    "scaler", [None, LossScaler(8.0, window=None), LossScaler(1.0, window=10)], ids=["none", "fixed", "least"]
)
def test_steps_that_are_skipped_in_a_row_are_said_once_where_no_lower_loss_scale_helps(scaler, recwarn):
    subject = make(scaler=scaler, gradient_clipping=1.0)
    for i, poison in enumerate([np.nan, 1, np.inf, np.nan, np.nan, np.nan]):
        assert len([w for w in recwarn if "3 steps were skipped" in str(w.message)]) == (i > 4)
        subject.add_gradient(0, np.full(subject.specs[0].numel, poison, BFLOAT16.numpy))
        subject.pipeline.step(StepArguments([AdamHyper(1e-2)], subject.tensors))
    assert len([w for w in recwarn if "3 steps were skipped" in str(w.message)]) == 1
