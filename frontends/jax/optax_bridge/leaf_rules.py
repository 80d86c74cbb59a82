"""The update rule of each parameter of a tree: the configured one, or with Muon that of matrices and AdamW."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from offload_core.config.matrices import chosen, tell
from offload_core.config.options import OffloadConfig
from offload_core.device.protocols import Device
from offload_core.errors import ConfigError
from offload_core.layout.partition import ParamSpec

from ..tree.wrapped_tree import Leaf
from .rule_words import WORDS


class LeafRules:
    """The rules of a configuration's groups, and the group of each leaf. The choice of matrices is printed.

    Args:
        shapes: those of the trained leaves, by path.
        device: the device that updates.

    Raises:
        ConfigError: no leaf is a matrix, ``muon_params`` names none, the choice is not clear, or ranks of several
            processes would exchange matrices.
    """

    def __init__(self, config: OffloadConfig, shapes: Mapping[str, Sequence[int]], device: Device) -> None:
        rules = [config.rule(group) for group in config.groups()]
        self.rules = [WORDS[rule.name].in_xlas_numbers(rule) if rule.name in WORDS else rule for rule in rules]
        # Kernels of attention have three dimensions, too: only layers that are seen to be stacked are stacks.
        self._matrices = chosen(config, shapes, stacks=False)
        """The leaves of the first rule; None: all."""
        if self._matrices is not None and len(device.ranks) < device.world_size:
            raise ConfigError(
                f"optimizer={config.optimizer!r} on a mesh of several processes: they cannot exchange matrices yet; "
                "expected the devices of one process, or another optimizer"
            )
        if self._matrices is not None:
            tell([*shapes], self._matrices)

    def of(self, leaf: Leaf, specs: Sequence[ParamSpec], *, decayed: bool) -> list[ParamSpec]:
        """Return the core's parameters of a leaf with their rule, and with the group that has its hyperparameters.

        Raises:
            ParameterError: the rule cannot update it.
        """
        number = int(self._matrices is not None and leaf.path not in self._matrices)
        rule = self.rules[number]
        is_whole = leaf.layout is None and all(shard.is_whole for shard in leaf.shards)
        matrix = rule.matrix(leaf.path, leaf.shape, in_order=is_whole)
        return [replace(spec, group=2 * number + int(not decayed), rule=rule, matrix=matrix) for spec in specs]
