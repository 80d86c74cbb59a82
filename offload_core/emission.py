"""Parameters that are *emitted*: sent to the device in backward, for a step that is still to come.

The step is announced with its arguments before the first gradient (:meth:`Emission.announce`), and each bucket is sent
as it is launched (:meth:`Emission.launched`). It comes as announced (:meth:`Emission.settle`), or what was sent is
recalled: those parameters are of no step until they are sent again.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from .buckets import LocalBuckets
from .local_bucket import LocalBucket
from .step_state import BucketEvent, BucketState
from .updates import Scalars, Updates


class Announcement(NamedTuple):
    """The step that ends this micro-step."""

    terms: tuple[Any, ...]
    """What it is called with, and the loss scale."""
    scalars: Scalars
    tensors: Sequence[Any]
    emitted: Callable[[Iterable[int]], None]
    """Told of parameters before they are written."""


class Emission:
    """What this rank has emitted since the last step."""

    def __init__(self, buckets: LocalBuckets, updates: Updates) -> None:
        self._buckets = buckets
        self._updates = updates
        self.announced: Announcement | None = None
        self.emitting: dict[LocalBucket, None] = {}
        """Buckets that were to be emitted for the next step, in the order in which they were launched."""
        self.recalled: set[LocalBucket] = set()
        """Buckets whose parameters are those of no step."""
        self.tensors: Sequence[Any] = ()
        """All parameters, as they were announced last."""

    def announce(self, announced: Announcement) -> None:
        """Have buckets emitted from now on."""
        self.announced, self.tensors = announced, announced.tensors
        self._updates.emits = lambda: True

    def launched(self, work: LocalBucket, full: bool, *, tentatively: bool) -> None:
        """A bucket was launched: have it emitted if a step was announced and all its gradients are there (``full``).

        Args:
            tentatively: leave the states to the step.
        """
        announced, scalars = self.announced, None
        known = max(work.members) < len(self.tensors)  # a parameter may have been added since
        if announced is not None and full and known and self._updates.emits():
            self.emitting[work] = None
            announced.emitted(work.members)
            scalars = announced.scalars
        if scalars is not None or self._buckets.device.world_size > 1:
            self._updates.emit(work, scalars, self.tensors, tentatively=tentatively)

    def differs(self, terms: tuple[Any, ...]) -> bool:
        """Whether a step was announced with other terms."""
        return self.announced is not None and self.announced.terms != terms

    def of(self, params: Collection[int] | None) -> list[LocalBucket]:
        """The emitted buckets that hold any of these parameters; None: all."""
        return [work for work in self.emitting if params is None or not work.members.isdisjoint(params)]

    def holds(self, param: int) -> bool:
        """Whether the parameter may have been written for a step that is still to come, or that will not."""
        return any(work in self.emitting or work in self.recalled for work in self._buckets.of[param])

    def stop(self) -> None:
        """Emit nothing more; what was asked for already may be on its way."""
        self._updates.emits = lambda: False

    def recall(self) -> None:
        """What was emitted, and has been written, counts no more."""
        for work in self.emitting:
            if work.life.state is BucketState.EMITTED:
                work.life.on(BucketEvent.RECALL)
                work.behind |= work.members
                self.recalled.add(work)
        self.emitting.clear()

    def settle(self) -> None:
        """The step has come."""
        self.announced = None
        self.emitting.clear()
        self.recalled.clear()

    def abort(self, lost: set[LocalBucket]) -> None:
        """The step broke off; ``lost`` are buckets whose parameters may not have been written."""
        if self._buckets.emits:
            half_done = (BucketState.EMITTED, BucketState.UPDATING, BucketState.UPDATED)
            lost = lost.union(work for work in self._buckets.all if work.life.state in half_done)
            for work in lost:
                work.behind |= work.members
            self.recalled |= lost
        self.announced = None
        self.emitting.clear()
