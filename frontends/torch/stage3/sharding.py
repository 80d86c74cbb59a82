"""The interface between the front end and parameters in shards, for every stage."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from offload_core.disk.shards import OnDisk
from offload_core.layout.partition import ParamSpec
from offload_core.memory.plan import PlanRow

from ..internals.compiled import Around
from ..params.pending import AwaitsInside
from .parameters import PartitionedParameter

Entries = Sequence[tuple[ParamSpec, torch.Tensor]]
"""Parameters and their descriptions."""


class Sharding(ABC):
    """Knows which parameters of a model are in shards, and when they are whole.

    ``PartitionedModel`` implements it in stage 3. :class:`NoSharding` implements it without shards, so that callers
    need no case distinction.
    """

    @abstractmethod
    def __contains__(self, param: torch.Tensor) -> bool:
        """Return True if the parameter is in shards."""

    @abstractmethod
    def record_of(self, param: torch.Tensor) -> PartitionedParameter | None:
        """Return the parameter's ``PartitionedParameter``; None: the parameter is not in shards."""

    @abstractmethod
    def record_with(self, tensor: torch.Tensor) -> PartitionedParameter | None:
        """Return the ``PartitionedParameter`` of ``tensor``. ``tensor`` may be the parameter, or a tensor inside a
        quantised parameter. None: ``tensor`` is in no partitioned parameter."""

    @property
    @abstractmethod
    def is_fixed(self) -> bool:
        """True if the optimizer cannot be copied, cannot be replaced by a later optimizer and cannot make its states
        again, because it has parameters in shards."""

    @property
    @abstractmethod
    def gathers(self) -> bool:
        """True if a forward gathers parameters from all ranks, and a read of the model's weights does, too."""

    # --- new parameters of an optimizer --------------------------------------------------------------

    @abstractmethod
    def describe(self, entries: Entries) -> list[ParamSpec]:
        """Return the specs of parameters that will be trained. A spec tells if the parameter is in shards, and which
        leaf module finalizes it.

        Raises:
            ParameterError: a frozen parameter was cut into shards that its update cannot use.
        """

    @abstractmethod
    def frozen(self, trained: Collection[torch.Tensor]) -> list[tuple[ParamSpec, torch.Tensor]]:
        """Return the specs and tensors of the model's parameters that are not in ``trained`` and that are, or will be,
        in shards."""

    @abstractmethod
    def plan_rows(self, trained: Entries, frozen: Entries) -> list[PlanRow]:
        """Plan the memory that :meth:`cut` and :meth:`keep_frozen` take temporarily."""

    @abstractmethod
    def cut(self, entries: Entries, first: int) -> AbstractContextManager[Mapping[torch.Tensor, torch.Tensor | OnDisk]]:
        """A context that gives this rank's shards of the entries whose specs are partitioned, by parameter. In the
        body, these parameters get their states, and parameters that were whole still are. At its end, this rank keeps
        only the shards. Collective.

        Args:
            first: the core's index for the first entry.
        """

    @abstractmethod
    def keep_frozen(self, trained: Collection[torch.Tensor]) -> None:
        """Cut the model's untrained parameters, and keep only their shards. Collective."""

    # --- a step --------------------------------------------------------------------------------------

    @abstractmethod
    def before_forward(self, model: nn.Module) -> None:
        """Have newly compiled modules gather their parameters before they run."""

    @property
    @abstractmethod
    def units(self) -> Around:
        """Runs the forwards of compiled modules."""

    @abstractmethod
    def block_by_block(self) -> "Blocks":
        """Return a context in which several micro-batches run block by block."""

    @abstractmethod
    def before_change(self) -> int:
        """Release all parameters before they change.

        Returns:
            A number that is equal on ranks that gathered the same parameters in the same order.

        Raises:
            StateError: inside ``gathered_parameters``.
        """

    @abstractmethod
    def recover(self) -> None:  # waits
        """Release all parameters, after an error."""

    @abstractmethod
    def forget_order(self) -> None:
        """After an error in a step: predict no gathers from earlier forwards, which may differ between ranks."""

    # --- whole by hand -------------------------------------------------------------------------------

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """True inside ``gathered_parameters`` or ``generating``."""

    @abstractmethod
    def check_closed(self, what: str = "an update") -> None:
        """Raise :class:`StateError` inside ``gathered_parameters`` or ``generating``."""

    @abstractmethod
    def generating(self) -> AbstractContextManager[None]:
        """A context in which all parameters are whole.

        Raises:
            StateError: a parameter was changed inside; the change is lost.
        """

    @abstractmethod
    def gathered_when_read(self) -> AbstractContextManager[None]:
        """A context in which a read outside forward and backward gathers its parameter, until the context ends.

        All ranks must read the same parameters in the same order. With one rank, changes of these parameters are kept.
        With several ranks, a change is an error.
        """

    # --- leaf modules --------------------------------------------------------------------------------

    @property
    @abstractmethod
    def leaf_modules(self) -> Collection[nn.Module]:
        """The leaf modules of the model."""

    @abstractmethod
    def mark_leaves(self, modules: Iterable[nn.Module], leaf: bool, *, waiting: bool) -> Collection[torch.Tensor]:
        """Make modules leaf modules.

        Args:
            leaf: False: make them ordinary modules again.
            waiting: True if gradients wait for an update.

        Returns:
            The parameters that leaf modules finalize from now on.

        Raises:
            StateError: a step is not finished.
        """

    @abstractmethod
    def finalize_by(self, finalize: Callable[..., Collection[torch.Tensor]]) -> None:
        """Set the method by which leaf modules finalize their parameters (``GradHooks.finalize``)."""

    # --- bytes, and the end --------------------------------------------------------------------------

    @property
    @abstractmethod
    def sent_bytes(self) -> int:
        """The bytes of parameters that this rank has sent to other ranks."""

    @abstractmethod
    def held_bytes(self) -> Mapping[tuple[str, str], int]:
        """Return the bytes of memory and disk that are in use now, by ``(where, what)``."""

    @abstractmethod
    def make_whole(self) -> None:
        """Make all parameters whole, for :meth:`close`. Collective."""

    @abstractmethod
    def close(self) -> None:
        """Remove the hooks. Parameters stay in shards, or whole after :meth:`make_whole`."""


