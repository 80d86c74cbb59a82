"""Forward and backward of several micro-batches, block by block.

In the forward sweep all micro-batches pass block 0, then block 1, and so on; in the backward sweep in reverse. A phase
is what is done with one block: its parameters are whole, and those of the next block are gathered meanwhile. The
code between two blocks runs in the phase of the first one. The code after the last block runs, and is differentiated,
for one micro-batch after the other.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from offload_core.errors import GradientError, ParameterError, StateError

from ..internals.compiled import CompiledForward
from ..stage3.sharding import Blocks
from ..training.components import Components
from .calls import LEAF_WRITTEN, BlockCall, Borders, leaves_of
from .find import params_of_blocks
from .lines import Line
from .waiting import Waits


class _Entry(CompiledForward):
    """Stands for a block's forward while micro-batches run: it stops the line before the block.

    It is a :class:`CompiledForward`, so that nothing more is put around the forward of a compiled block.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any], enter: Callable[..., Any]) -> None:
        around: Any = getattr(forward, "around", None)
        super().__init__(module, forward, around)
        self._enter = enter

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._enter(self._call, args, kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)


class _Line(Line):
    """One micro-batch, with the calls of blocks that it has made."""

    def __init__(self, number: int, act: Callable[[], torch.Tensor], device: torch.device, records: Any, switch: Any):
        super().__init__(number, act, device, records, switch)
        self.borders = Borders()
        self.calls: list[BlockCall] = []
        self.at: BlockCall | None = None
        """The call before which it has stopped."""


