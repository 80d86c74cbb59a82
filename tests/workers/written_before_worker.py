"""One rank that saves as tests/support/written_before.py says, or goes on from it: SCENARIO RANK WORLD_SIZE FOLDER."""

import sys
from pathlib import Path

from tests.support import written_before
from tests.support.torch_rank import main

FOLDER = Path(sys.argv[4])


def runs(follow, values_of):
    return {
        name: follow(written_before.TorchRun(name, values_of), FOLDER / "torch" / name, FOLDER / "exports" / name)
        for name in written_before.TORCH
    }


def saved(rank, world_size):
    return runs(written_before.saved, "start")


def resumed(rank, world_size):
    return runs(written_before.resumed, "other")


if __name__ == "__main__":
    main(globals(), timeout=100)  # disks may be slow
