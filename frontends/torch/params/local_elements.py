"""Access to this process's elements of a trained parameter.

:class:`ElementsInPlace`: the elements are in the memory of the parameter, or of a DTensor's local tensor.
``ElementsInShards`` in ``stage3/parameters.py``: the elements are this rank's shards, separate from the tensor that
modules read. ``stage3/shards.py`` has shards on the device, on the host and on disk.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection
from contextlib import suppress

import torch

from offload_core.disk.shards import OnDisk
from offload_core.errors import StateError

from ..internals.private import no_read
from .data_writes import DataWrites, data_of
from .dtensor import local_of
from .managed import Wait
from .pending import arrive, await_values_of_garbage, can_wait, update
from .tensors import flat


class LocalElements(ABC):
    """Access to this process's elements of one trained parameter.

    Attributes:
        param: the parameter.
    """

    param: torch.Tensor

    @abstractmethod
    def memory(self) -> torch.Tensor | OnDisk:
        """Return the one-dimensional memory that the core reads start values from and publishes to."""

    @abstractmethod
    def copy(self) -> torch.Tensor | None:
        """Return a copy of the values that the master weights adopt again after a load of states; None: they adopt
        none."""

    # --- readers -------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def readers_can_wait(self) -> bool:
        """True if every reader and writer of the parameter can be made to wait for the parameter's update."""

    @abstractmethod
    def have_readers_wait(self, wait: Wait) -> None:
        """Have the next read of the parameter call ``wait``, because an update may be writing the parameter."""

    @abstractmethod
    def stay(self, leaving: Collection[int]) -> None:
        """Clear the pending mark of the parameter, which has been written, unless its memory is about to leave the
        device.

        Args:
            leaving: the storages that will leave the device, each as ``storage._cdata``.
        """

    @abstractmethod
    def unregister(self) -> None:
        """Wait for an update that still writes the parameter, then stop watching the parameter."""

    # --- writes by others ----------------------------------------------------------------------------

    @abstractmethod
    def was_written(self, changed: bool, used: Collection[DataWrites]) -> bool:
        """True if other code wrote to the parameter, so that its master weight must take over the values.

        Args:
            changed: True if torch counted a change of the parameter.
            used: the ``DataWrites`` that have seen writes through the ``data`` of their parameters.
        """

    @abstractmethod
    def forget_writes(self) -> None:
        """Record that the master weight has the values that other code wrote."""


class ElementsInPlace(LocalElements):
    """Elements in the memory of the parameter itself, or of a DTensor's local tensor.

    Args:
        data_writes: watches writes through ``param.data``.
    """

    def __init__(self, param: torch.Tensor, data_writes: DataWrites) -> None:
        self.param = param
        self._data_writes = data_writes

    def memory(self) -> torch.Tensor:
        # Autograd must not count the core's writes; ``Registration.follow_update`` counts each once.
        return flat(data_of(local_of(self.param)))

    def copy(self) -> None:
        return None

    @property
    def readers_can_wait(self) -> bool:
        return can_wait(self.param) and not self._data_writes.possible

    def have_readers_wait(self, wait: Wait) -> None:
        update(self.param, wait)

    def stay(self, leaving: Collection[int]) -> None:
        with no_read():
            number = local_of(self.param).untyped_storage()._cdata
        if number not in leaving:
            arrive(self.param)

    def unregister(self) -> None:
        with suppress(StateError):  # the parameter was sent early, for a step that is never made
            await_values_of_garbage(self.param)
        if not self._is_released:
            arrive(self.param)
        self._data_writes.end()

    @property
    def _is_released(self) -> bool:
        """True if the parameter has no memory, so that every read must be refused."""
        with no_read():
            values = local_of(self.param)
            return values.numel() > 0 and values.untyped_storage().nbytes() == 0

    def was_written(self, changed: bool, used: Collection[DataWrites]) -> bool:
        return changed or self._data_writes in used

    def forget_writes(self) -> None:
        self._data_writes.forget()
