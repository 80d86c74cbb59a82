"""Two machines on one: namespaces of their own for network, host name and mounts, joined by a cable that can be cut.

They live as long as the processes that hold them, which end with the process that made them.
"""

import os
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

INTERFACE = "eth0"


class NotPossible(Exception):
    """This system makes no such machines, and why."""


class Machine:
    """One of them; all resolve its ``name`` to ``address``."""

    def __init__(self, name: str, address: str, made_in: "Machine | None") -> None:
        self.name, self.address = name, address
        # Who is not root is root in a user namespace, which all share: a cable needs rights over both ends.
        user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        inside = ["unshare", *user] if made_in is None or not user else [*made_in.enter("--user"), "unshare"]
        hold = ["--net", "--uts", "--mount", "sh", "-c", "echo here && exec cat"]
        try:
            self._holder = subprocess.Popen(
                [*inside, *hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        except FileNotFoundError as error:
            raise NotPossible(f"{error.filename} is not installed") from None
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        if not self._holder.stdout.readline():
            raise NotPossible(self._holder.stderr.read().decode().strip())

    def enter(self, *namespaces: str) -> list[str]:
        """Return the prefix of a command that starts in these namespaces of the machine."""
        credentials = ["--preserve-credentials"] * ("--user" in namespaces)
        return ["nsenter", f"--target={self._holder.pid}", *namespaces, *credentials, "--"]

    @property
    def inside(self) -> list[str]:
        """The prefix of a command that starts on the machine."""
        user = [] if os.geteuid() == 0 else ["--user"]
        return self.enter(*user, "--net", "--uts", "--mount")

    def run(self, *command: str) -> str:
        """Run a command that must succeed on the machine, and return its output."""
        try:
            done = subprocess.run([*self.inside, *command], capture_output=True, text=True)
        except FileNotFoundError as error:
            raise NotPossible(f"{error.filename} is not installed") from None
        if done.returncode:
            raise NotPossible(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def end(self) -> None:
        """Give it up, when its processes have ended."""
        self._holder.communicate()

    @property
    def pid(self) -> int:
        """Of the process that holds it."""
        return self._holder.pid


class Cluster:
    """Machines ``node01`` and ``node02``, where there can be such.

    Args:
        folder: for their files.
        finds_itself: whether a machine's host name leads to its address in the network, or, as Debian installs it, to
            127.0.1.1; it has another name for others then.
    """

    def __init__(self, folder: Path, *, finds_itself: bool) -> None:
        self._ends = ExitStack()
        self.machines: list[Machine] = []
        self._folder = folder
        self._finds_itself = finds_itself

    def __enter__(self) -> Self:
        with ExitStack() as on_error:
            on_error.callback(self._ends.close)
            self._make()
            on_error.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ends.close()

    def _make(self) -> None:
        for i in (1, 2):
            machine = Machine(f"node0{i}", f"10.77.0.{i}", self.machines[0] if self.machines else None)
            self._ends.callback(machine.end)
            self.machines.append(machine)
        first, second = self.machines
        first.run("ip", "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", str(second.pid))
        nobody = self._folder / "resolv.conf"
        nobody.write_text("nameserver 127.0.0.1\n")
        for machine in self.machines:
            hosts = self._folder / f"hosts-of-{machine.name}"
            own_name = machine.name if self._finds_itself else f"{machine.name}.local"
            itself = "" if self._finds_itself else f"127.0.1.1 {own_name}\n"
            others = "".join(f"{other.address} {other.name}\n" for other in self.machines)
            hosts.write_text(f"127.0.0.1 localhost\n{itself}{others}")
            machine.run("hostname", own_name)
            machine.run("mount", "--bind", str(hosts), "/etc/hosts")
            if Path("/etc/resolv.conf").exists():  # whose name servers nobody reaches from there, but waits for
                machine.run("mount", "--bind", str(nobody), "/etc/resolv.conf")
            machine.run("ip", "address", "add", f"{machine.address}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                machine.run("ip", "link", "set", interface, "up")

    def cut(self) -> None:
        """Pull the cable out of the second machine."""
        self.machines[1].run("ip", "link", "set", INTERFACE, "down")

    def mend(self) -> None:
        """Put it back."""
        self.machines[1].run("ip", "link", "set", INTERFACE, "up")

    def start(self, index: int, command: Sequence[str], environment: dict[str, str]) -> "subprocess.Popen[str]":
        """A program on one of them."""
        command = [*self.machines[index].inside, *command]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
