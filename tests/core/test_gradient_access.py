"""Gradients that are read and overwritten before the update, against a loop whose sums are read and overwritten."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.device.host import HostDevice
from offload_core.dtypes import BFLOAT16, FLOAT32
from offload_core.errors import StateError
from offload_core.rules.adam import AdamHyper
from offload_core.step.decision import StepArguments
from offload_core.step.gradient_access import GradientAccess
from offload_core.step.loss_scale import LossScaler
from offload_core.step.state_access import StateAccess
from offload_core.testing.fake_device import FakeDevice
from offload_core.testing.thread_ranks import run_ranks
from tests.support.oracles import assert_same_bits
from tests.support.pipelines import STATES, UNANNOUNCED, Case, Naive, Subject, bits, cases, make
from tests.support.rank_pipelines import assert_states, averaged, rank_cases
from tests.support.strategies import law

HYPER = [AdamHyper(1e-2)]


@dataclass(frozen=True)
class Act:
    """A read of a parameter's gradient, or a write (``values``) of this process's part (``own``) or of all of it."""

    param: int
    own: bool
    values: np.ndarray | None


@dataclass(frozen=True)
class Script:
    """What is done after the gradients of each micro-step (0) and after its end (1): by step, micro-step and place."""

    acts: dict[tuple[int, int, int], list[Act]]

    @classmethod
    def drawn(cls, seed: int, case: Case, allowed) -> "Script":
        """Acts where ``allowed(step, micro_step, place)``."""
        rng, acts = np.random.default_rng(seed), {}
        for s, micro_steps in enumerate(case.steps):
            for m in range(len(micro_steps)):
                for place in (place for place in (0, 1) if allowed(s, m, place)):
                    acts[s, m, place] = [
                        Act(i, bool(rng.random() < 0.5), rng.standard_normal(n.size).astype(np.float32) * write)
                        if (write := rng.random() < 0.5)
                        else Act(i, bool(rng.random() < 0.5), None)
                        for i, n in enumerate(case.masters)
                        if rng.random() < 0.7
                    ]
        return cls(acts)


def by_hand(case: Case, script: Script) -> tuple[Naive, list, list]:
    """The naive loop, its norms, and all that it reads."""
    naive, norms, read = Naive(case.masters, case.dtypes, case.groups, case.config, case.hypers), [], []
    for s, micro_steps in enumerate(case.steps):
        divisor = len(micro_steps)
        for m, arrivals in enumerate(micro_steps):
            for i, gradient in arrivals:
                naive.add_gradient(i, gradient)
            for act in (*script.acts.get((s, m, 0), ()), *script.acts.get((s, m, 1), ())):
                held = naive.sums[act.param]
                if act.values is None or held is None:
                    read.append(None if held is None else held * np.float32(1 / divisor))
                else:
                    naive.sums[act.param] = act.values * np.float32(divisor)
        norms.append(naive.step(float(divisor)) if any(held is not None for held in naive.sums) else None)
    return naive, norms, read


def parts(access: GradientAccess, param: int, own: bool, divisor: float):
    """``(start, values)`` of what is read."""
    if own:
        return access.own(param, divisor=divisor)
    whole = access.whole(param, divisor=divisor)
    return None if whole is None else [(0, whole)]


def run(subject: Subject, case: Case, script: Script):
    """The norms, and all that is read, in parts."""
    access, norms, read = GradientAccess(subject.pipeline), [], []
    for s, micro_steps in enumerate(case.steps):
        arguments = StepArguments(case.hypers, subject.tensors, float(len(micro_steps)))
        for m, arrivals in enumerate(micro_steps):
            if case.config.update_in_backward and m == len(micro_steps) - 1:
                subject.pipeline.early.expect_step(arguments)
            for i, gradient in arrivals:
                subject.add_gradient(i, gradient)
            for place in (0, 1):
                for act in script.acts.get((s, m, place), ()):
                    found = parts(access, act.param, act.own, arguments.divisor)
                    if act.values is None or found is None:
                        read.append(found)
                    else:
                        access.load(act.param, act.values, divisor=arguments.divisor)
                if place == 0:
                    subject.pipeline.gradients.end_micro_step()
        norms.append(subject.pipeline.step(arguments).grad_norm)
    subject.pipeline.last_step.finish()
    return norms, read


def assert_read(of_ranks: list[list], expected: list):
    """What all ranks have read is, together, what the loop reads."""
    for n, (value, *found) in enumerate(zip(expected, *of_ranks, strict=True)):
        if value is None:
            assert found == [None] * len(found), f"read {n}"
            continue
        covered = np.zeros(value.size, bool)
        for start, own in (piece for pieces in found for piece in pieces):
            assert_same_bits(f"read {n} from {start}", own, value[start : start + own.size])
            covered[start : start + own.size] = True
        assert covered.all(), f"read {n}"


@pytest.mark.quick
@law(80)
@given(cases(), st.integers(0, 2**32 - 1), st.sampled_from(["host", "fake"]))
def test_what_is_read_is_the_mean_so_far_and_what_is_written_is_updated_with(case, seed, kind):
    script = Script.drawn(seed, case, lambda s, m, place: True)
    naive, norms, expected = by_hand(case, script)
    subject = Subject.of(FakeDevice(max_delay=1e-4) if kind == "fake" else HostDevice(), case)
    found, read = run(subject, case, script)
    assert found == norms
    assert_read([read], expected)
    assert_states([subject], naive)


@pytest.mark.filterwarnings(UNANNOUNCED)
@law(60)
@given(rank_cases(), st.integers(0, 2**32 - 1), st.sampled_from([None, 0.5, 1e3]), st.booleans())
def test_on_any_number_of_ranks_they_are_those_of_the_averaged_gradients(ranks, seed, early, fake):
    if early:  # parameters are sent early, and states wait for the step, which clips at this norm
        config = replace(ranks[0].config, update_in_backward=True, gradient_clipping=early, schedule="overlap")
        ranks = [replace(case, config=config) for case in ranks]
    mean = averaged(ranks)

    def allowed(s, m, place):
        """Each rank has had a gradient; and it has one in a micro-step that a read comes before."""
        met = [0] if place == 0 else [0, *range(m + 1, len(mean.steps[s]))][:2]
        return all(case.steps[s][i] for case in ranks for i in met)

    script = Script.drawn(seed, mean, allowed)
    naive, norms, expected = by_hand(mean, script)

    def body(rank):
        case = ranks[rank.rank]
        subject = Subject.of(FakeDevice(max_delay=1e-4) if fake else HostDevice(), case, collectives=rank)
        return subject, *run(subject, case, script)

    results = run_ranks(len(ranks), body)
    assert [found for _, found, _ in results] == [norms] * len(ranks)
    assert_read([read for _, _, read in results], expected)
    assert_states([subject for subject, _, _ in results], naive)


def own_bits(subject: Subject) -> list[bytes]:
    """Of the parameters, and of this rank's parts of the states."""
    parts = [StateAccess(subject.pipeline).local_states(i) for i in range(len(subject.specs))]
    return [array.tobytes() for array in (*subject.params(), *(part[name] for part in parts for name in STATES))]


