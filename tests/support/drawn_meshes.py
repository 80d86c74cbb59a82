"""Drawn meshes, shapes and placements, and by ``torch.chunk`` the elements of a tensor that a rank of a mesh has."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

ROOTS = {
    1: [(1,)],
    2: [(2,), (2, 1)],
    3: [(3,)],
    4: [(4,), (2, 2), (2, 1, 2)],
    6: [(6,), (3, 2), (2, 3)],
    8: [(8,), (2, 4), (2, 2, 2)],
}
"""Shapes of meshes, by their number of ranks."""
NAMES = "abc"


@dataclass(frozen=True)
class Tensor:
    """A parameter, and where it lies.

    Args:
        dims: the dimensions of the root mesh whose submesh it lies on; None: it is a plain tensor.
        placements: one for each; an integer: cut along this dimension of the tensor; None: replicated.
        later: two placements cut the same dimension, and the first one of them cuts what the second has left.
        transposed: the last two dimensions lie in memory in the other order.
    """

    shape: tuple[int, ...]
    dims: tuple[int, ...] | None
    placements: tuple[int | None, ...] = ()
    later: bool = False
    transposed: bool = False

    def order(self) -> list[int]:
        """The places among ``dims`` that cut something, in the order in which they do."""
        cutting = [i for i, dim in enumerate(self.placements) if dim is not None]
        return cutting[::-1] if self.strided else cutting

    @property
    def strided(self) -> bool:
        cutting = [dim for dim in self.placements if dim is not None]
        return self.later and len(cutting) == 2 and cutting[0] == cutting[1]

    def indices(self, root: Sequence[int], place: Sequence[int]) -> torch.Tensor:
        """Flat indices, in the whole tensor, of the elements that the rank at this place of the root mesh has."""
        part = torch.arange(prod(self.shape)).reshape(self.shape)
        for i in self.order():
            part = chunk(part, root[self.dims[i]], self.placements[i], place[self.dims[i]])
        return part

    def on(self, mesh: DeviceMesh, values: torch.Tensor) -> torch.Tensor:
        """The rank's part, from the values of the whole tensor.

        Args:
            mesh: the root.
        """
        if self.dims is None:
            return self.laid(values.clone())
        part = values.flatten()[self.indices(mesh.shape, mesh.get_coordinate())]
        names = tuple(NAMES[dim] for dim in self.dims)
        words: list[Placement] = [Replicate() if dim is None else Shard(dim) for dim in self.placements]
        if self.strided:
            first, second = sorted(self.order())
            words[first] = _StridedShard(self.placements[first], split_factor=mesh.shape[self.dims[second]])
        return DTensor.from_local(
            self.laid(part), mesh[names], words, run_check=False, shape=torch.Size(self.shape), stride=values.stride()
        )

    def laid(self, part: torch.Tensor) -> torch.Tensor:
        return part.mT.contiguous().mT if self.transposed and part.ndim > 1 else part.contiguous()


def chunk(tensor: torch.Tensor, n: int, dim: int, i: int) -> torch.Tensor:
    """``torch.chunk`` may make fewer than n chunks; the last ones are then empty."""
    parts = tensor.chunk(n, dim)
    return parts[i] if i < len(parts) else tensor.narrow(dim, 0, 0)


@st.composite
def tensors(draw, root: Sequence[int]) -> Tensor:
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
    if draw(st.integers(0, 5)) == 0:
        return Tensor(shape, None, transposed=draw(st.booleans()))
    dims = tuple(sorted(draw(st.sets(st.integers(0, len(root) - 1), min_size=1, max_size=2))))
    cut = st.none() | st.integers(0, len(shape) - 1) if shape else st.none()
    placements = tuple(draw(cut) for _ in dims)
    return Tensor(shape, dims, placements, draw(st.booleans()), draw(st.booleans()))


@dataclass(frozen=True)
class Drawn:
    root: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    seed: int

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(NAMES[: len(self.root)])

    def places(self) -> list[tuple[int, ...]]:
        """The place of each rank in the root mesh."""
        n = prod(self.root)
        where = torch.arange(n).reshape(self.root)
        return [tuple(int(i) for i in (where == rank).nonzero()[0]) for rank in range(n)]


@st.composite
def drawn(draw, n_ranks: int | None = None) -> Drawn:
    n_ranks = draw(st.sampled_from([*ROOTS])) if n_ranks is None else n_ranks
    root = draw(st.sampled_from(ROOTS[n_ranks]))
    return Drawn(root, tuple(draw(st.lists(tensors(root), min_size=1, max_size=4))), draw(st.integers(0, 99)))
