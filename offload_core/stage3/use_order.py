"""Predicts the order in which partitioned parameters are used, from the last round, and the distance to a next use.

A round is a forward and the backward that follows it. Predictions do not depend on time: ranks that use the same
parameters in the same order predict the same. A parameter whose predicted uses seldom come is not predicted any more,
for example the weight of an expert that no token is routed to.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from itertools import accumulate

_SURE, _DOUBT = 4, 2


class _Recording:
    """The uses of one round."""

    def __init__(self, uses: Sequence[int], sizes: Sequence[int]) -> None:
        self.uses = uses
        self.before = [0, *accumulate(sizes[param] for param in uses)]
        """Entry ``i``: the elements of all parameters used before use ``i``, summed. The last entry is the round's
        total."""
        self.where: dict[int, list[int]] = {}
        for i, param in enumerate(uses):
            self.where.setdefault(param, []).append(i)

    def next(self, param: int, position: int) -> int | None:
        """Return the position of a parameter's first use at or after ``position``."""
        found = self.where.get(param, [])
        i = bisect_left(found, position)
        return found[i] if i < len(found) else None


class UseOrder:
    """Follows the present round in the recording of the last one of its kind.

    If a round differs from the recording, uses that were not recorded are ignored, and recorded ones that do not come
    are skipped. The new round replaces the recording.
    """

    def __init__(self, sizes: list[int] | None = None) -> None:
        self.sizes = [] if sizes is None else sizes
        """The number of elements of each parameter."""
        self._recordings: dict[Hashable, _Recording] = {}
        self._kind: Hashable = None
        self._uses: list[int] = []
        self._followed = _Recording([], [])
        self._position = 0
        self._came: Counter[int] = Counter()
        """For each parameter, the predicted uses that came minus the skipped ones, within ``_SURE``."""

    def begin(self, kind: Hashable) -> None:
        """Begin a round. Rounds of the same ``kind`` are expected to use parameters in the same order."""
        if self._uses:
            self._recordings[self._kind] = _Recording(self._uses, self.sizes)
        self._kind, self._uses, self._position = kind, [], 0
        self._followed = self._recordings.get(kind) or _Recording([], [])

    def forget(self) -> None:
        """Drop all recordings."""
        self._recordings = {}
        self._came.clear()
        self._uses, self._position = [], 0
        self._followed = _Recording([], [])

    def use(self, param: int) -> None:
        """Record the use of a parameter."""
        self._uses.append(param)
        at = self._followed.next(param, self._position)
        if at is not None:
            for skipped in self._followed.uses[self._position : at]:
                self._came[skipped] = max(self._came[skipped] - 1, -_SURE)
            self._came[param] = min(self._came[param] + 1, _SURE)
            self._position = at + 1

    def distance(self, param: int) -> int | None:
        """Return the number of elements used before the parameter's next use; None: this round has no predicted use."""
        at = self._followed.next(param, self._position)
        return None if at is None else self._followed.before[at] - self._followed.before[self._position]

    def upcoming(self, numel: int) -> Iterator[int]:
        """Yield the parameters that are used next, up to ``numel`` elements in all."""
        end = self._followed.before[self._position] + numel
        for i in range(self._position, len(self._followed.uses)):
            if self._followed.before[i + 1] > end:
                return
            if self._came[self._followed.uses[i]] > -_DOUBT:
                yield self._followed.uses[i]
