"""Runs functions of tests, and commands, in processes of their own; each rank is one."""

import atexit
import json
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support import bodies, late_stores

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 240
"""After which processes that hang are ended, and say where."""
GRACE = 20
"""Seconds that the other ranks have to end when one has failed."""


def free_port() -> int:
    """Return a port of this machine that nothing uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def on_ranks(
    world_size: int,
    *,
    killed: Collection[int] = (),
    alone: bool = False,
    root: Path = ROOT,
    seconds: float = SECONDS,
    server: "Callable[[], ForkServer] | None" = None,
    **options: Any,
) -> Callable[[Callable[[int], Any]], list[Any]]:
    """Run a function as each rank of a process group; its name is then the list of what the ranks have returned::

        @on_ranks(2)
        def found(rank):
            return rank

        assert found == [0, 1]

    The function may use what stands around it, as far as that can be pickled. It runs in a fork of a process that has
    imported torch and the test's module: it leaves nothing behind. All random draws come from the test's. A rank that
    has returned stays as it is, and takes no part, until all have returned.

    Args:
        killed: ranks that end by a signal. They have no result: None.
        alone: processes of their own, not forks: for tests that measure memory.
        root: has the packages that they import, as processes of their own.
        server: gives the process that they are forks of; None: :func:`torch_server`.
        options: see :func:`tests.support.torch_rank.run`.

    Raises:
        AssertionError: a rank has raised an error, or ended otherwise; it says what all ranks have said.
    """

    def run(body: Callable[[int], Any]) -> list[Any]:
        __tracebackhide__ = True
        forks = not alone and root == ROOT
        job = {"modules": [body.__module__] * forks, "ranks": {"killed": [*killed], "grace": GRACE}}
        places = os.pathsep.join([str(root), environment_of(ROOT)["PYTHONPATH"]])
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "body").write_bytes(bodies.dumps(body))
            if root == ROOT:
                options.setdefault("store", late_stores.current())
            of_all = {"folder": folder, "world_size": world_size, "seed": random.randrange(2**32), **options}
            calls = [["tests.support.torch_rank", "run", {**of_all, "rank": rank}] for rank in range(world_size)]
            processes = [{"call": call, "alone": not forks} for call in calls]
            job |= {"environment": {"PYTHONPATH": places}, "seconds": seconds}
            ended = (server or torch_server)().run_all(processes, merge=True, **job)
            files = [Path(folder, str(rank)) for rank in range(world_size)]
            results = [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]
            for rank, (status, _) in enumerate(ended):
                if status != (-signal.SIGKILL if rank in killed else 0):
                    raise AssertionError(
                        "\n".join(f"rank {i} ended with {how}: {said}" for i, (how, said) in enumerate(ended))
                    )
        return results

    return run


def forked(body: Callable[[], Any]) -> Any:
    """Run a function in a fork, as :func:`on_ranks` does, without a process group; its name is then its result."""
    [result] = on_ranks(1, group=False)(lambda rank: body())
    return result


def environment_of(root: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}


class ForkServer:
    """Runs Python in forks of one process that has imported these modules already, and ends with this one.

    Args:
        options: of the interpreter.
        environment: of that process, and of all that it runs.
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
        environments: Sequence[Mapping[str, str]] = (),
        merge: bool = False,
        **job: Any,
    ) -> list[subprocess.CompletedProcess[str]]:
        """Run these commands at once, each as Python's command line has it, and wait for all.

        Args:
            environments: each command's own, besides that of all.
            merge: True has standard error come with the standard output.
            job: as of :meth:`run_all`.
        """
        processes = [{"arguments": [*map(str, command)]} for command in commands]
        for process, environment in zip(processes, environments, strict=False):
            process["environment"] = dict(environment)
        ended = self.run_all(processes, merge=merge, **job)
        return [subprocess.CompletedProcess(command, *how) for command, how in zip(commands, ended, strict=True)]

    def run_all(
        self,
        processes: Sequence[dict[str, Any]],
        *,
        folder: Path = ROOT,
        environment: Mapping[str, str] | None = None,
        seconds: float = SECONDS,
        merge: bool = False,
        **job: Any,
    ) -> list[tuple[int | str, ...]]:
        """Run processes as ``fork_server.py`` describes them; return the exit status, and the output, of each.

        Args:
            seconds: after which they are ended.
            merge: True has standard error come with the standard output.
        """
        job |= {"seconds": seconds, "folder": str(folder), "processes": processes}
        job["environment"] = environment_of(ROOT) | self._environment | (environment or {})
        with tempfile.TemporaryDirectory() as logs:
            for i, process in enumerate(processes):
                process["output"] = f"{logs}/{i}.out"
                process["errors"] = process["output"] if merge else f"{logs}/{i}.err"
            try:
                print(json.dumps(job), file=self._process.stdin, flush=True)
                answer = json.loads(self._process.stdout.readline() or '{"error": "the process that forks has ended"}')
            except BaseException:  # of a run that was broken off, its processes too
                self.close()
                raise
            assert isinstance(answer, list), answer["error"]
            files = [sorted({process["output"], process["errors"]}, reverse=True) for process in processes]
            return [
                (status, *(Path(file).read_text(errors="replace") for file in of_one))
                for status, of_one in zip(answer, files, strict=True)
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

# The last ones are what the first torch.optim.Optimizer imports, and the first group of an engine.
TORCH = ("torch.distributed", "safetensors.torch", "frontends.torch", "torch._dynamo", "psutil")


def torch_server() -> ForkServer:
    """Forks of a process that has imported torch and its front end, with one thread each, and no network."""
    global _torch_server
    if _torch_server is None or _torch_server.closed:
        _torch_server = ForkServer(*TORCH, environment={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    return _torch_server
