"""The health of a pipeline: the uses that are still allowed after a step or a load broke off.

===========  =========================================================  ======  =======  ====
state        optimizer states and parameters                            read    publish  step
===========  =========================================================  ======  =======  ====
SOUND        all are of one step                                        yes     yes      yes
INTERRUPTED  there is one rank: the states are of a step that broke     yes     yes      yes
             off, some parameters of the step before
DIVERGED     there are other ranks: states and parameters as in         yes     no       no
             INTERRUPTED, and other ranks will not send theirs again
LOST         all are of one step; another rank was lost between steps   yes     yes      no
TORN         a load broke off: some are old, some the checkpoint's; or  no      no       no
             a step broke off: states are of two steps
GONE         another rank was lost: some are of one step, others of     no      no       no
             another
===========  =========================================================  ======  =======  ====

In state INTERRUPTED, the next step or flush sends the parameters again. A load repairs DIVERGED and TORN, because a
load replaces all states. Nothing repairs LOST and GONE.

In each state the device's parameters may be *released* (have no memory on the device). Then only ``read`` is allowed.
"""

from enum import Enum

from ..errors import CollectiveError, StateError
from ..support.state_machine import StateMachine


class Health(Enum):
    SOUND = "sound"
    INTERRUPTED = "interrupted"
    DIVERGED = "diverged from other ranks"
    LOST = "without a rank that was lost"
    TORN = "torn"
    GONE = "gone"


class HealthEvent(Enum):
    PUBLISH = "begin a step or a flush"
    INTERRUPT = "break off on the only rank"
    DIVERGE = "break off on this rank alone"
    LOSE_RANK = "lose a rank between two steps"
    LOSE_RANK_IN_UPDATE = "lose a rank in an update"
    LOAD = "begin a load"
    TEAR = "break off a load, or lose an update"


class Use(Enum):
    READ = "wait for the last step, read states"
    PUBLISH = "send parameters"
    STEP = "add gradients, step"


H, HE = Health, HealthEvent
HEALTH: dict[tuple[Health, HealthEvent], Health] = {
    (H.SOUND, HE.PUBLISH): H.SOUND,
    (H.INTERRUPTED, HE.PUBLISH): H.SOUND,
    (H.LOST, HE.PUBLISH): H.LOST,
    (H.SOUND, HE.INTERRUPT): H.INTERRUPTED,
    (H.INTERRUPTED, HE.INTERRUPT): H.INTERRUPTED,
    (H.SOUND, HE.DIVERGE): H.DIVERGED,
    (H.DIVERGED, HE.DIVERGE): H.DIVERGED,
    (H.SOUND, HE.LOSE_RANK): H.LOST,
    (H.INTERRUPTED, HE.LOSE_RANK): H.LOST,
    **{(state, HE.LOSE_RANK_IN_UPDATE): H.GONE for state in H},
    (H.SOUND, HE.LOAD): H.SOUND,
    (H.INTERRUPTED, HE.LOAD): H.INTERRUPTED,
    (H.DIVERGED, HE.LOAD): H.SOUND,
    (H.TORN, HE.LOAD): H.SOUND,
    (H.LOST, HE.LOAD): H.LOST,
    (H.GONE, HE.LOAD): H.GONE,
    **{(state, HE.TEAR): H.TORN for state in (H.SOUND, H.INTERRUPTED, H.DIVERGED, H.TORN)},
    (H.LOST, HE.TEAR): H.GONE,
    (H.GONE, HE.TEAR): H.GONE,
}

REFUSED: dict[Use, frozenset[Health]] = {
    Use.READ: frozenset({H.TORN, H.GONE}),
    Use.PUBLISH: frozenset({H.TORN, H.GONE, H.DIVERGED}),
    Use.STEP: frozenset({H.TORN, H.GONE, H.DIVERGED, H.LOST}),
}


class PipelineHealth(StateMachine[Health, HealthEvent]):
    """The health of one pipeline, and the reason why it is not SOUND."""

    def __init__(self) -> None:
        super().__init__("optimizer", H.SOUND, HEALTH)
        self._reason = ""
        self.released = ""
        """The error message of uses that need the device parameters while the parameters have no memory on the device.
        Empty while they have memory."""

    def on(self, event: HealthEvent, reason: str = "") -> None:
        """Move to the state after ``event``.

        Args:
            reason: the error message of uses that are refused from now on; empty: keep the present message.
        """
        super().on(event)
        self._reason = reason or self._reason

    def check(self, use: Use) -> None:
        """Raise an error if this use is refused.

        Raises:
            CollectiveError: the state is LOST.
            StateError: another state refuses the use, or parameters are released.
        """
        if self.state in REFUSED[use]:
            raise (CollectiveError if self.state is H.LOST else StateError)(self._reason)
        if self.released and use is not Use.READ:
            raise StateError(self.released)

    def where(self) -> str:
        """Return the state, the allowed uses and the last error, as a line for a user who waits."""
        state = self.state
        allowed = [use.value for use in Use if state not in REFUSED[use] and (use is Use.READ or not self.released)]
        if state in REFUSED[Use.STEP] and HEALTH[state, HealthEvent.LOAD] is Health.SOUND:
            allowed.append("load a checkpoint, which repairs this")
        said = [f"health: {state.value}", f"allowed: {'; '.join(allowed) or 'nothing'}"]
        return ". ".join([*said, *filter(None, [self.released, self._reason and f"last error: {self._reason}"])])

    @property
    def lost_a_rank(self) -> bool:
        """True if another rank was lost, so that ranks can exchange nothing."""
        return self.state in (H.LOST, H.GONE)

    @property
    def usable(self) -> bool:
        """True if a step may follow."""
        return self.state not in REFUSED[Use.STEP]
