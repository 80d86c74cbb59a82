"""The programs that XLA runs for a bucket: they pack and average gradients, and gather shards into parameters.

Buckets are exchanged and gathered by explicit collectives inside ``shard_map``. Each function here makes one program,
which is compiled once for each layout of a bucket. On CPU devices XLA flushes subnormal numbers to zero, also in these
sums.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from ..runs import cut_run, write_run
from .axis import REPLICATED, Ranks


class BucketRange(NamedTuple):
    """A piece of a bucket: ``numel`` elements of an array, at ``offset`` in the bucket.

    Their place in the array is an argument of the program.
    """

    numel: int
    offset: int


class Write(NamedTuple):
    """The way of a gathered piece into its parameter."""

    run: BucketRange
    shape: tuple[int, ...]
    """The parameter's shape."""
    is_whole: bool
    """True if the piece is the whole parameter."""


def ordered_mean(parts: jax.Array) -> jax.Array:
    """Return the mean over the first dimension: summed in its order in fp32 (at least), divided once.

    The divisor is hidden from XLA, which would multiply by its reciprocal.
    """
    parts = parts.astype(np.promote_types(parts.dtype, np.float32))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total / lax.optimization_barrier(jnp.full(total.shape, parts.shape[0], total.dtype))


def mean_of_slice(gradient: jax.Array, axis: str, world_size: int, *, dim: int = 0, native: bool) -> jax.Array:
    """Inside ``shard_map``: return this rank's slice along ``dim`` of the mean of all ranks' gradients, in fp32.

    Args:
        native: XLA's reduce-scatter sums, in the gradients' element type and in an order of its own.
    """
    if native:
        total = lax.psum_scatter(gradient, axis, scatter_dimension=dim, tiled=True)
        return total.astype(jnp.float32) / world_size
    shape = list(gradient.shape)
    shape[dim : dim + 1] = [world_size, shape[dim] // world_size]
    slices = jnp.moveaxis(gradient.reshape(shape), dim, 0)
    return ordered_mean(lax.all_to_all(slices, axis, split_axis=0, concat_axis=0, tiled=True))


def reduce_unreduced(axis: Ranks, *, native: bool) -> Callable[..., jax.Array]:
    """Return the program that averages each rank's own gradients, and keeps each rank's slice of a bucket."""
    to_shard = functools.partial(mean_of_slice, axis=axis.name, world_size=axis.world_size, native=native)
    return _reduction(axis, to_shard, axis.split)


def reduce_mean(axis: Ranks) -> Callable[..., jax.Array]:
    """Return the program that keeps each rank's slice of a bucket of means.

    All ranks have these means. To sum equal values and divide might change them.
    """
    return _reduction(axis, axis.own_slice, REPLICATED)


def _reduction(
    axis: Ranks, to_shard: Callable[[jax.Array], jax.Array], spec: PartitionSpec
) -> Callable[..., jax.Array]:
    def reduce(
        arrays: list[jax.Array],
        places: jax.Array,
        runs: tuple[BucketRange, ...],
        shard_numel: int,
        comm_dtype: np.dtype,
    ) -> jax.Array:
        def each(arrays: list[jax.Array], places: jax.Array) -> jax.Array:
            given = zip(arrays, places, runs, strict=True)
            cuts = [cut_run(array.reshape(-1), place, run.numel).astype(comm_dtype) for array, place, run in given]
            return to_shard(_pack(cuts, runs, axis.world_size * shard_numel))

        return axis.map(each, (spec, REPLICATED), axis.split)(arrays, places)

    return reduce


def _pack(cuts: Sequence[jax.Array], runs: Sequence[BucketRange], numel: int) -> jax.Array:
    """Return a flat bucket: the cuts at their offsets, zeros elsewhere."""
    dtype = cuts[0].dtype
    filled, end = [], 0
    for cut, run in zip(cuts, runs, strict=True):
        filled += [jnp.zeros(run.offset - end, dtype), cut] if run.offset > end else [cut]
        end = run.offset + run.numel
    return jnp.concatenate([*filled, jnp.zeros(numel - end, dtype)])


def gather_and_write(axis: Ranks) -> Callable[..., list[jax.Array]]:
    """Return the program that gathers a bucket's shards and writes its pieces into their parameters."""

    def gather(
        shards: jax.Array, partials: list[jax.Array | None], places: jax.Array, writes: tuple[Write, ...]
    ) -> list[jax.Array]:
        def each(shard: jax.Array, partials: list[jax.Array | None], places: jax.Array) -> list[jax.Array]:
            flat = axis.gather(shard)
            given = zip(writes, partials, places, strict=True)
            return [
                _written(flat[run.offset : run.offset + run.numel], partial, place, shape, is_whole=is_whole)
                for (run, shape, is_whole), partial, place in given
            ]

        return axis.map(each, (axis.split, REPLICATED, REPLICATED), REPLICATED)(shards, partials, places)

    return gather


def cut_from_slice(axis: Ranks) -> Callable[..., jax.Array]:
    """Return the program that cuts a run out of each rank's slice of an array, padded with zeros."""

    def cut(array: jax.Array, start: jax.Array, spec: PartitionSpec, numel: int, shard_numel: int) -> jax.Array:
        def each(local: jax.Array, start: jax.Array) -> jax.Array:
            run = cut_run(local.reshape(-1), start[0], numel)
            return jnp.concatenate([run, jnp.zeros(shard_numel - numel, run.dtype)])

        return axis.map(each, (spec, REPLICATED), axis.split)(array, start)

    return cut


def write_to_slice(axis: Ranks) -> Callable[..., jax.Array]:
    """Return the program that writes a run into each rank's slice of an array."""

    def write(
        stacked: jax.Array,
        partial: jax.Array | None,
        start: jax.Array,
        spec: PartitionSpec,
        numel: int,
        local_shape: tuple[int, ...],
    ) -> jax.Array:
        def each(shard: jax.Array, partial: jax.Array | None, start: jax.Array) -> jax.Array:
            is_whole = numel == math.prod(local_shape)
            return _written(shard[:numel], partial, start[0], local_shape, is_whole=is_whole)

        return axis.map(each, (axis.split, spec, REPLICATED), spec)(stacked, partial, start)

    return write


def _written(
    value: jax.Array, partial: jax.Array | None, place: jax.Array, shape: tuple[int, ...], *, is_whole: bool
) -> jax.Array:
    """Return an array's next value: this run of it at its place in ``partial``, or in zeros if that is None."""
    if not is_whole:
        into = jnp.zeros(math.prod(shape), value.dtype) if partial is None else partial.reshape(-1)
        value = write_run(into, place, value)
    return value.reshape(shape)
