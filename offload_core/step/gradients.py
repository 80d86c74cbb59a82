"""The gradients of one process between two updates, from a backward to the host memory of their owners.

:meth:`Gradients.add` puts a gradient into its bucket (``arrivals.py``). A full bucket is launched (``reduction.py``):
the device reduces the bucket over the ranks and copies each shard to its owner's host memory. There the gradient waits
for the update, and gradients of later micro-steps are added to it.
"""

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from ..dtypes import FLOAT32
from ..errors import GradientError, StateError
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
    """Takes the gradients of each micro-step, and tells which parameters had a gradient since the last update."""

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
        """True if this rank had a gradient of parameter ``param`` since the last update."""
        return param in self._arrivals.since.present

    @property
    def had_backward(self) -> bool:
        """True if all ranks had a backward in this micro-step. This rank may have had no gradient."""
        return self._arrivals.since.backward

    @property
    def micro_steps(self) -> int:
        """The number of micro-steps that have ended since the last update."""
        return self._arrivals.since.micro_steps

    @property
    def per_update(self) -> int:
        """The number of micro-steps for each update: the present ``gradient_accumulation_steps``."""
        return self._arrivals.per_update

    def count_as(self, micro_steps: int) -> None:
        """Have the present micro-step count as so many, because each of its gradients is a sum over as many. All ranks
        call this alike, before the first gradient."""
        self._arrivals.since.counts_as = micro_steps

    @property
    def counts_as(self) -> int:
        """The number of micro-steps that the present one counts as."""
        return self._arrivals.since.counts_as

    @property
    def take_sums(self) -> bool:
        """True if a gradient in fp32, the sum of several in its parameter's element type, is not rounded on its
        way."""
        buckets = self._buckets
        return buckets.terms.gradients_in_place or all(bucket.gradient.comm_dtype is FLOAT32 for bucket in buckets.all)

    @property
    def at_boundary(self) -> bool:
        """True if an update is due at the end of this micro-step."""
        return self._arrivals.at_boundary

    @property
    def are_read_in_place(self) -> bool:
        """True if an update reads gradients in place. The caller must then keep all gradients in memory, unchanged,
        until the update."""
        return self._buckets.terms.gradients_in_place

    def check_none(self, what: str, *, waiting: bool) -> None:
        """Raise an error if gradients wait for an update, or no step may follow.

        Args:
            what: the caller's action, for the error message.
            waiting: True if the front end has gradients that wait for an update.

        Raises:
            StateError: gradients wait for an update, or a step or a load broke off, or parameters have no memory on
                the device.
            CollectiveError: another rank was lost.
        """
        self._health.check(Use.STEP)
        if waiting or self.are_waiting:
            raise StateError(
                f"{what} while gradients wait for an update; expected it between two updates: after step() at an "
                "accumulation boundary, or after zero_grad() of the optimizer"
            )

    def divisor(self, *, average: bool = True) -> float:
        """Return the number by which an update divides the gradients that it reads, besides the loss scale. These
        gradients are already averaged over the ranks.

        Args:
            average: True to average over the micro-steps. False to sum over the micro-steps.
        """
        return self._arrivals.divisor(average=average)

    # --- backward ------------------------------------------------------------------------------------

    def check(self, param: int, gradient: Any) -> None:
        """Raise :class:`GradientError` if ``gradient`` does not have the parameter's number of elements, or its element
        type is not the parameter's. Any element type is allowed with ``communication_dtype`` or ``layerwise``, or
        if the update reads gradients in place."""
        spec = self._buckets.params[param]
        numel, dtype = self._buckets.device.numel(gradient), self._buckets.device.dtype(gradient)
        if numel != spec.numel:
            raise GradientError(
                f"parameter {spec.name!r}: gradient has {numel} elements, expected {spec.numel}; "
                "was the parameter resized after wrap()?"
            )
        config = self._buckets.config
        rounds = not (self._buckets.terms.gradients_in_place or config.layerwise) and config.communication_dtype is None
        if dtype is not spec.dtype and rounds:
            raise GradientError(
                f"parameter {spec.name!r}: gradient is {dtype}, expected {spec.dtype} as the parameter is: it would be "
                f"rounded on its way; set communication_dtype={dtype.name!r}"
            )

    def defer_gradients_of(self, params: Collection[int]) -> None:
        """From now on, defer the gradients of ``params``, and no other gradients, until :meth:`finalize`. No gradient
        may wait for an update when this is called."""
        self._arrivals.defer_gradients_of(params)

    def begin_backward(self) -> None:
        """Begin a backward. All ranks call this alike. If each backward is a round, end the round of the backward
        before."""
        assert self._state_lock.changing.locked()
        if self._arrivals.since.backward and self._backwards_are_rounds:
            self._take_stragglers()
            self._begin_round()
            self._arrivals.since.backward = False  # last: a second call after an interrupt ends the round again

    def end_backward(self) -> None:
        """End a backward. All ranks call this alike, also ranks that had no gradient."""
        assert self._state_lock.changing.locked()
        self._begin_gradients()
        self._arrivals.end_backward(has_round=self._backwards_are_rounds)

    @property
    def _backwards_are_rounds(self) -> bool:
        """True if each backward is a separate round. If parameters are sent early, all backwards of the micro-step
        before an update share one round."""
        return not (self._buckets.terms.sends_early and self._arrivals.at_boundary)

    def add(self, gradients: Mapping[int, Any], without: Set[int] = frozenset()) -> None:
        """Take gradients of this micro-step. Several gradients of one parameter before an update are summed in fp32.

        Args:
            without: parameters that get no gradient in this backward on this rank. All ranks name each parameter of
                ``gradients`` or ``without`` at the same point of a backward.
            gradients: device gradients, by parameter. :meth:`check` has accepted each one. If the device is
                addressable, gradients are not copied: the caller must not change them until the update.
        """
        assert self._state_lock.changing.locked()
        self._begin_gradients()
        if self._arrivals.since.deferred and (before := self._arrivals.take_deferred(gradients)):
            self._take(before)
        now = self._arrivals.defer(gradients)
        without = self._arrivals.not_deferring(without) if without else without
        if now or without:
            self._take(now, without)

    def finalize(self, params: Collection[int], *, ended: bool = False) -> Set[int]:
        """Finalize these parameters: they get no further gradient in this backward.

        All ranks call this at the same points of backward, with the same parameters. The call affects only parameters
        whose gradients are deferred (:attr:`ParamSpec.finalized_with`).

        Args:
            ended: True if the backward has ended.

        Returns:
            The stragglers among ``params``, which this call has not finalized: they are finalized at the end of the
            backward. A straggler is a parameter whose gradient once came after the parameter was finalized or its
            bucket was launched.
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
        """Put gradients into buckets, and launch full buckets.

        Args:
            gradients: device gradients, by parameter.
            without: parameters that are finalized without a gradient.
        """
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
        """End the present round, in which all ranks launch every bucket, so that the next round can begin. All ranks
        call this alike."""
        if self._announced.requested and self._buckets.device.world_size > 1:
            self._early.recall()
        if self._arrivals.since.round is not None:
            try:
                self._end_round()
            except BaseException as error:
                self._last_step.lose_gradient(error)
                raise

    def _begin_gradients(self) -> None:
        """Before a step's first gradient, wait until the last step's parameters are written, because ranks do one
        exchange at a time. Raise an error if no step may follow."""
        present = self._arrivals.since.present
        if not present or self._health.state is Health.LOST:
            self._health.check(Use.STEP)
        if not present and self._updates.publishes and not self._arrivals.has_begun:
            self._last_step.finish_publications()

    def _launch(self, *, ending: bool = False, boundary: bool = False) -> None:
        """Launch the buckets that are ready. If an update is due at the end of this micro-step, have their parameters
        sent early.

        Args:
            ending: True to launch every bucket that was not launched in this round, full or not.
            boundary: True if the launched buckets get no further gradient before the update.
        """
        terms = self._buckets.terms
        for bucket in self._arrivals.ready(ending=ending):
            at_boundary = self._arrivals.at_boundary
            present = self._reduction.launch(bucket, examine=self._buckets.terms.examines and at_boundary)
            if at_boundary and terms.sends_early:
                # Among ranks a full bucket may hold parameters that are finalized without a gradient on this one.
                last = terms.lends_gradient_memory and (boundary or not ending)
                self._announced.request(bucket, present, last=last, keep_states=self._buckets.terms.examines)

    def _take_stragglers(self) -> None:
        """Put deferred gradients whose parameter was not finalized into buckets. All ranks have such gradients, or no
        rank has."""
        if self._arrivals.since.deferred:
            self._take(self._arrivals.take_deferred())

    def _end_round(self, *, boundary: bool = False) -> None:
        self._launch(ending=True, boundary=boundary)
        self._arrivals.end_round()

    def reduce_now(self) -> None:
        """Launch every bucket that was not launched in this round, and recall parameters that were sent early. Buckets
        may still be in flight when this returns.

        Gradients that come later are added to the launched gradients, until the next update. All ranks call this alike,
        after a backward in which each rank had a gradient. All ranks then continue with another backward, or all with
        the end of the micro-step, which then launches nothing.

        Raises:
            StateError: ``update_in_backward`` has updated states, or no step may follow.
            CollectiveError: another rank was lost.
        """
        assert self._state_lock.changing.locked()
        self._health.check(Use.STEP)
        self._early.stop()
        self._launch_rest()

    def _launch_rest(self) -> None:
        """Launch every bucket that was not launched in this round. The round does not end: a parameter that is added
        after this may still get a gradient in this round."""
        try:
            self._take_stragglers()
            self._launch(ending=True, boundary=self._buckets.terms.updates_early)
        except BaseException as error:
            self._last_step.lose_gradient(error)
            raise

    def reduce_first(self) -> None:
        """Before another exchange, or before gradients are discarded, launch every bucket that was not launched in this
        round. All ranks call this alike. With a single rank, or without gradients, do nothing.

        If states are updated during backward, the buckets that are launched here are also updated.
        """
        if self._buckets.device.world_size > 1 and self._arrivals.holds_gradients:
            reduce = self._launch_rest if self._buckets.terms.updates_early else self.reduce_now
            self._state_lock.change("an exchange between ranks", reduce)

    def drop(self, params: Sequence[int] | None = None) -> None:
        """Discard gradients that came since the last update.

        This recalls parameters that were sent early. :meth:`EarlyPublish.undo` brings their earlier values back to the
        device.

        Args:
            params: discard only the gradients of these parameters. If one of these gradients was lost in flight, raise
                its error and discard nothing. None: discard all gradients, and raise no such error.

        Raises:
            StateError: ``update_in_backward`` has updated states.
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
        """Discard all gradients, and bring the earlier values of parameters that were sent early back to the device.
        All ranks call this alike. The ranks first launch every bucket, because one rank may have begun an exchange that
        another rank has not begun.

        Returns:
            True if the last step broke off and left some parameters older than their states. The caller then calls
            :meth:`Parameters.flush`, which sends them.
        """
        if self._health.usable:
            self.reduce_first()
        self.drop()
        self._early.undo()
        return self._health.state is Health.INTERRUPTED

    def end_micro_step(
        self, *, reduce: bool = True, boundary: bool | None = None, arguments: StepArguments | None = None
    ) -> StepReport | None:
        """End a micro-step.

        Args:
            reduce: False if no rank has added a gradient. The ranks then exchange nothing.
            boundary: True if an update follows, False if not; None: decide by ``gradient_accumulation_steps``.
            arguments: the arguments of an announced step (:meth:`EarlyPublish.expect_step`) that follows now.

        Returns:
            The micro-step's report if no update follows. The caller may then free the gradients on the device. None: an
            update follows.
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
        """Wait until all gradients are on the host. If a gradient was lost in flight, raise its error: the step has
        changed nothing yet."""
        if self._arrivals.since.round is not None:
            self._take_stragglers()
            self._end_round(boundary=True)
        for bucket in self._buckets.all:
            if bucket.task is not None:
                self._buckets.claim(bucket)
