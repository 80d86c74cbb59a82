"""Stages 1 and 2 over ranks that are threads: every world size gives the bits of the unsharded loop."""

import math
import re
import struct
import tomllib
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.config.options import OffloadConfig
from offload_core.device.host import HostDevice
from offload_core.device.host_ranks import HostRanks
from offload_core.dtypes import BFLOAT16, FLOAT16, FLOAT32
from offload_core.errors import CollectiveError, ConfigError, ParameterError, StateError
from offload_core.layout.partition import ParamSpec, round_up
from offload_core.ranks import consistency
from offload_core.ranks.collectives import SingleRank
from offload_core.ranks.consistency import check_start, combine, fingerprint, together
from offload_core.rules import RULES
from offload_core.rules.adam import AdamHyper
from offload_core.step.bucket_states import Gradient
from offload_core.step.decision import StepArguments
from offload_core.step.health import Health
from offload_core.step.loss_scale import LossScaler
from offload_core.step.state_access import StateAccess
from offload_core.testing.fake_device import FakeDevice
from offload_core.testing.thread_ranks import run_ranks
from tests.support.late_stores import over_all_stores
from tests.support.locking_pipeline import LockingPipeline
from tests.support.one_thread import Threads, ThreadsOfRanks
from tests.support.oracles import assert_same_bits
from tests.support.pipelines import STATES, UNANNOUNCED, Case, Subject
from tests.support.rank_pipelines import assert_equal, averaged, rank_cases, run_naive, run_rank
from tests.support.strategies import law


def assert_equals_the_unsharded_run(ranks: list[Case], device_of=lambda rank: HostDevice()):
    naive, norms = run_naive(averaged(ranks))
    results = run_ranks(len(ranks), lambda rank: run_rank(ranks[rank.rank], rank, device_of(rank.rank)))
    assert_equal(results, naive, norms)


@pytest.mark.draws(1)
@over_all_stores
@pytest.mark.quick
@law(100)
@given(rank_cases())
def test_any_number_of_ranks_equals_the_unsharded_loop_on_the_averaged_gradients(ranks):
    assert_equals_the_unsharded_run(ranks)


@law(30)
@given(rank_cases())
def test_ranks_on_a_device_of_late_copies_equal_it_too(ranks):
    assert_equals_the_unsharded_run(ranks, lambda rank: FakeDevice(max_delay=1e-4))


@pytest.mark.filterwarnings(UNANNOUNCED)
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


@pytest.mark.draws(3)
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
                subject.add_all(0.5)
                subject.pipeline.step(StepArguments(case.hypers, subject.tensors))
                subject.pipeline.last_step.finish()
        except CollectiveError as error:
            told.append((rank.rank, str(error)))
        except OSError:
            rank._group.lose()  # as a process that ends does
            told.append((rank.rank, "its own"))
        subject.pipeline.gradients.drop()
        assert subject.pipeline.updates.finished
        assert {bucket.gradient.state for bucket in subject.pipeline.buckets.all} == {Gradient.ABSENT}
        assert len(subject.pipeline.buckets.staging._free) == subject.pipeline.buckets.terms.staging_slots
        if subject.pipeline.health.state is Health.GONE:  # it was in mid-update
            with pytest.raises(StateError, match="the last update broke off"):
                StateAccess(subject.pipeline).states(0)
        else:
            for i in range(3):
                for _, views in StateAccess(subject.pipeline).states(i):
                    assert all(np.isfinite(view).all() for view in views.values())
        subject.device.close()

    run_ranks(3, body)
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


