"""One of the two processes of tests/support/jax_pair.py: FD ADDRESS NUMBER LAWS AND OPTIONS...

It is pytest itself: it collects the laws and then checks each that it is asked for, through the connection FD. The name
of a law and a folder come in; a list of outcomes other than "passed" with their texts goes out.
"""

import os
import queue
import resource
import sys
import threading
from multiprocessing.connection import Connection
from types import SimpleNamespace

import jax
import pytest
from jax._src import compiler

from tests.support.jax_pair import MEMBER


class Member:
    """Has pytest wait for what it is asked for."""

    __name__ = MEMBER  # by which pytest knows it

    def __init__(self, connection, address, number):
        self._connection, self._address, self._number = connection, address, number
        self._asked = queue.SimpleQueue()
        self._said: list[tuple[str, str]] = []
        self.folder = None

    def pytest_runtestloop(self, session):
        laws = {item.name: item for item in session.items}
        assert len(laws) == len(session.items), "two laws have the same name"
        jax.config.update("jax_num_cpu_devices", 2)
        jax.distributed.initialize(self._address, 2, self._number, coordinator_bind_address=self._address)
        threading.Thread(target=self._listen, daemon=True).start()
        while True:
            name, self.folder = self._asked.get()
            self._said = []
            session.config.hook.pytest_runtest_protocol(item=laws[name], nextitem=session)
            self._connection.send(self._said)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self._said.append(("failed", report.longreprtext))
        elif report.skipped:
            self._said.append(("skipped", report.longrepr[2]))

    def _listen(self):
        """End with the process that asks, also in the middle of a law that waits for the other for ever."""
        while True:
            try:
                self._asked.put(self._connection.recv())
            except (EOFError, ConnectionError):
                os._exit(0)


def main(fd, address, number, *laws):
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # of a process that is ended by SIGABRT
    jax.config.update("jax_platforms", "cpu")
    compiler.distributed = SimpleNamespace(global_state=SimpleNamespace(process_id=0))  # keeps what it compiles, too
    member = Member(Connection(int(fd)), address, int(number))
    options = ["--capture=no", "-ppytest_timeout", "--timeout=0", "-pno:cacheprovider", f"--basetemp=made-{number}"]
    sys.exit(pytest.main([*laws, *options], plugins=[member]))


if __name__ == "__main__":
    main(*sys.argv[1:])
