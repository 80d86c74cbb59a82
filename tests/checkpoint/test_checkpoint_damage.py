"""A checkpoint that is not what was written is refused, with the file named, and the one before it still loads."""

import copy
import json
import os
import random
import tracemalloc

import pytest

from offload_core.checkpoint.loading import Target
from offload_core.checkpoint.reader import Checkpoint
from offload_core.errors import CheckpointError
from offload_core.support.checkpoint_folder import LATEST, MANIFEST
from offload_core.testing.thread_ranks import run_ranks
from tests.support.checkpoints import load
from tests.support.damaged import VALUES, Written, deep, nodes, put, subject_of


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offload_core.checkpoint.shard_writer.BLOCK_BYTES", 1024)
        return Written(tmp_path_factory.mktemp("damaged"))


@pytest.fixture(autouse=True)
def mended(written):
    yield
    written.mend()


# --- what disks and people do ------------------------------------------------------------------------------


def flip(written, rng):
    path = rng.choice(written.files())
    data = bytearray(written.bytes[path])
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def cut_off(written, rng):
    path = rng.choice(written.files())
    os.truncate(path, rng.choice([0, 1, path.stat().st_size - 1, rng.randrange(path.stat().st_size)]))


def extend(written, rng):
    path = rng.choice(written.files())
    path.write_bytes(written.bytes[path] + rng.choice([b"\0", b"\n", b" ", rng.randbytes(5000)]))


def delete(written, rng):
    rng.choice(written.files()).unlink()


def zero_a_page(written, rng):
    path = rng.choice([path for path in written.files() if path.suffix == ".safetensors"])
    data = bytearray(written.bytes[path])
    at = rng.randrange(0, len(data), 512)
    if not any(data[at : at + 512]):
        return flip(written, rng)
    data[at : at + 512] = bytes(len(data[at : at + 512]))
    path.write_bytes(data)


def swap_shards(written, rng):
    one, other = rng.sample([path for path in written.files() if path.suffix == ".safetensors"], 2)
    one.write_bytes(written.bytes[other])
    other.write_bytes(written.bytes[one])


def take_from_the_other(written, rng):
    path = rng.choice(written.files())
    path.write_bytes(written.bytes[written.old / path.name])


def replace_by_a_folder(written, rng):
    path = rng.choice([path for path in written.files() if path.suffix == ".safetensors"])
    path.unlink()
    path.mkdir()


def garbage(written, rng):
    head = json.loads(written.bytes[written.new / MANIFEST])
    text = rng.choice(
        [
            b"", b"{", b"null", b"[]", b"17", rng.randbytes(300), b"[" * 100_000, b'{"a":' * 100_000, b"9" * 10_000,
            json.dumps({**head, "version": 2}).encode(), json.dumps({**head, "version": 0}).encode(),
            json.dumps({**head, "version": True}).encode(), json.dumps({**head, "format": "x"}).encode(),
            json.dumps(head, indent=1).encode(), json.dumps(head).encode("utf-16"),
            json.dumps({k: v for k, v in head.items() if k != rng.choice([*head])}).encode(),
        ]
    )  # fmt: skip
    (written.new / MANIFEST).write_bytes(text)


def edit(written, rng):
    """Somebody changed a number and left the checksum."""
    head = json.loads(written.bytes[written.new / MANIFEST])
    where = rng.choice([*nodes(head["content"])])
    put(head["content"], where, 7)
    if head == json.loads(written.bytes[written.new / MANIFEST]):
        head["content"]["step"] = 3
    (written.new / MANIFEST).write_text(json.dumps(head, sort_keys=True, separators=(",", ":")))


def point_elsewhere(written, rng):
    names = [
        "step-00000009",
        "../step-00000002",
        "/etc",
        "",
        ".",
        "step-00000002/..",
        "x" * 9999,
        "\0",
        "step-00000002\nx",
    ]
    (written.folder / LATEST).write_bytes(
        rng.choice([name.encode() for name in names] + [b"\xff\xfe", rng.randbytes(9)])
    )


def forget_the_latest(written, rng):
    (written.folder / LATEST).unlink()


DAMAGES = (
    *(flip, flip, flip, cut_off, extend, delete, zero_a_page, swap_shards, take_from_the_other),
    *(replace_by_a_folder, garbage, edit, point_elsewhere, forget_the_latest),
)


def assert_refused(written, rng, damage):
    damage(written, rng)
    with pytest.raises(CheckpointError) as caught:
        written.load(written.folder)
    assert str(written.folder) in str(caught.value), caught.value
    named = [path.name for path in written.files()] + [LATEST]
    assert any(name in str(caught.value) for name in named), caught.value
    assert written.load(written.old).step == 1
    written.mend()


def refused(written, n, seed):
    rng = random.Random(seed)
    for i in range(n):
        assert_refused(written, rng, DAMAGES[i % len(DAMAGES)])
    assert written.load(written.folder).step == 2
    assert written.bits() == written.states


