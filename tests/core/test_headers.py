"""Headers that ranks compare before an exchange."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.errors import CollectiveError
from offload_core.ranks.headers import HEADER_BYTES, Header, check_alike


def rows_of(headers):
    rows = np.full((len(headers), HEADER_BYTES), 7, np.uint8)  # as an earlier exchange left them
    for header, row in zip(headers, rows, strict=True):
        header.write(row)
    return rows


HEADERS = st.builds(Header, st.text(max_size=400), st.integers(0, 2**62))


@given(HEADERS, st.integers(1, 5))
def test_equal_headers_are_alike_and_are_read_as_they_were_written(header, n):
    rows = rows_of([header] * n)
    check_alike(rows)
    read = Header.read(rows[0])
    assert read.n_bytes == header.n_bytes
    cut = header.what.encode()[: HEADER_BYTES - 16].rstrip(b"\0").decode(errors="replace")
    assert read.what == cut


@given(st.lists(HEADERS, min_size=2, max_size=5))
def test_any_difference_is_an_error_of_all(headers):
    if len(set(headers)) == 1:
        check_alike(rows_of(headers))
    else:
        with pytest.raises(CollectiveError, match="ranks went different ways"):
            check_alike(rows_of(headers))


def test_texts_that_differ_only_where_they_are_cut_differ():
    with pytest.raises(CollectiveError):
        check_alike(rows_of([Header("x" * 300 + end, 4) for end in "ab"]))


def test_the_error_names_the_place_of_every_rank():
    here, there = Header("bucket 3: exchange of gradients", 4096), Header("gradient norm", 272)
    with pytest.raises(CollectiveError) as caught:
        check_alike(rows_of([here, there, here]))
    assert str(caught.value).startswith(
        "ranks went different ways: ranks 0, 2 at bucket 3: exchange of gradients (4,096 bytes); rank 1 at gradient "
        "norm (272 bytes); expected the same on every rank: "
    )
