"""The composer: gradients in, updated parameters out.

A gradient's way: :meth:`Pipeline.add_gradient` -> its bucket fills and is launched (``gradients.py``: the device
reduces it over the ranks to its owner's host memory, where it is held, or summed with earlier micro-steps') ->
:meth:`Pipeline.step` (norm, clip) -> one C pass: unscale, clip, Adam, cast (``updates.py``) -> the device publishes the
shards to every rank's parameters.

``schedule="overlap"`` changes only who does it: what follows a launch is done by one thread, in the order in which it
was asked for (``tasks.py``), while the caller goes on. A bucket that was given to that thread is claimed back
(:meth:`LocalBuckets.claim`) before the caller touches it. Who reads a parameter waits for it alone
(:meth:`Pipeline.await_param`).

With ``update_in_backward`` a bucket's new parameters are *emitted* (``emission.py``): sent to the device during
backward, as soon as its gradients are on the host. Where nothing examines gradients first its states are updated on the
way. Else they are left as they are, and the step, which knows whether the gradients are clipped, updates them
(*commits*), or has the parameters sent again (:meth:`Pipeline._recall`).

One rank whose tensors are host memory moves nothing (``LocalBuckets.direct``): gradients are read and parameters
written where they are, and nothing is done behind the caller's back.
"""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from .agreement import Agreement, agree
from .bucket_terms import BucketTerms
from .buckets import LocalBuckets, StateRun
from .config import OffloadConfig
from .cpu_adam import STATE_NAMES, AdamHyper
from .device import Device, Event
from .dtypes import FLOAT16
from .emission import Announcement, Emission
from .errors import CollectiveError, StateError
from .grad_norm import clip_coefficient
from .gradients import Gradients
from .local_bucket import LocalBucket
from .loss_scale import LossScaler
from .memory_plan import PlanRow
from .memory_report import MemoryReport
from .partition import ParamSpec
from .regions import Elements, InMemory
from .step_state import BucketEvent, BucketState
from .updates import Scalars, Updates

T = TypeVar("T")


@dataclass(frozen=True)
class StepReport:
    """What a call of ``step`` did."""

    updated: bool
    """Whether parameters were updated."""
    skipped: str | None = None
    """Why nothing was updated: ``"accumulating"``, ``"overflow"`` (an inf or NaN gradient) or ``"no gradients"``."""
    grad_norm: float | None = None
    """Global L2 norm of the averaged, unscaled gradients before clipping; None where it was not computed."""
    clip_coefficient: float = 1.0
    """What the gradients were multiplied by to clip them; 1: they were not clipped."""
    loss_scale: float = 1.0
    """The loss scale that these gradients carried."""
    lr: tuple[float, ...] = ()
    """Learning rates of the parameter groups; none while gradients accumulate."""
    step: int = 0
    """The update that this was or would have been, counted from 1 on through checkpoints."""


