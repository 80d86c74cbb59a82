"""Buckets, and the shard of each that a rank owns: pure integers.

Parameters of one group and element type are laid end to end, last first (gradients arrive roughly in that
order), and cut into buckets. A bucket is cut into one shard a rank, all of one length. A parameter may
straddle buckets, and shards. A parameter that is itself partitioned (stage 3) shares no bucket with others; a rank
holds its own shards of that parameter's buckets, end to end.
"""

import hashlib
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..config.options import OffloadConfig
from ..config.state_formats import BLOCK
from ..dtypes import ElementType
from ..errors import ConfigError
from ..rules import Matrix, Rule
from .regions import Box, Elements

_MOST_BUCKETS = 2**15
"""As many as 10^12 parameters fill at the default size. Each costs memory and time of its own, in every step."""
ALIGNMENT = 16
"""Shards are whole multiples of this many elements: 64 bytes in fp32. JAX's flat buckets need such a multiple."""


@dataclass(frozen=True)
class ParamSpec:
    """A parameter: its name, number of elements, device element type and parameter group."""

    name: str
    numel: int
    dtype: ElementType
    group: int = 0
    elements: Elements | None = None
    """The order of its elements, the same on every rank; None: that of a one-dimensional array."""
    partitioned: bool = False
    """A rank's tensor holds its own shards only."""
    place: int = 0
    """Parameters of different places share no bucket."""
    rule: Rule | None = None
    """Its update rule, the same for all parameters of a group; None: that of the configuration."""
    counted: bool = True
    """False: another process holds the same elements, and counts and saves them."""
    seed_name: str | None = None
    """The name that :attr:`seed` follows from; None: ``name``."""
    matrix: Matrix | None = None
    """The shape of the matrices that it consists of, which no bucket cuts; None: its rule updates any run of elements
    alone."""
    cut_at: int | None = None
    """The number of elements at whose multiples buckets may cut the parameter; None: the elements of a whole matrix."""
    together: int | None = None
    """The number of the array of which it is a part, with a part of each matrix: ``cut_at`` elements. A bucket holds
    all parts that this process has of a matrix, and no other array; None: it has whole matrices."""
    finalized_with: int | None = None
    """The number of a leaf module; None: there is none. The parameter's gradient may come on some ranks only, or
    earlier on some. It waits until ``Gradients.finalize`` names the parameters of that module."""

    @property
    def first(self) -> int | None:
        """The number that its first element has among the random numbers that round its states. A part of a parameter
        that is one run, from a whole block on, has the numbers of the whole; None: it is another part."""
        if not isinstance(self.elements, Box) or self.elements.is_whole:
            return 0
        first = self.elements.first
        return None if first is None or first % BLOCK else first

    @property
    def seed(self) -> int:
        """The seed of the random numbers that round its states, 64 bits. It follows from a name, so that every rank and
        every later run has the same; of some parts (:attr:`first`), also from their place in the parameter."""
        name = self.name if self.seed_name is None else self.seed_name
        if self.first is None:
            name += f" {self.elements}"
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class Piece:
    """Elements ``[start, start + numel)`` of parameter ``param``, at ``offset`` of the bucket, shard or buffer that
    holds them."""

    param: int
    start: int
    numel: int
    offset: int

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class Bucket:
    """A padded run of pieces: the unit of communication. Rank r owns shard r."""

    index: int
    group: int
    dtype: ElementType
    pieces: tuple[Piece, ...]
    shard_numel: int
    world_size: int
    partitioned: bool = False
    """True if it holds a run of one parameter, of which each rank keeps only its own shard."""
    place: int = 0
    """The place of its parameters."""
    rule: Rule | None = None
    """The update rule of its parameters."""
    matrix: Matrix | None = None
    """The shape of the matrices that its pieces consist of; None: they may be cut anywhere."""
    together: int | None = None
    """``ParamSpec.together`` of its parameters."""

    @property
    def padded_numel(self) -> int:
        return self.shard_numel * self.world_size

    @property
    def n_bytes(self) -> int:
        """The bytes of its parameters, with the padding."""
        return self.padded_numel * self.dtype.itemsize

    @property
    def key(self) -> "Key":
        """Group, element type, ``partitioned``, place, rule and matrix: the same for all parameters of a bucket."""
        return (self.group, self.dtype.name, self.partitioned, self.place, self.rule, self.matrix)

    @property
    def start(self) -> int:
        """The number of its first element in the parameter; for a partitioned bucket only."""
        return self.pieces[0].start

    @property
    def shard_start(self) -> int:
        """The place of a rank's shard in the tensor of a partitioned parameter: after the shards of earlier buckets,
        which have no padding."""
        return self.start // self.world_size

    def in_tensor(self, piece: Piece, n_ranks: int = 1) -> int:
        """The place of a piece (of :meth:`shards`, for ``n_ranks`` ranks) in its parameter's tensor. The tensor holds
        the whole parameter, or if that is partitioned these ranks' shards, bucket after bucket."""
        return n_ranks * self.shard_start + piece.offset if self.partitioned else piece.start

    def shards(self, ranks: Sequence[int]) -> tuple[Piece, ...]:
        """The pieces that ``ranks`` own. Their offsets count from the first of these ranks' shards, laid end to end.

        Elements of one parameter in the shards of neighbouring ranks form one piece.
        """
        owned: list[Piece] = []
        for i, rank in enumerate(ranks):
            begin, end = rank * self.shard_numel, (rank + 1) * self.shard_numel
            for piece in self.pieces:
                low, high = max(piece.offset, begin), min(piece.offset + piece.numel, end)
                if low >= high:
                    continue
                found = Piece(
                    piece.param, piece.start + low - piece.offset, high - low, i * self.shard_numel + low - begin
                )
                if owned and owned[-1].param == found.param and owned[-1].stop == found.start:
                    before = owned.pop()
                    found = Piece(found.param, before.start, before.numel + found.numel, before.offset)
                owned.append(found)
        return tuple(owned)


