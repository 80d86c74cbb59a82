"""Lion."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from ..support import checks
from .adam import check_betas
from .rule import Matrix, Rule, State


@dataclass(frozen=True)
class LionHyper:
    """Hyperparameters as in ``optax.lion``, and the learning rate of the authors' own class."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 1e-3

    @property
    def numbers(self) -> tuple[float, ...]:
        """All fields as numbers: ranks that have equal numbers update alike."""
        return tuple(map(float, (self.lr, *self.betas, self.weight_decay)))

    def check(self) -> None:
        """Raise :class:`ConfigError` if a value is out of range."""
        checks.number("lr", self.lr, least=0.0)
        check_betas(self.betas)
        checks.number("weight_decay", self.weight_decay, least=0.0)


@dataclass(frozen=True)
class Lion(Rule):
    """Lion (Chen et al., arXiv:2302.06675, algorithm 2), as docs/numerics.md defines its arithmetic: one for both
    orders of operations."""

    name = "lion"
    hyper: ClassVar[type[LionHyper]] = LionHyper
    settings = ("betas", "exp_avg_dtype")
    every_state = (State("exp_avg"),)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        return cls(settings["op_order"] or "torch")

    @property
    def kernel(self) -> str:
        return "lion"

    def values(self, hyper: LionHyper, t: int, matrix: Matrix | None) -> tuple[float, ...]:
        beta1, beta2 = hyper.betas
        return hyper.lr, beta1, 1 - beta1, beta2, 1 - beta2, hyper.weight_decay
