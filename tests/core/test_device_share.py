"""States in the device's memory: which buckets have theirs there, of a number of bytes and of a share of all, and what
plans and errors say of them."""

import json
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from offload_core import ConfigError, DeviceMemoryError, HostMemoryError
from offload_core.__main__ import main
from offload_core.config.options import OffloadConfig
from offload_core.device.exchange_sizes import planned_device
from offload_core.dtypes import BFLOAT16, FLOAT32
from offload_core.layout.partition import ParamSpec
from offload_core.memory.plan import DEVICE, HOST
from offload_core.plans.allocated import Allocated
from offload_core.plans.planner import SHARES, Planner
from offload_core.plans.prediction import Speeds, predict
from offload_core.plans.terms import BucketTerms
from tests.support.strategies import law

NUMELS = st.lists(st.integers(1, 5000), min_size=1, max_size=12)
"""The elements of each parameter."""
WORLD_SIZES = st.sampled_from([1, 2, 3])


def terms_of(asked, world_size=1, **fields):
    config = OffloadConfig(**{"device_states_bytes": asked, "reduce_bucket_size": 2048, **fields})
    return BucketTerms(config, planned_device(world_size, addressable=False))


def specs_of(numels, dtype=BFLOAT16):
    return [ParamSpec(f"p{i}", numel, dtype) for i, numel in enumerate(numels)]


def placed(asked, numels, world_size=1):
    """The bytes of each bucket's states, in the order of forward, and the numbers of the buckets on the device."""
    terms = terms_of(asked, world_size)
    buckets = terms.cut(specs_of(numels))
    there = terms.on_device(buckets, terms.device_budget)
    return [terms.device_state_bytes(bucket) for bucket in buckets], sorted(there)


@given(numels=NUMELS, share=st.floats(0, 1), world_size=WORLD_SIZES)
@example(numels=[2048, 2048], share=0.5, world_size=1)
@example(numels=[2048], share=0.49, world_size=1)
@example(numels=[2048] * 3, share=1 / 3, world_size=3)
@law()
def test_a_share_is_met_as_nearly_as_half_a_bucket(numels, share, world_size):
    sizes, there = placed(share, numels, world_size)
    assert abs(sum(sizes[i] for i in there) - share * sum(sizes)) <= max(sizes) / 2


@given(numels=NUMELS, world_size=WORLD_SIZES)
@law()
def test_the_ends_of_a_share_are_none_and_all(numels, world_size):
    sizes, there = placed(1.0, numels, world_size)
    assert there == list(range(len(sizes)))
    assert placed(0.0, numels, world_size)[1] == placed(0, numels, world_size)[1] == []


@given(numels=NUMELS, asked=st.integers(0, 200_000), world_size=WORLD_SIZES)
@example(numels=[1], asked=1, world_size=1)
@law()
def test_a_number_of_bytes_is_never_exceeded_and_no_bucket_that_fits_is_left_out(numels, asked, world_size):
    sizes, there = placed(asked, numels, world_size)
    left = asked - sum(sizes[i] for i in there)
    assert left >= 0
    assert all(size > left for i, size in enumerate(sizes) if i not in there)


@given(n=st.integers(1, 20), share=st.floats(0, 1))
@law()
def test_equal_buckets_are_taken_from_the_first_of_forward(n, share):
    assert (taken := placed(share, [2048] * n)[1]) == list(range(len(taken)))
    assert abs(len(taken) - share * n) <= 0.5 + 1e-9


def test_parameters_that_are_added_later_have_a_share_of_their_own():
    """A number of bytes is that of all sets of new parameters together."""
    for asked, later in ((0.5, [0, 1]), (2 * 2048 * 12, [])):
        terms = terms_of(asked)
        allocated = Allocated(terms)
        first = terms.cut(specs_of([2048] * 4))
        there = terms.on_device(first, allocated.device_budget)
        assert sorted(there) == [0, 1]
        allocated.add_states(first, there)
        assert sorted(terms.on_device(terms.cut(specs_of([2048] * 4)), allocated.device_budget)) == later


@pytest.mark.parametrize("store", ["cpu", "nvme"])
def test_a_plan_divides_the_states_by_the_share(store, tmp_path):
    disk = {"nvme_path": str(tmp_path), "nvme_host_bytes": 0} if store == "nvme" else {}
    plans = {}
    for share in (0.0, 0.25, 1.0):
        planner = Planner(terms_of(share, offload_optimizer=store, **disk))
        plan = planner.plan(specs_of([2048] * 4))
        place = "disk" if store == "nvme" else "host"
        names = ("master", "exp_avg", "exp_avg_sq")
        plans[share] = {
            where: sum(row.n_bytes for row in plan.rows if row.where == where and row.what in names)
            for where in ("device", place)
        }
    each = 2048 * 12
    assert [tuple(plan.values()) for plan in plans.values()] == [(0, 4 * each), (each, 3 * each), (4 * each, 0)]


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_the_link_carries_both_ways_what_is_not_on_the_device(share, dtype):
    planner = Planner(terms_of(share))
    moved, _ = planner.traffic(specs_of([2048] * 8, dtype))
    left = (1 - share) * 8 * 2048 * dtype.itemsize
    assert (moved.to_host, moved.to_device) == (left, left)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (5, 5),
        (np.int64(5), 5),
        (torch.tensor(5), 5),
        (0.5, 0.5),
        (np.float32(0.5), 0.5),
        (torch.tensor(0.5), 0.5),
        (1.0, 1.0),
        (1, 1),
    ],
    ids=repr,
)
def test_an_integer_is_bytes_and_a_float_a_share(given, kept):
    got = OffloadConfig(device_states_bytes=given).device_states_bytes
    assert got == kept
    assert type(got) is type(kept)
    assert terms_of(given).device_budget == kept


