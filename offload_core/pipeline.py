"""The composer: gradients in, updated parameters out.

A gradient's way: :meth:`Pipeline.add_gradient` -> its bucket fills and is launched (``gradients.py``: the device
reduces it over the ranks to its owner's host memory, where it is held, or summed with earlier micro-steps') ->
:meth:`Pipeline.step` (norm, clip) -> one C pass: unscale, clip, Adam, cast (``updates.py``) -> the device publishes the
shards to every rank's parameters.

``schedule="overlap"`` changes only who does it: what follows a launch is done by one thread, in the order in which it
was asked for (``tasks.py``), while the caller goes on. A bucket that was given to that thread is claimed back
(:meth:`LocalBuckets.claim`) before the caller touches it. Who reads a parameter waits for it alone
(:meth:`Pipeline.await_param`).

One rank whose tensors are host memory moves nothing (``LocalBuckets.direct``): gradients are read and parameters
written where they are, and nothing is done behind the caller's back.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from .buckets import LocalBuckets
from .config import OffloadConfig
from .cpu_adam import AdamHyper
from .device import Device, Event
from .dtypes import FLOAT16
from .errors import CollectiveError, StateError
from .grad_norm import SumOfSquares, clip_coefficient
from .gradients import Gradients
from .layout import fingerprint
from .loss_scale import LossScaler
from .memory_plan import MemoryPlan, MemoryReport
from .partition import ParamSpec
from .step_state import BucketEvent, BucketState
from .trace import REDUCTION
from .updates import Scalars, Updates

T = TypeVar("T")


@dataclass(frozen=True)
class StepReport:
    """What a call of ``step`` did."""

    updated: bool
    skipped: str | None = None
    """Why nothing was updated: ``"accumulating"``, ``"overflow"`` (an inf or NaN gradient) or ``"no gradients"``."""
    grad_norm: float | None = None
    """Global L2 norm of the averaged, unscaled gradients before clipping; None where it was not computed."""
    clip_coefficient: float = 1.0
    loss_scale: float = 1.0
    """The loss scale that these gradients carried."""


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
        self._gradients = Gradients(self._buckets, lambda: self._examines)
        self._updates = Updates(self._buckets, self.op_order)
        self._broken: CollectiveError | None = None
        """What an update broke off with among ranks."""
        self._expected: tuple[Any, ...] | None = None
        """What the announced :meth:`step` is called with."""
        self.params = self._buckets.params
        self.memory = self._buckets.memory

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(
            "copying or pickling an offloaded optimizer's pipeline, which holds addresses; expected its states to be "
            "copied: optimizer.state_dict() in torch, to_pytree() and load_pytree() in JAX"
        )

    # --- parameters and states ---------------------------------------------------------------------

    def plan(self, specs: Sequence[ParamSpec]) -> MemoryPlan:
        """What :meth:`add_parameters` of ``specs`` would allocate, and what the device holds besides."""
        return self._buckets.plan(specs)

    def reserve(self, n_bytes: int) -> None:
        """Plan with so many bytes that the front end allocates in ``memory`` besides."""
        self._buckets.planned_host_bytes += n_bytes

    def add_parameters(self, specs: Sequence[ParamSpec], tensors: Sequence[Any]) -> None:
        """Take on parameters: allocate their states, master weights starting from ``tensors``.

        The tensors may be of another element type than the specs (the model's own, before it is cast).
        """
        self.finish()
        self._gradients.order += self._buckets.add(specs, tensors)
        self.steps += [np.zeros((), np.float32) for _ in specs]

    def states(self, param: int) -> list[tuple[int, dict[str, np.ndarray]]]:
        """This process's states of a parameter: ``(start, {name: fp32 view})`` a contiguous run, ascending.

        The names are those of ``cpu_adam.STATE_NAMES``; an fp32 parameter updated in place has no ``"master"``.
        """
        self.finish()
        return self._buckets.states(param)

    def local_states(self, param: int) -> dict[str, np.ndarray]:
        """This process's part of a parameter's states, one-dimensional: the runs of :meth:`states`, end to end."""
        self.finish()
        return self._buckets.local_states(param)

    def reload_master(self, param: int, tensor: Any) -> None:
        """Take a parameter's master weights from the device parameter."""
        self.finish()
        self._buckets.reload_master(param, tensor)

    def adopt(self, param: int, tensor: Any) -> None:
        """Follow a change made to a device parameter from outside: where its bits are not those of the rounded
        master weight, the master weight takes its value. The rest keep their low bits."""
        self.finish()
        self._buckets.adopt(param, tensor)

    # --- gradients ---------------------------------------------------------------------------------

    def check_gradient(self, param: int, gradient: Any) -> None:
        """Raise :class:`GradientError` unless the gradient fits its parameter."""
        self._gradients.check(param, gradient)

    def add_gradient(self, param: int, gradient: Any) -> None:
        """Take a parameter's gradient of this micro-step; further ones before the next update are summed in fp32.

        Where the device is addressable the gradient is not copied: it must stay as it is until the update.
        """
        self._begin_gradients()
        self._refuse_if_used(param)
        self._gradients.check(param, gradient)
        self._or_abort_early(lambda: self._gradients.add(param, gradient))

    def _begin_gradients(self) -> None:
        """Before the first of a step: parameters have been written, so that ranks meet for one thing at a time."""
        if self._gradients.pristine:
            self._refuse_if_broken()
            self._or_abort(self._updates.finish_publications)

    def drop_gradients(self, params: Sequence[int] | None = None) -> None:
        """Forget the gradients of these parameters, or of all.

        Raises, where others are kept, what went wrong on their way; nothing is forgotten then.
        """
        if self._gradients.pristine:
            return
        for param in range(len(self.params)) if params is None else params:
            self._refuse_if_used(param)
        self._gradients.drop(params)

    def end_micro_step(self, *, reduce: bool = True) -> bool:
        """End a micro-step; whether it is the boundary, at which an update is due.

        Where gradients accumulate, none of the device's is referred to any more.

        Args:
            reduce: False where no gradient was added, on any rank alike: the ranks need not meet.
        """
        if reduce:
            self._begin_gradients()
        return self._or_abort_early(lambda: self._gradients.end_micro_step(reduce=reduce))

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
        buckets, gradients = self._buckets, self._gradients
        self.check_expected(hypers, divisor=divisor, groups=groups)
        self.finish()

        def settle() -> None:
            if not gradients.round_ended:
                gradients.end_round()
            for work in buckets.all:
                buckets.claim(work)  # a gradient that was lost on its way is an error here, before anything changes

        self._or_abort_early(settle)
        loss_scale = self.loss_scale
        squares, present = self._agree_on_gradients((hypers, groups, divisor, loss_scale, gathered))
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
        if skipped:
            self.drop_gradients()
            self._or_abort(lambda: self._updates.publish(buckets.all, tensors))
            return StepReport(updated=False, skipped=skipped, grad_norm=norm, loss_scale=loss_scale)
        delays = self.config.schedule == "delayed" and max(map(float, self.steps)) >= self.config.delay_warmup_steps
        scalars = self._scalars(hypers, groups, present, coefficient / (loss_scale * divisor))
        for param in present:
            self.steps[param] += 1
        ahead = [work for work in works if work.life.state is BucketState.UPDATED]
        for work in [*ahead, *set(buckets.all).difference(works)]:
            work.clear()
            work.life.on(BucketEvent.END if work in ahead else BucketEvent.DROP)
        gradients.begin()
        tensors = list(tensors)  # read later

        def start() -> None:
            self._updates.publish([work for work in reversed(gradients.order) if work not in ahead], tensors)
            if delays:
                # In the order of backward, whose gradients come to where those of this step are still to be read.
                self._updates.start_ahead(works[::-1], scalars, present)
            else:
                self._updates.start(works, scalars, tensors, present, ahead)
            if not buckets.tasks.behind:
                self.finish()

        self._or_abort(start)
        return StepReport(True, None, norm, coefficient, loss_scale)

    def expect_step(
        self, hypers: Sequence[AdamHyper], *, divisor: float = 1.0, groups: Sequence[int] | None = None
    ) -> None:
        """Announce the arguments of the :meth:`step` that ends this micro-step.

        With ``update_in_backward`` states are updated as gradients arrive; then nothing may go another way.
        A gradient that is lost after this is an error in mid-update, as :meth:`step` says.
        """
        early = self.config.update_in_backward and self.config.schedule != "delayed" and not self._examines
        begun = not self._gradients.pristine and self.config.gradient_accumulation_steps == 1
        if not early or begun or not self.at_boundary or self._buckets.direct:
            return
        everything = range(len(self.params))
        scalars = self._scalars(hypers, groups, everything, 1.0 / divisor)
        self._expected = (list(hypers), divisor, groups)
        self._gradients.when_settled = lambda work: self._updates.advance(work, scalars, everything)

    def check_expected(
        self, hypers: Sequence[AdamHyper], *, divisor: float = 1.0, groups: Sequence[int] | None = None
    ) -> None:
        """Raise :class:`StateError` where gradients were used with other arguments than these of :meth:`step`."""
        if self._gradients.when_settled is not None and self._expected != (list(hypers), divisor, groups):
            raise StateError(
                "hyperparameters, parameter groups or the loss's share changed between backward() and step(), and "
                "update_in_backward=True has used them; expected them as they were: set them back, or before backward()"
            )

    def _scalars(
        self, hypers: Sequence[AdamHyper], groups: Sequence[int] | None, params: Iterable[int], grad_scale: float
    ) -> Scalars:
        groups = [spec.group for spec in self.params] if groups is None else groups
        steps = {param: int(self.steps[param]) + 1 for param in params}
        return Scalars(hypers, groups, steps, op_order=self.op_order, grad_scale=grad_scale)

    def _refuse_if_used(self, param: int) -> None:
        if self._gradients.when_settled is None:
            return
        for work in self._buckets.of[param]:
            if work.launched or work.life.state is BucketState.UPDATED:
                raise StateError(
                    f"parameter {self.params[param].name!r}: its gradient has been used, for update_in_backward=True; "
                    "expected engine.step() next: set update_in_backward=False to discard gradients or to add to them"
                )

    def flush(self, tensors: Sequence[Any]) -> None:
        """Wait for everything, and write to the parameters what ``schedule="delayed"`` still holds back."""
        self.finish()
        self._or_abort(lambda: self._updates.publish(self._buckets.all, tensors))
        self.finish()

    def _or_abort(self, act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:
            self._abort(error)
            raise

    def _or_abort_early(self, act: Callable[[], T]) -> T:
        """Where states are updated as gradients arrive, one that is lost is an error in mid-update."""
        try:
            return act()
        except BaseException as error:
            if self._gradients.when_settled is not None:
                self._abort(error)
            raise

    def _agree_on_gradients(self, terms: tuple[Any, ...]) -> tuple[SumOfSquares, set[int]]:
        """The squares of all gradients, and the parameters that have one on any rank.

        Raises :class:`StateError` on every rank where ``terms``, what the update is made with, are not the same.

        A gradient that no rank had is no gradient: its parameter stays as it is. Ranks learn rank 0's order of
        arrival on the way.
        """
        gradients, squares = self._gradients, SumOfSquares()
        if self.device.world_size == 1:
            if self._examines:
                self._buckets.run(lambda: gradients.add_squares(squares))
            gradients.order = gradients.order_of_arrival()
            return squares, set(gradients.present)
        flags = np.zeros(len(self.params), np.int64)
        flags[list(gradients.present)] = 1
        order = np.array([work.bucket.index for work in gradients.order_of_arrival()], np.int64)
        if self.device.collectives.rank:
            order[:] = 0

        hypers, *others = terms
        scalars = [hyper.scalars(1, op_order=self.op_order, grad_scale=1.0) for hyper in hypers]
        mine = fingerprint(f"{scalars} {others}")

        def agree() -> np.ndarray:
            if self._examines:
                gradients.add_squares(squares)
            agreed = np.concatenate([squares.bins, flags, order, [mine]])
            with self.device.trace.span(REDUCTION, "norm of all ranks"):
                self.device.collectives.sum_integers(agreed, "gradient norm")
            return agreed

        agreed = self._buckets.run(agree)
        sizes = [squares.bins.size, flags.size, order.size]
        squares.bins, flags, order, [theirs] = np.split(agreed, np.cumsum(sizes))
        if theirs != mine * self.device.collectives.world_size:
            raise StateError(
                f"ranks differ in what they update with; here: {hypers}, gradients over {terms[2]}, loss scale "
                f"{terms[3]}; expected the same hyperparameters, micro-steps and loss scale on every rank"
                + ", and in stage 3 the same modules run in the same order"
                * bool(terms[4])
            )
        gradients.order = [self._buckets.all[i] for i in order]
        return squares, set(np.flatnonzero(flags).tolist())

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

    def await_param(self, param: int) -> None:
        """See to it that what this thread asks of the device from now on reads the parameter as updated.

        Raises what went wrong in the updates.
        """
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
        if self._broken is not None:
            raise StateError(
                f"the last update broke off ({self._broken}): parameters and states are partly of one step, partly of "
                "the next; expected no further use: resume from the last checkpoint"
            )

    def _abort(self, error: BaseException) -> None:
        if isinstance(error, CollectiveError):  # other ranks went another way: there is no going on
            self._broken = error
        self._buckets.recover()
        if self._gradients.when_settled is not None:  # those that are ahead have had this update
            ahead = [work.members for work in self._buckets.all if work.life.state is BucketState.UPDATED]
            for param in frozenset().union(*ahead):
                self.steps[param] += 1
        self._gradients.begin()
        self._updates.forget()
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

    def memory_report(self, device_bytes: int) -> MemoryReport:
        """Host memory planned and held now; ``device_bytes`` is what the front end's parameters take."""
        numel = sum(spec.numel for spec in self.params)
        return MemoryReport(numel, device_bytes, self._buckets.planned_host_bytes, self.memory.report())

    @property
    def _examines(self) -> bool:
        """Whether every update looks at all gradients first."""
        skip = self.config.skip_nonfinite
        narrow = self.config.communication_dtype == FLOAT16.name and self.device.world_size > 1  # may overflow
        wanted = (skip is None and narrow) or bool(skip)
        return wanted or self.config.gradient_clipping is not None or self.scaler is not None
