"""Muon: momentum, orthogonalized by Newton-Schulz iterations."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from ..errors import ConfigError, ParameterError
from ..support import checks
from .rule import DeviceKernel, Hyper, Matrix, Rule, State

ADJUSTMENTS = (None, "original", "match_rms_adamw")
"""The values of ``adjust_lr_fn``."""
COEFFICIENTS = (3.4445, -4.775, 2.0315)
"""Of the iteration, by Keller Jordan (kellerjordan.github.io/posts/muon), as in ``torch.optim.Muon``."""
_MOST_STEPS = 99


@dataclass(frozen=True)
class MuonHyper:
    """Hyperparameters as in ``torch.optim.Muon``."""

    lr: float = 1e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = COEFFICIENTS
    eps: float = 1e-7
    ns_steps: int = 5
    adjust_lr_fn: str | None = None

    @property
    def numbers(self) -> tuple[float, ...]:
        """All fields as numbers: ranks that have equal numbers update alike."""
        plain = (self.lr, self.weight_decay, self.momentum, self.nesterov, *self.ns_coefficients, self.eps)
        return (*map(float, plain), float(self.ns_steps), float(ADJUSTMENTS.index(self.adjust_lr_fn)))

    def check(self) -> None:
        """Raise :class:`ConfigError` if a value is out of range."""
        for name in ("lr", "weight_decay", "momentum", "eps"):
            checks.number(name, getattr(self, name), least=0.0)
        checks.boolean("nesterov", self.nesterov)
        coefficients = self.ns_coefficients
        if not isinstance(coefficients, tuple | list) or len(coefficients) != 3:
            raise ConfigError(f"ns_coefficients: got {checks.shown(coefficients)}, expected three numbers")
        for i, coefficient in enumerate(coefficients):
            checks.number(f"ns_coefficients[{i}]", coefficient)
        checks.integer("ns_steps", self.ns_steps, most=_MOST_STEPS)
        checks.choice("adjust_lr_fn", self.adjust_lr_fn, ADJUSTMENTS)


@dataclass(frozen=True)
class NewtonSchulz(DeviceKernel):
    """Orthogonalize a matrix X in bfloat16.

    X is divided by its norm (at least ``eps``), and transposed if it has more rows than columns. In each step
    A = X Xᵀ and X becomes a X + (b A + c A A) X, for the coefficients a, b and c.
    """

    coefficients: tuple[float, float, float]
    eps: float
    steps: int

    def flops(self, matrix: Matrix) -> int:
        small, large = sorted(matrix)
        return self.steps * small * small * (2 * large + small)

    def numel(self, matrix: Matrix) -> int:
        small, large = sorted(matrix)
        return 2 * small * large + 2 * small * small


@dataclass(frozen=True)
class Muon(Rule):
    """Muon (Jordan et al., 2024) as ``torch.optim.Muon`` defines it, with the step sizes of Liu et al.
    (arXiv:2502.16982) if asked for; docs/numerics.md has its arithmetic.

    It updates matrices. Its first pass over the states gives the direction of the step, which a device
    orthogonalizes; the second pass updates momentum and master weights.
    """

    iteration: NewtonSchulz

    name = "muon"
    hyper: ClassVar[type[MuonHyper]] = MuonHyper
    settings = ("eps", "momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn", "muon_params", "adamw")
    every_state = (State("momentum_buffer", narrows=False),)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        iteration = _iteration(settings["ns_coefficients"], settings["eps"], settings["ns_steps"])
        return cls(settings["op_order"] or "torch", iteration)

    @property
    def kernel(self) -> str:
        return "muon"

    @property
    def device_kernel(self) -> NewtonSchulz:
        return self.iteration

    def matrix(self, name: str, shape: Sequence[int], *, in_order: bool = True) -> Matrix:
        instead = "give it to another rule: a group with 'optimizer': 'adamw'"
        if len(shape) < 2 or 0 in shape:
            raise ParameterError(
                f"parameter {name!r} of shape {tuple(shape)} is no matrix, which optimizer='muon' updates; expected "
                f"two dimensions, or more for a stack of matrices: {instead}"
            )
        if not in_order:
            raise ParameterError(
                f"parameter {name!r} of shape {tuple(shape)} is not one contiguous array in row order, which "
                f"optimizer='muon' needs; expected a contiguous tensor in wrap(), or {instead}"
            )
        return shape[-2], shape[-1]

    def check(self, hyper: Hyper) -> None:
        super().check(hyper)
        assert isinstance(hyper, MuonHyper)
        part = _iteration(hyper.ns_coefficients, hyper.eps, hyper.ns_steps)
        if part != self.iteration:
            raise ConfigError(
                f"ns_coefficients, eps and ns_steps: got {part}, expected {self.iteration}, as when states were made. "
                "Make a new optimizer to change them"
            )

    def values(self, hyper: MuonHyper, t: int, matrix: Matrix | None) -> tuple[float, ...]:
        assert matrix is not None
        adds = self.op_order == "optax"  # whose new parameters are the old ones plus an update
        return (
            hyper.momentum,
            1 - hyper.momentum,
            float(hyper.nesterov),
            (0 if adds else 1) - hyper.lr * hyper.weight_decay,
            -hyper.lr * _adjustment(hyper.adjust_lr_fn, matrix),
            float(adds),
        )


def _iteration(coefficients: Sequence[float], eps: float, steps: float) -> NewtonSchulz:
    a, b, c = map(float, coefficients)
    return NewtonSchulz((a, b, c), float(eps), int(steps))


def _adjustment(function: str | None, matrix: Matrix) -> float:
    rows, columns = matrix
    if function == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))
