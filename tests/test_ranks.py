"""Stages 1 and 2 over ranks that are threads: every world size gives the bits of the unsharded loop."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from one_thread import Threads, ThreadsOfRanks
from oracles import assert_same_bits
from strategies import law
from test_pipeline import STATES, Case, Naive, Subject, cases

from offload_core.config import OffloadConfig
from offload_core.cpu_adam import AdamHyper
from offload_core.device import HostDevice
from offload_core.dtypes import BFLOAT16, FLOAT16, FLOAT32
from offload_core.errors import CollectiveError, ParameterError, StateError
from offload_core.fake_device import FakeDevice
from offload_core.host_ranks import HostRanks
from offload_core.loss_scale import LossScaler
from offload_core.partition import ParamSpec, round_up
from offload_core.pipeline import Pipeline
from offload_core.step_state import BucketState
from offload_core.thread_ranks import run_ranks


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
    subject = Subject(device, case.masters, case.dtypes, case.groups, case.config, collectives=collectives)
    norms = []
    for micro_steps in case.steps:
        for m, arrivals in enumerate(micro_steps):
            if case.config.update_in_backward and m == len(micro_steps) - 1:
                subject.pipeline.expect_step(case.hypers, subject.tensors, divisor=float(len(micro_steps)))
            for i, gradient in arrivals:
                subject.add_gradient(i, gradient)
            subject.pipeline.end_micro_step()
        report = subject.pipeline.step(case.hypers, subject.tensors, divisor=float(len(micro_steps)))
        norms.append(report.grad_norm)
    subject.pipeline.finish()
    return subject, norms


def assert_equals_the_unsharded_run(ranks: list[Case], device_of=lambda rank: HostDevice()):
    naive, norms = run_naive(averaged(ranks))
    results = run_ranks(len(ranks), lambda rank: run_rank(ranks[rank.rank], rank, device_of(rank.rank)))
    for i, (expected, states) in enumerate(zip(naive.params(), naive.states, strict=True)):
        covered = 0
        for subject, got_norms in results:
            assert got_norms == norms
            assert_same_bits(f"parameter {i}", subject.params()[i], expected)
            assert subject.pipeline.steps[i] == naive.steps[i]
            for start, views in subject.pipeline.states(i):
                covered += views["exp_avg"].size
                for name, view in views.items():
                    theirs = states[STATES.index(name)][start : start + view.size]
                    assert_same_bits(f"{name} of parameter {i} from {start}", view, theirs)
        assert covered == expected.size


@law(100)
@given(rank_cases())
def test_any_number_of_ranks_equals_the_unsharded_loop_on_the_averaged_gradients(ranks):
    assert_equals_the_unsharded_run(ranks)


@law(30)
@given(rank_cases())
def test_ranks_on_a_device_of_late_copies_equal_it_too(ranks):
    assert_equals_the_unsharded_run(ranks, lambda rank: FakeDevice(max_delay=1e-4))


@law(60)
@given(rank_cases(), st.none() | st.integers(0, 2**32 - 1), st.booleans())
def test_whatever_the_order_in_which_threads_of_ranks_get_on_they_equal_it_too(ranks, seed, early):
    threads = ThreadsOfRanks()

    def device_of(rank):
        threads.here = Threads(None if seed is None else seed + rank)
        return FakeDevice()

    with pytest.MonkeyPatch.context() as patch:
        threads.play(patch)
        options = {"schedule": "overlap", "update_in_backward": early}
        overlapped = [replace(case, config=replace(case.config, **options)) for case in ranks]
        assert_equals_the_unsharded_run(overlapped, device_of)


@pytest.mark.parametrize("schedule", ["serial", "overlap"])
@pytest.mark.parametrize("failing", [0, 1, 2, 3, 5, 8, 9])
def test_a_rank_whose_copy_fails_is_an_error_on_all_and_nobody_hangs(failing, schedule):
    """The rank that it happened to says what it was, the others that a rank was lost.

    All can read states, unless an update was under way.
    """
    case = model(OffloadConfig(reduce_bucket_size=500, schedule=schedule))
    told = []

    def body(rank):
        fails = rank.rank == 1
        subject = Subject(FakeDevice(max_delay=1e-3, seed=rank.rank), *case_arguments(case), collectives=rank)
        if fails:
            subject.device.fail_after(failing)
        try:
            for _ in range(2):
                give(subject)
                subject.pipeline.step(case.hypers, subject.tensors)
                subject.pipeline.finish()
        except CollectiveError as error:
            told.append((rank.rank, str(error)))
        except OSError:
            rank._group.lose()  # as a process that ends does
            told.append((rank.rank, "its own"))
        subject.pipeline.drop_gradients()
        assert subject.pipeline.finished
        assert {work.life.state for work in subject.pipeline._buckets.all} == {BucketState.EMPTY}
        assert len(subject.pipeline._buckets.staging._free) == subject.pipeline._buckets._staging_slots
        if subject.pipeline._broken:  # in mid-update
            with pytest.raises(StateError, match="the last update broke off"):
                subject.pipeline.states(0)
        else:
            for i in range(3):
                for _, views in subject.pipeline.states(i):
                    assert all(np.isfinite(view).all() for view in views.values())
        subject.device.close()

    run_ranks(3, body, timeout=10)
    assert dict(told)[1] == "its own"
    assert all("a rank was lost" in message for rank, message in told if rank != 1)
    assert len(told) == 3


def model(config, dtype=BFLOAT16, sizes=(40, 100, 999)):
    rng = np.random.default_rng(0)
    masters = [rng.standard_normal(n).astype(np.float32) for n in sizes]
    return Case(masters, [dtype] * len(sizes), [0] * len(sizes), config, [AdamHyper(1e-2)], [])


def case_arguments(case):
    return case.masters, case.dtypes, case.groups, case.config


def make(case, rank, scaler=None):
    return Subject(HostDevice(), *case_arguments(case), scaler, collectives=rank)


def give(subject, value=0.5):
    for spec, i in zip(subject.specs, range(len(subject.specs)), strict=True):
        subject.add_gradient(i, np.full(spec.numel, value, spec.dtype.numpy))


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_memory_and_bytes_sent_are_what_theory_says(dtype, world_size):
    """12/W bytes a parameter of states, staging of four buckets, (W-1)/W of gradients and parameters sent a step."""
    case = model(OffloadConfig(reduce_bucket_size=4096), dtype, sizes=(100_000, 33_000))
    numel = 133_000

    def body(rank):
        subject = make(case, rank)
        give(subject)
        subject.pipeline.step(case.hypers, subject.tensors)
        subject.pipeline.finish()
        return rank.sent_bytes, subject.pipeline.memory.report(), subject.pipeline.memory_report((), {})

    for sent, held, report in run_ranks(world_size, body):
        theory = (world_size - 1) / world_size * numel * 2 * dtype.itemsize
        assert theory <= sent <= 1.01 * theory
        states = sum(held.get(name, 0) for name in STATES)
        expected = numel * (8 if dtype is FLOAT32 else 12) / world_size
        assert expected <= states <= 1.02 * expected
        assert held["staging"] == 4 * round_up(4096, 16 * world_size) * dtype.itemsize
        assert report.host_bytes == report.planned_host_bytes


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_gradient_dropped_between_micro_steps_does_not_come_back(world_size):
    """Its neighbours in the bucket stay, and the next micro-step's is all it has."""
    case = model(OffloadConfig(gradient_accumulation_steps=2))

    def body(rank, first):
        subject = Subject(FakeDevice(), case.masters, case.dtypes, case.groups, case.config, collectives=rank)
        give(subject)
        subject.pipeline.end_micro_step()
        subject.pipeline.drop_gradients(first)
        give(subject, 0.25)
        subject.pipeline.step(case.hypers, subject.tensors, divisor=2.0)
        return [p.tobytes() for p in subject.params()]

    def by_hand(rank):
        subject = make(case, rank)
        for i, p in enumerate(subject.tensors):
            subject.add_gradient(i, np.full(p.size, 0.25 if i == 1 else 0.75, p.dtype))
        subject.pipeline.step(case.hypers, subject.tensors, divisor=2.0)
        return [p.tobytes() for p in subject.params()]

    assert run_ranks(world_size, lambda rank: body(rank, [1])) == run_ranks(world_size, by_hand)