class Blocks:
    """A context in which several micro-batches run block by block, each block for all of them while its parameters are
    whole. This class is for parameters that are always whole."""

    def __enter__(self) -> "Blocks":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def new_line(self) -> Any:
        """Return what is recorded of one micro-batch's forward, for :meth:`switch`."""
        return None

    def switch(self, line: Any) -> Any:
        """Continue with another micro-batch. Return what is recorded of the one that was running."""
        return None

    def end_line(self, line: Any) -> None:
        """End a micro-batch's forward."""

    def hold(self, block: nn.Module) -> None:
        """Begin to gather all parameters inside a block, and keep them whole until :meth:`release`."""

    def release(self, block: nn.Module) -> None:
        """Release the parameters of a block."""

    def inside(self, block: nn.Module) -> AbstractContextManager[None]:
        """Return a context for code of a block that is held."""
        return nullcontext()

    def before_backward(self, block: nn.Module) -> None:
        """Called before each micro-batch's backward through a block."""

    def after_backward(self, block: nn.Module) -> None:
        """Called after each micro-batch's backward through a block."""

    def reduce(self, block: nn.Module | None) -> None:
        """Have the gradients of a block come, if ranks have not reduced them yet.

        Args:
            block: its last backward has ended; None: all backwards have ended.
        """

    def staying(self) -> AbstractContextManager[None]:
        """Return a context until whose end each parameter that is read inside stays whole."""
        return nullcontext()


class NoSharding(Sharding):
    """No parameter is in shards: stages 1 and 2, and optimizers without an engine."""

    is_fixed = gathers = is_open = False
    leaf_modules = ()
    sent_bytes = 0
    units = AwaitsInside()

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    record_of = record_with = _nothing
    keep_frozen = before_forward = recover = forget_order = check_closed = finalize_by = make_whole = close = _nothing

    def __contains__(self, param: torch.Tensor) -> bool:
        return False

    def describe(self, entries: Entries) -> list[ParamSpec]:
        return [spec for spec, _ in entries]

    def frozen(self, trained: Collection[torch.Tensor]) -> list[tuple[ParamSpec, torch.Tensor]]:
        return []

    def plan_rows(self, trained: Entries, frozen: Entries) -> list[PlanRow]:
        return []

    def cut(self, entries: Entries, first: int) -> AbstractContextManager[Mapping[torch.Tensor, torch.Tensor | OnDisk]]:
        return nullcontext({})

    def block_by_block(self) -> Blocks:
        return Blocks()

    def before_change(self) -> int:
        return 0

    def generating(self) -> AbstractContextManager[None]:
        return nullcontext()

    gathered_when_read = generating

    def mark_leaves(self, modules: Iterable[nn.Module], leaf: bool, *, waiting: bool) -> Collection[torch.Tensor]:
        return ()

    def held_bytes(self) -> Mapping[tuple[str, str], int]:
        return {}
