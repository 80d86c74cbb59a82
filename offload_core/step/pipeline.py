"""Composes the parts of a training step: gradients in, updated parameters out.

1. :meth:`Gradients.add` (``gradients.py``) brings a gradient to its owner's host memory.
2. :meth:`Pipeline.step` makes one ``Decision`` (``decision.py``: norm, clipping, skipping).
3. ``update.py`` runs one pass in C over each bucket, which unscales, clips, updates and casts. For rules with a device
   kernel it runs two passes, and the device computes between them (``directions.py``).
4. The device publishes the shards to every rank's parameters.

With ``schedule="overlap"`` one thread (``support/worker.py``) does the tasks that follow a launch, in the order in
which they were submitted, while the caller goes on. The caller claims a bucket back from that thread
(:meth:`LocalBuckets.claim`) before it touches the bucket. A reader waits only for the parameter that it reads
(:meth:`Parameters.await_param`).

With ``update_in_backward`` a bucket's new parameters are published early (``early_publish.py``): during backward, as
soon as the bucket's gradients are on the host. If the step need not examine all gradients first, the states are also
updated early. Gradients then take the host memory of only a few buckets (``gradient_memory.py``). If the step examines
all gradients, the step updates the states. After clipping or an overflow the step also sends the parameters again
(:meth:`EarlyPublish.recall`).

If there is only one rank and its tensors are host memory (``BucketTerms.direct``), kernels read gradients and write
parameters in place, without a copy. Only gradients that accumulate are copied, to fp32.

An interrupt (``KeyboardInterrupt``) leaves the states as they were before the step or as they are after the step: a
step changes states in one section that no signal interrupts (:meth:`LastStep.change`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ..config.options import OffloadConfig
from ..device.events import Event
from ..device.protocols import Device
from ..errors import CollectiveError, StateError
from ..layout.partition import ParamSpec
from ..rules import Rule
from .agreement import agree
from .announced import Announced
from .arrivals import Arrivals
from .bucket_states import GradientEvent, Publication
from .buckets import LocalBuckets
from .counts import Changes, UpdateCounts
from .decision import Decision, SkippedSteps, StepArguments, StepReport, examine
from .early_publish import EarlyPublish
from .gradients import Gradients
from .health import HealthEvent, PipelineHealth, Use
from .last_step import LastStep
from .loss_scale import LossScaler
from .parameters import Parameters
from .reduction import Reduction
from .state_lock import StateLock
from .update import Updates

T = TypeVar("T")


class Pipeline:
    """Creates the objects that do one process's training steps, and calls them in order.

    These objects are attributes, for other modules of the core. Front ends call ``offload_core/engine.py``.

    Parameters are numbered in the order in which they were added. Tensors are passed in and out in the device's form:
    one-dimensional and contiguous. If an update of the last step fails, the next method that waits for the updates
    raises the error.
    """

    def __init__(
        self, config: OffloadConfig, device: Device, scaler: LossScaler | None, rule: Rule | None = None
    ) -> None:
        """
        Args:
            rule: the update rule of parameters whose ``ParamSpec.rule`` is None; None: the configuration's rule.
        """
        self.config = config
        self._rule = rule or config.rule()
        self.device = device
        self.scaler = scaler
        self.state_lock = StateLock()
        """The lock that front ends hold while they change or save states. Methods that change states assert that it is
        held."""
        self.save_asked = False
        """True if this rank was asked to save (by a signal). The next step tells the other ranks."""
        self.save_agreed = False
        """True if any rank was asked to save before the last step. All ranks have the same value."""
        self.health = PipelineHealth()
        self._skipped = SkippedSteps()
        self.changes = Changes()
        """Records the last change of each parameter."""
        self._begin()

    def _begin(self) -> None:
        """Create all objects of the step, without parameters."""
        self.buckets = buckets = LocalBuckets(self.config, self.device, scaled=self.scaler is not None)
        self._examines = buckets.terms.examines
        self.params = buckets.params
        self.memory = buckets.memory
        self.counts = counts = UpdateCounts(self.changes, self._rule)
        self.arrivals = arrivals = Arrivals(buckets)
        self.reduction = Reduction(buckets)
        self.updates = updates = Updates(buckets)
        self._announced = announced = Announced(buckets, updates)
        lock = self.state_lock
        self.last_step = LastStep(buckets, arrivals, updates, announced, counts, self.health, lock)
        self.early = EarlyPublish(buckets, arrivals, updates, announced, self.last_step, counts, self.scaler, lock)
        self.gradients = Gradients(
            buckets,
            arrivals,
            self.reduction,
            updates,
            announced,
            self.early,
            self.last_step,
            counts,
            self.scaler,
            self.health,
            lock,
        )
        self.parameters = Parameters(buckets, self.gradients, updates, self.early, self.last_step, self.health, lock)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(
            "copying or pickling an offloaded optimizer's pipeline, which holds addresses; expected its states to be "
            "copied: optimizer.state_dict() in torch, to_pytree() and load_pytree() in JAX"
        )

    # --- parameters and states ---------------------------------------------------------------------

    def add_parameters(
        self, specs: Sequence[ParamSpec], tensors: Sequence[Any], *, frozen: Sequence[ParamSpec] = ()
    ) -> None:
        """Add parameters: allocate their states, and copy ``tensors`` to the master weights.

        The element type of a tensor may differ from its spec's: the tensor may have the model's original type, and the
        spec the type to which the model is cast.

        Args:
            frozen: parameters that are not trained. The front end allocates their shards in ``memory``.
        """
        assert self.state_lock.changing.locked()
        self.parameters.check_present()
        self.last_step.finish()
        self.arrivals.register(self.buckets.add(specs, tensors, frozen))
        self.counts.register(specs)

    def start_over(self) -> None:
        """Remove all parameters and free their states. Then other parameters may be added."""
        assert self.state_lock.changing.locked()
        self.last_step.finish()
        self.gradients.drop()
        self.buckets.close()
        self._begin()

    @contextmanager
    def replacing_states(self, *, masters: bool = True) -> Iterator[None]:
        """Return a context whose body replaces all states. After an error in the body, every call raises until another
        load has replaced all states.

        Args:
            masters: False if the body does not replace master weights. They then follow their parameters, which may
                still get earlier values back (:meth:`StateAccess.adopt`).
        """
        self.parameters.check_present()
        self.health.on(HealthEvent.LOAD)
        self.gradients.drop()
        self.last_step.finish()
        self.changes.record_all()
        if masters:
            self.buckets.store.forget_replaced()
        try:
            yield
        except BaseException as error:
            self.health.on(
                HealthEvent.TEAR,
                f"loading a checkpoint broke off ({error!r}): states are partly those of before, partly its; "
                "expected another one to be loaded next",
            )
            raise

    # --- gradients ---------------------------------------------------------------------------------

    def exchange(self, task: Callable[[], T]) -> T:
        """Run a task that exchanges data with the other ranks outside a step, and return its result.

        Between a backward and its update, only some ranks may have launched a bucket, because other ranks lack the
        gradient of a parameter. So all ranks first launch every bucket.
        """
        self.gradients.reduce_first()
        return self.buckets.run(task)

    def accumulate_over(self, micro_steps: int, *, waiting: bool) -> None:
        """From now on, update once every ``micro_steps`` micro-steps.

        Args:
            waiting: True if the front end has gradients that wait for an update.

        Raises:
            StateError: gradients wait for an update, or no step may follow, or there is no memory for sums.
            CollectiveError: another rank was lost.
        """
        assert self.state_lock.changing.locked()
        self.gradients.check_none("gradient_accumulation_steps is to change", waiting=waiting)
        if micro_steps > 1 and self.buckets.terms.lends_gradient_memory:
            raise StateError(
                f"gradient_accumulation_steps={micro_steps} from now on, where updates are made during backward "
                "(update_in_backward=True) and have no memory for sums; expected it at the beginning, as an argument"
            )
        self.config = replace(self.config, gradient_accumulation_steps=micro_steps)
        self.arrivals.per_update = micro_steps

    # --- update ------------------------------------------------------------------------------------

    def step(self, arguments: StepArguments, *, gathered: int = 0) -> StepReport:
        """Update every parameter that has a gradient, or skip the step.

        With ``schedule="overlap"`` this returns while updates go on, and the next call that waits for the updates
        raises their error. After an error in mid-update (for example a device copy that fails), all states are still
        updated, the step counts, and the gradients are discarded. If this process has all ranks, the next step sends
        the parameters that were not written. Otherwise ``health.py`` lists the uses that are still allowed. After the
        loss of another rank in mid-update, every call raises :class:`StateError`.

        Args:
            gathered: in stage 3, a fingerprint of the gathers and their order (``LiveParams.release_all``).
        """
        assert self.state_lock.changing.locked()
        given = self.early.check_expected(arguments)
        self.health.check(Use.STEP)
        after = self.device.mark()
        self._announced.begin_step(given.tensors, self.reduction.last)
        if not self.updates.finished:
            holds_gradients = self.arrivals.holds_gradients
            self.last_step.wait(self.updates.finish_states if holds_gradients else self.updates.finish)
        try:
            self.gradients.collect()
            if self._announced.requested and self._announced.differs(given):
                self.early.recall()
        except BaseException as error:
            self.last_step.lose_gradient(error)
            raise
        try:
            decision = self._decide(given, gathered)
        except CollectiveError as error:
            self.health.on(HealthEvent.LOSE_RANK, str(error))
            raise
        self.last_step.change(partial(self._carry_out, decision, after))
        self._skipped.record(decision.verdict, scale_fell=self.loss_scale < given.loss_scale)
        return replace(decision.report, changes=self.changes.mark)

    def _decide(self, given: StepArguments, gathered: int) -> Decision:
        """Agree with all ranks on the update. This does not change states, but may recall parameters that were sent
        early.

        Raises:
            StateError: ranks differ in the arguments that must be the same on every rank.
        """
        agreed = agree(
            self.buckets,
            self.arrivals,
            self.reduction,
            examines=self._examines,
            recalled=self._announced.recalled,
            terms=given.terms(gathered) if self.device.collectives.world_size > 1 else "",
            save_asked=self.save_asked,
        )
        self.save_agreed |= agreed.save_asked
        if not agreed.alike:
            raise StateError(
                f"ranks differ in what they update with; here: {given.hypers}, gradients over "
                f"{given.divisor}, loss scale {given.loss_scale}; expected the same hyperparameters, micro-steps and "
                "loss scale on every rank" + ", and in stage 3 the same modules run in the same order" * bool(gathered)
            )
        buckets = tuple(bucket for bucket in reversed(agreed.order) if not agreed.present.isdisjoint(bucket.members))
        unscale, max_norm = given.unscale, self.config.gradient_clipping
        verdict = examine(
            agreed.squares,
            any_gradient=agreed.any_gradient,
            unscale=unscale,
            max_norm=max_norm,
            scaled=self.scaler is not None,
        )
        rates = tuple(hyper.lr for hyper in given.hypers)
        report = StepReport(
            updated=verdict.skipped is None,
            skipped=verdict.skipped,
            grad_norm=verdict.norm,
            clip_coefficient=verdict.coefficient,
            loss_scale=given.loss_scale,
            lr=rates,
            step=self.counts.updates + 1,
        )
        delays = (
            self.config.schedule == "delayed" and max(map(float, self.counts.steps)) >= self.config.delay_warmup_steps
        )
        stale = self.last_step.stale  # before a recall, which adds to it
        if verdict.interferes or agreed.recalled:
            self.early.recall()
        return Decision(
            verdict=verdict,
            present=agreed.present,
            buckets=buckets,
            order=tuple(agreed.order),
            scalars=self.counts.scalars(given, agreed.present, verdict.coefficient / unscale),
            tensors=given.tensors,
            delayed=delays,
            stale=stale,
            report=report,
        )

    def _carry_out(self, decision: Decision, after: Event) -> None:
        """Start the step's updates, and change the counts, the loss scale and the order of buckets."""
        self.last_step.verdict = decision.verdict
        if self.scaler and decision.verdict.overflow is not None:
            self.scaler.update(overflow=decision.verdict.overflow)
        self.last_step.begin(decision.stale)
        if decision.verdict.skipped:
            self.counts.skipped += bool(decision.verdict.overflow)
            self._announced.end()
            self.arrivals.drop_all(decision.order)
            self.updates.publish(self.buckets.all, decision.tensors, after)
        else:
            self._update(decision, after)
        if not (self.buckets.worker.is_asynchronous or self.updates.finished):
            self.updates.finish()

    def _update(self, decision: Decision, after: Event) -> None:
        present, buckets = decision.present, decision.buckets
        last_step = self.last_step
        self.counts.count(present)
        ahead = self._announced.end()
        rest = [bucket for bucket in buckets if bucket not in ahead]
        self.updates.owe(rest, decision)
        for bucket in ahead:
            bucket.gradient.forget(GradientEvent.END)
            bucket.publication.confirm()
        for bucket in set(self.buckets.all).difference(buckets, ahead):
            bucket.gradient.forget(GradientEvent.DROP)
        self.arrivals.begin(decision.order)
        # A parameter without elements is in no bucket, and counts as written at once.
        now = [param for param in present if not self.buckets.of[param]] if decision.delayed else present
        last_step.published = {**last_step.published, **dict.fromkeys(now, True)}
        if decision.delayed:
            self.updates.publish(reversed(decision.order), decision.tensors, after)
            self.updates.start_ahead(buckets[::-1], decision)
            return
        early = [bucket for bucket in rest if bucket.publication.state is Publication.EARLY]
        self.updates.publish(reversed(decision.order), decision.tensors, after, but=present)
        self.updates.start(
            [bucket for bucket in rest if bucket.publication.state is not Publication.EARLY], decision, after
        )
        # In the order of backward, because the next gradients overwrite the ones that these updates read.
        self.updates.start_ahead(early[::-1], decision)

    # --- of the whole process ------------------------------------------------------------------------

    @property
    def collectives(self) -> "OrderedCollectives":
        """The collectives for exchanges outside a step."""
        return OrderedCollectives(self)

    @property
    def loss_scale(self) -> float:
        """The factor on the loss in the next backward."""
        return self.scaler.scale if self.scaler else 1.0


class OrderedCollectives:
    """A pipeline's collectives. Each call runs after all exchanges that the pipeline has started."""

    def __init__(self, pipeline: "Pipeline") -> None:
        self._pipeline = pipeline
        self._collectives = pipeline.device.collectives
        self.rank, self.world_size = self._collectives.rank, self._collectives.world_size

    def sum_integers(self, array: np.ndarray, what: str) -> None:
        self._run(lambda: self._collectives.sum_integers(array, what))

    def broadcast(self, array: np.ndarray, what: str, source: int = 0) -> None:
        self._run(lambda: self._collectives.broadcast(array, what, source))

    def where(self) -> str:
        """Return the exchange that this process waits for, and the last one, as lines for a user who waits. Takes no
        lock."""
        return self._collectives.where()

    def _run(self, task: Callable[[], None]) -> None:
        if self.world_size > 1:
            self._pipeline.exchange(task)