Key = tuple[int, str, bool, int, Rule | None, Matrix | None]


def round_up(n: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is at least ``n``."""
    return -(-n // multiple) * multiple


def shard_unit(block: int) -> int:
    """Shards are whole multiples of this many elements, if parameters are cut into whole blocks of ``block``."""
    return math.lcm(ALIGNMENT, block)


def matrices_of(bucket: Bucket, loads: list[int], flops: int) -> list[tuple[int, int, int]]:
    """Return ``(parameter, offset, rank)`` of each matrix in a bucket: the rank is the one that computes with it.

    Each goes to the rank that has the least work so far.

    Args:
        loads: the work that each rank has; that of these matrices is added.
        flops: of each of the bucket's matrices.
    """
    assert bucket.matrix is not None
    found = []
    for piece in bucket.pieces:
        for offset in range(piece.offset, piece.offset + piece.numel, math.prod(bucket.matrix)):
            rank = min(range(len(loads)), key=loads.__getitem__)
            loads[rank] += flops
            found.append((piece.param, offset, rank))
    return found


Kinds = Sequence[tuple[Bucket, int]]
"""One bucket of each kind, and the number of those like it: equal but for the parameters that they hold."""


@lru_cache(maxsize=4)
def planned(
    params: tuple[ParamSpec, ...], *, world_size: int, bucket_numel: int, block: int
) -> tuple[tuple[Bucket, ...], Kinds]:
    """Return the buckets of parameters without others beside them, and the buckets' kinds. A plan asks for the same
    ones many times."""
    buckets = tuple(build_buckets(params, world_size=world_size, bucket_numel=bucket_numel, block=block))
    return buckets, kinds_of(buckets)


def kinds_of(buckets: Iterable[Bucket]) -> Kinds:
    """Return the kinds of these buckets, in the order in which the first of each comes."""
    alike: dict[tuple[Key, int], list[Bucket]] = {}
    for bucket in buckets:
        alike.setdefault((bucket.key, bucket.shard_numel), []).append(bucket)
    return tuple((same[-1], len(same)) for same in alike.values())


def cut(
    config: OffloadConfig, params: Sequence[ParamSpec], *, world_size: int, first_param: int = 0, first_bucket: int = 0
) -> list[Bucket]:
    """:func:`build_buckets`, with the sizes that a configuration asks for."""
    return build_buckets(
        params,
        world_size=world_size,
        bucket_numel=config.reduce_bucket_size,
        block=config.state_block,
        first_param=first_param,
        first_bucket=first_bucket,
    )


def build_buckets(
    params: Sequence[ParamSpec],
    *,
    world_size: int,
    bucket_numel: int,
    block: int = 1,
    first_param: int = 0,
    first_bucket: int = 0,
) -> list[Bucket]:
    """Cut ``params``, numbered from ``first_param``, into buckets numbered from ``first_bucket``.

    Args:
        bucket_numel: the most elements of a bucket; rounded up to whole shards.
        block: parameters are cut at whole multiples of so many of their elements alone, and pieces begin at such
            multiples in shards.

    Returns:
        The buckets in the order in which they fill when gradients arrive last parameter first. Every element
        of every parameter lies in exactly one piece. No bucket that ends within a parameter has padding at its end, so
        that a process's part of each parameter is one run.

    Raises:
        ConfigError: buckets so small would be too many.
    """
    unit = shard_unit(block) * world_size
    capacity = round_up(bucket_numel, unit)
    numel = sum(round_up(spec.numel, block) for spec in params)
    if numel // capacity > _MOST_BUCKETS:
        raise ConfigError(
            f"reduce_bucket_size={bucket_numel:,} cuts {numel:,} parameters into {numel // capacity:,} buckets; "
            f"expected at most {_MOST_BUCKETS:,}: give at least {-(-numel // _MOST_BUCKETS):,}"
        )
    buckets: list[Bucket] = []
    filling: dict[Key, list[Piece]] = {}

    def close(key: Key, dtype: ElementType, pieces: list[Piece], together: int | None = None) -> None:
        numel = pieces[-1].offset + pieces[-1].numel
        shard_numel = round_up(numel, unit) // world_size
        index = first_bucket + len(buckets)
        group, _, partitioned, place, rule, matrix = key
        buckets.append(
            Bucket(
                index, group, dtype, tuple(pieces), shard_numel, world_size, partitioned, place, rule, matrix, together
            )
        )

    for local, spec in reversed(list(enumerate(params))):
        key = (spec.group, spec.dtype.name, spec.partitioned, spec.place, spec.rule, spec.matrix)
        if spec.together is not None:
            if local == 0 or params[local - 1].together != spec.together:  # the first of its array's parts
                _, parts = next(itertools.groupby(params[local:], key=lambda other: other.together))
                for pieces in _parts_of_matrices([*parts], first_param + local, capacity, block):
                    close(key, spec.dtype, pieces, spec.together)
            continue
        start = 0
        while start < spec.numel:
            pieces = filling.setdefault(key, [])
            offset = round_up(pieces[-1].offset + pieces[-1].numel, block) if pieces else 0
            room, rest = max(capacity - offset, 0), spec.numel - start
            if spec.matrix is not None and rest > room:  # begin a bucket; end it after a matrix and whole shards
                least = math.lcm(spec.cut_at or math.prod(spec.matrix), unit)
                room = 0 if pieces else max(room // least, 1) * least
            if not room:
                close(key, spec.dtype, filling.pop(key))
                continue
            numel = min(rest, room)
            pieces.append(Piece(first_param + local, start, numel, offset))
            start += numel
            if round_up(offset + numel, block) >= capacity or (spec.partitioned and start == spec.numel):
                close(key, spec.dtype, filling.pop(key))
    by_name = {spec.dtype.name: spec.dtype for spec in params}
    for key in list(filling):
        close(key, by_name[key[1]], filling.pop(key))
    return buckets


def _parts_of_matrices(parts: Sequence[ParamSpec], first_param: int, capacity: int, block: int) -> list[list[Piece]]:
    """Cut the parts of an array into buckets that each hold all parts of some matrices. A bucket has ``capacity``
    elements of whole matrices at most, or one matrix, so that all processes cut alike. Several parts are not cut: each
    must be one run of the process's memory."""
    matrix = parts[0].matrix
    assert matrix is not None
    if len(parts) > 1:
        pieces: list[Piece] = []
        for param, part in enumerate(parts, first_param):
            offset = round_up(pieces[-1].offset + pieces[-1].numel, block) if pieces else 0
            pieces.append(Piece(param, 0, part.numel, offset))
        return [pieces]
    [part], unit = parts, shard_unit(block)
    assert part.cut_at is not None
    step = unit // math.gcd(unit, part.cut_at)
    numel = round_up(max(capacity // math.prod(matrix), 1), step) * part.cut_at
    return [[Piece(first_param, start, min(numel, part.numel - start), 0)] for start in range(0, part.numel, numel)]
