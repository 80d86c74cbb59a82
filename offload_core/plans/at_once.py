"""Memory where gradients come all at once and new parameters are other arrays than the old ones, as in JAX.

``BucketTerms.plan`` is for gradients that come one by one, and parameters that are written where they are.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from ..dtypes import FLOAT32
from ..layout.partition import Bucket, ParamSpec
from ..memory.plan import PlanRow
from .terms import GRADIENTS, MATRICES, PARAMETERS, BucketTerms

SHARDS = "shards of parameters"
DONATE = "update(grads, donate=True)"
_NARROWER = "param_dtype='bfloat16'"
_DEVICES = "parameters sharded over more devices"


@dataclass(frozen=True)
class Held:
    """An array of a model, and the bytes that its values take on a process's devices, its replicas counted."""

    params: Sequence[int]
    """The core's parameters that it consists of."""
    parameter: int
    following: int
    """Of its next value, while the present one is still there."""
    gradient: int
    what: str = PARAMETERS
    """The name of its row in plans, :data:`SHARDS` if it is not whole on each device."""
    where: str = "device"
    """``"host"`` if parameters, but not gradients, are in the host's memory."""


def held_shards(params: Sequence[int], specs: Sequence[ParamSpec], copies: Sequence[int], *, on_host: bool) -> Held:
    """An array of which each shard is a parameter of the core.

    Args:
        params: the numbers of ``specs``.
        copies: how many of the process's devices hold each shard.
        on_host: True if devices that hold the same shard share the memory of its next value.
    """
    once = [spec.numel * spec.dtype.itemsize for spec in specs]
    n_bytes = sum(n * each for n, each in zip(copies, once, strict=True))
    return Held(params, n_bytes, sum(once) if on_host else n_bytes, n_bytes)


def rows_at_once(
    terms: BucketTerms, specs: Sequence[ParamSpec], arrays: Sequence[Held], *, on_host: bool, donate: bool = True
) -> list[PlanRow]:
    """Plan a process's parameters and gradients at the moment of an update when they take the most together.

    All gradients are there before the first one leaves. One that is donated is gone when its last bucket has been
    packed; all are before the first new parameter comes. One that is kept stays beside the new parameters. Where the
    kernels read gradients in place they stay in either case.

    Args:
        arrays: all that are trained, in the order in which their gradients are taken.
        on_host: True if the devices' memory is the host's.
    """
    buckets = terms.cut(specs)
    gone: set[int] = set()
    on_way, both = 0, terms.direct or not donate
    if both:
        on_way = 0 if terms.direct else max(map(terms.way_bytes, buckets), default=0)
    else:
        on_way, gone = _when_they_leave(terms, buckets, arrays)
    wide = any(spec.dtype is FLOAT32 for spec in specs)
    sums = Counter[tuple[str, str, bool]]()
    for i, array in enumerate(arrays):
        sums[array.where, array.what, False] += array.parameter
        if both or array.where == "host":  # else gradients that are gone took more
            sums[array.where, f"next {array.what}", True] += array.following
        if i not in gone:
            sums["device", GRADIENTS if array.what == PARAMETERS else "gradients of shards", True] += array.gradient
    smaller = _NARROWER if wide else _DEVICES
    rows = []
    for (where, what, brief), n_bytes in sums.items():
        kept = what.startswith("next") and not terms.direct and where == "device"
        rows.append(PlanRow(what, where, n_bytes, DONATE if kept else smaller, brief=brief))
    rows.append(PlanRow("buckets on their way", "device", on_way, "reduce_bucket_size", brief=True))
    if matrices := terms.matrix_bytes(buckets):
        rows.append(PlanRow(MATRICES, "device", matrices, "reduce_bucket_size", brief=True))
    if not (terms.direct or on_host):  # JAX allocates these, and the pipeline does not count them
        arriving = _arriving(terms, buckets)
        rows.append(PlanRow("gradients on their way", "host", arriving, "reduce_bucket_size", brief=True))
    return rows


def _when_they_leave(terms: BucketTerms, buckets: Sequence[Bucket], arrays: Sequence[Held]) -> tuple[int, set[int]]:
    """The packed bytes, and the gradients that are gone, at the moment when packed and other gradients are the most.

    Gradients are taken in the arrays' order; each bucket is packed as soon as it is full. It is on its way until as
    many others of its place as may be on their way want to follow.
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
                way.append(terms.way_bytes(bucket))
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
    """The most bytes of gradients that are on their way to the host, from all places."""
    of: dict[int, list[int]] = {}
    for bucket in buckets:
        of.setdefault(bucket.place, []).append(terms.way_bytes(bucket))
    return sum(sum(sorted(each)[-terms.depth :]) for each in of.values())