@pytest.mark.draws(2)
@pytest.mark.states_in_memory
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_memory_and_bytes_sent_are_what_theory_says(dtype, world_size):
    """12/W bytes a parameter of states, staging of four buckets, (W-1)/W of gradients and parameters sent a step."""
    case = model(OffloadConfig(reduce_bucket_size=4096), dtype, sizes=(100_000, 33_000))
    numel = 133_000

    def body(rank):
        subject = make(case, rank)
        subject.add_all(0.5)
        subject.pipeline.step(StepArguments(case.hypers, subject.tensors))
        subject.pipeline.last_step.finish()
        return rank.sent_bytes, subject.pipeline.memory.report(), subject.engine.memory_report((), {})

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
        subject = Subject.of(FakeDevice(), case, collectives=rank)
        subject.add_all(0.5)
        subject.pipeline.gradients.end_micro_step()
        subject.pipeline.gradients.drop(first)
        subject.add_all(0.25)
        subject.pipeline.step(StepArguments(case.hypers, subject.tensors, 2.0))
        return [p.tobytes() for p in subject.params()]

    def by_hand(rank):
        subject = make(case, rank)
        for i, p in enumerate(subject.tensors):
            subject.add_gradient(i, np.full(p.size, 0.25 if i == 1 else 0.75, p.dtype))
        subject.pipeline.step(StepArguments(case.hypers, subject.tensors, 2.0))
        return [p.tobytes() for p in subject.params()]

    assert run_ranks(world_size, lambda rank: body(rank, [1])) == run_ranks(world_size, by_hand)


def test_a_native_reduction_sums_in_the_element_type_that_travels():
    def body(rank, **options):
        case = model(OffloadConfig(**options))
        device = HostRanks(HostDevice(), rank, native=case.config.reduction == "native")
        pipeline = LockingPipeline(case.config, device, None)
        params = [m.astype(BFLOAT16.numpy) for m in case.masters]
        pipeline.add_parameters([ParamSpec(f"p{i}", p.size, BFLOAT16) for i, p in enumerate(params)], params)
        for i, p in enumerate(params):
            gradient = 1.0 + rank.rank / 128  # the sum of three needs more bits than bfloat16 has
            pipeline.gradients.add({i: np.full(p.size, gradient, p.dtype)})
        pipeline.step(StepArguments([AdamHyper(0.0)], params))
        return [float(views["exp_avg"][0]) for i in range(3) for _, views in StateAccess(pipeline).states(i)]

    ordered, native = (run_ranks(3, lambda rank, r=r: body(rank, reduction=r)) for r in ("ordered", "native"))
    assert ordered[0][0] == np.float32(1 - 0.9) * np.float32((3.0 + 3 / 128) / 3)
    assert native[0][0] != ordered[0][0]
    assert native[0][0] == pytest.approx(ordered[0][0], rel=0.02)


def test_a_nan_on_one_rank_makes_all_skip_together():
    case = model(OffloadConfig(gradient_clipping=1.0))

    def body(rank):
        subject = make(case, rank, LossScaler(8.0, window=10))
        before = [p.tobytes() for p in subject.params()]
        subject.add_all(np.nan if rank.rank == 1 else 0.5)
        report = subject.pipeline.step(StepArguments(case.hypers, subject.tensors))
        assert (report.updated, report.skipped) == (False, "overflow")
        assert before == [p.tobytes() for p in subject.params()]
        subject.add_all(0.5)
        return subject.pipeline.step(StepArguments(case.hypers, subject.tensors))

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
            subject.add_all(0.5)
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


def told(act, *errors):
    """Return the text of the error that an act raises, or None if it succeeds."""
    try:
        act()
    except errors as error:
        return str(error)


OTHER_VALUES = {
    "lr": 0.5, "betas": (0.5, 0.5), "eps": 0.5, "eps_root": 0.5, "weight_decay": 0.5, "adam_mode": "adam",
    "op_order": "torch", "stage": 2, "param_dtype": "bfloat16", "gradient_clipping": 0.5,
    "gradient_accumulation_steps": 2, "skip_nonfinite": True, "loss_scale": 2.0, "initial_loss_scale": 2.0,
    "loss_scale_window": 2, "min_loss_scale": 2.0, "loss_scale_hysteresis": 2,
    "loss_scale_consecutive_hysteresis": True, "reduce_bucket_size": 2, "communication_dtype": "bfloat16",
    "reduction": "native", "schedule": "serial", "delay_warmup_steps": 2, "update_in_backward": True,
    "offload_param": "cpu", "param_persistence_threshold": 2, "max_live_parameters": 2, "prefetch_bucket_size": 2,
    "leaf_modules": ("Block",), "average_plain_backward": True, "average_over_ranks": False,
    "max_reuse_distance": 2, "pin_memory": "allocate", "num_threads": 3, "buffer_dtype": "bfloat16",
    "cast_inputs": False, "layerwise": True,
    "bind_threads": False, "state_format": "8bit", "master_dtype": "bfloat16", "exp_avg_dtype": "float8",
    "exp_avg_sq_dtype": "bfloat16", "activation_memory": 2, "host_activation_memory": 2,
    "optimizer": "sgd", "momentum": 0.5, "dampening": 0.5, "nesterov": True, "lr_decay": 0.5,
    "initial_accumulator_value": 0.5, "ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 6,
    "adjust_lr_fn": "match_rms_adamw", "muon_params": ("weight",), "adamw": {"lr": 0.1}, "nvme_path": ("there",),
    "nvme_host_bytes": 2, "offload_optimizer": "nvme", "device_states_bytes": 2,
}  # fmt: skip
"""Of each setting a value that is not the one in :func:`settings_beside`."""
MAY_DIFFER = {
    *("pin_memory", "num_threads", "bind_threads", "activation_memory", "host_activation_memory"),
    *("nvme_path", "nvme_host_bytes", "device_states_bytes"),
}