def test_a_native_reduction_sums_in_the_element_type_that_travels():
    def body(rank, **options):
        case = model(OffloadConfig(**options))
        device = HostRanks(HostDevice(), rank, native=case.config.reduction == "native")
        pipeline = Pipeline(case.config, device, None)
        params = [m.astype(BFLOAT16.numpy) for m in case.masters]
        pipeline.add_parameters([ParamSpec(f"p{i}", p.size, BFLOAT16) for i, p in enumerate(params)], params)
        for i, p in enumerate(params):
            gradient = 1.0 + rank.rank / 128  # the sum of three needs more bits than bfloat16 has
            pipeline.add_gradient(i, np.full(p.size, gradient, p.dtype))
        pipeline.step([AdamHyper(0.0)], params)
        return [float(views["exp_avg"][0]) for i in range(3) for _, views in pipeline.states(i)]

    ordered, native = (run_ranks(3, lambda rank, r=r: body(rank, reduction=r)) for r in ("ordered", "native"))
    assert ordered[0][0] == np.float32(1 - 0.9) * np.float32((3.0 + 3 / 128) / 3)
    assert native[0][0] != ordered[0][0]
    assert native[0][0] == pytest.approx(ordered[0][0], rel=0.02)


def test_a_nan_on_one_rank_makes_all_skip_together():
    case = model(OffloadConfig(gradient_clipping=1.0))

    def body(rank):
        subject = make(case, rank, LossScaler(8.0, window=10))
        before = [p.tobytes() for p in subject.params()]
        give(subject, np.nan if rank.rank == 1 else 0.5)
        report = subject.pipeline.step(case.hypers, subject.tensors)
        assert (report.updated, report.skipped) == (False, "overflow")
        assert before == [p.tobytes() for p in subject.params()]
        give(subject)
        return subject.pipeline.step(case.hypers, subject.tensors)

    reports = run_ranks(3, body)
    assert reports[0].updated
    assert reports[0].loss_scale == 4.0
    assert len(set(reports)) == 1


