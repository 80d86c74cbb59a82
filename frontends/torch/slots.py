"""What an optimizer keeps of each parameter that has states."""

import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from offload_core.errors import StateError

from .pending import forget, settle
from .tensors import TakenGradient

OWNED: "weakref.WeakValueDictionary[int, Slot]" = weakref.WeakValueDictionary()
"""The slot of every parameter that has one, by ``id``; a slot keeps its parameter alive, so no id is reused."""


@dataclass(eq=False)
class Slot:
    """A parameter that has states: its number in the pipeline, and what it was after the last update."""

    name: str
    param: torch.Tensor
    index: int
    taken: TakenGradient
    order: list[int] | None
    """The order in memory in which its states are laid out (``tensors.memory_order``)."""
    arrived: int = 0
    """Gradients taken in backwards since the last update."""
    averaged: int = 0
    """Of these, how many came through ``scaled_backward``."""
    deferred: torch.Tensor | None = None
    """``p.grad`` where it holds gradients that are to leave later, on top of those that have left."""
    partitioned: bool = False
    """Whether it is there in shards, which only ``gathered_parameters`` changes."""
    version: int = 0
    address: int = 0

    def note(self) -> None:
        if not self.partitioned:
            self.version, self.address = self._place

    def doubt(self) -> None:
        """The parameter may not be what its master weights say: who uses them next is to compare."""
        self.version = -1

    @property
    def changed_outside(self) -> bool:
        return not self.partitioned and (self.version, self.address) != self._place

    @property
    def _place(self) -> tuple[int, int]:
        with torch._C.DisableTorchFunctionSubclass():  # no read: nobody has to wait
            return self.param._version, self.param.data_ptr()

    def forget(self) -> None:
        """No gradient has arrived."""
        self.arrived = self.averaged = 0
        self.deferred = None

    def continues(self, gradient: torch.Tensor | None) -> bool:
        """Whether ``p.grad``, as it is now, is the deferred gradient (with ``create_graph`` autograd replaces it)."""
        return (
            gradient is not None and self.deferred is not None and (gradient is self.deferred or gradient.requires_grad)
        )

    def release(self) -> None:
        """Take the stand-in off the parameter."""
        if self.param.grad is self.taken:
            self.param.grad = None


def let_go(handles: list[Any], slots: dict[torch.Tensor, Slot]) -> None:
    """Take the hooks off the parameters, and the stand-ins for their gradients; they belong to nobody."""
    for handle in handles:
        handle.remove()
    handles.clear()
    for slot in slots.values():
        if not slot.partitioned:
            with suppress(StateError):  # the step that it was emitted for does not come
                settle(slot.param)
            forget(slot.param)
        slot.release()
        slot.taken.when_added(None)
        if OWNED.get(id(slot.param)) is slot:
            del OWNED[id(slot.param)]
    slots.clear()
