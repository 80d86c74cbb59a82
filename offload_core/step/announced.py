"""A step that is announced during backward, and the buckets that are sent early for this step.

The front end announces the step and its arguments before the first gradient. Each bucket is sent once it was launched
and its gradients have arrived (:meth:`Announced.request`). A parameter that an update writes in place counts as sent.
If the step comes as announced, these parameters become the step's parameters. Otherwise they are recalled: the device
parameters then mix values of two steps, until the step sends the recalled parameters again.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..device.events import WaitedOnce
from ..rules import Scalars
from ..support.threads import uninterrupted
from .bucket_states import Gradient, Publication, PublicationEvent
from .buckets import LocalBuckets
from .decision import StepArguments
from .local_bucket import LocalBucket
from .update import Updates


@dataclass(eq=False)
class Announcement:
    """An announced step, which ends the present micro-step. This object tells if a bucket whose gradients have arrived
    is sent early.

    ============  ==========================================================================
    after         a bucket whose gradients have arrived
    ============  ==========================================================================
    ``__init__``  is sent early
    ``close``     is sent early until the last gradient has arrived, later waits for the step
    ``stop``      waits for the step, always
    ============  ==========================================================================

    Args:
        given: the arguments of the step.
        scalars: the kernel scalars of the step's update.
        before_send: called in the caller's thread with the parameters of a bucket before the bucket is sent early.
    """

    given: StepArguments
    scalars: Scalars
    before_send: Callable[[Collection[int]], None]
    _stopped: bool = False
    _until: WaitedOnce | None = None

    def close(self, until: WaitedOnce) -> None:
        """Record that the step has come. A bucket that the worker reaches after the end of ``until`` is not sent early:
        the step sends it."""
        self._until = until

    def stop(self) -> None:
        """Send no further bucket early. Buckets that were sent before this call may still be in flight."""
        self._stopped = True

    @property
    def open(self) -> bool:
        """True if a bucket whose gradients have arrived is sent early."""
        return not self._stopped and (self._until is None or not self._until.done())


class Announced:
    """The announced step, if any, and the buckets that this rank was asked to send early for that step."""

    def __init__(self, buckets: LocalBuckets, updates: Updates) -> None:
        self._buckets = buckets
        self._updates = updates
        self.step: Announcement | None = None
        self.requested: dict[LocalBucket, None] = {}
        """Buckets that this rank was asked to send for the next step, in the order in which they were launched."""
        self.tensors: Sequence[Any] = ()
        """The device parameters that the last announcement or step was called with."""

    def begin_step(self, tensors: Sequence[Any], last: WaitedOnce) -> None:
        """Begin the step. Buckets are sent early until ``last`` has ended. The step sends all other buckets, in
        forward's order.

        Args:
            tensors: the device parameters.
            last: the arrival of the bucket that was launched last.
        """
        if self._buckets.terms.sends_early:  # else nothing needs the tensors, and JAX's would be kept alive
            self.tensors = tensors
        if self.step is not None:
            self.step.close(last)

    def request(self, bucket: LocalBucket, present: frozenset[int], *, last: bool, keep_states: bool) -> None:
        """Have a launched bucket sent early, once its gradients are on the host, if a step was announced and no
        parameter of the bucket may still get a gradient. All ranks call this alike, because ranks agree on each send.

        Args:
            present: the parameters of the bucket that had a gradient on this rank.
            last: True if the bucket's parameters that are not in ``present`` get no gradient for this step.
            keep_states: True to leave the update of the bucket's states to the step.
        """
        announced, full = self.step, last or present == bucket.members
        known = max(bucket.members) < len(self.tensors)  # a parameter may have been added since
        if not (announced is not None and full and known and announced.open):
            announced = None
        if announced is not None:
            self.requested[bucket] = None
            announced.before_send(present if self._buckets.device.world_size == 1 else bucket.members)
        if announced is not None or self._buckets.device.world_size > 1:
            scalars = None if announced is None else announced.scalars

            def is_open() -> bool:
                return announced is not None and announced.open

            send = partial(
                self._updates.send_early, bucket, present, scalars, self.tensors, is_open, keep_states=keep_states
            )
            if self._buckets.worker.is_asynchronous:
                send()
            else:  # this updates at once, and an interrupt must not leave half an update
                uninterrupted(send)

    def differs(self, given: StepArguments) -> bool:
        """True if a step was announced with other arguments."""
        return self.step is not None and not self.step.given.matches(given)

    @property
    def has_updated(self) -> bool:
        """True if states may have been updated for the announced step, which has not come. Such an update cannot be
        undone."""
        return bool(self.requested) and self._buckets.terms.updates_early

    @property
    def recalled(self) -> bool:
        """True if parameters may be sent early and a bucket is STALE, as after :meth:`recall`."""
        if not self._buckets.terms.sends_early:
            return False
        return any(bucket.publication.state is Publication.STALE for bucket in self._buckets.all)

    def recall(self) -> None:  # waits
        """Mark parameters that were sent early as stale, so that the step sends them again. The caller has waited for
        all sends."""
        for bucket in self.requested:
            if bucket.publication.state is Publication.EARLY and bucket.gradient.state is Gradient.LANDED:
                bucket.publication.mark_stale(bucket.members, PublicationEvent.RECALL)
        self.requested = {}

    def end(self) -> set[LocalBucket]:
        """Forget the announced step, which has come or was cancelled. Return the buckets whose states were updated for
        this step."""
        self.step = None
        self.requested = {}
        early = [bucket for bucket in self._buckets.all if bucket.publication.state is Publication.EARLY]
        return {bucket for bucket in early if bucket.gradient.state is Gradient.USED}
