"""A checkpoint that tests damage and forge: its files, the paths in its manifest, and values to put there."""

import json
import shutil
from pathlib import Path

import numpy as np

from offload_core.checkpoint.checkpoints import Checkpoints, Contents
from offload_core.checkpoint.loading import Target
from offload_core.checkpoint.manifest import write_manifest
from offload_core.checkpoint.reader import Want
from offload_core.checkpoint.shard_writer import Source
from offload_core.config.options import OffloadConfig
from offload_core.device.host import HostDevice
from offload_core.dtypes import BFLOAT16
from offload_core.layout.regions import Region
from offload_core.step.state_access import StateAccess
from offload_core.support.checkpoint_folder import MANIFEST
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
            checkpoints = Checkpoints(subject.pipeline, StateAccess(subject.pipeline))
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
            whole = path.is_file() and path in self.bytes
            if path.is_symlink() or not (whole or path.is_dir()):  # a FIFO would block its reader
                path.unlink()
        for path, data in self.bytes.items():
            if path.is_dir():
                shutil.rmtree(path)
            if not path.exists() or path.stat().st_size != len(data) or path.read_bytes() != data:
                path.write_bytes(data)

    def load(self, path, *, forged=False):
        """Load, and check the values unless a forger may have moved them."""
        frozen = np.zeros(20, np.float32)
        target = Target("frozen", (4, 5), lambda kind: [Want("frozen", kind, FROZEN, frozen)])
        loaded = load(self.subject, path, [target])
        if not forged:
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
