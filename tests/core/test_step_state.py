"""The transition tables: a bucket's gradient, publication and ownership, its states in a slot, a pipeline's health."""

import re
from contextlib import nullcontext

import pytest

from offload_core.errors import CollectiveError, StateError
from offload_core.states.slots import CONTENT, Content, ContentEvent
from offload_core.step.bucket_states import (
    GRADIENT,
    OWNER,
    PUBLICATION,
    Gradient,
    GradientEvent,
    Owner,
    OwnerEvent,
    Publication,
    PublicationEvent,
)
from offload_core.step.health import HEALTH, Health, HealthEvent, PipelineHealth, Use
from offload_core.support.state_machine import StateMachine

TABLES = {
    "gradient": (Gradient, GradientEvent, GRADIENT),
    "publication": (Publication, PublicationEvent, PUBLICATION),
    "owner": (Owner, OwnerEvent, OWNER),
    "content": (Content, ContentEvent, CONTENT),
    "health": (Health, HealthEvent, HEALTH),
}


@pytest.mark.parametrize("what", TABLES)
def test_an_illegal_event_raises_with_names_and_changes_nothing(what):
    states, events, table = TABLES[what]
    for state in states:
        for event in events:
            machine = StateMachine("bucket 3", state, table)
            if (state, event) in table:
                machine.on(event)
                assert machine.state is table[state, event]
                continue
            words = f"bucket 3: {event.value!r} is not allowed while its {what} is {state.value!r}; expected one of '"
            with pytest.raises(StateError, match=re.escape(words)):
                machine.on(event)
            assert machine.state is state


def test_a_step_returns_to_where_it_began():
    gradient, publication, owner = (
        StateMachine("bucket 0", start, table)
        for start, table in ((Gradient.ABSENT, GRADIENT), (Publication.CURRENT, PUBLICATION), (Owner.CALLER, OWNER))
    )
    before = [machine.state for machine in (gradient, publication, owner)]
    for event in ("ADD", "LAUNCH", "LAND", "USE", "END"):
        gradient.on(GradientEvent[event])
    for event in ("SEND", "ARRIVE"):
        publication.on(PublicationEvent[event])
    for event in ("GIVE", "TAKE"):
        owner.on(OwnerEvent[event])
    assert [machine.state for machine in (gradient, publication, owner)] == before


def test_gradients_that_an_update_uses_can_neither_be_dropped_nor_joined_by_others():
    for event in (GradientEvent.DROP, GradientEvent.ADD, GradientEvent.LAUNCH, GradientEvent.USE):
        assert (Gradient.USED, event) not in GRADIENT


def test_every_state_is_left_and_reached():
    for states, _, table in TABLES.values():
        assert {state for state, _ in table} == set(states)
        assert set(table.values()) == set(states)


def test_what_is_refused_is_refused_with_the_reason_until_a_load_mends_it():
    allowed = {
        Health.SOUND: [*Use],
        Health.INTERRUPTED: [*Use],
        Health.DIVERGED: [Use.READ],
        Health.LOST: [Use.READ, Use.PUBLISH],
        Health.TORN: [],
        Health.GONE: [],
    }
    for state, uses in allowed.items():
        health = PipelineHealth()
        health.state, health._reason = state, "the reason"
        for use in Use:
            error = CollectiveError if state is Health.LOST else StateError
            with nullcontext() if use in uses else pytest.raises(error, match="the reason"):
                health.check(use)
        assert health.usable == (Use.STEP in uses)
        assert health.lost_a_rank == (state in (Health.LOST, Health.GONE))
        health.on(HealthEvent.LOAD)
        assert health.usable != health.lost_a_rank
    health.on(HealthEvent.TEAR, "another")
    with pytest.raises(StateError, match="another"):
        health.check(Use.READ)


def test_released_parameters_are_neither_sent_nor_updated_and_states_are_read():
    health = PipelineHealth()
    health.released = "they are away"
    for use in Use:
        with nullcontext() if use is Use.READ else pytest.raises(StateError, match="they are away"):
            health.check(use)
    health.on(HealthEvent.TEAR, "the reason")  # another error goes first
    with pytest.raises(StateError, match="the reason"):
        health.check(Use.STEP)


def test_nothing_reaches_parameters_without_memory():
    away = Publication.RELEASED
    into = {event for (state, event) in PUBLICATION if state is away}
    assert into == {PublicationEvent.RESTORE}
    assert PUBLICATION[away, PublicationEvent.RESTORE] is Publication.STALE  # the master weights are to be sent
    assert {state for (state, event), to in PUBLICATION.items() if to is away} == {Publication.CURRENT}
