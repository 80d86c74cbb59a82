"""The update rules: the arithmetic of a step on a parameter and its states. Seam: rule."""

from .adagrad import Adagrad
from .adam import Adam
from .lion import Lion
from .muon import Muon
from .rule import MASTER, DeviceKernel, Hyper, Matrix, Rule, Scalars, State
from .sgd import SGD

__all__ = ["MASTER", "RULES", "STATE_NAMES", "DeviceKernel", "Hyper", "Matrix", "Rule", "Scalars", "State"]

RULES: dict[str, type[Rule]] = {rule.name: rule for rule in (Adam, SGD, Lion, Adagrad, Muon)}
"""The rules by their names in configurations."""

STATE_NAMES = (MASTER, *dict.fromkeys(state.name for rule in RULES.values() for state in rule.every_state))
"""The names of the states of all rules."""
