"""Early publishing: new parameters are sent to the device during backward, before their step."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from ..errors import StateError
from ..support.threads import RUNNING_SECTIONS
from .announced import Announced, Announcement
from .arrivals import UNUSED, Arrivals
from .bucket_states import Publication
from .buckets import LocalBuckets
from .counts import UpdateCounts
from .decision import StepArguments
from .last_step import LastStep
from .loss_scale import LossScaler
from .state_lock import StateLock
from .update import Updates


@dataclass(eq=False)
class EarlyPublish:
    """Announces and confirms a step, and recalls parameters that were sent early for this step."""

    _buckets: LocalBuckets
    _arrivals: Arrivals
    _updates: Updates
    _announced: Announced
    _last_step: LastStep
    _counts: UpdateCounts
    _scaler: LossScaler | None
    _state_lock: StateLock

    @property
    def has_begun(self) -> bool:
        """True if this rank was asked to update or send a bucket for a step that has not come."""
        return bool(self._announced.requested)

    def expect_step(
        self, arguments: StepArguments, before_send: Callable[[Collection[int]], None] = lambda params: None
    ) -> None:
        """Announce the :meth:`Pipeline.step` that ends this micro-step, before the micro-step's first gradient.

        With ``update_in_backward``, each bucket's parameters may then be written as soon as all gradients of the bucket
        have arrived. An error between this call and the step is an error in mid-update.

        Args:
            arguments: the arguments with which :meth:`Pipeline.step` will be called.
            before_send: called with the parameters of a bucket before the bucket is sent. Readers of these parameters
                must wait from then on. Each method that may launch a bucket may call ``before_send``, in its caller's
                thread.
        """
        assert self._state_lock.changing.locked()
        terms, verdict = self._buckets.terms, self._last_step.verdict
        begun = self._arrivals.holds_gradients and self._arrivals.per_update == 1
        interfered = verdict is not None and verdict.interferes  # a clipped step often follows another
        if not terms.sends_early or begun or not self._arrivals.at_boundary or interfered:
            return
        self.recall()
        given = arguments.complete(self._buckets.params, self._scaler)
        scalars = self._counts.scalars(given, range(len(self._buckets.params)), 1.0 / given.unscale)
        self._announced.step = Announcement(given, scalars, before_send)
        self._announced.tensors = given.tensors

    def confirm_step(self, arguments: StepArguments) -> None:
        """Confirm that the announced step has come, and give its arguments to buckets that are launched from now on, at
        the end of the micro-step.

        If parameters were already sent with other arguments, the announcement keeps its arguments, and
        :meth:`Pipeline.step` recalls the parameters.

        Raises:
            StateError: states were updated with other arguments.
        """
        announced = self._announced
        if announced.step is None:
            return
        given = self.check_expected(arguments)
        if not (announced.requested and announced.differs(given)):
            scalars = self._counts.scalars(given, range(len(self._buckets.params)), 1.0 / given.unscale)
            announced.step.given, announced.step.scalars, announced.tensors = given, scalars, given.tensors

    def check_expected(self, arguments: StepArguments) -> StepArguments:
        """Return these arguments of :meth:`Pipeline.step`, with the groups and the loss scale filled in.

        Raises:
            StateError: states were updated with other arguments.
        """
        given, announced = arguments.complete(self._buckets.params, self._scaler), self._announced
        if announced.requested and not self._buckets.terms.examines and announced.differs(given):
            raise StateError(
                "hyperparameters, parameter groups or the loss's share changed between backward() and step(), and "
                "update_in_backward=True has used them; expected them as they were: set them back, or before backward()"
            )
        return given

    def recall(self, params: Collection[int] | None = None, *, by_all: bool = True) -> None:  # waits
        """If one of these parameters was sent early, recall all parameters that were sent early. The step then sends
        them again.

        Args:
            params: the parameters to look for; None: all.
            by_all: True if all ranks call this. Then all ranks raise, or none does. False if only a rank without a
                gradient calls this.

        Raises:
            StateError: early sends also update states (``BucketTerms.updates_early``) and cannot be recalled.
        """
        assert self._state_lock.changing.locked() or RUNNING_SECTIONS
        announced = self._announced
        touched = [bucket for bucket in announced.requested if params is None or not bucket.members.isdisjoint(params)]
        terms = self._buckets.terms
        alike = by_all and params is None and self._buckets.device.world_size > 1
        if alike and announced.step is not None and terms.updates_early:
            touched = touched or [
                bucket for bucket in self._arrivals.order if bucket.gradient.state in UNUSED
            ]  # all raise
        if not touched:
            return
        if not terms.examines:
            name = self._buckets.params[min(touched[0].members)].name
            raise StateError(
                f"parameter {name!r}: its gradient has been used, for update_in_backward=True; "
                "expected engine.step() next, or engine.close(): set update_in_backward=False to discard gradients, to "
                "add to them or to read parameters before it"
            )
        if announced.step is not None:
            announced.step.stop()
        self._last_step.wait(self._updates.finish_publications)
        announced.recall()

    def stop(self) -> None:
        """Stop early sends for the announced step, and recall parameters that were sent early.

        Raises:
            StateError: a step was announced, and early sends also update states (``BucketTerms.updates_early``). All
                ranks raise this, or none does.
        """
        assert self._state_lock.changing.locked()
        announced = self._announced.step
        if announced is not None and self._buckets.terms.updates_early:
            raise StateError(
                "a gradient is read or written between backward() and step(), and update_in_backward=True has used "
                "gradients there; expected update_in_backward=False, or gradient_clipping, with which updates wait for "
                "step()"
            )
        self.recall()
        if announced is not None:
            announced.stop()

    def undo(self) -> None:  # waits
        """Undo early sends: recall the parameters, send the parameters of the last step, and wait for their arrival.

        All processes call this alike.

        Raises:
            StateError: early sends also update states (``BucketTerms.updates_early``) and cannot be recalled.
        """
        assert self._state_lock.changing.locked()
        self.recall()
        if self._announced.recalled:
            self._last_step.flush(self._announced.tensors)

    def holds(self, param: int) -> bool:
        """True if this parameter was sent early and its step is still pending or was cancelled."""
        if not self._buckets.terms.sends_early:
            return False
        requested = self._announced.requested
        return any(
            bucket in requested or bucket.publication.state is Publication.STALE for bucket in self._buckets.of[param]
        )
