"""The core of stage 3: shards that are gathered in time, whatever the device and the ranks, and released again."""

import tempfile
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.config.options import OffloadConfig
from offload_core.device.host import HostDevice
from offload_core.disk.shards import ReadAhead
from offload_core.stage3.use_order import UseOrder
from offload_core.testing.fake_device import FakeDevice
from offload_core.testing.thread_ranks import ThreadRank, _Group, run_ranks
from tests.support.live_models import CONFIG, SCENARIOS, SIZES, Model, expected, run
from tests.support.one_thread import Threads
from tests.support.strategies import law

modules = st.lists(st.lists(st.integers(0, len(SIZES) - 1), min_size=1, max_size=2, unique=True), max_size=8)
rounds_of_uses = st.lists(modules, min_size=1, max_size=4).flatmap(
    lambda made: st.lists(st.sampled_from(made), min_size=2, max_size=5)  # some rounds as before, some not
)
configs = st.builds(
    OffloadConfig,
    stage=st.just(3),
    schedule=st.sampled_from(["overlap", "overlap", "serial"]),
    offload_param=st.sampled_from([None, "cpu", "nvme"]),
    offload_optimizer=st.just("nvme"),
    nvme_path=st.just(tempfile.gettempdir()),
    nvme_host_bytes=st.sampled_from([0, 2000, 10**9]),
    max_live_parameters=st.sampled_from([0, 150, 10**9]),
    prefetch_bucket_size=st.sampled_from([0, 100, 10**9]),
    max_reuse_distance=st.sampled_from([0, 100, 10**9]),
    reduce_bucket_size=st.sampled_from([16, 64, 10**6]),
)


ON_DISK = {"offload_optimizer": "nvme", "nvme_path": tempfile.gettempdir(), "nvme_host_bytes": 0}
IN_MEMORY = {"offload_optimizer": "cpu", "nvme_path": None, "nvme_host_bytes": None}


@law(40)
@given(rounds_of_uses, configs)
def test_shards_on_disk_are_read_as_those_in_memory(rounds, config):
    config = replace(config, offload_param="nvme")
    model = Model(config, FakeDevice(max_delay=2e-4))
    assert run(model, rounds) == expected(rounds, config)


@law(60)
@given(rounds_of_uses, configs, st.none() | st.integers(0, 99))
def test_what_is_read_is_there_though_copies_come_as_late_as_can_be(rounds, config, seed):
    config = replace(config, offload_param="cpu", **IN_MEMORY)
    with pytest.MonkeyPatch.context() as patch:
        Threads(seed).play(patch)
        model = Model(config, FakeDevice())
        assert run(model, rounds) == expected(rounds, config)
        most = max([sum(SIZES[i] for i in used) for uses in rounds for used in uses], default=0)
        assert model.live.peak_numel <= max(config.max_live_parameters, most)


@law(25)
@given(rounds_of_uses, configs, st.sampled_from([2, 3, 4]), st.booleans())
def test_ranks_gather_the_same_from_shards_wherever_those_are(rounds, config, world_size, addressable):
    apart = _Group(world_size, 30.0)

    def body(rank):
        device = HostDevice() if addressable else FakeDevice(seed=rank.rank, max_delay=2e-4)
        try:
            return run(Model(config, device, rank, ThreadRank(apart, rank.rank)), rounds)
        except BaseException:
            apart.lose()
            raise
        finally:
            if not addressable:
                device.close()

    found = run_ranks(world_size, body)
    assert all(seen == found[0] for seen in found)
    if world_size != 3:  # the mean of two equal gradients is exact, and of four
        assert found[0] == expected(rounds, config)


def test_the_next_shards_on_disk_are_on_their_way_when_one_is_taken(monkeypatch):
    config = replace(CONFIG, offload_param="nvme", prefetch_bucket_size=110, max_live_parameters=250, **ON_DISK)
    model, ahead, take = Model(config, FakeDevice()), [], ReadAhead._take

    def taken(self, part):
        ahead.append(sorted(other.size for other, entry in self._entries.items() if entry.version == other.version))
        return take(self, part)

    monkeypatch.setattr(ReadAhead, "_take", taken)
    for _ in range(2):
        run(model, [[[0], [2], [3]]])
    one, two, three = (sum(b.shard_numel for b in model.params[i].buckets) for i in (0, 2, 3))
    assert ahead == [[one], [two], [three], sorted([one, two]), sorted([two, three]), [three]]


