"""Sums of gradients over micro-batches, on the device."""

from collections.abc import Iterable, Iterator

import torch


class GradientSums:
    """Sums each parameter's gradients in fp32, in the order in which they come: the same bits as the sums in the host's
    fp32 buffers. A gradient that comes alone stays as it is. Parameters are called by their indices."""

    def __init__(self) -> None:
        self._sums: dict[int, torch.Tensor] = {}

    def __contains__(self, param: int) -> bool:
        return param in self._sums

    def __iter__(self) -> Iterator[int]:
        return iter(self._sums)

    def add(self, param: int, gradient: torch.Tensor) -> None:
        """Add a gradient, which may be written from now on.

        Args:
            gradient: one-dimensional, in any floating-point type.
        """
        earlier = self._sums.get(param)
        if earlier is None:
            self._sums[param] = gradient
            return
        if earlier.dtype is not torch.float32:
            self._sums[param] = earlier = earlier.float()
        earlier.add_(gradient)

    def pop(self, params: Iterable[int]) -> dict[int, torch.Tensor]:
        """Return the sums of those of these parameters that have one, and forget them."""
        return {param: self._sums.pop(param) for param in params if param in self._sums}
