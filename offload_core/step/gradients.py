"""The gradients of one process between two updates: from a backward to their owner's host memory.

:meth:`Gradients.add` -> its bucket fills (``arrivals.py``) and is launched (``reduction.py``: the device reduces it
over the ranks and brings it to its owner's host memory). There it waits, or is added to the gradients of earlier
micro-steps.
"""

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from ..errors import StateError
from ..support.threads import RUNNING_SECTIONS
from .announced import Announced
from .arrivals import Arrivals
from .buckets import LocalBuckets
from .counts import UpdateCounts
from .decision import StepArguments, StepReport
from .early_publish import EarlyPublish
from .health import Health, PipelineHealth, Use
from .last_step import LastStep
from .loss_scale import LossScaler
from .reduction import Reduction
from .state_lock import StateLock
from .update import Updates


@dataclass(eq=False)
class Gradients:
    """Takes gradients, and says which have come since the last update."""

    _buckets: LocalBuckets
    _arrivals: Arrivals
    _reduction: Reduction
    _updates: Updates
    _announced: Announced
    _early: EarlyPublish
    _last_step: LastStep
    _counts: UpdateCounts
    _scaler: LossScaler | None
    _health: PipelineHealth
    _state_lock: StateLock

    # --- what came -----------------------------------------------------------------------------------

    @property
    def are_waiting(self) -> bool:
        """True if gradients came since the last update, here or on another rank."""
        return self._arrivals.holds_gradients

    def have(self, param: int) -> bool:
        """True if the parameter had a gradient since the last update, on this rank."""
        return param in self._arrivals.since.present

    @property
    def had_backward(self) -> bool:
        """True if all ranks had a backward in this micro-step; this one may have had no gradient in it."""
        return self._arrivals.since.backward

    @property
    def micro_steps(self) -> int:
        """The micro-steps that have ended since the last update."""
        return self._arrivals.since.micro_steps

    @property
    def at_boundary(self) -> bool:
        """True if an update is due at the end of this micro-step."""
        return self._arrivals.at_boundary

    @property
    def are_read_in_place(self) -> bool:
        """True if an update reads gradients where they are: they stay as they are until then, all at once."""
        return self._buckets.terms.direct

    def divisor(self, *, average: bool = True) -> float:
        """As :meth:`Arrivals.divisor`."""
        return self._arrivals.divisor(average=average)

    # --- backward ------------------------------------------------------------------------------------

    def check(self, param: int, gradient: Any) -> None:
        """As :meth:`Reduction.check`."""
        self._reduction.check(param, gradient)

    def settle_separately(self, params: Collection[int]) -> None:
        """Have these parameters, and no others, be settled by :meth:`settle` from now on. No gradient has come since
        the last update."""
        self._arrivals.settle_separately(params)

    def begin_backward(self) -> None:
        """A backward begins, on all of several ranks alike. What came in the one before, in this micro-step, leaves."""
        assert self._state_lock.changing.locked()
        if self._arrivals.since.backward and self._backwards_are_rounds:
            self._take_late()
            self._begin_round()
            self._arrivals.since.backward = False  # last: whoever is interrupted here and tries again ends the round

    def end_backward(self) -> None:
        """A backward has ended, on all of several ranks alike; this one may have had no gradient in it."""
        assert self._state_lock.changing.locked()
        self._begin_gradients()
        self._arrivals.end_backward(has_round=self._backwards_are_rounds)

    @property
    def _backwards_are_rounds(self) -> bool:
        """True if each backward has a round of its own. Where parameters are sent early, those of a step share one."""
        return not (self._buckets.terms.sends_early and self._arrivals.at_boundary)

    def add(self, gradients: Mapping[int, Any]) -> None:
        """Take gradients of this micro-step, by parameter, which they fit (:meth:`Reduction.check`).

        Further ones of a parameter before the next update are summed in fp32. Where the device is addressable they are
        not copied: they must stay as they are until the update.
        """
        assert self._state_lock.changing.locked()
        self._begin_gradients()
        if before := self._arrivals.out_of_aside(gradients):
            self._take(before)
        if now := self._arrivals.put_aside(gradients):
            self._take(now)

    def settle(self, params: Collection[int], *, ended: bool = False) -> Set[int]:
        """No gradient of these parameters is to come in this backward, besides those that came.

        All ranks call it alike: at the same points of backward, with the same parameters. It concerns those whose
        gradients may come on some ranks alone (:attr:`ParamSpec.settled_with`), and no others.

        Args:
            ended: the backward has ended.

        Returns:
            Those of them that are not settled before the backward has ended: a gradient of theirs came too late once.
        """
        assert self._state_lock.changing.locked()
        late = frozenset[int]() if ended else self._arrivals.late(params)
        given, without = self._arrivals.settled([param for param in params if param not in late])
        if given or without:
            self._begin_gradients()
            self._take(given, without)
        if ended:
            self._take_late()
        return late

    def _take(self, gradients: Mapping[int, Any], without: Set[int] = frozenset()) -> None:
        """Fill in gradients, and launch what is full; ``without``: parameters that are settled without one."""
        params = gradients.keys() | without if without else gradients.keys()
        arrivals = self._arrivals
        if self._announced.asked and self._buckets.device.world_size == 1:
            self._early.recall(params)
        if arrivals.since.round is None or arrivals.has_left(params):
            self._begin_round()
        try:
            if arrivals.fill(gradients, without):
                self._launch()
        except BaseException as error:
            self._last_step.lose_gradient(error)
            raise

    def _begin_round(self) -> None:
        """Gradients of another round come. All ranks call it alike; they exchange every bucket again."""
        if self._announced.asked and self._buckets.device.world_size > 1:
            self._early.recall()
        if self._arrivals.since.round is not None:
            try:
                self._end_round()
            except BaseException as error:
                self._last_step.lose_gradient(error)
                raise

    def _begin_gradients(self) -> None:
        """Before a step's first gradient, wait until parameters are written: ranks exchange one thing at a time."""
        present = self._arrivals.since.present
        if not present or self._health.state is Health.LOST:
            self._health.check(Use.STEP)
        if not present and self._updates.publishes and not self._arrivals.has_begun:
            self._last_step.finish_publications()

    def _launch(self, *, ending: bool = False, boundary: bool = False) -> None:
        """Launch the buckets whose turn it is; at the boundary, have their parameters sent early."""
        terms = self._buckets.terms
        for work in self._arrivals.ready(ending=ending):
            at_boundary = self._arrivals.at_boundary
            present = self._reduction.launch(work, examine=self._buckets.terms.examines and at_boundary)
            if at_boundary and terms.sends_early:
                # Among ranks a full bucket may hold parameters that are settled without a gradient on this one.
                last = terms.lends_gradient_memory and (boundary or not ending)
                self._announced.follow(work, present, last=last, keep_states=self._buckets.terms.examines)

    def _take_late(self) -> None:
        """Take what nobody has settled: all ranks have it, or none."""
        if left := self._arrivals.out_of_aside():
            self._take(left)

    def _end_round(self, *, boundary: bool = False) -> None:
        self._launch(ending=True, boundary=boundary)
        self._arrivals.end_round()

    def reduce_now(self) -> None:
        """Launch all gradients that came so far. Those of a bucket may still be on their way when it returns.

        Gradients that come before the next update are added to them. Parameters that were sent early are recalled. All
        ranks call it alike, after a backward that brought each of them a gradient, and all go on alike: with another
        backward, or with the end of the micro-step, which then finds nothing left to reduce.

        Raises :class:`StateError` where ``update_in_backward`` has updated states.
        """
        assert self._state_lock.changing.locked()
        self._health.check(Use.STEP)
        self._early.call_off()
        self._launch_rest()

    def _launch_rest(self) -> None:
        """Launch every bucket that was not launched in this round, which goes on: a parameter that is taken on now may
        still have its gradient in it."""
        try:
            self._take_late()
            self._launch(ending=True, boundary=self._buckets.terms.updates_early)
        except BaseException as error:
            self._last_step.lose_gradient(error)
            raise

    def reduce_first(self) -> None:
        """Reduce the gradients that came, on all ranks alike, before anything else is exchanged or forgotten.

        Where updates are made during backward, those of the buckets that are launched now are made, too.
        """
        if self._buckets.device.world_size > 1 and self._arrivals.holds_gradients:
            reduce = self._launch_rest if self._buckets.terms.updates_early else self.reduce_now
            self._state_lock.change("an exchange between ranks", reduce)

    def drop(self, params: Sequence[int] | None = None) -> None:
        """Forget the gradients of these parameters, or of all.

        If gradients of other parameters are kept and one was lost on its way, its error is raised and nothing is
        forgotten. :meth:`EarlyPublish.withdraw` brings back parameters that were sent early.
        """
        assert self._state_lock.changing.locked() or RUNNING_SECTIONS
        if not self._arrivals.holds_gradients:
            return
        try:
            present = self._arrivals.since.present
            self._early.recall(params if params is None else [param for param in params if param in present])
        except StateError:
            raise
        except Exception:  # all gradients go, so it does not matter that some were lost
            if params is not None:
                raise
        if params is not None:
            self._arrivals.drop(params)
        else:
            self._announced.end()
            self._arrivals.drop_all()

    def discard_all(self) -> bool:  # waits
        """Forget all gradients, on all ranks alike, and have parameters that were sent early as they were before. Ranks
        that leave out other parameters reduce first: one has begun exchanges that the others have not.

        Returns:
            True if parameters are behind their states: :meth:`Pipeline.flush` sends them.
        """
        if self._health.usable:
            self.reduce_first()
        self.drop()
        self._early.withdraw()
        return self._health.state is Health.BEHIND

    def end_micro_step(
        self, *, reduce: bool = True, boundary: bool | None = None, arguments: StepArguments | None = None
    ) -> StepReport | None:
        """End a micro-step. Return its report if no update follows; None at the boundary, where one is due.

        No gradient on the device is then needed any longer, if this was not the boundary.

        Args:
            reduce: False where no gradient was added, on any rank alike: the ranks need not meet.
            boundary: True or False from a caller that counts itself; None: as ``gradient_accumulation_steps`` says.
            arguments: of a step that was announced (:meth:`EarlyPublish.expect_step`) and follows now.
        """
        assert self._state_lock.changing.locked()
        if arguments is not None and self._announced.step is not None:
            self._early.confirm_step(arguments)
        boundary = self._arrivals.at_boundary if boundary is None else boundary
        if reduce or self._arrivals.since.backward:
            self._begin_gradients()
            if self._arrivals.since.round is None:
                self._early.recall(by_all=False)
            try:
                self._take_late()
                self._end_round(boundary=boundary)
            except BaseException as error:
                self._last_step.lose_gradient(error)
                raise
        else:
            self._health.check(Use.STEP)
        self._arrivals.count_micro_step(boundary=boundary)
        if boundary:
            return None
        return StepReport(
            updated=False,
            skipped="accumulating",
            loss_scale=self._scaler.scale if self._scaler else 1.0,
            step=self._counts.updates + 1,
            changes=self._counts.changes.mark,
        )

    # --- the step ------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Have all gradients on the host; one that was lost on its way is an error here, before anything changes."""
        if self._arrivals.since.round is not None:
            self._take_late()
            self._end_round(boundary=True)
        for work in self._buckets.all:
            if work.task is not None:
                self._buckets.claim(work)
