"""What ranks tell each other before an update: one sum of integers, which decides for all of them alike."""

from typing import NamedTuple

import numpy as np

from .buckets import LocalBuckets
from .errors import StateError
from .grad_norm import SumOfSquares
from .gradients import Gradients
from .layout import fingerprint
from .trace import REDUCTION


class Agreement(NamedTuple):
    """The same on every rank."""

    squares: SumOfSquares
    """Of all gradients, where they are examined."""
    present: set[int]
    """Parameters that have a gradient on any rank. One that has none keeps its value."""
    recalled: bool
    """Whether any rank has recalled parameters that it had emitted."""


def agree(
    buckets: LocalBuckets, gradients: Gradients, *, examines: bool, recalled: bool, terms: str, differs: str
) -> Agreement:
    """Sum the squares, and agree on what is updated. Ranks learn rank 0's order of arrival on the way.

    Args:
        terms: what this rank updates with.
        differs: the error where that is not the same on every rank.

    Raises:
        StateError: on every rank.
    """
    squares, device = SumOfSquares(), buckets.device
    if device.world_size == 1:
        if examines:
            buckets.run(lambda: gradients.add_squares(squares))
        gradients.order = gradients.order_of_arrival()
        return Agreement(squares, set(gradients.present), False)
    flags = np.zeros(len(buckets.params), np.int64)
    flags[list(gradients.present)] = 1
    order = np.array([work.bucket.index for work in gradients.order_of_arrival()], np.int64)
    if device.collectives.rank:
        order[:] = 0
    mine = fingerprint(terms)

    def meet() -> np.ndarray:
        if examines:
            gradients.add_squares(squares)
        agreed = np.concatenate([squares.bins, flags, order, [recalled, mine]])
        with device.trace.span(REDUCTION, "norm of all ranks"):
            device.collectives.sum_integers(agreed, "gradient norm")
        return agreed

    agreed = buckets.run(meet)
    sizes = [squares.bins.size, flags.size, order.size]
    squares.bins, flags, order, [any_recalled, theirs] = np.split(agreed, np.cumsum(sizes))
    if theirs != mine * device.collectives.world_size:
        raise StateError(differs)
    gradients.order = [buckets.all[i] for i in order]
    return Agreement(squares, set(np.flatnonzero(flags).tolist()), bool(any_recalled))
