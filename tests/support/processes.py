"""Runs the workers in tests/workers/, one process a rank."""

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120
"""After which the ranks of a run are ended."""


def run(
    scenario: str,
    world_size: int,
    folder: Path,
    worker: str = "rank_worker.py",
    *,
    alone: bool = False,
    root: Path = ROOT,
) -> list[dict | None]:
    """The result of each rank; None where it did not live to write one.

    Ranks are forks of a process that has imported torch, so that a scenario takes its own time and not that of imports;
    ``alone``: processes of their own, for scenarios that measure memory. ``root`` has the packages that these import.
    """
    command = [str(ROOT / "tests" / "workers" / worker), scenario]
    commands = [[*command, str(rank), str(world_size), str(folder)] for rank in range(world_size)]
    with tempfile.TemporaryDirectory() as logs:
        files = [Path(logs) / str(rank) for rank in range(world_size)]
        if alone or root != ROOT:
            _started(commands, files, root)
        else:
            _forked(commands, files)
        said = [file.read_text(errors="replace") if file.exists() else "" for file in files]
    results = []
    for rank, log in enumerate(said):
        file = folder / f"{rank}.json"
        results.append(json.loads(file.read_text()) if file.exists() else None)
        if not file.exists() and not scenario.startswith("killed"):
            raise AssertionError(f"rank {rank} ended without a result:\n{log}")
    return results


def _environment(root: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}


def _started(commands: list[list[str]], logs: list[Path], root: Path) -> None:
    processes = []
    for command, log in zip(commands, logs, strict=True):
        with log.open("wb") as file:
            processes.append(subprocess.Popen([sys.executable, *command], env=_environment(root), stderr=file))
    try:
        for process in processes:
            process.wait(timeout=SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.wait()


_servers: list[subprocess.Popen] = []
"""None or one; it starts with the first run and ends with this process."""


def _forked(commands: list[list[str]], logs: list[Path]) -> None:
    if not _servers:
        server = [sys.executable, str(ROOT / "tests" / "support" / "fork_server.py")]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        _servers.append(subprocess.Popen(server, env=_environment(ROOT), start_new_session=True, **pipes))
    [server] = _servers
    ranks = [{"command": command, "log": str(log)} for command, log in zip(commands, logs, strict=True)]
    try:
        print(
            json.dumps({"seconds": SECONDS, "environment": _environment(ROOT), "ranks": ranks}),
            file=server.stdin,
            flush=True,
        )
        assert server.stdout.readline(), "the process that forks ranks has ended"
    except BaseException:  # of a run that was broken off, the ranks too
        _end()
        raise


@atexit.register
def _end() -> None:
    while _servers:
        server = _servers.pop()
        os.killpg(server.pid, signal.SIGKILL)
        server.communicate()