def settings_beside(name):
    if name.startswith("nvme_"):
        return OffloadConfig(stage=3, offload_optimizer="nvme", nvme_path="here")
    [rule, *_] = [rule for rule in RULES.values() if name in rule.settings] or [RULES["adamw"]]
    if rule.name != "adamw":
        return OffloadConfig(stage=3, optimizer=rule.name, momentum=0.9 if "momentum" in rule.settings else None)
    return OffloadConfig(stage=3, op_order="optax")


def test_another_value_is_known_of_every_setting():
    assert OTHER_VALUES.keys() == {field.name for field in fields(OffloadConfig)}


@pytest.mark.draws(12)
@pytest.mark.parametrize("name", OTHER_VALUES)
def test_a_setting_that_differs_is_named_on_every_rank_unless_it_may_differ(name):
    config = settings_beside(name)
    values = [getattr(config, name), OTHER_VALUES[name], getattr(config, name)]
    beside = {"nvme_path": "there", "reduce_bucket_size": 2**25} if name == "offload_optimizer" else {}
    other = replace(config, **{name: OTHER_VALUES[name]}, **beside)
    expected = "expected the same model and configuration on every rank"
    said = run_ranks(
        3, lambda rank: told(lambda: check_start(rank, other if rank.rank == 1 else config), ParameterError)
    )
    if name in MAY_DIFFER:
        assert said == [None] * 3
    else:
        there = ["differs on another rank", "differs from rank 0's", "differs on another rank"]
        assert said == [f"{name} is {v!r} here and {where}; {expected}" for v, where in zip(values, there, strict=True)]


def test_functions_are_compared_by_their_values_at_a_step_and_not_before():
    functions = [lambda updates: 1e-2, lambda updates: 1e-3]
    configs = [OffloadConfig(lr=lr) for lr in (*functions, 1e-2)]
    assert run_ranks(2, lambda rank: told(lambda: check_start(rank, configs[rank.rank]), ParameterError)) == [
        None,
        None,
    ]
    said = run_ranks(3, lambda rank: told(lambda: check_start(rank, configs[rank.rank]), ParameterError))
    assert "lr is 0.01 here and differs from rank 0's" in said[2]
    assert all("lr is <function" in each for each in said[:2])

    def step(rank):
        subject = make(model(configs[rank.rank]), rank)
        subject.add_all(0.5)
        hypers = [AdamHyper(functions[rank.rank](0))]
        return told(lambda: subject.pipeline.step(StepArguments(hypers, subject.tensors)), StateError)

    assert all("ranks differ in what they update with" in each for each in run_ranks(2, step))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("schedule", ("overlap", "delayed")),
        ("schedule", ("serial", "overlap")),
        ("delay_warmup_steps", (1, 2)),
        ("update_in_backward", (False, True)),
        ("stage", (2, 3)),
        ("param_persistence_threshold", (10, 1000)),
    ],
)
def test_ranks_of_other_settings_do_not_wait_for_each_other(name, values):
    """Each of them alone makes a rank meet the others for something that they do not meet for."""
    fixed = {"delay_warmup_steps": {"schedule": "delayed"}, "param_persistence_threshold": {"stage": 3}}.get(name, {})

    def body(rank):
        case = model(OffloadConfig(**fixed, **{name: values[rank.rank]}))
        return told(lambda: make(case, rank), ParameterError)

    said = run_ranks(2, body)
    assert [f"{name} is {value!r} here and differs" in each for value, each in zip(values, said, strict=True)] == [1, 1]


