"""Positions of a sharded JAX parameter's elements in the core's order."""

import itertools

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from frontends.jax.tree.shard_layout import ShardLayout
from offload_core.dtypes import FLOAT32
from offload_core.layout.partition import ALIGNMENT, ParamSpec, build_buckets, round_up
from offload_core.layout.regions import InMemory, common
from tests.support.strategies import law


def layout_of(case):
    world_size, shape, dim, bucket_numel = case
    return ShardLayout(shape, dim, world_size, round_up(bucket_numel, ALIGNMENT * world_size) // world_size)


@st.composite
def cuts(draw):
    """Ranks, a shape that divides among them, the dimension, and the size of a bucket."""
    world_size = draw(st.integers(1, 5))
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] *= world_size
    return world_size, tuple(shape), dim, draw(st.sampled_from([1, 40, 100, 1 << 20]))


@law(100)
@given(cuts(), st.data())
@example((3, (5, 15, 4), 1, 40), None)
def test_each_rank_owns_the_states_of_its_slice_of_the_array(case, data):
    world_size, shape, dim, bucket_numel = case
    whole = np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(shape)
    layout = layout_of(case)
    core = layout.to_core(whole)
    assert core.shape == (layout.numel,)
    assert np.array_equal(layout.from_core(core), whole)

    buckets = build_buckets(
        [ParamSpec("w", layout.numel, FLOAT32, partitioned=True)], world_size=world_size, bucket_numel=bucket_numel
    )
    slices = [part.reshape(-1) for part in np.split(whole, world_size, axis=dim)]
    padded = [np.pad(part, (0, layout.padded_numel - part.size)) for part in slices]
    for bucket in buckets:
        assert bucket.padded_numel == sum(piece.numel for piece in bucket.pieces)
        for rank in range(world_size):
            [piece] = bucket.shards([rank])
            owned = padded[rank][bucket.shard_start : bucket.shard_start + bucket.shard_numel]
            assert np.array_equal(core[piece.start : piece.stop], owned)

    first = 0 if data is None else data.draw(st.integers(0, world_size - 1))
    ranks = range(first, world_size if data is None else data.draw(st.integers(first + 1, world_size)))
    for bucket in buckets:  # what a process of several ranks holds
        for piece in bucket.shards(ranks):
            found = layout.locate(bucket.in_tensor(piece, len(ranks)), piece.numel, len(ranks))
            held = [padded[ranks[i]][start:stop] for i, start, stop in found]
            assert np.array_equal(np.concatenate(held), core[piece.start : piece.stop])


@law(100)
@given(cuts(), st.integers(0, 2**32 - 1))
@example((3, (5, 15, 4), 1, 40), 0)
def test_regions_say_where_the_elements_of_a_run_are_in_the_array(case, seed):
    layout, shape = layout_of(case), case[1]
    whole = np.arange(1, np.prod(shape) + 1, dtype=np.float32)
    core = layout.to_core(whole)  # padding is 0
    ends = np.random.default_rng(seed).integers(0, layout.numel + 1, 4)
    bounds = sorted({0, layout.numel, *ends.tolist()})
    times = np.zeros(whole.size, int)
    for start, stop in itertools.pairwise(bounds):  # any runs; those of the buckets' shards among them
        filled = np.zeros(stop - start, np.float32)
        for at, region in layout.regions(start, stop - start):
            region.check()
            assert region.shape == shape
            to = at
            for first, numel in region.runs().tolist():
                filled[to : to + numel] = whole[first : first + numel]
                times[first : first + numel] += 1
                to += numel
            assert to == at + region.numel
        assert np.array_equal(filled, core[start:stop])
    assert (times == 1).all()


@law(100)
@given(cuts(), st.data())
def test_what_is_saved_of_one_cut_is_all_of_another(case, data):
    """Another number of ranks, dimension and bucket size; or the array whole, as one device has it."""
    saved, shape = layout_of(case), case[1]
    whole = np.arange(1, np.prod(shape) + 1, dtype=np.float32)
    ways = [(n, d) for n in (1, 2, 3, 4, 5) for d, size in enumerate(shape) if size % n == 0]
    world_size, dim = data.draw(st.sampled_from(ways))
    other = layout_of((world_size, shape, dim, data.draw(st.sampled_from([1, 100]))))
    numel, elements, expected = data.draw(
        st.sampled_from([(other.numel, other, other.to_core(whole)), (whole.size, InMemory(shape), whole)])
    )
    core, file = saved.to_core(whole), saved.regions(0, saved.numel)
    found = np.zeros(numel, np.float32)
    for at, region in elements.regions(0, numel):
        for i, theirs, ours, n in common([source for _, source in file], region).tolist():
            start = file[i][0] + theirs
            found[at + ours : at + ours + n] = core[start : start + n]
    assert np.array_equal(found, expected)
