"""The properties of parameters that a step compares: one list for each property, over all parameters.

A Python loop over thousands of parameters takes longer than their update. So each check first compares whole lists,
which runs in C. Only if the lists differ does a loop look for the parameter.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf
from operator import eq
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..internals.private import TensorGuards, no_read
from .dtensor import Placement, local_of
from .tensors import DTYPE, memory_order

_of: Any = torch.Tensor
_GRADIENT, _DEVICE, _LAYOUT, _VERSION = (p.__get__ for p in (_of.grad, _of.device, _of.layout, _of._version))
_IS_CPU = _of.is_cpu.__get__


class CheckedTensors:
    """The properties of tensors that passed a check: class, element type, device, layout, sizes and strides.

    Tensors with the same properties pass the check, too. Torch compares the properties in C.
    """

    def __init__(self) -> None:
        self._guards: TensorGuards | None = None
        self._of: Sequence[int] = ()

    def learn(self, tensors: Collection[torch.Tensor], of: Sequence[int] = ()) -> None:
        """Record that these tensors have passed the check.

        Args:
            of: the indices of the tensors' parameters.
        """
        guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        self.forget()  # so that an interrupt between the next two lines leaves no mixed fields
        self._of = of
        self._guards = guards

    def forget(self) -> None:
        """Forget the tensors that have passed the check."""
        self._guards = None

    def holds(self, tensors: Collection[Any], of: Sequence[int] = ()) -> bool:
        """True if these tensors have the properties that the last :meth:`learn` recorded, and ``of`` equals the ``of``
        of that call."""
        return self._guards is not None and self._of == of and self._guards.check(*tensors)


class ParamTable:
    """Parameters in the core's order, and their properties when their states were made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.params: list[torch.Tensor] = []
        self.taken: list[torch.Tensor] = []
        """The stand-in for each parameter's gradient."""
        self._placed: dict[int, Placement] = {}
        """Maps the index of each DTensor to its placement."""
        self._dtypes: list[torch.dtype] = []
        self._shapes: list[torch.Size] = []
        self._orders: dict[int, list[int]] = {}
        """Maps the index of each parameter that is not contiguous to its memory order (``tensors.memory_order``)."""
        self._versions: list[float] = []
        """The version of each parameter when it last matched its master weight; -inf: the parameter may differ from it
        now."""
        self._addresses: list[int] = []
        self._unchanged = CheckedTensors()
        """The properties of the parameters when :meth:`unchanged` last compared all lists and returned True."""
        self._plain = CheckedTensors()
        """The properties of the gradients that last passed :meth:`plain`."""
        self._plain_alone: list[CheckedTensors] = []
        """For each parameter, the properties of the gradient that last passed :meth:`plain_alone`."""

    def add(self, param: torch.Tensor, taken: torch.Tensor, placed: Placement) -> None:
        values, index = local_of(param), len(self.params)
        order = memory_order(values)
        if order is not None:
            self._orders[index] = order
        self.params.append(param)
        self.taken.append(taken)
        if values is not param:
            self._placed[index] = placed
        self._dtypes.append(values.dtype)
        self._shapes.append(values.shape)
        self._unchanged.forget()
        self._plain_alone.append(CheckedTensors())
        self._versions.append(0)
        self._addresses.append(0)
        self.mark_known(index)

    @property
    def values(self) -> list[torch.Tensor]:
        """The tensors that hold this process's values: the parameters, or the local tensors of DTensors."""
        return [*map(local_of, self.params)] if self._placed else self.params

    def own(self, given: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return this process's elements of each gradient. Keys are the indices of the gradients' parameters."""
        placed = self._placed
        return {i: placed[i].own(g) if i in placed else g for i, g in given.items()} if placed else given

    def unchanged(self) -> bool:
        """True if each parameter still has its size, type, device and memory order."""
        params = self.values
        with no_read():
            if not all(placed.holds(self.params[i]) for i, placed in self._placed.items()):
                return False
            if self._unchanged.holds(params):
                return True
            others = [param for i, param in enumerate(params) if i not in self._orders]
            unchanged = (
                all(memory_order(params[i]) == order for i, order in self._orders.items())
                and all(map(torch.Tensor.is_contiguous, others))
                and self._alike(params, self._dtypes, self._shapes)
            )
            if unchanged:
                self._unchanged.learn(params)
            return unchanged

    # --- gradients -----------------------------------------------------------------------------------

    def gradients(self) -> list[torch.Tensor | None]:
        """Return ``p.grad`` of each parameter."""
        with no_read():
            return list(map(_GRADIENT, self.params))

    def plain(self, given: Mapping[int, torch.Tensor]) -> bool:
        """True if the core can read each gradient in place: the gradient fits its parameter (:meth:`fit`), is a
        contiguous ``torch.Tensor``, and is no lazy negation. Always False if any parameter is not contiguous. Keys are
        the parameters' indices."""
        of, gradients = [*given], given.values()
        if self._plain.holds(gradients, of):
            return True
        plain = (
            not self._orders
            and {*map(type, gradients)} == {torch.Tensor}
            and self.fit(given)
            and all(map(torch.Tensor.is_contiguous, gradients))
            and not any(map(torch.Tensor.is_neg, gradients))
        )
        if plain:
            self._plain.learn(gradients, of)
        return plain

    def fit(self, given: Mapping[int, torch.Tensor]) -> bool:
        """True if each gradient is dense, and has the shape, type and device that its parameter had when its states
        were made. Keys are the parameters' indices."""
        gradients = given.values()
        dtypes, shapes = [self._dtypes[i] for i in given], [self._shapes[i] for i in given]
        dense = list(map(_LAYOUT, gradients)).count(torch.strided) == len(gradients)
        return dense and self._alike(gradients, dtypes, shapes)

    def plain_alone(self, index: int, gradient: torch.Tensor) -> bool:
        """True if :meth:`plain` is true for this one gradient. For gradients that arrive one at a time.

        Args:
            index: the index of the gradient's parameter.
        """
        known = self._plain_alone[index]
        if known.holds((gradient,)):
            return True
        plain = (
            not self._orders
            and type(gradient) is torch.Tensor
            and self.fit({index: gradient})
            and gradient.is_contiguous()
            and not gradient.is_neg()
        )
        if plain:
            known.learn((gradient,))
        return plain

    def _alike(
        self, tensors: Collection[torch.Tensor], dtypes: Sequence[torch.dtype], shapes: Sequence[torch.Size]
    ) -> bool:
        return (
            list(map(DTYPE, tensors)) == dtypes
            and all(map(eq, map(torch.Tensor.size, tensors), shapes))
            and (
                all(map(_IS_CPU, tensors))
                if self._device.type == "cpu"
                else list(map(_DEVICE, tensors)).count(self._device) == len(tensors)
            )
        )

    def remove_taken(self) -> None:
        """Set ``p.grad`` to None where it is the stand-in."""
        with no_read():
            for param, gradient, taken in zip(self.params, map(_GRADIENT, self.params), self.taken, strict=True):
                if gradient is taken:
                    param.grad = None

    # --- changes from outside --------------------------------------------------------------------------

    def mark_known(self, index: int) -> None:
        """Record that the parameter now matches its master weights."""
        with no_read():
            self._versions[index] = self._version(index)
            self._addresses[index] = local_of(self.params[index]).data_ptr()

    def mark_known_all(self) -> None:
        """Record that all parameters now match their master weights."""
        self._versions, self._addresses = self._as_they_are()

    def doubt(self, index: int) -> None:
        """Record that the parameter may differ from its master weights. The next use of the parameter compares them
        first."""
        self._versions[index] = -inf

    def changed(self) -> list[int]:
        """Return the indices of parameters whose version or address has changed since :meth:`mark_known`, because other
        code wrote to them or replaced their memory, and of parameters that :meth:`doubt` has marked."""
        versions, addresses = self._as_they_are()
        if versions == self._versions and addresses == self._addresses:
            return []
        now, before = zip(versions, addresses, strict=True), zip(self._versions, self._addresses, strict=True)
        return [i for i, (new, old) in enumerate(zip(now, before, strict=True)) if new != old]

    def _as_they_are(self) -> tuple[list[float], list[int]]:
        with no_read():
            if self._placed:
                return [*map(self._version, range(len(self.params)))], [*map(torch.Tensor.data_ptr, self.values)]
            return list(map(_VERSION, self.params)), list(map(torch.Tensor.data_ptr, self.params))

    def _version(self, index: int) -> int:
        """Return a count that rises with each write to the parameter. Torch counts a write to a DTensor at the DTensor,
        and not at its local tensor."""
        param = self.params[index]
        return param._version + (local_of(param)._version if index in self._placed else 0)

    def count_writes(self, indices: Iterable[int]) -> None:
        """Tell autograd that the update wrote the parameters with these indices. The recorded versions rise as much, so
        that :meth:`changed` finds only writes by other code."""
        written = [*indices]
        increment_version([self.params[i] for i in written])
        if self._placed:
            increment_version([local_of(self.params[i]) for i in written if i in self._placed])
        versions = self._versions
        if len(written) == len(versions) and not self._placed:
            versions[:] = [version + 1 for version in versions]
        else:
            for i in written:
                versions[i] += 1 + (i in self._placed)
