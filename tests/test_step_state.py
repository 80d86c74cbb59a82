"""The transition table of a bucket's life."""

import pytest

from offload_core.errors import StateError
from offload_core.step_state import TRANSITIONS, BucketEvent, BucketLife, BucketState


@pytest.mark.parametrize("state", BucketState)
@pytest.mark.parametrize("event", BucketEvent)
def test_an_illegal_event_raises_with_names_and_changes_nothing(state, event):
    life = BucketLife(3)
    life.state = state
    if (state, event) in TRANSITIONS:
        life.on(event)
        assert life.state is TRANSITIONS[state, event]
    else:
        with pytest.raises(StateError, match=f"bucket 3: '{event.value}' is not allowed while it is '{state.value}'"):
            life.on(event)
        assert life.state is state


def test_a_step_returns_to_where_it_began():
    life = BucketLife(0)
    for event in ("GRADIENT", "REDUCE", "ARRIVED", "UPDATE", "PUBLISH", "PUBLISHED"):
        life.on(BucketEvent[event])
    assert life.state is BucketState.EMPTY


def test_gradients_cannot_be_dropped_once_an_update_has_begun():
    for state in (BucketState.UPDATING, BucketState.PUBLISHING):
        assert (state, BucketEvent.DROP) not in TRANSITIONS


def test_every_state_is_left_and_reached():
    assert {state for state, _ in TRANSITIONS} == set(BucketState)
    assert set(TRANSITIONS.values()) == set(BucketState)
