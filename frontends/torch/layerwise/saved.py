"""The tensors that a block's graph saves: left out in forward, and computed again before backward.

In forward each place in which the graph saves a tensor gets an empty slot. Before the backward the block runs again,
and the tensors that it saves then fill the slots, in order. It runs no further than to the last one: what comes behind
it, as a layer's last matrix product, is not computed again. A node that has used its slot frees it.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from offload_core.errors import StateError


class _Slot:
    """A place in which a graph saves a tensor."""

    __slots__ = ("__weakref__", "alike", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.alike = _properties(tensor)
        self.tensor: torch.Tensor | None = None


def _properties(tensor: torch.Tensor) -> Any:
    return tensor.shape, tensor.dtype, tensor.device


class _AllFilled(Exception):
    """Ends the forward in which slots are filled. Torch calls a module's hooks behind it, as behind any error."""


class SavedByBlock:
    """The slots of one call of a block.

    Args:
        name: the block's, for errors.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._slots: list[weakref.ref[_Slot]] = []
        """The graph has the slots."""
        self._runs = False
        """True while the block's first forward runs."""

    def __bool__(self) -> bool:
        """True if the graph saves anything."""
        return bool(self._slots)

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """A context for the block's first forward, in which graphs save empty slots."""
        self._runs = True
        try:
            with saved_tensors_hooks(self._leave_out, self._of):
                yield
        finally:
            self._runs = False

    def _leave_out(self, tensor: torch.Tensor) -> _Slot:
        slot = _Slot(tensor)
        self._slots.append(weakref.ref(slot))
        return slot

    def _of(self, slot: _Slot) -> torch.Tensor:
        if slot.tensor is None and self._runs:
            raise StateError(
                f"accumulate: block {self._name!r} differentiates in its forward (torch.autograd.grad), and the "
                "tensors that its graph saves are not there then; expected a loop over micro-batches for this model"
            )
        if slot.tensor is None:
            raise StateError(
                f"accumulate: a tensor that was made inside block {self._name!r} is used outside of it, and the block "
                "does not return it: a hook or an attribute has carried it out (output_router_logits, "
                "output_attentions). Its gradient would be lost; expected a block that returns it, or a loss without it"
            )
        return slot.tensor

    @contextmanager
    def filled(self) -> Iterator[None]:
        """A context for the block's second forward, which fills the slots. It ends the forward after the last slot.

        Raises:
            StateError: the forward does not save what the first one has saved.
        """
        filled = 0

        def fill(tensor: torch.Tensor) -> None:
            nonlocal filled
            if filled == len(self._slots):  # code of the block has caught the exception
                raise _AllFilled
            slot = self._slots[filled]()
            if slot is not None:
                if slot.alike != _properties(tensor):
                    raise self._differs(f"{_words(tensor)} in place of {tuple(slot.alike[0])} {slot.alike[1]}")
                slot.tensor = tensor.detach()  # a node that saves its own output would keep itself alive
            filled += 1
            if filled == len(self._slots):
                raise _AllFilled

        try:
            with saved_tensors_hooks(fill, _no_backward):
                yield
        except Exception:  # TorchScript turns it into one of its own
            if filled < len(self._slots):
                raise
        if filled < len(self._slots):
            raise self._differs(f"{filled} tensors in place of {len(self._slots)}")

    def _differs(self, what: str) -> StateError:
        return StateError(
            f"accumulate: block {self._name!r} saved {what} for backward when it ran again; expected the same as in "
            "forward, as for checkpointing: a block that does not depend on what other code changes meanwhile"
        )


def _words(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def _no_backward(saved: None) -> torch.Tensor:
    raise AssertionError("a backward through a forward that only fills slots")
