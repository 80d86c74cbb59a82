"""Files that somebody made to do harm: they are refused by name, unopened or before anything is allocated."""

import json
import os
import tracemalloc
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from frontends.torch import load_deepspeed
from offload_core.__main__ import main
from offload_core.checkpoint.reader import Checkpoint, Loaded
from offload_core.checkpoint.safetensors import plan_file, read_header
from offload_core.commands.model_shapes import INDEX, shapes_of
from offload_core.config.options import OffloadConfig
from offload_core.errors import CheckpointError, ConfigError
from offload_core.support.checkpoint_folder import LATEST, MANIFEST
from offload_core.support.files import read_regular
from tests.support.damaged import Written
from tests.support.hostile import KINDS, SAID, not_forever, replace

kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offload_core.checkpoint.shard_writer.BLOCK_BYTES", 1024)
        return Written(tmp_path_factory.mktemp("hostile"))


@pytest.fixture(autouse=True)
def mended(written):
    yield
    written.mend()


@contextmanager
def little_memory(most=8 * 2**20):
    tracemalloc.start()
    try:
        yield
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < most


@contextmanager
def refused(error, words):
    with not_forever(), little_memory(), pytest.raises(error) as caught:
        yield
    assert words in str(caught.value), caught.value


# --- no regular files ------------------------------------------------------------------------------


@pytest.mark.draws(2)
@kinds
@pytest.mark.parametrize("name", [LATEST, MANIFEST])
def test_a_checkpoint_opens_regular_files_only(written, kind, name):
    replace(written.folder / name if name == LATEST else written.new / name, kind)
    with refused(CheckpointError, SAID[kind]):
        written.load(written.folder)


@kinds
def test_a_shard_is_a_regular_file(written, kind):
    """Whatever was there when its size was looked at."""
    checkpoint = Checkpoint(written.new)
    replace(written.files()[1], kind)
    with refused(CheckpointError, SAID[kind]):
        checkpoint.verify()


@kinds
def test_a_configuration_is_a_regular_file(tmp_path, kind):
    replace(tmp_path / "ds.json", kind)
    with refused(ConfigError, SAID[kind]):
        OffloadConfig.resolve(str(tmp_path / "ds.json"))


@kinds
@pytest.mark.parametrize("name", ["model.safetensors", INDEX, f"index of {INDEX}"])
def test_weights_and_their_index_are_regular_files(tmp_path, capsys, kind, name):
    path = tmp_path / name.rpartition(" ")[2]
    replace(path, kind)
    if name.startswith("index of"):
        path.rename(tmp_path / "x.safetensors")
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": "x.safetensors"}}))
    with not_forever():
        status = main(["plan", "--model", str(tmp_path / INDEX if name != "model.safetensors" else path)])
    if kind is not KINDS[3] or name.startswith("index"):  # a folder may be given in place of a file
        assert SAID[kind] in capsys.readouterr().err
    assert status == 2


@kinds
@pytest.mark.parametrize("name", ["latest", "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"])
def test_a_deepspeed_checkpoint_is_of_regular_files(tmp_path, kind, name):
    (tmp_path / "tag").mkdir()
    (tmp_path / "latest").write_text("tag")
    for file in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        torch.save({"optimizer_state_dict": {"partition_count": 1}}, tmp_path / "tag" / file)
    replace(tmp_path / name if name == "latest" else tmp_path / "tag" / name, kind)
    with refused(CheckpointError, SAID[kind]):
        load_deepspeed(torch.nn.Linear(2, 2), tmp_path)


