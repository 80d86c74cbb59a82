"""The ``Sharding`` of stage 3: partitioned parameters, and the module hooks that gather them."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from offload_core.disk.shards import OnDisk
from offload_core.engine import Engine
from offload_core.layout.partition import ParamSpec
from offload_core.memory.plan import DEVICE, DISK, FROZEN_SHARDS, GATHERED, PARAMETERS, PlanRow
from offload_core.rules import Matrix

from ..internals.compiled import Around, run_compiled_modules
from ..params.casting import Casts
from ..ranks.device_ranks import device_for
from .blocks import PartitionedBlocks
from .gathering import Gathering
from .hooks import check_hooks_run
from .leaf_modules import leaf_modules
from .parameters import PartitionedParameter, PartitionedParameters
from .runs import ModuleRuns
from .sharding import Blocks, Entries, Sharding


class PartitionedModel(Sharding):
    """The partitioned parameters of a model, the hooks that make them whole, and ``gathered_parameters`` for them.

    Args:
        device: the device of whole parameters.
        group: the process group of the ranks (None: one rank). Gathers use a private group of these ranks, and making
            it is collective.
        core: updates the trained parameters.
        casts: the element types of the model's tensors after casting.
        matrices: the matrices of frozen parameters, which must not be cut.
    """

    is_fixed = gathers = True

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        group: Any,
        core: Engine,
        casts: Casts,
        matrices: Mapping[torch.Tensor, Matrix],
    ) -> None:
        config, trained_on = core.config, core.device
        check_hooks_run(model, config.param_persistence_threshold)
        self._gradients = core.gradients
        self._world = device_for(device, group, config, separate=True)
        self._world.trace = trained_on.trace
        self.parameters = PartitionedParameters(model, device, self._world, core, casts, matrices)
        self.live = self.parameters.live
        """Tracks which parameters are whole."""
        self.runs = ModuleRuns(model, self.parameters, core, leaf_modules(model, config.leaf_modules))
        self.gathering = Gathering(self.parameters, self.runs, self._world, core)

    def __contains__(self, param: torch.Tensor) -> bool:
        return param in self.parameters

    def record_of(self, param: torch.Tensor) -> PartitionedParameter | None:
        return self.parameters.record_of(param)

    def record_with(self, tensor: torch.Tensor) -> PartitionedParameter | None:
        return next(iter(self.parameters.among([tensor])), None)

    # --- parameters that an optimizer registers ------------------------------------------------------

    def describe(self, entries: Entries) -> list[ParamSpec]:
        leaves = self.runs.leaves.numbers()
        described = []
        for spec, param in entries:
            spec = replace(spec, partitioned=self.parameters.takes(param), finalized_with=leaves.get(param))
            self.parameters.check_cut(spec, param)
            described.append(spec)
        return described

    def frozen(self, trained: Collection[torch.Tensor]) -> list[tuple[ParamSpec, torch.Tensor]]:
        return self.parameters.frozen(trained)

    def plan_rows(self, trained: Entries, frozen: Entries) -> list[PlanRow]:
        return [self.parameters.plan_cut(trained, frozen)]

    @contextmanager
    def cut(self, entries: Entries, first: int) -> Iterator[Mapping[torch.Tensor, torch.Tensor | OnDisk]]:
        cut = self.parameters.cut(entries)
        yield {param: record.shard.values for param, record in cut.items()}
        for i, (_, param) in enumerate(entries):
            if param in cut:
                self.parameters.train(cut[param], first + i)
        self._keep_shards(cut.values())

    def keep_frozen(self, trained: Collection[torch.Tensor]) -> None:
        self._keep_shards(self.parameters.cut(self.parameters.frozen(trained)).values())

    def _keep_shards(self, records: Iterable[PartitionedParameter]) -> None:
        """Keep only the shards of these parameters, in their final element type."""
        for record in records:
            if record.param not in self.parameters:
                self.parameters.keep_shard(record)
                self.runs.whole.guard(record)
            else:
                self.parameters.join_master(record)
        self.runs.hook_all()

    # --- a step --------------------------------------------------------------------------------------

    def before_forward(self, model: nn.Module) -> None:
        run_compiled_modules(model, self.units)

    @property
    def units(self) -> Around:
        return self.runs.units

    def block_by_block(self) -> Blocks:
        self.gathering.check_closed("accumulate()")
        return PartitionedBlocks(self.parameters, self.runs)

    def before_change(self) -> int:
        self.gathering.check_closed()
        self.runs.forget()
        return self.live.release_all()

    def recover(self) -> None:  # waits
        self.runs.forget()
        self.live.release_idle()

    def forget_order(self) -> None:
        self.live.forget_order()

    # --- whole by hand -------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self.gathering.is_open

    def check_closed(self, what: str = "an update") -> None:
        self.gathering.check_closed(what)

    def generating(self) -> AbstractContextManager[None]:
        return self.gathering.generating()

    def gathered_when_read(self) -> AbstractContextManager[None]:
        return self.gathering.gathered_when_read()

    # --- leaf modules --------------------------------------------------------------------------------

    @property
    def leaf_modules(self) -> Collection[nn.Module]:
        return [*self.runs.leaves]

    def mark_leaves(self, modules: Iterable[nn.Module], leaf: bool, *, waiting: bool) -> Collection[torch.Tensor]:
        self._gradients.check_none("leaf modules are to change", waiting=waiting)
        self.runs.mark_leaves(modules, leaf)
        return self.runs.leaves.numbers()

    def finalize_by(self, finalize: Callable[..., Collection[torch.Tensor]]) -> None:
        self.runs.leaves.finalize_by(finalize)

    # --- bytes, and the end --------------------------------------------------------------------------

    @property
    def sent_bytes(self) -> int:
        return self._world.sent_bytes

    def held_bytes(self) -> Mapping[tuple[str, str], int]:
        return {
            (DEVICE, PARAMETERS): self.parameters.shard_bytes,
            (DEVICE, GATHERED): self.live.n_bytes,
            (DISK, FROZEN_SHARDS): self.parameters.disk_bytes,
        }

    def make_whole(self) -> None:
        self.before_change()
        for record in self.parameters.records.values():
            self.runs.whole.acquire([record])

    def close(self) -> None:
        self.gathering.close()
        self.parameters.close()
        self.runs.close()
        self._world.close()
