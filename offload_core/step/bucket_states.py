"""The states of a bucket in a step: three state machines, each one table.

**Gradient**: from the device to the update.

==========  ===========================================================================
state       memory that is alive
==========  ===========================================================================
ABSENT      no gradient
FILLING     device gradients of some parameters; host gradients of earlier micro-steps
TRAVELLING  the bucket in flight to its owners' host memory
LANDED      host gradients
USED        host gradients, which an update reads; none after an early update has read them
==========  ===========================================================================

A rank without a gradient also takes part in a bucket's reduction. Gradients may be dropped until an update uses them.
An early update (``early_publish.py``) leaves them USED until its step comes.

**Publication**: the device parameters, compared with the rounded master weights. If some parameters of a bucket are
sent early, ``BucketPublication.stale`` still names the stale ones among the others.

========  =============================================================================
state     device parameters
========  =============================================================================
CURRENT   equal the rounded master weights
STALE     are of an older step, or of no step: the master weights must be sent
SENT      are in flight, or have arrived and nobody has waited for them
EARLY     were sent for a step that has not come
RELEASED  have no memory: nothing may be sent
========  =============================================================================

**Ownership**: the thread that may touch the bucket.

======  ===============================================================================
CALLER  the thread that calls the pipeline
WORKER  the pipeline's worker, until the caller has waited for the task that it gave
======  ===============================================================================

Updates that send parameters do not change the owner. The worker gets them all together, and the caller waits for the
last one before it takes the first gradient of the next step.

**In flight**: tasks that somebody has yet to wait for. They are fields of ``LocalBucket`` and ``BucketPublication`` and
not states, because each is an object to wait for.

=======  ==============================================================================
field    set from, until
=======  ==============================================================================
owed     the step begins, until the states are updated; after a failure such states are updated, and nothing is sent
written  the parameters are sent, until somebody has waited for their arrival
arrived  the worker is asked to wait for the arrival, until somebody has waited for that task
updated  an update that sends nothing is asked for, until somebody has waited for it
=======  ==============================================================================
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
