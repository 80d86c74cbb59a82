"""Runs the workers in tests/workers/, one process a rank."""

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
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
    if alone or root != ROOT:
        said = _started(commands, root)
    else:
        said = [done.stderr for done in torch_server().run(*commands)]
    files = [folder / f"{rank}.json" for rank in range(world_size)]
    without = {rank: said[rank] for rank, file in enumerate(files) if not file.exists()}
    if without and not scenario.startswith("killed"):  # all of them: the last to fail may be the cause
        raise AssertionError("\n".join(f"rank {rank} ended without a result:\n{log}" for rank, log in without.items()))
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


def environment_of(root: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}


def _started(commands: list[list[str]], root: Path) -> list[str]:
    """What each has said on standard error."""
    with ExitStack() as files:
        logs = [files.enter_context(tempfile.TemporaryFile("w+", errors="replace")) for _ in commands]
        processes = [
            subprocess.Popen([sys.executable, *command], env=environment_of(root), stderr=log)
            for command, log in zip(commands, logs, strict=True)
        ]
        try:
            for process in processes:
                process.wait(timeout=SECONDS)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [log.seek(0) or log.read() for log in logs]


class ForkServer:
    """Runs Python commands in forks of one process that has imported these modules already, and ends with this one.

    Args:
        options: of the interpreter.
        environment: of that process, and of all commands.
    """

    def __init__(
        self, *modules: str, options: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        self._environment = environment or {}
        command = [sys.executable, *options, str(ROOT / "tests" / "support" / "fork_server.py"), *modules]
        self._process = subprocess.Popen(
            command,
            env=environment_of(ROOT) | self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        atexit.register(self.close)

    def run(
        self,
        *commands: Sequence[str],
        folder: Path = ROOT,
        environments: Sequence[Mapping[str, str]] = (),
        seconds: float = SECONDS,
        merge: bool = False,
    ) -> list[subprocess.CompletedProcess[str]]:
        """Run these commands at once, each as Python's command line has it, and wait for all.

        Args:
            environments: each command's own, besides that of all.
            seconds: after which they are killed.
            merge: True has standard error come with the standard output.
        """
        with tempfile.TemporaryDirectory() as logs:
            outputs = [Path(logs, f"{i}.out") for i in range(len(commands))]
            errors = outputs if merge else [Path(logs, f"{i}.err") for i in range(len(commands))]
            processes = [
                {"arguments": [*map(str, command)], "output": str(output), "errors": str(error)}
                for command, output, error in zip(commands, outputs, errors, strict=True)
            ]
            for process, environment in zip(processes, environments, strict=False):
                process["environment"] = dict(environment)
            everyones = environment_of(ROOT) | self._environment
            job = {"seconds": seconds, "folder": str(folder), "environment": everyones, "processes": processes}
            try:
                print(json.dumps(job), file=self._process.stdin, flush=True)
                answer = self._process.stdout.readline()
                assert answer, "the process that forks others has ended"
            except BaseException:  # of a run that was broken off, its processes too
                self.close()
                raise
            said = [
                (output.read_text(errors="replace"), error.read_text(errors="replace"))
                for output, error in zip(outputs, errors, strict=True)
            ]
        return [
            subprocess.CompletedProcess(command, status, *texts)
            for command, status, texts in zip(commands, json.loads(answer), said, strict=True)
        ]

    def close(self) -> None:
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
        atexit.unregister(self.close)

    @property
    def closed(self) -> bool:
        return self._process.returncode is not None


_torch_server: ForkServer | None = None
"""It starts with the first run."""

# The last is what the first torch.optim.Optimizer imports.
TORCH = ("torch.distributed", "safetensors.torch", "frontends.torch", "torch._dynamo")


def torch_server() -> ForkServer:
    """Forks of a process that has imported torch and its front end."""
    global _torch_server
    if _torch_server is None or _torch_server.closed:
        _torch_server = ForkServer(*TORCH)
    return _torch_server
