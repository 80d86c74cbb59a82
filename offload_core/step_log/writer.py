"""The protocol of a place that takes records."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

Value = float | str | None
"""A value in a record: a number (also inf and NaN), a word, or None."""


class Writer(ABC):
    """Writes records down. Subclass it for another place."""

    def open(self, rank: int | None) -> None:  # noqa: B027
        """Begin, before the first record. Raises if the place cannot be written.

        Args:
            rank: this process's rank if each rank writes its own file; None: one process writes.
        """

    @abstractmethod
    def write(self, step: int, record: Mapping[str, Value]) -> None:
        """Write a step's record. A step before the last one takes back all records from that step on."""

    def close(self) -> None:  # noqa: B027
        """End. No record follows."""
