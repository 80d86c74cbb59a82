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


class OwningOptimizer(Protocol):
    """An optimizer, as seen by a second optimizer that is given the same parameters."""

    @property
    def names(self) -> Mapping[torch.Tensor, str]:
        """The names of parameters whose groups have no names."""
        ...

    def keeps_from(self, other: Any) -> str | None:
        """The reason why another optimizer may not take over; None: it may."""

    def give_way(self) -> None:
        """Flush and close. A later use raises an error with the reason."""


@dataclass(eq=False)
class Slot:
    """A parameter that has states, and its number in the core and in :class:`ParamTable`."""

    name: str
    param: torch.Tensor
    index: int
    taken: TakenGradient
    stand_in: torch.Tensor
    """The tensor in ``p.grad`` in place of a gradient on the host: ``taken``, or a DTensor with local tensor ``taken``.
    """
    order: list[int] | None
    """The memory order of its states (``tensors.memory_order``)."""
    owner: "weakref.ref[OwningOptimizer]"
    local: LocalElements
    """Access to the elements that this process owns."""
    placed: Placement
    """The elements of the parameter that its tensor has on this process."""
    managed: ManagedTensor
    """The parameter's ``ManagedTensor``, which refers to this slot."""

    @property
    def values(self) -> torch.Tensor:
        """The tensor that holds this process's values: the parameter, or a DTensor's local tensor."""
        return local_of(self.param)

    def replace_stand_in(self) -> None:
        """Make a new stand-in, because autograd has attached a graph to the old one."""
        self.taken = TakenGradient(self.values, self.name)
        self.stand_in = self.placed.around(self.taken)

    def release(self) -> None:
        """Remove the stand-in from the parameter."""
        if self.param.grad is self.stand_in:
            self.param.grad = None


def slot_of(param: torch.Tensor) -> Slot | None:
    """Return the slot of a parameter in the open optimizer that has its states; None: there is none."""
    return managed(param).slot


def owner_of(param: torch.Tensor) -> OwningOptimizer | None:
    """Return the open optimizer that has a parameter's states; None: there is none."""
    slot = slot_of(param)
    return None if slot is None else slot.owner()
