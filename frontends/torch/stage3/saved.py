"""Tensors that graphs save while modules run on gathered parameters.

[Note: saved parameters] A module's graph may leave the module by another way than the module's output: in a list, or as
an attribute of another module. While a module runs whose graph may save gathered parameters, hooks on saved tensors
record the parameters that the graph saves, without their memory. If a node then needs a recorded parameter that is
released, the record begins the backward of the run that saved it, which gathers the parameter. All other saved tensors
go to the user's hooks, if there are any (``torch.autograd.graph.save_on_cpu``). ``torch.func`` forbids such hooks:
inside it the parameters stay whole until they change.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from offload_core.errors import StateError

from ..internals.private import allows_saved_hooks, pop_saved_hooks, push_saved_hooks, storage_of, top_saved_hooks

_LEFT_ALONE = (None, "torch.utils.checkpoint", "frontends.torch.layerwise.saved")
"""Python modules whose hooks on saved tensors copy nothing: torch's own functions, checkpointing, and the hooks of
``accumulate()``, which save nothing."""

Gather = Callable[[], None]
"""A function that makes the saved parameter, and all others of the run that saved it, whole."""


@dataclass(eq=False)
class _Saved:
    """A tensor that a graph has saved. A gathered parameter is saved without its memory ([Note: saved parameters])."""

    tensor: torch.Tensor
    """The tensor. It may share memory with a master weight, and is only read."""
    version: int
    gather: Gather | None = None
    """Makes the parameter whole; None: the tensor shares no memory with a gathered parameter."""

    def values(self) -> torch.Tensor:
        """Return the tensor, as autograd returns a tensor that it saves itself."""
        if self.tensor._version != self.version:
            what, when = ("parameter", "before step()") if self.gather else ("tensor", "before it is written to")
            raise StateError(
                f"a {what} of shape {tuple(self.tensor.shape)} that backward needs was changed in place after its "
                f"forward: it has version {self.tensor._version}, expected {self.version}; expected backward() {when}"
            )
        if self.gather is not None:
            self.gather()
        return self.tensor


class SavedTensors:
    """The hooks on saved tensors of one model's runs. Each hook is registered inside the user's hooks."""

    def __init__(self) -> None:
        self._ours: weakref.WeakSet[Callable[[torch.Tensor], Any]] = weakref.WeakSet()

    def needed(self, *, unit: bool) -> bool:
        """Return True if parameters that are saved now would take memory without a hook.

        Args:
            unit: True for a unit. Its graph is one node, so hooks are only needed if the user has some.
        """
        users = top_saved_hooks(False)
        if users is None:
            return not unit
        return users[0] not in self._ours and getattr(users[0], "__module__", None) not in _LEFT_ALONE

    def note(self, gather_of: Callable[[int | None], Gather | None]) -> saved_tensors_hooks | None:
        """Return hooks that record the gathered parameters that graphs save. The caller stores the hooks before it
        calls ``__enter__``, so that it can end them after an interrupt.

        Args:
            gather_of: returns the function that makes the parameter in a storage whole again; None: no gathered
                parameter is in this storage.

        Returns:
            The hooks, for :func:`end_noting`; None where torch forbids hooks on saved tensors.
        """
        if not allows_saved_hooks():
            return None
        users = top_saved_hooks(False)

        def save(tensor: torch.Tensor) -> Any:
            gather = gather_of(storage_of(tensor))
            if gather is None and users is not None:
                return users[0](tensor)
            # Detached, because a node that saves its own output would keep itself alive.
            return _Saved(tensor.detach(), tensor._version, gather)

        def restore(packed: Any) -> torch.Tensor:
            return packed.values() if isinstance(packed, _Saved) else users[1](packed)

        self._ours.add(save)
        return saved_tensors_hooks(save, restore)


def end_noting(hooks: saved_tensors_hooks) -> None:
    """Remove hooks on saved tensors, if they were entered. Hooks that were entered later and not exited stay."""
    above, top = [], top_saved_hooks(False)
    while top is not None and top[0] is not hooks.pack_hook:
        pop_saved_hooks()
        above.append(top)
        top = top_saved_hooks(False)
    if top is not None:
        pop_saved_hooks()
    for pack, unpack in reversed(above):
        push_saved_hooks(pack, unpack)
