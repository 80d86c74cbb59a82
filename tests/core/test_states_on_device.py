"""States in the device's memory: any share of them gives the bits of the unsharded loop, and loses nothing."""

import tempfile
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.config.options import OffloadConfig
from offload_core.device.exchange_sizes import planned_device
from offload_core.device.host import HostDevice
from offload_core.device.no_queue import NoQueue
from offload_core.dtypes import BFLOAT16
from offload_core.errors import ConfigError, HostMemoryError, StateError
from offload_core.layout.partition import ParamSpec
from offload_core.memory.plan import DEVICE, RELEASED_STATES
from offload_core.plans.planner import SUMS, Planner, check_memory
from offload_core.plans.terms import BucketTerms
from offload_core.rules.adam import AdamHyper
from offload_core.step.decision import StepArguments
from offload_core.step.gradient_access import GradientAccess
from offload_core.step.state_access import StateAccess
from offload_core.testing.fake_device import FakeDevice, FakeTensor
from offload_core.testing.thread_ranks import run_ranks
from tests.support.checkpoints import load, save
from tests.support.one_thread import Threads, ThreadsOfRanks
from tests.support.pipelines import UNANNOUNCED, Case, Naive, Subject, assert_equal_runs, bits, cases, make
from tests.support.rank_pipelines import assert_equal, assert_states, averaged, rank_cases, run_naive, run_rank
from tests.support.strategies import law

HYPERS = [AdamHyper(1e-2)]
DISK = {"offload_optimizer": "nvme", "nvme_path": tempfile.gettempdir()}
TIERS = {
    "host": {},
    "device": {"offload_optimizer": None},
    "device and host": {"device_states_bytes": 20_000},
    "disk": DISK | {"nvme_host_bytes": 0},
    "device, host and disk": DISK | {"nvme_host_bytes": 3_000, "device_states_bytes": 20_000},
}
"""By name, settings of places for states; small models have some of theirs in each place."""
tiers = st.sampled_from(list(TIERS))


def with_(case: Case, **fields: object) -> Case:
    if fields.get("offload_optimizer") == "nvme":
        fields["reduce_bucket_size"] = case.config.reduce_bucket_size
    return replace(case, config=replace(case.config, **fields))


# --- bits -----------------------------------------------------------------------------------------------------


@pytest.mark.quick
@law(60)
@given(cases(), tiers, st.integers(0, 2**32 - 1))
def test_wherever_states_are_the_pipeline_equals_the_unsharded_loop(case, tier, seed):
    device = FakeDevice(seed=seed, max_delay=1e-4)
    case = with_(case, **TIERS[tier])
    naive = Naive(case.masters, case.dtypes, case.groups, case.config, case.hypers)
    assert_equal_runs(case, Subject.of(device, case), naive)
    device.close()


@pytest.mark.filterwarnings(UNANNOUNCED)
@law(60)
@given(rank_cases(), tiers, st.none() | st.integers(0, 2**32 - 1), st.booleans())
def test_any_number_of_ranks_with_any_share_equals_it_too(ranks, tier, seed, early):
    threads = ThreadsOfRanks()

    def device_of(rank):
        threads.here = Threads(None if seed is None else seed + rank)
        return FakeDevice()

    ranks = [with_(case, schedule="overlap", update_in_backward=early, **TIERS[tier]) for case in ranks]
    naive, norms = run_naive(averaged(ranks))
    with pytest.MonkeyPatch.context() as patch:
        threads.play(patch)
        results = run_ranks(len(ranks), lambda rank: run_rank(ranks[rank.rank], rank, device_of(rank.rank)))
        assert_equal(results, naive, norms)


@law(30)
@given(rank_cases(), tiers, tiers, st.integers(1, 4))
def test_what_one_tier_saves_any_other_loads(tmp_path_factory, ranks, before, after, others):
    folder = tmp_path_factory.mktemp("checkpoints")
    naive, _ = run_naive(averaged(ranks))

    def train_and_save(rank):
        subject, _ = run_rank(with_(ranks[rank.rank], **TIERS[before]), rank, FakeDevice())
        _, checkpoints = save(subject, folder)
        checkpoints.wait()

    run_ranks(len(ranks), train_and_save)
    case = with_(ranks[0], reduce_bucket_size=100, **TIERS[after])
    zeros = [np.zeros_like(master) for master in case.masters]

    def load_elsewhere(rank):
        subject = Subject(
            FakeDevice(), zeros, case.dtypes, case.groups, case.config, collectives=rank, hypers=case.hypers
        )
        load(subject, folder)
        return subject

    assert_states(run_ranks(others, load_elsewhere), naive)