def sizes_gathered(config, uses, rounds=2):
    """Return each parameter gathered in the last of equal rounds, after the index of the use that gathered it."""
    model = Model(replace(config, schedule="serial"), HostDevice())
    gathered = []
    gather = model.live._gather
    model.live._gather = lambda param: (gathered.append((at, param.number)), gather(param))
    for _ in range(rounds):
        gathered.clear()
        model.live.begin_round("forward")
        for at, used in enumerate(uses):  # noqa: B007
            model.read(used)
        model.live.release_all()
    return gathered


def test_the_next_uses_are_gathered_ahead_as_far_as_the_bucket_goes():
    uses = [[0], [2], [3], [4]]
    assert sizes_gathered(replace(CONFIG, prefetch_bucket_size=0), uses) == [(0, 0), (1, 2), (2, 3), (3, 4)]
    assert sizes_gathered(replace(CONFIG, prefetch_bucket_size=200), uses) == [(0, 0), (0, 2), (1, 3), (1, 4)]
    assert sizes_gathered(replace(CONFIG, prefetch_bucket_size=10**6), uses) == [(0, 0), (0, 2), (0, 3), (0, 4)]
    narrow = replace(CONFIG, prefetch_bucket_size=10**6, max_live_parameters=250)
    assert sizes_gathered(narrow, uses) == [(0, 0), (0, 2), (2, 3), (2, 4)]
    assert sizes_gathered(replace(CONFIG, prefetch_bucket_size=10**6), uses, rounds=1) == [
        (0, 0), (1, 2), (2, 3), (3, 4)]  # fmt: skip


def test_what_is_used_again_soon_stays():
    uses = [[0], [2], [0], [3], [0]]
    near = replace(CONFIG, prefetch_bucket_size=0, max_reuse_distance=77)
    assert sizes_gathered(near, uses) == [(0, 0), (1, 2), (2, 0), (3, 3)]
    assert sizes_gathered(replace(near, max_reuse_distance=200), uses) == [(0, 0), (1, 2), (3, 3)]
    full = replace(near, max_reuse_distance=200, max_live_parameters=210)
    assert sizes_gathered(full, uses) == [(0, 0), (1, 2), (2, 0), (3, 3)]


@pytest.mark.draws(1)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_with_threads_that_come_as_late_as_can_be(scenario, monkeypatch):
    Threads().play(monkeypatch)
    scenario()


def test_an_order_is_followed_through_what_is_skipped_and_what_is_new():
    order = UseOrder()
    order.sizes += SIZES
    order.begin("a")
    for param in (0, 1, 2, 1, 3):
        order.use(param)
    order.begin("a")
    assert list(order.upcoming(10**6)) == [0, 1, 2, 1, 3]
    assert list(order.upcoming(41)) == [0, 1]
    assert [order.distance(param) for param in range(5)] == [0, 40, 41, 242, None]
    order.use(0)
    order.use(4)  # new
    order.use(2)  # 1 was skipped
    assert list(order.upcoming(10**6)) == [1, 3]
    order.begin("b")
    assert list(order.upcoming(10**6)) == []
    order.use(3)
    order.begin("a")
    assert list(order.upcoming(10**6)) == [0, 4, 2]
    order.forget()
    assert list(order.upcoming(10**6)) == []
    assert order.distance(0) is None


def test_what_seldom_comes_is_predicted_no_more_until_it_comes_again():
    order = UseOrder()
    order.sizes += SIZES

    def round_with(*params):
        order.begin("a")
        predicted = list(order.upcoming(10**6))
        for param in params:
            order.use(param)
        return predicted

    round_with(0, 1, 3)
    assert round_with(0, 2, 3) == [0, 1, 3]
    assert round_with(0, 1, 3) == [0, 2, 3]
    assert round_with(0, 2, 3) == [0, 1, 3]
    assert round_with(0, 1, 3) == [0, 2, 3]
    assert round_with(0, 1, 3) == [0, 3], "1 was skipped twice"
    assert round_with(0, 1, 3) == [0, 1, 3], "and came again"
