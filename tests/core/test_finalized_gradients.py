"""Parameters whose gradients come on some ranks alone: their buckets leave in backward, alike on all ranks."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.config.options import OffloadConfig
from offload_core.device.host import HostDevice
from offload_core.dtypes import FLOAT32
from offload_core.errors import CollectiveError
from offload_core.rules.adam import AdamHyper
from offload_core.step.bucket_states import Gradient
from offload_core.step.decision import StepArguments
from offload_core.testing.thread_ranks import ThreadRank, _Group, run_ranks
from tests.support.pipelines import Case, Subject
from tests.support.rank_pipelines import assert_equal, averaged, run_naive
from tests.support.strategies import law

HYPERS = [AdamHyper(1e-2, (0.9, 0.99), 1e-8, 0.1)]


@dataclass
class Turn:
    """The events in backward between two gathers, in which all ranks meet."""

    given: list[list[tuple[int, np.ndarray]]]
    """Each rank's gradients, in the order in which they come."""
    finalized: list[int]


@dataclass
class Mixture:
    case: Case
    leaves: dict[int, int]
    """The leaf module of a parameter that is in one."""
    steps: list[list[list[list[Turn]]]]
    """The turns of each backward of each micro-step of each step."""
    world_size: int

    def of_rank(self, rank):
        """The case of this rank alone, each backward a micro-step of its own."""
        backwards = [[turns for micro in step for turns in micro] for step in self.steps]
        steps = [[[g for turn in turns for g in turn.given[rank]] for turns in step] for step in backwards]
        return replace(self.case, steps=steps)