def test_states_are_written_and_read_in_parts_of_a_few_mib():
    numel = 3 * 2**20 + 77
    subject = Subject(FakeDevice(), [np.zeros(numel, np.float32)], [BFLOAT16], [0], OffloadConfig(**TIERS["device"]))
    access, values = StateAccess(subject.pipeline), np.random.default_rng(0).standard_normal(numel).astype(np.float32)
    access.will_change([0])
    [run] = [run for name, run in access.local_runs(0).items() if name == "exp_avg"]
    run.write(values)
    found = np.empty(numel - 5, np.float64)
    run.read(5, found)
    assert (found == values[5:]).all()
    assert subject.pipeline.memory.report()["states that are read"] == 4 * 2**20


# --- which states ---------------------------------------------------------------------------------------------


def on_device(subject):
    held = subject.pipeline.buckets.store.held_in()
    return sum(n for (where, _), n in held.items() if where == DEVICE)


def there(subject):
    """The buckets whose states are on the device."""
    buckets = subject.pipeline.buckets
    return [bucket.layout.index for bucket in buckets.all if bucket.executor is buckets._on_device]


def of_eight(**fields):
    config = OffloadConfig(reduce_bucket_size=1024, num_threads=1, **fields)
    return Subject(FakeDevice(), [np.ones(1024, np.float32)] * 8, [BFLOAT16] * 8, [0] * 8, config)


@pytest.mark.parametrize(("n_bytes", "buckets"), [(0, 0), (3 * 4096 - 1, 0), (3 * 4096, 1), (7 * 4096, 2), (2**40, 8)])
def test_buckets_go_to_the_device_in_the_order_of_forward_as_far_as_they_fit(n_bytes, buckets):
    subject = of_eight(device_states_bytes=n_bytes)
    assert there(subject) == list(range(buckets))
    assert on_device(subject) == buckets * 3 * 4096
    assert (subject.pipeline.buckets.staging is None) == (buckets == 8), "what does not cross needs no staging"


def test_parameters_that_are_added_get_what_is_left():
    subject = of_eight(device_states_bytes=9 * 3 * 4096)
    specs = [ParamSpec(f"q{i}", 1024, BFLOAT16) for i in range(3)]
    tensors = [subject.put(np.ones(1024, BFLOAT16.numpy)) for _ in specs]
    subject.engine.add_parameters(specs, tensors)
    assert there(subject) == [*range(8), 8]


def test_auto_takes_what_is_free_beside_activations_less_a_reserve():
    gib, numel = 2**30, 2**26
    config = OffloadConfig(device_states_bytes="auto", activation_memory=4 * gib, reduce_bucket_size=2**24)
    planner = Planner(BucketTerms(config, planned_device(1, addressable=False)))
    specs = [ParamSpec(f"p{i}", numel, BFLOAT16) for i in range(4)]

    def plan():
        return planner.plan(specs)

    others = plan().needs[DEVICE]
    assert planner.allocated.device_budget == 0
    bucket = (12 + 2) * 2**24  # its states, and its gradients until the update
    check_memory(planner, plan(), plan, specs, host=2**40, device=others + gib + 5 * bucket, processes=1)
    assert planner.allocated.device_budget == 5 * 12 * 2**24
    check_memory(planner, plan(), plan, specs, host=2**40, device=others + gib + 5 * bucket - 1, processes=1)
    assert planner.allocated.device_budget == 4 * 12 * 2**24
    check_memory(planner, plan(), plan, specs, host=2**40, device=None, processes=1)
    assert planner.allocated.device_budget == 4 * 12 * 2**24, "nothing is known, so nothing changes"


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("tier", TIERS)
def test_memory_is_what_the_plan_says(tier, steps):
    config = OffloadConfig(reduce_bucket_size=1024, gradient_accumulation_steps=steps, **TIERS[tier])
    subject = Subject(FakeDevice(), [np.ones(900, np.float32)] * 8, [BFLOAT16] * 8, [0] * 8, config)
    subject.add_all()
    subject.pipeline.gradients.end_micro_step()
    report = subject.engine.memory_report([], {})
    kinds = {(row.where, row.what) for row in report.rows}
    assert ((DEVICE, "exp_avg") in kinds) == ("device" in tier)
    assert ((DEVICE, SUMS) in kinds) == ("device" in tier and steps > 1)
    for row in report.rows:
        assert row.held == row.planned, row


