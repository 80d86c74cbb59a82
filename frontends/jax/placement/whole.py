"""The common part of placements that have parameters whole on each device."""

from typing import Any

import jax
import numpy as np

from offload_core.dtypes import ElementType

from ..tree.shard_layout import ShardLayout
from ..tree.trees import to_numpy


class Whole:
    """No parameter is cut."""

    def layout(self, leaf: Any) -> ShardLayout | None:
        return None

    def cast(self, array: jax.Array, dtype: ElementType, layout: ShardLayout | None) -> jax.Array:
        return array.astype(dtype.numpy)

    def to_numpy(self, array: jax.Array, layout: ShardLayout | None) -> np.ndarray:
        return to_numpy(array)
