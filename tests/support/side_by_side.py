"""The units that pytest-xdist gives to a worker: a file of tests, or a folder whose files start the same things."""

from xdist.scheduler import LoadFileScheduling

FOLDERS = ("tests/jax_frontend/",)
"""Of JAX: the two processes that check laws on meshes take 6 s to start, and one cache of XLA has all programs."""


def unit_of(nodeid: str) -> str:
    file = nodeid.partition("::")[0]
    return next((folder for folder in FOLDERS if file.startswith(folder)), file)


class ByFileOrFolder(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)
