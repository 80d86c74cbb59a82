"""Laws of the partition: pure integers."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.dtypes import BFLOAT16, FLOAT32
from offload_core.errors import ConfigError
from offload_core.layout.partition import ALIGNMENT, ParamSpec, build_buckets
from tests.support.strategies import law

specs = st.lists(
    st.builds(
        ParamSpec,
        name=st.just("p"),
        numel=st.integers(0, 300),
        dtype=st.sampled_from([FLOAT32, BFLOAT16]),
        group=st.integers(0, 2),
        partitioned=st.booleans(),
    ),
    max_size=12,
)
stacks = st.builds(
    lambda n, matrix, partitioned: ParamSpec(
        "p", n * math.prod(matrix), FLOAT32, matrix=matrix, partitioned=partitioned
    ),
    st.integers(1, 6),
    st.sampled_from([(5, 7), (4, 4), (16, 3)]),
    st.booleans(),
)
world_sizes = st.integers(1, 8)
bucket_sizes = st.integers(1, 1000)


@pytest.mark.quick
@law(200)
@given(specs, world_sizes, bucket_sizes)
def test_every_element_lies_in_exactly_one_piece(params, world_size, bucket_numel):
    seen = [[0] * p.numel for p in params]
    for bucket in build_buckets(params, world_size=world_size, bucket_numel=bucket_numel):
        for piece in bucket.pieces:
            assert (params[piece.param].group, params[piece.param].dtype) == (bucket.group, bucket.dtype)
            for i in range(piece.start, piece.stop):
                seen[piece.param][i] += 1
    assert all(count == 1 for counts in seen for count in counts)


@law(200)
@given(specs, world_sizes, bucket_sizes)
def test_shards_cover_a_bucket_and_have_one_aligned_length(params, world_size, bucket_numel):
    for bucket in build_buckets(params, world_size=world_size, bucket_numel=bucket_numel):
        assert bucket.shard_numel % ALIGNMENT == 0
        assert bucket.padded_numel < bucket_numel + ALIGNMENT * world_size
        owned = []
        for rank in range(world_size):
            for piece in bucket.shards([rank]):
                assert piece.offset >= 0
                assert piece.offset + piece.numel <= bucket.shard_numel
                owned += [(piece.param, i, rank * bucket.shard_numel + piece.offset + i - piece.start)
                          for i in range(piece.start, piece.stop)]  # fmt: skip
        whole = [(p.param, i, p.offset + i - p.start) for p in bucket.pieces for i in range(p.start, p.stop)]
        assert owned == whole


@law(200)
@given(specs, world_sizes, bucket_sizes)
def test_a_bucket_has_at_most_one_piece_of_a_parameter_and_only_the_last_has_padding(params, world_size, bucket_numel):
    buckets = build_buckets(params, world_size=world_size, bucket_numel=bucket_numel)
    for bucket in buckets:
        assert len({piece.param for piece in bucket.pieces}) == len(bucket.pieces)
        alike = [b.index for b in buckets if b.key == bucket.key]
        if bucket.partitioned:
            alike = [b.index for b in buckets if b.partitioned and b.pieces[0].param == bucket.pieces[0].param]
        if bucket.index != max(alike):
            assert sum(piece.numel for piece in bucket.pieces) == bucket.padded_numel


@law(200)
@given(specs, world_sizes, bucket_sizes)
def test_the_shards_of_a_partitioned_parameter_lie_end_to_end_in_each_rank_s_tensor(params, world_size, bucket_numel):
    buckets = build_buckets(params, world_size=world_size, bucket_numel=bucket_numel)
    for param, spec in enumerate(params):
        of = [bucket for bucket in buckets if any(piece.param == param for piece in bucket.pieces)]
        assert all(bucket.partitioned == spec.partitioned for bucket in of)
        if not spec.partitioned:
            continue
        assert all({piece.param for piece in bucket.pieces} == {param} for bucket in of)
        # What a rank holds: every bucket's shard of the padded parameter, one after the other.
        padded = np.full(sum(bucket.padded_numel for bucket in of), -1)
        padded[: spec.numel] = np.arange(spec.numel)
        for rank in range(world_size):
            held = [padded[b.start :][: b.padded_numel].reshape(world_size, -1)[rank] for b in of]
            held = np.concatenate(held) if held else padded
            assert [bucket.shard_start for bucket in of] == [sum(b.shard_numel for b in of[:i]) for i in range(len(of))]
            found = np.full(held.size, -1)
            for bucket in of:
                for piece in bucket.shards([rank]):
                    found[bucket.in_tensor(piece) :][: piece.numel] = np.arange(piece.start, piece.stop)
            assert found.tolist() == held.tolist()


@law(200)
@given(st.lists(stacks, max_size=8), world_sizes, bucket_sizes, st.sampled_from([1, 32]))
def test_buckets_cut_no_matrix_and_have_no_padding_within_a_parameter(params, world_size, bucket_numel, block):
    buckets = build_buckets(params, world_size=world_size, bucket_numel=bucket_numel, block=block)
    reached = [0] * len(params)
    for bucket in buckets:
        for piece in bucket.pieces:
            assert piece.start == reached[piece.param]
            reached[piece.param] = piece.stop
            size = math.prod(params[piece.param].matrix)
            assert piece.start % size == piece.numel % size == 0
        last = bucket.pieces[-1]
        if last.stop < params[last.param].numel:
            assert last.offset + last.numel == bucket.padded_numel
    assert reached == [p.numel for p in params]


def test_later_parameters_come_first():
    params = [ParamSpec(str(i), 16, FLOAT32) for i in range(4)]
    buckets = build_buckets(params, world_size=1, bucket_numel=32)
    assert [[piece.param for piece in bucket.pieces] for bucket in buckets] == [[3, 2], [1, 0]]


def test_numbering_goes_on_from_the_parameters_and_buckets_before():
    [bucket] = build_buckets([ParamSpec("p", 5, FLOAT32)], world_size=2, bucket_numel=64, first_param=7, first_bucket=3)
    assert (bucket.index, bucket.pieces[0].param, bucket.shard_numel) == (3, 7, 16)


def test_buckets_that_would_be_too_many_are_refused():
    """Millions of them would take minutes to plan, and time of their own in every step."""
    most = ALIGNMENT * 2**15
    assert len(build_buckets([ParamSpec("p", most, FLOAT32)], world_size=1, bucket_numel=1)) == 2**15
    specs = [ParamSpec(str(i), most // 2 + ALIGNMENT, FLOAT32) for i in range(2)]
    with pytest.raises(ConfigError, match=r"reduce_bucket_size=1 cuts .* into 32,770 buckets; .*give at least 17$"):
        build_buckets(specs, world_size=1, bucket_numel=1)
    assert len(build_buckets(specs, world_size=1, bucket_numel=17)) < 2**15
