"""The ranks that train one model together: processes, or the devices of one or several processes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from offload_core.support.launchers import Launched


@dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks; without a launcher it is the only one."""

    rank: int = 0
    """The first rank of this process."""
    world_size: int = 1
    local_rank: int = 0
    """The place among the ranks on this machine."""
    local_world_size: int = 1
    here: int = 1
    """The number of ranks of this process, which follow each other."""

    @classmethod
    def launched(cls) -> Self:
        """Return one rank a process, as the launcher numbers them."""
        place = Launched.read()
        return cls(place.rank, place.world_size, place.local_rank, place.local_world_size)

    def times(self, n: int) -> Self:
        """Return these ranks with `n` ranks for each."""
        places = {"rank": n * self.rank, "local_rank": n * self.local_rank, "here": n * self.here}
        return replace(self, world_size=n * self.world_size, local_world_size=n * self.local_world_size, **places)

    def turn(self, first: int) -> range:
        """The items of this process where each rank takes one in order, rank 0 the one at `first`."""
        return range(first + self.rank, first + self.rank + self.here)

    def gather(self, values: Sequence[float]) -> np.ndarray:
        """Every process's values, float64, a row a process, the same array on all; all processes call it alike."""
        assert self.world_size == self.here, "a framework's own subclass gathers among several processes"
        return np.array([values], np.float64)

    def part(self) -> None:
        """End together: from here on no process needs another. A process that failed does not come here."""
