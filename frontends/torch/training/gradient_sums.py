"""Sums of gradients over micro-batches, on the device."""

from collections.abc import Iterable, Iterator

import torch


class GradientSums:
    """Sums each parameter's gradients in fp32, in the order in which they come: the same bits as the sums in the host's
    fp32 buffers. A gradient that comes alone stays as it is. Parameters are called by their indices."""

    def __init__(self) -> None:
        self._sums: dict[int, torch.Tensor] = {}
        self._owned: set[int] = set()
        """The parameters whose sum has memory of its own. A first gradient may share its memory: autograd hands one
        tensor to several nodes."""

    def __contains__(self, param: int) -> bool:
        return param in self._sums

    def __iter__(self) -> Iterator[int]:
        return iter(self._sums)

    def add(self, param: int, gradient: torch.Tensor) -> None:
        """Add a gradient, which is not written to.

        Args:
            gradient: one-dimensional, in any floating-point type.
        """
        earlier = self._sums.get(param)
        if earlier is None:
            self._sums[param] = gradient
        elif param in self._owned:
            earlier.add_(gradient)
        else:
            self._sums[param] = torch.add(earlier.float(), gradient)
            self._owned.add(param)

    def pop(self, params: Iterable[int]) -> dict[int, torch.Tensor]:
        """Return the sums of those of these parameters that have one, and forget them."""
        found = {param: self._sums.pop(param) for param in params if param in self._sums}
        self._owned -= found.keys()
        return found
