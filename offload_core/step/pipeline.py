"""The composer: gradients in, updated parameters out.

A gradient's way: :meth:`Pipeline.add_gradients` -> its bucket fills (``arrivals.py``) and is launched
(``reduction.py``: the device reduces it over the ranks and brings it to its owner's host memory; there it waits, or is
added to the gradients of earlier micro-steps) ->
:meth:`Pipeline.step` makes one ``Decision`` (``decision.py``: norm, clipping, skipping) -> ``update.py`` asks for one C
pass, which unscales, clips, updates and casts (or for two, around a part that the device computes) -> the device
publishes the shards to every rank's parameters.

``schedule="overlap"`` changes only who does it: the tasks that follow a launch are done by one thread, in the order in
which they were asked for (``worker.py``), while the caller goes on. The caller claims a bucket back from that thread
(:meth:`LocalBuckets.claim`) before it touches it. A reader waits only for the parameter that it reads
(:meth:`Pipeline.await_param`).

With ``update_in_backward`` a bucket's new parameters are published early (``early_publish.py``): during backward, as
soon as its gradients are on the host. If no check of all gradients comes first, this updates its states, too. Otherwise
the states stay as they are: the step updates them, or, after clipping or an overflow, sends the parameters again
(:meth:`EarlyPublish.recall`). In the first case gradients need few buckets' memory on the host
(``gradient_memory.py``).

One rank whose tensors are host memory moves nothing (``BucketTerms.direct``): gradients are read and parameters written
where they are. Only gradients that accumulate are copied, to fp32.

An interrupt (``KeyboardInterrupt``) leaves the state before the step or the state after it: a step changes states in
one section that no signal cuts in two (:meth:`LastStep.change`).
"""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from ..config.options import OffloadConfig
from ..device.events import Event
from ..device.protocols import Device
from ..errors import CollectiveError, StateError
from ..layout.partition import ParamSpec
from ..memory.plan import HOST, PlanRow
from ..memory.report import MemoryReport
from ..rules import Rule
from ..support import threads
from ..support.threads import RUNNING_SECTIONS
from ..support.where import told
from .agreement import agree
from .announced import Announced
from .arrivals import Arrivals
from .bucket_states import GradientEvent, Publication
from .buckets import LocalBuckets
from .counts import Changes, UpdateCounts
from .decision import Decision, SkippedSteps, StepArguments, StepReport, examine
from .early_publish import EarlyPublish
from .health import Health, HealthEvent, PipelineHealth, Use
from .last_step import LastStep
from .loss_scale import LossScaler
from .reduction import Reduction
from .state_lock import StateLock
from .update import Updates

__all__ = ["Pipeline", "StepReport"]

T = TypeVar("T")


