"""Stage 3: parameters in shards, made whole for the modules that use them."""

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from offload_core.step.pipeline import Pipeline

from ..casting import Casts
from ..ranks.device_ranks import device_for
from .gathering import Gathering
from .hooks import check_hooks_run
from .leaf_modules import leaf_modules
from .parameters import PartitionedParameter, PartitionedParameters
from .runs import ModuleRuns


class PartitionedModel:
    """The partitioned parameters of a model, the hooks that make them whole, and ``gathered_parameters`` for them.

    Args:
        device: the device of whole parameters.
        group: as in ``device_for``; gathers use a group of their own. Making it is collective.
        pipeline: updates the trained parameters.
        casts: the element types that the model's tensors get.
    """

    def __init__(self, model: nn.Module, device: torch.device, group: Any, pipeline: Pipeline, casts: Casts) -> None:
        check_hooks_run(model, pipeline.config.param_persistence_threshold)
        self._world = device_for(device, group, pipeline.config, apart=True)
        self._world.trace = pipeline.device.trace
        self.parameters = PartitionedParameters(model, device, self._world, pipeline, casts)
        self.live = self.parameters.live
        """Tracks which parameters are whole."""
        self.runs = ModuleRuns(model, self.parameters, pipeline, leaf_modules(model, pipeline.config.leaf_modules))
        self.gathering = Gathering(self.parameters, self.runs, self._world, pipeline)

    def __contains__(self, param: torch.Tensor) -> bool:
        return param in self.parameters

    def keep_shards(self, records: Iterable[PartitionedParameter]) -> None:
        """Keep only the shards of these parameters, in their final element type."""
        for record in records:
            if record.param not in self.parameters:
                self.parameters.keep_shard(record)
                self.runs.whole.guard(record)
            else:
                self.parameters.join_master(record)
        self.runs.hook_all()

    def keep_frozen(self, trained: Collection[torch.Tensor]) -> None:
        """Partition the model's parameters that are not trained."""
        self.keep_shards(self.parameters.cut(self.parameters.frozen(trained)).values())

    @property
    def sent_bytes(self) -> int:
        """The bytes of parameters that this rank has sent to others."""
        return self._world.sent_bytes

    def before_change(self) -> int:
        """Release all parameters before they change.

        Returns:
            A number that is equal on ranks that gathered the same parameters in the same order.

        Raises:
            StateError: inside ``gathered_parameters``.
        """
        self.gathering.check_closed()
        self.runs.forget()
        return self.live.release_all()

    def recover(self) -> None:
        """Release all parameters, after an error."""
        self.runs.forget()
        self.live.release_idle()

    def make_whole(self) -> None:
        """Make all parameters whole, for :meth:`close`. Collective."""
        self.before_change()
        for record in self.parameters.records.values():
            self.runs.whole.hold([record])

    def close(self) -> None:
        """Remove the hooks. Parameters stay as they are, whole after :meth:`make_whole`."""
        self.gathering.close()
        self.parameters.close()
        self.runs.close()
        self._world.close()
