"""The parameters that optimizers train, each with its number, and the optimizer that owns it."""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .dtensor import Placement, local_of
from .local_elements import LocalElements
from .managed import ManagedTensor, managed
from .tensors import TakenGradient


class Owner(Protocol):
    """An optimizer, as another one sees it that is given its parameters."""

    @property
    def names(self) -> Mapping[torch.Tensor, str]:
        """Names of parameters in groups without names."""
        ...

    def keeps_from(self, other: Any) -> str | None:
        """The reason why another optimizer may not take over; None: it may."""

    def give_way(self) -> None:
        """Flush and close. A later use raises an error with the reason."""


@dataclass(eq=False)
class Slot:
    """A parameter that has states, and its number in the pipeline and in :class:`Columns`."""

    name: str
    param: torch.Tensor
    index: int
    taken: TakenGradient
    stand_in: torch.Tensor
    """What stands in ``p.grad`` for a gradient that has left: ``taken``, or a DTensor of which it is the local tensor.
    """
    order: list[int] | None
    """The memory order of its states (``tensors.memory_order``)."""
    owner: "weakref.ref[Owner]"
    local: LocalElements
    """The ways to the elements that this process owns."""
    placed: Placement
    """Which elements of the parameter its tensor has on this process."""
    managed: ManagedTensor
    """What engines know of the parameter: it leads to this slot."""

    @property
    def values(self) -> torch.Tensor:
        """The tensor that holds this process's values: the parameter, or a DTensor's local tensor."""
        return local_of(self.param)

    def replace_stand_in(self) -> None:
        """Make another stand-in; autograd has attached a graph to the one that was."""
        self.taken = TakenGradient(self.values, self.name)
        self.stand_in = self.placed.around(self.taken)

    def release(self) -> None:
        """Remove the stand-in from the parameter."""
        if self.param.grad is self.stand_in:
            self.param.grad = None


def slot_of(param: torch.Tensor) -> Slot | None:
    """Return the place of a parameter in the open optimizer that has states of it; None: there is none."""
    return managed(param).slot


def owner_of(param: torch.Tensor) -> Owner | None:
    """Return the open optimizer that has states of a parameter; None: there is none."""
    slot = slot_of(param)
    return None if slot is None else slot.owner()
