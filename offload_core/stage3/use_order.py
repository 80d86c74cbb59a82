"""Predicts the order in which partitioned parameters are used next, and the distance to a parameter's next use, from
the uses in the last round.

A round is a forward and the backward that follows it. Predictions do not depend on time: ranks that use the same
parameters in the same order predict the same order. If the predicted uses of a parameter seldom come, the parameter is
no longer predicted: for example the weight of an expert that no token is routed to.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from itertools import accumulate

_SURE, _DOUBT = 4, 2


class _Recording:
    """The uses of one round.

    Args:
        uses: the index of the used parameter for each use, in order.
        sizes: the number of elements of each parameter.
    """

    def __init__(self, uses: Sequence[int], sizes: Sequence[int]) -> None:
        self.uses = uses
        self.before = [0, *accumulate(sizes[param] for param in uses)]
        """Entry ``i``: the number of elements of the parameters in uses 0 to ``i - 1``, summed. The last entry is the
        sum over the whole round."""
        self.where: dict[int, list[int]] = {}
        for i, param in enumerate(uses):
            self.where.setdefault(param, []).append(i)

    def next(self, param: int, position: int) -> int | None:
        """Return the index in ``uses`` of a parameter's first use at or after index ``position``; None: there is
        none."""
        found = self.where.get(param, [])
        i = bisect_left(found, position)
        return found[i] if i < len(found) else None


class UseOrder:
    """Records the present round, and predicts its further uses from the recording of the last round of the same kind.

    If the present round differs from the recording, a use that was not recorded does not change the prediction, and a
    recorded use that does not come is skipped. At its end, the present round replaces the recording of its kind.
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
        """For each parameter, the number of its predicted uses that came, minus the number of its predicted uses that
        were skipped, limited to -``_SURE`` ... ``_SURE``."""

    def begin(self, kind: Hashable) -> None:
        """Begin a round. The uses of the last round of the same ``kind`` predict the uses of this round."""
        if self._uses:
            self._recordings[self._kind] = _Recording(self._uses, self.sizes)
        self._kind, self._uses, self._position = kind, [], 0
        self._followed = self._recordings.get(kind) or _Recording([], [])

    def forget(self) -> None:
        """Discard all recordings, and the uses of the present round."""
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
        """Return the number of elements of all uses that are predicted before the parameter's next use. None: no
        further use of the parameter is predicted in this round."""
        at = self._followed.next(param, self._position)
        return None if at is None else self._followed.before[at] - self._followed.before[self._position]

    def upcoming(self, numel: int) -> Iterator[int]:
        """Yield the parameters that are predicted to be used next, in order, up to ``numel`` elements in all."""
        end = self._followed.before[self._position] + numel
        for i in range(self._position, len(self._followed.uses)):
            if self._followed.before[i + 1] > end:
                return
            if self._came[self._followed.uses[i]] > -_DOUBT:
                yield self._followed.uses[i]
