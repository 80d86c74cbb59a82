"""Places in arrays of more elements than JAX's own indices can count. None of these arrays is made."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from frontends.jax.devices import runs
from frontends.jax.devices.mesh import programs
from frontends.jax.devices.mesh.axis import LoneDevice, MeshAxis
from frontends.jax.devices.mesh.programs import BucketRange, Write
from tests.support.strategies import law

LARGE = 2**31 + 64


@law(60)
@given(st.integers(0, 2**45))
@example(2**31 - 1)
@example(2**31)
@example(2**32 + 5)
def test_a_place_is_put_together_as_it_was(place):
    [given] = runs.split_places([place])
    assert given.dtype == np.int32
    with jax.enable_x64(True):
        assert int(runs._index(jnp.asarray(given), SimpleNamespace(size=2**46))) == place
    if place < 2**31:
        assert int(runs._index(jnp.asarray(given), SimpleNamespace(size=2**31 - 1))) == place


@law(12)
@given(st.integers(1, 60), st.data())
def test_runs_are_cut_and_written_where_they_lie(size, data):
    start = data.draw(st.integers(0, size - 1))
    numel = data.draw(st.integers(1, size - start))
    flat, [place] = np.arange(size, dtype=np.float32), runs.split_places([start])
    assert np.array_equal(runs.cut_run(jnp.asarray(flat), jnp.asarray(place), numel), flat[start : start + numel])
    expected = flat.copy()
    expected[start : start + numel] = -1
    got = runs.write_run(jnp.asarray(flat), jnp.asarray(place), jnp.full(numel, -1.0))
    assert np.array_equal(got, expected)


def programs_of(size):
    """All programs that cut and write runs of arrays of so many elements, as XLA gets them."""

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    places, runs_ = array(1, 2, dtype=jnp.int32), (BucketRange(16, 0),)
    mesh_axis = MeshAxis(jax.make_mesh((1,), ("dp",), axis_types=(AxisType.Auto,)), None)
    for name, axis in (("lone", LoneDevice(jax.devices()[0])), ("axis", mesh_axis)):
        yield (
            f"reduce, {name}",
            jax.jit(programs.reduce_mean(axis), static_argnums=(2, 3, 4)),
            ([array(size)], places, runs_, 16, np.dtype("f4")),
        )
        write = (Write(BucketRange(16, 0), (size,), False),)
        yield (
            f"publish, {name}",
            jax.jit(programs.gather_and_write(axis), static_argnums=3),
            (array(16), [array(size)], places, write),
        )
    yield (
        "reduce, shards",
        jax.jit(programs.cut_from_slice(mesh_axis), static_argnums=(2, 3, 4)),
        (array(size), places, P("dp"), 16, 16),
    )
    yield (
        "publish, shards",
        jax.jit(programs.write_to_slice(mesh_axis), static_argnums=(3, 4, 5)),
        (array(16), array(size), places, P("dp"), 16, (size,)),
    )
    yield "read", jax.jit(lambda flat, place: runs.cut_run(flat, place, 16)), (array(size), array(2, dtype=jnp.int32))


@pytest.mark.parametrize(("size", "bits"), [(LARGE, 64), (2**31 - 64, 32)])
def test_programs_of_large_arrays_count_in_64_bits(size, bits):
    checked = 0
    for name, program, arguments in programs_of(size):
        text = program.lower(*arguments).as_text()
        of_large = [line for line in text.splitlines() if "dynamic_" in line and f"tensor<{size}x" in line]
        assert of_large, name
        for line in of_large:
            checked += 1
            assert re.findall(r"tensor<(i\d+)>", line) == [f"i{bits}"], (name, line)
    assert checked == 7
