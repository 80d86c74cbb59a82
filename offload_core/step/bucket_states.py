"""The states of a bucket in a step: three state machines, each one table.

**Gradient**: from the device to the update.

==========  ===============================================================================================
state       gradients of the bucket that are in memory
==========  ===============================================================================================
ABSENT      none
FILLING     gradients of some parameters on the device; sums of earlier micro-steps on the host
TRAVELLING  gradients in flight to the host memory of their owners
LANDED      gradients on the host
USED        gradients on the host, which an update reads; none once an early update has read them
==========  ===============================================================================================

A rank without a gradient also takes part in a bucket's reduction. Gradients may be dropped until an update uses them.
After an early update (``early_publish.py``) the bucket stays USED until the step comes.

**Publication**: the device parameters, compared with the rounded master weights. If only some parameters of a bucket
are sent early, other parameters of the bucket may be stale: ``BucketPublication.stale`` lists the stale parameters.

========  =================================================================================================
state     device parameters
========  =================================================================================================
CURRENT   equal the rounded master weights
STALE     are of an older step, or mix two steps: the master weights must be sent
SENT      are in flight, or have arrived, and nobody has waited for their arrival
EARLY     were sent for a step that has not come
RELEASED  have no memory: nothing may be sent
========  =================================================================================================

**Ownership**: the thread that may touch the bucket.

======  ===================================================================================================
CALLER  the thread that calls the pipeline
WORKER  the pipeline's worker, until the caller has waited for the task that the caller gave to the worker
======  ===================================================================================================

A step's updates that send parameters do not change the owner. The caller gives the worker all these updates together,
and waits for the last update before it takes the first gradient of the next step.

**In flight**: tasks that nobody has waited for yet. They are fields of ``LocalBucket`` and ``BucketPublication`` and
not states, because each is an object to wait for.

=======  ==================================================================================================
field    set from, until
=======  ==================================================================================================
owed     the update is due, until the states are updated (after a failure they are updated without a send)
written  the parameters are sent, until somebody has waited for their arrival
arrived  the worker gets the task that waits for the arrival, until somebody has waited for this task
updated  the worker gets an update that sends nothing, until somebody has waited for this update
=======  ==================================================================================================
"""

from ..support.state_machine import Named


class Gradient(Named):
    ABSENT = "absent"
    FILLING = "filling"
    TRAVELLING = "travelling"
    LANDED = "landed"
    USED = "used"


class GradientEvent(Named):
    ADD = "add a gradient"
    LAUNCH = "launch"
    LAND = "land"
    USE = "use"
    END = "end of the step"
    DROP = "drop"
    ABORT = "abort"


class Publication(Named):
    CURRENT = "current"
    STALE = "stale"
    SENT = "sent"
    EARLY = "sent early"
    RELEASED = "released"


class PublicationEvent(Named):
    GO_STALE = "be older than the master weights"
    SEND = "send"
    ARRIVE = "arrive"
    SEND_EARLY = "send early"
    CONFIRM = "confirm"
    RECALL = "recall"
    LOSE = "lose"
    RELEASE = "release"
    RESTORE = "restore"


class Owner(Named):
    CALLER = "the caller's"
    WORKER = "the worker's"


class OwnerEvent(Named):
    GIVE = "give to the worker"
    TAKE = "take back"


G, GE = Gradient, GradientEvent
GRADIENT: dict[tuple[Gradient, GradientEvent], Gradient] = {
    (G.ABSENT, GE.ADD): G.FILLING,
    (G.FILLING, GE.ADD): G.FILLING,
    (G.LANDED, GE.ADD): G.FILLING,
    (G.ABSENT, GE.LAUNCH): G.TRAVELLING,
    (G.FILLING, GE.LAUNCH): G.TRAVELLING,
    (G.LANDED, GE.LAUNCH): G.TRAVELLING,
    (G.TRAVELLING, GE.LAND): G.LANDED,
    (G.LANDED, GE.USE): G.USED,
    (G.USED, GE.END): G.ABSENT,
    (G.ABSENT, GE.DROP): G.ABSENT,
    (G.FILLING, GE.DROP): G.ABSENT,
    (G.TRAVELLING, GE.DROP): G.ABSENT,
    (G.LANDED, GE.DROP): G.ABSENT,
    **{(state, GE.ABORT): G.ABSENT for state in G},
}

P, PE = Publication, PublicationEvent
PUBLICATION: dict[tuple[Publication, PublicationEvent], Publication] = {
    (P.CURRENT, PE.GO_STALE): P.STALE,
    (P.STALE, PE.GO_STALE): P.STALE,
    (P.SENT, PE.GO_STALE): P.STALE,
    (P.CURRENT, PE.SEND): P.SENT,
    (P.STALE, PE.SEND): P.SENT,
    (P.SENT, PE.SEND): P.SENT,  # some parameters rounded, then others updated
    (P.SENT, PE.ARRIVE): P.CURRENT,
    (P.CURRENT, PE.ARRIVE): P.CURRENT,  # an interrupt cut the first wait for it short
    (P.STALE, PE.ARRIVE): P.STALE,
    (P.EARLY, PE.ARRIVE): P.EARLY,
    (P.CURRENT, PE.SEND_EARLY): P.EARLY,
    (P.STALE, PE.SEND_EARLY): P.EARLY,
    (P.EARLY, PE.CONFIRM): P.SENT,
    (P.EARLY, PE.RECALL): P.STALE,
    **{(state, PE.LOSE): P.STALE for state in P if state is not P.RELEASED},
    (P.CURRENT, PE.RELEASE): P.RELEASED,
    (P.RELEASED, PE.RESTORE): P.STALE,
}

W, WE = Owner, OwnerEvent
OWNER: dict[tuple[Owner, OwnerEvent], Owner] = {
    (W.CALLER, WE.GIVE): W.WORKER,
    (W.WORKER, WE.GIVE): W.WORKER,
    (W.WORKER, WE.TAKE): W.CALLER,
    (W.CALLER, WE.TAKE): W.CALLER,
}
