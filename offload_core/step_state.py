"""A bucket's life in one step.

Rules:

- A bucket fills with gradients, is reduced over the ranks to the host and waits there. More
  micro-steps may follow, each the same way. At the boundary it is updated and its parameters are published.
- A rank that has no gradient for a bucket takes part in its reduction all the same.
- Dropping is allowed whenever no update has begun: the gradients go, nothing else changes.
- An update may also end without publication (``updated``): its parameters follow later, whatever the bucket's
  gradients do then, or were sent before. Gradients that were used can neither be dropped nor joined by others before
  the step's ``end``.
- New parameters may be sent before their step, states left as they are (``emit``). The step's update makes them true;
  ``recall`` takes them back.
- Between ``update`` and ``published`` master weights and device parameters may differ. ``published`` ends it; an
  error ends it too (``abort``): the next update publishes the master weights again.

=============  =========================================================================
state          what is alive
=============  =========================================================================
EMPTY          no gradient
FILLING        device gradients of some parameters; host gradients of earlier micro-steps
REDUCING       the bucket on its way to its owners' host memory
ON_HOST        host gradients only
EMITTED        host gradients; parameters on their way to the device that no state has yet
UPDATING       host gradients; states are being written
PUBLISHING     updated parameters on their way to the device
UPDATED        states of a step that has not ended; the gradients were used
=============  =========================================================================
"""

from enum import Enum

from .errors import StateError


class BucketState(Enum):
    EMPTY = "empty"
    FILLING = "filling"
    REDUCING = "reducing"
    ON_HOST = "on host"
    EMITTED = "emitted"
    UPDATING = "updating"
    PUBLISHING = "publishing"
    UPDATED = "updated"


class BucketEvent(Enum):
    GRADIENT = "gradient"
    REDUCE = "reduce"
    ARRIVED = "arrived"
    EMIT = "emit"
    RECALL = "recall"
    UPDATE = "update"
    PUBLISH = "publish"
    PUBLISHED = "published"
    UPDATED = "updated"
    END = "end"
    DROP = "drop"
    ABORT = "abort"


S, E = BucketState, BucketEvent

TRANSITIONS: dict[tuple[BucketState, BucketEvent], BucketState] = {
    (S.EMPTY, E.GRADIENT): S.FILLING,
    (S.FILLING, E.GRADIENT): S.FILLING,
    (S.FILLING, E.REDUCE): S.REDUCING,
    (S.EMPTY, E.REDUCE): S.REDUCING,
    (S.ON_HOST, E.REDUCE): S.REDUCING,
    (S.REDUCING, E.ARRIVED): S.ON_HOST,
    (S.ON_HOST, E.GRADIENT): S.FILLING,
    (S.ON_HOST, E.UPDATE): S.UPDATING,
    (S.ON_HOST, E.EMIT): S.EMITTED,
    (S.EMITTED, E.RECALL): S.ON_HOST,
    (S.EMITTED, E.UPDATE): S.UPDATING,
    (S.UPDATING, E.PUBLISH): S.PUBLISHING,
    (S.PUBLISHING, E.PUBLISHED): S.EMPTY,
    (S.UPDATING, E.UPDATED): S.UPDATED,
    (S.UPDATED, E.END): S.EMPTY,
    (S.EMPTY, E.DROP): S.EMPTY,
    (S.FILLING, E.DROP): S.EMPTY,
    (S.REDUCING, E.DROP): S.EMPTY,
    (S.ON_HOST, E.DROP): S.EMPTY,
    **{(state, E.ABORT): S.EMPTY for state in S},
}


class BucketLife:
    """The state of one bucket; :meth:`on` moves it along the table."""

    def __init__(self, bucket: int) -> None:
        self.bucket = bucket
        self.state = S.EMPTY

    def on(self, event: BucketEvent) -> None:
        """Take ``event``, or raise :class:`StateError` and stay as it was."""
        following = TRANSITIONS.get((self.state, event))
        if following is None:
            allowed = ", ".join(repr(e.value) for (s, e) in TRANSITIONS if s is self.state)
            raise StateError(
                f"bucket {self.bucket}: {event.value!r} is not allowed while it is {self.state.value!r}; "
                f"expected one of {allowed}"
            )
        self.state = following
