"""Regions of parameters, against NumPy arrays that are cut and transposed."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.layout.regions import Region, common
from tests.support.strategies import law


def elements_of(region):
    """The logical numbers of a region's elements, by NumPy alone."""
    whole = np.arange(math.prod(region.shape)).reshape(region.shape)
    if region.order is not None:
        whole = whole.transpose(region.order)
    if region.box is not None:
        whole = whole[tuple(slice(low, high) for low, high in region.box)]
    return whole.reshape(-1)[region.start : region.start + region.numel]


@st.composite
def views(draw, shape):
    order = draw(st.none() | st.permutations(range(len(shape))).map(tuple))
    box = None
    if draw(st.booleans()):
        ends = [shape[d] for d in order or range(len(shape))]
        box = tuple(tuple(sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in ends)
    return order, box


def size_of(shape, view):
    return elements_of(Region(shape, 0, math.prod(shape), *view)).size


@st.composite
def regions(draw, shape):
    view = draw(views(shape))
    start, stop = sorted(draw(st.tuples(*[st.integers(0, size_of(shape, view))] * 2)))
    return Region(shape, start, stop - start, *view)


SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@law(300)
@given(data=st.data(), shape=SHAPES)
def test_runs_are_the_elements(data, shape):
    region = data.draw(regions(shape))
    region.check()
    runs = region.runs()
    assert [i for start, numel in runs.tolist() for i in range(start, start + numel)] == elements_of(region).tolist()
    assert (runs[:, 1] > 0).all()


@law(300)
@given(data=st.data(), shape=SHAPES)
def test_what_a_cut_view_and_a_region_have_in_common(data, shape):
    view = data.draw(views(shape))
    size = size_of(shape, view)
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, size), max_size=4))), size]
    sources = [Region(shape, a, b - a, *view) for a, b in itertools.pairwise(cuts)]
    sources = data.draw(st.permutations(sources))
    target = data.draw(regions(shape) | st.sampled_from(sources))
    rows = common(sources, target)

    taken = np.full(target.numel, -1)
    for i, at, to, n in rows.tolist():
        assert n > 0
        assert (taken[to : to + n] == -1).all()
        taken[to : to + n] = elements_of(sources[i])[at : at + n]
    stored = elements_of(Region(shape, 0, size, *view))
    wanted = elements_of(target)
    assert taken.tolist() == np.where(np.isin(wanted, stored), wanted, -1).tolist()
    assert [tuple(row[:2]) for row in rows.tolist()] == sorted(tuple(row[:2]) for row in rows.tolist())


@law(300)
@given(data=st.data(), shape=SHAPES)
def test_a_region_is_a_few_boxes_of_the_parameter(data, shape):
    """Their elements lie in it one after another; NumPy cuts them out."""
    region = data.draw(regions(shape))
    boxes = region.boxes()
    assert len(boxes) <= max(2 * len(shape) - 1, 1)
    whole, held, place = np.arange(math.prod(shape)).reshape(shape), elements_of(region), 0
    for at, box in boxes:
        part = whole[tuple(slice(low, high) for low, high in box)]
        assert at == place
        assert part.size > 0
        place += part.size
        assert part.transpose(region.order or range(len(shape))).reshape(-1).tolist() == held[at:place].tolist()
    assert place == region.numel


def test_a_run_of_most_boxes():
    """The ends of two rows on either side, and whole rows between them."""
    assert Region((3, 3, 3), 2, 23).boxes() == [
        (0, ((0, 1), (0, 1), (2, 3))),
        (1, ((0, 1), (1, 3), (0, 3))),
        (7, ((1, 2), (0, 3), (0, 3))),
        (16, ((2, 3), (0, 2), (0, 3))),
        (22, ((2, 3), (2, 3), (0, 1))),
    ]
    assert Region((), 0, 1).boxes() == [(0, ())]
    assert Region((0, 4), 0, 0).boxes() == []


def test_neighbours_are_one_row_whatever_their_order():
    order = (0, 2, 3, 1)
    sources = [Region((8, 4, 3, 3), 144 * i, 144, order) for i in range(2)]
    assert common(sources, Region((8, 4, 3, 3), 100, 100, order)).tolist() == [[0, 100, 0, 44], [1, 0, 44, 56]]
    boxed = [Region((6, 4), 0, 12, None, ((3 * i, 3 * i + 3), (0, 4))) for i in range(2)]
    assert common(boxed, Region((6, 4), 0, 24)).tolist() == [[0, 0, 0, 12], [1, 0, 12, 12]]


@pytest.mark.parametrize(
    "region",
    [
        Region((4, 3), 0, 13),
        Region((4, 3), -1, 2),
        Region((4, 3), 0, -1),
        Region((4, 3), 0, 1, (0, 0)),
        Region((4, 3), 0, 1, None, ((0, 4),)),
        Region((4, 3), 0, 1, None, ((0, 5), (0, 3))),
        Region((4, 3), 0, 4, (1, 0), ((0, 3), (0, 1))),
    ],
)
def test_numbers_that_do_not_fit_are_refused(region):
    with pytest.raises(ValueError, match="of"):
        region.check()
