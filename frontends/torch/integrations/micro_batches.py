"""The micro-batches of an update of Hugging Face's Trainer, which run together: ``OffloadTrainer(layerwise=True)``."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from offload_core.config.options import ConfigLike, OffloadConfig
from offload_core.errors import ConfigError, StateError


class MicroBatches:
    """The micro-batches of one update. Trainer asks for one loss after the other; all run when it asks for the first.

    Trainer collects the batches of an update before it runs the first one, so all are known then.
    """

    def __init__(self) -> None:
        self._batches: Sequence[Any] = ()
        self._losses: deque[torch.Tensor] = deque()
        self._root: torch.Tensor | None = None
        self.running = False
        """True while micro-batches run: a backward only records the loss."""

    @property
    def unfinished(self) -> bool:
        """True if Trainer has not asked for all losses of an update: a callback has stopped the epoch in between."""
        return bool(self._losses)

    def begin(self, batches: Sequence[Any]) -> None:
        """Record the micro-batches of the next update."""
        self._batches = [*batches]
        self._losses.clear()

    def loss_of(
        self,
        batch: Any,
        step: Callable[[Any], torch.Tensor],
        accumulate: Callable[[Sequence[Callable[[], torch.Tensor]]], object],
    ) -> torch.Tensor:
        """Return what ``step`` returns for a micro-batch. Batches come in the order of :meth:`begin`.

        Args:
            step: runs forward and backward of one micro-batch, for which it calls :meth:`differentiate`, and returns
                its loss.
            accumulate: runs functions that return a loss with its graph, and differentiates the losses.

        Raises:
            StateError: it is another batch. If no update has begun, any batch runs by itself.
        """
        position = len(self._batches) - len(self._losses) if self._losses else 0
        expected = self._batches[position] if self._batches else batch
        if batch is not expected:
            raise StateError(
                "training_step() got another batch than get_batch_samples() returned, and layerwise=True runs all "
                "batches of an update at the first one; expected them changed in the data collator"
            )
        if not self._losses:
            batches = self._batches or [batch]
            returned = dict[int, torch.Tensor]()
            self.running, self._root = True, None
            try:
                accumulate([partial(self._run, step, returned, i, each) for i, each in enumerate(batches)])
            finally:
                self.running = False
            self._losses.extend(returned[i] for i in range(len(batches)))
        loss = self._losses.popleft()
        if not self._losses:
            self._batches = ()
        return loss

    def _run(
        self, step: Callable[[Any], torch.Tensor], returned: dict[int, torch.Tensor], number: int, batch: Any
    ) -> torch.Tensor:
        """Run one micro-batch, and return the loss that is differentiated."""
        returned[number] = step(batch)
        root, self._root = self._root, None
        if root is None:
            raise StateError(
                "training_step() has not called accelerator.backward(), and layerwise=True differentiates the loss "
                "that is given to it; expected one call"
            )
        return root

    def differentiate(self, loss: torch.Tensor) -> None:
        """Record the loss of the micro-batch that runs now.

        Raises:
            StateError: it has one already.
        """
        if self._root is not None:
            raise StateError(
                "accelerator.backward() twice in one micro-batch, and layerwise=True differentiates one loss of each; "
                "expected their sum from compute_loss(), or no layerwise=True"
            )
        self._root = loss


def check_layerwise(kind: type[Trainer], args: TrainingArguments) -> None:
    """Raise :class:`ConfigError` if the micro-batches of a trainer of this class cannot run together."""
    prepares = next(each for each in kind.__mro__ if "_prepare_inputs" in vars(each))
    if prepares is not Trainer:
        raise ConfigError(
            f"layerwise=True, and {prepares.__name__} has a _prepare_inputs() of its own, as trainers have that "
            "generate texts in a step; expected inputs from the data collator, or no layerwise=True"
        )
    kwargs = args.activation_checkpointing_kwargs
    if args.activation_checkpointing and isinstance(kwargs, dict) and kwargs.get("use_reentrant", False):
        raise ConfigError(
            "layerwise=True with reentrant checkpointing, which runs blocks without a graph; expected "
            'activation_checkpointing_kwargs={"use_reentrant": False}, or no checkpointing: each block runs again in '
            "backward anyway"
        )
    if getattr(args, "activation_offloading", False):  # TRL's
        raise ConfigError(
            "layerwise=True with activation_offloading=True, whose context one micro-batch would enter while another "
            'is inside; expected offload={"host_activation_memory": ...}, bytes for the inputs of blocks'
        )
    if args.torch_compile:
        raise ConfigError(
            "layerwise=True with torch_compile=True, whose code runs through all blocks at once; expected each block "
            "compiled before: block.compile()"
        )
    if args.use_cache:
        raise ConfigError(
            "layerwise=True with use_cache=True: blocks would write to the cache when they run again in backward; "
            "expected use_cache=False"
        )


def with_layerwise(config: OffloadConfig, offload: ConfigLike, asked: bool | None) -> OffloadConfig:
    """The configuration with ``layerwise`` as the trainer's own argument says; None: as ``offload`` says."""
    if asked is None:
        return config
    if isinstance(offload, Mapping) and offload.get("layerwise", asked) != asked:
        raise ConfigError(f"layerwise={config.layerwise} in offload=, and layerwise={asked}; expected one of them")
    return replace(config, layerwise=asked)
