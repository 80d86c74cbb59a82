"""Gathers the parameters of a block once for all micro-batches that pass it (stage 3)."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from .parameters import PartitionedParameter, PartitionedParameters
from .runs import ModuleRuns
from .sharding import Blocks


class PartitionedBlocks(Blocks):
    """A context in which several micro-batches run block by block, over parameters in shards.

    The order in which parameters are used inside does not predict later uses, and nothing is gathered by prediction:
    the caller knows the next block.
    """

    def __init__(self, parameters: PartitionedParameters, runs: ModuleRuns) -> None:
        self._parameters = parameters
        self._runs = runs
        self._held: dict[nn.Module, Sequence[PartitionedParameter]] = {}
        """Maps a block to its parameters, which are being gathered, or whole."""
        self._whole: dict[nn.Module, frozenset[PartitionedParameter]] = {}
        """Maps a block that has run to its parameters, which are whole."""

    def __enter__(self) -> Blocks:
        self._runs.forget(graphs=False)
        self._parameters.live.release_idle()
        self._parameters.live.begin_untracked()
        self._outside = self._runs.switch(self.new_line())
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.end_line(self._runs.switch(self._outside))
            for block in [*self._held]:
                self.release(block)
        finally:
            self._parameters.live.end_untracked()

    def new_line(self) -> Any:
        return self._runs.forwards_of_another()

    def switch(self, line: Any) -> Any:
        return self._runs.switch(line)

    def end_line(self, line: Any) -> None:
        self._runs.end_forwards(line)

    def hold(self, block: nn.Module) -> None:
        if block not in self._held:
            records = self._parameters.used_by(*block.modules())
            self._runs.whole.hold(records)
            self._held[block] = records

    @contextmanager
    def inside(self, block: nn.Module) -> Iterator[None]:
        records, runs = self._held[block], self._runs
        if block not in self._whole:
            runs.whole.acquire(records)
            self._whole[block] = frozenset(records)
        before, runs.kept_by_caller = runs.kept_by_caller, self._whole[block]
        try:
            yield
        finally:
            runs.kept_by_caller = before

    def release(self, block: nn.Module) -> None:
        if block in self._whole:
            self._runs.whole.release([*self._whole.pop(block)], may_stay=False)
        self._runs.whole.release(self._held.pop(block, ()), may_stay=False)

    def staying(self) -> AbstractContextManager[None]:
        return self._runs.whole.staying()
