"""What the pipeline asks of a group of ranks."""

from typing import Protocol

import numpy as np


class Collectives(Protocol):
    """Communication among the ranks that share one layout. All ranks make the same calls in the same order."""

    rank: int
    world_size: int

    def sum_integers(self, array: np.ndarray) -> None:
        """Replace a small int64 host array by its sum over the ranks, exactly."""


class SingleRank:
    """The only rank: its sums are its own."""

    rank = 0
    world_size = 1

    def sum_integers(self, array: np.ndarray) -> None:
        pass