class Counted:
    """A rank that notes what ranks do together."""

    def __init__(self, rank):
        self._rank = rank
        self.done = []

    def __getattr__(self, name):
        act = getattr(self._rank, name)
        if name not in ("sum_integers", "broadcast"):
            return act

        def noted(array, *args):
            self.done.append((name, args[0], array.nbytes))
            act(array, *args)

        return noted


@pytest.mark.parametrize("n_params", [0, 1, 1000])
def test_the_first_message_is_one_sum_whose_layout_never_changes(n_params):
    specs = [ParamSpec(f"p{i}", 4, FLOAT32) for i in range(n_params)]
    config = OffloadConfig(reduce_bucket_size=1 + n_params)  # whatever is said

    class Read(Counted):
        def sum_integers(self, array, what):
            self.mine = array.copy()
            self._rank.sum_integers(array, what)
            self.done.append(what)

    def body(rank):
        rank = Read(rank)
        check_start(rank, config, specs, ["float32"] * n_params)
        assert rank.done == ["layout"]
        return rank.mine

    for i, words in enumerate(run_ranks(3, body)):
        data = words.astype("<i8").tobytes()
        assert len(data) == 3 * 128
        assert data.replace(b"\0", b"") == data[128 * i : 128 * (i + 1)].replace(b"\0", b"")
        row = data[128 * i : 128 * (i + 1)]
        assert row[:8] == consistency.FORMAT.to_bytes(8, "little")
        assert row[8:72] == consistency.VERSION.encode().ljust(64, b"\0")
        assert row[80:88] == n_params.to_bytes(8, "little")
        assert row[96:] == bytes(32)


def test_the_version_is_that_of_the_package():
    pyproject = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())
    assert pyproject["project"]["version"] == consistency.VERSION
    assert len(consistency.VERSION.encode("ascii")) <= 64


@pytest.mark.parametrize(
    ("versions", "formats", "named"),
    [
        (["1.0", "1.1", "1.0"], [1, 1, 1], ["1", "1", "1"]),
        (["1.0", "1.0", "1.0"], [1, 1, 2], ["2", "2", "2"]),
        (["1.0", "1.1", "2.0"], [1, 1, 9], ["1", "1", "2"]),
        (["v" * 100, "1.1"], [1, 1], ["1", "1"]),
        (["", "1.1"], [1, 1], ["1", "1"]),
    ],
    ids=["version", "format", "three versions", "a long one", "none"],
)
def test_ranks_of_another_version_are_told_on_every_rank_before_anything_else(versions, formats, named, monkeypatch):
    """The others are played: they say what the layout says, and whatever they please where it is theirs to say."""
    n = len(versions)

    def body(rank, ours):
        if rank.rank == ours:
            rank = Counted(rank)
            error = told(lambda: check_start(rank, OffloadConfig()), ConfigError)
            assert len(rank.done) == 1
            return error
        rows = bytearray(128 * n)
        struct.pack_into("<q64s7q", rows, 128 * rank.rank, formats[rank.rank], versions[rank.rank].encode(), *range(7))
        rank.sum_integers(np.frombuffer(rows, "<i8").copy(), "layout")

    def words(rank):
        version = versions[rank][:64] or "of unknown version"
        return f"rank {rank} has offload-core {version} (messages of format {formats[rank]})"

    for ours in range(n):
        monkeypatch.setattr(consistency, "VERSION", versions[ours])
        monkeypatch.setattr(consistency, "FORMAT", formats[ours])
        assert run_ranks(n, lambda rank, ours=ours: body(rank, ours))[ours] == (
            f"ranks run different versions: {words(0)}, {words(int(named[ours]))}; expected one version on every rank: "
            "install the same offload-core wherever a rank runs"
        )


