"""ZeRO in JAX: ranks are devices of a mesh, of one process or of two.

The number of devices is settled when JAX starts, so the laws of jax_mesh_worker.py and jax_stage3_laws.py are checked
in processes of their own, all of them in one run.
"""

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax_mesh_worker
import jax_stage3_laws  # noqa: F401 (adds its laws)
import pytest

pytestmark = pytest.mark.slow

WORKER = Path(jax_mesh_worker.__file__)


def run_workers(folder, n_devices, n_processes):
    """The outcomes of all laws, one dictionary a process."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(WORKER.parent.parent), str(WORKER.parent)])}
    workers = []
    for process in range(n_processes):
        peers = [address, str(process)] if n_processes > 1 else []
        command = [sys.executable, str(WORKER), str(folder / f"{process}.json"), str(n_devices), *peers]
        with (folder / f"{process}.log").open("w") as log:
            workers.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    try:
        for worker in workers:
            worker.wait(timeout=900)
    finally:
        for worker in workers:
            worker.kill()
    logs = "\n".join((folder / f"{process}.log").read_text()[-3000:] for process in range(n_processes))
    assert [worker.returncode for worker in workers] == [0] * n_processes, logs
    return [json.loads((folder / f"{process}.json").read_text()) for process in range(n_processes)]


RUNS = {"test_on_eight_devices": (8, 1), "test_in_two_processes": (2, 2)}
"""Devices a process and processes, by the test that asks for their outcomes."""


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """Those runs that are asked for, at once: they mostly compile, each process on one core."""
    asked = {item.originalname for item in request.session.items} & set(RUNS)
    with ThreadPoolExecutor() as pool:
        return {name: pool.submit(run_workers, tmp_path_factory.mktemp(name), *RUNS[name]) for name in asked}


@pytest.mark.parametrize("law", [check.__name__ for check in jax_mesh_worker.ONE_PROCESS])
def test_on_eight_devices(law, outcomes):
    for outcome in outcomes["test_on_eight_devices"].result():
        assert outcome[law] == "passed", outcome[law]


@pytest.mark.parametrize("law", [check.__name__ for check in jax_mesh_worker.TWO_PROCESSES])
def test_in_two_processes(law, outcomes):
    for outcome in outcomes["test_in_two_processes"].result():
        assert outcome[law] == "passed", outcome[law]
