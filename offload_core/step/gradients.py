"""The gradients of one process between two updates: from a backward to their owner's host memory.

:meth:`Gradients.add` -> the gradient's bucket fills (``arrivals.py``) and is launched (``reduction.py``: the device
reduces the bucket over the ranks and copies it to its owner's host memory). There the gradient waits, or is added to
the gradients of earlier micro-steps.
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
    """Takes gradients, and tells which parameters had a gradient since the last update."""

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

    # --- gradients since the last update -------------------------------------------------------------

    @property
    def are_waiting(self) -> bool:
        """True if gradients came since the last update, here or on another rank."""
        return self._arrivals.holds_gradients

    def have(self, param: int) -> bool:
        """True if the parameter had a gradient since the last update, on this rank."""
        return param in self._arrivals.since.present

    @property
    def had_backward(self) -> bool:
        """True if all ranks had a backward in this micro-step. This rank may have had no gradient."""
        return self._arrivals.since.backward

    @property
    def micro_steps(self) -> int:
        """The micro-steps that have ended since the last update."""
        return self._arrivals.since.micro_steps

    @property
    def per_update(self) -> int:
        """The micro-steps of an update, as ``gradient_accumulation_steps`` says now."""
        return self._arrivals.per_update

    @property
    def at_boundary(self) -> bool:
        """True if an update is due at the end of this micro-step."""
        return self._arrivals.at_boundary

    @property
    def are_read_in_place(self) -> bool:
        """True if an update reads gradients in place. All must then stay in memory, unchanged, until the update."""
        return self._buckets.terms.direct

    def check_none(self, what: str, *, waiting: bool) -> None:
        """Raise :class:`StateError` if no step may follow, or gradients wait for an update here or, if ``waiting``,
        in the front end."""
        self._health.check(Use.STEP)
        if waiting or self.are_waiting:
            raise StateError(
                f"{what} while gradients wait for an update; expected it between two updates: after step() at an "
                "accumulation boundary, or after zero_grad() of the optimizer"
            )

    def divisor(self, *, average: bool = True) -> float:
        """As :meth:`Arrivals.divisor`."""
        return self._arrivals.divisor(average=average)

    # --- backward ------------------------------------------------------------------------------------

    def check(self, param: int, gradient: Any) -> None:
        """As :meth:`Reduction.check`."""
        self._reduction.check(param, gradient)

    def defer_gradients_of(self, params: Collection[int]) -> None:
        """From now on, only gradients of ``params`` wait for :meth:`finalize`. No gradient may wait for an update
        now."""
        self._arrivals.defer_gradients_of(params)

    def begin_backward(self) -> None:
        """Begin a backward, on all ranks alike. If each backward is a round, end the round of the one before."""
        assert self._state_lock.changing.locked()
        if self._arrivals.since.backward and self._backwards_are_rounds:
            self._take_stragglers()
            self._begin_round()
            self._arrivals.since.backward = False  # last: a second call after an interrupt ends the round again

    def end_backward(self) -> None:
        """End a backward, on all ranks alike. This rank may have had no gradient."""
        assert self._state_lock.changing.locked()
        self._begin_gradients()
        self._arrivals.end_backward(has_round=self._backwards_are_rounds)

    @property
    def _backwards_are_rounds(self) -> bool:
        """True if each backward is a separate round. Where parameters are sent early, the last micro-step's backwards
        share one round."""
        return not (self._buckets.terms.sends_early and self._arrivals.at_boundary)

    def add(self, gradients: Mapping[int, Any]) -> None:
        """Take gradients of this micro-step, by parameter, each checked by :meth:`Reduction.check`.

        Later gradients of the same parameter before the next update are summed in fp32. If the device is addressable,
        gradients are not copied: the caller must not change them until the update.
        """
        assert self._state_lock.changing.locked()
        self._begin_gradients()
        if self._arrivals.since.deferred and (before := self._arrivals.take_deferred(gradients)):
            self._take(before)
        if now := self._arrivals.defer(gradients):
            self._take(now)

    def finalize(self, params: Collection[int], *, ended: bool = False) -> Set[int]:
        """Finalize these parameters: they get no further gradient in this backward.

        All ranks call it alike: at the same points of backward, with the same parameters. It affects only parameters
        whose gradients may come on some ranks and not on others (:attr:`ParamSpec.finalized_with`).

        Args:
            ended: the backward has ended.

        Returns:
            The stragglers, which are finalized only at the end of a backward: a gradient once came too late.
        """
        assert self._state_lock.changing.locked()
        stragglers = frozenset[int]() if ended else self._arrivals.stragglers(params)
        given, without = self._arrivals.finalized([param for param in params if param not in stragglers])
        if given or without:
            self._begin_gradients()
            self._take(given, without)
        if ended:
            self._take_stragglers()
        return stragglers

    def _take(self, gradients: Mapping[int, Any], without: Set[int] = frozenset()) -> None:
        """Put gradients into buckets, and launch full buckets. ``without``: parameters finalized without a gradient."""
        params = gradients.keys() | without if without else gradients.keys()
        arrivals = self._arrivals
        if self._announced.requested and self._buckets.device.world_size == 1:
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
        """End the present round, so that the next can begin. All ranks call it alike, and exchange every bucket."""
        if self._announced.requested and self._buckets.device.world_size > 1:
            self._early.recall()
        if self._arrivals.since.round is not None:
            try:
                self._end_round()
            except BaseException as error:
                self._last_step.lose_gradient(error)
                raise

    def _begin_gradients(self) -> None:
        """Before a step's first gradient, wait until parameters are written: ranks do one exchange at a time."""
        present = self._arrivals.since.present
        if not present or self._health.state is Health.LOST:
            self._health.check(Use.STEP)
        if not present and self._updates.publishes and not self._arrivals.has_begun:
            self._last_step.finish_publications()

    def _launch(self, *, ending: bool = False, boundary: bool = False) -> None:
        """Launch the buckets that are ready. At the boundary, have their parameters sent early."""
        terms = self._buckets.terms
        for bucket in self._arrivals.ready(ending=ending):
            at_boundary = self._arrivals.at_boundary
            present = self._reduction.launch(bucket, examine=self._buckets.terms.examines and at_boundary)
            if at_boundary and terms.sends_early:
                # Among ranks a full bucket may hold parameters that are finalized without a gradient on this one.
                last = terms.lends_gradient_memory and (boundary or not ending)
                self._announced.request(bucket, present, last=last, keep_states=self._buckets.terms.examines)

    def _take_stragglers(self) -> None:
        """Take the gradients that still wait to be finalized. All ranks have such a gradient, or none."""
        if left := self._arrivals.take_deferred():
            self._take(left)

    def _end_round(self, *, boundary: bool = False) -> None:
        self._launch(ending=True, boundary=boundary)
        self._arrivals.end_round()

    def reduce_now(self) -> None:
        """Launch all gradients that came so far. Buckets may still be in flight when it returns.

        Later gradients are added to them until the next update. Parameters that were sent early are recalled. All
        ranks call it alike, after a backward in which each rank had a gradient. All continue alike: with another
        backward, or with the end of the micro-step, which then finds nothing left to reduce.

        Raises :class:`StateError` if ``update_in_backward`` has updated states.
        """
        assert self._state_lock.changing.locked()
        self._health.check(Use.STEP)
        self._early.stop()
        self._launch_rest()

    def _launch_rest(self) -> None:
        """Launch every bucket that was not launched in this round. The round goes on: a parameter that is added now may
        still get a gradient in it."""
        try:
            self._take_stragglers()
            self._launch(ending=True, boundary=self._buckets.terms.updates_early)
        except BaseException as error:
            self._last_step.lose_gradient(error)
            raise

    def reduce_first(self) -> None:
        """Reduce the gradients that came, on all ranks alike, before another exchange or before they are discarded.

        With updates during backward, buckets that are launched here are also updated.
        """
        if self._buckets.device.world_size > 1 and self._arrivals.holds_gradients:
            reduce = self._launch_rest if self._buckets.terms.updates_early else self.reduce_now
            self._state_lock.change("an exchange between ranks", reduce)

    def drop(self, params: Sequence[int] | None = None) -> None:
        """Discard the gradients of these parameters, or of all.

        With ``params``, raise the error of a gradient that was lost in flight, and discard nothing.
        :meth:`EarlyPublish.undo` brings back parameters that were sent early.
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
        """Discard all gradients, on all ranks alike, and bring back parameters that were sent early. Ranks first reduce
        the gradients that came, because one rank may have begun exchanges that the others have not.

        Returns:
            True if parameters are older than their states: :meth:`Parameters.flush` sends them.
        """
        if self._health.usable:
            self.reduce_first()
        self.drop()
        self._early.undo()
        return self._health.state is Health.INTERRUPTED

    def end_micro_step(
        self, *, reduce: bool = True, boundary: bool | None = None, arguments: StepArguments | None = None
    ) -> StepReport | None:
        """End a micro-step. Return its report if no update follows, and None at the boundary, where an update is due.

        Except at the boundary, the caller may then free the gradients on the device.

        Args:
            reduce: False if no rank has added a gradient: the ranks then exchange nothing.
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
                self._take_stragglers()
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
        """Wait until all gradients are on the host. Raise the error of a gradient that was lost, before any change."""
        if self._arrivals.since.round is not None:
            self._take_stragglers()
            self._end_round(boundary=True)
        for bucket in self._buckets.all:
            if bucket.task is not None:
                self._buckets.claim(bucket)