def test_a_step_makes_one_sum_and_a_start_three_messages_at_most():
    """The first message, rank 0's values, and a message that says if memory was lacking on a rank; where ranks differ
    one more, which says where."""

    def body(rank):
        rank = Counted(rank)
        subject = make(model(OffloadConfig(gradient_clipping=1.0)), rank)
        start, rank.done = rank.done, []
        for _ in range(2):
            subject.add_all(0.5)
            subject.pipeline.step(StepArguments([AdamHyper(1e-2)], subject.tensors))
        subject.pipeline.last_step.finish()
        steps, rank.done = rank.done, []
        told(lambda: check_start(rank, OffloadConfig(lr=1.0 + rank.rank)), ParameterError)
        told(
            lambda: check_start(rank, OffloadConfig(), [ParamSpec(f"of {rank.rank}", 1, FLOAT32)], [""]),
            ParameterError,
        )
        return start, steps, rank.done

    for start, steps, differing in run_ranks(3, body):
        assert sorted(name for name, _, _ in start) == ["broadcast"] * 3 + ["sum_integers"] * 2
        assert [(name, what) for name, what, _ in steps] == [("sum_integers", "gradient norm")] * 2
        assert [name for name, _, _ in differing] == ["sum_integers"] * 4


@law(100)
@given(st.data())
def test_what_processes_combine_all_of_them_know(data):
    n = data.draw(st.integers(1, 6))
    word = st.integers(-(2**62), 2**62)
    kinds = {"sums": st.integers(-(2**40), 2**40), "same": st.integers(0, 1), "of_first": word, "of_each": word}
    lengths = {kind: data.draw(st.integers(0, 4)) for kind in kinds}
    given_by = [
        {
            kind: data.draw(st.lists(words, min_size=lengths[kind], max_size=lengths[kind]))
            for kind, words in kinds.items()
        }
        for _ in range(n)
    ]

    def body(rank):
        rank = SingleRank() if n == 1 else rank
        known = combine(rank, "test", **given_by[rank.rank])
        return [part.tolist() for part in known]

    columns = [[words["sums"] for words in given_by], [words["same"] for words in given_by]]
    sums = [sum(column) for column in zip(*columns[0], strict=True)]
    alike = [len(set(column)) == 1 for column in zip(*columns[1], strict=True)]
    expected = [sums, alike, given_by[0]["of_first"], [words["of_each"] for words in given_by]]
    assert run_ranks(n, body) == [expected] * n


@given(st.lists(st.integers(0, 2), min_size=2, max_size=8))
def test_fingerprints_are_alike_where_all_are(lines):
    said = run_ranks(len(lines), lambda rank: combine(rank, "t", same=[fingerprint(str(lines[rank.rank]))]).alike.all())
    assert said == [len(set(lines)) == 1] * len(lines)


@pytest.mark.parametrize("failing", [set(), {1}, {0, 2}])
def test_an_error_of_one_process_is_an_error_of_all_and_names_it(failing):
    def body(rank):
        def act():
            with together(rank, "test", lambda others: StateError(f"failed in {others}")):
                if rank.rank in failing:
                    raise KeyError("its own")

        said = told(act, KeyError, StateError)
        combine(rank, "afterwards")  # all go on alike
        return said

    others = f"failed in {', '.join(map(str, sorted(failing)))}" if failing else None
    assert run_ranks(3, body) == ["'its own'" if r in failing else others for r in range(3)]


def test_all_ranks_start_from_rank_0s_values():
    def body(rank):
        case = model(OffloadConfig())
        case = replace(case, masters=[m + rank.rank for m in case.masters])
        subject = make(case, rank)
        return [p.copy() for p in subject.params()], [StateAccess(subject.pipeline).states(i) for i in range(3)]

    results = run_ranks(3, body)
    expected = model(OffloadConfig()).masters
    for _, states in results:
        for i, runs in enumerate(states):
            for start, views in runs:
                assert_same_bits(f"master {i}", views["master"], expected[i][start : start + views["master"].size])


@pytest.mark.quick
def test_a_norm_is_the_same_for_every_number_of_ranks():
    def body(rank):
        case = model(OffloadConfig(gradient_clipping=1.0), FLOAT32)
        subject = make(case, rank)
        subject.add_all(0.125)
        return subject.pipeline.step(StepArguments(case.hypers, subject.tensors)).grad_norm

    norms = {norm for world_size in (1, 2, 4, 8) for norm in run_ranks(world_size, body)}
    assert norms == {math.sqrt(1139 * 0.125**2)}