def test_the_callers_gradient_is_not_written_to():
    """One rank on the host reads it where it is."""
    subject, given = make(dtype=FLOAT32), np.full(40, 0.5, np.float32)
    subject.pipeline.gradients.add({0: given})
    access = GradientAccess(subject.pipeline)
    access.load(0, np.full(40, 2.0, np.float32))
    assert_same_bits("as written", access.whole(0), np.full(40, 2.0, np.float32))
    assert_same_bits("the caller's", given, np.full(40, 0.5, np.float32))


def test_what_was_read_is_not_exchanged_again_at_the_end_of_the_micro_step():
    """Ranks that read exchange the gradients once, as those that do not, and a few words for each read."""

    def body(rank, reads):
        subject = make(FakeDevice(), collectives=rank, reduce_bucket_size=32)
        subject.add_gradient(1, np.ones(100, BFLOAT16.numpy))  # of the other bucket's parameter there is none
        for _ in range(reads):
            assert GradientAccess(subject.pipeline).own(0) is None
            assert GradientAccess(subject.pipeline).own(1) is not None
        subject.pipeline.gradients.end_micro_step()
        subject.pipeline.step(StepArguments(HYPER, subject.tensors))
        return own_bits(subject), rank.sent_bytes

    plain, read = (run_ranks(2, lambda rank, n=n: body(rank, n)) for n in (0, 2))
    assert read == plain


def test_a_gradient_that_is_yet_to_be_finalized_is_read_and_so_is_a_further_one():
    case = make(dtype=FLOAT32)

    def body(rank):
        masters = [np.ones(spec.numel, np.float32) for spec in case.specs]
        config = case.pipeline.config
        subject = Subject(HostDevice(), masters, [FLOAT32] * 2, [0, 0], config, None, rank, leaves={0: 0})
        for n in (1, 2):
            subject.add_gradient(0, np.full(40, 0.5, np.float32))
            assert_same_bits("so far", GradientAccess(subject.pipeline).whole(0), np.full(40, 0.5 * n, np.float32))

    run_ranks(2, body)