class Sweeps:
    """Runs several micro-batches block by block, and hands their summed gradients to the optimizer.

    Args:
        blocks: the blocks by name, in their order.
        losses: for each micro-batch, a function that runs its forward and returns its loss.
        params: gathers the blocks' parameters.
        waiting: has tensors wait.
    """

    def __init__(
        self,
        model: nn.Module,
        components: Components,
        blocks: Mapping[str, nn.Module],
        losses: Sequence[Callable[[], torch.Tensor]],
        params: Blocks,
        device: torch.device,
        waiting: Waits,
    ) -> None:
        self._components = components
        self._params = params
        self._names, self._blocks = [*blocks], [*blocks.values()]
        self._own = params_of_blocks(model, self._blocks)
        self._acts = losses
        self._device = device
        self._waiting = waiting
        self._lines: list[_Line] = []
        self._line: _Line | None = None
        """The line that runs."""
        self._phase = -1
        """The number of the block whose phase it is, in the forward sweep."""
        self._ran: set[int] = set()
        """The numbers of the blocks that have run for a micro-batch."""
        self._writing: set[int] = set()
        """The numbers of the blocks that have changed their buffers."""
        self.losses: list[torch.Tensor] = []

    def run(self, scale: float | None) -> None:
        """Run all micro-batches forward and backward.

        Args:
            scale: the loss scale; None: there is none.
        """
        components = self._components
        with self._params, components.grad_hooks.summing(), self._entered():
            switch = self._params.switch
            self._lines = [
                _Line(i, act, self._device, self._params.new_line(), switch) for i, act in enumerate(self._acts)
            ]
            losses: dict[int, torch.Tensor] = {}
            try:
                self._forward(losses, scale)
                self._backward()
                self._params.reduce(None)
            finally:
                self._end()
            components.grad_hooks.hand_over(components.grad_hooks.summed, ended=True)
            self.losses = [losses[i] for i in range(len(self._lines))]

    # --- lines ---------------------------------------------------------------------------------------

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """A context in which each block stops the line that calls it."""
        before: list[tuple[nn.Module, str, bool, Any]] = []
        try:
            for number, block in enumerate(self._blocks):
                name = "_compiled_call_impl" if block._compiled_call_impl is not None else "forward"
                before.append((block, name, name in block.__dict__, getattr(block, name)))
                setattr(block, name, _Entry(block, getattr(block, name), partial(self._enter, number)))
            yield
        finally:
            for block, name, own, value in before:
                if own:
                    setattr(block, name, value)
                else:
                    block.__dict__.pop(name, None)

    def _enter(self, number: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Called in place of a block's forward: stop the line, and run the block when it goes on."""
        line = self._line
        if line is None or not line.runs:
            return forward(*args, **kwargs)  # a backward that runs a block again by itself
        name, block = self._names[number], self._blocks[number]
        call = BlockCall(name, number, block, forward, args, kwargs, line.borders, self._device)
        line.stop(call)
        call.remembers_buffers = number not in self._ran or number in self._writing
        with self._params.inside(block):
            output = call.run()
        self._ran.add(number)
        if call.writes_buffers:
            self._writing.add(number)
        return output

    def _go_on(self, line: _Line) -> torch.Tensor | None:
        """Let a line run to its next block; return its loss if it has ended."""
        passed, line.at = line.at, None
        self._line = line
        try:
            reached = line.go_on()
        except RuntimeError as error:
            if LEAF_WRITTEN in str(error):
                raise StateError(
                    f"accumulate: code between blocks changes what a block has returned in place, for micro-batch "
                    f"{line.number}; expected x = x * ... in place of x *= ..."
                ) from error
            raise
        finally:
            self._line = None
        if passed is not None:
            line.calls.append(passed)
        if line.ended:
            self._params.end_line(line.records)
            return reached
        line.at = reached
        if reached.number <= self._phase:
            earlier = "twice" if reached.number == self._phase else f"after block {self._names[self._phase]!r}"
            raise StateError(
                f"accumulate: micro-batch {line.number} calls block {reached.name!r} {earlier}; expected each block "
                "once, in the order of the list: blocks=[...] gives another one"
            )
        return None

    def _end(self) -> None:
        """End lines that an error has left in the middle, and forget what waits."""
        for line in self._lines:
            with suppress(Exception):  # what a line's own clean-up raises; the first error is being raised
                line.end()
            self._params.end_line(line.records)
        self._waiting.close()

    # --- forward -------------------------------------------------------------------------------------

    def _forward(self, losses: dict[int, torch.Tensor], scale: float | None) -> None:
        components = self._components
        with components.core.span("forward"), self._params.staying():
            for line in self._lines:
                self._pass(line, losses, scale)
                self._leave(line)
        for number in range(len(self._blocks)):
            here = [line for line in self._lines if line.at is not None and line.at.number == number]
            if not here:
                continue
            self._phase = number
            self._hold(number)
            with components.core.span("forward"), self._params.staying():
                for line, after in zip(here, [*here[1:], None], strict=True):
                    self._waiting.need(_used(line))
                    self._hold(self._next_of(number))
                    self._waiting.expect([] if after is None else _used(after))
                    self._pass(line, losses, scale)
                    self._leave(line)
            if any(line.at is not None for line in self._lines):
                self._params.release(self._blocks[number])  # the last block runs again at once
        missing = [line.number for line in self._lines if not line.calls]
        if missing:
            raise ParameterError(
                f"accumulate: micro-batch {missing[0]} ran none of the blocks {self._names[0]!r} to "
                f"{self._names[-1]!r}; expected blocks that the forward calls, as modules: blocks=[...]"
            )
        components.grad_hooks.hand_over(self._finished())

    def _hold(self, number: int | None) -> None:
        if number is not None:
            self._params.hold(self._blocks[number])

    def _next_of(self, number: int) -> int | None:
        """Return the block after this one that the lines come to; the next one if none has come further yet."""
        ahead = [line.at.number for line in self._lines if line.at is not None and line.at.number > number]
        return min(ahead, default=number + 1 if number + 1 < len(self._blocks) else None)

    def _pass(self, line: _Line, losses: dict[int, torch.Tensor], scale: float | None) -> None:
        """Let a line go on: it runs the block before which it stopped, and stops before the next one. If there is no
        next block, the line returns its loss, whose backward then runs down to the last block's output."""
        loss = self._go_on(line)
        if not line.ended:
            return
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = f"of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise GradientError(
                f"accumulate: the loss of micro-batch {line.number} is {got}, expected a tensor of one element: take "
                "its mean or sum"
            )
        losses[line.number] = loss.detach()
        if not loss.requires_grad:
            raise GradientError(
                f"accumulate: the loss of micro-batch {line.number} has no graph; expected one that depends on a "
                "trained parameter"
            )
        with self._components.core.span("backward"):
            root = loss if scale is None else loss.float() * scale
            self._bring_reached(line, [root.grad_fn])
            root.backward(retain_graph=line.borders.share_nodes_with(root))

    def _finished(self) -> list[torch.Tensor]:
        """Return the parameters with a sum that no block has and no graph that is left reaches."""
        own = {id(param) for block in self._blocks for param in block.parameters()}
        edges = [border.edge.node for line in self._lines for border in line.borders if border.edge is not None]
        reached = {id(variable) for variable in leaves_of(edges)}
        return [p for p in self._components.grad_hooks.summed if id(p) not in own and id(p) not in reached]

    # --- backward ------------------------------------------------------------------------------------

    def _backward(self) -> None:
        components = self._components
        numbers = sorted({call.number for line in self._lines for call in line.calls}, reverse=True)
        for number, following in zip(numbers, [*numbers[1:], None], strict=True):
            here = [(line, call) for line in self._lines for call in line.calls if call.number == number]
            self._hold(number)
            with components.core.span("backward"), self._params.staying():
                for (line, call), after in zip(here, [*here[1:], None], strict=True):
                    self._waiting.need(_used_in_backward(call))
                    self._hold(following)
                    self._waiting.expect([] if after is None else _used_in_backward(after[1]))
                    self._params.before_backward(self._blocks[number])
                    self._backward_of(line, call)
                    self._params.after_backward(self._blocks[number])
                self._params.reduce(self._blocks[number])
            self._params.release(self._blocks[number])
            components.grad_hooks.hand_over(self._own[number])

    def _backward_of(self, line: _Line, call: BlockCall) -> None:
        """Backpropagate through one call, and through what comes before it up to the block before."""
        done = [border.tensor for _, border in call.outputs] + _gradients(call)
        if call.has_backward:
            with self._params.inside(call.block):
                call.backward()
        made = {
            border: (border.edge, border.gradient)
            for border in call.made_before
            if border.edge is not None and border.gradient is not None
        }
        if made:
            self._waiting.need(border.tensor for border in made)
            self._bring_reached(line, [border.edge.node for border in made if border.edge])
            edges, gradients = zip(*made.values(), strict=True)
            torch.autograd.backward(edges, gradients, retain_graph=True)  # other edges may share it, until they go
        for border in call.made_before:
            border.gradient = None
            line.borders.forget(border)
            done.append(border.tensor)
        line.calls.remove(call)
        for tensor in done:
            self._waiting.forget(tensor)
        self._waiting.leave(border.tensor for border in call.inputs if border not in made)
        if len(self._lines) > 1:
            self._waiting.leave(_gradients(call))
        call.inputs.clear()

    # --- tensors that wait ---------------------------------------------------------------------------

    def _leave(self, line: _Line) -> None:
        """Have the line's tensors wait on the host, until their next use."""
        next_used = [] if line.at is None or len(self._lines) > 1 else line.at.inputs
        stay = {id(border) for border in next_used}
        borders = [border for border in line.borders if id(border) not in stay]
        self._waiting.leave(border.tensor for border in borders)
        self._waiting.leave(border.gradient for border in borders if border.gradient is not None)

    def _bring_reached(self, line: _Line, nodes: Iterable[Any]) -> None:
        """Bring back what a graph between blocks may have saved, and the gradients that it adds to."""
        reached = {id(tensor) for tensor in leaves_of(node for node in nodes if node is not None)}
        saved = [border for border in line.borders if id(border.tensor) in reached]
        gradients = [border.gradient for border in saved if border.gradient is not None]
        self._waiting.need([*(border.tensor for border in saved), *gradients])
        for gradient in gradients:
            self._waiting.forget(gradient)  # its values on the host are old ones from now on


def _used(line: _Line) -> list[torch.Tensor]:
    """Return the tensors that the line's next block gets."""
    return [] if line.at is None else [border.tensor for border in line.at.inputs]


def _gradients(call: BlockCall) -> list[torch.Tensor]:
    """Return the gradients of a call's inputs and outputs that there are."""
    borders = [*call.inputs, *(border for _, border in call.outputs)]
    return [border.gradient for border in borders if border.gradient is not None]


def _used_in_backward(call: BlockCall) -> list[torch.Tensor]:
    return [*(border.tensor for border in call.inputs), *_gradients(call)]
