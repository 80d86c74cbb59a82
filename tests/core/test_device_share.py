"""States in the device's memory: which buckets have theirs there, of a number of bytes and of a share of all."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from offload_core import ConfigError
from offload_core.config.options import OffloadConfig
from offload_core.device.exchange_sizes import planned_device
from offload_core.dtypes import BFLOAT16, FLOAT32
from offload_core.layout.partition import ParamSpec
from offload_core.plans.allocated import Allocated
from offload_core.plans.planner import Planner
from offload_core.plans.terms import BucketTerms
from tests.support.strategies import law

NUMELS = st.lists(st.integers(1, 5000), min_size=1, max_size=12)
"""The elements of each parameter."""
WORLD_SIZES = st.sampled_from([1, 2, 3])


def terms_of(asked, world_size=1, **fields):
    config = OffloadConfig(device_states_bytes=asked, reduce_bucket_size=2048, **fields)
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
