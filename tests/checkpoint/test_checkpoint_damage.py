"""A checkpoint that is not what was written is refused, with the file named, and the one before it still loads."""

import copy
import json
import os
import random
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from offload_core.checkpoint.checkpoints import Checkpoints, Contents, Target
from offload_core.checkpoint.folder import LATEST, MANIFEST
from offload_core.checkpoint.manifest import write_manifest
from offload_core.checkpoint.reader import Checkpoint, Want
from offload_core.checkpoint.shard_writer import Source
from offload_core.config.options import OffloadConfig
from offload_core.device.host import HostDevice
from offload_core.dtypes import BFLOAT16
from offload_core.errors import CheckpointError
from offload_core.layout.regions import Region
from offload_core.testing.thread_ranks import run_ranks
from tests.support.checkpoints import load, names_of, one_step
from tests.support.oracles import assert_same_bits
from tests.support.pipelines import Subject

SIZES = (40, 700, 1000)
RANKS = 3
FROZEN = Region((4, 5), 0, 20)


def subject_of(rank=None):
    masters = [np.random.default_rng(n).standard_normal(n).astype(np.float32) for n in SIZES]
    config = OffloadConfig(num_threads=1, schedule="serial", reduce_bucket_size=300)
    return Subject(HostDevice(), masters, [BFLOAT16] * len(SIZES), [0] * len(SIZES), config, collectives=rank)


class Written:
    """Two checkpoints of several ranks, in a folder that is damaged and mended again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

        def write(rank):
            subject = subject_of(rank)
            checkpoints = Checkpoints(subject.pipeline)
            for step in (1, 2):
                one_step(subject, step + rank.rank)
                frozen = Source.of("frozen", "param", FROZEN, np.arange(20, dtype=np.float32))
                contents = Contents(
                    names_of(subject),
                    sources=[frozen] * (rank.rank == 0),
                    shapes={"frozen": ((4, 5), np.dtype(np.float32))},
                    state={"schedule": [1.5, {"last": (1, "x")}], "table": np.arange(step)},
                    own={"seed": np.full(7, rank.rank)},
                )
                checkpoints.save(folder, contents, subject.tensors, step=step, keep=None, wait=True)

        run_ranks(RANKS, write)
        self.old, self.new = (folder / f"step-0000000{step}" for step in (1, 2))
        self.bytes = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        self.subject = subject_of()
        self.load(self.new)
        self.states = self.bits()

    def mend(self):
        for path in [*self.folder.rglob("*")]:
            if path.is_symlink() or (path.is_file() and path not in self.bytes):
                path.unlink()
        for path, data in self.bytes.items():
            if path.is_dir():
                shutil.rmtree(path)
            if not path.exists() or path.read_bytes() != data:
                path.write_bytes(data)

    def load(self, path):
        frozen = np.zeros(20, np.float32)
        target = Target("frozen", (4, 5), lambda kind: [Want("frozen", kind, FROZEN, frozen)])
        loaded = load(self.subject, path, [target])
        assert_same_bits("frozen", frozen, np.arange(20, dtype=np.float32))
        return loaded

    def bits(self):
        return [a.tobytes() for i in range(len(SIZES)) for a in self.subject.states(i)]

    def files(self, folder=None):
        return sorted(path for path in self.bytes if path.parent == (folder or self.new))

    @property
    def content(self):
        return json.loads(self.bytes[self.new / MANIFEST])["content"]

    def edit(self, content):
        """A manifest of this content, and of the right checksum."""
        with np.errstate(all="ignore"):
            write_manifest(self.new, content)


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


def nodes(value, at=()):
    """Paths to everything in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*at, key)
        yield from nodes(item, (*at, key))


def put(value, at, new):
    for key in at[:-1]:
        value = value[key]
    if new is DELETED:
        del value[at[-1]]
    else:
        value[at[-1]] = new


DELETED = object()


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


def test_damage_is_refused_and_the_file_named(written):
    refused(written, 70, 0)


@pytest.mark.slow
def test_any_damage_is_refused_and_the_file_named(written):
    refused(written, 430, 1)


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

VALUES = (
    *(None, True, -1, 0, 1, 7, 2**31, 2**53, 2**63, 2**64, -(2**63), 10**30, 0.5, -0.0, 1e308, "", "x", "\0", "\ud800"),
    *("../../../etc/passwd", "/etc/passwd", "..", ".", "manifest.json", "shard-00000-of-00003.safetensors"),
    *([], {}, [[]], {"$": "tuple", "value": 3}, {"$": "os.system", "value": "true"}, {"$": "array", "value": 10**9}),
    *({"$": "dict", "value": [[[], 1]]}, {"$": "bytes", "value": "é"}, {"$": "complex", "value": [1, 2, 3]}, DELETED),
    *([2**40], [2**31, 2**31], [2**62, 4], [-1, -1], [0], [1] * 70),
)


def deep(n):
    value = 1
    for _ in range(n):
        value = [value]
    return value


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
            written.load(written.folder)
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
