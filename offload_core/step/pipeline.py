"""The composer: gradients in, updated parameters out.

A gradient's way: :meth:`Pipeline.add_gradient` -> its bucket fills and is launched (``reduction.py``: the device
reduces it over the ranks and brings it to its owner's host memory; there it waits, or is added to the gradients of
earlier micro-steps) ->
:meth:`Pipeline.step` makes one ``Decision`` (``decision.py``: norm, clipping, skipping) -> one C pass (``update.py``:
unscale, clip, Adam, cast) -> the device publishes the shards to every rank's parameters.

``schedule="overlap"`` changes only who does it: the tasks that follow a launch are done by one thread, in the order in
which they were asked for (``worker.py``), while the caller goes on. The caller claims a bucket back from that thread
(:meth:`LocalBuckets.claim`) before it touches it. A reader waits only for the parameter that it reads
(:meth:`Pipeline.await_param`).

With ``update_in_backward`` a bucket's new parameters are published early (``early_publish.py``): during backward, as
soon as its gradients are on the host. If no check of all gradients comes first, this updates its states, too. Otherwise
the states stay as they are: the step updates them, or, after clipping or an overflow, sends the parameters again
(:meth:`Pipeline.recall`). In the first case gradients need few buckets' memory on the host (``gradient_memory.py``).

One rank whose tensors are host memory moves nothing (``BucketTerms.direct``): gradients are read and parameters written
where they are. Only gradients that accumulate are copied, to fp32.

An interrupt (``KeyboardInterrupt``) leaves the state before the step or the state after it: a step changes states in
one section that no signal cuts in two (:meth:`Pipeline._carry_out`).
"""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ..config.options import OffloadConfig
from ..config.state_formats import Master
from ..device.events import Event
from ..device.protocols import Device
from ..errors import CollectiveError, StateError
from ..layout.partition import ParamSpec
from ..memory.plan import HOST, PlanRow
from ..memory.report import MemoryReport
from ..rules import Hyper, Rule, Scalars
from ..support.threads import uninterrupted
from ..support.user_line import UserLine
from .agreement import agree
from .bucket_states import Gradient, GradientEvent, Publication, PublicationEvent
from .bucket_terms import BucketTerms
from .buckets import LocalBuckets
from .decision import Decision, Given, StepReport, Verdict, examine
from .early_publish import Announcement, EarlyPublish
from .local_bucket import Writes
from .loss_scale import LossScaler
from .reduction import Reduction
from .state_lock import StateLock, changes
from .update import Updates

__all__ = ["Pipeline", "StepReport"]

T = TypeVar("T")
_MANY_SKIPPED = 3


