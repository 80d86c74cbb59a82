"""The update rule of each parameter of a tree: the configured one, or with Muon that of matrices and AdamW."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from offload_core.config.matrices import chosen, tell
from offload_core.config.options import OffloadConfig
from offload_core.layout.partition import ParamSpec
from offload_core.rules import Matrix, Rule

from ..tree.wrapped_tree import Leaf
from .rule_words import WORDS


class LeafRules:
    """The rules of a configuration's groups, and the group of each leaf. The choice of matrices is printed.

    Args:
        shapes: those of the trained leaves, by path.

    Raises:
        ConfigError: no leaf is a matrix, ``muon_params`` names none, or the choice is not clear.
    """

    def __init__(self, config: OffloadConfig, shapes: Mapping[str, Sequence[int]]) -> None:
        rules = [config.rule(group) for group in config.groups()]
        self.rules = [WORDS[rule.name].in_xlas_numbers(rule) if rule.name in WORDS else rule for rule in rules]
        self._shapes = shapes
        # Kernels of attention have three dimensions, too: only layers that are seen to be stacked are stacks.
        self.matrices = chosen(config, shapes, stacks=False)
        """The leaves of the first rule; None: all."""
        if self.matrices is not None:
            tell([*shapes], self.matrices)

    def _number(self, path: str) -> int:
        """Return the number of a leaf's rule."""
        return int(self.matrices is not None and path not in self.matrices)

    def matrix(self, path: str) -> Matrix | None:
        """Return the shape of the matrices that a leaf's rule needs whole.

        Raises:
            ParameterError: the rule cannot update it.
        """
        return self.rules[self._number(path)].matrix(path, self._shapes[path])

    def of(self, leaf: Leaf, specs: Sequence[ParamSpec], *, decayed: bool) -> list[ParamSpec]:
        """Return the core's parameters of a leaf with their rule, and with the group that has its hyperparameters."""
        number = self._number(leaf.path)
        rule: Rule = self.rules[number]
        return [replace(spec, group=2 * number + int(not decayed), rule=rule) for spec in specs]
