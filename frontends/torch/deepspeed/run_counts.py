"""Counts of a run: steps, skipped steps and samples, which go on through checkpoints."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from ..optim.optimizer import OffloadedOptimizer


class RunCounts:
    """Counts of an optimizer's updates, so that an interrupt cannot part the two.

    Args:
        samples: returns the samples of an update.
    """

    def __init__(self, optimizer: OffloadedOptimizer, samples: Callable[[], int]) -> None:
        self._optimizer, self._samples = optimizer, samples
        self._before = {name: -count for name, count in self._own().items()}
        """What the counts are ahead of the optimizer's own: those of the run that a checkpoint continues. They
        begin at 0, also where the optimizer has taken over states that have had updates."""
        self.followed = optimizer.updates
        """The optimizer's updates that its scheduler has followed. A load sets it, with the counts."""

    def _own(self) -> dict[str, int]:
        skipped = self._optimizer.core.skipped_count
        steps = self._optimizer.updates + skipped
        return {"global_steps": steps, "skipped_steps": skipped, "global_samples": steps * self._samples()}

    def __getitem__(self, name: str) -> int:
        return self._own()[name] + self._before[name]

    def add_samples(self, more: int) -> None:
        """Count more samples than the updates so far would have, or fewer."""
        self._before["global_samples"] += more

    def state_dict(self) -> dict[str, int]:
        """Return all counts by name."""
        return {name: self[name] for name in self._before}

    def load_state_dict(self, counts: Mapping[str, int]) -> None:
        """Go on from these counts."""
        self._go_on_from(counts)
        self.followed = self._optimizer.updates

    @contextmanager
    def kept(self) -> Iterator[None]:
        """A context that changes the samples of an update: those so far stay counted."""
        counts = self.state_dict()
        yield
        self._go_on_from(counts)

    def _go_on_from(self, counts: Mapping[str, int]) -> None:
        self._before = {name: int(counts[name]) - own for name, own in self._own().items()}
