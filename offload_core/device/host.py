"""The device that is the host."""

from collections.abc import Sequence

import numpy as np

from ..dtypes import BY_NUMPY, ElementType
from ..rules.muon import NewtonSchulz
from .events import Done, Event
from .no_queue import NoQueue
from .protocols import Copy, HostArray, HostArrays, Matrices


class HostDevice:
    """The device that is the host; its tensors are one-dimensional NumPy arrays."""

    addressable = True
    updates_in_place = True
    pinning = ()
    queue = NoQueue("its memory is the host's")

    def free_bytes(self) -> None:
        return None

    def dtype(self, tensor: np.ndarray) -> ElementType:
        return BY_NUMPY[tensor.dtype]

    def numel(self, tensor: np.ndarray) -> int:
        return tensor.size

    def host_array(self, tensor: np.ndarray) -> HostArray:
        return HostArray.of(tensor)

    def host_arrays(self, tensors: Sequence[np.ndarray]) -> HostArrays:
        return HostArrays.columns(map(self.host_array, tensors))

    def to_host(self, copies: Sequence[Copy], host: np.ndarray) -> Event:
        fill(host, [(c.offset, c.tensor[c.start : c.start + c.numel]) for c in copies])
        return Done()

    def to_device(self, host: np.ndarray, copies: Sequence[Copy], after: Event) -> Event:
        for tensor, start, numel, offset in copies:
            np.copyto(tensor[start : start + numel], host[offset : offset + numel])
        return Done()

    def transform(self, matrices: Matrices, host: np.ndarray) -> Event:
        compute_in(matrices, host)
        return Done()

    def mark(self) -> Event:
        return Done()

    def synchronize(self) -> None:  # waits
        pass


def compute_in(matrices: Matrices, host: np.ndarray) -> None:
    """Put what the matrices' kernel makes of each in its place."""
    assert isinstance(matrices.kernel, NewtonSchulz)
    for matrix in matrices.in_(host):
        shaped = matrix.reshape(matrices.shape)
        shaped[...] = newton_schulz(shaped, matrices.kernel)


def newton_schulz(matrix: np.ndarray, kernel: NewtonSchulz) -> np.ndarray:
    """Orthogonalize a matrix in bfloat16, as :class:`NewtonSchulz` defines it; products are summed in float32."""
    a, b, c = map(np.float32, kernel.coefficients)

    def product(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return (x.astype(np.float32) @ y.astype(np.float32)).astype(matrix.dtype)

    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    norm = np.sqrt(np.square(x.astype(np.float32)).sum(dtype=np.float32))
    x = (x.astype(np.float32) / np.maximum(norm, np.float32(kernel.eps))).astype(matrix.dtype)
    for _ in range(kernel.steps):
        gram = product(x, x.T)
        polynomial = (b * gram.astype(np.float32) + c * product(gram, gram).astype(np.float32)).astype(matrix.dtype)
        x = (a * x.astype(np.float32) + product(polynomial, x).astype(np.float32)).astype(matrix.dtype)
    return x.T if is_tall else x


def fill(host: np.ndarray, runs: Sequence[tuple[int, np.ndarray]]) -> None:
    """Write ``(offset, values)`` runs to a flat array, cast to its element type, and zeros between them."""
    end = 0
    for offset, values in sorted(runs, key=lambda run: run[0]):
        host[end:offset] = 0
        end = offset + values.size
        np.copyto(host[offset:end], values, casting="unsafe")
    host[end:] = 0
