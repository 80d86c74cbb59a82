"""Ranks that go different ways: every one of them gets one named error in the group's time, or the right bits."""

import re

import pytest

from tests.support.processes import run

NAMED = re.compile(r"(CollectiveError|StateError): .{20}")
DIFFERENT = "ranks went different ways"


def check(numbers, world_size, folder):
    for of_ranks in zip(*run(",".join(map(str, numbers)), world_size, folder, "violation_worker.py"), strict=True):
        case = of_ranks[0]["case"], [said.get("error", said.get("raw", "bits")) for said in of_ranks]
        reference = {said["reference"] for said in of_ranks}
        assert len(reference) == 1, case
        found = {said["bits"] for said in of_ranks if "bits" in said}
        if of_ranks[0]["way"] == "other modules":  # in stages 1 and 2 a rank may compute what it likes
            assert len(found) <= 1, case
        else:
            assert found <= reference, case
        assert all("bits" in said or NAMED.match(said.get("error", "")) for said in of_ranks), case
        met = {said["error"] for said in of_ranks if DIFFERENT in said.get("error", "")}
        assert len(met) <= 1, case  # they all say the same


@pytest.mark.parametrize(("world_size", "numbers"), [(2, [4, 6, 10, 16, 20, 22]), (3, [6, 17, 19, 20, 21, 24])])
def test_a_rank_that_goes_another_way_is_one_named_error_everywhere_or_changes_nothing(world_size, numbers, tmp_path):
    """Cases in which no rank has to wait for the group's timeout."""
    check(numbers, world_size, tmp_path)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "first",
    [pytest.param(i, marks=pytest.mark.slow if i < 110 else pytest.mark.soak) for i in range(100, 200, 10)],
)
def test_two_hundred_ways_to_go_astray(first, world_size, tmp_path):
    check(range(first + 1000 * world_size, first + 1000 * world_size + 10), world_size, tmp_path)
