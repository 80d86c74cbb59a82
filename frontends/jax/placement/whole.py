"""What placements share whose parameters are whole on each device."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from offload_core.dtypes import ElementType

from .mesh import MeshParameter
from .shard_layout import ShardLayout
from .trees import to_numpy


class Whole:
    """Parameters are cut nowhere."""

    def layout(self, leaf: Any) -> ShardLayout | None:
        return None

    def cast(self, array: jax.Array, dtype: ElementType, layout: ShardLayout | None) -> jax.Array:
        return array.astype(dtype.numpy)

    def to_numpy(self, array: jax.Array, layout: ShardLayout | None) -> np.ndarray:
        return to_numpy(array)


class InBuckets(Whole):
    """They come and go in the buckets of a :class:`JaxMeshDevice`."""

    def start(self, arrays: Sequence[jax.Array]) -> list[Any]:
        return [MeshParameter(array) for array in arrays]

    def started(self, tensors: Sequence[Any]) -> list[jax.Array]:
        return [tensor.array for tensor in tensors]

    def targets(self, arrays: Sequence[jax.Array]) -> list[Any]:
        return self.start(arrays)
