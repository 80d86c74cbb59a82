"""Laws of the JAX front end on a mesh: of eight devices of this process, or of two processes with two devices each.

A law is a test. ``@processes(2)`` of ``tests.support.jax_meshes`` has two processes check it, which the first such law
starts; ``@processes(1, 2)`` has it checked in both ways, and without it one process does.
"""

from pathlib import Path

import jax
import pytest

from tests import sampling
from tests.support.jax_pair import MEMBER, Pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    here = Path(__file__).parent
    laws = [*here.glob("test_*.py"), here / "asked_for.py"]
    options = [f"--draw={sampling.draw}", *["--whole"] * sampling.whole]
    pair = Pair(tmp_path_factory.mktemp("pair"), *laws, options=options)
    yield pair
    pair.close()


@pytest.fixture(autouse=True)
def processes(request):
    """The number of processes that check this law."""
    if jax.default_backend() != "cpu":
        pytest.skip("laws on meshes are checked on CPU devices: JAX_PLATFORMS=cpu pytest tests/jax_frontend/mesh")
    return getattr(request, "param", 1)


@pytest.fixture
def folder(request, tmp_path):
    """A folder that all processes of a law share."""
    member = request.config.pluginmanager.get_plugin(MEMBER)
    return tmp_path if member is None else member.folder


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Take ``slow(..., processes=2)`` off the law in one process."""
    for item in items:
        for mark in [mark for mark in item.own_markers if mark.name == "slow" and "processes" in mark.kwargs]:
            if mark.kwargs["processes"] != item.callspec.params["processes"]:
                item.own_markers.remove(mark)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if pyfuncitem.funcargs["processes"] == 1 or pyfuncitem.config.pluginmanager.has_plugin(MEMBER):
        return None
    pyfuncitem._request.getfixturevalue("pair").check(pyfuncitem.name, pyfuncitem.funcargs.get("folder"))
    return True
