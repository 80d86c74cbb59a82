"""Adagrad."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from ..errors import ConfigError
from ..support import checks
from .rule import Matrix, Rule, State


@dataclass(frozen=True)
class AdagradHyper:
    """Hyperparameters as in ``torch.optim.Adagrad``; ``optax.adagrad`` has no ``lr_decay`` and ``weight_decay``."""

    lr: float = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    @property
    def numbers(self) -> tuple[float, ...]:
        """All fields as numbers: ranks that have equal numbers update alike."""
        return tuple(map(float, (self.lr, self.lr_decay, self.weight_decay, self.initial_accumulator_value, self.eps)))

    def check(self) -> None:
        """Raise :class:`ConfigError` if a value is out of range."""
        for name in ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"):
            checks.number(name, getattr(self, name), least=0.0)


@dataclass(frozen=True)
class Adagrad(Rule):
    """Adagrad (Duchi, Hazan and Singer, JMLR 2011), as docs/numerics.md defines its arithmetic."""

    first: float = field(default=0.0, compare=False)
    """The first value of the sum of squares. It matters to states that begin, and not to those that are there."""

    name = "adagrad"
    hyper: ClassVar[type[AdagradHyper]] = AdagradHyper
    settings = ("eps", "lr_decay", "initial_accumulator_value")
    every_state = (State("sum", has_sign=False),)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        order = settings["op_order"] or "torch"
        if order == "optax" and settings["lr_decay"]:
            raise ConfigError(
                f"lr_decay={settings['lr_decay']!r} has no place in op_order='optax'; expected 0, and a schedule as lr"
            )
        return cls(order, settings["initial_accumulator_value"])

    @property
    def states(self) -> tuple[State, ...]:
        return (State("sum", has_sign=False, first=self.first),)

    @property
    def kernel(self) -> str:
        return f"adagrad_{self.op_order}"

    def values(self, hyper: AdagradHyper, t: int, matrix: Matrix | None) -> tuple[float, ...]:
        return hyper.lr / (1 + (t - 1) * hyper.lr_decay), hyper.eps, hyper.weight_decay
