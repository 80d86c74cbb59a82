"""The parameters of a model that are in shards, as the rest of the front end sees them in every stage."""

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
    """The parameters of a model that are in shards: which they are, and when they are whole.

    ``PartitionedModel`` has them in stage 3. :class:`NoSharding` stands in its place where there are none, so that
    callers need not ask.
    """

    @abstractmethod
    def __contains__(self, param: torch.Tensor) -> bool:
        """Return True if the parameter is in shards."""

    @abstractmethod
    def record_of(self, param: torch.Tensor) -> PartitionedParameter | None:
        """Return the parameter's record; None if it is not in shards."""

    @abstractmethod
    def record_with(self, tensor: torch.Tensor) -> PartitionedParameter | None:
        """Return the record of the parameter in shards that this tensor is, or holds values of; None: there is none."""

    @property
    @abstractmethod
    def is_fixed(self) -> bool:
        """True if the parameters stay with their optimizer as they are: it cannot be copied, give way to a later one,
        or make their states anew."""

    @property
    @abstractmethod
    def gathers(self) -> bool:
        """True if a forward, and a read of the model's weights, gathers parameters from all ranks."""

    # --- parameters that an optimizer takes on -------------------------------------------------------

    @abstractmethod
    def describe(self, entries: Entries) -> list[ParamSpec]:
        """Return the descriptions of parameters that will be trained. They say which parameters are in shards, and
        which leaf module settles each.

        Raises:
            ParameterError: a frozen parameter was cut into shards that its update cannot use.
        """

    @abstractmethod
    def frozen(self, trained: Collection[torch.Tensor]) -> list[tuple[ParamSpec, torch.Tensor]]:
        """Return the model's other parameters that are in shards, or will be, and their descriptions."""

    @abstractmethod
    def plan_rows(self, trained: Entries, frozen: Entries) -> list[PlanRow]:
        """Plan the memory that :meth:`cut` and :meth:`keep_frozen` take for a time."""

    @abstractmethod
    def cut(self, entries: Entries, first: int) -> AbstractContextManager[Mapping[torch.Tensor, torch.Tensor | OnDisk]]:
        """A context with this rank's shards of those parameters that their descriptions have in shards. In it they are
        whole, too, and get their states; at its end only the shards stay. Collective.

        Args:
            first: the number in the pipeline that the first of them gets.
        """

    @abstractmethod
    def keep_frozen(self, trained: Collection[torch.Tensor]) -> None:
        """Cut the model's other parameters, and keep only their shards. Collective."""

    # --- a step --------------------------------------------------------------------------------------

    @abstractmethod
    def before_forward(self, model: nn.Module) -> None:
        """Have modules that were compiled just now gather their parameters, too."""

    @property
    @abstractmethod
    def units(self) -> Around:
        """Runs the forwards of compiled modules."""

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
        """Predict no gathers from earlier forwards, after an error in a step: this rank's may differ from others'."""

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
        """Keep all parameters whole, as ``Engine.generating`` says."""

    @abstractmethod
    def gathered_when_read(self) -> AbstractContextManager[None]:
        """A context in which a read outside forward and backward gathers its parameter, until the context ends.

        All ranks must read the same parameters in the same order. Changes count on one rank, and are an error on
        several.
        """

    # --- leaf modules --------------------------------------------------------------------------------

    @property
    @abstractmethod
    def leaf_modules(self) -> Collection[nn.Module]:
        """The leaf modules of the model."""

    @abstractmethod
    def mark_leaves(self, modules: Iterable[nn.Module], leaf: bool, *, waiting: bool) -> Collection[torch.Tensor]:
        """Have modules be leaf modules from now on, or no longer.

        Args:
            waiting: True if gradients wait for an update.

        Returns:
            The parameters that leaf modules settle from now on.

        Raises:
            StateError: a step is not finished.
        """

    @abstractmethod
    def settle_by(self, settle: Callable[..., Collection[torch.Tensor]]) -> None:
        """Have leaf modules settle their parameters by this method (``Intake.settle``)."""

    # --- bytes, and the end --------------------------------------------------------------------------

    @property
    @abstractmethod
    def sent_bytes(self) -> int:
        """The bytes of parameters that this rank has sent to others."""

    @abstractmethod
    def held_bytes(self) -> Mapping[tuple[str, str], int]:
        """Return the bytes of memory and disk that are in use now, by ``(where, what)``."""

    @abstractmethod
    def make_whole(self) -> None:
        """Make all parameters whole, for :meth:`close`. Collective."""

    @abstractmethod
    def close(self) -> None:
        """Remove the hooks. Parameters stay as they are, whole after :meth:`make_whole`."""


class NoSharding(Sharding):
    """No parameter is in shards: stages 1 and 2, and optimizers without an engine."""

    is_fixed = gathers = is_open = False
    leaf_modules = ()
    sent_bytes = 0
    units = AwaitsInside()

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    record_of = record_with = _nothing
    keep_frozen = before_forward = recover = forget_order = check_closed = settle_by = make_whole = close = _nothing

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

    def before_change(self) -> int:
        return 0

    def generating(self) -> AbstractContextManager[None]:
        return nullcontext()

    gathered_when_read = generating

    def mark_leaves(self, modules: Iterable[nn.Module], leaf: bool, *, waiting: bool) -> Collection[torch.Tensor]:
        return ()

    def held_bytes(self) -> Mapping[tuple[str, str], int]:
        return {}