def test_traffic_is_that_of_the_states_on_the_host():
    specs = [ParamSpec(f"p{i}", 1024, BFLOAT16) for i in range(8)]
    found = {}
    for n in (0, 2, 4, 8):
        config = OffloadConfig(reduce_bucket_size=1024, device_states_bytes=n * 3 * 4096)
        whole, _ = Planner(BucketTerms(config, planned_device(1, addressable=False))).traffic(specs)
        found[n] = whole.to_host, whole.to_device, whole.update
    assert found[8] == (0, 0, 0)
    for n in (2, 4):
        assert [8 * part for part in found[n]] == [(8 - n) * part for part in found[0]]


# --- what goes wrong ------------------------------------------------------------------------------------------


def one(subject, value=1.0):
    subject.add_all(value)
    subject.pipeline.gradients.end_micro_step()
    return subject.pipeline.step(StepArguments(HYPERS, subject.tensors))


@pytest.mark.parametrize("schedule", ["serial", "overlap", "delayed"])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_update_that_fails_on_the_device_is_made_again_and_counts(schedule, failing):
    fields = {"reduce_bucket_size": 48, "schedule": schedule, "delay_warmup_steps": 1, "gradient_clipping": 1.0}
    subject, reference = make(FakeDevice(), **TIERS["device"], **fields), make(FakeDevice(), **fields)
    assert len(subject.pipeline.buckets.all) > 2
    for each in (subject, reference):
        one(each)
        each.pipeline.last_step.finish()
    subject.device.queue().fail_after(failing)

    def fail():
        one(subject, 0.5)
        subject.pipeline.last_step.finish()

    with pytest.raises(OSError, match="failed as asked"):
        fail()
    one(reference, 0.5)
    for each in (subject, reference):
        each.pipeline.parameters.flush(each.tensors)
    assert bits(subject) == bits(reference)


@pytest.mark.parametrize("failing", [0, 1])
def test_an_update_of_two_kernels_that_breaks_off_between_them_is_not_made_twice(failing):
    """Gradients of two element types: nobody knows which kernel has run, so only a load may follow."""
    subject = make(FakeDevice(), **TIERS["device"])
    one(subject)
    subject.pipeline.last_step.finish()
    subject.add_all()
    values = np.full(40, 0.5, np.float32)
    subject.pipeline.state_lock.change("load", lambda: GradientAccess(subject.pipeline).load(0, values))
    subject.pipeline.gradients.end_micro_step()
    subject.device.queue().fail_after(failing)

    def step():
        subject.pipeline.step(StepArguments(HYPERS, subject.tensors))
        subject.pipeline.last_step.finish()

    with pytest.raises(OSError, match="failed as asked"):
        step()
    with pytest.raises(StateError, match=r"only a part of its update may have been made.*expected a checkpoint"):
        StateAccess(subject.pipeline).local_states(0)


@pytest.mark.parametrize("fields", [{}, {"gradient_clipping": 1.0}, {"schedule": "delayed", "delay_warmup_steps": 1}])
@pytest.mark.parametrize("tier", ["host", "device"])
def test_a_program_may_write_to_its_gradients_when_step_has_returned(tier, fields):
    """The last update may still run, on gradients that a program writes to the same memory in each step."""
    subject, reference = make(FakeDevice(max_delay=1e-3), **TIERS[tier], **fields), make(HostDevice(), **fields)
    gradients = [FakeTensor(np.full(spec.numel, 0.5, BFLOAT16.numpy)) for spec in subject.specs]
    for value in (0.5, -2.0, 0.25):
        for i, gradient in enumerate(gradients):
            gradient.memory[:] = value
            subject.pipeline.gradients.add({i: gradient})
        subject.pipeline.gradients.end_micro_step()
        subject.pipeline.step(StepArguments(HYPERS, subject.tensors))
        for gradient in gradients:
            gradient.memory[:] = np.nan
        one(reference, value)
    for each in (subject, reference):
        each.pipeline.parameters.flush(each.tensors)
    assert bits(subject) == bits(reference)