@pytest.mark.parametrize("world_size", [1, 2])
def test_where_none_came_nothing_is_read_or_exchanged_and_nothing_waits_for_an_update(world_size):
    def body(rank):
        subject = make(collectives=rank)
        access = GradientAccess(subject.pipeline)
        for _ in range(2):
            assert access.whole(0) is None
            assert access.own(0) is None
            with pytest.raises(StateError, match="'p0': its gradient is to be overwritten, and no rank has had one"):
                access.load(0, np.ones(40, np.float32))
            subject.pipeline.gradients.check_none("a save", waiting=False)
            subject.add_gradient(1, np.ones(100, BFLOAT16.numpy))
            assert access.whole(0) is None
            assert access.whole(1) is not None
            subject.pipeline.step(StepArguments(HYPER, subject.tensors))

    run_ranks(world_size, body)


@pytest.mark.parametrize("world_size", [1, 2])
def test_overflow_and_norm_are_those_of_the_values_that_were_written(world_size):
    """Values are read and written without the loss scale."""

    def body(rank):
        subject = make(FakeDevice(), scaler=LossScaler(8.0, window=10), collectives=rank, gradient_clipping=1e3)
        access, arguments = GradientAccess(subject.pipeline), StepArguments(HYPER, subject.tensors)
        subject.add_all(8.0)
        assert_same_bits("without the scale", access.whole(0), np.ones(40, np.float32))
        access.load(0, np.full(40, np.inf, np.float32))
        assert subject.pipeline.step(arguments).skipped == "overflow"
        subject.add_all(np.inf)
        access.load(0, np.full(40, 3.0, np.float32))
        access.load(1, np.zeros(100, np.float32))
        report = subject.pipeline.step(arguments)
        assert (report.updated, report.loss_scale) == (True, 4.0)
        return report.grad_norm

    assert run_ranks(world_size, body) == [np.sqrt(40 * 9.0)] * world_size


@pytest.mark.parametrize("ranks", [{1}, {0, 1}])
def test_no_parameter_is_sent_early_after_a_read(ranks):
    """The last bucket is full, and waits for those before it, of which these ranks have no gradient: it leaves at the
    read. Ranks that have all gradients have sent buckets early before."""

    def body(rank, early):
        fields = {"update_in_backward": early, "gradient_clipping": 1e3, "reduce_bucket_size": 32}
        subject = make(FakeDevice(), collectives=rank, **fields)
        arguments = StepArguments(HYPER, subject.tensors)
        subject.pipeline.early.expect_step(arguments)
        for i in (0,) if rank.rank in ranks else (1, 0):
            subject.add_gradient(i, np.ones(subject.specs[i].numel, BFLOAT16.numpy))
        GradientAccess(subject.pipeline).load(0, np.full(40, -1, np.float32))
        subject.pipeline.gradients.end_micro_step()
        subject.pipeline.step(arguments)
        return own_bits(subject)

    late, early = (run_ranks(2, lambda rank, e=e: body(rank, e)) for e in (False, True))
    assert early == late


@pytest.mark.filterwarnings(UNANNOUNCED)
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_update_in_backward_has_used_is_refused_on_all_ranks_and_the_step_goes_on(world_size):
    def body(rank, reads):
        subject = make(FakeDevice(), collectives=rank, update_in_backward=True, reduce_bucket_size=32)
        arguments = StepArguments(HYPER, subject.tensors)
        subject.pipeline.early.expect_step(arguments)
        subject.add_gradient(rank.rank, np.ones(subject.specs[rank.rank].numel, BFLOAT16.numpy))
        if reads:
            with pytest.raises(StateError, match="update_in_backward=True has used gradients"):
                GradientAccess(subject.pipeline).whole(0)
        subject.pipeline.gradients.end_micro_step()
        assert subject.pipeline.step(arguments).updated
        subject.add_all()  # of a step that was not announced
        assert GradientAccess(subject.pipeline).whole(0) is not None
        subject.pipeline.step(arguments)
        return own_bits(subject)

    plain, read = (run_ranks(world_size, lambda rank, r=r: body(rank, r)) for r in (False, True))
    assert read == plain


@pytest.mark.states_on_host
def test_a_gradient_that_is_lost_on_its_way_is_an_error_of_the_read_and_changes_nothing():
    device = FakeDevice(fail_at=frozenset({2}))  # 2 copies load the masters
    subject = make(device, schedule="overlap")
    before = bits(subject)
    subject.add_all()
    with pytest.raises(OSError, match="copy 2 failed"):
        GradientAccess(subject.pipeline).whole(0)
    subject.pipeline.gradients.drop()
    assert bits(subject) == before
    subject.add_all()
    assert_same_bits("the next one", GradientAccess(subject.pipeline).whole(0), np.ones(40, np.float32))
    assert subject.pipeline.step(StepArguments(HYPER, subject.tensors)).updated
    device.close()