def test_a_name_that_becomes_a_fifo_is_not_waited_for(tmp_path, monkeypatch):
    """Between the look at it and the opening somebody may put a FIFO there."""
    path = tmp_path / "latest"
    path.write_text("x")
    regular = path.stat()
    path.unlink()
    os.mkfifo(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", lambda name: regular)
        with not_forever(), pytest.raises(OSError, match="a FIFO"):
            read_regular(path, most_bytes=100)


@pytest.mark.parametrize("name", [LATEST, MANIFEST])
def test_a_small_file_of_a_terabyte_is_not_read(written, name):
    os.truncate(written.folder / name if name == LATEST else written.new / name, 2**40)
    with refused(CheckpointError, "too many for such a file"):
        written.load(written.folder)


def test_a_configuration_of_a_terabyte_is_not_read(tmp_path):
    (tmp_path / "ds.json").write_text("{}")
    os.truncate(tmp_path / "ds.json", 2**40)
    with refused(ConfigError, "too many for such a file"):
        OffloadConfig.resolve(tmp_path / "ds.json")


@pytest.mark.parametrize("tag", ["..", "../other", "/", ".", "", "a/b", "\0", "x" * 5000])
def test_deepspeeds_latest_names_a_folder_beside_it(tmp_path, tag):
    (tmp_path / "latest").write_text(tag)
    with refused(CheckpointError, "latest"):
        load_deepspeed(torch.nn.Linear(2, 2), tmp_path)


@pytest.mark.parametrize("name", ["../x.safetensors", "/dev/zero", "a/x.safetensors"])
def test_an_index_names_files_of_its_folder(tmp_path, name):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": name}}))
    with refused(CheckpointError, "not in its folder"):
        shapes_of(tmp_path)


# --- numbers -----------------------------------------------------------------------------------------

SHAPES = ([-1, -40], [2**32, 2**32], [0, 2**62, 2**62], [1] * 33, [True], [40.0], ["40"], [None], None, 40)


def header_of(entries):
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_header_with_an_impossible_shape_is_refused(tmp_path, shape):
    """The product of 2^32 and 2^32 is 0 in 64 bits, that of -1 and -40 is 40."""
    length = {str([-1, -40]): 160, str([40.0]): 160, str(["40"]): 160, str([True]): 4, str([1] * 33): 4}.get(
        str(shape), 0
    )
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, length]}
    (tmp_path / "x.safetensors").write_bytes(header_of({"w": entry}) + bytes(length))
    with refused(CheckpointError, "x.safetensors"):
        read_header(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    "text", ["[" * 10**5, '{"w":' * 10**5, '{"w":' + "9" * 5000, "1e999", '{"w":{"shape":[1e999]}}']
)
def test_a_header_that_is_no_json_of_this_kind_is_refused(tmp_path, text):
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text.encode())
    with refused(CheckpointError, "x.safetensors"):
        read_header(tmp_path / "x.safetensors")


@pytest.mark.draws(2)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_manifest_with_an_impossible_shape_is_refused(written, shape):
    content = written.content
    for record in content["files"]:
        for entry in record["tensors"]:
            entry["shape"] = shape
    written.edit(content)
    with refused(CheckpointError, MANIFEST):
        written.load(written.new)


def test_a_file_plan_counts_in_integers_of_any_size():
    _, stored, size = plan_file({"w": (np.dtype(np.float32), (2**32, 2**32))})
    assert stored["w"].n_bytes == 2**66
    assert size > 2**66


@pytest.mark.draws(2)
@pytest.mark.parametrize("block_bytes", [2**28 + 8, 2**40, 0, -8, True, 8.0])
def test_no_block_is_too_large_for_memory(written, block_bytes):
    """The file has as many bytes as the manifest says: a file with holes costs nothing."""
    content = written.content
    record = content["files"][0]
    size = 2**40
    record |= {
        "bytes": size,
        "block_bytes": block_bytes,
        "blocks": ["0" * 32] * max(1, -(-size // max(int(block_bytes), 2**28))),
    }
    written.edit(content)
    os.truncate(written.new / record["file"], size)
    with refused(CheckpointError, MANIFEST):
        written.load(written.new)


@pytest.mark.draws(2)
@pytest.mark.parametrize(
    "forge",
    [
        lambda content: content["parameters"]["p1"].update(step=-1),
        lambda content: content["parameters"]["p1"].update(step=10**30),
        lambda content: content["parameters"]["p1"].update(group=-1),
        lambda content: content["parameters"]["p1"].update(shape=[2**32, 2**32]),
        lambda content: content["files"][0].update(blocks={}),
        lambda content: content["files"][0].update(blocks="x" * len(content["files"][0]["blocks"])),
        lambda content: [entry.update(kind=3) for entry in content["files"][0]["tensors"]],
        lambda content: [entry.update(offset=str(entry["offset"])) for entry in content["files"][0]["tensors"]],
        lambda content: [entry.update(start=float(entry["start"])) for entry in content["files"][0]["tensors"]],
        lambda content: content.pop("loss_scale"),
    ],
)  # fmt: skip
def test_what_no_writer_writes_is_refused_before_anything_changes(written, forge):
    content = written.content
    forge(content)
    written.edit(content)
    with refused(CheckpointError, MANIFEST):
        written.load(written.new)
    assert written.bits() == written.states


def test_states_wider_than_fp32_are_refused(written):
    """They would be rounded, silently. A narrower type loses nothing."""
    content = written.content
    for entry in content["files"][0]["tensors"]:
        if entry["kind"] == "exp_avg":
            entry |= {"dtype": "F64", "numel": entry["numel"] // 2}
            entry["offset"] -= entry["offset"] % 8
    written.edit(content)
    with refused(CheckpointError, "is of F64, expected F32"):
        written.load(written.new)
    assert written.bits() == written.states


def test_a_value_larger_than_memory_is_refused(written, monkeypatch):
    def empty(*_):
        raise MemoryError

    checkpoint = Checkpoint(written.new)
    monkeypatch.setattr("offload_core.checkpoint.reader.np.empty", empty)
    with refused(CheckpointError, "more than memory holds"):
        Loaded(checkpoint, 0)