class Pipeline:
    """Optimizer states and the schedule of one process's updates.

    Parameters are numbered in the order in which they were added. The tensors that cross this interface are
    the device's: one-dimensional and contiguous. Whatever reads or writes states first waits for the last step's
    updates, and raises what went wrong in them.
    """

    def __init__(self, config: OffloadConfig, device: Device, scaler: LossScaler | None) -> None:
        self.config = config
        self.device = device
        self.scaler = scaler
        self.op_order = config.op_order or "torch"
        self.steps: list[np.ndarray] = []
        """Updates that each parameter has had: zero-dimensional float32 arrays, so that a front end can share them."""
        self._buckets = LocalBuckets(config, device)
        self.published: frozenset[int] = frozenset()
        """Parameters that the last :meth:`step` or :meth:`flush` wrote: with ``schedule="delayed"`` those of the step
        before."""
        self._gradients = Gradients(self._buckets, lambda: self._examines, self._launched)
        self._updates = Updates(self._buckets, self.op_order)
        self._emission = Emission(self._buckets, self._updates)
        self._broken: CollectiveError | None = None
        """What an update broke off with among ranks."""
        self._half_loaded: BaseException | None = None
        """What loading a checkpoint broke off with."""
        self._clips = False
        """Whether the last update was clipped or skipped: the next is likely to be so, too."""
        self.params = self._buckets.params
        self.memory = self._buckets.memory

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(
            "copying or pickling an offloaded optimizer's pipeline, which holds addresses; expected its states to be "
            "copied: optimizer.state_dict() in torch, to_pytree() and load_pytree() in JAX"
        )

    # --- parameters and states ---------------------------------------------------------------------

    @property
    def terms(self) -> BucketTerms:
        """The rules by which :meth:`add_parameters` allocates: they plan."""
        return self._buckets

    def add_parameters(
        self, specs: Sequence[ParamSpec], tensors: Sequence[Any], *, frozen: Sequence[ParamSpec] = ()
    ) -> None:
        """Take on parameters: allocate their states, master weights starting from ``tensors``.

        The tensors may be of another element type than the specs (the model's own, before it is cast).

        Args:
            frozen: others that are not trained, whose shards the front end allocates in ``memory`` besides.
        """
        self.finish()
        self._gradients.order += self._buckets.add(specs, tensors, frozen)
        self.steps += [np.zeros((), np.float32) for _ in specs]

    def states(self, param: int) -> list[tuple[int, dict[str, np.ndarray]]]:
        """This process's states of a parameter: ``(start, {name: fp32 view})`` a contiguous run, ascending.

        The names are those of ``cpu_adam.STATE_NAMES``; an fp32 parameter updated in place has no ``"master"``.
        Who writes to them calls :meth:`will_change` before.
        """
        self.finish()
        return self._buckets.states(param)

    def local_states(self, param: int) -> dict[str, np.ndarray]:
        """This process's part of a parameter's states, one-dimensional: the runs of :meth:`states`, end to end."""
        self.finish()
        return self._buckets.local_states(param)

    def whole_states(
        self, param: int, names: Collection[str] = STATE_NAMES, *, tensor: Any = None
    ) -> dict[str, np.ndarray]:
        """A copy of a parameter's states with the parts of all ranks, which all must ask: ``{name: fp32 array}``.

        One-dimensional, in the order of :meth:`states`.

        Args:
            tensor: the device parameter; it is read where it is its own master weights.
        """
        self._refuse_if_broken()
        return self._buckets.run(lambda: self._buckets.whole_states(param, names, tensor))

    def sum_integers(self, array: np.ndarray, what: str) -> None:
        """As ``Collectives.sum_integers``, after what ranks have yet to tell each other of gradients."""
        self._buckets.run(lambda: self.device.collectives.sum_integers(array, what))

    def set_states(self, param: int, values: Mapping[str, np.ndarray]) -> None:
        """Give states of a parameter these values: by name, fp32, all of the parameter's, in the order of
        :meth:`states`.

        The device parameter, which may be its own master weights, is the caller's to write, after this.
        """
        self.finish()
        self._recall([param])
        self._buckets.before_change([param])
        for start, views in self._buckets.states(param):
            for name in values.keys() & views.keys():
                views[name][...] = values[name][start : start + views[name].size]

    def reload_master(self, param: int, tensor: Any) -> None:
        """Take a parameter's master weights from the device parameter."""
        self.will_change([param])
        self._recall([param])
        self._buckets.reload_master(param, tensor)

    def adopt(self, param: int, tensor: Any) -> None:
        """Follow a change made to a device parameter from outside: where its bits are not those of the rounded
        master weight, the master weight takes its value. The rest keep their low bits."""
        self.will_change([param])
        self._recall([param])
        self._buckets.adopt(param, tensor)

    def elements(self, param: int) -> Elements:
        """What a parameter's elements are."""
        spec = self.params[param]
        return spec.elements or InMemory((spec.numel,))

    def runs(self, param: int, tensor: Any) -> list[StateRun]:
        """As :meth:`LocalBuckets.runs`."""
        self.finish()
        return self._buckets.runs(param, tensor)

    def own_masters(self, param: int, tensor: Any) -> list[tuple[int, np.ndarray]]:
        """As :meth:`LocalBuckets.own_masters`."""
        return self._buckets.own_masters(param, tensor)

    def will_change(self, params: Iterable[int]) -> None:
        """To be called before states of these parameters are written to from outside."""
        self.finish()
        self._buckets.before_change(params)

    def run_in_order(self, task: Callable[[], T]) -> T:
        """The result of a task that comes after all that was asked for: ranks meet for one thing at a time."""
        return self._buckets.run(task)

    def before_change(self, notify: Callable[[Iterable[int]], None] | None) -> None:
        """Have somebody told, in whichever thread it is, before states of parameters change."""
        self._buckets.before_change = notify or (lambda params: None)

    @contextmanager
    def replacing_states(self) -> Iterator[None]:
        """Inside, all states are replaced. After an error there everything raises until that has been done."""
        self._half_loaded = None
        self.drop_gradients()
        self.finish()
        try:
            yield
        except BaseException as error:
            self._half_loaded = error
            raise

    def publish_later(self, params: Iterable[int]) -> None:
        """Master weights have been replaced: the next :meth:`flush` writes them to the device parameters."""
        for param in params:
            for work in self._buckets.of[param]:
                if not self._buckets.without_master(work.bucket):
                    work.behind.add(param)

    # --- gradients ---------------------------------------------------------------------------------

    def check_gradient(self, param: int, gradient: Any) -> None:
        """Raise :class:`GradientError` unless the gradient fits its parameter."""
        self._gradients.check(param, gradient)

    def add_gradient(self, param: int, gradient: Any) -> None:
        """Take a parameter's gradient of this micro-step; further ones before the next update are summed in fp32.

        Where the device is addressable the gradient is not copied: it must stay as it is until the update.
        """
        self._begin_gradients()
        self._gradients.check(param, gradient)
        if self._emission.emitting:
            if self.device.world_size == 1:
                self._recall([param])
            elif self._gradients.begins_round(param):  # in which ranks meet for all buckets again
                self._recall()
        self._or_abort_early(lambda: self._gradients.add(param, gradient))

    def _begin_gradients(self) -> None:
        """Before the first of a step: parameters have been written, so that ranks meet for one thing at a time."""
        if self._gradients.pristine:
            self.finish_publications()

    def drop_gradients(self, params: Sequence[int] | None = None) -> None:
        """Forget the gradients of these parameters, or of all.

        Raises, where others are kept, what went wrong on their way; nothing is forgotten then. Parameters that were
        emitted follow with :meth:`withdraw`.
        """
        if self._gradients.pristine:
            return
        try:
            self._recall(params if params is None else [param for param in params if param in self._gradients.present])
        except StateError:
            raise
        except Exception:  # all that was asked for is dropped
            if params is not None:
                raise
        self._gradients.drop(params)
        if params is None:
            self._emission.announced = None

    def end_micro_step(self, *, reduce: bool = True, boundary: bool | None = None) -> bool:
        """End a micro-step; whether it is the boundary, at which an update is due.

        Where gradients accumulate, none of the device's is referred to any more.

        Args:
            reduce: False where no gradient was added, on any rank alike: the ranks need not meet.
            boundary: what it is, where the caller counts; None: as ``gradient_accumulation_steps`` says.
        """
        if reduce:
            self._begin_gradients()
            if self._gradients.round_ended:
                self._recall()
        return self._or_abort_early(lambda: self._gradients.end_micro_step(reduce=reduce, boundary=boundary))

    @property
    def holds_gradients(self) -> bool:
        """Whether gradients have arrived that wait for an update."""
        return not self._gradients.pristine

    @property
    def micro_steps(self) -> int:
        """Micro-steps since the last boundary."""
        return self._gradients.micro_steps

    @property
    def at_boundary(self) -> bool:
        """Whether an update is due at the end of this micro-step."""
        return self._gradients.at_boundary

    # --- update ------------------------------------------------------------------------------------

    def step(
        self,
        hypers: Sequence[AdamHyper],
        tensors: Sequence[Any],
        *,
        divisor: float = 1.0,
        groups: Sequence[int] | None = None,
        gathered: int = 0,
    ) -> StepReport:
        """Update every parameter that has a gradient, or none.

        With ``schedule="overlap"`` it returns while updates go on; what goes wrong in them is raised by whatever waits
        for them. An error in mid-update (a device copy that fails, an interrupt) leaves the buckets before it updated
        and the others not, the step counted for all; the gradients are gone, and the next step goes on from there.
        Where another rank was lost there is no going on: everything then raises :class:`StateError`.

        Args:
            hypers: one for each parameter group.
            tensors: the device parameters to write, one for each parameter.
            divisor: what the summed gradients are divided by, on top of the loss scale.
            groups: the parameter group of each parameter; None: as they were added.
            gathered: of partitioned parameters, what was gathered in which order (``LiveParams.release_all``).
        """
        buckets, gradients, updates = self._buckets, self._gradients, self._updates
        self.check_expected(hypers, divisor=divisor, groups=groups)
        self._refuse_if_broken()
        # While gradients are on their way the host has time; after that what the next forward needs first comes first.
        updates.emits = lambda: not gradients.last.done()
        self._or_abort(updates.finish if gradients.pristine else updates.finish_states)

        def settle() -> None:
            if not gradients.round_ended:
                gradients.end_round()
            for work in buckets.all:
                buckets.claim(work)  # a gradient that was lost on its way is an error here, before anything changes
            if self._emission.differs(self._terms(hypers, divisor, groups)):
                self._recall()

        self._or_abort_early(settle)
        self.published = self.behind
        loss_scale, rates = self.loss_scale, tuple(hyper.lr for hyper in hypers)
        squares, present, recalled = self._agree(hypers, groups, divisor, gathered)
        works = [work for work in reversed(gradients.order) if not present.isdisjoint(work.members)]
        norm, coefficient, skipped = None, 1.0, None if works else "no gradients"
        if works and self._examines:
            if self.scaler:
                self.scaler.update(overflow=not squares.finite)
            norm = squares.norm() / (loss_scale * divisor) if squares.finite else squares.norm()
            if not squares.finite:
                skipped = "overflow"
            elif self.config.gradient_clipping is not None:
                coefficient = clip_coefficient(norm, self.config.gradient_clipping)
        self._clips = coefficient != 1.0 or skipped == "overflow"
        if self._clips or recalled:
            self._recall()
        if skipped:
            self.drop_gradients()
            self._or_abort(lambda: updates.publish(buckets.all, tensors))
            self._emission.recalled.clear()
            return StepReport(False, skipped, norm, loss_scale=loss_scale, lr=rates)
        delays = self.config.schedule == "delayed" and max(map(float, self.steps)) >= self.config.delay_warmup_steps
        scalars = self._scalars(hypers, groups, present, coefficient / (loss_scale * divisor))
        for param in present:
            self.steps[param] += 1
        # In the order of backward, whose gradients come to where those of this step are still to be read.
        committed = [work for work in reversed(works) if work.life.state is BucketState.EMITTED]
        ahead = [work for work in works if work.life.state is BucketState.UPDATED]
        for work in [*ahead, *set(buckets.all).difference(works)]:
            work.clear()
            work.life.on(BucketEvent.END if work in ahead else BucketEvent.DROP)
        gradients.begin()
        self._emission.settle()
        # What is in no bucket has nothing to wait for.
        self.published |= frozenset(param for param in present if not delays or not buckets.of[param])
        tensors = list(tensors)  # read later

        def start() -> None:
            if delays:
                updates.publish(reversed(gradients.order), tensors)
                updates.start_ahead(works[::-1], scalars, present, emitted=False)
            else:
                for work in works:
                    work.behind -= present
                updates.publish(reversed(gradients.order), tensors)
                rest = [work for work in works if work not in ahead and work not in committed]
                updates.start(rest, scalars, tensors, present)
                updates.start_ahead(committed, scalars, present, emitted=True)
            if not buckets.tasks.behind:
                self.finish()

        self._or_abort(start)
        return StepReport(True, None, norm, coefficient, loss_scale, rates)

    # --- parameters that are emitted before the step ---------------------------------------------------

    def expect_step(
        self,
        hypers: Sequence[AdamHyper],
        tensors: Sequence[Any],
        *,
        divisor: float = 1.0,
        groups: Sequence[int] | None = None,
        emitted: Callable[[Iterable[int]], None] = lambda params: None,
    ) -> None:
        """Announce the arguments of the :meth:`step` that ends this micro-step, before its first gradient.

        With ``update_in_backward`` parameters may then be written as soon as their gradients have arrived, all of
        their bucket. What went wrong after this is an error in mid-update, as :meth:`step` says.

        Args:
            emitted: told of parameters, in the thread that adds gradients, before they are written.
        """
        begun = not self._gradients.pristine and self.config.gradient_accumulation_steps == 1
        if not self._buckets.emits or begun or not self.at_boundary or self._clips:
            return
        self._recall()
        everything = range(len(self.params))
        scalars = self._scalars(hypers, groups, everything, 1.0 / (self.loss_scale * divisor))
        terms = self._terms(hypers, divisor, groups)
        self._emission.announce(Announcement(terms, scalars, list(tensors), emitted))

    def _launched(self, work: LocalBucket, full: bool) -> None:
        if self._buckets.emits and self.at_boundary:
            self._emission.launched(work, full, tentatively=self._examines)

    def _terms(self, hypers: Sequence[AdamHyper], divisor: float, groups: Sequence[int] | None) -> tuple[Any, ...]:
        return list(hypers), divisor, groups, self.loss_scale

    def check_expected(
        self, hypers: Sequence[AdamHyper], *, divisor: float = 1.0, groups: Sequence[int] | None = None
    ) -> None:
        """Raise :class:`StateError` where gradients were used with other arguments than these of :meth:`step`."""
        used = self._emission.emitting and not self._examines
        if used and self._emission.differs(self._terms(hypers, divisor, groups)):
            raise StateError(
                "hyperparameters, parameter groups or the loss's share changed between backward() and step(), and "
                "update_in_backward=True has used them; expected them as they were: set them back, or before backward()"
            )

    def _recall(self, params: Collection[int] | None = None) -> None:
        """What was emitted does not count, where that is any of these parameters: the step is to send them again.

        Raises :class:`StateError` where states have been updated, too.
        """
        touched = self._emission.of(params)
        if not touched:
            return
        if not self._examines:
            param = min(touched[0].members)
            raise StateError(
                f"parameter {self.params[param].name!r}: its gradient has been used, for update_in_backward=True; "
                "expected engine.step() next: set update_in_backward=False to discard gradients, to add to them or to "
                "read parameters before it"
            )
        self._emission.stop()
        self._or_abort(self._updates.finish_publications)
        self._emission.recall()

    def withdraw(self) -> None:
        """Bring back the parameters of the last step where others were emitted, and wait for them.

        All processes call it alike.
        """
        self._recall()
        if self._emission.recalled:
            self.flush(self._emission.tensors)

    def _scalars(
        self, hypers: Sequence[AdamHyper], groups: Sequence[int] | None, params: Iterable[int], grad_scale: float
    ) -> Scalars:
        groups = [spec.group for spec in self.params] if groups is None else groups
        steps = {param: int(self.steps[param]) + 1 for param in params}
        return Scalars(hypers, groups, steps, op_order=self.op_order, grad_scale=grad_scale)

    def flush(self, tensors: Sequence[Any]) -> None:
        """Wait for everything, and write to the parameters what ``schedule="delayed"`` still holds back."""
        self.finish()
        self._recall()
        self.published = self.behind
        self._or_abort(lambda: self._updates.publish(self._buckets.all, tensors))
        self._emission.recalled.clear()
        self.finish()

    @property
    def behind(self) -> frozenset[int]:
        """Parameters that are yet to get the value of their master weights."""
        return frozenset().union(*(work.behind for work in self._buckets.all))

    def _or_abort(self, act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:
            self._abort(error)
            raise

    def _or_abort_early(self, act: Callable[[], T]) -> T:
        """Where parameters are emitted as gradients arrive, one that is lost is an error in mid-update."""
        try:
            return act()
        except BaseException as error:
            if self._emission.announced is not None:
                self._abort(error)
            raise

    def _agree(
        self, hypers: Sequence[AdamHyper], groups: Sequence[int] | None, divisor: float, gathered: int
    ) -> Agreement:
        scalars = [hyper.scalars(1, op_order=self.op_order, grad_scale=1.0) for hyper in hypers]
        return agree(
            self._buckets,
            self._gradients,
            examines=self._examines,
            recalled=bool(self._emission.recalled),
            terms=f"{scalars} {[groups, divisor, self.loss_scale, gathered]}",
            differs=f"ranks differ in what they update with; here: {hypers}, gradients over {divisor}, loss scale "
            f"{self.loss_scale}; expected the same hyperparameters, micro-steps and loss scale on every rank"
            + ", and in stage 3 the same modules run in the same order"
            * bool(gathered),
        )

    @property
    def finished(self) -> bool:
        """Whether nothing of the last :meth:`step` may still be on its way."""
        return self._updates.finished

    def finish(self) -> None:
        """Wait until all parameters and states are what the last :meth:`step` makes of them.

        Raises what went wrong in its updates.
        """
        self._refuse_if_broken()
        self._or_abort(self._updates.finish)

    def finish_publications(self) -> None:
        """Wait until all parameters that the last :meth:`step` writes are written; states may still be on their way.

        Raises what went wrong.
        """
        self._refuse_if_broken()
        self._or_abort(self._updates.finish_publications)

    def await_param(self, param: int) -> None:
        """See to it that what this thread asks of the device from now on reads the parameter as updated.

        Raises what went wrong in the updates, and among ranks :class:`StateError` where it was emitted for a step that
        is still to come.
        """
        if self._emission.holds(param):
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
        """The end of the parameter's update, as far as it has been asked for; another thread may wait for it."""
        return self._updates.update_of(param)

    @property
    def host_shards(self) -> bool:
        """Whether what this process holds of partitioned parameters is host memory."""
        return self._buckets.host_shards

    def _refuse_if_broken(self) -> None:
        if self._half_loaded is not None:
            raise StateError(
                f"loading a checkpoint broke off ({self._half_loaded}): states are partly those of before, partly its; "
                "expected another one to be loaded next"
            )
        if self._broken is not None:
            raise StateError(
                f"the last update broke off ({self._broken}): parameters and states are partly of one step, partly of "
                "the next; expected no further use: resume from the last checkpoint"
            )

    def _abort(self, error: BaseException) -> None:
        if isinstance(error, CollectiveError):  # other ranks went another way: there is no going on
            self._broken = error
        self._buckets.recover()
        if self._emission.announced is not None:  # those that are ahead have had this update
            ahead = [work.members for work in self._buckets.all if work.life.state is BucketState.UPDATED]
            for param in frozenset().union(*ahead):
                self.steps[param] += 1
        self._emission.abort(self._updates.forget())
        self._gradients.begin()
        for work in self._buckets.all:
            work.task = work.written = None
            work.clear()
            work.life.on(BucketEvent.ABORT)

    @contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Record what is done inside to a file, as :meth:`Trace.to_file`; both its ends wait for the last update."""
        self.finish()
        with self.device.trace.to_file(path):
            yield
            self.finish()

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by before the next backward."""
        return self.scaler.scale if self.scaler else 1.0

    def memory_report(self, planned: Iterable[PlanRow], held: Mapping[tuple[str, str], int]) -> MemoryReport:
        """Host memory planned and held now, and what the front end has planned and holds besides, by
        ``(where, what)``."""
        numel = sum(spec.numel for spec in self.params)
        own = {("host", what): n_bytes for what, n_bytes in self.memory.report().items()}
        return MemoryReport.of(numel, [*self._buckets.planned, *planned], {**own, **held})

    @property
    def _examines(self) -> bool:
        """Whether every update looks at all gradients first."""
        skip = self.config.skip_nonfinite
        narrow = self.config.communication_dtype == FLOAT16.name and self.device.world_size > 1  # may overflow
        wanted = (skip is None and narrow) or bool(skip)
        return wanted or self.config.gradient_clipping is not None or self.scaler is not None
