"""Calls of blocks, with the graph of each micro-batch cut around them.

[Note: cut graphs] A block hands on leaves. The graph that it made stays for its backward, without the tensors that it
saved, which are computed again before (``saved.py``). So each micro-batch has a small graph before the first block, one
for each block, and small ones between blocks and after the last one. A tensor that goes into a block and requires a
gradient is made a leaf in place, where it is no view, and its graph is kept as an edge. Its gradients from all later
uses are summed in ``grad``, in the order in which one backward through the whole graph sums them, and go on along the
edge after the backward of the first block that it goes into: all its other uses are later ones.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from offload_core.errors import ParameterError, StateError
from offload_core.support.checks import kind_of

from ..internals.private import grad_mode_kept, is_shared
from .lines import ThreadState
from .saved import SavedByBlock

LEAF_WRITTEN = "a leaf Variable that requires grad is being used in an in-place operation"
"""A part of torch's error where code changes a leaf in place."""


class Border:
    """A tensor that one micro-batch hands from block to block, and its gradient.

    Args:
        edge: the graph that made it before a block; None: it is the output of a block.
        first: the number of the first block that it goes into, if it has an edge.
    """

    def __init__(self, tensor: torch.Tensor, edge: GradientEdge | None = None, first: int = -1) -> None:
        self.tensor = tensor
        self.edge = edge
        self.first = first
        self.is_view = edge is not None and not _can_be_leaf(tensor)
        """True if it stays as it is: a view, or a tensor that the micro-batch's own graph has saved, or with hooks."""
        self._of_view: torch.Tensor | None = None

    @property
    def gradient(self) -> torch.Tensor | None:
        """The sum of the tensor's gradients so far. If the tensor is a leaf, autograd adds the gradients of its uses
        outside of blocks."""
        return self._of_view if self.is_view else self.tensor.grad

    @gradient.setter
    def gradient(self, gradient: torch.Tensor | None) -> None:
        if self.is_view:
            self._of_view = gradient
        else:
            self.tensor.grad = gradient


class Borders:
    """The tensors that cross the borders of blocks in one micro-batch."""

    def __init__(self) -> None:
        self._of: dict[int, Border] = {}

    def __iter__(self) -> Iterator[Border]:
        return iter([*self._of.values()])

    def get(self, tensor: torch.Tensor) -> Border | None:
        return self._of.get(id(tensor))

    def add(self, border: Border) -> None:
        self._of[id(border.tensor)] = border

    def forget(self, border: Border) -> None:
        self._of.pop(id(border.tensor), None)

    def share_nodes_with(self, root: torch.Tensor) -> bool:
        """Return True if a backward from ``root`` reaches a part of a graph that is kept for an edge."""
        edges = [border.edge.node for border in self if border.edge is not None]
        return bool(edges) and root.grad_fn is not None and not nodes_of(edges).isdisjoint(nodes_of([root.grad_fn]))


def _can_be_leaf(tensor: torch.Tensor) -> bool:
    """Return True if a tensor with a graph can be made a leaf in place, and nothing notices."""
    return not (tensor._is_view() or tensor._backward_hooks or is_shared(tensor))


def _versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors if not tensor.is_inference()]


def _marks_of_buffers(block: nn.Module) -> list[tuple[int, int]]:
    """Return a list that differs after a buffer of the block was written to or replaced."""
    return [(id(buffer), buffer._version) for buffer in block.buffers() if not buffer.is_inference()]


class BufferValues:
    """The buffers of a block, and their values as they are now."""

    def __init__(self, block: nn.Module) -> None:
        named = [(module, name, buffer) for module in block.modules() for name, buffer in module._buffers.items()]
        self._values = [(module, name, b, b.detach().clone()) for module, name, b in named if b is not None]

    def put_back(self) -> None:
        """Make them the block's buffers again, with these values."""
        with grad_mode_kept(), torch.no_grad():
            for module, name, buffer, values in self._values:
                module._buffers[name] = buffer
                buffer.copy_(values)


