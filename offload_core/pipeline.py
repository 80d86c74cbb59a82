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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .buckets import LocalBuckets
from .config import OffloadConfig
from .cpu_adam import AdamHyper
from .device import Device
from .errors import StateError
from .grad_norm import SumOfSquares, clip_coefficient
from .gradients import Gradients
from .loss_scale import LossScaler
from .memory_plan import MemoryPlan, MemoryReport
from .partition import ParamSpec
from .step_state import BucketEvent
from .updates import Scalars, Updates


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
        self.finish()  # so that ranks meet for one thing at a time
        self._gradients.add(param, gradient)

    def drop_gradients(self, params: Sequence[int] | None = None) -> None:
        """Forget the gradients of these parameters, or of all.

        Raises, where others are kept, what went wrong on their way; nothing is forgotten then.
        """
        if self.finished:  # else none has come since the update began
            self._gradients.drop(params)

    def end_micro_step(self, *, reduce: bool = True) -> bool:
        """End a micro-step; whether it is the boundary, at which an update is due.

        Where gradients accumulate, none of the device's is referred to any more.

        Args:
            reduce: False where no gradient was added, on any rank alike: the ranks need not meet.
        """
        if reduce:
            self.finish()
        return self._gradients.end_micro_step(reduce=reduce)

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
    ) -> StepReport:
        """Update every parameter that has a gradient, or none.

        An error in mid-update (a device copy that fails, an interrupt) leaves the buckets before it updated and the
        others not; the gradients are gone, and the next step goes on from there.

        Args:
            hypers: one for each parameter group.
            tensors: the device parameters to write, one for each parameter.
            divisor: what the summed gradients are divided by, on top of the loss scale.
            groups: the parameter group of each parameter; None: as they were added.
        """
        buckets, gradients = self._buckets, self._gradients
        self.finish()
        if not gradients.round_ended:
            gradients.end_round()
        for work in buckets.all:
            buckets.claim(work)  # a gradient that was lost on its way is an error here, before anything changes
        loss_scale = self.loss_scale
        squares, present = self._agree_on_gradients()
        works = [work for work in reversed(gradients.order) if not present.isdisjoint(work.members)]
        if not works:
            self.drop_gradients()
            return StepReport(updated=False, skipped="no gradients", loss_scale=loss_scale)
        norm, coefficient = None, 1.0
        if self._examines:
            if self.scaler:
                self.scaler.update(overflow=not squares.finite)
            if not squares.finite:
                self.drop_gradients()
                return StepReport(updated=False, skipped="overflow", grad_norm=squares.norm(), loss_scale=loss_scale)
            norm = squares.norm() / (loss_scale * divisor)
            if self.config.gradient_clipping is not None:
                coefficient = clip_coefficient(norm, self.config.gradient_clipping)
        groups = [spec.group for spec in self.params] if groups is None else groups
        for param in present:
            self.steps[param] += 1
        steps = {param: int(self.steps[param]) for param in present}
        scale = coefficient / (loss_scale * divisor)
        scalars = Scalars(hypers, groups, steps, op_order=self.op_order, grad_scale=scale)
        for work in set(buckets.all).difference(works):
            work.clear()
            work.life.on(BucketEvent.DROP)
        gradients.begin()
        try:
            self._updates.start(works, scalars, tensors, present)
            if not buckets.tasks.behind:
                self.finish()
        except BaseException:
            self._abort()
            raise
        return StepReport(True, None, norm, coefficient, loss_scale)

    def _agree_on_gradients(self) -> tuple[SumOfSquares, set[int]]:
        """The squares of all gradients, and the parameters that have one on any rank.

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

        def agree() -> np.ndarray:
            if self._examines:
                gradients.add_squares(squares)
            agreed = np.concatenate([squares.bins, flags, order])
            self.device.collectives.sum_integers(agreed, "gradient norm")
            return agreed

        agreed = self._buckets.run(agree)
        squares.bins, flags, order = np.split(agreed, np.cumsum([squares.bins.size, flags.size]))
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
        try:
            self._updates.finish()
        except BaseException:
            self._abort()
            raise

    def await_param(self, param: int) -> None:
        """See to it that what this thread asks of the device from now on reads the parameter as updated.

        Raises what went wrong in the updates.
        """
        try:
            self._updates.await_param(param)
        except BaseException:
            self.finish()
            raise

    def _abort(self) -> None:
        self._buckets.recover()
        self._gradients.begin()
        self._updates.forget()
        for work in self._buckets.all:
            work.task = work.written = None
            work.clear()
            work.life.on(BucketEvent.ABORT)

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
        return bool(skip) or self.config.gradient_clipping is not None or self.scaler is not None
