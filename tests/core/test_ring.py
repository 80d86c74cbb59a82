"""Blocks of states on their way between disk and memory, and parameters that are read ahead, whenever transfers end."""

import pytest

from offload_core.states.slots import CONTENT, LoadedBlock
from tests.support import rings, shards_on_disk


@pytest.mark.draws(3)
@pytest.mark.parametrize("scenario", [*rings.SCENARIOS, *shards_on_disk.SCENARIOS])
def test_on_a_disk_that_ends_transfers_whenever_it_may(scenario):
    scenario()


def test_updates_that_break_off_and_writes_from_outside_walk_the_whole_table(monkeypatch):
    walked, on = set(), LoadedBlock.on

    def recording(block, event):
        walked.add((block.state, event))
        on(block, event)

    monkeypatch.setattr(LoadedBlock, "on", recording)
    rings.updates_that_break_off()
    rings.blocks_that_are_written_from_outside()
    assert walked == {*CONTENT}
