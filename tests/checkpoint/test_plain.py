"""Plain values through JSON and back."""

import json
import math
from collections import Counter, OrderedDict, defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload_core.checkpoint.values import ArrayType, decode, encode
from offload_core.errors import CheckpointError
from tests.support.strategies import law

TORCH = ArrayType("torch", lambda v: isinstance(v, torch.Tensor), lambda v: v.numpy(), torch.from_numpy)
KEYS = st.text(max_size=3) | st.integers() | st.booleans() | st.floats(allow_nan=False) | st.tuples(st.integers())
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
    | st.frozensets(st.integers(), max_size=1)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.lists(KEYS, max_size=3).map(Counter)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$", "$x", "value", "a"]), inner, max_size=3)
    ),
    max_leaves=8,
)


def there_and_back(value, *types):
    arrays = []
    text = json.dumps(encode(value, arrays, types, where="extras"), allow_nan=False)
    return decode(json.loads(text), arrays, types)


@law(300)
@given(VALUES)
def test_values_come_back_with_their_types_and_bits(value):
    assert repr(there_and_back(value)) == repr(value)


def test_arrays_come_back_as_what_they_were():
    found = there_and_back({"a": torch.arange(3), "b": [np.float64(math.pi)], "c": np.eye(2)}, TORCH)
    assert isinstance(found["a"], torch.Tensor)
    assert found["a"].tolist() == [0, 1, 2]
    assert type(found["b"][0]) is np.float64
    assert found["b"][0] == math.pi
    assert found["c"].tolist() == [[1, 0], [0, 1]]
    arrays = []
    encoded = encode(torch.ones(2), arrays, [TORCH], where="x")
    assert isinstance(decode(encoded, arrays), np.ndarray)  # without torch


def test_dictionaries_of_other_types_become_plain():
    assert there_and_back(OrderedDict(a=defaultdict(list, b=1))) == {"a": {"b": 1}}
    assert math.isnan(there_and_back(float("nan")))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, object()]}, r"extras\['a'\]\[1\] is a builtins.object"),
        ({"f": print}, r"extras\['f'\] is a builtins.builtin_function_or_method"),
        (np.array(["text"]), "extras is an array of <U4"),
        (np.array([object()]), "extras is an array of object"),
    ],
)
def test_what_would_have_to_be_run_is_refused_by_name(value, message):
    with pytest.raises(CheckpointError, match=message):
        encode(value, [], where="extras")


def test_a_value_that_holds_itself_is_refused():
    value = []
    value.append(value)
    with pytest.raises(CheckpointError, match="levels deep"):
        encode(value, [], where="extras")
