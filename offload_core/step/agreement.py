"""The exchange of all ranks before an update: one sum of integers, from which each rank computes the same result."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..device.trace import REDUCTION
from ..native.grad_norm import SumOfSquares
from ..ranks.consistency import Combined, combine, fingerprint
from .arrivals import Arrivals
from .buckets import LocalBuckets
from .local_bucket import LocalBucket
from .reduction import Reduction


class Agreement(NamedTuple):
    """The result of the exchange, the same on every rank."""

    squares: SumOfSquares | None
    """The sum of squares of all ranks' gradients; None: the update does not examine gradients."""
    present: frozenset[int]
    """The parameters that have a gradient on any rank. The update changes only these."""
    any_gradient: bool
    """True if any rank has a gradient with elements. It may be true although ``present`` is empty, because processes
    may have different parameters."""
    order: Sequence[LocalBucket]
    """All buckets, in the order in which they filled on rank 0."""
    recalled: bool
    """True if a rank has recalled parameters that it had sent early."""
    alike: bool
    """True if all ranks called :func:`agree` with the same ``terms``."""
    save_asked: bool
    """True if a rank was asked to save."""


def agree(
    buckets: LocalBuckets,
    arrivals: Arrivals,
    reduction: Reduction,
    *,
    examines: bool,
    recalled: bool,
    terms: str,
    save_asked: bool,
) -> Agreement:
    """Sum the gradients' squares over all ranks, and agree on the parameters to update. The caller has claimed all
    buckets.

    Args:
        examines: True if the update examines gradients, so that their squares are needed.
        recalled: True if this rank has recalled parameters that it had sent early.
        terms: the arguments of this rank's update, as text. Not read if there is one rank.
        save_asked: True if this rank was asked to save.
    """
    squares, device, order = SumOfSquares(), buckets.device, arrivals.order_of_arrival()
    mine = arrivals.since.present
    has_gradient = any(not mine.isdisjoint(bucket.members) for bucket in order)
    if device.collectives.world_size == 1:
        if examines:
            reduction.add_squares(squares)
        return Agreement(squares if examines else None, frozenset(mine), has_gradient, order, False, True, save_asked)
    exchanged = device.world_size > 1  # else each process has different parameters
    flags = np.zeros(len(buckets.params) if exchanged else 0, np.int64)
    flags[list(mine) if exchanged else []] = 1
    places = [bucket.layout.index for bucket in order] if exchanged else []

    def ask() -> Combined:
        if examines:
            reduction.add_squares(squares)
        asked = [recalled, save_asked, has_gradient]
        sums, same = np.concatenate([squares.bins, flags, asked]), [fingerprint(terms)]
        with device.trace.span(REDUCTION, "norm of all ranks"):
            return combine(device.collectives, "gradient norm", sums=sums, same=same, of_first=places)

    known = buckets.run(ask)
    sizes = [squares.bins.size, flags.size]
    squares.bins, flags, [any_recalled, any_asked, any_gradient] = np.split(known.sums, np.cumsum(sizes))
    present = frozenset(np.flatnonzero(flags).tolist() if exchanged else mine)
    order = [buckets.all[i] for i in known.of_first] if exchanged else order
    return Agreement(
        squares if examines else None,
        present,
        bool(any_gradient),
        order,
        bool(any_recalled),
        bool(known.alike.all()),
        bool(any_asked),
    )
