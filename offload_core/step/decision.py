"""The decision of a step: one frozen record, made once from the gradients of all ranks."""

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
    """One for each parameter group."""
    tensors: Sequence[Any] = ()
    """The device parameters to write, one for each parameter."""
    divisor: float = 1.0
    """Of the summed gradients, besides the loss scale."""
    groups: Sequence[int] = ()
    """The parameter group of each parameter; none: as they were added."""
    loss_scale: float = 1.0
    """Filled in by :meth:`complete`."""

    def complete(self, params: Sequence[ParamSpec], scaler: LossScaler | None) -> "StepArguments":
        """Return a copy, with the groups and the loss scale filled in, that no later change of the lists reaches."""
        groups = list(self.groups) or [spec.group for spec in params]
        scale = scaler.scale if scaler else 1.0
        return StepArguments(list(self.hypers), list(self.tensors), self.divisor, groups, scale)

    @property
    def unscale(self) -> float:
        """The divisor of the summed gradients."""
        return self.loss_scale * self.divisor

    def matches(self, later: "StepArguments") -> bool:
        """True if all but the tensors is equal; these are the same memory. ``later`` may have more parameters: those
        that were frozen when the step was announced."""
        known = len(self.groups)
        mine, theirs = ((g.hypers, g.divisor, g.groups[:known], g.loss_scale) for g in (self, later))
        return mine == theirs

    def terms(self, gathered: int) -> str:
        """Return all that must be the same in every rank's step, as text."""
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
    """Learning rates of the parameter groups; none while gradients accumulate."""
    step: int = 0
    """The update that this was or would have been, counted from 1 on through checkpoints."""
    changes: tuple[int, int] = field(default=(0, 0), repr=False, compare=False)
    """The moment after this call, for ``Engine.named_weights(since=...)``."""


@dataclass(frozen=True)
class Verdict:
    """The verdict on the gradients of all ranks: update or not, and the factor that clips them."""

    norm: float | None
    """Of the averaged, unscaled gradients; None where they were not examined."""
    coefficient: float
    """The factor that clips them."""
    skipped: str | None
    """The reason not to update."""
    overflow: bool | None
    """True if there was an inf or a NaN; None where the gradients were not examined."""

    @property
    def interferes(self) -> bool:
        """True if the gradients are clipped or not used: parameters that were sent early are then wrong."""
        return self.coefficient != 1.0 or bool(self.overflow)


def examine(
    squares: SumOfSquares | None, *, any_gradient: bool, unscale: float, max_norm: float | None, scaled: bool
) -> Verdict:
    """Decide on the gradients of all ranks.

    Args:
        squares: of the gradients as they were summed; None: they are not examined.
        any_gradient: True if any rank has one.
        unscale: the divisor of the summed gradients.
        max_norm: the bound on their norm; None: they are not clipped.
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
    """The update of a step, or the reason that there is none."""

    verdict: Verdict
    present: frozenset[int]
    """The parameters to update: those that have a gradient on any rank."""
    works: tuple[LocalBucket, ...]
    """The buckets that hold a part of them, in the order in which the next forward needs them."""
    order: tuple[LocalBucket, ...]
    """All buckets in the order in which gradients arrive, the same on every rank."""
    scalars: Scalars
    tensors: Sequence[Any]
    """All device parameters."""
    delayed: bool
    """The device gets this step's parameters one step later."""
    behind: frozenset[int]
    """Parameters that were stale on the device before this step."""
    report: StepReport


class SkippedSteps:
    """Watches over steps that are skipped in a row."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def note(self, verdict: Verdict, *, scale_fell: bool) -> None:
        """Warn once if several steps in a row were skipped, and no lower loss scale can help."""
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
