"""Stochastic gradient descent with momentum."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from ..errors import ConfigError
from ..support import checks
from .rule import Hyper, Matrix, Rule, State


@dataclass(frozen=True)
class SGDHyper:
    """Hyperparameters as in ``torch.optim.SGD`` and, but for ``dampening`` and ``weight_decay``, ``optax.sgd``."""

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    @property
    def numbers(self) -> tuple[float, ...]:
        """All fields as numbers: ranks that have equal numbers update alike."""
        return tuple(map(float, (self.lr, self.momentum, self.dampening, self.weight_decay, self.nesterov)))

    def check(self) -> None:
        """Raise :class:`ConfigError` if a value is out of range."""
        for name in ("lr", "momentum", "weight_decay"):
            checks.number(name, getattr(self, name), least=0.0)
        checks.number("dampening", self.dampening)
        checks.boolean("nesterov", self.nesterov)
        if self.nesterov and (not self.momentum or self.dampening):
            raise ConfigError(
                f"nesterov=True with momentum={self.momentum!r} and dampening={self.dampening!r}; expected a momentum "
                "above 0 and no dampening"
            )


@dataclass(frozen=True)
class SGD(Rule):
    """SGD with momentum (Polyak, 1964) or Nesterov's (Sutskever et al., ICML 2013), as docs/numerics.md defines its
    arithmetic."""

    has_momentum: bool = False
    """True if the momentum is not 0, so that it has a state. This never changes: a schedule may change the momentum,
    but not from or to 0."""

    name = "sgd"
    hyper: ClassVar[type[SGDHyper]] = SGDHyper
    settings = ("momentum", "dampening", "nesterov")
    every_state = (State("momentum_buffer"),)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        order = settings["op_order"] or "torch"
        if order == "optax" and settings["dampening"]:
            raise ConfigError(f"dampening={settings['dampening']!r} has no place in op_order='optax'; expected 0")
        return cls(order, bool(settings["momentum"]))

    @property
    def states(self) -> tuple[State, ...]:
        return self.every_state if self.has_momentum else ()

    @property
    def kernel(self) -> str:
        return f"sgd_{self.op_order}"

    def check(self, hyper: Hyper) -> None:
        super().check(hyper)
        if isinstance(hyper, SGDHyper) and bool(hyper.momentum) is not self.has_momentum:
            raise ConfigError(
                f"momentum: got {hyper.momentum!r}, expected "
                + ("a value above 0: its state is there" if self.has_momentum else "0, as it was when states were made")
                + ". Make a new optimizer to change between them, or keep a scheduler from changing the momentum "
                "(cycle_momentum=False)"
            )

    def values(self, hyper: SGDHyper, t: int, matrix: Matrix | None) -> tuple[float, ...]:
        return (
            hyper.lr,
            hyper.momentum,
            1 - hyper.dampening,
            hyper.weight_decay,
            float(hyper.nesterov),
            float(t == 1),
        )
