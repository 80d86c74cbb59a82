"""Pipelines of several ranks, each with gradients of its own, and the unsharded run on their average."""

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from offload_core.step.decision import StepArguments
from offload_core.step.state_access import StateAccess
from tests.support.oracles import assert_same_bits
from tests.support.pipelines import Case, Naive, Subject, as_float32, cases


@st.composite
def rank_cases(draw):
    """A case for each of 1 to 8 ranks: the same model, other gradients, other orders, other parameters without one."""
    world_size = draw(st.integers(1, 8))
    case = draw(cases())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = [m.size for m in case.masters]
    ranks = []
    for _ in range(world_size):
        steps = [
            [
                [
                    (i, (rng.standard_normal(sizes[i]) * 0.1).astype(case.dtypes[i].numpy))
                    for i in rng.permutation(len(sizes)).tolist()
                    if rng.random() < 0.8
                ]
                for _ in micro_steps
            ]
            for micro_steps in case.steps
        ]
        ranks.append(replace(case, steps=steps))
    return ranks


def averaged(ranks: list[Case]) -> Case:
    """The gradients that one rank would have: the ranks' summed in their order in fp32, over their number."""
    steps = []
    for s in range(len(ranks[0].steps)):
        micro_steps = []
        for m in range(len(ranks[0].steps[s])):
            total: dict[int, np.ndarray] = {}
            given_on = [dict(case.steps[s][m]) for case in ranks]
            for i in {i for gradients in given_on for i in gradients}:
                for gradients in given_on:
                    gradient = gradients.get(i, np.zeros(ranks[0].masters[i].size)).astype(np.float32)
                    total[i] = total[i] + gradient if i in total else gradient
            micro_steps.append([(i, g / np.float32(len(ranks))) for i, g in total.items()])
        steps.append(micro_steps)
    return replace(ranks[0], steps=steps)


def run_naive(case: Case):
    naive = Naive(case.masters, case.dtypes, case.groups, case.config, case.hypers)
    norms = []
    for micro_steps in case.steps:
        for arrivals in micro_steps:
            for i, gradient in arrivals:
                naive.add_gradient(i, gradient)
        norms.append(naive.step(float(len(micro_steps))) if any(s is not None for s in naive.sums) else None)
    return naive, norms


def run_rank(case: Case, collectives, device):
    subject = Subject.of(device, case, collectives=collectives)
    norms = []
    for micro_steps in case.steps:
        for m, arrivals in enumerate(micro_steps):
            if case.config.update_in_backward and m == len(micro_steps) - 1:
                subject.pipeline.early.expect_step(StepArguments(case.hypers, subject.tensors, float(len(micro_steps))))
            for i, gradient in arrivals:
                subject.add_gradient(i, gradient)
            subject.pipeline.gradients.end_micro_step()
        report = subject.pipeline.step(StepArguments(case.hypers, subject.tensors, float(len(micro_steps))))
        norms.append(report.grad_norm)
    subject.pipeline.last_step.finish()
    return subject, norms


def assert_equal(results, naive, norms):
    """Each rank's pipeline and norms are those of the unsharded run."""
    assert [got for _, got in results] == [norms] * len(results)
    assert_states([subject for subject, _ in results], naive)


def assert_states(subjects, naive):
    """All ranks' parameters, and their parts of the states, are those of the unsharded loop."""
    for i, (expected, states) in enumerate(zip(naive.params(), naive.states, strict=True)):
        covered = 0
        for subject in subjects:
            assert_same_bits(f"parameter {i}", subject.params()[i], expected)
            assert subject.pipeline.counts.steps[i] == naive.steps[i]
            access = StateAccess(subject.pipeline)
            covered += sum(numel for _, numel in access.extents(i))
            for start, views in access.states(i):
                for name, view in views.items():
                    theirs = states[naive.rules[i].state_names.index(name)][start : start + view.size]
                    assert_same_bits(f"{name} of parameter {i} from {start}", as_float32(view), theirs)
        assert covered == expected.size
