"""One ``Slot`` for each parameter that an open optimizer trains, and how to find a parameter's slot and optimizer."""

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
        """The names that this optimizer has for parameters of groups without ``param_names``."""
        ...

    def keeps_from(self, other: Any) -> str | None:
        """Return the reason why the optimizer ``other`` may not take over this optimizer's parameters; None: it may."""

    def give_way(self) -> None:
        """Flush and close this optimizer, because another one takes over. A later use of this optimizer raises an error
        with this reason."""


@dataclass(eq=False)
class Slot:
    """A parameter that has optimizer states. ``index`` is its index in the core and in :class:`ParamTable`."""

    name: str
    param: torch.Tensor
    index: int
    taken: TakenGradient
    stand_in: torch.Tensor
    """The tensor in ``p.grad`` in place of a gradient on the host: ``taken``, or a DTensor with local tensor ``taken``.
    """
    order: list[int] | None
    """The memory order of the parameter's states (``tensors.memory_order``)."""
    owner: "weakref.ref[OwningOptimizer]"
    local: LocalElements
    """Access to this process's elements of the parameter."""
    placed: Placement
    """The parameter's placement: it tells which elements of the parameter ``param`` has on this process."""
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
    """Return the parameter's slot in the open optimizer that has its states; None: no open optimizer has them."""
    return managed(param).slot


def owner_of(param: torch.Tensor) -> OwningOptimizer | None:
    """Return the open optimizer that has the parameter's states; None: no open optimizer has them."""
    slot = slot_of(param)
    return None if slot is None else slot.owner()
