"""Waits for the last step's updates, or breaks the step off."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ..config.state_formats import Master
from ..errors import CollectiveError, StateError
from ..support.threads import RUNNING_SECTIONS, uninterrupted
from .announced import Announced
from .arrivals import Arrivals
from .bucket_states import Gradient, GradientEvent, Publication, PublicationEvent
from .buckets import LocalBuckets
from .counts import UpdateCounts
from .decision import Verdict
from .health import Health, HealthEvent, PipelineHealth, Use
from .local_bucket import LocalBucket, Writes
from .state_lock import StateLock
from .update import Updates


@dataclass(eq=False)
class LastStep:
    """The last call of ``step``. A method that waits for the step's updates raises their error."""

    _buckets: LocalBuckets
    _arrivals: Arrivals
    _updates: Updates
    _announced: Announced
    _counts: UpdateCounts
    _health: PipelineHealth
    _state_lock: StateLock
    verdict: Verdict | None = None
    """The last step's verdict on the gradients; None before the first step."""
    published: Mapping[int, bool] = field(default_factory=dict)
    """Maps each parameter that the last step or flush writes on the device to True, or to False if the step broke off
    before the parameter was completely written. With ``schedule="delayed"`` a step writes the parameters of the step
    before. Empty after the loss of a rank."""
    publications: int = 0
    """The number of steps and flushes that have set :attr:`published`. A caller that was interrupted compares it with
    the number before its call, to see if the call has set :attr:`published`."""

    def begin(self, params: Iterable[int]) -> None:
        """Record that a step or a flush begins, and that it writes these parameters."""
        self.published = dict.fromkeys(params, True)
        self._health.on(HealthEvent.PUBLISH)
        self.publications += 1

    @property
    def stale(self) -> frozenset[int]:
        """The stale parameters: the device's values are older than the master weights."""
        return frozenset().union(*(bucket.publication.stale for bucket in self._buckets.all))

    # --- waiting -------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """True if parameters may still be in flight, or states may still change."""
        return not self._updates.finished

    def finish(self) -> None:  # waits
        """Wait for all of the last step's updates and parameters, and raise their error."""
        assert self._state_lock.changing.locked() or RUNNING_SECTIONS
        self._health.check(Use.READ)
        self.wait(self._updates.finish)

    def finish_publications(self) -> None:  # waits
        """Wait until the last step's parameters are written, and raise its error. States may still be updated."""
        assert self._state_lock.changing.locked()
        self._health.check(Use.READ)
        self.wait(self._updates.finish_publications)

    def flush(self, tensors: Sequence[Any]) -> None:  # waits
        """Send all stale parameters, and wait for their arrival and for all updates."""
        self._health.check(Use.PUBLISH)
        after = self._buckets.device.mark()

        def publish() -> None:
            self.begin(self.stale)
            self._updates.publish(self._buckets.all, list(tensors), after)

        self.change(publish)
        self.finish()

    # --- parameters without memory ---------------------------------------------------------------------

    @property
    def returning(self) -> list[LocalBucket]:
        """The buckets whose parameters :meth:`restore` sends again. Their parameters are copied from the host to the
        device, and the host has master weights for them."""
        sent = [bucket for bucket in self._buckets.all if bucket.writes is Writes.STAGING]
        return [bucket for bucket in sent if bucket.master is not Master.PARAMETER]

    def release(self, reason: str, copies: Mapping[int, np.ndarray]) -> None:
        """Record that parameters lose their memory on the device. Free the device's memory of states. Before the call,
        all parameters have arrived and none is stale.

        Args:
            reason: the error message of uses that need the parameters.
            copies: the states that are on the device (:meth:`Store.copies`).
        """
        self._buckets.store.release(copies)
        for bucket in self._buckets.all:
            bucket.executor.release(bucket)
        for bucket in self.returning:
            bucket.publication.on(PublicationEvent.RELEASE)
        self._health.released = reason

    def restore_states(self) -> None:
        """Copy the states that :meth:`release` freed back to the device."""
        try:
            for bucket in self._buckets.all:
                bucket.executor.restore(bucket)
            self._buckets.store.restore()
        except BaseException:
            for bucket in self._buckets.all:
                bucket.executor.release(bucket)
            raise

    def restore(self, tensors: Sequence[Any]) -> None:
        """Send all released parameters, in forward's order. They have memory on the device again. Readers may wait for
        one parameter."""
        after = self._buckets.device.mark()

        def publish() -> None:
            for bucket in self.returning:
                if bucket.publication.state is Publication.RELEASED:
                    bucket.publication.mark_stale(bucket.members, PublicationEvent.RESTORE)
            self._health.released = ""
            self.begin(self.stale)
            self._updates.publish(reversed(self._buckets.all), list(tensors), after)

        self.change(publish)

    # --- breaking off ----------------------------------------------------------------------------------

    def wait(self, act: Callable[[], None]) -> None:  # waits
        """Call ``act``, which waits for the last step's updates. If an update has failed, break the step off and raise
        the error. If an interrupt ends the wait, the caller can wait again."""
        try:
            act()
        except BaseException as error:
            if isinstance(error, Exception) or self._updates.broke_off:
                uninterrupted(partial(self._abort, error))
            raise

    def change(self, act: Callable[[], None]) -> None:
        """Call ``act`` in one section that no signal interrupts. If ``act`` raises an error, break the step off."""

        def section() -> None:
            try:
                act()
            except BaseException as error:
                self._abort(error)
                raise

        uninterrupted(section)

    def abandon(self) -> bool:
        """End an announced step that will not come. States that were updated for this step stay updated, and the step
        counts.

        Returns:
            False if no states may have been updated for an announced step. Nothing has changed then.
        """
        if not self._announced.has_updated:
            return False
        uninterrupted(partial(self._abort, StateError("the step that update_in_backward=True began does not come")))
        return True

    def lose_gradient(self, error: BaseException) -> None:
        """Record that ``error`` has lost a gradient. If a step is announced, this is an error in mid-update and breaks
        the step off. If an update of the last step has failed, this breaks the last step off."""
        if self._announced.step is not None or self._updates.broke_off:
            uninterrupted(partial(self._abort, error))
        elif isinstance(error, CollectiveError) and not self._health.lost_a_rank:
            self._health.on(HealthEvent.LOSE_RANK, str(error))

    def _abort(self, error: BaseException) -> None:  # waits
        """Break the step off: complete its updates of states, discard all gradients, and mark the parameters that were
        not written as stale."""
        buckets, device, health = self._buckets, self._buckets.device, self._health
        if isinstance(error, CollectiveError):  # other ranks may not have made this update
            health.on(
                HealthEvent.LOSE_RANK_IN_UPDATE,
                f"the last update broke off ({error}): some parameters and states are of one step, others of "
                "the next; expected no further use: resume from the last checkpoint",
            )
        buckets.recover()
        announced, used = self._announced.step, self._announced.end()
        if announced is not None and used:  # their states have had the update: count it
            self._counts.count(frozenset().union(*(bucket.publication.sent_early for bucket in used)))
        lost = self._updates.forget()
        lost.update(
            bucket
            for bucket in buckets.all
            if bucket.publication.state is Publication.EARLY or bucket.gradient.state is Gradient.USED
        )
        completed = self._complete(error)
        if (lost or completed) and health.state not in (Health.LOST, Health.GONE, Health.TORN):
            if device.world_size == 1:
                health.on(HealthEvent.INTERRUPT, f"the last update broke off ({error!r})")
            elif device.world_size > len(device.ranks):  # other processes will not send their parameters again
                health.on(
                    HealthEvent.DIVERGE,
                    f"the last update broke off on this rank alone ({error}): its states are of that step, some "
                    "of its parameters of the step before; expected no further step: resume from the last checkpoint",
                )
        self._arrivals.begin()
        for bucket in buckets.all:
            bucket.take()
            bucket.publication.written = bucket.owed = None
            bucket.gradient.forget(GradientEvent.ABORT)
            if bucket in lost and bucket.master is Master.SEPARATE:
                bucket.publication.mark_stale(bucket.members, PublicationEvent.LOSE)
            elif bucket.publication.state is Publication.SENT:
                bucket.publication.on(PublicationEvent.ARRIVE)
            elif bucket.publication.state is Publication.EARLY:  # its parameters are a part of their master weights
                bucket.publication.confirm()
            elif bucket in completed and bucket.writes is Writes.STAGING:
                bucket.publication.mark_stale(bucket.members)
        if health.lost_a_rank:
            self.published = {}  # parameters are of the step before, except where they were written in place
        else:
            stale = self.stale
            self.published = {param: param not in stale for param in self.published}

    def _complete(self, error: BaseException) -> list[LocalBucket]:
        """After ``error``, update the states of each bucket whose update is due. Return these buckets; an empty list if
        a rank was lost or an update fails."""
        if self._health.lost_a_rank:
            return []
        try:
            return self._updates.complete()
        except BaseException as second:
            self._health.on(
                HealthEvent.TEAR,
                f"the last update broke off ({error!r}) and could not be completed ({second!r}): some states are of "
                "one step, others of the next; expected a checkpoint to be loaded next",
            )
            return []
