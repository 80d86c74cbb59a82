"""The core's ``Collectives`` between the processes that hold an axis's ranks."""

import jax
import numpy as np
from jax import lax

from ..launch import EXCHANGES, meeting
from .axis import Ranks


class JaxProcesses:
    """Exchanges small host arrays between processes, as sums of JAX's integers. Process 0 holds the first rank."""

    def __init__(self, axis: Ranks) -> None:
        processes = list(dict.fromkeys(axis.process_of))
        self.rank = processes.index(jax.process_index())
        self.world_size = len(processes)
        self._axis = axis
        self._sum = axis.across(_sum, axis.split)
        self.where = EXCHANGES.where

    def sum_integers(self, array: np.ndarray, what: str) -> None:
        if self.world_size == 1:
            return
        # JAX has no 64-bit integers here, so numbers travel in limbs of 16 bits: their sums over fewer than 32768
        # processes fit in int32.
        shifts = np.arange(0, 64, 16, dtype=np.uint64)
        limbs = ((array.view(np.uint64)[:, None] >> shifts) & np.uint64(0xFFFF)).astype(np.int32)
        parts = [limbs[None] if i == 0 else np.zeros_like(limbs)[None] for i in range(len(self._axis.ranks))]
        with meeting(self._axis.ranks[0], what):
            total = np.asarray(self._sum(self._axis.stack(parts)).addressable_data(0))[0]
        array[:] = (total.astype(np.uint64) << shifts).sum(axis=1, dtype=np.uint64).view(np.int64)

    def broadcast(self, array: np.ndarray, what: str, source: int = 0) -> None:
        if self.world_size == 1:
            return
        words = np.zeros(-(-array.nbytes // 8), np.int64)
        if self.rank == source:
            words.view(np.uint8)[: array.nbytes] = array.reshape(-1).view(np.uint8)
        self.sum_integers(words, what)
        array.reshape(-1).view(np.uint8)[:] = words.view(np.uint8)[: array.nbytes]


def _sum(name: str, part: jax.Array) -> jax.Array:
    return lax.psum(part, name)
