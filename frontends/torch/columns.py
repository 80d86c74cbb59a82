"""What a step reads of all parameters, a list for each property: torch's own functions run down a list in C.

Python that is written for one parameter costs a model of thousands more than their update does. So the common case of
each check is one comparison of lists; only where it fails is the parameter looked for.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf
from operator import eq
from typing import Any

import torch
from torch.autograd.graph import increment_version

from .tensors import DTYPE, TakenGradient, memory_order

_of: Any = torch.Tensor
_GRADIENT, _DEVICE, _LAYOUT, _VERSION = (p.__get__ for p in (_of.grad, _of.device, _of.layout, _of._version))
_IS_CPU = _of.is_cpu.__get__
_no_read = torch._C.DisableTorchFunctionSubclass
"""A context in which nobody has to wait for parameters that an update still writes: their values are not read."""


class Columns:
    """Parameters in the pipeline's order, and what they were when their states were made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.params: list[torch.Tensor] = []
        self.taken: list[TakenGradient] = []
        """The stand-in for each one's gradient."""
        self._dtypes: list[torch.dtype] = []
        self._shapes: list[torch.Size] = []
        self._orders: dict[int, list[int]] = {}
        """The memory order of those that are not contiguous (``tensors.memory_order``)."""
        self._versions: list[float] = []
        """Those of parameters that agree with their master weights; -inf: one may not."""
        self._addresses: list[int] = []

    def add(self, param: torch.Tensor, taken: TakenGradient) -> None:
        order = memory_order(param)
        if order is not None:
            self._orders[len(self.params)] = order
        self.params.append(param)
        self.taken.append(taken)
        self._dtypes.append(param.dtype)
        self._shapes.append(param.shape)
        with _no_read():
            self._versions.append(param._version)
            self._addresses.append(param.data_ptr())

    def unchanged(self) -> bool:
        """Whether each has the size, type, device and memory order that it had."""
        params = self.params
        if self._orders:
            others = [param for i, param in enumerate(params) if i not in self._orders]
            ordered = all(memory_order(params[i]) == order for i, order in self._orders.items())
        else:
            others, ordered = params, True
        with _no_read():
            return (
                ordered
                and all(map(torch.Tensor.is_contiguous, others))
                and self._alike(params, self._dtypes, self._shapes)
            )

    # --- gradients -----------------------------------------------------------------------------------

    def gradients(self) -> list[torch.Tensor | None]:
        """``p.grad`` of each."""
        with _no_read():
            return list(map(_GRADIENT, self.params))

    def fit(self, given: Mapping[int, torch.Tensor]) -> bool:
        """Whether gradients of these parameters, which are unchanged, are dense, of their shape, type and device."""
        gradients, dtypes, shapes = given.values(), self._dtypes, self._shapes
        if len(given) != len(self.params):
            dtypes, shapes = [dtypes[i] for i in given], [shapes[i] for i in given]
        dense = list(map(_LAYOUT, gradients)).count(torch.strided) == len(gradients)
        return dense and self._alike(gradients, dtypes, shapes)

    def fits(self, index: int, gradient: torch.Tensor) -> bool:
        """As :meth:`fit`, of one that comes alone."""
        return (
            gradient.layout is torch.strided
            and gradient.dtype is self._dtypes[index]
            and gradient.shape == self._shapes[index]
            and gradient.device == self._device
        )

    def lies_alike(self, gradient: torch.Tensor) -> bool:
        """As :meth:`lie_alike`, of one that comes alone."""
        plain = type(gradient) is torch.Tensor and gradient.is_contiguous() and not gradient.is_neg()
        return plain and not self._orders

    def lie_alike(self, gradients: Collection[torch.Tensor]) -> bool:
        """Whether the memory of all these gradients, which fit, is laid out as that of their parameters, and holds
        their values."""
        return not self._orders and (
            {*map(type, gradients)} == {torch.Tensor}
            and all(map(torch.Tensor.is_contiguous, gradients))
            and not any(map(torch.Tensor.is_neg, gradients))
        )

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
        with _no_read():
            for param, gradient, taken in zip(self.params, map(_GRADIENT, self.params), self.taken, strict=True):
                if gradient is taken:
                    param.grad = None

    # --- changes from outside --------------------------------------------------------------------------

    def note(self, index: int) -> None:
        """Record that the parameter, as it is now, agrees with its master weights."""
        with _no_read():
            self._versions[index] = self.params[index]._version
            self._addresses[index] = self.params[index].data_ptr()

    def note_all(self) -> None:
        """As :meth:`note`, of all."""
        self._versions, self._addresses = self._as_they_are()

    def doubt(self, index: int) -> None:
        """Record that the parameter may differ from its master weights: their next use compares them first."""
        self._versions[index] = -inf

    def changed(self) -> list[int]:
        """The parameters that somebody else wrote to since :meth:`note`, as far as torch counts."""
        versions, addresses = self._as_they_are()
        if versions == self._versions and addresses == self._addresses:
            return []
        now, before = zip(versions, addresses, strict=True), zip(self._versions, self._addresses, strict=True)
        return [i for i, (new, old) in enumerate(zip(now, before, strict=True)) if new != old]

    def _as_they_are(self) -> tuple[list[float], list[int]]:
        with _no_read():
            return list(map(_VERSION, self.params)), list(map(torch.Tensor.data_ptr, self.params))

    def count_writes(self, indices: Iterable[int]) -> None:
        """Tell autograd that these were written, as after any in-place update; as far as was known, nobody else did."""
        written = [*indices]
        increment_version([self.params[i] for i in written])
        for i in written:
            self._versions[i] += 1
