"""``python -m offload_core prove``: one small training in about eighty ways, and the SHA-256 of what each has made."""

import argparse
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ..errors import ConfigError
from ..memory.host_memory import format_bytes
from ..native.kernels import kernel_info
from ..prove.runner import Result, Runner, installed
from ..prove.ways import Run, Task, Way, tasks
from ..support.launchers import refuse_if_launched
from .machine import describe

HELP = "train one small model in many ways, and compare their bits"
EXAMPLE = """example: all ways, on the processor, in two minutes
  python -m offload_core prove
a few of them:
  python -m offload_core prove --quick
on a GPU:
  python -m offload_core prove --device cuda"""
DIFFER = 1
INTERRUPTED = 130
SPACE = 100 * 10**6
"""Bytes of the folder that the ways take, at most."""
ONE_WAY = 10 * 10**6
"""Those of one way."""
WIDTH = 58
"""Columns of the name of a way."""
_DIFFERS = {False: "DIFFERS", True: "differs"}
"""The word for other bits, by whether they are another library's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="a few ways, in half a minute")
    parser.add_argument("--device", default="cpu", help="torch's device, such as cuda; JAX takes its default one then")
    parser.add_argument(
        "--folder", type=Path, metavar="FOLDER", help="for 100 MB of temporary files (default: that of the system)"
    )


def run(args: argparse.Namespace) -> int:
    refuse_if_launched("this command to be started once, as it starts ranks itself")
    frontends = [name for name, found in installed().items() if found]
    if not frontends:
        raise ConfigError("prove: neither torch nor jax is installed; expected one: pip install 'offload-core[torch]'")
    device = "cpu" if args.device.startswith("cpu:") else args.device
    if args.folder is not None and not args.folder.is_dir():
        raise ConfigError(f"--folder {args.folder}: there is no such folder; expected one that exists")
    with tempfile.TemporaryDirectory(prefix="offload-core-prove-", dir=args.folder) as name:
        check_space(name, SPACE)
        runner = Runner(Path(name), device, frontends)
        check_device(runner, device, frontends)
        report = Report()
        try:
            for task in tasks(kernel_info().supported):
                report.begin(task)
                for way in task.ways:
                    if way.quick or not args.quick:
                        result = runner.run(task, way)
                        if result.failed:
                            check_space(name, ONE_WAY)
                        report.say(task, result)
        except KeyboardInterrupt:
            print("\ninterrupted")
            report.end(" so far")
            return INTERRUPTED
    return report.end()


def check_space(folder: str, n_bytes: int) -> None:
    """Raise :class:`ConfigError` if the disk of this folder has less free."""
    if (free := shutil.disk_usage(folder).free) < n_bytes:
        raise ConfigError(
            f"the disk of {Path(folder).parent} has {format_bytes(free)} free, expected {format_bytes(n_bytes)}; free "
            "some, or name another folder: --folder FOLDER"
        )


def check_device(runner: Runner, device: str, frontends: Sequence[str]) -> None:
    """Raise :class:`ConfigError` if torch is installed and lacks this device."""
    if device != "cpu" and "torch" in frontends:
        result = runner.run(Task("device", {}, ()), Way("", (Run("usable"),)))
        if result.failed:
            raise ConfigError(
                f"--device {device}: torch cannot use it here ({result.failed}); expected one that this torch has: "
                "cpu, or cuda with a GPU and a build of torch for it"
            )


class Report:
    """The table, a line as each way ends."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._reference: Result | None = None
        """The first way of the present task that ran."""
        self._heading = ""
        """Of a task of which no way has ended."""
        self._ran: Counter[bool] = Counter()
        """The ways that ran, by whether they were compared with an earlier one."""
        self._left_out: Counter[str] = Counter()
        """The number of ways by the reason why they were left out."""
        self._others: list[str] = []
        """What is to be said of the ways that differ or have failed."""
        about = describe()
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items() if version)
        print(f"{about['cpu']}, {about['cores']} processors, {about['instruction set']}; {versions}")
        print("small models, 6 updates each; ways of one group are to have the same SHA-256 of weights and states")
        print(f"\n  {'way':<{WIDTH}} {'time':>7}  SHA-256, 16 of 64 digits")

    def begin(self, task: Task) -> None:
        about = "other libraries, for comparison" if task.contrast else task.about
        self._reference, self._heading = None, f"\n{task.name}{f' ({about})' * bool(about)}\n"

    def say(self, task: Task, result: Result) -> None:
        print(end=self._heading)
        self._heading = ""
        name = result.way.name
        line = f"  {name:<{WIDTH}} {result.seconds:5.1f} s  "
        if result.left_out:
            self._left_out[result.left_out] += 1
            print(f"{line}left out: {result.left_out}", flush=True)
            return
        if self._reference is None and not result.failed:
            self._reference = result
            verdict = "to compare with"
        elif result.failed:
            verdict = "failed"
        else:
            assert self._reference is not None
            verdict = "equal" if result.digest == self._reference.digest else _DIFFERS[task.contrast]
        print(f"{line}{'-' * 16 if result.failed else result.digest[:16]}  {verdict}", flush=True)
        if result.failed:
            print(f"      {result.failed}", flush=True)
        if task.contrast:
            return
        self._ran[verdict != "to compare with"] += 1
        if verdict not in (_DIFFERS[False], "failed"):
            return
        self._others.append(f"{verdict.upper()}: {task.name}: {name}")
        if self._reference is not None and not result.failed:
            print(*_some([*result.differences(self._reference)]), sep="\n", flush=True)

    def end(self, so_far: str = "") -> int:
        """Print the last lines, and return the exit status."""
        seconds = time.monotonic() - self._begin
        print("", *(f"{n} left out: {why}" for why, n in self._left_out.items()), sep="\n")
        if self._others:
            print(*self._others, sep="\n")
            n = self._ran[True] + self._ran[False]
            print(f"{len(self._others)} of {n} ways differ or failed{so_far}, in {seconds:.0f} s")
            return DIFFER
        print(
            f"{self._ran[True]} ways have the bits of the {self._ran[False]} that they were compared with{so_far}, in "
            f"{seconds:.0f} s"
        )
        return 0


def _some(lines: Sequence[str], most: int = 2) -> list[str]:
    more = [f"and {len(lines) - most} arrays more"] * (len(lines) > most)
    return [f"      {line}" for line in (*lines[:most], *more)]