def test_a_release_that_finds_no_host_memory_changes_nothing(monkeypatch):
    subject, reference = (make(FakeDevice(), **TIERS["device"]) for _ in range(2))
    for each in (subject, reference):
        one(each)
        each.pipeline.parameters.flush(each.tensors)
    allocate = subject.pipeline.memory.allocate

    def refuse(label, *args, **kw):
        if label == RELEASED_STATES:
            raise HostMemoryError("none is left")
        return allocate(label, *args, **kw)

    monkeypatch.setattr(subject.pipeline.memory, "allocate", refuse)
    with pytest.raises(HostMemoryError, match="none is left"):
        subject.pipeline.parameters.copies_of_states()
    for each in (subject, reference):
        one(each)
        each.pipeline.parameters.flush(each.tensors)
    assert bits(subject) == bits(reference)


def test_released_states_are_on_the_host_and_come_back():
    subject, reference = (make(FakeDevice(), gradient_accumulation_steps=2, **TIERS["device"]) for _ in range(2))

    def step(each):
        for _ in range(2):
            each.add_all()
            each.pipeline.gradients.end_micro_step()
        each.pipeline.step(StepArguments(HYPERS, each.tensors, 2.0))
        each.pipeline.parameters.flush(each.tensors)

    for each in (subject, reference):
        step(each)
    expected, planned = bits(subject), on_device(subject)
    parameters, lock = subject.pipeline.parameters, subject.pipeline.state_lock
    lock.change("release", lambda: parameters.release("released", parameters.copies_of_states()))
    assert on_device(subject) == 0
    assert subject.pipeline.buckets.held_elsewhere() == {}, "sums of gradients are gone, too"
    assert subject.pipeline.memory.report()[RELEASED_STATES] == planned
    states = [StateAccess(subject.pipeline)._local_runs(i)["exp_avg"].values() for i in range(2)]
    assert [state.tobytes() for state in states] == [expected[2 + 3 * i + 1] for i in range(2)]
    with pytest.raises(StateError, match="released"):
        one(subject)

    def restore():
        parameters.restore_states()
        parameters.restore(subject.tensors)

    lock.change("restore", restore)
    subject.pipeline.last_step.finish()
    assert bits(subject) == expected
    assert RELEASED_STATES not in subject.pipeline.memory.report()
    for each in (subject, reference):
        step(each)
    assert bits(subject) == bits(reference)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"device_states_bytes": -1}, "device_states_bytes"),
        ({"device_states_bytes": "all"}, "device_states_bytes: got 'all'"),
        ({"device_states_bytes": True}, "device_states_bytes"),
        ({"device_states_bytes": 5, "offload_optimizer": None}, "expected offload_optimizer='cpu' or 'nvme'"),
        ({"device_states_bytes": "auto"}, "expected activation_memory=BYTES"),
        ({"offload_optimizer": None, "stage": 3, "offload_param": "cpu"}, "beside offload_param='cpu'"),
        ({"device_states_bytes": 5, "stage": 3, "offload_param": "cpu"}, "beside offload_param='cpu'"),
    ],
)
def test_a_wrong_setting_is_one_clear_error(fields, said):
    with pytest.raises(ConfigError, match=said):
        OffloadConfig(**fields)


def test_on_the_cpu_where_the_devices_memory_is_the_hosts_it_changes_nothing():
    subject, reference = make(HostDevice(), **TIERS["device"]), make(HostDevice())
    for each in (subject, reference):
        one(each)
        each.pipeline.last_step.finish()
    assert bits(subject) == bits(reference)
    assert subject.pipeline.memory.report() == reference.pipeline.memory.report()


class NoKernels(FakeDevice):
    """A device that moves tensors, and has no compiler for kernels."""

    def queue(self):
        raise NoQueue("nobody compiles for it").refusal


@pytest.mark.parametrize("tier", ["device", "device and host"])
def test_a_device_without_the_kernels_refuses_the_tier_by_name_and_nothing_else(tier):
    with pytest.raises(
        ConfigError, match=r"because nobody compiles for it; expected offload_optimizer='cpu' or 'nvme'"
    ):
        make(NoKernels(), **TIERS[tier])
    one(make(NoKernels()))