def test_a_lost_rank_is_an_error_that_names_collective_and_bucket():
    case = model(OffloadConfig(reduce_bucket_size=64))
    told = []

    def body(rank):
        subject = make(case, rank)
        before = [p.tobytes() for p in subject.params()]
        if rank.rank == 2:
            raise KeyError("lost")
        try:
            give(subject)
        except CollectiveError as error:
            told.append(str(error))
            assert before == [p.tobytes() for p in subject.params()]

    with pytest.raises(KeyError):
        run_ranks(3, body)
    assert len(told) == 2
    assert all("bucket 0: exchange of gradients: a rank was lost" in message for message in told)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda c: replace(c, masters=[c.masters[0], np.zeros(7, np.float32), c.masters[2]]), r"'p1' \(7 elements"),
        (lambda c: replace(c, dtypes=[BFLOAT16, BFLOAT16, FLOAT16]), r"'p2' \(999 elements, float16"),
        (lambda c: replace(c, masters=c.masters[:2], dtypes=c.dtypes[:2], groups=[0, 0]), "2 parameters here and 3"),
        (lambda c: replace(c, config=OffloadConfig(reduce_bucket_size=77)), "reduce_bucket_size is 77 here"),
    ],
    ids=["size", "dtype", "count", "bucket size"],
)
def test_ranks_whose_models_differ_are_told_where(change, match):
    case = model(OffloadConfig())
    errors = []

    def body(rank):
        try:
            make(change(case) if rank.rank == 1 else case, rank)
        except ParameterError as error:
            errors.append((rank.rank, str(error)))

    run_ranks(3, body)
    assert sorted(rank for rank, _ in errors) == [0, 1, 2]
    assert any(re.search(match, message) for rank, message in errors if rank == 1), errors


def test_all_ranks_start_from_rank_0s_values():
    def body(rank):
        case = model(OffloadConfig())
        case = replace(case, masters=[m + rank.rank for m in case.masters])
        subject = make(case, rank)
        return [p.copy() for p in subject.params()], [subject.pipeline.states(i) for i in range(3)]

    results = run_ranks(3, body)
    expected = model(OffloadConfig()).masters
    for _, states in results:
        for i, runs in enumerate(states):
            for start, views in runs:
                assert_same_bits(f"master {i}", views["master"], expected[i][start : start + views["master"].size])


def test_a_norm_is_the_same_for_every_number_of_ranks():
    def body(rank):
        case = model(OffloadConfig(gradient_clipping=1.0), FLOAT32)
        subject = make(case, rank)
        give(subject, 0.125)
        return subject.pipeline.step(case.hypers, subject.tensors).grad_norm

    norms = {norm for world_size in (1, 2, 4, 8) for norm in run_ranks(world_size, body)}
    assert norms == {math.sqrt(1139 * 0.125**2)}
