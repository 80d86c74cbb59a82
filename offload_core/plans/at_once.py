"""Plans memory if all gradients come at once and new parameters are new arrays, as in JAX.

``Planner.plan`` plans memory if gradients come one by one and parameters are written in place, as in torch.
"""

from collections import Counter, deque
from collections.abc import Sequence

from ..dtypes import FLOAT32
from ..layout.partition import Bucket, ParamSpec
from ..memory.plan import GRADIENTS, PARAMETERS, ArrayBytes, PlanRow
from .terms import MATRICES, BucketTerms

DONATE = "update(grads, donate=True, donate_params=True)"
_LEAVING = 2
"""The number of gradients that a program has on the device at a time, if it copies each to host memory: XLA computes
the next ones meanwhile."""
_NARROWER = "param_dtype='bfloat16'"
_DEVICES = "parameters sharded over more devices"


def rows_at_once(
    terms: BucketTerms, specs: Sequence[ParamSpec], arrays: Sequence[ArrayBytes], *, on_host: bool, donate: bool = True
) -> list[PlanRow]:
    """Return plan rows for a process's parameters and gradients, at the moment of an update at which both together take
    the most memory.

    If gradients are packed, all exist before the first is freed. A donated gradient is freed when its last bucket has
    been packed, before the first new parameter exists. Gradients that are not donated, or that kernels read in place,
    exist at the same time as all new parameters. Donated parameters are written over.

    Args:
        arrays: the trained arrays, in the order in which the update takes their gradients.
        on_host: True if the devices' memory is host memory.
        donate: True if gradients and parameters are donated.
    """
    buckets = terms.cut(specs)
    gone: set[int] = set()
    largest = max(map(terms.in_flight_bytes, buckets), default=0)
    if terms.direct:
        on_way, both = 0, True
    elif terms.gradients_in_place:
        on_way, both = terms.depth * largest, not donate
    elif not donate:
        on_way, both = largest, True
    else:
        (on_way, gone), both = _when_they_leave(terms, buckets, arrays), False
    wide = any(spec.dtype is FLOAT32 for spec in specs)
    sums = Counter[tuple[str, str, bool]]()
    for i, array in enumerate(arrays):
        sums[array.where, array.what, False] += array.parameter
        if both or array.where == "host":  # else the freed gradients took more
            sums[array.where, f"next {array.what}", True] += array.following
        if i not in gone:
            sums["device", GRADIENTS if array.what == PARAMETERS else "gradients of shards", True] += array.gradient
        if array.gradient_on_host:
            sums["host", GRADIENTS, True] += array.gradient_on_host
    smaller = _NARROWER if wide else _DEVICES
    rows = []
    for (where, what, brief), n_bytes in sums.items():
        kept = what.startswith("next") and not terms.direct and where == "device"
        rows.append(PlanRow(what, where, n_bytes, DONATE if kept else smaller, brief=brief))
    rows.append(PlanRow("buckets on their way", "device", on_way, "reduce_bucket_size", brief=True))
    if matrices := terms.matrix_bytes(buckets):
        rows.append(PlanRow(MATRICES, "device", matrices, "reduce_bucket_size", brief=True))
    leaving = sorted(array.gradient_on_host for array in arrays)[-_LEAVING:]
    rows.append(PlanRow("gradients on their way", "device", sum(leaving), "smaller layers", brief=True))
    if not (terms.gradients_in_place or on_host):  # JAX allocates these, and the pipeline does not count them
        arriving = _arriving(terms, buckets)
        rows.append(PlanRow("gradients on their way", "host", arriving, "reduce_bucket_size", brief=True))
    return rows


def _when_they_leave(
    terms: BucketTerms, buckets: Sequence[Bucket], arrays: Sequence[ArrayBytes]
) -> tuple[int, set[int]]:
    """Find the moment of an update at which gradients and packed buckets together take the most memory. Return, at that
    moment, the bytes of packed buckets, and the indices of the arrays whose gradient was freed.

    The update takes gradients in the order of ``arrays``, and packs each bucket as soon as it is full. A packed bucket
    is in flight until ``terms.depth`` later buckets of the same ``Bucket.place`` are packed.
    """
    missing = {bucket.index: {piece.param for piece in bucket.pieces} for bucket in buckets}
    array_of = {param: i for i, array in enumerate(arrays) for param in array.params}
    of_param: dict[int, list[Bucket]] = {}
    unread: list[set[int]] = [set() for _ in arrays]
    for bucket in buckets:
        for param in missing[bucket.index]:
            of_param.setdefault(param, []).append(bucket)
            unread[array_of[param]].add(bucket.index)
    ways: dict[int, deque[int]] = {}
    gone: set[int] = set()
    left = sum(array.gradient for array in arrays)
    most, found = left, (0, set[int]())
    for array in arrays:
        for param in array.params:
            for bucket in of_param.get(param, ()):
                missing[bucket.index].discard(param)
                if missing[bucket.index]:
                    continue
                way = ways.setdefault(bucket.place, deque(maxlen=terms.depth))
                way.append(terms.in_flight_bytes(bucket))
                packed = sum(map(sum, ways.values()))
                if left + packed > most:
                    most, found = left + packed, (packed, set(gone))
                for i in {array_of[piece.param] for piece in bucket.pieces}:
                    unread[i].discard(bucket.index)
                    if not unread[i]:
                        gone.add(i)
                        left -= arrays[i].gradient
    return found


def _arriving(terms: BucketTerms, buckets: Sequence[Bucket]) -> int:
    """Return the most bytes of gradients that are in flight to the host at a time, summed over ``Bucket.place``."""
    of: dict[int, list[int]] = {}
    for bucket in buckets:
        of.setdefault(bucket.place, []).append(terms.in_flight_bytes(bucket))
    return sum(sum(sorted(each)[-terms.depth :]) for each in of.values())
