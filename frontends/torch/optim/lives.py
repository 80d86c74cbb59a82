"""The life of an optimizer: it waits for shards, is open, and is closed.

It has one :class:`Life` at a time. Only an open one has the components that hold parameters and states.
"""

import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import torch

from offload_core.errors import StateError

from ..params.dtensor import is_dtensor
from ..params.slots import Slot
from ..training.steps import Steps

_NONE: Mapping[torch.Tensor, Slot] = MappingProxyType({})


class LivingOptimizer(Protocol):
    """An optimizer, as its life sees it."""

    param_groups: list[dict[str, Any]]
    _life: "Life"

    @property
    def steps(self) -> Steps:
        """The part that makes steps of the others."""
        ...

    def _make_components(self) -> None:
        """Make the components that hold parameters and states, of the parameters that are in the groups."""


class Life:
    """An optimizer that has no components: one that is being made.

    Attributes:
        is_open: True if it has components.
        updates: the updates made.
        states: by parameter, as in ``torch.optim.Optimizer``.
    """

    is_open = False
    _why_not_open = "is being made"

    def __init__(self, updates: int = 0) -> None:
        self.updates = updates
        self.states: Any = defaultdict(dict)

    def steps_of(self, optimizer: LivingOptimizer) -> Steps:
        """Return the part that makes steps of the others; raise :class:`StateError` if there is none."""
        raise StateError("this optimizer was closed; expected an open one: wrap the model anew")

    @property
    def slots(self) -> Mapping[torch.Tensor, Slot]:
        """The parameters that have states, in the core's order."""
        return _NONE

    @property
    def released(self) -> bool:
        """True if the parameters have no memory on the device."""
        return False

    def where(self, tensors: Callable[[], str]) -> str:
        """Return where the optimizer is, as lines for somebody who waits; ``tensors`` returns the one about them."""
        return f"offload-core: process {os.getpid()} has an optimizer that {self._why_not_open}"

    def follow_shards(self, optimizer: LivingOptimizer) -> bool:
        """Before the first update, make states anew if a library has put DTensors in the place of all parameters, as
        ``accelerator.prepare(model, optimizer)`` does. Collective then.

        Returns:
            True if the optimizer has no states, and waits for such parameters.
        """
        return False

    def begin(self, optimizer: LivingOptimizer) -> None:
        """Make the components now, if the optimizer waits for shards: of the parameters that are in its groups."""

    def closed(self) -> "Life":
        """Return the life after this one, when the optimizer is closed."""
        return Closed(self.updates)


class WaitingForShards(Life):
    """An optimizer that was made of whole parameters, in whose place Accelerate will put shards."""

    def __init__(self, first: torch.Tensor) -> None:
        super().__init__()
        self._first = weakref.ref(first)
        self._why_not_open = "waits for shards in place of its parameters"

    def steps_of(self, optimizer: LivingOptimizer) -> Steps:
        self.begin(optimizer)
        return optimizer.steps

    def follow_shards(self, optimizer: LivingOptimizer) -> bool:
        if first_of(optimizer) is self._first():
            return True
        self.begin(optimizer)
        return False

    def begin(self, optimizer: LivingOptimizer) -> None:
        optimizer._make_components()
        for param, entry in self.states.items():  # assigned while there were no components
            if entry and param in optimizer._life.slots:
                optimizer._life.states[param] = entry


class Open(Life):
    """An optimizer of an engine, which has the parameters of its model."""

    is_open = True

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._core = core = steps.components.core
        self._parameters = core.parameters

    @property
    def updates(self) -> int:
        return self._core.update_count

    @updates.setter
    def updates(self, count: int) -> None:
        self._steps.set_updates(count)

    @property
    def states(self) -> Any:
        return self._steps.components.states.views

    @states.setter
    def states(self, states: Mapping[Any, Any]) -> None:
        self._steps.components.states.assign(states)

    def steps_of(self, optimizer: LivingOptimizer) -> Steps:
        return self._steps

    @property
    def slots(self) -> Mapping[torch.Tensor, Slot]:
        return self._steps.components.registration.slots

    @property
    def released(self) -> bool:
        return self._parameters.released

    def where(self, tensors: Callable[[], str]) -> str:
        return self._core.where(tensors)


class OpenAlone(Open):
    """An optimizer without an engine, whose parameters may be replaced by shards before its first update."""

    def follow_shards(self, optimizer: LivingOptimizer) -> bool:
        first = first_of(optimizer)
        if first is None or not is_dtensor(first) or first in self.slots or self.updates or not self.slots:
            return False
        if not any(param in self.slots for group in optimizer.param_groups for param in group["params"]):
            self._steps.components.close()
            optimizer._make_components()
        return False


class Closed(Life):
    """An optimizer that has ended; its states are gone."""

    _why_not_open = "was closed"


class GaveWay(Closed):
    """An optimizer that was closed because a later one was made of its parameters."""

    def steps_of(self, optimizer: LivingOptimizer) -> Steps:
        raise StateError(
            "this optimizer was closed, because a later one was made of its parameters; expected that one to be used "
            "(was the model wrapped twice?), or the model to be wrapped anew"
        )

    def closed(self) -> Life:
        return GaveWay(self.updates)


def first_of(optimizer: LivingOptimizer) -> torch.Tensor | None:
    """Return the first parameter of an optimizer's groups."""
    return next((param for group in optimizer.param_groups for param in group["params"]), None)