class Pipeline:
    """Optimizer states and the schedule of one process's updates.

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
        self._state_lock = StateLock()
        self.updates = 0
        """Updates made so far."""
        self.publications = 0
        """Steps and flushes that have set ``published``. After an interrupt the caller sees here if its own was one."""
        self.save_asked = False
        """This rank was asked to save (by a signal); the next step tells the others."""
        self.save_agreed = False
        """Up to the last step a rank was asked to save; the same on all ranks."""
        self._last: Verdict | None = None
        """The last step's."""
        self._unusable: str | None = None
        """The reason why states are to be used no more: an update or a load broke off."""
        self._last_step: str | None = None
        """The reason why no step is to follow: other ranks have parameters that this one has not."""
        self._skipped_in_a_row = 0
        self._lost: CollectiveError | None = None
        """The error that ended the exchange between ranks."""
        self._begin()

    def _begin(self) -> None:
        """Have no parameters."""
        self.steps: list[np.ndarray] = []
        """Updates that each parameter has had: zero-dimensional float32 arrays, so that a front end can share them."""
        self._counts: list[np.ndarray] = [np.zeros(0, np.float32)]
        """The memory of ``steps``: an array for each :meth:`add_parameters`."""
        self.published: Mapping[int, bool] = {}
        """Parameters that the last :meth:`step` or :meth:`flush` wrote (with ``schedule="delayed"`` those of the step
        before); False where it broke off before all of the parameter was written."""
        self.left_behind = False
        """True if a step broke off on one rank, and parameters are of the step before until they are sent anew."""
        self.buckets = LocalBuckets(self.config, self.device, scaled=self.scaler is not None)
        self._examines = self.buckets.terms.examines
        self._reduction = Reduction(self.buckets)
        self._updates = Updates(self.buckets)
        self._early = EarlyPublish(self.buckets, self._updates)
        self.params = self.buckets.params
        self.memory = self.buckets.memory

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(
            "copying or pickling an offloaded optimizer's pipeline, which holds addresses; expected its states to be "
            "copied: optimizer.state_dict() in torch, to_pytree() and load_pytree() in JAX"
        )

    @property
    def state_lock(self) -> StateLock:
        """Held inside each method that changes anything; front ends hold it while they change or save anything."""
        return self._state_lock

    # --- parameters and states ---------------------------------------------------------------------

    @property
    def terms(self) -> BucketTerms:
        """The rules by which :meth:`add_parameters` allocates; the plan is made with them."""
        return self.buckets.terms

    @changes("the registration of parameters")
    def add_parameters(
        self, specs: Sequence[ParamSpec], tensors: Sequence[Any], *, frozen: Sequence[ParamSpec] = ()
    ) -> None:
        """Take on parameters: allocate their states, master weights starting from ``tensors``.

        The tensors may be of another element type than the specs (the model's own, before it is cast).

        Args:
            frozen: parameters that are not trained; the front end allocates their shards in ``memory``.
        """
        self.finish()
        self._reduction.take_on(self.buckets.add(specs, tensors, frozen))
        self._counts.append(np.zeros(len(specs), np.float32))
        self.steps += [self._counts[-1][i : i + 1].reshape(()) for i in range(len(specs))]

    @changes("the registration of parameters")
    def start_over(self) -> None:
        """Forget all parameters and their states, and free their memory. Others may be added then."""
        self.finish()
        self.drop_gradients()
        self.buckets.store.close()
        self._begin()

    def run_in_order(self, task: Callable[[], T]) -> T:
        """Do a task after all earlier ones, and return its result: ranks exchange one thing at a time, in one order."""
        return self.buckets.run(task)

    @contextmanager
    def replacing_states(self, *, masters: bool = True) -> Iterator[None]:
        """Replace all states inside. After an error there every call raises until they have been replaced.

        Args:
            masters: False: master weights follow their parameters, which may still get earlier values back.
        """
        if self._lost is None:
            self._unusable = self._last_step = None
        self.drop_gradients()
        self.finish()
        if masters:
            self.buckets.store.forget_replaced()
        try:
            yield
        except BaseException as error:
            self._unusable = (
                f"loading a checkpoint broke off ({error!r}): states are partly those of before, partly its; "
                "expected another one to be loaded next"
            )
            raise

    # --- gradients ---------------------------------------------------------------------------------

    def check_gradient(self, param: int, gradient: Any) -> None:
        """Raise :class:`GradientError` unless the gradient fits its parameter."""
        self._reduction.check(param, gradient)

    @changes("backward()")
    def add_gradient(self, param: int, gradient: Any) -> None:
        """As :meth:`add_gradients`, of one that may not fit."""
        self._begin_gradients()
        self._reduction.check(param, gradient)
        self.add_gradients({param: gradient})

    @changes("backward()")
    def add_gradients(self, gradients: Mapping[int, Any]) -> None:
        """Take gradients of this micro-step, by parameter, which they fit (:meth:`check_gradient`).

        Further ones of a parameter before the next update are summed in fp32. Where the device is addressable they are
        not copied: they must stay as they are until the update.
        """
        self._begin_gradients()
        if before := self._reduction.out_of_aside(gradients):
            self._take(before)
        if now := self._reduction.put_aside(gradients):
            self._take(now)

    @changes("backward()")
    def settle(self, params: Collection[int], *, ended: bool = False) -> Set[int]:
        """No gradient of these parameters is to come in this backward, besides those that came.

        All ranks call it alike: at the same points of backward, with the same parameters. It concerns those whose
        gradients may come on some ranks alone (:attr:`ParamSpec.settled_with`), and no others.

        Args:
            ended: the backward has ended.

        Returns:
            Those of them that are not settled before the backward has ended: a gradient of theirs came too late once.
        """
        late = frozenset[int]() if ended else self._reduction.late(params)
        given, without = self._reduction.settled([param for param in params if param not in late])
        if given or without:
            self._begin_gradients()
            self._take(given, without)
        if ended:
            self._take_late()
        return late

    def _take(self, gradients: Mapping[int, Any], without: Set[int] = frozenset()) -> None:
        """Fill in gradients, and launch what is full; ``without``: parameters that are settled without one."""
        params = gradients.keys() | without if without else gradients.keys()
        if self._early.asked:
            if self.device.world_size == 1:
                self.recall(params)
            elif self._reduction.begins_round(params):  # ranks exchange every bucket again
                self.recall()
        try:
            if self._reduction.has_left(params):
                self._end_round()
            if self._reduction.fill(gradients, without):
                self._launch()
        except BaseException as error:
            self._break_off(error)
            raise

    def has_gradient(self, param: int) -> bool:
        """True if the parameter had a gradient on this rank since the last update."""
        return param in self._reduction.arrivals.present

    def _begin_gradients(self) -> None:
        """Before a step's first gradient, wait until parameters are written: ranks exchange one thing at a time."""
        if self._lost is not None:
            self.refuse_after_the_last()
        if self._reduction.arrivals.present:
            return
        self._refuse_after_the_last()
        if self._updates.publishes and not self.holds_gradients:
            self.finish_publications()

    def _launch(self, *, ending: bool = False, boundary: bool = False) -> None:
        """Launch the buckets whose turn it is; at the boundary, have their parameters sent early."""
        terms = self.buckets.terms
        for work in self._reduction.ready(ending=ending):
            at_boundary = self._reduction.at_boundary
            present = self._reduction.launch(work, examine=self._examines and at_boundary)
            if present is not None and at_boundary and terms.sends_early:
                last = boundary and terms.lends_gradient_memory
                self._early.follow(work, present, last=last, keep_states=self._examines)

    def _end_last_round(self, *, boundary: bool) -> None:
        self._take_late()
        self._end_round(boundary=boundary)

    def _take_late(self) -> None:
        """Take what nobody has settled: all ranks have it, or none."""
        if left := self._reduction.out_of_aside():
            self._take(left)

    def _end_round(self, *, boundary: bool = False) -> None:
        self._launch(ending=True, boundary=boundary)
        self._reduction.end_round()

    @changes("zero_grad()")
    def drop_gradients(self, params: Sequence[int] | None = None) -> None:
        """Forget the gradients of these parameters, or of all.

        If gradients of other parameters are kept and one was lost on its way, its error is raised and nothing is
        forgotten. :meth:`withdraw` brings back parameters that were sent early.
        """
        if not self.holds_gradients:
            return
        try:
            present = self._reduction.arrivals.present
            self.recall(params if params is None else [param for param in params if param in present])
        except StateError:
            raise
        except Exception:  # all gradients go, so it does not matter that some were lost
            if params is not None:
                raise
        if params is not None:
            self._reduction.drop(params)
        else:
            self._reduction.drop_all()
            self._early.end()

    @changes("step()")
    def end_micro_step(self, *, reduce: bool = True, boundary: bool | None = None) -> bool:
        """End a micro-step. Return True at the boundary, where an update is due.

        The pipeline then holds no device gradients of a micro-step before the boundary.

        Args:
            reduce: False where no gradient was added, on any rank alike: the ranks need not meet.
            boundary: True or False from a caller that counts itself; None: as ``gradient_accumulation_steps`` says.
        """
        boundary = self.at_boundary if boundary is None else boundary
        if reduce:
            self._begin_gradients()
            if self._reduction.arrivals.round is None:
                self.recall()
            try:
                self._end_last_round(boundary=boundary)
            except BaseException as error:
                self._break_off(error)
                raise
        self._reduction.count_micro_step(boundary=boundary)
        return boundary

    @property
    def holds_gradients(self) -> bool:
        """True if gradients have arrived that wait for an update."""
        return bool(self._early.asked) or self._reduction.holds_gradients

    @property
    def micro_steps(self) -> int:
        """Micro-steps since the last boundary."""
        return self._reduction.arrivals.micro_steps

    @property
    def at_boundary(self) -> bool:
        """Whether an update is due at the end of this micro-step."""
        return self._reduction.at_boundary

    # --- update ------------------------------------------------------------------------------------

    @changes("step()")
    def step(
        self,
        hypers: Sequence[Hyper],
        tensors: Sequence[Any],
        *,
        divisor: float = 1.0,
        groups: Sequence[int] | None = None,
        gathered: int = 0,
    ) -> StepReport:
        """Update every parameter that has a gradient, or none.

        With ``schedule="overlap"`` it returns while updates go on; the next call that waits for them raises their
        error. An error in mid-update (a device copy that fails) leaves the buckets before it updated and the others
        not. The step counts for all parameters, the gradients are gone, and the next step goes on from there. After
        the loss of another rank every call raises :class:`StateError`.

        Args:
            hypers: one for each parameter group.
            tensors: the device parameters to write, one for each parameter.
            divisor: of the summed gradients, besides the loss scale.
            groups: the parameter group of each parameter; None: as they were added.
            gathered: stage 3: a fingerprint of the gathers and their order (``LiveParams.release_all``).
        """
        given = self._given(hypers, tensors, divisor, groups)
        self._refuse_other(given)
        self.refuse_after_the_last()
        after = self.device.mark()
        self._early.begin_step(given.tensors, self._reduction.last)
        if not self._updates.finished:
            self._or_abort(self._updates.finish_states if self.holds_gradients else self._updates.finish)
        try:
            self._collect(given)
        except BaseException as error:
            self._break_off(error)
            raise
        try:
            decision = self._decide(given, gathered)
        except CollectiveError as error:
            self._lost = error
            raise
        self._change(partial(self._carry_out, decision, after))
        self._watch_skipped(decision.verdict, given.loss_scale)
        return decision.report

    def _watch_skipped(self, verdict: Verdict, loss_scale: float) -> None:
        """Warn once if several steps in a row were skipped, and no lower loss scale can help."""
        if not verdict.overflow or self.loss_scale < loss_scale:
            self._skipped_in_a_row = 0
            return
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row == _MANY_SKIPPED:
            UserLine.now("torch", "jax").warn(
                UserWarning(
                    f"the last {_MANY_SKIPPED} steps were skipped, because their gradients had an inf or a NaN "
                    "(report.skipped says so for each); expected finite gradients: look at the loss, the learning rate "
                    "and the data"
                )
            )

    def _collect(self, given: Given) -> None:
        """Have all gradients on the host; one that was lost on its way is an error here, before anything changes."""
        if self._reduction.arrivals.round is not None:
            self._end_last_round(boundary=True)
        for work in self.buckets.all:
            if work.task is not None:
                self.buckets.claim(work)
        if self._early.asked and self._early.differs(given):
            self.recall()

    def _decide(self, given: Given, gathered: int) -> Decision:
        """Agree with all ranks on the update. This may recall parameters that were sent early, and changes nothing
        else."""
        agreed = agree(
            self.buckets,
            self._reduction,
            examines=self._examines,
            recalled=self._early.recalled,
            terms=self._terms_of(given, gathered) if self.device.collectives.world_size > 1 else "",
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
            any_gradient=bool(works),
            unscale=unscale,
            max_norm=max_norm,
            scaled=self.scaler is not None,
        )
        rates = tuple(hyper.lr for hyper in given.hypers)
        report = StepReport(
            verdict.skipped is None, verdict.skipped, verdict.norm, verdict.coefficient, given.loss_scale, rates
        )
        delays = self.config.schedule == "delayed" and max(map(float, self.steps)) >= self.config.delay_warmup_steps
        behind = self.behind  # before a recall, which adds to it
        if verdict.interferes or agreed.recalled:
            self.recall()
        return Decision(
            verdict=verdict,
            present=agreed.present,
            works=works,
            order=tuple(agreed.order),
            scalars=self._scalars(given, agreed.present, verdict.coefficient / unscale),
            tensors=given.tensors,
            delayed=delays,
            behind=behind,
            report=report,
        )

    def _terms_of(self, given: Given, gathered: int) -> str:
        """All that must be the same in every rank's call of :meth:`step`."""
        numbers = [hyper.numbers for hyper in given.hypers]
        return f"{numbers} {[given.groups, given.divisor, given.loss_scale, gathered]}"

    def _change(self, act: Callable[[], None]) -> None:
        """Do this in one section that no signal cuts in two; after an error the step has broken off."""

        def section() -> None:
            try:
                act()
            except BaseException as error:
                self._abort(error)
                raise

        uninterrupted(section)

    def _carry_out(self, decision: Decision, after: Event) -> None:
        """Change everything that a step changes, and ask for the updates."""
        self._last = decision.verdict
        if self.scaler and decision.verdict.overflow is not None:
            self.scaler.update(overflow=decision.verdict.overflow)
        self._begin_publication(decision.behind)
        if decision.verdict.skipped:
            self._reduction.drop_all(decision.order)
            self._early.end()
            self._updates.publish(self.buckets.all, decision.tensors, after)
        else:
            self._update(decision, after)
        if not (self.buckets.worker.behind or self._updates.finished):
            self._updates.finish()

    def _begin_publication(self, params: Iterable[int]) -> None:
        self.published = dict.fromkeys(params, True)
        self.left_behind = False
        self.publications += 1

    def _update(self, decision: Decision, after: Event) -> None:
        buckets, present, works = self.buckets, decision.present, decision.works
        self._count(present)
        self.updates += 1
        ahead = self._early.end()
        self._updates.owe([work for work in works if work not in ahead], decision)
        for work in ahead:
            work.forget_gradients(GradientEvent.END)
            work.confirm()
        for work in set(buckets.all).difference(works, ahead):
            work.forget_gradients(GradientEvent.DROP)
        self._reduction.begin(decision.order)
        # A parameter that lies in no bucket (of no elements) is written at once.
        now = [param for param in present if not buckets.of[param]] if decision.delayed else present
        self.published = {**self.published, **dict.fromkeys(now, True)}
        if decision.delayed:
            self._updates.publish(reversed(decision.order), decision.tensors, after)
            self._updates.start_ahead(works[::-1], decision)
            return
        rest = [work for work in works if work not in ahead]
        early = [work for work in rest if work.publication.state is Publication.EARLY]
        for work in works:
            work.stale -= present
        self._updates.publish(reversed(decision.order), decision.tensors, after)
        self._updates.start([work for work in rest if work.publication.state is not Publication.EARLY], decision, after)
        # In the order of backward: the next gradients overwrite those that these updates still read.
        self._updates.start_ahead(early[::-1], decision)

    # --- parameters that are published early ---------------------------------------------------------

    @changes("backward()")
    def expect_step(
        self,
        hypers: Sequence[Hyper],
        tensors: Sequence[Any],
        *,
        divisor: float = 1.0,
        groups: Sequence[int] | None = None,
        before_send: Callable[[Collection[int]], None] = lambda params: None,
    ) -> None:
        """Announce the arguments of the :meth:`step` that ends this micro-step, before its first gradient.

        With ``update_in_backward`` parameters may then be written as soon as their gradients have arrived, all of
        their bucket. An error after this is an error in mid-update, as :meth:`step` says.

        Args:
            before_send: called in this thread with parameters before they are sent: their readers must wait from then
                on. Every call that may launch a bucket may call it.
        """
        begun = self.holds_gradients and self.config.gradient_accumulation_steps == 1
        interfered = self._last is not None and self._last.interferes  # a clipped step often follows another
        if not self.buckets.terms.sends_early or begun or not self.at_boundary or interfered:
            return
        self.recall()
        given = self._given(hypers, tensors, divisor, groups)
        scalars = self._scalars(given, range(len(self.params)), 1.0 / given.unscale)
        self._early.announce(Announcement(given, scalars, before_send))

    def confirm_step(
        self,
        hypers: Sequence[Hyper],
        tensors: Sequence[Any],
        *,
        divisor: float = 1.0,
        groups: Sequence[int] | None = None,
    ) -> None:
        """The announced step has come, with these arguments of :meth:`step`: buckets that leave at the end of the
        micro-step are updated and sent with them. Call it before :meth:`end_micro_step`.

        If parameters were sent with other arguments, and states are as they were, :meth:`step` recalls them.

        Raises :class:`StateError` where states were updated with other arguments.
        """
        if self._early.announced is None:
            return
        given = self._given(hypers, tensors, divisor, groups)
        self._refuse_other(given)
        if not (self._early.asked and self._early.differs(given)):
            self._early.renew(given, self._scalars(given, range(len(self.params)), 1.0 / given.unscale))

    def _given(
        self, hypers: Sequence[Hyper], tensors: Sequence[Any], divisor: float, groups: Sequence[int] | None
    ) -> Given:
        groups = [spec.group for spec in self.params] if groups is None else list(groups)
        return Given(list(hypers), list(tensors), divisor, groups, self.loss_scale)  # the tensors are read later

    def check_expected(
        self, hypers: Sequence[Hyper], *, divisor: float = 1.0, groups: Sequence[int] | None = None
    ) -> None:
        """Raise :class:`StateError` where gradients were used with other arguments than these of :meth:`step`."""
        self._refuse_other(self._given(hypers, (), divisor, groups))

    def _refuse_other(self, given: Given) -> None:
        if self._early.asked and not self._examines and self._early.differs(given):
            raise StateError(
                "hyperparameters, parameter groups or the loss's share changed between backward() and step(), and "
                "update_in_backward=True has used them; expected them as they were: set them back, or before backward()"
            )

    @changes("a change of parameters")
    def recall(self, params: Collection[int] | None = None) -> None:
        """If any of these parameters was sent early, all early sends are void: the step sends the parameters again.

        Raises :class:`StateError` if states have been updated, too.
        """
        touched = self._early.of(params)
        if not touched:
            return
        if not self._examines:
            param = min(touched[0].members)
            raise StateError(
                f"parameter {self.params[param].name!r}: its gradient has been used, for update_in_backward=True; "
                "expected engine.step() next: set update_in_backward=False to discard gradients, to add to them or to "
                "read parameters before it"
            )
        self._early.stop()
        self._or_abort(self._updates.finish_publications)
        self._early.recall()

    @changes("zero_grad()")
    def withdraw(self) -> None:
        """Undo early sends: write the parameters of the last step again, and wait for them.

        All processes call it alike.
        """
        self.recall()
        if self._early.recalled:
            self.flush(self._early.tensors)

    def _scalars(self, given: Given, params: Collection[int], grad_scale: float) -> Scalars:
        steps = np.concatenate(self._counts)
        rules = [spec.rule or self._rule for spec in self.params]
        return Scalars(rules, given.hypers, given.groups, steps, params, grad_scale=grad_scale)

    def _count(self, params: Collection[int]) -> None:
        """These parameters have had an update more."""
        had = np.zeros(len(self.params), np.float32)
        had[np.fromiter(params, np.int64, len(params))] = 1
        for counts in self._counts:
            counts += had[: len(counts)]
            had = had[len(counts) :]

    # --- waiting -------------------------------------------------------------------------------------

    @changes("flush()")
    def flush(self, tensors: Sequence[Any]) -> None:
        """Wait for everything, and write to the parameters what ``schedule="delayed"`` still holds back."""
        self._refuse_after_the_last()
        self.recall()
        after = self.device.mark()

        def publish() -> None:
            self._begin_publication(self.behind)
            self._updates.publish(self.buckets.all, list(tensors), after)

        self._change(publish)
        self.finish()

    @property
    def behind(self) -> frozenset[int]:
        """Parameters that are yet to get the value of their master weights."""
        return frozenset().union(*(work.stale for work in self.buckets.all))

    def _or_abort(self, act: Callable[[], None]) -> None:
        """Do this; an error ends the step. An interrupt does not: what it cut off can be waited for again."""
        try:
            act()
        except BaseException as error:
            if isinstance(error, Exception) or self._updates.broke_off:
                uninterrupted(partial(self._abort, error))
            raise

    def _break_off(self, error: BaseException) -> None:
        """A gradient was lost. If the step was announced, this is an error in mid-update, and ends it."""
        if self._early.announced is not None:
            uninterrupted(partial(self._abort, error))
        elif isinstance(error, CollectiveError):
            self._lost = error

    @property
    def finished(self) -> bool:
        """True if nothing of the last :meth:`step` may still be on its way."""
        return self._updates.finished

    @changes("the end of a step")
    def finish(self) -> None:
        """Wait until all parameters and states are what the last :meth:`step` makes of them.

        Raises what went wrong in its updates.
        """
        self.refuse_if_unusable()
        self._or_abort(self._updates.finish)

    @changes("the end of a step")
    def finish_publications(self) -> None:
        """Wait until all parameters that the last :meth:`step` writes are written; states may still be on their way.

        Raises what went wrong.
        """
        self.refuse_if_unusable()
        self._or_abort(self._updates.finish_publications)

    def await_param(self, param: int) -> None:
        """Order the device's work that this thread asks for from now on after the parameter's update.

        Raises the error of the updates, and among ranks :class:`StateError` where it was sent early, for a
        step that is still to come.
        """
        if self._early.holds(param):
            if self.device.world_size > 1:
                raise StateError(
                    f"parameter {self.params[param].name!r} is read between backward() and step(), and "
                    "update_in_backward=True has written to it; expected engine.step() or engine.zero_grad() before, "
                    "on every rank: set update_in_backward=False to read it there"
                )
            self.withdraw()
        try:
            self._updates.await_param(param)
        except BaseException:
            self.finish()
            raise

    def update_of(self, param: int) -> Event:
        """The end of the parameter's updates that were asked for so far; another thread may wait for it."""
        return self._updates.update_of(param)

    @property
    def host_shards(self) -> bool:
        """True if this process's shards of partitioned parameters lie in host memory."""
        return self.buckets.terms.host_shards

    @property
    def usable(self) -> bool:
        """True if states are whole, and a step may follow."""
        return self._unusable is None and self._last_step is None and self._lost is None

    def refuse_if_unusable(self) -> None:
        if self._unusable is not None:
            raise StateError(self._unusable)

    def refuse_after_the_last(self) -> None:
        """Raise if no gradient and no step may follow: a rank was lost, or states are to be used no more."""
        self._refuse_after_the_last()
        if self._lost is not None:
            raise CollectiveError(str(self._lost))

    def _refuse_after_the_last(self) -> None:
        if (reason := self._unusable or self._last_step) is not None:
            raise StateError(reason)

    def _abort(self, error: BaseException) -> None:
        """The step broke off: states are updated all the same, and parameters that did not arrive are sent anew."""
        if isinstance(error, CollectiveError):  # other ranks went another way: there is no going on
            self._lost = error
            self._unusable = (
                f"the last update broke off ({error}): parameters and states are partly of one step, partly of "
                "the next; expected no further use: resume from the last checkpoint"
            )
        self.buckets.recover()
        announced, used = self._early.announced, self._early.end()
        if announced is not None:  # their states have had the update: count it
            self._count(frozenset().union(*(work.sent_early for work in used)))
        lost = self._updates.forget()
        lost.update(
            work
            for work in self.buckets.all
            if work.publication.state is Publication.EARLY or work.gradient.state is Gradient.USED
        )
        completed = [] if self._lost is not None else self._updates.complete()
        self.left_behind = bool(lost or completed) and self.device.world_size == 1
        if (lost or completed) and self.device.world_size > len(self.device.ranks):
            self._last_step = (  # other processes have sent their parameters, and will not do so again
                f"the last update broke off on this rank alone ({error}): its states are of that step, its parameters "
                "partly of the one before; expected no further step: resume from the last checkpoint"
            )
        self._reduction.begin()
        for work in self.buckets.all:
            work.take()
            work.written = None
            work.forget_gradients(GradientEvent.ABORT)
            if work in lost and work.master is Master.APART:
                work.fall_behind(work.members, PublicationEvent.LOSE)
            elif work.publication.state is Publication.SENT:
                work.publication.on(PublicationEvent.ARRIVE)
            elif work in completed and work.writes is Writes.STAGING:
                work.fall_behind(work.members)
        if self._lost is not None:
            self.published = {}  # parameters stay those of the step before, where nothing was written in place
        else:
            behind = self.behind
            self.published = {param: param not in behind for param in self.published}

    @contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Record what is done inside to a file, as :meth:`Trace.to_file`; both its ends wait for the last update."""
        self.finish()
        with self.device.trace.to_file(path):
            yield
            self.finish()

    @property
    def loss_scale(self) -> float:
        """The factor on the loss in the next backward."""
        return self.scaler.scale if self.scaler else 1.0

    def memory_report(self, planned: Iterable[PlanRow], held: Mapping[tuple[str, str], int]) -> MemoryReport:
        """Host memory planned and held now, and the front end's own, by ``(where, what)``."""
        numel = sum(spec.numel for spec in self.params)
        store = self.buckets.store
        own = {(HOST, what): n_bytes for what, n_bytes in self.memory.report().items()}
        kept = {(store.place, what): n_bytes for what, n_bytes in store.held().items()}
        return MemoryReport.of(numel, [*self.buckets.planned, *planned], {**own, **kept, **held})