@pytest.mark.parametrize(
    "given", [True, np.True_, -1, -0.5, 1.5, 8e9, float("nan"), "0.5", "half", [0.5], np.zeros(2), 2**63], ids=repr
)
def test_other_values_are_refused_by_name(given):
    with pytest.raises(ConfigError, match="^device_states_bytes: got .*, expected an integer, which is a number of"):
        OffloadConfig(device_states_bytes=given)


# --- the time of a step ---------------------------------------------------------------------------------------


def time_of(share, speeds=None, **fields):
    planner = Planner(terms_of(share, **fields))
    return predict(planner, specs_of([2048] * 8), speeds or Speeds(28e6, 2e6, 6e9, None, 280e6), tokens=100)


def test_the_device_updates_its_share_after_backward_and_the_host_the_others_beside_it():
    n, bucket = 8 * 2048, 2048
    for share in (0.0, 0.25, 0.5):
        time = time_of(share)
        assert time.on_device == pytest.approx(share * 28 * n / 280e6)
        assert time.update == pytest.approx((1 - share) * 28 * n / 28e6)
        assert time.to_host == time.to_device == pytest.approx((1 - share) * 2 * n / 2e6)
        assert time.tail == pytest.approx(28 * bucket / 28e6 + 2 * 2 * bucket / 2e6)
        busy = time.compute + time.on_device
        assert time.seconds == pytest.approx(max(busy, time.update, time.to_host) + time.tail)
        assert time.is_known
    serial = time_of(0.5, schedule="serial")
    parts = (serial.compute, serial.on_device, serial.update, serial.to_host, serial.to_device)
    assert serial.seconds == pytest.approx(sum(parts))


def test_with_all_states_there_a_step_is_compute_and_the_update_on_the_device():
    time = time_of(1.0)
    assert (time.update, time.to_host, time.to_device, time.tail) == (0, 0, 0, 0)
    assert time.seconds == pytest.approx(time.compute + time.on_device)


def test_an_unknown_bandwidth_of_the_device_leaves_its_update_unknown():
    known = Speeds(28e6, 2e6, 6e9)
    assert time_of(0.0, known).is_known
    some = time_of(0.5, known)
    assert some.on_device is None
    assert not some.is_known
    assert some.seconds == pytest.approx(time_of(0.5).seconds)  # the host takes longer


# --- what is printed and what errors say ----------------------------------------------------------------------

MACHINE = ["--dram-bandwidth=40GB", "--link-bandwidth=25GB", "--host-memory=128GB", "--device-memory=80GB"]


def planned(capsys, *arguments):
    status = main(["plan", "--json", "--preset=gpt2-124m", *MACHINE, *arguments])
    out = json.loads(capsys.readouterr().out)
    assert status == (0 if out["fits"] else 1)
    return out


def test_plans_have_states_in_three_places_and_the_bytes_of_the_link(capsys):
    found = planned(capsys, "--device-states-bytes=0.25", "--device-bandwidth=3TB", "--reduce-bucket-size=1000000")
    assert [(tier["stage"], tier["offload_param"]) for tier in found["tiers"]] == [(1, None), (2, None), (3, None)]
    numel = found["parameters"]
    for tier in found["tiers"]:
        states = tier["states"]
        assert sum(states.values()) == pytest.approx(12 * numel, rel=1e-3)
        assert states["device"] == pytest.approx(3 * numel, rel=0.02)
        assert tier["link_bytes"] == pytest.approx(3 * numel, rel=0.02)
        assert tier["step"]["on_device"] == pytest.approx(7 * numel / 3e12, rel=0.02)
    disk = ["--offload-optimizer=nvme", "--nvme-host-bytes=0", "--disk-memory=1TB", "--disk-bandwidth=5GB"]
    on_disk = planned(capsys, "--device-states-bytes=500MB", *disk, "--stage=2")["tiers"][0]["states"]
    assert on_disk["device"] <= 500 * 10**6 < on_disk["device"] + 12 * 4 * 2**20
    assert on_disk["host"] == 0
    assert on_disk["disk"] == pytest.approx(12 * numel - on_disk["device"], rel=1e-3)


