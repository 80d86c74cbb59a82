"""ZeRO in JAX: ranks are devices of a mesh, of one process or of two.

The number of devices is settled when JAX starts, so the laws of ``tests/support/jax_laws`` are checked in processes of
their own, all those that were asked for in one run.
"""

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.jax_laws import ONE_PROCESS, TWO_PROCESSES
from tests.support.processes import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2000)]

WORKER = ROOT / "tests" / "workers" / "jax_mesh_worker.py"


def run_workers(folder, laws, n_devices, n_processes):
    """What became of these laws, one dictionary a process: the traceback of a failure or None, by the law's name."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    workers, results = [], [folder / f"{process}.jsonl" for process in range(n_processes)]
    for process, result in enumerate(results):
        peers = [address, str(process)] if n_processes > 1 else []
        command = [sys.executable, str(WORKER), str(result), str(n_devices), ",".join(laws), *peers]
        with result.with_suffix(".log").open("w") as log:
            workers.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    try:
        for worker in workers:
            worker.wait(timeout=1800)
    finally:
        for worker in workers:
            worker.kill()
    found = []
    for worker, result in zip(workers, results, strict=True):
        found.append(dict(map(json.loads, result.read_text().splitlines() if result.exists() else [])))
        end = f"the process ended with {worker.returncode} before this law was checked:\n"
        found[-1] |= dict.fromkeys(laws[len(found[-1]) :], end + result.with_suffix(".log").read_text()[-3000:])
    return found


RUNS = {"test_on_eight_devices": (8, 1), "test_in_two_processes": (2, 2)}
"""Devices a process and processes, by the test that asks for what becomes of its laws there."""


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """Those laws that are asked for, all runs at once: they mostly compile, each process on one core."""
    asked = {name: [] for name in RUNS}
    for item in request.session.items:
        if getattr(item, "originalname", None) in asked:
            asked[item.originalname].append(item.callspec.params["law"])
    with ThreadPoolExecutor() as pool:
        return {
            name: pool.submit(run_workers, tmp_path_factory.mktemp(name), laws, *RUNS[name])
            for name, laws in asked.items()
            if laws
        }


def check(law, outcomes):
    for process, outcome in enumerate(outcomes.result()):
        if outcome[law] is not None:
            pytest.fail(f"in process {process}:\n{outcome[law]}", pytrace=False)


@pytest.mark.parametrize("law", [law.__name__ for law in ONE_PROCESS])
def test_on_eight_devices(law, outcomes):
    check(law, outcomes["test_on_eight_devices"])


@pytest.mark.parametrize("law", [law.__name__ for law in TWO_PROCESSES])
def test_in_two_processes(law, outcomes):
    check(law, outcomes["test_in_two_processes"])


def test_no_law_was_dropped():
    """No name stands for two laws, and a theme that is no longer imported would take its laws along."""
    for laws, count in ((ONE_PROCESS, 80), (TWO_PROCESSES, 37)):
        assert len({law.__name__ for law in laws}) == len(laws) == count
