"""Files of the safetensors format, against the format's own library."""

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload_core.checkpoint.safetensors import plan_file, read_header
from offload_core.dtypes import BFLOAT16, SAFETENSORS_DTYPES
from offload_core.errors import CheckpointError
from tests.support.strategies import law

TYPES = sorted(SAFETENSORS_DTYPES.values(), key=lambda dtype: (-dtype.itemsize, dtype.name))


def write(path, arrays, metadata=None):
    header, stored, size = plan_file({name: (a.dtype, a.shape) for name, a in arrays.items()}, metadata)
    with path.open("wb") as file:
        file.write(header)
        for name, array in arrays.items():
            assert file.tell() == stored[name].offset
            file.write(array.tobytes())
        assert file.tell() == size


@law(50)
@given(data=st.data())
def test_the_formats_own_library_reads_what_is_written(tmp_path_factory, data):
    names = data.draw(st.lists(st.text(max_size=20).filter(lambda n: n != "__metadata__"), unique=True, max_size=5))
    arrays = {}
    for name in names:
        shape = data.draw(st.lists(st.integers(0, 3), max_size=3))
        arrays[name] = (
            np.frombuffer(data.draw(st.binary(min_size=108, max_size=108)), np.uint8)[
                : 4 * int(np.prod(shape, dtype=int))
            ]
            .view(np.float32)
            .reshape(shape)
        )
    path = tmp_path_factory.mktemp("files") / "a.safetensors"
    write(path, arrays, {"format": "pt"})
    theirs = safetensors.numpy.load_file(path)
    assert {n: (a.shape, a.tobytes()) for n, a in theirs.items()} == {
        n: (a.shape, a.tobytes()) for n, a in arrays.items()
    }


def test_every_element_type_is_that_of_the_formats_own_library(tmp_path):
    arrays = {dtype.name: np.ones(3, dtype) for dtype in TYPES}
    write(tmp_path / "a.safetensors", arrays)
    theirs = safetensors.torch.load_file(tmp_path / "a.safetensors")
    for name, tensor in theirs.items():
        assert tensor.to(torch.complex128).tolist() == [1, 1, 1]
        assert str(tensor.dtype).removeprefix("torch.") == name


def test_what_the_formats_own_library_writes_is_read(tmp_path):
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5, dtype=torch.bfloat16), "c": torch.tensor(3)}
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    stored, data = read_header(tmp_path / "a.safetensors"), (tmp_path / "a.safetensors").read_bytes()
    assert stored["b"].dtype == BFLOAT16.numpy
    for name, tensor in tensors.items():
        entry = stored[name]
        assert entry.shape == tuple(tensor.shape)
        assert data[entry.offset : entry.offset + entry.n_bytes] == tensor.view(-1).view(torch.uint8).numpy().tobytes()


def test_a_file_that_is_cut_or_no_such_file_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    write(path, {"a": np.arange(10.0)})
    whole = path.read_bytes()
    for length in [*range(len(whole))]:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="a.safetensors"):
            read_header(path)
    for text in (b"[]", b'{"a": 1}', b'{"a": {"dtype": "X", "shape": [], "data_offsets": [0, 0]}}', b"[" * 100_000):
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        with pytest.raises(CheckpointError, match="a.safetensors"):
            read_header(path)