class Pipeline:
    """Composes the parts of one process's training steps, and decides in which order they act.

    Callers ask the part: ``arrivals`` (gradients that came), ``reduction`` (their way), ``updates``, ``early`` (a step
    that is announced), ``last_step`` (waiting for it), ``counts``, ``health`` (what may still be done), ``buckets``.

    Parameters are numbered in the order in which they were added. The tensors that cross this interface are
    the device's: one-dimensional and contiguous. An error in the last step's updates is raised by the next method that
    waits for them.
    """

    def __init__(
        self, config: OffloadConfig, device: Device, scaler: LossScaler | None, rule: Rule | None = None
    ) -> None:
        """
        Args:
            rule: of parameters that name none; None: the configuration's.
        """
        self.config = config
        self._rule = rule or config.rule()
        self.device = device
        self.scaler = scaler
        self.state_lock = StateLock()
        """Front ends hold it while they change or save anything. Methods that change anything assert it."""
        self.save_asked = False
        """This rank was asked to save (by a signal); the next step tells the others."""
        self.save_agreed = False
        """Up to the last step a rank was asked to save; the same on all ranks."""
        self.health = PipelineHealth()
        self._skipped = SkippedSteps()
        self.changes = Changes()
        """The last change of each parameter."""
        self._process = os.getpid()
        self._begin()

    def _begin(self) -> None:
        """Have no parameters."""
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

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(
            "copying or pickling an offloaded optimizer's pipeline, which holds addresses; expected its states to be "
            "copied: optimizer.state_dict() in torch, to_pytree() and load_pytree() in JAX"
        )

    # --- parameters and states ---------------------------------------------------------------------

    def add_parameters(
        self, specs: Sequence[ParamSpec], tensors: Sequence[Any], *, frozen: Sequence[ParamSpec] = ()
    ) -> None:
        """Take on parameters: allocate their states, master weights starting from ``tensors``.

        The tensors may be of another element type than the specs (the model's own, before it is cast).

        Args:
            frozen: parameters that are not trained; the front end allocates their shards in ``memory``.
        """
        assert self.state_lock.changing.locked()
        self.check_present()
        self.last_step.finish()
        self.arrivals.take_on(self.buckets.add(specs, tensors, frozen))
        self.counts.take_on(specs)

    def start_over(self) -> None:
        """Forget all parameters and their states, and free their memory. Others may be added then."""
        assert self.state_lock.changing.locked()
        self.last_step.finish()
        self.drop_gradients()
        self.buckets.close()
        self._begin()

    @contextmanager
    def replacing_states(self, *, masters: bool = True) -> Iterator[None]:
        """Replace all states inside. After an error there every call raises until they have been replaced.

        Args:
            masters: False: master weights follow their parameters, which may still get earlier values back.
        """
        self.check_present()
        self.health.on(HealthEvent.LOAD)
        self.drop_gradients()
        self.last_step.finish()
        self.changes.note_all()
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

    def begin_backward(self) -> None:
        """A backward begins, on all of several ranks alike. What came in the one before, in this micro-step, leaves."""
        assert self.state_lock.changing.locked()
        if self.arrivals.since.backward and self._backwards_are_rounds:
            self._take_late()
            self._begin_round()
            self.arrivals.since.backward = False  # last: whoever is interrupted here and tries again ends the round

    def end_backward(self) -> None:
        """A backward has ended, on all of several ranks alike; this one may have had no gradient in it."""
        assert self.state_lock.changing.locked()
        self._begin_gradients()
        self.arrivals.end_backward(has_round=self._backwards_are_rounds)

    @property
    def _backwards_are_rounds(self) -> bool:
        """True if each backward has a round of its own. Where parameters are sent early, those of a step share one."""
        return not (self.buckets.terms.sends_early and self.arrivals.at_boundary)

    def add_gradients(self, gradients: Mapping[int, Any]) -> None:
        """Take gradients of this micro-step, by parameter, which they fit (:meth:`Reduction.check`).

        Further ones of a parameter before the next update are summed in fp32. Where the device is addressable they are
        not copied: they must stay as they are until the update.
        """
        assert self.state_lock.changing.locked()
        self._begin_gradients()
        if before := self.arrivals.out_of_aside(gradients):
            self._take(before)
        if now := self.arrivals.put_aside(gradients):
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
        assert self.state_lock.changing.locked()
        late = frozenset[int]() if ended else self.arrivals.late(params)
        given, without = self.arrivals.settled([param for param in params if param not in late])
        if given or without:
            self._begin_gradients()
            self._take(given, without)
        if ended:
            self._take_late()
        return late

    def _take(self, gradients: Mapping[int, Any], without: Set[int] = frozenset()) -> None:
        """Fill in gradients, and launch what is full; ``without``: parameters that are settled without one."""
        params = gradients.keys() | without if without else gradients.keys()
        arrivals = self.arrivals
        if self._announced.asked and self.device.world_size == 1:
            self.early.recall(params)
        if arrivals.since.round is None or arrivals.has_left(params):
            self._begin_round()
        try:
            if arrivals.fill(gradients, without):
                self._launch()
        except BaseException as error:
            self.last_step.lose_gradient(error)
            raise

    def _begin_round(self) -> None:
        """Gradients of another round come. All ranks call it alike; they exchange every bucket again."""
        if self._announced.asked and self.device.world_size > 1:
            self.early.recall()
        if self.arrivals.since.round is not None:
            try:
                self._end_round()
            except BaseException as error:
                self.last_step.lose_gradient(error)
                raise

    def _begin_gradients(self) -> None:
        """Before a step's first gradient, wait until parameters are written: ranks exchange one thing at a time."""
        present = self.arrivals.since.present
        if not present or self.health.state is Health.LOST:
            self.health.check(Use.STEP)
        if not present and self.updates.publishes and not self.arrivals.has_begun:
            self.last_step.finish_publications()

    def _launch(self, *, ending: bool = False, boundary: bool = False) -> None:
        """Launch the buckets whose turn it is; at the boundary, have their parameters sent early."""
        terms = self.buckets.terms
        for work in self.arrivals.ready(ending=ending):
            at_boundary = self.arrivals.at_boundary
            present = self.reduction.launch(work, examine=self._examines and at_boundary)
            if at_boundary and terms.sends_early:
                # Among ranks a full bucket may hold parameters that are settled without a gradient on this one.
                last = terms.lends_gradient_memory and (boundary or not ending)
                self._announced.follow(work, present, last=last, keep_states=self._examines)

    def _take_late(self) -> None:
        """Take what nobody has settled: all ranks have it, or none."""
        if left := self.arrivals.out_of_aside():
            self._take(left)

    def _end_round(self, *, boundary: bool = False) -> None:
        self._launch(ending=True, boundary=boundary)
        self.arrivals.end_round()

    def reduce_now(self) -> None:
        """Launch all gradients that came so far. Those of a bucket may still be on their way when it returns.

        Gradients that come before the next update are added to them. Parameters that were sent early are recalled. All
        ranks call it alike, after a backward that brought each of them a gradient, and all go on alike: with another
        backward, or with the end of the micro-step, which then finds nothing left to reduce.

        Raises :class:`StateError` where ``update_in_backward`` has updated states.
        """
        assert self.state_lock.changing.locked()
        self.health.check(Use.STEP)
        self.early.call_off()
        self._launch_rest()

    def _launch_rest(self) -> None:
        """Launch every bucket that was not launched in this round, which goes on: a parameter that is taken on now may
        still have its gradient in it."""
        try:
            self._take_late()
            self._launch(ending=True, boundary=self.buckets.terms.updates_early)
        except BaseException as error:
            self.last_step.lose_gradient(error)
            raise

    def exchange(self, task: Callable[[], T]) -> T:
        """Return the result of a task that exchanges something with the other ranks, and is no part of a step.

        Between a backward and its update a bucket may be full, and launched, on some ranks alone: those that leave out
        no parameter of it. So all ranks first reduce the gradients that came.
        """
        self.reduce_first()
        return self.buckets.run(task)

    def reduce_first(self) -> None:
        """Reduce the gradients that came, on all ranks alike, before anything else is exchanged or forgotten.

        Where updates are made during backward, those of the buckets that are launched now are made, too.
        """
        if self.device.world_size > 1 and self.arrivals.holds_gradients:
            reduce = self._launch_rest if self.buckets.terms.updates_early else self.reduce_now
            self.state_lock.change("an exchange between ranks", reduce)

    def drop_gradients(self, params: Sequence[int] | None = None) -> None:
        """Forget the gradients of these parameters, or of all.

        If gradients of other parameters are kept and one was lost on its way, its error is raised and nothing is
        forgotten. :meth:`EarlyPublish.withdraw` brings back parameters that were sent early.
        """
        assert self.state_lock.changing.locked() or RUNNING_SECTIONS
        if not self.arrivals.holds_gradients:
            return
        try:
            present = self.arrivals.since.present
            self.early.recall(params if params is None else [param for param in params if param in present])
        except StateError:
            raise
        except Exception:  # all gradients go, so it does not matter that some were lost
            if params is not None:
                raise
        if params is not None:
            self.arrivals.drop(params)
        else:
            self._announced.end()
            self.arrivals.drop_all()

    def end_micro_step(self, *, reduce: bool = True, boundary: bool | None = None) -> bool:
        """End a micro-step. Return True at the boundary, where an update is due.

        The pipeline then holds no device gradients of a micro-step before the boundary.

        Args:
            reduce: False where no gradient was added, on any rank alike: the ranks need not meet.
            boundary: True or False from a caller that counts itself; None: as ``gradient_accumulation_steps`` says.
        """
        assert self.state_lock.changing.locked()
        boundary = self.arrivals.at_boundary if boundary is None else boundary
        if reduce or self.arrivals.since.backward:
            self._begin_gradients()
            if self.arrivals.since.round is None:
                self.early.recall(by_all=False)
            try:
                self._take_late()
                self._end_round(boundary=boundary)
            except BaseException as error:
                self.last_step.lose_gradient(error)
                raise
        else:
            self.health.check(Use.STEP)
        self.arrivals.count_micro_step(boundary=boundary)
        return boundary

    def accumulate_over(self, micro_steps: int, *, waiting: bool) -> None:
        """Have an update follow so many micro-steps from now on.

        Args:
            waiting: True if gradients wait for an update elsewhere.

        Raises:
            StateError: gradients wait for an update; or there is no memory for sums.
        """
        assert self.state_lock.changing.locked()
        self.check_idle("gradient_accumulation_steps is to change", waiting=waiting)
        if micro_steps > 1 and self.buckets.terms.lends_gradient_memory:
            raise StateError(
                f"gradient_accumulation_steps={micro_steps} from now on, where updates are made during backward "
                "(update_in_backward=True) and have no memory for sums; expected it at the beginning, as an argument"
            )
        self.config = replace(self.config, gradient_accumulation_steps=micro_steps)
        self.arrivals.per_update = micro_steps

    # --- update ------------------------------------------------------------------------------------

    def step(self, arguments: StepArguments, *, gathered: int = 0) -> StepReport:
        """Update every parameter that has a gradient, or none.

        With ``schedule="overlap"`` it returns while updates go on; the next call that waits for them raises their
        error. An error in mid-update (a device copy that fails) leaves the buckets before it updated and the others
        not. The step counts for all parameters, the gradients are gone, and the next step goes on from there. After
        the loss of another rank every call raises :class:`StateError`.

        Args:
            gathered: stage 3: a fingerprint of the gathers and their order (``LiveParams.release_all``).
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
            self._collect(given)
        except BaseException as error:
            self.last_step.lose_gradient(error)
            raise
        try:
            decision = self._decide(given, gathered)
        except CollectiveError as error:
            self.health.on(HealthEvent.LOSE_RANK, str(error))
            raise
        self.last_step.change(partial(self._carry_out, decision, after))
        self._skipped.note(decision.verdict, scale_fell=self.loss_scale < given.loss_scale)
        return replace(decision.report, changes=self.changes.mark)

    def _collect(self, given: StepArguments) -> None:
        """Have all gradients on the host; one that was lost on its way is an error here, before anything changes."""
        if self.arrivals.since.round is not None:
            self._take_late()
            self._end_round(boundary=True)
        for work in self.buckets.all:
            if work.task is not None:
                self.buckets.claim(work)
        if self._announced.asked and self._announced.differs(given):
            self.early.recall()

    def _decide(self, given: StepArguments, gathered: int) -> Decision:
        """Agree with all ranks on the update. This may recall parameters that were sent early, and changes nothing
        else."""
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
        works = tuple(work for work in reversed(agreed.order) if not agreed.present.isdisjoint(work.members))
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
            verdict.skipped is None, verdict.skipped, verdict.norm, verdict.coefficient, given.loss_scale, rates
        )
        delays = (
            self.config.schedule == "delayed" and max(map(float, self.counts.steps)) >= self.config.delay_warmup_steps
        )
        behind = self.last_step.behind  # before a recall, which adds to it
        if verdict.interferes or agreed.recalled:
            self.early.recall()
        return Decision(
            verdict=verdict,
            present=agreed.present,
            works=works,
            order=tuple(agreed.order),
            scalars=self.counts.scalars(given, agreed.present, verdict.coefficient / unscale),
            tensors=given.tensors,
            delayed=delays,
            behind=behind,
            report=report,
        )

    def _carry_out(self, decision: Decision, after: Event) -> None:
        """Change everything that a step changes, and ask for the updates."""
        self.last_step.verdict = decision.verdict
        if self.scaler and decision.verdict.overflow is not None:
            self.scaler.update(overflow=decision.verdict.overflow)
        self.last_step.begin(decision.behind)
        if decision.verdict.skipped:
            self.counts.skipped += bool(decision.verdict.overflow)
            self._announced.end()
            self.arrivals.drop_all(decision.order)
            self.updates.publish(self.buckets.all, decision.tensors, after)
        else:
            self._update(decision, after)
        if not (self.buckets.worker.behind or self.updates.finished):
            self.updates.finish()

    def _update(self, decision: Decision, after: Event) -> None:
        buckets, present, works = self.buckets, decision.present, decision.works
        last_step = self.last_step
        self.counts.count(present)
        ahead = self._announced.end()
        rest = [work for work in works if work not in ahead]
        self.updates.owe(rest, decision)
        for work in ahead:
            work.forget_gradients(GradientEvent.END)
            work.confirm()
        for work in set(buckets.all).difference(works, ahead):
            work.forget_gradients(GradientEvent.DROP)
        self.arrivals.begin(decision.order)
        # A parameter that lies in no bucket (of no elements) is written at once.
        now = [param for param in present if not buckets.of[param]] if decision.delayed else present
        last_step.published = {**last_step.published, **dict.fromkeys(now, True)}
        if decision.delayed:
            self.updates.publish(reversed(decision.order), decision.tensors, after)
            self.updates.start_ahead(works[::-1], decision)
            return
        early = [work for work in rest if work.publication.state is Publication.EARLY]
        self.updates.publish(reversed(decision.order), decision.tensors, after, but=present)
        self.updates.start([work for work in rest if work.publication.state is not Publication.EARLY], decision, after)
        # In the order of backward: the next gradients overwrite those that these updates still read.
        self.updates.start_ahead(early[::-1], decision)

    # --- parameters ----------------------------------------------------------------------------------

    @property
    def released(self) -> bool:
        """True if parameters have no memory on the device."""
        return bool(self.health.released)

    def check_present(self) -> None:
        """Raise :class:`StateError` if parameters have no memory on the device."""
        if self.released:
            raise StateError(self.health.released)

    def check_idle(self, what: str, *, waiting: bool) -> None:
        """Raise :class:`StateError` if gradients wait for an update (``waiting``: elsewhere), or no step may follow."""
        self.health.check(Use.STEP)
        if waiting or self.arrivals.holds_gradients:
            raise StateError(
                f"{what} while gradients wait for an update; expected it between two updates: after step() at an "
                "accumulation boundary, or after zero_grad() of the optimizer"
            )

    def release(self, reason: str) -> None:
        """Parameters lose their memory on the device now. :meth:`flush` came before, and nothing since.

        Args:
            reason: the message of the :class:`StateError` that each use of parameters raises until :meth:`restore`.
        """
        assert self.state_lock.changing.locked() or RUNNING_SECTIONS
        self.last_step.release(reason)

    def restore(self, tensors: Sequence[Any]) -> None:
        """Parameters have memory on the device again: send them. Each may be awaited (:meth:`await_param`)."""
        assert self.state_lock.changing.locked()
        self.last_step.restore(tensors)

    def flush(self, tensors: Sequence[Any]) -> None:  # waits
        """Wait for everything, and write to the parameters what ``schedule="delayed"`` still holds back."""
        assert self.state_lock.changing.locked()
        if self.last_step.behind or self.buckets.terms.sends_early:  # ranks exchange parameters
            self.reduce_first()
        self.early.recall()
        self.last_step.flush(tensors)

    def await_param(self, param: int, *, on_host: bool = False) -> None:  # waits
        """Order the device's work that this thread asks for from now on after the parameter's update.

        Args:
            on_host: wait until the parameter has been written, for readers on any stream.

        Raises the error of the updates, and :class:`StateError` where parameters are released, and among ranks where
        it was sent early, for a step that is still to come.
        """
        self.check_present()
        if self.early.holds(param):
            self.health.check(Use.PUBLISH)  # else it may be a step that broke off
            if self.device.world_size > 1:
                raise StateError(
                    f"parameter {self.params[param].name!r} is read between backward() and step(), and "
                    "update_in_backward=True has written to it; expected engine.step() or engine.zero_grad() before, "
                    "on every rank: set update_in_backward=False to read it there"
                )
            # Readers hold the lock, but no change goes on, so that a signal handler may save while they wait.
            self.state_lock.change("a read of a parameter", self.early.withdraw)
        try:
            self.updates.await_param(param, on_host=on_host)
        except BaseException:
            self.state_lock.change("a read of a parameter", self.last_step.finish)
            raise

    @contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Record what is done inside to a file, as :meth:`Trace.to_file`; both its ends wait for the last update."""
        self.state_lock.change("trace()", self.last_step.finish)
        with self.device.trace.to_file(path):
            yield
            self.state_lock.change("trace()", self.last_step.finish)

    @property
    def loss_scale(self) -> float:
        """The factor on the loss in the next backward."""
        return self.scaler.scale if self.scaler else 1.0

    def where(self, *own: Callable[[], str]) -> str:
        """Return where this process is, as lines for somebody who waits for a step. Takes no lock, and raises nothing.

        Args:
            own: return the front end's lines.
        """
        group, process = self.device.collectives, os.getpid()
        forked = f", a fork of process {self._process}" * (process != self._process)
        title = f"offload-core: rank {group.rank} of {group.world_size}, process {process}{forked}"
        parts = (self.health.where, self.counts.where, self.arrivals.where, self.state_lock.where, group.where)
        return told(title, *parts, *own, threads.where)

    def memory_report(self, planned: Iterable[PlanRow], held: Mapping[tuple[str, str], int]) -> MemoryReport:
        """Host memory planned and held now, and the front end's own, by ``(where, what)``."""
        numel = sum(spec.numel for spec in self.params)
        store = self.buckets.store
        own = {(HOST, what): n_bytes for what, n_bytes in self.memory.report().items()}
        kept = {(store.place, what): n_bytes for what, n_bytes in store.held().items()}
        held = {**own, **kept, **held}
        return MemoryReport.of(numel, [*self.buckets.planned, *planned], held, shared=self.memory.shared_bytes)
