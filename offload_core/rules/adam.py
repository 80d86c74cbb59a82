"""Adam and AdamW."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Any, ClassVar, Self

from ..errors import ConfigError
from ..support import checks
from .rule import Matrix, Rule, State


def check_betas(betas: object) -> None:
    """Raise :class:`ConfigError` unless ``betas`` is a pair of numbers in [0, 1)."""
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ConfigError(f"betas: got {checks.shown(betas)}, expected a pair of numbers in [0, 1)")
    for i, beta in enumerate(betas):
        checks.number(f"betas[{i}]", beta, least=0.0, below=1.0)


@dataclass(frozen=True)
class AdamHyper:
    """Hyperparameters as in ``torch.optim.AdamW`` and ``optax.adamw``."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    eps_root: float = 0.0

    @property
    def numbers(self) -> tuple[float, ...]:
        """All fields as numbers: ranks that have equal numbers update alike."""
        return tuple(map(float, (self.lr, *self.betas, self.eps, self.weight_decay, self.eps_root)))

    def check(self) -> None:
        """Raise :class:`ConfigError` if a value is out of range."""
        checks.number("lr", self.lr, least=0.0)
        check_betas(self.betas)
        for name in ("eps", "weight_decay", "eps_root"):
            checks.number(name, getattr(self, name), least=0.0)


@dataclass(frozen=True)
class Adam(Rule):
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) or Adam with L2 (Kingma and Ba, arXiv:1412.6980), as
    docs/numerics.md defines their arithmetic."""

    mode: str = "adamw"
    """``"adamw"`` or ``"adam"``."""
    bias_corrections: Callable[[Sequence[float], int], Sequence[float]] | None = field(
        default=None, compare=False, repr=False
    )
    """``op_order="optax"``: 1 - beta^t of each beta as the framework's own float32 arithmetic gives it; None: in
    double."""

    name = "adamw"
    hyper: ClassVar[type[AdamHyper]] = AdamHyper
    settings = ("betas", "eps", "eps_root", "adam_mode", "exp_avg_dtype", "exp_avg_sq_dtype")
    every_state = (State("exp_avg"), State("exp_avg_sq", has_sign=False))

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        if settings["op_order"] == "torch" and settings["eps_root"]:
            raise ConfigError(f"eps_root={settings['eps_root']!r} has no place in op_order='torch'; expected 0")
        return cls(settings["op_order"] or "torch", settings["adam_mode"])

    @property
    def kernel(self) -> str:
        return f"adam_{self.op_order}"

    def values(self, hyper: AdamHyper, t: int, matrix: Matrix | None) -> tuple[float, ...]:
        beta1, beta2 = hyper.betas
        decoupled = self.mode == "adamw"
        if self.op_order == "torch":
            correction1, correction2 = 0.0, math.sqrt(1 - beta2**t)
            step_size = -hyper.lr / (1 - beta1**t)
        else:
            correction1, correction2 = (
                (1 - beta1**t, 1 - beta2**t) if self.bias_corrections is None else self.bias_corrections(hyper.betas, t)
            )
            step_size = -hyper.lr
        return (
            0.0 if decoupled else hyper.weight_decay,
            hyper.weight_decay if decoupled else 0.0,
            _decay(hyper.lr, hyper.weight_decay) if decoupled else 1.0,
            beta1,
            beta2,
            1 - beta1,
            1 - beta2,
            correction1,
            correction2,
            hyper.eps,
            hyper.eps_root,
            step_size,
        )


@lru_cache(maxsize=256)
def _decay(lr: float, weight_decay: float) -> float:
    """1 - lr * weight_decay, rounded once: torch's compiled fused kernel takes one FMA for it."""
    if not (math.isfinite(lr) and math.isfinite(weight_decay)):
        return 1 - lr * weight_decay
    exact = 1 - Fraction(lr) * Fraction(weight_decay)
    return exact.numerator / exact.denominator if abs(exact) < 2**1000 else float("-inf")