class RandomState:
    """The states of torch's generators, of the CPU and of the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of_host = torch.get_rng_state()
        self._of_device = None if device.type == "cpu" else self._module().get_rng_state(device)

    def _module(self) -> Any:
        return torch.get_device_module(self._device)

    def restore(self) -> None:
        torch.set_rng_state(self._of_host)
        if self._of_device is not None:
            self._module().set_rng_state(self._of_device, self._device)


@dataclass(eq=False)
class BlockCall:
    """One call of a block by one micro-batch.

    Args:
        forward: the block's own forward.
        number: the block's, from 0.
    """

    name: str
    number: int
    block: nn.Module
    forward: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    borders: Borders
    device: torch.device
    remembers_buffers: bool = True
    """True: remember the values that the block's buffers have before it, in case it changes them."""
    inputs: list[Border] = field(default_factory=list)
    """The tensors that go into the block and require a gradient, but leaves of the user's and parameters."""
    outputs: list[tuple[GradientEdge, Border]] = field(default_factory=list)
    """The tensors that the block made, each with the graph that made it."""

    def __post_init__(self) -> None:
        """Check the arguments, and cut the graph before them.

        Raises:
            StateError, ParameterError: the block cannot run with them twice.
        """
        leaves = tree_leaves((self.args, self.kwargs), is_leaf=_is_cache)
        cache = next(filter(_is_cache, leaves), None)
        if cache is not None:
            raise ParameterError(
                f"accumulate: block {self.name!r} gets {kind_of(cache)}, which it writes to, and it runs again "
                "in backward; expected no cache in training: use_cache=False, in the call or in model.config"
            )
        if not torch.is_grad_enabled():
            raise StateError(
                f"accumulate: block {self.name!r} runs without grad mode, in torch.no_grad() or under reentrant "
                "checkpointing; expected neither around blocks: each runs again in backward anyway. With Hugging "
                "Face: model.gradient_checkpointing_disable()"
            )
        for leaf in leaves:
            self._check_argument(leaf)
        for tensor in {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}.values():
            self._cut(tensor)

    def run(self) -> Any:
        """Run the block, and return its output with leaves in place of tensors that it made.

        Raises:
            StateError: the block writes to what it gets.
            ParameterError: it returns an object that may hold tensors, and that cannot be cut.
        """
        tensors = [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Tensor)]
        self._state, self._random = ThreadState(self.device), RandomState(self.device)
        versions = _versions(tensors)
        before = BufferValues(self.block) if self.remembers_buffers else None
        marks = _marks_of_buffers(self.block)
        self._saved = SavedByBlock(self.name)
        self._leaves = [
            border.tensor.detach().requires_grad_() if border.is_view else border.tensor for border in self.inputs
        ]
        self._roots = [leaf.view_as(leaf) for leaf in self._leaves]
        try:
            with self._saved.left_out():
                output = self._call(self._roots)
        except RuntimeError as error:
            if LEAF_WRITTEN in str(error):
                raise self._writes() from error
            if "saved tensor hooks" in str(error):
                raise StateError(
                    f"accumulate: block {self.name!r} uses torch.func, whose graphs cannot be computed again; expected "
                    "a loop over micro-batches for this model"
                ) from error
            raise
        if _versions(tensors) != versions:
            raise self._writes()
        self.writes_buffers = _marks_of_buffers(self.block) != marks
        if self.writes_buffers and before is None:
            raise StateError(
                f"accumulate: block {self.name!r} changes a buffer, and did not for an earlier micro-batch; expected "
                "the same for all"
            )
        self._buffers = before if self.writes_buffers else None
        leaves, structure = tree_flatten(output)
        given = {id(tensor): tensor for tensor in tensors}
        given |= {id(root): border.tensor for root, border in zip(self._roots, self.inputs, strict=True)}
        for i, leaf in enumerate(leaves):
            if id(leaf) in given:
                leaves[i] = given[id(leaf)]
            elif not isinstance(leaf, torch.Tensor):
                self._check_output(leaf)
            elif leaf.requires_grad:
                leaves[i] = leaf.detach().requires_grad_()
                border = Border(leaves[i])
                self.borders.add(border)
                self.outputs.append((get_gradient_edge(leaf), border))
        self._edges, self._roots = [*map(get_gradient_edge, self._roots)], []
        return tree_unflatten(leaves, structure)

    def _call(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Call the block's forward, with these tensors in place of its inputs."""
        uses = {id(border.tensor): tensor for border, tensor in zip(self.inputs, inputs, strict=True)}
        given = (self.args, self.kwargs)
        args, kwargs = tree_map_only(torch.Tensor, lambda tensor: uses.get(id(tensor), tensor), given)
        return self.forward(*args, **kwargs)

    def _writes(self) -> StateError:
        return StateError(
            f"accumulate: block {self.name!r} changes a tensor that it gets in place, and would get another one when "
            "it runs again in backward; expected x = x + ... in place of x += ..."
        )

    def _check_output(self, leaf: Any) -> None:
        if not isinstance(leaf, torch.Tensor) and any(
            isinstance(value, torch.Tensor) for value in getattr(leaf, "__dict__", {}).values()
        ):
            raise ParameterError(
                f"accumulate: block {self.name!r} returns {kind_of(leaf)}, whose tensors cannot be found; "
                "expected tensors, or tuples, lists and dicts of them (torch.utils._pytree.register_pytree_node)"
            )

    def _check_argument(self, leaf: Any) -> None:
        if isinstance(leaf, torch.Tensor):
            return
        held = [value for value in getattr(leaf, "__dict__", {}).values() if isinstance(value, torch.Tensor)]
        if any(value.requires_grad for value in held):
            raise ParameterError(
                f"accumulate: block {self.name!r} gets {kind_of(leaf)} with a tensor that requires a gradient "
                "and cannot be found; expected tensors, or tuples, lists and dicts of them "
                "(torch.utils._pytree.register_pytree_node)"
            )

    def _cut(self, tensor: torch.Tensor) -> None:
        """Make a tensor that goes into the block a border, if it requires a gradient and is no leaf of the user's."""
        border = self.borders.get(tensor)
        if border is None and tensor.grad_fn is not None:
            border = Border(tensor, get_gradient_edge(tensor), self.number)
            if not border.is_view:
                tensor.detach_().requires_grad_()
            self.borders.add(border)
        if border is not None:
            self.inputs.append(border)

    # --- backward ------------------------------------------------------------------------------------

    @property
    def has_backward(self) -> bool:
        """True if a gradient of one of its outputs came."""
        return any(border.gradient is not None for _, border in self.outputs)

    def backward(self) -> None:
        """Compute again what the block's graph has saved, and backpropagate the gradients of its outputs through it.
        Afterwards the inputs have their gradients."""
        roots = [(edge, border) for edge, border in self.outputs if border.gradient is not None]
        # A root's gradient comes first in the sum at its node.
        roots += [
            (edge, border) for edge, border in zip(self._edges, self.inputs, strict=True) if border.gradient is not None
        ]
        latest = None if self._buffers is None else BufferValues(self.block)
        if self._buffers is not None:
            self._buffers.put_back()
        self._compute_again()
        self.args, self.kwargs = (), {}
        edges, gradients = [edge for edge, _ in roots], [border.gradient for _, border in roots]
        for border in (*self.inputs, *(border for _, border in self.outputs)):
            border.gradient = None
        for _, border in self.outputs:
            self.borders.forget(border)
        self.outputs.clear()
        del roots
        torch.autograd.backward(edges, gradients)
        if latest is not None:
            latest.put_back()
        for border, leaf in zip(self.inputs, self._leaves, strict=True):
            if border.is_view:
                border.gradient = leaf.grad
        self._edges, self._leaves = [], []

    def _compute_again(self) -> None:
        """Run the block once more as it ran in forward, as far as its graph needs."""
        if not self._saved:
            return
        outside, now = ThreadState(self.device), RandomState(self.device)
        self._state.restore()
        self._random.restore()
        try:
            with self._saved.filled():
                self._call([border.tensor.detach().requires_grad_() for border in self.inputs])
        finally:
            now.restore()
            outside.restore()

    @property
    def made_before(self) -> list[Border]:
        """The inputs whose gradients go on along their edges after this call's backward."""
        return [border for border in self.inputs if border.first == self.number]


def nodes_of(roots: Iterable[Node]) -> set[Node]:
    """Return the nodes that a backward from these nodes runs. Nodes that add to a leaf's gradient are left out."""
    return {node for node in _reached(roots) if not hasattr(node, "variable")}


def leaves_of(roots: Iterable[Node]) -> list[torch.Tensor]:
    """Return the leaves that a backward from these nodes reaches."""
    return [node.variable for node in _reached(roots) if hasattr(node, "variable")]


def _reached(roots: Iterable[Node]) -> set[Node]:
    found: set[Node] = set()
    left = [*roots]
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += [after for after, _ in node.next_functions if after is not None]
    return found


def _is_cache(argument: Any) -> bool:
    """Return True for a cache of keys and values of Hugging Face's models, which a block writes to."""
    return any(kind.__name__ == "Cache" for kind in type(argument).__mro__)
