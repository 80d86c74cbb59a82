"""Blocks of states on their way between disk and memory, and parameters that are read ahead, whenever transfers end."""

import pytest

from tests.support import rings, shards_on_disk


@pytest.mark.draws(3)
@pytest.mark.parametrize("scenario", [*rings.SCENARIOS, *shards_on_disk.SCENARIOS])
def test_on_a_disk_that_ends_transfers_whenever_it_may(scenario):
    scenario()