@st.composite
def mixtures(draw):
    """Leaf modules run once or twice in a backward; an expert has its gradient on a rank after either run, or none.

    A micro-step has one backward, or two. Leaf modules may be left unfinalized until it has ended, and parameters of
    them may be used outside, so that all ranks have their gradients later: unless updates follow the gradients at once.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    world_size, n = draw(st.integers(1, 4)), draw(st.integers(2, 7))
    early = draw(st.booleans())
    backwards, micro_steps = 1 if early else draw(st.integers(1, 2)), draw(st.integers(1, 2))
    odd = not early and draw(st.booleans())
    of = draw(st.lists(st.sampled_from([None, 0, 1]), min_size=n, max_size=n))
    sizes = rng.choice([3, 16, 33, 200], n).tolist()
    leaves = {i: leaf for i, leaf in enumerate(of) if leaf is not None}
    config = OffloadConfig(
        op_order="torch",
        gradient_clipping=None if early else draw(st.sampled_from([None, 0.1])),
        gradient_accumulation_steps=micro_steps,
        reduce_bucket_size=draw(st.sampled_from([1, 40, 1 << 20])),
        schedule="overlap" if early else draw(st.sampled_from(["serial", "overlap"])),
        update_in_backward=early,
    )
    new = lambda i: (i, (rng.standard_normal(sizes[i]) * 0.1).astype(np.float32))  # noqa: E731

    def backward():
        turns = [Turn([[new(i)] for _ in range(world_size)], []) for i in range(n) if i not in leaves and chance(0.9)]
        late = []
        for leaf in {*leaves.values()}:
            mine = [i for i, other in leaves.items() if other == leaf]
            outside = [i for i in mine if odd and chance(0.2)]
            late += [Turn([[new(i)] for _ in range(world_size)], []) for i in outside]
            runs = [Turn([[] for _ in range(world_size)], []) for _ in range(1 + chance(0.5))]
            for rank in range(world_size):
                for i in rng.permutation([i for i in mine if i not in outside]).astype(int).tolist():
                    if chance(0.6):
                        runs[rng.integers(len(runs))].given[rank].append(new(i))
            runs[-1].finalized = [] if odd and chance(0.3) else mine
            at = sorted(rng.integers(0, len(turns) + 1, len(runs)), reverse=True)
            for place, turn in zip(at, reversed(runs), strict=True):
                turns.insert(place, turn)
        return [*turns, *late]

    def chance(p):
        return rng.random() < p

    n_steps = draw(st.integers(1, 3))
    steps = [[[backward() for _ in range(backwards)] for _ in range(micro_steps)] for _ in range(n_steps)]
    masters = [rng.standard_normal(size).astype(np.float32) for size in sizes]
    return Mixture(Case(masters, [FLOAT32] * n, [0] * n, config, HYPERS, []), leaves, steps, world_size)


def subject_of(mixture, rank):
    case = mixture.case
    return Subject.of(HostDevice(), case, collectives=rank, leaves=mixture.leaves)


def train(mixture, rank, gathers):
    subject, norms = subject_of(mixture, rank), []
    for step in mixture.steps:
        divisor = float(sum(map(len, step)))
        for micro_step in step:
            subject.pipeline.early.expect_step(StepArguments(HYPERS, subject.tensors, divisor))
            for turns in micro_step:
                unfinalized = set(mixture.leaves)
                for turn in turns:
                    for i, gradient in turn.given[rank.rank]:
                        subject.add_gradient(i, gradient)
                    if turn.finalized:
                        unfinalized -= {*turn.finalized} - subject.pipeline.gradients.finalize(turn.finalized)
                    gathers.broadcast(np.zeros(1), "a gathering")
                if mixture.leaves:
                    subject.pipeline.gradients.finalize(unfinalized, ended=True)
                gathers.broadcast(np.zeros(1), "a gathering")
            subject.pipeline.gradients.end_micro_step()
        norms.append(subject.pipeline.step(StepArguments(HYPERS, subject.tensors, divisor)).grad_norm)
    subject.pipeline.last_step.finish()
    return subject, norms


@law(150)
@given(mixtures())
def test_whichever_gradients_ranks_lack_none_hangs_and_the_bits_are_those_of_the_unsharded_loop(mixture):
    naive, norms = run_naive(averaged([mixture.of_rank(rank) for rank in range(mixture.world_size)]))
    apart = _Group(mixture.world_size, 60.0)
    results = run_ranks(mixture.world_size, lambda rank: train(mixture, rank, ThreadRank(apart, rank.rank)))
    assert_equal(results, naive, norms)


def three_experts(leaves, schedule="overlap", **fields):
    """Three parameters in buckets of their own."""
    config = OffloadConfig(op_order="torch", reduce_bucket_size=1, schedule=schedule, **fields)
    masters = [np.ones(32, np.float32)] * 3
    return Mixture(Case(masters, [FLOAT32] * 3, [0] * 3, config, HYPERS, []), leaves, [], 2)


def test_buckets_leave_when_they_are_finalized_on_the_rank_without_a_gradient_too():
    mixture = three_experts({2: 0, 1: 0})

    def body(rank):
        subject, seen = subject_of(mixture, rank), []
        reduce = subject.pipeline.device.reduce
        subject.pipeline.device.reduce = lambda bucket, *args: seen.append(bucket.index) or reduce(bucket, *args)
        if rank.rank == 0:
            subject.add_gradient(2, np.ones(32, np.float32))
        seen.append("before")
        subject.pipeline.gradients.finalize([1, 2])
        seen.append("finalized")
        subject.add_gradient(0, np.ones(32, np.float32))
        seen.append("all")
        present = subject.pipeline.arrivals.since.present
        subject.pipeline.step(StepArguments(HYPERS, subject.tensors))
        subject.pipeline.last_step.finish()
        return seen, sorted(present), [float(n) for n in subject.pipeline.counts.steps]

    for rank, (seen, present, steps) in enumerate(run_ranks(2, body)):
        assert seen == ["before", 0, 1, "finalized", 2, "all"]
        assert present == ([0, 2] if rank == 0 else [0])
        assert steps == [1.0, 0.0, 1.0]


def test_buckets_that_are_finalized_are_updated_in_backward_on_the_rank_without_a_gradient_too():
    """Else they would keep the memory that all gradients pass through."""
    mixture = three_experts({2: 0, 1: 0}, update_in_backward=True)

    def body(rank):
        subject = subject_of(mixture, rank)
        subject.pipeline.early.expect_step(StepArguments(HYPERS, subject.tensors))
        if rank.rank == 0:
            subject.add_gradient(2, np.ones(32, np.float32))
        subject.add_gradient(0, np.ones(32, np.float32))
        subject.pipeline.gradients.finalize([1, 2])
        subject.pipeline.buckets.run(lambda: None)
        return [bucket.gradient.state for bucket in subject.pipeline.buckets.all]

    used, nothing = Gradient.USED, Gradient.LANDED  # nobody has a gradient of the second
    assert run_ranks(2, body) == [[used, nothing, used]] * 2


def test_a_parameter_that_came_after_it_was_finalized_waits_for_the_end_from_then_on():
    mixture = three_experts({2: 0})

    def body(rank):
        subject, seen = subject_of(mixture, rank), []
        reduce = subject.pipeline.device.reduce
        subject.pipeline.device.reduce = lambda bucket, *args: seen.append(bucket.index) or reduce(bucket, *args)
        for _ in range(2):
            subject.pipeline.gradients.finalize([2])
            for i in (2, 1, 0):
                subject.add_gradient(i, np.ones(32, np.float32))
            seen.append("end")
            subject.pipeline.step(StepArguments(HYPERS, subject.tensors))
        subject.pipeline.last_step.finish()
        return seen

    first = [0, 1, 2, "end", 0, 1, 2]
    for seen in run_ranks(2, body):
        assert seen[: len(first)] == first
        assert sorted(map(str, seen[len(first) :])) == ["0", "1", "2", "end"]


@pytest.mark.parametrize("schedule", ["serial", "overlap"])
def test_ranks_that_finalize_at_different_points_get_an_error(schedule):
    """Rank 0 waits for the gradients of rank 1, which waits for it in a gathering, until the time is over."""
    mixture = three_experts({2: 0}, schedule)
    apart, told = _Group(2, 0.5), []

    def body(rank):
        subject = subject_of(mixture, rank)
        rank._group._timeout = 0.5  # from here on nobody comes, however long they wait
        try:
            if rank.rank == 0:
                subject.pipeline.gradients.finalize([2])
                if schedule == "overlap":
                    subject.pipeline.buckets.claim(subject.pipeline.buckets.all[0])
            ThreadRank(apart, rank.rank).broadcast(np.zeros(1), "a gathering")
        except CollectiveError as error:
            told.append(str(error))

    run_ranks(2, body)
    assert sorted(told)[0].startswith("a gathering")
    assert len(told) == 2