def test_all_states_on_the_device_leave_nothing_for_the_host(capsys):
    for tier in (found := planned(capsys, "--offload-optimizer=none"))["tiers"]:
        assert tier["offload_optimizer"] is None
        assert tier["states"]["host"] == tier["link_bytes"] == tier["step"]["update"] == 0
        assert tier["states"]["device"] == pytest.approx(12 * found["parameters"], rel=1e-3)


def test_auto_fills_the_device_beside_activations(capsys):
    """Less a reserve of 1 GiB. A bucket that does not fit stays out."""
    asked = ["--device-states-bytes=auto", "--activation-memory=200MB", "--reduce-bucket-size=1000000", "--stage=2"]
    sizes = []
    for memory in (2.2, 2.4):
        (tier,) = planned(capsys, *asked, f"--device-memory={memory}GB")["tiers"]
        assert tier["fits"]
        sizes.append(tier["states"]["device"])
    assert 0 < sizes[0] < sizes[1]
    assert sizes[1] - sizes[0] == pytest.approx(0.2e9 * 12 / 14, abs=14e6)  # gradients of these buckets stay, too


def test_tables_show_the_places_the_link_and_the_devices_update(capsys):
    asked = ["plan", "--preset=gpt2-124m", *MACHINE, "--stage=2", "--reduce-bucket-size=1000000"]
    assert main([*asked, "--device-states-bytes=0.5", "--device-bandwidth=3TB"]) == 0
    shown = capsys.readouterr().out
    assert "link 25.0 GB/s each way, device 3000.0 GB/s" in shown
    assert re.search(r"states +device +host +link, a parameter\nstage 2 +7..\.. MiB +7..\.. MiB +1\.99 B\n", shown)
    assert re.search(r"time .* compute +update on it\nstage 2 .* not known +1 ms\n", shown)
    assert "offload_param" not in shown, "which is refused beside it"
    assert main([*asked, "--offload-optimizer=none"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"stage 2, on the device +\d.* 0\.00 B\n", shown)
    assert "device, at least" in shown
    assert main(asked) == 0
    assert "link, a parameter" not in capsys.readouterr().out


def plan_of(asked, numels, **fields):
    planner = Planner(terms_of(asked, **fields))
    return planner.plan(specs_of(numels))


@given(numels=st.lists(st.integers(500, 5000), min_size=4, max_size=12), part=st.floats(0, 0.999))
@example(numels=[2048] * 8, part=0.0)
@law()
def test_the_number_that_an_error_of_the_device_names_fits(numels, part):
    """Down to none on the device."""
    least, most = plan_of(0, numels).needs[DEVICE], plan_of(1.0, numels).needs[DEVICE]
    free = least + int(part * (most - least))
    for asked, beside in ((1.0, ""), (None, "offload_optimizer='cpu', ")):
        fields = {} if asked else {"offload_optimizer": None}
        with pytest.raises(DeviceMemoryError, match="Largest consumers: ") as caught:
            plan_of(asked, numels, **fields).check(2**40, free)
        named = re.search(
            rf"With {beside}device_states_bytes=(\d+) it would fit there \(docs/tiers.md\)", str(caught.value)
        )
        if named is not None:
            plan_of(int(named[1]), numels).check(2**40, free)
        else:
            assert free < least + sum(row.n_bytes for row in plan_of(1.0, numels).rows if row.what == "gradients")


def test_an_error_of_the_device_names_the_setting_of_its_states():
    for fields, remedy in (({}, "device_states_bytes"), ({"offload_optimizer": None}, "offload_optimizer='cpu'")):
        with pytest.raises(DeviceMemoryError, match=rf"consumers: (master|exp_avg\w*) .* \({re.escape(remedy)}\)"):
            plan_of(None if fields else 1.0, [2048] * 8, **fields).check(2**40, 2**17)


@given(numels=st.lists(st.integers(500, 5000), min_size=4, max_size=12), part=st.floats(0, 0.999))
@law()
def test_the_share_that_an_error_of_the_host_names_fits_where_the_device_has_room(numels, part):
    numels = [numel * 1024 for numel in numels]  # the memory through which states are read is little beside these
    cut = {"reduce_bucket_size": 2**19}
    least, most = plan_of(1.0, numels, **cut).needs[HOST], plan_of(0, numels, **cut).needs[HOST]
    free = least + math.floor(part * (most - least))
    with pytest.raises(HostMemoryError) as caught:
        plan_of(0, numels, **cut).check(free, 2**40)
    share = float(
        re.search(r"With device_states_bytes=([\d.]+) it would fit, in .* CUDA or ROCm", str(caught.value))[1]
    )
    plan_of(share, numels, **cut).check(free, 2**40)
    for less in (each for each in SHARES if each < share):
        assert plan_of(less, numels, **cut).needs[HOST] > free


def test_no_share_is_named_where_it_cannot_be():
    numels = [600_000] * 4
    for fields, device in (({}, None), ({}, 2 * 2**20), ({"stage": 3, "offload_param": "cpu"}, 2**40)):
        with pytest.raises(HostMemoryError) as caught:
            plan_of(0, numels, **fields).check(6 * 2**20, device)
        assert "With device_states_bytes" not in str(caught.value)