@pytest.mark.long("a load for each damaged byte or field")
def test_damage_is_refused_and_the_file_named(written):
    refused(written, 70, 0)


@pytest.mark.slow
def test_any_damage_is_refused_and_the_file_named(written):
    refused(written, 430, 1)


@pytest.mark.draws(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_byte_is_looked_at_whoever_loads(written, ranks):
    """A flipped bit is noticed at loading even where nothing of its block is wanted: rank 2's random state, headers."""
    for path in written.files():
        data = written.bytes[path]
        for at in range(0, len(data), 509):
            path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])

            def act(rank):
                with pytest.raises(CheckpointError):
                    load(subject_of(rank), written.new, [Target("frozen", (4, 5), lambda kind: [])])

            run_ranks(ranks, act)
        path.write_bytes(data)


def test_the_error_names_the_shard_the_bytes_and_what_to_do(written):
    path = written.files()[1]
    data = bytearray(written.bytes[path])
    data[3000] ^= 1
    path.write_bytes(data)
    expected = rf"{path.name}: bytes 2,048 to 3,072 are not those that were written; take another checkpoint"
    with pytest.raises(CheckpointError, match=expected):
        written.load(written.folder)


# --- what somebody does who knows the format ------------------------------------------------------------------


def forged(written, rng):
    content = copy.deepcopy(written.content)
    for _ in range(rng.choice([1, 1, 2])):
        put(content, rng.choice([*nodes(content)]), rng.choice([*VALUES, deep(300), deep(900)]))
    return content


def survives_forgery(written, n, seed):
    """Whatever the manifest says, with the right checksum: it loads or is refused. No other error, no memory."""
    rng = random.Random(seed)
    loaded = 0
    for _ in range(n):
        try:
            content = forged(written, rng)
        except (KeyError, IndexError, TypeError):  # the second change is in what the first took away
            continue
        try:
            written.edit(content)
        except (ValueError, RecursionError, UnicodeEncodeError):  # nothing that JSON holds
            continue
        tracemalloc.start()
        try:
            written.load(written.folder, forged=True)
            loaded += 1
        except CheckpointError:
            pass
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 8 * 2**20
    written.mend()
    assert written.load(written.folder).step == 2
    assert written.bits() == written.states
    return loaded


def test_a_forged_manifest_is_an_error_or_harmless(written):
    assert survives_forgery(written, 60, 0) < 40


@pytest.mark.slow
def test_any_forged_manifest_is_an_error_or_harmless(written):
    assert survives_forgery(written, 300, 1) < 200


def with_record(written, **changes):
    content = written.content
    content["files"][0].update(changes)
    written.edit(content)


@pytest.mark.parametrize(
    "name", ["../step-00000001/shard-00000-of-00003.safetensors", "..", "", ".", "a\0b", "/etc/passwd", 3, None]
)
def test_no_file_outside_is_opened(written, monkeypatch, name):
    with_record(written, file=name)
    opened = []
    monkeypatch.setattr("offload_core.checkpoint.reader.open_regular", opened.append)
    with pytest.raises(CheckpointError, match=MANIFEST):
        written.load(written.new)
    assert not opened


def test_tensors_that_overlap_do_not_hide_a_gap(written):
    """As many elements as are wanted, some of them twice: which are missing would keep what was there before."""
    content = written.content
    tensors = [entry for record in content["files"] for entry in record["tensors"]]
    entry = next(e for e in tensors if (e["name"], e["kind"]) == ("p2", "exp_avg") and e["start"] > 0)
    entry["start"] -= 8
    written.edit(content)
    with pytest.raises(CheckpointError, match="exp_avg of 'p2' is not in it as a whole"):
        written.load(written.new)


def test_tensors_of_another_shape_are_refused(written):
    content = written.content
    for entry in (entry for record in content["files"] for entry in record["tensors"] if entry["name"] == "p2"):
        entry["shape"] = [500, 2]
    written.edit(content)
    with pytest.raises(CheckpointError, match=r"of 'p2' is not of shape \(1000,\)"):
        written.load(written.new)


def test_a_manifest_of_another_step_is_refused(written):
    """All else may be the same: a skipped step changes no state."""
    content = written.content
    content["step"] = 1
    written.edit(content)
    with pytest.raises(CheckpointError, match="of step 1"):
        written.load(written.folder)


def test_a_newer_version_is_named(written):
    head = json.loads(written.bytes[written.new / MANIFEST])
    (written.new / MANIFEST).write_text(json.dumps({**head, "version": 9, "content": "of another kind"}))
    with pytest.raises(CheckpointError, match="version 9 .* expected a newer offload-core"):
        written.load(written.folder)


def test_verify_finds_every_bad_file(written):
    bad = [path for path in written.files() if path.suffix == ".safetensors"][:2]
    for path in bad:
        path.write_bytes(b"\1" + written.bytes[path][1:])
    found = [str(error) for error in Checkpoint(written.new).errors()]
    assert len(found) == 2
    assert all(path.name in text for path, text in zip(bad, found, strict=True))
