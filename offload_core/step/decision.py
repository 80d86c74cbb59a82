"""The decision of a step: one frozen object, made once from the gradients of all ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..layout.partition import ParamSpec
from ..native.grad_norm import SumOfSquares, clip_coefficient
from ..rules import Hyper, Scalars
from ..support.user_line import UserLine
from .local_bucket import LocalBucket
from .loss_scale import LossScaler

_MANY_SKIPPED = 3


@dataclass(frozen=True)
class StepArguments:
    """The arguments of one step, the same when it is announced and when it comes."""

    hypers: Sequence[Hyper]
    """The hyperparameters of each parameter group."""
    tensors: Sequence[Any] = ()
    """The device parameters to write, one for each parameter."""
    divisor: float = 1.0
    """The divisor of the summed gradients, besides the loss scale."""
    groups: Sequence[int] = ()
    """The parameter group of each parameter; empty: the groups with which the parameters were added."""
    loss_scale: float = 1.0
    """Filled in by :meth:`complete`."""

    def complete(self, params: Sequence[ParamSpec], scaler: LossScaler | None) -> "StepArguments":
        """Return a copy with the groups and the loss scale filled in, and with copies of the lists."""
        groups = list(self.groups) or [spec.group for spec in params]
        scale = scaler.scale if scaler else 1.0
        return StepArguments(list(self.hypers), list(self.tensors), self.divisor, groups, scale)

    @property
    def unscale(self) -> float:
        """The divisor of the summed gradients."""
        return self.loss_scale * self.divisor

    def matches(self, later: "StepArguments") -> bool:
        """True if all arguments but the tensors are equal. ``later`` may have more parameters, which were frozen when
        the step was announced."""
        known = len(self.groups)
        mine, theirs = ((g.hypers, g.divisor, g.groups[:known], g.loss_scale) for g in (self, later))
        return mine == theirs

    def terms(self, gathered: int) -> str:
        """Return as text all arguments that must be the same on every rank."""
        return f"{[hyper.numbers for hyper in self.hypers]} {[self.groups, self.divisor, self.loss_scale, gathered]}"


@dataclass(frozen=True)
class StepReport:
    """The result of one call of ``step``."""

    updated: bool
    """True if parameters were updated."""
    skipped: str | None = None
    """Why nothing was updated: ``"accumulating"``, ``"no gradients"``, ``"non-finite"`` (an inf or NaN gradient), or
    ``"overflow"`` (the same under loss scaling)."""
    grad_norm: float | None = None
    """Global L2 norm of the averaged, unscaled gradients before clipping; None where it was not computed."""
    clip_coefficient: float = 1.0
    """The factor that clipped the gradients; 1: they were not clipped."""
    loss_scale: float = 1.0
    """The loss scale that these gradients carried."""
    lr: tuple[float, ...] = ()
    """Learning rates of the parameter groups; empty while gradients accumulate."""
    step: int = 0
    """The number of this update (also if it was skipped), counted from 1 on, and on across checkpoints."""
    changes: tuple[int, int] = field(default=(0, 0), repr=False, compare=False)
    """The moment after this call, for ``Engine.named_weights(since=...)``."""


@dataclass(frozen=True)
class Verdict:
    """The verdict on the gradients of all ranks: update or not, and the factor that clips them."""

    norm: float | None
    """The norm of the averaged, unscaled gradients; None where they were not examined."""
    coefficient: float
    """The factor that clips the gradients."""
    skipped: str | None
    """The reason not to update; None: update."""
    overflow: bool | None
    """True if there was an inf or a NaN; None where the gradients were not examined."""

    @property
    def interferes(self) -> bool:
        """True if the gradients are clipped or unusable, so that parameters sent early are wrong."""
        return self.coefficient != 1.0 or bool(self.overflow)


def examine(
    squares: SumOfSquares | None, *, any_gradient: bool, unscale: float, max_norm: float | None, scaled: bool
) -> Verdict:
    """Decide on the gradients of all ranks.

    Args:
        squares: the squares of the summed gradients; None: they are not examined.
        any_gradient: True if any rank has a gradient.
        unscale: the divisor of the summed gradients.
        max_norm: the bound on the norm; None: no clipping.
        scaled: True under loss scaling.
    """
    if not any_gradient:
        return Verdict(None, 1.0, "no gradients", None)
    if squares is None:
        return Verdict(None, 1.0, None, None)
    norm = squares.norm()
    if math.isnan(norm):
        return Verdict(norm, 1.0, "overflow" if scaled else "non-finite", True)
    norm /= unscale
    return Verdict(norm, 1.0 if max_norm is None else clip_coefficient(norm, max_norm), None, False)


@dataclass(frozen=True)
class Decision:
    """The update of a step, or the reason to skip it."""

    verdict: Verdict
    present: frozenset[int]
    """The parameters to update: all with a gradient on any rank."""
    buckets: tuple[LocalBucket, ...]
    """The buckets with pieces of these parameters, in the order in which the next forward needs them."""
    order: tuple[LocalBucket, ...]
    """All buckets in the order in which gradients arrive, the same on every rank."""
    scalars: Scalars
    tensors: Sequence[Any]
    """All device parameters."""
    delayed: bool
    """The device gets this step's parameters one step later."""
    stale: frozenset[int]
    """Parameters that were stale on the device before this step."""
    report: StepReport


class SkippedSteps:
    """Counts steps that are skipped in a row."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def record(self, verdict: Verdict, *, scale_fell: bool) -> None:
        """Warn at the third step in a row that was skipped without lowering the loss scale."""
        if not verdict.overflow or scale_fell:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        if self._in_a_row == _MANY_SKIPPED:
            UserLine.now("torch", "jax").warn(
                UserWarning(
                    f"the last {_MANY_SKIPPED} steps were skipped, because their gradients had an inf or a NaN "
                    "(report.skipped says so for each); expected finite gradients: look at the loss, the learning rate "
                    "and the data"
                )
            )
