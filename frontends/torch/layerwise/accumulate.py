"""``accumulate(engine, ...)``: checks what it is given, and runs the sweeps."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from offload_core.errors import ConfigError, GradientError, ParameterError, StateError
from offload_core.support.checks import kind_of

from ..params.fsdp import fsdp_modules
from ..training.steps import Steps
from .find import Chosen, find_blocks
from .fsdp import FsdpBlocks
from .sweeps import Sweeps
from .waiting import HostSlots, WaitingTensors, Waits

Loss = Callable[[Any, Any], torch.Tensor]
_FUNCTION = "a function"


class LayerwiseRuns:
    """Runs micro-batches block by block, for one engine. It keeps the host memory in which inputs wait."""

    def __init__(self, model: nn.Module, steps: Steps) -> None:
        self._model = model
        self._steps = steps
        self._components = components = steps.components
        self._grad_hooks, core = components.grad_hooks, components.core
        self._gradients = core.gradients
        memory: Any = components.device_memory.memory
        self._device: torch.device = memory.device
        config = core.config
        self._waiting = Waits()
        if config.host_activation_memory and not memory.addressable:
            slots = HostSlots(core.memory, config.host_activation_memory, memory)
            self._waiting = WaitingTensors(memory, slots)

    def __reduce__(self) -> Any:
        return _none, ()  # a copy of the engine makes its own

    def of(self, steps: Steps) -> bool:
        """Return True if these are the steps of the optimizer that this object hands gradients to."""
        return steps is self._steps

    def _counted(self, batches: Sequence[Any]) -> int:
        """Return the number of micro-steps that the present one counts as, with these micro-batches."""
        return len(batches) + (self._gradients.counts_as if self._grad_hooks.fresh else 0)

    def begin(self, batches: Sequence[Any], chosen: Chosen, *, average: bool, with_loss: bool) -> None:
        """Find the blocks, and have the present micro-step count as these micro-batches.

        Raises:
            ParameterError, ConfigError, GradientError, StateError: :meth:`run` cannot take these micro-batches, and a
                function for their loss or none. Nothing has changed.
        """
        self._blocks = find_blocks(self._model, chosen)
        if isinstance(batches, torch.Tensor | str | bytes | Mapping) or not isinstance(batches, Sequence):
            raise ParameterError(
                f"accumulate: batches is {kind_of(batches)}, expected a list of micro-batches: tensors, tuples of "
                "arguments, dicts of keyword arguments, or functions that return their loss"
            )
        if not batches:
            raise ParameterError("accumulate: no micro-batches; expected a list of at least one")
        first = _structure(batches[0])
        if with_loss and first == _FUNCTION:
            raise ParameterError(
                "accumulate: the micro-batches are functions, which return their losses, and loss= is a function, too; "
                "expected one of them"
            )
        for i, batch in enumerate(batches):
            if _structure(batch) != first:
                raise ParameterError(
                    f"accumulate: micro-batch {i} is {_structure(batch)}, and micro-batch 0 is {first}; expected all "
                    "alike: the blocks must have the same arguments"
                )
        gradients, n = self._gradients, len(batches)
        if self._grad_hooks.is_summing:
            raise StateError("accumulate() inside accumulate(); expected it after: losses are computed in it")
        if self._grad_hooks.is_deferring:
            raise StateError("accumulate() inside no_sync(); expected it outside: it sums on the device anyway")
        if n > 1 and not gradients.take_sums:
            raise ConfigError(
                f"accumulate: {n} micro-batches, and the sums of their gradients would be rounded to the parameters' "
                "element type on their way to the host; expected wrap(..., layerwise=True), with which they travel in "
                "fp32"
            )
        counted = gradients.micro_steps + self._counted(batches)
        if average and counted > gradients.per_update:
            raise GradientError(
                f"accumulate: {counted} micro-batches since the last update, whose gradients would be divided by "
                f"gradient_accumulation_steps={gradients.per_update}; expected step() or zero_grad() after as many, or "
                f"set_gradient_accumulation_steps({counted}), or average=False for losses that are divided already"
            )
        gradients.count_as(self._counted(batches))

    def run(
        self, batches: Sequence[Any], loss: Loss | None, call: Callable[..., Any], *, average: bool
    ) -> list[torch.Tensor]:
        """Run all micro-batches forward and backward, and return their losses. :meth:`begin` comes before it.

        Args:
            call: the engine, called with a micro-batch.
        """
        losses = [partial(_loss, call, i, batch, loss) for i, batch in enumerate(batches)]
        sharding = self._components.sharding
        params = FsdpBlocks(self._model) if fsdp_modules(self._model) else sharding.block_by_block()
        sweeps = Sweeps(self._model, self._components, self._blocks, losses, params, self._device, self._waiting)
        self._components.device_memory.before_backward()
        self._steps.or_break_off(partial(self._grad_hooks.run_backward, sweeps.run, average=average))
        return sweeps.losses


def _loss(call: Callable[..., Any], number: int, batch: Any, loss: Loss | None) -> Any:
    if isinstance(batch, torch.Tensor):
        output = call(batch)
    elif isinstance(batch, Mapping):
        output = call(**batch)
    elif _structure(batch) == _FUNCTION:
        return batch()
    else:
        output = call(*batch)
    if loss is not None:
        return loss(output, batch)
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is None:
        raise GradientError(
            f"accumulate: the output for micro-batch {number} is {kind_of(output)}, without a loss; expected "
            "loss=function(output, batch), or an output with .loss (Hugging Face: labels among the arguments)"
        )
    return found


def _none() -> None:
    return None


def _structure(batch: Any) -> str:
    """Return what a micro-batch is, in words that are equal for micro-batches that can pass together."""
    if isinstance(batch, torch.Tensor):
        return "a tensor"
    if isinstance(batch, Mapping):
        return f"a dict of {', '.join(sorted(map(str, batch)))}"
    if isinstance(batch, tuple | list):
        return f"{kind_of(batch)} of {len(batch)}"
    if callable(batch):
        return _FUNCTION
    raise ParameterError(
        f"accumulate: a micro-batch is {kind_of(batch)}, expected what the engine is called with: a tensor, a tuple of "
        "arguments or a dict of keyword arguments; or a function that returns its loss"
    )
