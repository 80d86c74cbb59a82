"""Two machines with a rank each, started as by Slurm, of which one is cut off in the middle of a step."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.launched import BATCH, CUT, OPEN_MPI, SAVED, SLURM, STEPS, TORCHRUN
from tests.support.machines import Cluster, NotPossible

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 120
"""Seconds that nothing here takes, unless it hangs."""


@contextmanager
def machines(folder: Path, **options: bool) -> Iterator[Cluster]:
    try:
        with Cluster(folder, **options) as cluster:
            yield cluster
    except NotPossible as reason:
        pytest.skip(f"this system makes no machines of its own: {reason}")


def srun(cluster: Cluster, *program: str) -> "list[subprocess.Popen[str]]":
    """A task on each machine, with the variables that srun sets."""
    clean = {
        name: value for name, value in os.environ.items() if name not in {**TORCHRUN, **OPEN_MPI, **SLURM, **BATCH}
    }
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    step = {**SLURM, "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0",
            "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "node[01-02]"}  # fmt: skip
    return [
        cluster.start(i, [sys.executable, *program],
                      {**clean, **step, "PYTHONPATH": path, "SLURM_PROCID": str(i), "SLURM_NODEID": str(i)})
        for i in range(2)
    ]  # fmt: skip


def outcome(processes: "list[subprocess.Popen[str]]") -> list[tuple[int, str]]:
    """Return the exit code and the error output of each process. Raise if one hangs."""
    try:
        return [
            (process.returncode, said) for process in processes for said in [process.communicate(timeout=DEADLINE)[1]]
        ]
    finally:
        for process in processes:
            process.kill()


def wait_for(files: list[Path], processes: "list[subprocess.Popen[str]]") -> None:
    deadline = time.monotonic() + DEADLINE
    while not all(file.exists() for file in files):
        if any(process.poll() is not None for process in processes) or time.monotonic() > deadline:
            pytest.fail(f"{files} did not come: {outcome(processes)}")
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("framework", "cut_off_in"),
    [("torch", "bucket 0: exchange of gradients"), ("jax", "what gradients there are")],
)
def test_a_machine_that_is_cut_off_ends_both_with_an_error_and_both_resume_bit_for_bit(
    framework: str, cut_off_in: str, tmp_path: Path
) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    worker = [str(ROOT / "tests" / "workers" / "two_hosts_worker.py"), framework]
    with machines(tmp_path, finds_itself=framework == "jax") as cluster:
        processes = srun(cluster, *worker, "first", str(tmp_path))
        wait_for([tmp_path / f"midway-{rank}" for rank in (0, 1)], processes)
        cluster.cut()
        (tmp_path / "cut").touch()
        for rank, (code, said) in enumerate(outcome(processes)):
            assert code == 1, said
            errors = [line for line in said.splitlines() if "CollectiveError: " in line]
            assert len(errors) == 1, said
            assert f"CollectiveError: rank {rank}: {cut_off_in} failed (" in errors[0]
            assert errors[0].endswith("end this run and resume from the last checkpoint")
            assert "Check failure" not in said, "JAX ended the process before anybody said why"

        cluster.mend()
        for code, said in outcome(srun(cluster, *worker, "resumed", str(tmp_path))):
            assert code == 0, said
    straight, resumed = (
        [json.loads((tmp_path / f"{phase}-{rank}.json").read_text()) for rank in (0, 1)]
        for phase in ("first", "resumed")
    )
    assert straight[0] == straight[1]
    assert len(set(straight[0])) == STEPS > CUT >= SAVED
    assert resumed == [straight[0][SAVED:]] * 2
