"""The decision of a step: update or skip, and with which scalars. It is made once, from the gradients of all ranks."""

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
    """The arguments of one step. An announcement of the step and the step itself take the same class."""

    hypers: Sequence[Hyper]
    """The hyperparameters of each parameter group."""
    tensors: Sequence[Any] = ()
    """The device parameters to write, one for each parameter."""
    divisor: float = 1.0
    """The divisor of the summed gradients, besides the loss scale."""
    groups: Sequence[int] = ()
    """The parameter group of each parameter; empty: the groups with which the parameters were added."""
    loss_scale: float = 1.0
    """The factor on the loss. The caller leaves it out: :meth:`complete` fills it in."""

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
        """True if all arguments except the tensors equal the arguments of ``later``. ``later`` may have more
        parameters, because the user may have unfrozen some since the step was announced."""
        known = len(self.groups)
        mine, theirs = ((g.hypers, g.divisor, g.groups[:known], g.loss_scale) for g in (self, later))
        return mine == theirs

    def terms(self, gathered: int) -> str:
        """Return all arguments that must be the same on every rank, as text.

        Args:
            gathered: in stage 3, the fingerprint of the gathers and their order.
        """
        return f"{[hyper.numbers for hyper in self.hypers]} {[self.groups, self.divisor, self.loss_scale, gathered]}"


@dataclass(frozen=True)
class StepReport:
    """The result of one call of ``step``."""

    updated: bool
    """True if parameters were updated."""
    skipped: str | None = None
    """The reason why nothing was updated: ``"accumulating"``, ``"no gradients"``, ``"non-finite"`` (a gradient had an
    inf or a NaN), or ``"overflow"`` (a gradient had an inf or a NaN under loss scaling). None: parameters were
    updated."""
    grad_norm: float | None = None
    """Global L2 norm of the averaged, unscaled gradients before clipping; None where it was not computed."""
    clip_coefficient: float = 1.0
    """The factor that clipped the gradients; 1: they were not clipped."""
    loss_scale: float = 1.0
    """The loss scale of the gradients that this ``step`` call got: the factor on their loss."""
    lr: tuple[float, ...] = ()
    """Learning rates of the parameter groups; empty while gradients accumulate."""
    step: int = 0
    """The index of this update: 1 plus the number of updates before, counted on across checkpoints. A skipped update
    and the next update have the same index."""
    changes: tuple[int, int] = field(default=(0, 0), repr=False, compare=False)
    """A mark of the moment after this call, for ``Engine.named_weights(since=...)``."""


@dataclass(frozen=True)
class Verdict:
    """The verdict on the gradients of all ranks: update or skip, and the factor that clips the gradients."""

    norm: float | None
    """The L2 norm of the averaged, unscaled gradients; None: the gradients were not examined."""
    coefficient: float
    """The factor that clips the gradients."""
    skipped: str | None
    """The reason to skip the update, as :attr:`StepReport.skipped`; None: update."""
    overflow: bool | None
    """True if a gradient had an inf or a NaN; None: the gradients were not examined."""

    @property
    def interferes(self) -> bool:
        """True if the gradients are clipped or have an inf or a NaN. Parameters that were sent early are then wrong."""
        return self.coefficient != 1.0 or bool(self.overflow)


def examine(
    squares: SumOfSquares | None, *, any_gradient: bool, unscale: float, max_norm: float | None, scaled: bool
) -> Verdict:
    """Return the verdict on the gradients of all ranks.

    Args:
        squares: the sum of squares of the summed gradients; None: the gradients are not examined.
        any_gradient: True if any rank has a gradient.
        unscale: the divisor of the summed gradients.
        max_norm: the largest norm that is not clipped; None: no clipping.
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
    """The parameters to update: all parameters that have a gradient on any rank."""
    buckets: tuple[LocalBucket, ...]
    """The buckets with elements of the parameters to update, in the order in which the next forward needs the
    buckets."""
    order: tuple[LocalBucket, ...]
    """All buckets, in the order in which they filled on rank 0."""
    scalars: Scalars
    tensors: Sequence[Any]
    """All device parameters."""
    delayed: bool
    """True if the next step sends this step's parameters to the device."""
    stale: frozenset[int]
    """Parameters that were stale on the device before this step."""
    report: StepReport


class SkippedSteps:
    """Counts consecutive steps that were skipped because of an inf or a NaN, and warns."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def record(self, verdict: Verdict, *, scale_fell: bool) -> None:
        """Count a step. Warn at the third consecutive step that was skipped without lowering the loss scale.

        Args:
            scale_fell: True if the step lowered the loss scale.
        """
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
