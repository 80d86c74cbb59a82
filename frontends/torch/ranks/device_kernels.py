"""The parts of updates that a device computes from whole matrices, in torch's operations."""

import torch

from offload_core.device.protocols import Matrices
from offload_core.rules import DeviceKernel
from offload_core.rules.muon import NewtonSchulz


def compute_in(matrices: Matrices, flat: torch.Tensor) -> None:
    """Put what the device computes from each matrix in its place."""
    for matrix in matrices.in_(flat):
        shaped = matrix.view(matrices.shape)
        shaped.copy_(computed(matrices.kernel, shaped))


def computed(kernel: DeviceKernel, matrix: torch.Tensor) -> torch.Tensor:
    """Return what a kernel makes of a matrix: another one of the same shape, in bfloat16 on the same device."""
    assert isinstance(kernel, NewtonSchulz)
    return newton_schulz(matrix, kernel)


def newton_schulz(matrix: torch.Tensor, kernel: NewtonSchulz) -> torch.Tensor:
    """Orthogonalize a matrix in bfloat16, as :class:`NewtonSchulz` defines it.

    The operations are those of ``torch.optim.Muon``, so that the bits are, too.
    """
    a, b, c = kernel.coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if is_tall else matrix
    x = x / x.norm().clamp(min=kernel.eps)
    for _ in range(kernel.steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
