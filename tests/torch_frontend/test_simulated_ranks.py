"""Ranks that exchange buckets between simulated devices, by a group that is as late as nccl."""

import pytest

from tests.support import simulated
from tests.support.processes import run

pytestmark = pytest.mark.skipif((missing := simulated.why_not()) is not None, reason=missing or "")


def test_ranks_on_devices_give_the_bits_of_ranks_on_the_host(tmp_path):
    simulated.prepare()
    results = run("everywhere", 2, tmp_path, "simulated_worker.py")
    for name in results[0]:
        host, *late = [found for result in results for found in result[name][:1]] + [
            found for result in results for found in result[name][1:]
        ]
        expected = results[0][name][0]
        assert host == results[1][name][0]
        for bits, norms, kind in late[1:]:
            assert (bits, norms) == (expected[0], expected[1]), name
            assert kind == "DeviceRanks", name


def test_an_exchange_that_is_not_waited_for_shows(tmp_path):
    simulated.prepare()
    for result in run("without_waits", 2, tmp_path, "simulated_worker.py"):
        assert result["lost"] != result["expected"]
